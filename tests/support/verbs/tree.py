"""The guests' root directory: a Debian, a kernel with software RoCE, this checkout, and nixl's UCX, which has verbs.

From packages of Debian and PyPI alone, in build/verbs; only what changed since the last time is made again.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from debian_root import PATH, ROOT, Debian, base, check_possible, passed_on
from fresh import from_readme
from waiting import waiting

SUITE = "bookworm"
WORK = ROOT / "build" / "verbs"
TREE = WORK / "root"
INITRD = WORK / "initrd.gz"
CHECKOUT = Path("/checkout")

_PACKAGES = (
    "iproute2 kmod rdma-core ibverbs-providers procps openssh-server openssh-client busybox-static cpio redis-server"
)
# The kernel is not installed: it would bring an initrd of its own, with udev, that takes a minute without KVM.
_KERNEL = """
cd /tmp && rm -rf /kernel linux-image-*.deb
apt-get download -qq "$(apt-cache depends linux-image-amd64 | awk '/Depends/{print $2; exit}')"
dpkg -x linux-image-*.deb /kernel && rm linux-image-*.deb
ln -sfn /kernel/lib/modules /usr/lib/modules
depmod "$(ls /kernel/lib/modules)"
rm -f ~root/.ssh/id_ed25519 && mkdir -p -m 700 ~root/.ssh && ssh-keygen -q -t ed25519 -N '' -f ~root/.ssh/id_ed25519
cp ~root/.ssh/id_ed25519.pub ~root/.ssh/authorized_keys
printf 'Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n' >~root/.ssh/config
printf 'PermitUserEnvironment yes\nUseDNS no\nMaxSessions 200\nAcceptEnv *\n' >/etc/ssh/sshd_config.d/verbs.conf
mkdir -p /checkout
"""
# It mounts the host's folder, and over it a file system in memory that takes what is written.
_INITRD = """
d=$(mktemp -d) version=$(ls /kernel/lib/modules)
mkdir -p $d/bin $d/modules $d/dev $d/tree $d/memory $d/new
cp /bin/busybox $d/bin/
for wanted in virtio_pci 9p 9pnet_virtio overlay; do
  for file in $(modprobe -S $version --show-depends $wanted | awk '$1=="insmod"{print $2}'); do
    grep -qxs "${file##*/}" $d/order || { cp $file $d/modules/ && echo "${file##*/}" >>$d/order; }
  done
done
cat >$d/init <<'X'
#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
for file in $(/bin/busybox cat /order); do /bin/busybox insmod /modules/$file; done
/bin/busybox mount -t 9p -o trans=virtio,version=9p2000.L,cache=loose,msize=512000,ro tree /tree
/bin/busybox mount -t tmpfs -o size=80% memory /memory
/bin/busybox mkdir /memory/written /memory/work
/bin/busybox mount -t overlay -o lowerdir=/tree,upperdir=/memory/written,workdir=/memory/work overlay /new
exec /bin/busybox switch_root /new /bin/bash /checkout/tests/support/verbs/init.sh
X
chmod +x $d/init
cd $d && find . | cpio -o -H newc 2>/dev/null | gzip -1 >/initrd.gz
rm -rf $d
"""
# nixl's wheel names torch, of which its UCX needs nothing.
_UCX = "PIP_CONSTRAINT=constraints.txt .venv/bin/python -m pip install -q --no-deps nixl-cu12"


class Tree:
    """The root directory, as a Debian that commands are run in."""

    def __init__(self, debian: Debian) -> None:
        self._debian = debian
        self._environment = {**passed_on(), "PATH": PATH, "LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}

    def run(self, what: str, usual_s: float, script: str, folder: str = "/") -> None:
        """A shell script; its output is shown where it fails, which ends the program."""
        words = self._debian.command(["sh", "-ec", script], folder=folder)
        environment = {**self._environment, "HOME": "/root"}
        with waiting(what, usual_s):
            done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout}\n{what}: ended with {done.returncode}")

    def once(self, what: str, usual_s: float, script: str) -> None:
        """`run`, unless the script was run here before and has not changed since."""
        stamp = WORK / f"{re.sub(r'[^a-z]+', '-', what.lower())}.done"
        if not stamp.exists() or stamp.read_text() != script:
            self.run(what, usual_s, script)
            stamp.write_text(script)


def make_tree() -> None:
    """Make what is missing or has changed."""
    check_possible()
    with waiting(f"debootstrap {SUITE}", 90):
        base(SUITE)
    tree = Tree(Debian(SUITE, TREE))
    packages, _ = from_readme()
    tree.once("the guests' packages", 60, f"apt-get update -qq\n{packages} {_PACKAGES}")
    tree.once("the guests' kernel", 20, _KERNEL)
    tree.once("the guests' initrd", 5, _INITRD)
    shutil.copyfile(TREE / "initrd.gz", INITRD)
    copy_checkout()
    tree.run("make install in the guests' Debian", 240, "make install EXTRAS=bench,test", str(CHECKOUT))
    tree.once("the guests' UCX with verbs", 60, f"cd {CHECKOUT}\n{_UCX}")


def make_floor() -> None:
    """Build the program that benchmarks/rdma.py compares with: its build takes an hour in a guest that is emulated."""
    line = ".venv/bin/python -c 'from benchmarks.peers import floor; floor.program()'"
    Tree(Debian(SUITE, TREE)).run("the floor of reads", 60, line, str(CHECKOUT))


def copy_checkout() -> None:
    """Copy what is not made here, with the times of files, which make compares; and remove what is no more."""
    there = TREE / CHECKOUT.relative_to("/")
    given = [path for path in ROOT.iterdir() if path.name != "build" and not path.name.startswith(".")]
    here = [path for each in given for path in [each, *each.rglob("*")] if path.is_file()]
    files = {path.relative_to(ROOT) for path in here if "__pycache__" not in path.parts}
    for folder in {path.parts[0] for path in files if len(path.parts) > 1}:
        for old in (there / folder).rglob("*"):
            if old.is_file() and old.suffix != ".pyc" and old.relative_to(there) not in files:
                old.unlink()
    for path in files:
        target = there / path
        if not target.exists() or target.stat().st_mtime != (ROOT / path).stat().st_mtime:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, target)


if __name__ == "__main__":
    sys.exit(make_tree())

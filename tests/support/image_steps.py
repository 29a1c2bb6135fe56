"""Take the steps of deploy/Dockerfile in an empty Debian, without an engine for containers: `make image-check`.

Needs root and debootstrap. What an engine would do in a container runs in the root by chroot; with the network of this
machine, and its settings for package indexes. It prints each step, and ends with the status of the last command.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
SUITE = "bookworm"
# How this machine reaches its package indexes; an image has its own ways.
SETTINGS = (
    "/etc/pip.conf",
    "/etc/resolv.conf",
    "/etc/apt/sources.list.d/debian.sources",
    "/etc/ssl/certs",
    "/etc/apt/apt.conf.d",
)
_CERTIFICATES = "/run/certificates.pem"
PASSED_ON = ("PIP_", "SSL_", "http_", "https_")

# Arguments: chroot, which the image's PATH may not lead to; root, user, folder, and the command.
_RUN = """
chroot=$1 root=$2 user=$3 folder=$4 && shift 4 &&
mount -t proc proc "$root/proc" && mount --rbind /dev "$root/dev" && mount -t tmpfs -o size=1g tmpfs "$root/dev/shm" &&
exec "$chroot" --userspec="$user" "$root" sh -c 'cd "$0" && exec "$@"' "$folder" "$@"
"""


def steps(text: str) -> Iterator[tuple[str, str]]:
    """Instructions of a Dockerfile with their arguments, comments left out and lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, _, rest = line.strip().partition(" ")
        yield instruction.upper(), rest.strip()


class Image:
    """A root directory that is becoming one."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder = "/"
        self._user = "root"
        self._environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        self._passed_on = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        self._passed_on["PIP_CERT"] = _CERTIFICATES  # installing packages renews those of the system

    def take(self, instruction: str, rest: str) -> None:
        known = {
            "FROM": self._base,
            "WORKDIR": self._go_to,
            "COPY": self._copy,
            "ENV": self._set,
            "USER": self._become,
            "RUN": self._shell,
            "CMD": self._command,
        }
        if instruction not in known:
            raise SystemExit(f"{instruction} {rest}: this instruction is not known here")
        known[instruction](rest)

    def _base(self, base: str) -> None:
        if not base.startswith("debian:12"):
            raise SystemExit(f"FROM {base}: only Debian 12 can be made here")
        subprocess.run(
            ["debootstrap", "--variant=minbase", SUITE, str(self._root)], check=True, stdout=subprocess.DEVNULL
        )
        for setting in map(Path, SETTINGS):
            there = self._root / setting.relative_to("/")
            if setting.is_dir():
                shutil.copytree(setting, there, dirs_exist_ok=True, ignore_dangling_symlinks=True)
            elif setting.exists():
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(setting, there)
        certificates = os.environ.get("PIP_CERT", "/etc/ssl/certs/ca-certificates.crt")
        shutil.copyfile(certificates, self._root / _CERTIFICATES.lstrip("/"))

    def _go_to(self, folder: str) -> None:
        self._folder = folder
        (self._root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _copy(self, rest: str) -> None:
        *sources, target = rest.split()
        to = self._root / self._folder.lstrip("/") / target
        for source in sources:
            to.parent.mkdir(parents=True, exist_ok=True)
            leave_out = shutil.ignore_patterns("__pycache__", "*.so")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, to, dirs_exist_ok=True, ignore=leave_out)
            else:
                shutil.copy(ROOT / source, to)

    def _set(self, rest: str) -> None:
        for word in shlex.split(rest):
            name, _, value = word.partition("=")
            self._environment[name] = value

    def _become(self, name: str) -> None:
        self._environment["HOME"] = f"/home/{name}"
        self._user = name

    def _shell(self, command: str) -> None:
        self.run(["sh", "-c", command])

    def _command(self, words: str) -> None:
        self.run(json.loads(words))

    def run(self, words: list[str]) -> None:
        """As the image's user, in its folder, with its environment and a /dev/shm of a gigabyte."""
        isolated = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _RUN, "sh"]
        within = [str(shutil.which("chroot")), str(self._root), self._user, self._folder]
        done = subprocess.run([*isolated, *within, *words], env={**self._passed_on, **self._environment})
        if done.returncode:
            raise SystemExit(f"{shlex.join(words)} ended with {done.returncode}")


def main() -> None:
    for program in ("debootstrap", "chroot", "unshare"):
        if shutil.which(program) is None:
            raise SystemExit(f"{program} is missing: apt-get install debootstrap util-linux coreutils")
    if os.geteuid() != 0:
        raise SystemExit("only root can make a root directory: run it with sudo")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # it is the root directory of the image's user, too
        image = Image(Path(folder))
        for instruction, rest in steps(DOCKERFILE.read_text()):
            print(f"{instruction} {rest}", flush=True)
            image.take(instruction, rest)
    print("every step was taken")


if __name__ == "__main__":
    sys.exit(main())

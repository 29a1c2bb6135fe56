"""A Debian of its own, without an engine for containers: made by debootstrap, entered by chroot in namespaces.

Needs root and debootstrap. Nothing that this machine has installed is seen within, but its network, its /dev and /sys,
and its way to packages: apt's sources, pip's configuration, certificates. Mounts are made in a mount namespace and
processes in a pid namespace, so that all of both end with the program that started them, also when it is killed.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "debian"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_CERTIFICATES_WITHIN = Path("/usr/local/share/certificates.pem")
# Variables of this machine that are set within, too.
PASSED_ON = re.compile(r"PIP_\w+|(https?|no|all)_proxy", re.IGNORECASE)
_SOURCES = ("/etc/apt/sources.list", "/etc/apt/sources.list.d/debian.sources")
_APT = """\
APT::Get::Assume-Yes "true";
Dir::Cache::Archives "/var/cache/packages/";
"""

# Arguments: root, user, folder, how many words of mounts, these as FROM TO MODE, and the command. The shell stays:
# process 1 reaps the processes whose parent has ended. chroot without pivot_root would forbid user namespaces.
_ENTER = """
set -e
path=$PATH PATH=/usr/sbin:/usr/bin:/sbin:/bin root=$1 user=$2 folder=$3 words=$4
shift 4
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o size=4g,mode=1777 tmpfs "$root/dev/shm"
while [ "$words" -gt 0 ]; do
  mount --bind "$1" "$root$2"
  mount -o "remount,bind,$3" "$root$2"
  shift 3
  words=$((words - 3))
done
cd "$root"
pivot_root . mnt
umount -l /mnt
set +e
PATH=$path /usr/sbin/chroot --userspec="$user" / /bin/sh -c 'cd "$0" && exec "$@"' "$folder" "$@"
exit $?
"""


def check_possible() -> None:
    """Exits with a line that says what is missing."""
    if os.geteuid() != 0:
        raise SystemExit("only root can make a root directory: run it with sudo")
    needed = {"debootstrap": "debootstrap", "unshare": "util-linux", "setpriv": "util-linux", "chroot": "coreutils"}
    missing = {package for program, package in needed.items() if shutil.which(program, path=PATH) is None}
    if missing:
        raise SystemExit(f"missing: apt-get install {' '.join(sorted(missing))}")


def pip_configuration() -> dict[str, str]:
    """What pip's files say on this machine, as the variables that say the same."""
    found: dict[str, str] = {}
    files = ("/etc/xdg/pip/pip.conf", "/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf")  # the last one wins
    for file in (*files, os.environ.get("PIP_CONFIG_FILE", os.devnull)):
        parser = configparser.RawConfigParser()
        parser.read(Path(file).expanduser(), encoding="utf-8")
        for section in parser.sections():
            found |= {f"PIP_{name.upper().replace('-', '_')}": value for name, value in parser.items(section)}
    return found


def passed_on() -> dict[str, str]:
    """Variables that are set within. Certificates have a place of their own: installing packages renews Debian's."""
    found = pip_configuration() | {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
    found.pop("PIP_CONFIG_FILE", None)
    if CERTIFICATES.exists():
        found |= dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), str(_CERTIFICATES_WITHIN))
    return found


def named_paths() -> set[Path]:
    """Local files and folders that these variables name."""
    words = " ".join(passed_on().values()).split()
    paths = [Path(word.removeprefix("file://")) for word in words]
    there = [path for path in paths if path.is_absolute() and path.exists()]
    return {path.parent if path.name == "simple" else path for path in there}  # an index links to files beside it


def _namespaces(script: str, *words: str) -> list[str]:
    """A shell script in a mount and a pid namespace, which end with the process that starts it."""
    setpriv = str(shutil.which("setpriv", path=PATH))
    unshare = [str(shutil.which("unshare", path=PATH)), "--mount", "--pid", "--fork", "--kill-child"]
    return [setpriv, "--pdeathsig", "KILL", *unshare, "/bin/sh", "-c", script, "sh", *words]


def base(suite: str) -> Path:
    """What debootstrap makes, without any further package; made once. It may mount within, and then be interrupted."""
    ready = CACHE / suite
    if not ready.exists():
        unfinished = CACHE / f"{suite}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        program = str(shutil.which("debootstrap", path=PATH))
        command = [program, "--variant=minbase", suite, str(unfinished), *mirror()]
        done = subprocess.run(
            _namespaces('exec "$0" "$@"', *command),
            env={**passed_on(), "PATH": PATH},
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{done.stdout}\ndebootstrap ended with {done.returncode}")
        unfinished.rename(ready)
    return ready


def sources() -> Iterator[tuple[Path, str]]:
    """apt's own files of this machine where it is a Debian, for any suite: {suite} in place of its name."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    if release.get("ID") == "debian":
        for path in map(Path, _SOURCES):
            if path.is_file():
                yield path, path.read_text().replace(release["VERSION_CODENAME"], "{suite}")


def mirror() -> list[str]:
    """The first address of this machine's sources; none: debootstrap's own."""
    text = "\n".join(text for _, text in sources())
    return re.findall(r"^(?:URIs:|deb)\s.*?(https?://\S+)", text, re.MULTILINE)[:1]


class Debian:
    """A root directory, a new one as a copy of the base, with this machine's way to packages."""

    def __init__(self, suite: str, root: Path) -> None:
        self.root = root
        if not (root / "etc" / "debian_version").exists():
            root.mkdir(parents=True, exist_ok=True)
            root.chmod(0o755)  # the root directory of unprivileged users, too
            subprocess.run(["cp", "--archive", "--reflink=auto", f"{base(suite)}/.", str(root)], check=True)
        self._packages = CACHE / f"{suite}.packages"
        (self._packages / "partial").mkdir(parents=True, exist_ok=True)
        own = {path: text.replace("{suite}", suite) for path, text in sources()}
        for path, text in ({Path("/etc/apt/sources.list"): ""} | own if own else own).items():
            self.write(path, text)
        settings = {path: path for path in map(Path, ("/etc/resolv.conf", "/etc/hosts", CERTIFICATES))}
        settings |= {path: path for path in Path("/etc/apt/apt.conf.d").glob("*")}
        settings[_CERTIFICATES_WITHIN] = CERTIFICATES
        for target, source in settings.items():
            if source.is_file():
                self.write(target, source.read_text())
        self.write(Path("/etc/apt/apt.conf.d/zz-packages"), _APT)

    def within(self, path: Path) -> Path:
        """Where a path of this Debian is on the machine."""
        return self.root / path.relative_to("/")

    def write(self, path: Path, text: str) -> None:
        self.within(path).parent.mkdir(parents=True, exist_ok=True)
        self.within(path).write_text(text)

    def command(
        self, words: list[str], user: str = "root", folder: str = "/", mounts: Mapping[Path, Path] | None = None
    ) -> list[str]:
        """``words`` as ``user`` in ``folder``, to be run by subprocess with the environment it shall have. ``mounts``:
        folders of the machine, and where the command may write to them."""
        bound = [(path, path, "ro") for path in sorted(named_paths()) if path != _CERTIFICATES_WITHIN]
        bound += [(self._packages, Path("/var/cache/packages"), "rw")]
        bound += [(source, target, "rw") for source, target in (mounts or {}).items()]
        for source, target, _ in bound:
            there = self.within(target)
            if source.is_dir():
                there.mkdir(parents=True, exist_ok=True)
            else:
                there.parent.mkdir(parents=True, exist_ok=True)
                there.touch()
        triples = [str(word) for triple in bound for word in triple]
        return _namespaces(_ENTER, str(self.root), user, folder, str(len(triples)), *triples, *words)

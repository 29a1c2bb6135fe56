"""Install what `python benchmarks/job` and `loopback` measure with --peers, each into an environment in build/peers.

    .venv/bin/python benchmarks/install_peers.py [NAME …]

What is there already stays. System libraries that a wheel lacks are downloaded by apt and unpacked into the
environment, which needs no root and changes nothing outside. A peer that cannot be installed is skipped: the reason is
printed, kept in its folder, and shown by the benchmark; the next run tries again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from transport.bench.processes import last_line

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers.registry import ENVIRONMENTS, JOB_PEERS, PEERS, REASON_FILE, STAMP_FILE, Peer, library_path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from waiting import waiting

_LONGEST_S = 900.0
_ALL = {**PEERS, **JOB_PEERS}


class NotInstalledError(Exception):
    """A step failed; the message is the reason."""


def run(what: str, command: list[str], folder: Path) -> None:
    """One step of an installation, in ``folder``."""
    try:
        with waiting(what, 60):
            done = subprocess.run(command, cwd=folder, capture_output=True, timeout=_LONGEST_S)
    except FileNotFoundError as error:
        raise NotInstalledError(f"{what}: {error.filename} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise NotInstalledError(f"{what}: timeout, not finished within {_LONGEST_S:.0f} s") from error
    if done.returncode:
        raise NotInstalledError(f"{what} failed: {last_line(done.stderr)}")


def install(peer: Peer, home: Path) -> None:
    """Everything of one peer, from nothing."""
    run("making an environment", [sys.executable, "-P", "-m", "venv", str(home)], home.parent)
    pip = [str(home / "bin" / "python"), "-P", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for requirement in ("numpy", *peer.requirements):
        run(f"pip install {requirement}", [*pip, *requirement.split()], home)
    if peer.libraries:
        system = home / "system"
        system.mkdir()
        run(f"apt-get download {' '.join(peer.libraries)}", ["apt-get", "download", *peer.libraries], system)
        for package in system.glob("*.deb"):
            run(f"unpacking {package.name}", ["dpkg", "-x", package.name, "."], system)
            package.unlink()
    check = ["env", f"LD_LIBRARY_PATH={library_path(peer)}", str(home / "bin" / "python"), "-c"]
    script = f"import sys; sys.path.insert(0, {str(peer.folder)!r}); import {peer.script}"
    run("importing it", [*check, script], home)


def main() -> None:
    """Install the peers that are named, or all."""
    unknown = set(sys.argv[1:]) - set(_ALL)
    if unknown:
        raise SystemExit(f"unknown peers: {', '.join(sorted(unknown))}; choose some of {', '.join(_ALL)}")
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    chosen = {peer.environment: peer for name, peer in _ALL.items() if name in (sys.argv[1:] or _ALL)}
    missing = [each for each in chosen if each and not (ENVIRONMENTS / each / STAMP_FILE).exists()]
    for number, environment in enumerate(missing, 1):
        peer, home = chosen[environment], ENVIRONMENTS / environment
        shutil.rmtree(home, ignore_errors=True)
        print(f"{number} of {len(missing)}: installing {environment}, some seconds to 5 minutes …", flush=True)
        try:
            install(peer, home)
        except NotInstalledError as error:
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir()
            (home / REASON_FILE).write_text(f"{error}\n", encoding="utf-8")
            print(f"skipped {environment}: {error}", flush=True)
        else:
            (home / STAMP_FILE).touch()


if __name__ == "__main__":
    main()

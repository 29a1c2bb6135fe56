"""README's commands where a stranger stands: `make fresh`, or `fresh.py [--suite trixie] [COMMAND…]`.

A Debian of its own gets the packages that README names, by the line that README has, and a clone of HEAD. Then a user
without privileges runs README's commands there, or COMMAND… instead. Prints a line for each step, and exits with 1 when
one failed. What was fetched stays in build/debian for the next run.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from debian_root import CACHE, PATH, ROOT, Debian, base, check_possible, passed_on
from waiting import waiting

USER, HOME = "stranger", Path("/home/stranger")
FOLDER = HOME / "payload-transport"
# The last such line of a command: of pytest, of the demo.
COUNTS = re.compile(r"=* ?(\d+ (?:failed|passed).*?) ?=*|payloads +(.*)")


def from_readme() -> tuple[str, list[str]]:
    """The line for apt, and the commands."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Two commands\n")[2].partition("\n## ")[0]
    (packages,) = re.findall(r"`(apt-get install [^`]+)`", section)
    return packages, re.findall(r"^\$ (make \w+)", section, re.MULTILINE)


class Steps:
    """Runs them, and remembers what failed."""

    def __init__(self, debian: Debian) -> None:
        self._debian = debian
        self._environment = {**passed_on(), "PATH": PATH, "LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
        self.lines: list[str] = []
        self.failed = False

    def as_root(self, command: str, usual_s: float) -> None:
        """Not shown unless it fails, which ends the run."""
        begun = time.monotonic()
        words, environment = self._debian.command(["sh", "-c", command]), {**self._environment, "HOME": "/root"}
        with waiting(command, usual_s):
            done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout}\n{command}: ended with {done.returncode}")
        self._done(command, begun, "")

    def as_user(self, command: str) -> None:
        """Shown while it runs."""
        begun, counts = time.monotonic(), ""
        print(f"$ {command}", flush=True)
        mounts = {CACHE / "pip": HOME / ".cache" / "pip"}
        environment = {**self._environment, "HOME": str(HOME), "USER": USER}
        words = self._debian.command(["sh", "-c", command], f"{USER}:{USER}", str(FOLDER), mounts)
        with subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if found := COUNTS.fullmatch(line.strip()):
                    counts = next(filter(None, found.groups()))
        self.failed |= process.returncode != 0
        self._done(command, begun, f"exit status {process.returncode}" if process.returncode else counts)

    def _done(self, command: str, begun: float, counts: str) -> None:
        self.lines.append(f"{time.monotonic() - begun:6.0f} s  {command}{f': {counts}' if counts else ''}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="bookworm", help="bookworm (Debian 12) or trixie (13)")
    parser.add_argument("commands", nargs="*", help="instead of README's")
    options = parser.parse_args()
    check_possible()
    packages, commands = from_readme()
    with waiting(f"debootstrap {options.suite}", 90):
        base(options.suite)
    root = CACHE / f"{options.suite}.root"
    shutil.rmtree(root, ignore_errors=True)
    debian = Debian(options.suite, root)
    steps = Steps(debian)
    steps.as_root("apt-get update", 10)
    steps.as_root(packages, 60)
    clone = ["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", str(debian.within(FOLDER))]
    subprocess.run(clone, check=True)
    (CACHE / "pip").mkdir(exist_ok=True)
    shutil.chown(CACHE / "pip", 1000, 1000)
    steps.as_root(f"useradd --uid 1000 --home-dir {HOME} {USER} && chown -R {USER}:{USER} {HOME}", 5)
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for command in options.commands or commands:
        steps.as_user(command)
    print(f"commit {head.stdout.strip()} in a fresh Debian, {options.suite}:", *steps.lines, sep="\n", flush=True)
    if not steps.failed:
        shutil.rmtree(root)
    return int(steps.failed)


if __name__ == "__main__":
    sys.exit(main())

"""README's commands where a stranger stands: `make fresh`, or `fresh.py [--suite trixie] ['$ COMMAND'|'# COMMAND'…]`.

A Debian of its own gets the packages that README names, by the line that README has, and a clone of HEAD. README's
commands run there, or the given ones instead: after "$ " as a user without privileges, after "# " as root, and outside
of it after "machine# ". The folder goes from one user to the other, so that it is set up once. Prints a line for each
step, and exits with 1 when one failed. What was fetched stays in build/debian for the next run.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from debian_root import CACHE, PATH, ROOT, Debian, base, check_possible, passed_on
from waiting import waiting

USER, UID, HOME = "stranger", 1000, Path("/home/stranger")
FOLDER = HOME / "payload-transport"
# The last such line of a command: of pytest, of the demo.
COUNTS = re.compile(r"=* ?(\d+ (?:failed|passed).*?) ?=*|payloads +(.*)")


def from_readme() -> tuple[str, list[str]]:
    """The line for apt, and the commands."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Two commands\n")[2].partition("\n## ")[0]
    (packages,) = re.findall(r"`(apt-get install [^`]+)`", section)
    return packages, re.findall(r"^\$ (make \w+)", section, re.MULTILINE)


class Steps:
    """A Debian with the project's folder, and the steps that were run in it."""

    def __init__(self, suite: str) -> None:
        """Make it anew. A step that fails ends the program."""
        check_possible()
        self._suite = suite
        self._owner = -1
        self._environment = {**passed_on(), "PATH": PATH, "LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
        self._begun, self._cpu = time.monotonic(), 0.0
        self.lines: list[str] = []
        self.failed = False
        with waiting(f"debootstrap {suite}", 90):
            base(suite)
        root = CACHE / f"{suite}.root"
        shutil.rmtree(root, ignore_errors=True)
        self._debian = Debian(suite, root)
        self._done(f"debootstrap {suite}")
        self.prepare("apt-get update", 10)
        self.prepare(from_readme()[0], 60)
        clone = ["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", str(self._debian.within(FOLDER))]
        subprocess.run(clone, check=True)
        (CACHE / "pip").mkdir(exist_ok=True)
        own = f"mkdir {HOME}/.cache && chown {USER}:{USER} {HOME} {HOME}/.cache"
        self.prepare(f"useradd --uid {UID} --home-dir {HOME} {USER} && {own}", 5)

    def prepare(self, command: str, usual_s: float) -> None:
        """Run it as root. It is not shown unless it fails."""
        words, environment = self._debian.command(["sh", "-c", command]), {**self._environment, "HOME": "/root"}
        with waiting(command, usual_s):
            done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout}\n{command}: ended with {done.returncode}")
        self._done(command)

    def run(self, prompt_and_command: str) -> None:
        """Run it in the project's folder, as the user whose prompt it has. It is shown while it runs."""
        print(prompt_and_command, flush=True)
        prompt, _, command = prompt_and_command.partition(" ")
        words, environment = ["sh", "-c", command], dict(os.environ)
        if prompt != "machine#":
            user, uid, home = {"$": (USER, UID, HOME), "#": ("root", 0, Path("/root"))}[prompt]
            self._give_to(uid)
            mounts = {CACHE / "pip": home / ".cache" / "pip"}
            environment = {**self._environment, "HOME": str(home), "USER": user}
            words = self._debian.command(words, f"{user}:{user}", str(FOLDER), mounts)
        counts = ""
        with subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if found := COUNTS.fullmatch(line.strip()):
                    counts = next(filter(None, found.groups()))
        self.failed |= process.returncode != 0
        status = [f"exit status {process.returncode}"] if process.returncode else []
        self._done(prompt_and_command, *status, *filter(None, [counts]))

    def _give_to(self, uid: int) -> None:
        """The folder, and what pip keeps, which it uses only where it is its user's own."""
        if uid != self._owner:
            folders = (str(self._debian.within(FOLDER)), str(CACHE / "pip"))
            subprocess.run(["chown", "--recursive", "--no-dereference", f"{uid}:{uid}", *folders], check=True)
            self._owner = uid

    def _done(self, command: str, *said: str) -> None:
        now, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = used.ru_utime + used.ru_stime
        times = f"{now - self._begun:6.0f} s {cpu - self._cpu:6.0f} s of CPU"
        self.lines.append(f"{times}  {': '.join((command, *said))}")
        print(self.lines[-1], flush=True)
        self._begun, self._cpu = now, cpu

    def close(self) -> int:
        """Print what was run, and return the exit status. A Debian in which something failed stays."""
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        print(f"commit {head.stdout.strip()} in a fresh Debian, {self._suite}:", *self.lines, sep="\n", flush=True)
        if not self.failed:
            shutil.rmtree(self._debian.root)
        return int(self.failed)


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="bookworm", help="bookworm (Debian 12) or trixie (13)")
    parser.add_argument("--users", default="$#", help="who runs README's commands, one after the other")
    parser.add_argument("commands", nargs="*", help="instead of README's")
    options = parser.parse_args()
    steps = Steps(options.suite)
    for command in options.commands or [f"{user} {each}" for user in options.users for each in from_readme()[1]]:
        steps.run(command)
    return steps.close()


if __name__ == "__main__":
    sys.exit(main())

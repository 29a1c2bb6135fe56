"""Take the steps of deploy/Dockerfile in an empty Debian, without an engine for containers: `make image-check`.

Needs root and debootstrap. It prints each step, and ends with the status of the last command.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from debian_root import PATH, ROOT, Debian, check_possible, passed_on

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
SUITE = "bookworm"


def steps(text: str) -> Iterator[tuple[str, str]]:
    """Instructions of a Dockerfile with their arguments, comments left out and lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, _, rest = line.strip().partition(" ")
        yield instruction.upper(), rest.strip()


class Image:
    """A root directory that is becoming one, and those of the stages before it; each is made in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._all = folder
        self._stages: dict[str, Debian] = {}

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
        name = base.partition(" AS ")[2] or "image"
        self._debian = self._stages[name] = Debian(SUITE, self._all / name)
        self._folder = "/"
        self._user = "root"
        self._environment = {**passed_on(), "PATH": PATH, "HOME": "/root"}

    def _go_to(self, folder: str) -> None:
        self._folder = folder
        self._debian.within(Path(folder)).mkdir(parents=True, exist_ok=True)

    def _copy(self, rest: str) -> None:
        *sources, target = rest.split()
        if sources[0].startswith("--from="):
            stage, source = self._stages[sources[0].removeprefix("--from=")], Path(sources[1])
            shutil.copytree(stage.within(source), self._debian.within(Path(target)), symlinks=True)
            return
        to = self._debian.within(Path(self._folder, target))
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
        """As the image's user, in its folder, with its environment."""
        done = subprocess.run(self._debian.command(words, self._user, self._folder), env=self._environment)
        if done.returncode:
            raise SystemExit(f"{shlex.join(words)} ended with {done.returncode}")


def main() -> None:
    check_possible()
    with tempfile.TemporaryDirectory() as folder:
        image = Image(Path(folder))
        for instruction, rest in steps(DOCKERFILE.read_text()):
            print(f"{instruction} {rest}", flush=True)
            image.take(instruction, rest)
    print("every step was taken")


if __name__ == "__main__":
    sys.exit(main())

"""The main job, started as users start it, and how to recognise what belongs to it."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

_MARK = "DEMO_TEST"
AT_WORK = "1000000"  # episodes: more than any test waits for


class Demo(NamedTuple):
    """A demo that was started, and how to recognise what belongs to it."""

    process: subprocess.Popen[str]
    mark: str
    temporary: Path

    def until_at_work(self) -> None:
        """Wait until the first episodes were consumed."""
        assert self.process.stderr is not None
        said = []
        for line in self.process.stderr:
            said.append(line)
            if " episodes, " in line:
                return
        pytest.fail(f"the demo ended before its first progress: {''.join(said)}")

    def finished(self) -> tuple[int, str, str]:
        """Wait for its end: exit status, standard output, standard error."""
        out, err = self.process.communicate(timeout=90)
        return self.process.returncode, out, err

    def processes(self, module: str) -> list[int]:
        """Process ids of this demo's processes that run ``module``."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment = (process / "environ").read_bytes().split(b"\0")
                arguments = (process / "cmdline").read_bytes().split(b"\0")
                if f"{_MARK}={self.mark}".encode() in environment and module.encode() in arguments:
                    found.append(int(process.name))
        return sorted(found)

    def left(self) -> list[str]:
        """What is left in its temporary directory."""
        return [path.name for path in self.temporary.rglob("*")]


@contextlib.contextmanager
def running(tmp_path: Path, *arguments: str) -> Iterator[Demo]:
    temporary = tmp_path / "temporary"
    temporary.mkdir(exist_ok=True)
    mark = secrets.token_hex(8)
    process = subprocess.Popen(
        [sys.executable, "-m", "transport", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), _MARK: mark},
    )
    try:
        with process:
            yield Demo(process, mark, temporary)
            assert process.poll() is not None, "the test must see the demo's end"
    finally:
        if process.poll() is None:
            process.kill()

"""The wall clock of the soak's processes, which can be set (clock_step.c); the machine's own is left alone."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock_step.c")


class WallClock:
    """Compiled into ``folder``; where there is no compiler the clock cannot be stepped."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self._file.write_bytes(bytes(8))
        self._library = folder / "clock_step.so"
        compiler = shutil.which("cc") or shutil.which("gcc")
        self.steps = compiler is not None and (
            subprocess.run(
                [compiler, "-shared", "-fPIC", "-O2", str(_SOURCE), "-o", str(self._library), "-ldl"],
                capture_output=True,
            ).returncode
            == 0
        )

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to go by this clock."""
        if not self.steps:
            return {}
        return {"LD_PRELOAD": str(self._library), "SOAK_CLOCK": str(self._file)}

    def step(self, offset_s: int) -> None:
        """From now on it is off by so much."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("=q", offset_s))

"""Steps of make targets that take long say so."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from waiting import waiting

PROGRAM = Path(__file__).resolve().parents[1] / "support" / "waiting.py"


def test_without_a_terminal_there_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = threading.Event()
    lines: list[str] = []

    def write(text: str, **_: object) -> None:
        lines.append(text)
        if len(lines) == 2:
            said.set()

    monkeypatch.setattr("builtins.print", write)
    with waiting("built", 100, first_s=0.001, every_s=0.001):
        assert said.wait(30)
    assert lines[0] == "built: 0 s, takes about 2 min"


@pytest.mark.parametrize("status", [0, 3])
def test_the_status_is_that_of_the_command(status: int) -> None:
    command = [sys.executable, str(PROGRAM), "what", "1", sys.executable, "-c", f"raise SystemExit({status})"]
    assert subprocess.run(command, timeout=60).returncode == status

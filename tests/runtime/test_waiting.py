"""Steps of make targets that take long say so."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from waiting import about, waiting

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


def test_a_short_step_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting("built", 100):
        pass
    assert capsys.readouterr().err == ""
    assert [about(seconds) for seconds in (20, 300)] == ["20 s", "5 min"]


@pytest.mark.parametrize("status", [0, 3])
def test_the_status_is_that_of_the_command(status: int) -> None:
    command = [sys.executable, str(PROGRAM), "what", "1", sys.executable, "-c", f"raise SystemExit({status})"]
    assert subprocess.run(command, timeout=60).returncode == status


@pytest.mark.parametrize(
    "target",
    ["$(VENV)/usable", "$(VENV)/installed", "site", "lint", "gpu-wheels", "build/faults/stamp"],
)
def test_targets_without_cases_say_how_long_they_take(target: str) -> None:
    makefile = (Path(__file__).resolve().parents[2] / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition(f"\n{target}:")[2].partition("\n\n")[0]
    assert "$(WAITING)" in recipe

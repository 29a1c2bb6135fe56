"""An end that takes long says what it waits for, and gives up at its limit with all stacks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from transport.runtime.stacks import EVERY_S, FIRST_S, Slow, dump

LIMIT_S = 9.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_is_silent_first_then_tells_every_few_seconds_and_gives_up_once(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    slow = Slow("the server of ring x", LIMIT_S, clock)
    told: list[float] = []
    for tenth in range(int((LIMIT_S + 5) * 10)):
        clock.now = 100.0 + tenth / 10
        caplog.clear()
        assert slow.look("process 7") is (tenth / 10 < LIMIT_S)
        if caplog.records:
            assert "process 7" in caplog.text
            told.append(tenth / 10)
    assert told == pytest.approx([FIRST_S, FIRST_S + EVERY_S, FIRST_S + 2 * EVERY_S, FIRST_S + 3 * EVERY_S, LIMIT_S])
    stacks = capfd.readouterr().err
    assert stacks.count("test_it_is_silent_first") == 1


def test_the_stacks_have_the_tasks_of_the_loop(capfd: pytest.CaptureFixture[str]) -> None:
    async def waiting_for_nothing(event: asyncio.Event) -> None:
        await event.wait()

    async def body() -> None:
        event = asyncio.Event()
        task = asyncio.create_task(waiting_for_nothing(event))
        await asyncio.sleep(0)
        dump()
        event.set()
        await task

    asyncio.run(body())
    assert "waiting_for_nothing" in capfd.readouterr().err


def test_a_process_that_hangs_ends_with_its_stacks() -> None:
    hanging = "from transport.runtime import stacks; stacks.exit_at(0.2)\ndef hangs():\n  while True: pass\nhangs()"
    done = subprocess.run([sys.executable, "-c", hanging], capture_output=True, text=True)
    assert done.returncode == 1
    assert "in hangs" in done.stderr


@pytest.mark.parametrize("put", ["None", "object()"])
def test_a_dump_needs_no_standard_error_of_python(put: str) -> None:
    code = f"import sys; from transport.runtime.stacks import dump; sys.stderr = {put}; dump(); print('went on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "went on\n"
    assert "most recent call first" in done.stderr


def test_stacks_do_not_go_into_a_file_that_has_the_place_of_standard_error(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint"
    code = (
        f"import os; from transport.runtime.stacks import dump; at = os.open({str(file)!r}, os.O_CREAT | os.O_RDWR);"
        "assert at == 2; dump()"
    )
    subprocess.run(["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code], check=True)
    assert file.read_bytes() == b""

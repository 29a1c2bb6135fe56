"""An interrupt in the place of any line of a call that waits for the background loop: its coroutine is over then."""

from __future__ import annotations

import asyncio

import pytest
from interrupted_lines import interrupted

from transport.runtime.loop_thread import LoopThread


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # never begun
def test_an_interrupted_run_leaves_no_coroutine_on_the_loop() -> None:
    running: list[int] = []

    async def waits() -> None:
        running.append(1)
        try:
            await asyncio.sleep(0.01)
        finally:
            running.pop()

    thread = LoopThread("test")
    try:
        at = 1
        while interrupted(at, lambda: thread.run(waits())):
            assert running == [], f"interrupted in the place of line {at}"
            at += 1
        assert at > 5
        assert running == []
    finally:
        thread.close()

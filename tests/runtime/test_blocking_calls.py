"""Blocking calls in daemon threads."""

from __future__ import annotations

import asyncio
import threading
import weakref
from concurrent.futures import Future

import pytest

from transport.runtime.blocking_calls import in_thread, started
from transport.testing import run


class Model:
    """What a framework's call holds."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def save(self) -> str:
        self.go.wait()
        return "saved"


def test_the_thread_of_a_call_holds_nothing_of_it_when_its_result_is_told() -> None:
    model = Model()
    alive, go = weakref.ref(model), model.go
    future: Future[object] = started(model.save)
    del model
    held: list[bool] = []
    future.add_done_callback(lambda _: held.append(alive() is not None))
    go.set()
    assert future.result(10) == "saved"
    assert held == [False]


def test_a_call_whose_future_is_cancelled_goes_on_to_its_end() -> None:
    model = Model()

    async def cancelled() -> None:
        waits = in_thread(model.save)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        model.go.set()
        assert await in_thread(model.save) == "saved"

    run(cancelled())

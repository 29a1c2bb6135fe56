"""A data packer connects at its setup, in the background, to the rings that the directory knows of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from packers import SCHEMA, Packer, Worker, collected, write

from transport.errors import StoreUnavailableError
from transport.packer.options import ClientOptions, ServerOptions
from transport.store.directory import Directory
from transport.store.memory import MemoryStore

pytestmark = pytest.mark.ucx


def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    give_up = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up, "it did not come true"
        time.sleep(0.005)


def warmed(packer: Packer) -> None:
    """When its warm-up is over."""
    assert packer._ucxx is not None
    assert packer._ucxx.warming is not None
    packer._ucxx.warming.result(20)


@pytest.mark.parametrize("addresses", [(), ("::1",)])
def test_the_first_batch_finds_its_connections(addresses: tuple[str, ...]) -> None:
    worker, packer, directory = Worker(), Packer(), Directory(MemoryStore())
    try:
        server = ServerOptions(ports=(0, 0), directory=directory, addresses=addresses)
        worker.setup_ucxx(SCHEMA, slots=16, mode="thread", server=server)
        options = ClientOptions(directory=directory)
        packer.setup_ucxx_packer(schemas=[SCHEMA], wire={"tcp"}, client=options)
        warmed(packer)
        stood = packer.ucxx_statistics().client.links_idle
        assert stood == 16
        packer.consume(collected(packer, [write(worker, step) for step in range(1, 6)]))
        assert packer.ucxx_statistics().client.links_opened == stood
    finally:
        packer.cleanup_ucxx_packer()
        worker.cleanup_ucxx()


def test_rings_that_come_later_are_found_by_looking_again() -> None:
    worker, packer, directory = Worker(), Packer(), Directory(MemoryStore())
    try:
        options = ClientOptions(directory=directory)
        packer.setup_ucxx_packer(schemas=[SCHEMA], wire={"tcp"}, client=options)
        server = ServerOptions(directory=directory)
        worker.setup_ucxx(SCHEMA, slots=4, mode="thread", server=server)
        until(lambda: packer.ucxx_statistics().client.links_idle == 8)
    finally:
        packer.cleanup_ucxx_packer()
        worker.cleanup_ucxx()


class Unreachable(MemoryStore):
    """A store whose server is away."""

    def scan(self, prefix: str) -> Any:
        raise StoreUnavailableError("the store is away")


def test_a_directory_that_cannot_be_asked_disturbs_nothing() -> None:
    worker, packer = Worker(), Packer()
    try:
        worker.setup_ucxx(SCHEMA, slots=4, mode="thread")
        options = ClientOptions(directory=Directory(Unreachable()))
        packer.setup_ucxx_packer(schemas=[SCHEMA], wire={"tcp"}, client=options)
        batch = collected(packer, [write(worker, 3)])
        assert [int(payload["step"]) for payload in packer.consume(batch)] == [3]
        warmed(packer)  # it ends with the first read
    finally:
        packer.cleanup_ucxx_packer()
        worker.cleanup_ucxx()


def test_cleaning_up_does_not_wait_for_a_store_that_hangs() -> None:
    asked, answers = threading.Event(), threading.Event()

    class Hanging(MemoryStore):
        def scan(self, prefix: str) -> Any:
            asked.set()
            answers.wait(60)
            return super().scan(prefix)

    packer = Packer()
    try:
        packer.setup_ucxx_packer(schemas=[SCHEMA], wire={"tcp"}, client=ClientOptions(directory=Directory(Hanging())))
        assert asked.wait(20)
        packer.cleanup_ucxx_packer()
        assert not answers.is_set()
    finally:
        answers.set()

"""The store in a named Ray actor: the common contract, its directory, and what it says when something is missing."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import eventually
from store_conformance import StoreConformance

from transport.errors import StoreUnavailableError, UsageError

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install ray", allow_module_level=True)

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray

from transport.adapters import ray as adapter

# Ray leaves sockets and files of its own to the garbage collector.
pytestmark = [
    pytest.mark.adapters("ray"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no worker has this folder on its path


class ClockedRecords(adapter.Records):
    """Its clock can be put forward."""

    def __init__(self) -> None:
        self._ahead_s = 0.0
        super().__init__(lambda: time.monotonic() + self._ahead_s)

    async def advance(self, seconds: float) -> None:
        self._ahead_s += seconds
        self._has_changed()


@pytest.fixture(autouse=True)
def leak_check() -> None:
    """Not here: Ray opens descriptors and starts threads whenever it likes. The store has none of its own."""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR", object_store_memory=80 << 20)
    yield
    ray.shutdown()


class RayHarness:
    def __init__(self) -> None:
        self.name = secrets.token_hex(4)
        actor: Any = ray.remote(num_cpus=0)(ClockedRecords)
        self.actor = actor.options(name=self.name, namespace=adapter.NAMESPACE).remote()
        self.stores: list[adapter.RayStore] = []

    def open(self, *, real_time: bool = False) -> adapter.RayStore:
        self.stores.append(adapter.RayStore(self.name))
        return self.stores[-1]

    def advance(self, seconds: float) -> None:
        ray.get(self.actor.advance.remote(seconds))

    def close(self) -> None:
        for store in self.stores:
            store.close()
        ray.kill(self.actor)


@pytest.fixture
def harness() -> Iterator[RayHarness]:
    harness = RayHarness()
    yield harness
    harness.close()


class TestConformance(StoreConformance):
    pass


def test_a_second_directory_of_the_same_name_is_refused() -> None:
    handle = adapter.start_directory("twice")
    with pytest.raises(UsageError, match="give each run a name of its own"):
        adapter.start_directory("twice")
    ray.kill(handle)


def test_a_directory_that_was_not_started_is_named_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"no directory 'absent'.*start_directory\('absent'\)"):
        adapter.open_rings("absent")


def test_a_directory_that_ended_is_an_unavailable_store() -> None:
    handle = adapter.start_directory("ended")
    store = adapter.RayStore("ended")
    store.put("a", b"one")
    ray.kill(handle)
    said: list[str] = []

    def is_gone() -> bool:
        try:
            store.get("a")  # answered for as long as Ray has not carried out the kill
        except StoreUnavailableError as error:
            said.append(str(error))
        return bool(said)

    eventually(is_gone, "the directory has ended")
    assert "directory actor 'ended' is gone" in said[0]


class SilentRecords(adapter.Records):
    """It takes calls and never answers."""

    async def get_many(self, keys: list[str]) -> Any:
        await asyncio.Event().wait()


def test_a_directory_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_PATIENCE_S", 0.5)
    actor: Any = ray.remote(num_cpus=0)(SilentRecords)
    handle = actor.options(name="silent", namespace=adapter.NAMESPACE).remote()
    with pytest.raises(StoreUnavailableError, match=r"directory actor 'silent' did not answer for 0\.5 s"):
        adapter.RayStore("silent").get("a")
    ray.kill(handle)
    monkeypatch.setattr(adapter, "Records", SilentRecords)
    with pytest.raises(StoreUnavailableError, match=r"directory 'late' did not start within 0\.5 s"):
        adapter.start_directory("late")


def test_a_process_that_has_left_the_cluster_has_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = adapter.start_directory("left")
    store = adapter.RayStore("left")

    def no_cluster(*_: Any, **__: Any) -> None:
        raise ray.exceptions.RaySystemError("Ray has not been started yet")  # as `ray.get` does after `ray.shutdown`

    monkeypatch.setattr(ray, "get", no_cluster)
    with pytest.raises(StoreUnavailableError, match=r"directory actor 'left' cannot be asked: .*not been started"):
        store.get("a")
    with pytest.raises(StoreUnavailableError, match="directory 'right' did not start"):
        adapter.start_directory("right")
    monkeypatch.undo()
    ray.kill(handle)

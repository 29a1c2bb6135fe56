"""Rings find each other within a Ray cluster: a named actor holds the directory, and no other service is needed.

    handle = start_directory("job-7")                                   # the driver, or any other process, once
    worker.setup_ucxx(schema, rings=open_rings("job-7"))                # in each actor that writes
    trainer = Trainer(schema, open_rings("job-7"))                      # in each actor that trains

The actor has small records: where each ring is served, and notices. Payloads go from ring to trainer and never
through Ray. The directory lives on the node that starts it and ends with that node, or with the last handle.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from transport.claims.places import InDirectory
from transport.claims.rings import FoundRings
from transport.errors import ClosedError, MissingDependencyError, StoreUnavailableError, UsageError
from transport.runtime.installing import install
from transport.runtime.releases import require_fitting
from transport.runtime.waits import Flag
from transport.store.base import RECHECK_S, Change, Entry, Store
from transport.store.directory import Directory
from transport.store.memory import MemoryStore

require_fitting("ray")
try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise MissingDependencyError(f"the directory in a Ray actor needs Ray ({error}): {install('ray')}") from error

NAMESPACE: Final = "payload-transport"
"""Namespace of directory actors, so that every job of a cluster finds them by their names."""

LEASE_S: Final = 10.0
"""How long the record of a dead ring stays: a third of the general default, since Ray restarts its actor soon."""

_PATIENCE_S: Final = 30.0
_SLICE_S: Final = 0.5  # longest call that waits in the actor: closing the store ends a wait within it

_Row = tuple[bytes, int]


class Records:
    """The actor: a store in its memory. Its calls run one after the other; those that wait leave room for others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = MemoryStore(clock=clock)
        self._changed = asyncio.Event()

    def _has_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def get_many(self, keys: list[str]) -> list[_Row | None]:
        """See `Store.get_many`."""
        return [_row(entry) for entry in self._store.get_many(keys)]

    async def scan(self, prefix: str) -> list[tuple[str, bytes, int]]:
        """See `Store.scan`."""
        return [(key, *entry) for key, entry in self._store.scan(prefix).items()]

    async def put_many(self, changes: list[tuple[str, bytes | None, int | None, float | None]]) -> list[int] | None:
        """See `Store.put_many`."""
        versions = self._store.put_many([Change(*change) for change in changes])
        self._has_changed()
        return versions

    async def add(self, key: str, amount: int) -> int:
        """See `Store.add`."""
        value = self._store.add(key, amount)
        self._has_changed()
        return value

    async def renew(self, leases: dict[str, int], lease_s: float) -> list[str]:
        """See `Store.renew`."""
        return list(self._store.renew(leases, lease_s))

    async def watch(self, key: str, version: int, timeout_s: float) -> _Row | None:
        """See `Store.watch`."""
        give_up = time.monotonic() + timeout_s
        while True:
            changed = self._changed
            entry = self._store.get(key)
            left_s = give_up - time.monotonic()
            if left_s <= 0 or version != (entry.version if entry else 0):
                return _row(entry)
            with contextlib.suppress(TimeoutError):  # a lease may end without a write
                await asyncio.wait_for(changed.wait(), min(left_s, RECHECK_S))


def start_directory(name: str, *, namespace: str = NAMESPACE, detached: bool = False) -> Any:
    """Start the actor that holds the directory of a run, on this node; its handle. Without handles it ends.

    Args:
        name: of the run; `open_rings` and `RayStore` take the same.
        detached: it outlives the job that starts it, until `ray.kill(handle)`.

    Raises:
        UsageError: Ray is not initialised, or a directory of this name runs.
        StoreUnavailableError: Ray cannot start the actor, or not within 30 s.
    """
    _check_initialised()
    node = ray.get_runtime_context().get_node_id()
    actor = ray.remote(num_cpus=0, max_restarts=0)(Records)  # a restarted one would have forgotten its records
    try:
        handle = actor.options(
            name=name,
            namespace=namespace,
            lifetime="detached" if detached else None,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote()
        ray.get(handle.get_many.remote([]), timeout=_PATIENCE_S)
    except ValueError as error:
        raise UsageError(f"directory {name!r}: {error}; give each run a name of its own") from None
    except GetTimeoutError:
        ray.kill(handle)
        raise StoreUnavailableError(
            f"directory {name!r} did not start within {_PATIENCE_S:g} s; look at the cluster's logs (ray status)"
        ) from None
    except RayError as error:
        raise StoreUnavailableError(f"directory {name!r} did not start: {error}") from None
    return handle


class RayStore(Store):
    """The records of a directory actor. Thread-safe; for any process that takes part in the cluster."""

    def __init__(self, name: str, *, namespace: str = NAMESPACE) -> None:
        _check_initialised()
        self._name = name
        try:
            self._actor = ray.get_actor(name, namespace=namespace)
        except ValueError:
            raise UsageError(
                f"no directory {name!r} in Ray's namespace {namespace!r}: call start_directory({name!r}) first, "
                "and keep its handle"
            ) from None
        self._closed = Flag()

    def __repr__(self) -> str:
        return f"<RayStore {self._name}{' closed' if self._closed.is_set else ''}>"

    def _ask(self, method: str, *arguments: Any) -> Any:
        if self._closed.is_set:
            raise ClosedError("the store is closed")
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=_PATIENCE_S)
        except RayTaskError as error:
            raise error.cause from None
        except GetTimeoutError:
            raise StoreUnavailableError(
                f"directory actor {self._name!r} did not answer for {_PATIENCE_S:g} s"
            ) from None
        except RayError as error:
            how = "is gone, with its node or its last handle" if isinstance(error, RayActorError) else "cannot be asked"
            raise StoreUnavailableError(f"directory actor {self._name!r} {how}: {error}") from None

    def _get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        return [_entry(row) for row in self._ask("get_many", list(keys))]

    def _scan(self, prefix: str) -> Mapping[str, Entry]:
        return {key: Entry(value, version) for key, value, version in self._ask("scan", prefix)}

    def _put_many(self, changes: Sequence[Change]) -> list[int] | None:
        versions: list[int] | None = self._ask("put_many", [tuple(change) for change in changes])
        return versions

    def _add(self, key: str, amount: int) -> int:
        value: int = self._ask("add", key, amount)
        return value

    def _renew(self, leases: Mapping[str, int], lease_s: float) -> set[str]:
        return set(self._ask("renew", dict(leases), lease_s))

    def _watch(self, key: str, version: int, timeout_s: float) -> Entry | None:
        give_up = time.monotonic() + timeout_s
        while True:
            left_s = give_up - time.monotonic()
            entry = _entry(self._ask("watch", key, version, max(0.0, min(left_s, _SLICE_S))))
            if left_s <= _SLICE_S or version != (entry.version if entry else 0):
                return entry

    def close(self) -> None:
        """Leave the actor, which goes on."""
        self._closed.set()


def open_rings(name: str, *, namespace: str = NAMESPACE, lease_s: float = LEASE_S) -> FoundRings:
    """Return the rings of a run as its queue, found by the directory that `start_directory` started under this name.

    Args:
        lease_s: how long a ring whose host died stays in the directory.

    Raises:
        UsageError: Ray is not initialised, or there is no directory of this name.
    """
    store = RayStore(name, namespace=namespace)
    return FoundRings(InDirectory(Directory(store, lease_s=lease_s)), store=store)


def _entry(row: _Row | None) -> Entry | None:
    return None if row is None else Entry(*row)


def _row(entry: Entry | None) -> _Row | None:
    return None if entry is None else (entry.value, entry.version)


def _check_initialised() -> None:
    if not ray.is_initialized():
        raise UsageError("Ray is not initialised in this process: call ray.init() first")

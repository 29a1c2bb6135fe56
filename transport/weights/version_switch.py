"""VersionSwitch: from one version to the next in a worker: staged, loaded, proven, and kept or taken back.

                    stage         load           keep
    SERVING or      ─────►        ─────►  MIXED ──────► IN_DOUBT ─────► SERVING
    UNTOUCHED       the version   LOADED when           KEPT: whoever decides has decided for it
                    lands beside  it is proven          else `go_back`: the version before is loaded

All workers have one mechanism, and differ in who decides whether a loaded version is kept: a manager, when it resumes a
replica; one record in a store, for all ranks of an `UpdateBarrier`; a taker, that is no member of a group, for itself.
Between load and decision a worker is *in doubt*: it proves no version.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from transport.errors import InternalError, MemberFailedError, WeightsChecksumError
from transport.runtime.error_text import error_text
from transport.weights.plan.steps import VersionProof
from transport.weights.versions.layout import weights_checksum
from transport.weights.worker_calls import check


class WorkerState(enum.StrEnum):
    """Knowledge of a worker's weights."""

    UNTOUCHED = "untouched"  # what it began with
    SERVING = "serving"  # a version: proven, and decided
    MIXED = "mixed"  # no version: a load has begun and is not proven, or its bytes were changed
    IN_DOUBT = "in doubt"  # a version: proven, not decided


class WorkerEvent(enum.StrEnum):
    """Events of the weights of a worker."""

    LOAD = "load"  # begins to change them
    PROVEN = "proven"  # they are the version whose load ended last
    KEPT = "kept"  # the version stays
    CHANGED = "changed"  # outside a load, or they have another checksum


TRANSITIONS: dict[tuple[WorkerState, WorkerEvent], WorkerState] = {
    **{(state, WorkerEvent.LOAD): WorkerState.MIXED for state in WorkerState},
    **{(state, WorkerEvent.CHANGED): WorkerState.MIXED for state in WorkerState},
    (WorkerState.MIXED, WorkerEvent.PROVEN): WorkerState.IN_DOUBT,
    (WorkerState.IN_DOUBT, WorkerEvent.KEPT): WorkerState.SERVING,
    (WorkerState.SERVING, WorkerEvent.KEPT): WorkerState.SERVING,
}


class Version(Protocol):
    """A complete version; ``checksum`` is of the tensors that this worker serves."""

    @property
    def proof(self) -> VersionProof: ...

    @property
    def checksum(self) -> int: ...


class SwitchedWorker(Protocol):
    """The part of a `RolloutWorker` that is called."""

    serves_given: bool

    def stage(self, weights: Mapping[str, Any], version: int) -> Any: ...

    def load(self, weights: Mapping[str, Any], version: int) -> Any: ...

    def served_checksum(self) -> Any: ...


V = TypeVar("V", bound=Version)


class VersionSwitch(Generic[V]):
    """The weights of one worker. One call at a time, in any thread.

    Args:
        arrays: returns the tensors of a version, by name, for this thread and the worker's.
        wait: waits for what a worker's coroutine function returns.
    """

    def __init__(
        self,
        name: str,
        worker: SwitchedWorker,
        arrays: Callable[[V], Mapping[str, Any]],
        wait: Callable[[Awaitable[Any]], Any],
    ) -> None:
        self.state = WorkerState.UNTOUCHED
        self._name = name
        self._worker = worker
        self._arrays = arrays
        self._wait = wait
        self._version: V | None = None  # that was loaded last
        self._staged: tuple[V, Any] | None = None  # what the worker's `stage` returned for it

    @property
    def version(self) -> V | None:
        """The version that is served: proven, and decided."""
        return self._version if self.state is WorkerState.SERVING else None

    def _apply(self, event: WorkerEvent) -> None:
        to = TRANSITIONS.get((self.state, event))
        if to is None:
            raise InternalError(f"{self._name}: {event.value!r} of weights that are {self.state.value!r}")
        self.state = to

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the worker; returns its answer once that is there, and raises an error that it returns."""
        answer = method(*arguments)
        if inspect.isawaitable(answer):
            answer = self._wait(answer)
        check(answer, getattr(method, "__name__", "a call"))
        return answer

    def stage(self, version: V) -> None:
        """Have the worker take a version beside the one that is served; what it made of it is proven."""
        self._staged = None
        self._staged = version, self._made(version)

    def drop(self) -> None:
        """Forget what was staged."""
        self._staged = None

    def load(self, version: V) -> None:
        """Load a version and prove it: it is in doubt then."""
        staged, self._staged = self._staged, None
        weights = staged[1] if staged is not None and staged[0] is version else self._made(version)
        self._apply(WorkerEvent.LOAD)
        self._version = version
        self.call(self._worker.load, weights, version.proof.version)
        if not self._worker.serves_given:
            self._check_served(version)
        self._apply(WorkerEvent.PROVEN)

    def keep(self) -> None:
        """Serve the version that was loaded last: it is decided that it stays."""
        self._apply(WorkerEvent.KEPT)

    def go_back(self, version: V, before: Callable[[], V | None], why: BaseException | None = None) -> None:
        """Serve the version before again, if the load of ``version`` has begun; else no method of the worker is called.

        Args:
            before: drops ``version``, when no call to the worker reads it, and returns the one before. None: there is
                none, and what was there is gone.
            why: the error that ``version`` failed with; an error of the return becomes a note of it.
        """
        try:
            self._go_back(version, before)
        except Exception as error:
            if why is None:
                raise
            why.add_note(f"{self._name}: the version before was not loaded: {error_text(error)}")

    def _go_back(self, version: V, before: Callable[[], V | None]) -> None:
        self._staged = None
        older = before()
        if self._version is not version:
            return
        if older is None:
            self.changed()
        else:
            self.load(older)
            self.keep()

    def prove(self) -> V | None:
        """Return the version that is served; None: unknown. Raises WeightsChecksumError if other weights are served."""
        version = self.version
        if version is not None and not self._worker.serves_given:
            self._check_served(version)
        return version

    def changed(self) -> None:
        """Note that the worker's weights were changed in their place: they are no version."""
        self._apply(WorkerEvent.CHANGED)

    def _check_served(self, version: V) -> None:
        found = self.call(self._worker.served_checksum)
        if found is not None and found != version.checksum:
            self.changed()
            raise WeightsChecksumError(
                f"{self._name}: checksum mismatch after loading {version.proof}: it would serve {found:016x}; its load "
                "changed or lost tensors"
            )

    def _made(self, version: V) -> Any:
        """Return what the worker's `load` gets: the version's arrays, or what its `stage` made of them, proven."""
        given = MappingProxyType(dict(self._arrays(version)))  # read-only: if it comes back, it is unchanged
        staged = self.call(self._worker.stage, given, version.proof.version)
        if staged is given:
            return dict(given)  # which a worker may hand to another process
        if not isinstance(staged, Mapping):
            raise MemberFailedError(f"{self._name}: stage returned {type(staged).__name__}, expected tensors by name")
        found = _closed_checksum(staged)
        if found != version.checksum:
            raise WeightsChecksumError(
                f"{self._name}: checksum mismatch after staging {version.proof}: {found:016x}; its stage changed or "
                "lost tensors"
            )
        return staged


def _closed_checksum(weights: Mapping[str, Any]) -> int:
    """Return `weights_checksum` of arrays that do not change any more."""
    for array in weights.values():
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    return weights_checksum(weights)

"""BarrierRank: one rank's engine and weights, on a loop of its own, for engines whose calls we do not make."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, wait
from typing import Any, Self

from transport.errors import StoreError, TransportError, WeightsError, WeightsTimeoutError
from transport.runtime import threads
from transport.runtime.loop_thread import LoopThread
from transport.weights.attempts import NO_ATTEMPT
from transport.weights.engine import WeightsEngine
from transport.weights.rank_shards import RankShards, copied_into
from transport.weights.received_weights import ReceivedWeights
from transport.weights.transfer.threads import ended, in_thread
from transport.weights.worker_calls import wait_here

LOOK_S = 1.0  # how often a rank that waits for others looks whether one has failed

Failed = Callable[[], str | None]  # why another rank has failed


class _Loads:
    """A worker that is one function."""

    serves_given = True  # nothing else is known of what it serves

    def __init__(self, load: Callable[[dict[str, Any]], object]) -> None:
        self._load = load

    def stage(self, weights: Mapping[str, Any], version: int) -> Any:
        return weights

    def load(self, weights: Mapping[str, Any], version: int) -> None:
        self._load(dict(weights))

    def served_checksum(self) -> None: ...


class _Begun:
    """A version that is being staged in a thread; ``over`` says why that is to end."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.done: Future[None] = Future()
        self.over = ""


class BarrierRank:
    """One rank of a run, as an `UpdateBarrier` drives it. All methods block; one thread at a time.

    Args:
        in_place: versions land in ``rank.tensors``.
        load: called with the tensors of a version by name, views of what has landed; default: `copied_into` the rank's,
            which have the same dtypes and shapes. It may be called again with the version before.
        options: of `WeightsEngine`.

    Attributes:
        attempt: that it takes part in.
        stopped: why it takes part in nothing any more.
    """

    def __init__(
        self,
        rank: RankShards,
        *,
        sends: bool,
        in_place: bool = False,
        load: Callable[[dict[str, Any]], object] | None = None,
        **options: Any,
    ) -> None:
        self.rank = rank.rank
        self.sends = sends
        self.tensors: Any = rank.tensors
        self.name = f"{'sender' if sends else 'receiver'} {rank.rank}"
        self.stopped = ""
        self.attempt = NO_ATTEMPT
        if in_place:
            options["in_place"] = rank.tensors
        self.engine = WeightsEngine(self.name, rank.layout, **options)
        self.load_tensors = load or (lambda arrays: copied_into(self.tensors, arrays))
        # in place the version that has landed is loaded
        worker = _Loads(lambda arrays: None if in_place else self.load_tensors(arrays))
        self._weights = ReceivedWeights(self.engine, worker, wait_here)
        self._begun: _Begun | None = None  # by `UpdateBarrier.begin`
        self._loop = LoopThread(f"weights of {self.name}")
        self._loop.closes(self.engine.close)

    @property
    def leads(self) -> bool:
        """True if it begins the attempts of all ranks."""
        return self.sends and self.rank == 0

    # --- the engine -------------------------------------------------------------------------------------------------
    def run(self, coroutine: Any, timeout_s: float | None = None) -> Any:
        """Run a coroutine of the engine."""
        return self._loop.run(coroutine, timeout_s)

    def join(self, role: Any, version: int, timeout_s: float, failed: Failed = lambda: None) -> None:
        """Connect to the ranks of this one's role. ``failed`` and errors as of `transfer`."""
        joining = self.engine.init_process_group(roles=role)
        self._within(joining, f"version {version}: not all ranks connected", timeout_s, failed)

    def transfer(self, version: int, timeout_s: float, failed: Failed = lambda: None) -> None:
        """Send or receive a version.

        failed: asked every second, in a thread, why another rank has failed; None: none has.

        Raises WeightsTimeoutError when it took longer than ``timeout_s``, WeightsError when another rank failed.
        """
        what = f"version {version} was not transferred"
        if self.sends:
            tensors = self.tensors() if callable(self.tensors) else self.tensors
            self._within(self.engine.send_weights(tensors, version), what, timeout_s, failed)
            return
        self._within(self._weights.land(version), what, timeout_s, failed)

    def _within(self, work: Coroutine[Any, Any, Any], what: str, timeout_s: float, failed: Failed) -> None:
        try:
            self.run(_unless(failed, work), timeout_s)
        except TimeoutError as error:
            if isinstance(error, TransportError):
                raise
            raise WeightsTimeoutError(
                f"{self.name}: {what} within {timeout_s:g} s; look at the other ranks' logs"
            ) from error

    # --- its weights ------------------------------------------------------------------------------------------------
    def load(self) -> None:
        """Load the version that has landed: it is in doubt until it is decided that it stays."""
        if not self.sends:
            self._weights.load()

    @property
    def in_doubt(self) -> bool:
        """True if it has loaded a version, and does not know whether that stays."""
        return self._weights.in_doubt

    @property
    def loaded(self) -> bool:
        """True if it has loaded the version of its attempt: it is in doubt, or an interrupt has ended its `end`."""
        return self.in_doubt or (not self.sends and bool(self.attempt.name) and self._weights.landed is None)

    @property
    def mixed(self) -> bool:
        """True if it may serve another version than the other ranks of its engine.

        A load has failed, here or on another rank, and the version before could not be loaded again; or it is in doubt.
        """
        return self._weights.mixed

    def end(self, why: BaseException | None) -> None:
        """Leave the attempt: keep what was loaded, or with ``why`` return to the version before.

        In place there is none. An error of the return becomes a note of ``why``.
        """
        if why is not None:
            self._weights.go_back(why)
        elif self._weights.landed is not None:
            self._weights.keep()
        self.run(self._weights.finalize())
        self.attempt = NO_ATTEMPT  # last, so that after an interrupt the next call finishes

    # --- staged in a thread -------------------------------------------------------------------------------------------
    def begin(self, version: int, stage: Callable[[Callable[[], str]], None]) -> None:
        """Call ``stage`` in a thread. What was begun before is over: ``stage`` gets what says so, and follows it."""
        before = self._begun
        begun = self._begun = _Begun(version)  # now: an interrupt of the start may leave the thread running

        def run() -> None:
            if before is not None:
                wait([before.done])
            try:
                stage(lambda: begun.over)
            except BaseException as error:  # raised by `staged`
                begun.done.set_exception(error)
            else:
                begun.done.set_result(None)

        try:
            threads.start(threading.Thread(target=run, name=f"stage of {self.name}"))
        except RuntimeError:  # there is no thread, which would end what was begun
            self._begun = before
            raise
        if before is not None:
            before.over = f"{self.name} began version {version}"

    def staged(self, version: int) -> bool:
        """Return whether this version is staged, once what was begun has ended; raises its error."""
        begun = self._begun
        if begun is not None:
            wait([begun.done])
            self._begun = None  # after the wait, which an interrupt may end
            if begun.version == version:
                begun.done.result()
        return bool(self.attempt.name) and self.attempt.version == version

    def close(self) -> None:
        """End what was begun, and release everything. Idempotent."""
        self.stopped = f"{self.name} was closed"
        if self._begun is not None:
            wait([self._begun.done])
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _unless(failed: Failed, work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of ``work``; WeightsError when another rank fails meanwhile.

    A store that is away says nothing about other ranks, and ``work`` does not need it: it goes on, within its time.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=LOOK_S))[0]:
            reason = None
            with contextlib.suppress(StoreError):
                reason = await in_thread(failed)
            if reason is not None and not task.done():
                raise WeightsError(reason)
        return task.result()
    finally:
        await ended(task)

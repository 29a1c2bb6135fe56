"""UpdateBarrier: ranks that send and receive shards without a manager of ours, and load a version all or none.

    def shards(model) -> RankShards:                     # yours: which rank this is, what it has or wants
        return RankShards(rank, layout, dict(model.named_parameters()))

    barrier = UpdateBarrier(store="redis://…", run="run 7", senders=256, receivers=128)
    with BarrierRank(shards(model), sends=True) as rank:  # every trainer rank; on receivers sends=False
        barrier.update(rank, version)                     # or stage, and later commit

The calls of the engines that adapters serve return nothing to the trainer. So all ranks meet in a store, at one record
(`Attempt`). The first sender begins an attempt, in which every other rank writes what `prepare` told it; then the first
sender writes everybody's role. It leads the record on when every rank has come so far and is there; a rank that fails,
or waits too long, writes why. What stands there holds for all of them. A rank that has loaded a version and cannot ask
the record is *in doubt*: it counts as mixed, keeps both versions, and asks at its next call. A rank that was started
again, or tries the same version once more, takes part in the next attempt.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

import msgspec

from transport.errors import StoreError, StoreUnavailableError, UsageError, WeightsError, WeightsTimeoutError
from transport.runtime.blocking_calls import started
from transport.runtime.error_text import error_text
from transport.runtime.hiding import hiding
from transport.store.base import ABSENT, Entry, Store
from transport.store.decision import advance
from transport.store.open import open_store
from transport.store.stored import decode, encode
from transport.weights import attempts
from transport.weights.attempts import Attempt, AttemptPhase, Step
from transport.weights.barrier_rank import LOOK_S, BarrierRank, Failed
from transport.weights.plan.steps import Metadata
from transport.weights.sharding.roles import build_topology

_THERE_S = 10.0  # lease of "I have come so far": several looks


class _Joined(msgspec.Struct, frozen=True):
    """A rank's record: it takes part in an attempt. Its role will be in the record ``role``, a name that no other
    process of this rank has.
    """

    role: str
    metadata: Metadata


class _Beside:
    """A call in a thread of its own, which is waited for at the end; its error fails the version for all ranks."""

    def __init__(self, call: Callable[[], object] | None, timeout_s: float) -> None:
        self._call = call
        self._timeout_s = timeout_s
        self._answer: Future[object] | None = None

    def failed(self) -> str | None:
        """Say why the version fails."""
        if self._answer is None or not self._answer.done() or (error := self._answer.exception()) is None:
            return None
        return f"the framework's call: {error_text(error)}"

    def __enter__(self) -> Self:
        if self._call is not None:
            self._answer = started(self._call)
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if self._answer is None or (error is not None and not isinstance(error, Exception)):
            return  # an interrupt waits for nothing
        try:
            own = self._answer.exception(self._timeout_s)
        except TimeoutError:
            own = WeightsTimeoutError(f"timeout: the framework's call did not return within {self._timeout_s:g} s")
        if own is not None and (error is None or isinstance(error, WeightsError | StoreError)):
            raise own from error


@hiding("store")
class UpdateBarrier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Meeting point of a run's ranks.

    store: URL of a store that all ranks reach. run: a name that no other run uses there.
    timeout_s: of each wait for another rank or for the framework's call, and of the transfer.
    """

    store: str
    run: str
    senders: int
    receivers: int
    timeout_s: float = 600.0

    def update(self, rank: BarrierRank, version: int) -> None:
        """`stage` and `commit`: send or receive a version, together with all other ranks; a receiver has loaded it."""
        self.stage(rank, version)
        self.commit(rank, version)

    def stage(self, rank: BarrierRank, version: int, beside: Callable[[], object] | None = None) -> None:
        """Send or receive a version, together with all other ranks. It lands beside the one that is loaded.

        Returns when all ranks have it. After a failure a receiver has the version before, except where versions land
        in place. A version that was staged before, and not committed, is dropped.

        Args:
            beside: called in a thread meanwhile, such as the framework's call that brings the receivers here. If it
                raises, the version fails for all ranks, and the error is raised.

        Raises:
            WeightsTimeoutError: a rank did not come. WeightsError: another rank failed.
            StoreError: the store was away for ``timeout_s``.
            Exception: what failed here; the others are told.
        """
        self._stage(rank, version, beside, str)

    def begin(self, rank: BarrierRank, version: int) -> None:
        """`stage` in a thread, for a receiver whose framework waits for the call; `commit` raises its error.

        What was begun before and is not committed ends: the trainer that asked for it may be gone.
        """
        if rank.in_doubt:  # here: a load is for the framework's thread
            with open_store(self.store) as store:
                self._settle(store, rank, WeightsError("not committed"))
        rank.begin(version, partial(self._stage, rank, version, None))

    def _stage(
        self, rank: BarrierRank, version: int, beside: Callable[[], object] | None, over: Callable[[], str]
    ) -> None:
        with open_store(self.store) as store, _Beside(beside, self.timeout_s) as called:
            self._settle(store, rank, WeightsError("not committed"))
            try:
                stopped = partial(self._stopped, rank, called, over)
                failed = partial(self._failed, store, rank, stopped)
                metadata = rank.run(rank.engine.prepare())
                role = self._role(store, rank, version, metadata, stopped, failed)
                rank.join(role, version, self.timeout_s, failed)
                rank.transfer(version, self.timeout_s, failed)
                self._agree(store, rank, AttemptPhase.LANDED, stopped)
            except BaseException as error:
                self._give_up(store, rank, error)
                raise

    def commit(self, rank: BarrierRank, version: int, beside: Callable[[], object] | None = None) -> None:
        """Load what `stage` or `begin` has landed, on all ranks or on none. Arguments and errors as there.

        A rank that cannot load the version before again raises its first error with a note, and is `BarrierRank.mixed`.
        So is one that does not learn what was decided; call `commit` again, or `stage` the next version: it asks then.
        """
        staged = rank.staged(version)
        with open_store(self.store) as store:
            if rank.loaded:
                attempt = rank.attempt
                found = self._settle(store, rank, WeightsError("not committed"))
                if staged and found.kept != attempt.name:
                    raise WeightsError(f"v{version}: {found.why_not(attempt.name)}")
                if staged:
                    return
            if not staged:
                why = f"{rank.name}: version {version} is not staged; call stage() first"
                found = self._record(store)
                if found.version == version:  # its process may have been started again since
                    self._advance(store, attempts.fail(found.name, why))
                raise UsageError(why)
            with _Beside(beside, self.timeout_s) as called:
                try:
                    rank.load()
                    self._agree(store, rank, AttemptPhase.LOADED, partial(self._stopped, rank, called, str))
                except BaseException as error:
                    self._give_up(store, rank, error)
                    raise
                rank.end(None)

    # --- the decision -------------------------------------------------------------------------------------------------
    def _settle(self, store: Store, rank: BarrierRank, why: BaseException) -> Attempt:
        """Fail the attempt that this rank is in, unless all have loaded it, and do as is decided; returns the record.

        StoreError: nothing is decided here.
        """
        name = rank.attempt.name
        if not name:
            return attempts.NO_ATTEMPT
        found = self._advance(store, attempts.fail(name, f"{rank.name}: {error_text(why)}"))
        rank.end(None if found.kept == name else why)
        return found

    def _give_up(self, store: Store, rank: BarrierRank, error: BaseException) -> None:
        try:
            if rank.attempt.name:
                self._settle(store, rank, error)
                return
        except StoreError as away:
            if rank.in_doubt:
                error.add_note(f"{rank.name} is in doubt whether its version stays, and asks again: {error_text(away)}")
                return
        rank.end(error)  # it has loaded nothing; where it can tell nobody, the others wait until their time is over

    def _agree(self, store: Store, rank: BarrierRank, phase: AttemptPhase, stopped: Failed) -> None:
        """Wait until every rank has come so far. WeightsError when one has failed, and then for all ranks.

        A rank that waits says so again and again: one that ended, or lost its way to the store, is not counted.
        """
        attempt = rank.attempt
        mine = self._of_rank(attempt.name, rank, phase)
        begun = time.monotonic()
        seen = ABSENT
        while True:
            left = begun + self.timeout_s - time.monotonic()
            late = f"{rank.name}: not all ranks have {phase} v{attempt.version} within {self.timeout_s:g} s"
            try:
                if left <= 0:
                    found = self._advance(store, attempts.fail(attempt.name, late))
                    if found.name == attempt.name and found.why == late:
                        raise WeightsTimeoutError(f"timeout: {late}; look at the other ranks' logs")
                elif (reason := stopped()) is not None:
                    raise WeightsError(reason)
                else:
                    store.put(mine, encode(""), lease_s=_THERE_S)
                    if rank.leads:
                        found = self._led(store, attempt, phase, left)
                    else:
                        entry = store.watch(self._key, seen, min(left, LOOK_S))
                        seen = ABSENT if entry is None else entry.version
                        found = self._read(entry)
            except StoreUnavailableError:
                if left <= 0:
                    raise
                continue
            if found.has_reached(attempt.name, phase):
                return
            if why := found.why_not(attempt.name):
                raise WeightsError(f"v{attempt.version}: {why}")

    def _led(self, store: Store, attempt: Attempt, phase: AttemptPhase, left: float) -> Attempt:
        """Lead the record on if all ranks have come so far; else wait a moment."""
        keys = self._of_all(attempt.name, phase)
        missing = next((key for key, entry in zip(keys, store.get_many(keys), strict=True) if entry is None), "")
        if not missing:
            return self._advance(store, attempts.reach(attempt.name, phase))
        store.watch(missing, ABSENT, min(left, LOOK_S / 10))
        return self._record(store)

    @staticmethod
    def _stopped(rank: BarrierRank, called: _Beside, over: Callable[[], str]) -> str | None:
        """Say why this rank takes part no more."""
        return rank.stopped or over() or called.failed() or None

    def _failed(self, store: Store, rank: BarrierRank, stopped: Failed) -> str | None:
        """Say why this attempt fails, if it does."""
        if reason := stopped():
            return reason
        attempt = rank.attempt
        why = self._record(store).why_not(attempt.name) if attempt.name else ""
        return f"v{attempt.version}: {why}" if why else None

    # --- the group ----------------------------------------------------------------------------------------------------
    def _role(
        self, store: Store, rank: BarrierRank, version: int, metadata: Metadata, stopped: Failed, failed: Failed
    ) -> Any:
        """Take part in an attempt at this version; returns this rank's role in it."""
        until = time.monotonic() + self.timeout_s
        if not rank.leads:
            return self._follow(store, rank, version, metadata, until, stopped)
        name = secrets.token_hex(8)
        rank.attempt = Attempt(name=name, version=version)
        self._advance(store, attempts.begin(name, version))
        others = [self._joined(store, key, until, failed) for key in self._of_all(name, "joined")[1:]]
        metadatas = [metadata, *(other.metadata for other in others)]
        actor, rollout = build_topology(self.senders, self.receivers, metadatas)
        mine, *roles = [*actor["roles"], *rollout["roles"]]
        for other, role in zip(others, roles, strict=True):
            self._put(store, self._name(name, "role", other.role), role)
        self._advance(store, attempts.reach(name, AttemptPhase.SENDING))
        return mine

    def _joined(self, store: Store, key: str, until: float, failed: Failed) -> _Joined:
        for value in self._values(store, key, until, failed):
            return decode(_Joined, key, value)
        raise WeightsTimeoutError(f"timeout: a rank did not write {key} in {self.timeout_s:g} s")

    def _follow(
        self, store: Store, rank: BarrierRank, version: int, metadata: Metadata, until: float, stopped: Failed
    ) -> Any:
        mine = secrets.token_hex(8)
        for value in self._values(store, self._key, until, stopped):
            found = decode(Attempt, self._key, value)
            if found.version == version and found.name != rank.attempt.name and found.phase is AttemptPhase.JOINING:
                rank.attempt = found
                self._put(store, self._of_rank(found.name, rank, "joined"), _Joined(mine, metadata))
            if found.name != rank.attempt.name:
                continue
            if found.phase is AttemptPhase.FAILED:
                raise WeightsError(f"v{version}: {found.why}")
            if found.phase is AttemptPhase.SENDING:
                key = self._name(found.name, "role", mine)
                role = store.get(key)
                if role is not None:  # else a process before this one took part in the attempt
                    return decode(list[str], key, role.value)
        raise WeightsTimeoutError(f"timeout: {rank.name}: the first sender did not begin version {version} in time")

    @staticmethod
    def _values(store: Store, key: str, until: float, failed: Failed) -> Iterator[bytes]:
        """Yield a key's value at every change and every look, until then. WeightsError when a rank has failed."""
        seen = ABSENT
        while (left := until - time.monotonic()) > 0:
            if (reason := failed()) is not None:
                raise WeightsError(reason)
            entry = store.watch(key, seen, min(left, LOOK_S))
            seen = ABSENT if entry is None else entry.version
            if entry is not None:
                yield entry.value

    # --- records ------------------------------------------------------------------------------------------------------
    @property
    def _key(self) -> str:
        return self._name("attempt")

    def _record(self, store: Store) -> Attempt:
        return self._read(store.get(self._key))

    def _read(self, entry: Entry | None) -> Attempt:
        return attempts.NO_ATTEMPT if entry is None else decode(Attempt, self._key, entry.value)

    def _advance(self, store: Store, step: Step) -> Attempt:
        return advance(store, self._key, Attempt, step) or attempts.NO_ATTEMPT

    def _put(self, store: Store, key: str, record: object) -> None:
        store.put(key, encode(record), lease_s=2 * self.timeout_s)

    def _of_rank(self, attempt: str, rank: BarrierRank, what: str) -> str:
        return self._name(attempt, what, f"{'s' if rank.sends else 'r'}{rank.rank}")

    def _of_all(self, attempt: str, what: str) -> list[str]:
        """Keys of all ranks, senders first."""
        ranks = [f"s{rank}" for rank in range(self.senders)] + [f"r{rank}" for rank in range(self.receivers)]
        return [self._name(attempt, what, rank) for rank in ranks]

    def _name(self, *what: str) -> str:
        return "/".join(("shards", self.run, *what))

"""What the adapters of inference engines share: ranks that send and receive shards without a manager of ours.

    def shards(model) -> RankShards:                     # yours: which rank this is, what it has or wants
        return RankShards(rank, layout, dict(model.named_parameters()))

    meeting = Meeting(store="redis://…", run="run 7", senders=256, receivers=128)
    with Member(shards(model), sends=True) as member:    # every trainer rank; on receivers sends=False
        meeting.update(member, version)                  # or stage, and later commit

The calls of these engines return nothing to the trainer. So all ranks meet in a store. The first sender begins an
attempt, by a random name, with which every other rank writes what `prepare` told it; then the first sender writes
everybody's role. Whether the version is loaded is one final record of the attempt, and whether it stays loaded is
another (`transport.store.decision`): the first sender writes "go" when every rank has come so far and is there; a rank
that fails, or waits too long, writes why. Whatever stands holds for all of them. A rank that was started again, or
tries the same version once more, takes part in the next attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple, Self

import msgspec

from transport.errors import (
    SchemaError,
    StoreError,
    StoreUnavailableError,
    TransportError,
    UsageError,
    WeightsError,
    WeightsTimeoutError,
)
from transport.runtime import threads
from transport.runtime.blocking_calls import started
from transport.runtime.decoders import hiding
from transport.runtime.loop_thread import LoopThread
from transport.schema import TensorSpec
from transport.store.base import ABSENT, Store
from transport.store.decision import decide, decide_all, decided, wait_decided
from transport.store.open import open_store
from transport.weights.engine import WeightsEngine
from transport.weights.sharding import shards
from transport.weights.sharding.boxes import Box
from transport.weights.sharding.layouts import Layout, LocalTensor
from transport.weights.sharding.roles import build_topology
from transport.weights.transfer.parts import check_fits
from transport.weights.transfer.threads import ended, in_thread

_LOOK_S = 1.0  # how often a rank that waits for others looks whether one has failed
_THERE_S = 10.0  # lease of "I have come so far": several looks
_PHASES = ("landed", "loaded")
_GO = b""  # no reason against it

Failed = Callable[[], str | None]  # why another rank has failed


class RankShards(NamedTuple):
    """A rank: its number among the senders or the receivers, its layout, and its tensors by the layout's names.

    Without a layout, of all ranks or of none, the first sender sends its whole model. Its ``tensors`` may then be a
    function that returns pairs of name and tensor, in an order that stays.
    """

    rank: int
    layout: Layout | None
    tensors: Mapping[str, Any] | Callable[[], Iterable[tuple[str, Any]]]


def described(path: str, *arguments: Any) -> RankShards:
    """Call a function given as "module:function". UsageError when it returns something else than `RankShards`."""
    module, _, name = path.partition(":")
    try:
        function: Callable[..., RankShards] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f'shards={path!r}: give "module:function" of a function: {error}') from error
    found = function(*arguments)
    if not isinstance(found, RankShards):
        raise UsageError(f"shards={path!r} returned {type(found).__name__}, expected RankShards")
    return found


def of_dtensors(tensors: Iterable[tuple[str, Any]]) -> tuple[Layout, dict[str, Any]]:
    """The layout and the local tensors of torch's DTensors (FSDP2), and of plain tensors, which every rank has whole.

    Placements are Shard, divided as torch does, and Replicate; UsageError for others.
    """
    local, found = [], {}
    for name, tensor in tensors:
        spec = TensorSpec(name, str(tensor.dtype).rpartition(".")[2], tuple(tensor.shape))
        placements = getattr(tensor, "placements", None)
        if placements is None:
            local.append(shards.whole(spec))
            found[name] = tensor.detach() if hasattr(tensor, "detach") else tensor
            continue
        start, size = [0] * len(spec.shape), list(spec.shape)
        for placement, rank, world in zip(
            placements, tensor.device_mesh.get_coordinate(), tensor.device_mesh.shape, strict=True
        ):
            if placement.is_replicate():
                continue
            if type(placement).__name__ != "Shard":
                raise UsageError(f"{name}: placement {placement}; Shard and Replicate can be sent")
            step = -(-size[placement.dim] // world)
            begin = min(rank * step, size[placement.dim])
            start[placement.dim] += begin
            size[placement.dim] = min(step, size[placement.dim] - begin)
        part: LocalTensor = shards.box(spec, Box(tuple(start), tuple(size)))
        if math.prod(size):
            local.append(part)
            found[name] = tensor.to_local().detach()
    return Layout.of(local), found


class Member:
    """One rank's engine, on a loop of its own. All methods block; one thread at a time.

    Args:
        in_place: versions land in ``rank.tensors``.
        load: called with the tensors of a version by name, views of what has landed; default: `copied_into` the rank's,
            which have the same dtypes and shapes. It may be called again with the version before.
        options: of `WeightsEngine`.
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
        if in_place:
            options["in_place"] = rank.tensors
        self.engine = WeightsEngine(self.name, rank.layout, **options)
        self._load = load or (lambda arrays: copied_into(self.tensors, arrays))
        self._loaded: Any = None  # the version that is loaded; None: what was there before; or _MIXED
        self._begun: tuple[int, Future[None]] | None = None  # by `Meeting.begin`: the version that is staged
        self._loop = LoopThread(f"weights of {self.name}")
        self._loop.closes(self.engine.close)
        self.stopped = ""  # why it takes part in nothing any more
        self.attempt = _NO_ATTEMPT  # that it takes part in

    @property
    def leads(self) -> bool:
        """Whether it begins the attempts of all ranks."""
        return self.sends and self.rank == 0

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
        engine = self.engine
        tensors = self.tensors() if callable(self.tensors) else self.tensors
        moving = engine.send_weights(tensors, version) if self.sends else engine.receive(version)
        self._within(moving, f"version {version} was not transferred", timeout_s, failed)

    def _within(self, work: Coroutine[Any, Any, Any], what: str, timeout_s: float, failed: Failed) -> None:
        try:
            self.run(_unless(failed, work), timeout_s)
        except TimeoutError as error:
            if isinstance(error, TransportError):
                raise
            raise WeightsTimeoutError(
                f"{self.name}: {what} within {timeout_s:g} s; look at the other ranks' logs"
            ) from error

    def arrays(self) -> dict[str, Any]:
        """The tensors of the version that was received last."""
        held = self.engine.held
        return {} if held is None else dict(self.engine.arrays(held))

    def load(self) -> None:
        """Load the version that was received last; nothing to do where it landed in the rank's own tensors."""
        if self.engine.in_place:
            return
        arrays = self.arrays()
        self._loaded = _MIXED
        if self.engine.held is None:
            raise WeightsError(f"{self.name}: there is no version to load")
        self._load(arrays)
        self._loaded = self.engine.held

    @property
    def mixed(self) -> bool:
        """Whether a load has failed, here or on another rank, and the version before could not be loaded again."""
        return self.engine.spoilt or self._loaded is _MIXED

    def back(self, first: BaseException) -> None:
        """Return to the version before, after ``first``; in place there is none. An error becomes a note of it."""
        self.engine.revert()
        if self.engine.held is self._loaded:
            return
        try:
            self.load()
        except Exception as error:
            first.add_note(f"{self.name}: the version before was not loaded: {type(error).__name__}: {error}")

    def begin(self, version: int, stage: Callable[[], None]) -> None:
        """Call ``stage`` in a thread, after the one that was begun before."""
        before = self._begun
        here: Future[None] = Future()
        self._begun = version, here  # now: an interrupt of the start may leave the thread running

        def run() -> None:
            if before is not None:
                wait([before[1]])
            try:
                stage()
            except BaseException as error:  # raised by `staged`
                here.set_exception(error)
            else:
                here.set_result(None)

        try:
            threads.start(threading.Thread(target=run, name=f"stage of {self.name}"))
        except RuntimeError:  # there is no thread, which would end what was begun
            self._begun = before
            raise

    def staged(self, version: int) -> bool:
        """Whether this version is staged, once what was begun has ended; raises its error."""
        begun = self._begun
        if begun is not None:
            wait([begun[1]])
            self._begun = None  # after the wait, which an interrupt may end
            if begun[0] == version:
                begun[1].result()
        return bool(self.attempt.name) and self.attempt.version == version

    def close(self) -> None:
        """End what was begun, and release everything. Idempotent."""
        self.stopped = f"{self.name} was closed"
        if self._begun is not None:
            wait([self._begun[1]])
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _unless(failed: Failed, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of ``work``; WeightsError when another rank fails meanwhile.

    A store that is away says nothing about other ranks, and ``work`` does not need it: it goes on, within its time.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
            reason = None
            with contextlib.suppress(StoreError):
                reason = await in_thread(failed)
            if reason is not None and not task.done():
                raise WeightsError(reason)
        return task.result()
    finally:
        await ended(task)


def copied_into(tensors: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Copy a version into a rank's own tensors, of numpy or of torch on any device.

    SchemaError, before the first copy, for a tensor that the rank lacks or that has another dtype or shape.
    """
    for name, array in arrays.items():
        if name not in tensors:
            raise SchemaError(f"{name}: this rank has no such tensor; give the trainer's names")
        check_fits(name, tensors[name], str(array.dtype).rpartition(".")[2], tuple(array.shape))
    for name, array in arrays.items():
        target = tensors[name]
        if hasattr(target, "copy_"):  # torch
            import torch

            from transport.devices.host_tensors import as_tensor

            with torch.no_grad():
                target.copy_(as_tensor(array))
        else:
            target[...] = array


_MIXED = object()  # a load has not come to its end


class _Attempt(msgspec.Struct, frozen=True):
    """The first sender's record: an attempt at a version; ``ready``: everybody's role is written."""

    name: str
    version: int
    ready: bool = False


_NO_ATTEMPT = _Attempt("", -1)


class _Here(msgspec.Struct, frozen=True):
    """A rank's record: it takes part in an attempt. Its role will be in the record ``role``, a name that no other
    process of this rank has.
    """

    role: str
    metadata: msgspec.Raw


class _Beside:
    """A call in a thread of its own, which is waited for at the end; its error fails the version for all ranks."""

    def __init__(self, call: Callable[[], object] | None, timeout_s: float) -> None:
        self._call = call
        self._timeout_s = timeout_s
        self._answer: Future[object] | None = None

    def failed(self) -> str | None:
        """Why the version fails."""
        if self._answer is None or not self._answer.done() or (error := self._answer.exception()) is None:
            return None
        return f"the framework's call: {type(error).__name__}: {error}"

    def __enter__(self) -> Self:
        if self._call is not None:
            self._answer = started(self._call)
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if self._answer is None:
            return
        try:
            own = self._answer.exception(self._timeout_s)
        except TimeoutError:
            own = WeightsTimeoutError(f"timeout: the framework's call did not return within {self._timeout_s:g} s")
        if own is not None and (error is None or isinstance(error, WeightsError | StoreError)):
            raise own from error


@hiding("store")
class Meeting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the ranks of a run meet.

    store: URL of a store that all ranks reach. run: a name that no other run uses there.
    timeout_s: of each wait for another rank or for the framework's call, and of the transfer.
    """

    store: str
    run: str
    senders: int
    receivers: int
    timeout_s: float = 600.0

    def update(self, member: Member, version: int) -> None:
        """`stage` and `commit`: send or receive a version, together with all other ranks; a receiver has loaded it."""
        self.stage(member, version)
        self.commit(member, version)

    def stage(self, member: Member, version: int, beside: Callable[[], object] | None = None) -> None:
        """Send or receive a version, together with all other ranks. It lands beside the one that is loaded.

        Returns when all ranks have it. After a failure a receiver has the version before, except where versions land
        in place. A version that was staged before, and not committed, is dropped.

        Args:
            beside: called in a thread meanwhile, such as the framework's call that brings the receivers here. If it
                raises, the version fails for all ranks, and the error is raised.

        Raises:
            WeightsTimeoutError: a rank did not come. WeightsError: another rank failed.
            StoreError: the store was away for ``timeout_s``; what the others decided is then unknown here.
            Exception: what failed here; the others are told.
        """
        self._drop(member)
        before = member.engine.held
        with open_store(self.store) as store, _Beside(beside, self.timeout_s) as called:
            try:
                metadata = msgspec.json.encode(member.run(member.engine.prepare()))
                failed = partial(self._failed, store, member, called)
                role = self._role(store, member, version, metadata, failed)
                member.join(role, version, self.timeout_s, failed)
                member.transfer(version, self.timeout_s, failed)
                self._agree(store, member, "landed", called)
            except BaseException as error:
                self._give_up(store, member, error, member.engine.held is not before)
                raise

    def begin(self, member: Member, version: int) -> None:
        """`stage` in a thread, for a receiver whose framework waits for the call; `commit` raises its error."""
        member.begin(version, partial(self.stage, member, version))

    def commit(self, member: Member, version: int, beside: Callable[[], object] | None = None) -> None:
        """Load what `stage` or `begin` has landed, on all ranks or on none. Arguments and errors as there.

        A rank that cannot load the version before again raises its first error with a note, and is `Member.mixed`.
        """
        if not member.staged(version):
            why = f"{member.name}: version {version} is not staged; call stage() first"
            self._tell(version, why)  # its process may have been started again since
            raise UsageError(why)
        with open_store(self.store) as store, _Beside(beside, self.timeout_s) as called:
            try:
                if not member.sends:
                    member.load()
                self._agree(store, member, "loaded", called)
            except BaseException as error:
                self._give_up(store, member, error, not member.sends)
                raise
            member.attempt = _NO_ATTEMPT
            member.run(member.engine.finalize())

    def _drop(self, member: Member) -> None:
        """Drop a version that was staged and not committed."""
        if member.attempt.name and not member.sends:
            member.back(WeightsError("not committed"))
        member.attempt = _NO_ATTEMPT

    def _give_up(self, store: Store, member: Member, error: BaseException, landed: bool) -> None:
        with contextlib.suppress(StoreError):  # then the others wait until their time is over
            landed &= not self._stays(store, member.attempt, f"{member.name}: {type(error).__name__}: {error}")
        member.attempt = _NO_ATTEMPT
        if landed:
            member.back(error)
        member.run(member.engine.finalize())

    def _tell(self, version: int, why: str) -> None:
        """Fail the last attempt for all ranks, if it is at this version."""
        with contextlib.suppress(StoreError), open_store(self.store) as store:
            entry = store.get(self._name("attempt"))
            found = _NO_ATTEMPT if entry is None else msgspec.json.decode(entry.value, type=_Attempt)
            if found.version == version:
                self._stays(store, found, why)

    def _stays(self, store: Store, attempt: _Attempt, reason: str) -> bool:
        """Fail the attempt for all ranks, unless it is decided that what they have loaded stays.

        That is the decision on the last phase; the one before, which a later commit finds forgotten, ends waits only.
        """
        if not attempt.name:
            return False
        proposals = dict.fromkeys((self._name(attempt.name, each) for each in _PHASES), reason[:2000].encode())
        found = decide_all(store, proposals, lease_s=2 * self.timeout_s)
        return found[self._name(attempt.name, _PHASES[-1])] == _GO

    def _decide(self, store: Store, attempt: _Attempt, phase: str, proposal: bytes) -> bytes:
        return decide(store, self._name(attempt.name, phase), proposal, lease_s=2 * self.timeout_s)

    def _role(self, store: Store, member: Member, version: int, metadata: bytes, failed: Failed) -> Any:
        """Take part in an attempt at this version; returns this rank's role in it."""
        until = time.monotonic() + self.timeout_s
        if not member.leads:
            return self._follow(store, member, version, metadata, until, failed)
        member.attempt = attempt = _Attempt(secrets.token_hex(8), version)
        self._put(store, self._name("attempt"), attempt)
        others = [self._here(store, key, until, failed) for key in self._keys(attempt.name, "here")[1:]]
        metadatas = [msgspec.json.decode(each) for each in (metadata, *(other.metadata for other in others))]
        actor, rollout = build_topology(self.senders, self.receivers, metadatas)
        mine, *roles = [*actor["roles"], *rollout["roles"]]
        for other, role in zip(others, roles, strict=True):
            self._put(store, self._name(attempt.name, "role", other.role), role)
        self._put(store, self._name("attempt"), msgspec.structs.replace(attempt, ready=True))
        return mine

    def _here(self, store: Store, key: str, until: float, failed: Failed) -> _Here:
        for value in self._values(store, key, until, failed):
            return msgspec.json.decode(value, type=_Here)
        raise WeightsTimeoutError(f"timeout: a rank did not write {key} in {self.timeout_s:g} s")

    def _follow(self, store: Store, member: Member, version: int, metadata: bytes, until: float, failed: Failed) -> Any:
        mine = secrets.token_hex(8)
        for value in self._values(store, self._name("attempt"), until, failed):
            found = msgspec.json.decode(value, type=_Attempt)
            if found.version == version and found.name != member.attempt.name:
                if decided(store, self._name(found.name, _PHASES[0])) is not None:
                    continue  # it is over
                member.attempt = _Attempt(found.name, version)
                self._put(store, self._key(found.name, member, "here"), _Here(mine, msgspec.Raw(metadata)))
            if found.ready and found.name == member.attempt.name:
                role = store.get(self._name(found.name, "role", mine))
                if role is not None:  # else a process before this one took part in the attempt
                    return msgspec.json.decode(role.value)
        raise WeightsTimeoutError(f"timeout: {member.name}: the first sender did not begin version {version} in time")

    @staticmethod
    def _values(store: Store, key: str, until: float, failed: Failed) -> Iterator[bytes]:
        """What stands under a key, at every change and every look, until then. WeightsError when a rank has failed."""
        seen = ABSENT
        while (left := until - time.monotonic()) > 0:
            if (reason := failed()) is not None:
                raise WeightsError(reason)
            entry = store.watch(key, seen, min(left, _LOOK_S))
            seen = ABSENT if entry is None else entry.version
            if entry is not None:
                yield entry.value

    def _agree(self, store: Store, member: Member, phase: str, called: _Beside) -> None:
        """Wait until every rank has come so far. WeightsError when one has failed, and then for all ranks.

        A rank that waits says so again and again: one that ended, or lost its way to the store, is not counted.
        """
        attempt = member.attempt
        keys, mine = self._keys(attempt.name, phase), self._key(attempt.name, member, phase)
        begun = time.monotonic()
        found = None
        while found is None:
            left = begun + self.timeout_s - time.monotonic()
            try:
                if left <= 0:
                    text = f"{member.name}: not all ranks have {phase} v{attempt.version} within {self.timeout_s:g} s"
                    found = self._decide(store, attempt, phase, text.encode())
                    if found == text.encode():
                        raise WeightsTimeoutError(f"timeout: {text}; look at the other ranks' logs")
                    break
                store.put(mine, b"", lease_s=_THERE_S)
                if member.leads:
                    if (reason := called.failed()) is not None:
                        found = self._decide(store, attempt, phase, reason[:2000].encode())
                        break
                    there = store.get_many(keys)
                    missing = next((key for key, entry in zip(keys, there, strict=True) if entry is None), "")
                    if not missing:
                        found = self._decide(store, attempt, phase, _GO)
                        break
                    store.watch(missing, ABSENT, min(left, _LOOK_S / 10))
                    found = decided(store, self._name(attempt.name, phase))
                else:
                    found = wait_decided(store, self._name(attempt.name, phase), min(left, _LOOK_S))
                    if found is None and member.stopped:
                        raise WeightsError(member.stopped)
            except StoreUnavailableError:
                if left <= 0:
                    raise
        if found != _GO:
            raise WeightsError(f"v{attempt.version}: {found.decode(errors='replace')}")

    def _failed(self, store: Store, member: Member, called: _Beside) -> str | None:
        """Why this attempt fails, if it does."""
        if member.stopped or (member.leads and called.failed()):
            return member.stopped or called.failed()
        attempt = member.attempt
        found = decided(store, self._name(attempt.name, _PHASES[0])) if attempt.name else None
        return None if found in (None, _GO) else f"v{attempt.version}: {(found or b'').decode(errors='replace')}"

    def _put(self, store: Store, key: str, record: object) -> None:
        store.put(key, msgspec.json.encode(record), lease_s=2 * self.timeout_s)

    def _key(self, attempt: str, member: Member, *what: str) -> str:
        return self._name(attempt, *what, f"{'s' if member.sends else 'r'}{member.rank}")

    def _keys(self, *what: str) -> list[str]:
        """Of all ranks, senders first."""
        ranks = [f"s{rank}" for rank in range(self.senders)] + [f"r{rank}" for rank in range(self.receivers)]
        return [self._name(*what, rank) for rank in ranks]

    def _name(self, *what: str) -> str:
        return "/".join(("shards", self.run, *what))

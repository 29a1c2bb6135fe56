"""What the adapters of inference engines share: ranks that send and receive shards without a manager of ours.

    def shards(model) -> RankShards:                     # yours: which rank this is, what it has or wants
        return RankShards(rank, layout, dict(model.named_parameters()))

    meeting = Meeting("redis://…", "run 7", senders=256, receivers=128)
    with Member(shards(model), sends=True) as member:    # every trainer rank; on receivers sends=False
        meeting.update(member, version)

The calls of these engines return nothing to the trainer. So all ranks meet in a store: each writes what `prepare` told
it, the first sender writes everybody's role. Whether a version is loaded is one final record, and whether it stays
loaded is another (`transport.store.decision`): the first sender writes "go" when every rank has come so far and is
there; a rank that fails, or waits too long, writes why. Whatever stands holds for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

import msgspec

from transport.errors import (
    StoreError,
    StoreUnavailableError,
    TransportError,
    UsageError,
    WeightsError,
    WeightsTimeoutError,
)
from transport.runtime.decoders import hiding
from transport.runtime.loop_thread import LoopThread
from transport.schema import TensorSpec
from transport.store.base import ABSENT, Store
from transport.store.decision import decide, decided, wait_decided
from transport.store.open import open_store
from transport.weights.engine import ShardEngine
from transport.weights.sharding import shards
from transport.weights.sharding.boxes import Box
from transport.weights.sharding.layouts import Layout, LocalTensor
from transport.weights.transfer.threads import ended, in_thread

_LOOK_S = 1.0  # how often a rank that waits for others looks whether one has failed
_THERE_S = 10.0  # lease of "I have come so far": several looks
_PHASES = ("landed", "loaded")
_GO = b""  # no reason against it

Failed = Callable[[], str | None]  # why another rank has failed


class RankShards(NamedTuple):
    """A rank: its number among the senders or the receivers, its layout, and its tensors by the layout's names."""

    rank: int
    layout: Layout
    tensors: Mapping[str, Any]


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
    """One rank's engine, on a loop of its own. All methods block; one thread at a time."""

    def __init__(self, rank: RankShards, *, sends: bool, in_place: bool = False, **options: Any) -> None:
        """``options``: of `ShardEngine`. ``in_place``: versions land in ``rank.tensors``."""
        self.rank = rank.rank
        self.sends = sends
        self.tensors = rank.tensors
        self.name = f"{'sender' if sends else 'receiver'} {rank.rank}"
        if in_place:
            options["in_place"] = rank.tensors
        self.engine = ShardEngine(self.name, rank.layout, **options)
        self._loaded: Any = None  # the version that ``rank.tensors`` hold; None: what they held before, or a mixture
        self._loop = LoopThread(f"weights of {self.name}")

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
        moving = engine.send_weights(self.tensors, version) if self.sends else engine.receive(version)
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
        """Copy the version into ``rank.tensors``; nothing to do where it landed in them."""
        if self.engine.in_place:
            return
        self._loaded = None
        for name, array in self.arrays().items():
            target = self.tensors[name]
            if hasattr(target, "copy_"):  # torch
                import torch

                with torch.no_grad():
                    target.copy_(array if isinstance(array, torch.Tensor) else _tensor(torch, array))
            else:
                target[...] = array
        self._loaded = self.engine.held

    def back(self, first: BaseException) -> None:
        """Return to the version before, after ``first``; in place there is none. An error becomes a note of it."""
        self.engine.revert()
        try:
            if self.engine.held is not self._loaded:
                self.load()
        except Exception as error:
            first.add_note(f"{self.name}: the version before was not loaded: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Release everything. Idempotent."""
        if not self._loop.closed:
            try:
                self.run(self.engine.close())
            finally:
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


def _tensor(torch: Any, array: Any) -> Any:
    """A numpy array as torch's tensor; dtypes that numpy lacks go by their bits."""
    name = array.dtype.name
    if name.startswith(("bfloat16", "float8")):
        bits = array.view("uint16" if name == "bfloat16" else "uint8").copy()
        return torch.from_numpy(bits).view(getattr(torch, name))
    return torch.from_numpy(array.copy())


@hiding("store")
class Meeting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the ranks of a run meet.

    store: URL of a store that all ranks reach. run: a name that no other run uses there.
    timeout_s: of each wait for another rank, and of the transfer.
    """

    store: str
    run: str
    senders: int
    receivers: int
    timeout_s: float = 600.0

    def update(self, member: Member, version: int) -> None:
        """Send or receive a version, together with all other ranks; a receiver has loaded it afterwards.

        After a failure a receiver has the version before, except where versions land in place. No version number is
        used twice, not even after a failure: the records of the attempt before would mislead.

        Raises:
            WeightsTimeoutError: a rank did not come. WeightsError: another rank failed.
            UsageError: the number was used before.
            StoreError: the store was away for ``timeout_s``; what the others decided is then unknown here.
            Exception: what failed here; the others are told.
        """
        before = member.engine.held
        with open_store(self.store) as store:
            metadata = msgspec.json.encode(member.run(member.engine.prepare()))
            try:
                here = self._key(version, "here", member)
                if store.compare_and_set(here, metadata, ABSENT, lease_s=2 * self.timeout_s) is None:
                    raise UsageError(f"{member.name}: version {version} was tried before; give the next number")
                try:
                    self._together(store, member, version)
                except BaseException as error:
                    with contextlib.suppress(StoreError):  # then the others wait until their time is over
                        self._fail(store, version, f"{member.name}: {type(error).__name__}: {error}")
                    if member.engine.held is not before:
                        member.back(error)
                    raise
            finally:
                member.run(member.engine.finalize())

    def fail(self, version: int, reason: str) -> None:
        """End a version for all ranks, because something else than a rank has failed. No effect on a finished one."""
        with open_store(self.store) as store:
            self._fail(store, version, reason)

    def _fail(self, store: Store, version: int, reason: str) -> None:
        for phase in _PHASES:
            if self._decide(store, version, phase, reason[:2000].encode()) != _GO:
                return

    def _decide(self, store: Store, version: int, phase: str, proposal: bytes) -> bytes:
        return decide(store, self._name(version, phase), proposal, lease_s=2 * self.timeout_s)

    def _together(self, store: Store, member: Member, version: int) -> None:
        if member.sends and member.rank == 0:
            everybody = [msgspec.json.decode(self._wait(store, version, key)) for key in self._keys(version, "here")]
            actor, rollout = ShardEngine.build_topology(self.senders, self.receivers, everybody)
            for key, role in zip(self._keys(version, "role"), [*actor["roles"], *rollout["roles"]], strict=True):
                store.put(key, msgspec.json.encode(role), lease_s=2 * self.timeout_s)
        role = msgspec.json.decode(self._wait(store, version, self._key(version, "role", member)))
        failed = partial(self._failed, store, version)
        member.join(role, version, self.timeout_s, failed)
        member.transfer(version, self.timeout_s, failed)
        self._agree(store, member, version, "landed")
        if not member.sends:
            member.load()
        self._agree(store, member, version, "loaded")

    def _agree(self, store: Store, member: Member, version: int, phase: str) -> None:
        """Wait until every rank has come so far. WeightsError when one has failed, and then for all ranks.

        A rank that waits says so again and again: one that ended, or lost its way to the store, is not counted.
        """
        keys, mine = self._keys(version, phase), self._key(version, phase, member)
        begun = time.monotonic()
        found = None
        while found is None:
            left = begun + self.timeout_s - time.monotonic()
            try:
                if left <= 0:
                    text = f"{member.name}: not all ranks have {phase} version {version} within {self.timeout_s:g} s"
                    found = self._decide(store, version, phase, text.encode())
                    if found == text.encode():
                        raise WeightsTimeoutError(f"timeout: {text}; look at the other ranks' logs")
                    break
                store.put(mine, b"", lease_s=_THERE_S)
                if member.sends and member.rank == 0:
                    there = store.get_many(keys)
                    missing = next((key for key, entry in zip(keys, there, strict=True) if entry is None), "")
                    if not missing:
                        found = self._decide(store, version, phase, _GO)
                        break
                    store.watch(missing, ABSENT, min(left, _LOOK_S / 10))
                    found = decided(store, self._name(version, phase))
                else:
                    found = wait_decided(store, self._name(version, phase), min(left, _LOOK_S))
            except StoreUnavailableError:
                if left <= 0:
                    raise
        if found != _GO:
            raise WeightsError(f"v{version}: {found.decode(errors='replace')}")

    def _wait(self, store: Store, version: int, key: str) -> bytes:
        """The record, once it is there. WeightsError when a rank has failed meanwhile."""
        begun = time.monotonic()
        while (left := begun + self.timeout_s - time.monotonic()) > 0:
            entry = store.watch(key, ABSENT, min(left, _LOOK_S))
            if entry is not None:
                return entry.value
            if (reason := self._failed(store, version)) is not None:
                raise WeightsError(reason)
        raise WeightsTimeoutError(f"timeout: a rank did not write {key} in {self.timeout_s:g} s")

    def _failed(self, store: Store, version: int) -> str | None:
        found = decided(store, self._name(version, _PHASES[0]))
        return None if found in (None, _GO) else f"v{version}: {(found or b'').decode(errors='replace')}"

    def _key(self, version: int, what: str, member: Member) -> str:
        return self._name(version, f"{what}/{'s' if member.sends else 'r'}{member.rank}")

    def _keys(self, version: int, what: str) -> list[str]:
        senders = [self._name(version, f"{what}/s{rank}") for rank in range(self.senders)]
        return senders + [self._name(version, f"{what}/r{rank}") for rank in range(self.receivers)]

    def _name(self, version: int, what: str) -> str:
        return f"shards/{self.run}/{version}/{what}"

"""Faults planted into the package, for the soak to find: each makes one promise false, in the soak's processes only.

    python benchmarks/soak --plant unfenced

`PLANTS` names for each what it changes, by module, and which figure of the report must show it. points/sitecustomize.py
makes the changes when a process imports the module; nothing of the package knows of them. `mutations.py` runs them all.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

Change = Callable[[ModuleType], None]


# --- the queue ----------------------------------------------------------------------------------------
def unfenced(module: ModuleType) -> None:
    batch: Any = module.Batch
    original = batch.accepted.fget

    def accepted(self: Any) -> Any:
        return original(self) | True

    batch.accepted = property(accepted)


def claims_are_dropped(module: ModuleType) -> None:
    trainer: Any = module.Trainer
    original = trainer._batch
    turns = itertools.count()

    def batch(self: Any, parts: Any, *arguments: Any) -> Any:
        for part in parts:
            for at in reversed(range(len(part))):
                if next(turns) % 97 == 50:
                    part.drop(at, "StaleSlotError: as if its deadline had passed", True, self._name)
        return original(self, parts, *arguments)

    trainer._batch = batch


# --- the rings as the queue ---------------------------------------------------------------------------
_LOSE_EVERY = 3  # answers to FINISH, in the faults that need one to be lost


def finishes_are_lost(module: ModuleType) -> None:
    """The connection ends before what was to be consumed is sent: the ring says that it has not been."""
    connection: Any = module.ClaimConnection
    original = connection._message
    turns = itertools.count()

    def message(self: Any, ending: Any) -> None:
        if ending[2].verdict is module.Verdict.CONSUMED and next(turns) % _LOSE_EVERY == 1:
            self.link.abort()
        original(self, ending)

    connection._message = message


def answers_are_lost(module: ModuleType) -> None:
    """The connection ends before the trainer knows that the ring has consumed it: the ring says that it has."""
    connection: Any = module.ClaimConnection
    original = connection._answered
    turns = itertools.count()

    def answered(self: Any, ending: Any, outcome: Any) -> None:
        lost = next(turns) % _LOSE_EVERY == 1
        original(self, ending, None if lost else outcome)

    connection._answered = answered


def outcomes_are(accepted: bool) -> Change:
    def change(module: ModuleType) -> None:
        outcomes: Any = module.Outcomes

        async def of(self: Any, broken: Any, rows: Any, *arguments: Any) -> Any:
            return [0 if accepted else 1] * len(rows)

        outcomes.of = of

    return change


def dead_connections_hold(module: ModuleType) -> None:
    """What came through a connection that is dead by now is consumed, whatever the ring has answered."""
    finishes_are_lost(module)
    claims: Any = module.ClaimedRows
    original = claims.answer

    def answer(self: Any, positions: Any, codes: Any, *arguments: Any) -> None:
        original(self, positions, [module.ACCEPTED] * len(codes) if self.connection.lost else codes, *arguments)

    claims.answer = answer


def nothing_is_given_back(module: ModuleType) -> None:
    def return_soon(*_: Any) -> None: ...

    module.ClaimConnection.return_soon = return_soon


def nothing_is_given_back_here(module: ModuleType) -> None:
    batch: Any = module.Batch
    kept: list[Any] = []  # a claim that nothing refers to goes back by itself

    def give_back(self: Any, delay_s: float = 0.0) -> None:
        kept.append(self.parts)

    batch.give_back = give_back


def no_ring_lingers(module: ModuleType) -> None:
    lifetime: Any = module.Lifetime
    original = lifetime.__init__

    def at_once(self: Any, linger_s: float) -> None:
        original(self, 0.0)

    lifetime.__init__ = at_once


def takes_are_not_verified(module: ModuleType) -> None:
    connection: Any = module.ClaimConnection
    original = connection.demand

    def demand(self: Any, n: int, **named: Any) -> Any:
        return original(self, n, **named | {"verify": False})

    connection.demand = demand


# --- the ring -----------------------------------------------------------------------------------------
def freed_on_send(module: ModuleType) -> None:
    """A thread of the writer frees whatever was pinned and is not any more."""
    rollout: Any = module.UCXXRolloutMixin
    original = rollout.setup_ucxx

    def watch(ring: Any) -> None:
        reading: dict[int, int] = {}  # slot → generation that was being read when last seen
        while not ring.native.closed:
            for slot in range(ring.slot_count):
                info = ring.native.info(slot)
                if info.state == 3:  # READING
                    reading[slot] = info.generation
                elif reading.pop(slot, None) == info.generation:
                    ring.native.discard(slot, info.generation)
            time.sleep(0)

    def setup_ucxx(self: Any, *arguments: Any, **named: Any) -> Any:
        ring = original(self, *arguments, **named)
        threading.Thread(target=watch, args=(ring,), daemon=True).start()
        return ring

    rollout.setup_ucxx = setup_ucxx


def rings_begin_anew(module: ModuleType) -> None:
    ring: Any = module.SharedRingBuffer
    original = ring.create.__func__

    def create(cls: Any, /, *arguments: Any, name: str | None = None, **named: Any) -> Any:
        if name is not None and Path(f"/dev/shm{name}").exists():
            with ring.attach(name, role="observer") as old:
                listeners = [owner.pid for owner in old.native.owners() if owner.alive and owner.port]
            for pid in listeners:  # else they serve the old ring to its end
                os.kill(pid, signal.SIGKILL)
            Path(f"/dev/shm{name}").unlink()
        return original(cls, *arguments, name=name, **named)

    ring.create = classmethod(create)


# --- the bytes ----------------------------------------------------------------------------------------
def bytes_are_flipped(module: ModuleType) -> None:
    """One bit of one payload in 40, once it is published."""
    ring: Any = module.SharedRingBuffer
    original = ring.write_raw
    turns = itertools.count()

    def write_raw(self: Any, *arguments: Any, **named: Any) -> Any:
        ticket = original(self, *arguments, **named)
        if next(turns) % 40 == 20:
            self.native.payload(ticket.slot)[ticket.size - 1] ^= 1
        return ticket

    ring.write_raw = write_raw


def only_over(*wires: str) -> dict[str, Change]:
    def change(module: ModuleType) -> None:
        trainer: Any = module.Trainer
        original = trainer.__init__

        def init(self: Any, *arguments: Any, wire: Any, **named: Any) -> None:
            original(self, *arguments, wire=frozenset(wires), **named)

        trainer.__init__ = init

    return {"transport.training.trainer": change}


def nothing_is_verified(module: ModuleType) -> None:
    import msgspec

    ticket: Any = module.Ticket
    original = ticket.decode

    def decode(data: bytes) -> Any:
        return msgspec.structs.replace(original(data), checksum=None)

    ticket.decode = staticmethod(decode)


# --- the end ------------------------------------------------------------------------------------------
def segments_stay(module: ModuleType) -> None:
    rollout: Any = module.UCXXRolloutMixin
    original = rollout.cleanup_ucxx

    def cleanup_ucxx(self: Any, *arguments: Any) -> None:
        if self._ucxx_ring is not None:
            Path(f"/dev/shm{self._ucxx_ring.name}-left").touch()
        original(self, *arguments)

    rollout.cleanup_ucxx = cleanup_ucxx


def trainers_fail(module: ModuleType) -> None:
    batch: Any = module.Batch
    original = batch.consume
    turns = itertools.count()

    def consume(self: Any) -> None:
        if next(turns) == 4:
            os._exit(3)
        original(self)

    batch.consume = consume


# --- all of them ------------------------------------------------------------------------------------
class Plant(NamedTuple):
    """One planted fault."""

    what: str
    shows: str  # the figure of the report that must not be 0 (or empty)
    changes: dict[str, Change]  # by module
    hides: str = ""  # a figure that must stay 0: what else guards against it still does
    here: bool = True  # the soak can show it
    calm: bool = False  # without kills and stops, which would undo it


PLANTS = {
    "unfenced": Plant(
        "acknowledgements are accepted of claims that are another trainer's by now",
        "duplicated",
        {"transport.training.batch": unfenced},
    ),
    "finished-twice": Plant(
        "what a broken connection may not have finished counts as consumed, and another trainer's end of it as well",
        "duplicated",
        {
            "transport.claims.connection": finishes_are_lost,
            "transport.claims.outcomes": outcomes_are(True),
            **only_over("tcp"),
        },
    ),
    "outcome-forgotten": Plant(
        "the ring does not know what a connection that broke had finished",
        "lost",
        {
            "transport.claims.connection": answers_are_lost,
            "transport.claims.outcomes": outcomes_are(False),
            **only_over("tcp"),
        },
    ),
    "dead-connection": Plant(
        "the claims of a dead connection are its trainer's",
        "duplicated",
        {
            "transport.claims.connection": dead_connections_hold,
            **only_over("tcp"),
        },
    ),
    "kept-elsewhere": Plant(
        "what is given back is not, over the network",
        "lost",
        {
            "transport.claims.connection": nothing_is_given_back,
            **only_over("tcp"),
        },
        calm=True,
    ),
    "kept-here": Plant(
        "what is given back is not, in a mapped ring",
        "lost",
        {
            "transport.training.batch": nothing_is_given_back_here,
            **only_over("mapped"),
        },
        calm=True,
    ),
    "left-early": Plant(
        "a ring is left when its writer has ended, with what is unread in it",
        "lost",
        {
            "transport.server.lifetime": no_ring_lingers,
            **only_over("tcp"),  # who maps a ring keeps it, too
        },
    ),
    "dropped": Plant(
        "payloads without a deadline are discarded as if it had passed",
        "lost",
        {"transport.training.trainer": claims_are_dropped},
    ),
    "freed-on-send": Plant(
        "a slot is freed when it was sent",
        "lost",
        {"transport.packer.rollout": freed_on_send},
    ),
    "begun-anew": Plant(
        "a restarted writer makes a new ring instead of taking over the old one",
        "lost",
        {"transport.ring.buffer": rings_begin_anew},
    ),
    "flipped": Plant(
        "bytes change in the ring; over wires, the checksum keeps them from being consumed",
        "lost",
        {"transport.ring.buffer": bytes_are_flipped, **only_over("shm", "tcp")},
        hides="wrong",
    ),
    "flipped-unverified": Plant(
        "bytes change in the ring, and no checksum is compared",
        "wrong",
        {
            "transport.ring.buffer": bytes_are_flipped,
            "transport.ticket": nothing_is_verified,
            "transport.claims.connection": takes_are_not_verified,
        },
    ),
    "unverified": Plant(
        "no checksum of a payload is compared",
        "wrong",
        {"transport.ticket": nothing_is_verified, "transport.claims.connection": takes_are_not_verified},
        here=False,  # a fault where bytes change on the way: network.py
    ),
    "segments-stay": Plant(
        "a writer leaves a segment behind",
        "left_behind",
        {"transport.packer.rollout": segments_stay},
    ),
    "trainers-fail": Plant(
        "a trainer ends by itself",
        "crashes",
        {"transport.training.batch": trainers_fail},
    ),
}

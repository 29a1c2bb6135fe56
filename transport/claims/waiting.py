"""Reasons why a trainer gets nothing, in a sentence. One decision over what the places of its rings know; no I/O.

    no ring of this run     ──► not started, or ended, or lost; other runs of this host
    rings of other schemas  ──► ring, field, both fingerprints
    rings for other ranks   ──► for how many their payloads are
    this process's fault    ──► its error, which a claim raises
    rings that it leaves out ──► why each is not mapped, and not asked either
    no place answers        ──► the error of each
    held by who is silent   ──► the process, and until when
    slots held for groups   ──► the ring, and how many slots it has
    no slot is free         ──► whom the rollouts wait for: this process, or the trainers of other ranks

Where rings are there and nothing is unread in them, the rollouts are slow: that needs no words.
"""

from __future__ import annotations

import enum
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from transport import _ring
from transport.errors import OWN_FAULTS, BatchTooLargeError, RankError, SchemaError, TransportError
from transport.runtime.amounts import count
from transport.runtime.logs import SAY_AGAIN_S, LogLimit, Overdue
from transport.runtime.suspended import suspended
from transport.schema import Schema, difference

if TYPE_CHECKING:
    from transport.ring.buffer import SharedRingBuffer

_REFUSALS: Final = (RankError, BatchTooLargeError, *OWN_FAULTS)
_NAMED: Final = 3  # rings, runs, holders or places in one sentence
_MOST_SLOTS: Final = 4096  # looked at for claims, in each ring
# A random ring's name ends with 16 digits.
# Notices and weights on offer are no payloads of a run.
_OF_A_RUN: Final = re.compile(r"/transport-(?!(?:notices|offers)-.*@|[0-9a-f]{16}$)(.+?)(?:[0-9a-f]{16})?")


class Why(enum.StrEnum):
    """The kinds of reasons, as metrics count them."""

    NO_RING = "no_ring"
    OTHER_SCHEMA = "other_schema"
    OTHER_RANK = "other_rank"
    UNREACHABLE = "unreachable"
    HELD = "held"
    GROUPS = "groups"
    FULL = "full"


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """One process that holds claims of a ring.

    Attributes:
        pid: of the process as the ring has it; of a listener, which holds claims for trainers elsewhere, its own.
        port: of the listener; 0: the process itself is the trainer.
        payloads: how many deliveries it holds.
        silent_s: seconds since its last sign of life.
        left_s: seconds until its claims end unless it is heard; None: they last as long as it lives.
        suspended: by a signal, as the kernel says.
        dead: whether the process has ended; the next trainer that claims gets its payloads.
    """

    ring: str
    pid: int
    port: int
    payloads: int
    silent_s: float
    left_s: float | None
    suspended: bool = False
    dead: bool = False

    def __str__(self) -> str:
        """Return the text that `transport queue` and the log show."""
        if self.dead:
            return f"process {self.pid} is dead; who claims next has its {self.payloads} of ring {self.ring[:8]}"
        who = f"process {self.pid}" if not self.port else f"a trainer at port {self.port} (listener {self.pid})"
        if self.suspended:
            who = f"{who}, which is stopped (SIGCONT lets it go on),"
        held = f"{who} holds {self.payloads} of ring {self.ring[:8]}"
        if self.left_s is None:
            return f"{held} until its connection or process ends"
        left_s = max(0.0, self.left_s)
        return f"{held}, silent for {self.silent_s:.0f} s; they come back in {left_s:.0f} s unless it is heard"

    @property
    def stopped(self) -> bool:
        """True if it is suspended, or has been silent for half its lease; a living one is heard every third."""
        return self.suspended or (self.left_s is not None and self.silent_s > self.left_s)


class Reached(NamedTuple):
    """Places that are reached over the network.

    Attributes:
        rings: ids of the rings that are connected.
        faults: why places are not, by place.
        named: whether a ring has the consumer that claims.
        barred: whether every place was tried, and none has ever let this process in.
    """

    rings: Set[str] = frozenset()
    faults: Mapping[str, TransportError] = {}
    named: bool = False
    barred: bool = False


class Here(NamedTuple):
    """State of this host's rings, by their own account.

    Attributes:
        rings: ids of those with payloads of the trainer's schemas.
        unread: of these the deliveries for the trainer's rank that nobody holds.
        other_ranks: for which there are such, too.
        free: slots of these that are free or being written.
        own: how many of these payloads this process has claimed, or looks at.
        foreign: a sentence for each ring of another schema.
        unnamed: a sentence for each ring without the consumer that claims.
        holders: of claims for the trainer's rank.
        ranks: for how many the payloads are or were, at most; 0: there was none.
    """

    rings: Set[str]
    unread: int
    other_ranks: Sequence[str]
    free: int
    own: int
    foreign: Sequence[str]
    unnamed: Sequence[str]
    holders: Sequence[Holder]
    ranks: int


class Known(NamedTuple):
    """Knowledge of a trainer's places at one moment.

    Attributes:
        places: where its rings are looked for, as a person names it.
        fitting: rings with payloads of its schemas that can be claimed from.
        unread: payloads of these that nobody holds.
        foreign: a sentence for each ring of another schema.
        left_out: a sentence for each ring that payloads cannot be claimed from, while others may have some.
        reached: over the network.
        holders: of claims in fitting rings.
        others: where rollouts of other runs are on this host, as URLs.
        lost: ids of rings that are gone without their rollouts' end.
        ends: how many rollouts have said their end.
        expected: how many are to say it; None: it was not said.
        rank: that claims; None: all, or one with a name, which rings know or refuse.
        ranks: for how many the payloads of fitting rings on this host are or were, at most; 0: there was none.
        full: whether no slot of fitting rings is free; of rings elsewhere that is not known.
        own: how many of their payloads this process holds.
        other_ranks: for which payloads are unread.
        crowded: a sentence for each ring whose slots are all held for groups or a step that are not complete.
    """

    places: str
    fitting: int
    unread: int = 0
    foreign: Sequence[str] = ()
    left_out: Sequence[str] = ()
    reached: Reached = Reached()
    holders: Sequence[Holder] = ()
    others: Sequence[str] = ()
    lost: Sequence[str] = ()
    ends: int = 0
    expected: int | None = None
    rank: int | None = None
    ranks: int = 0
    full: bool = False
    own: int = 0
    other_ranks: Sequence[str] = ()
    crowded: Sequence[str] = ()


class NoPayloadReason(msgspec.Struct, frozen=True):
    """Reason why nothing comes, and what to do about it."""

    why: Why
    text: str


def own_fault(reached: Reached) -> TransportError | None:
    """Return the error that keeps this process from every place until its configuration or its question changes.

    A place that refuses a process which another one has let in is left out: the place may have the wrong secret.
    """
    for fault in reached.faults.values():
        unknown_name = isinstance(fault, RankError) and not reached.named
        if unknown_name or (reached.barred and isinstance(fault, OWN_FAULTS)) or isinstance(fault, BatchTooLargeError):
            return fault
    return None


def is_final(reached: Reached, places: int) -> bool:
    """Tell whether each of so many places refuses this process. One that does not answer yet may let it in."""
    return places == sum(isinstance(fault, _REFUSALS) for fault in reached.faults.values())


def reason(known: Known) -> NoPayloadReason | None:
    """Say why a trainer gets nothing; None: it is its turn when the rollouts write."""
    if (fault := own_fault(known.reached)) is not None:
        return NoPayloadReason(Why.UNREACHABLE, str(fault))
    if known.left_out:
        return NoPayloadReason(
            Why.UNREACHABLE, f"left out {count(len(known.left_out), 'ring')}: {few('; ', known.left_out)}"
        )
    if known.fitting:
        if known.rank is not None and known.rank >= known.ranks > 0:
            return NoPayloadReason(
                Why.OTHER_RANK,
                f"this trainer has rank={known.rank}, and payloads with readers={known.ranks} are for the ranks 0 to "
                f"{known.ranks - 1}. Give the trainer one of these, or the rollouts readers={known.rank + 1} or more",
            )
        if known.unread:
            return None
        if stopped := [each for each in known.holders if each.stopped]:
            return NoPayloadReason(Why.HELD, f"every unread payload is held: {few('; ', map(str, stopped))}")
        if known.crowded:
            return NoPayloadReason(
                Why.GROUPS,
                f"{few('; ', known.crowded)}: give the rollout more slots (`transport size --unfinished` computes how "
                "many), have it begin fewer groups at a time, or give incomplete groups up sooner",
            )
        return _full(known) if known.full else None
    if known.foreign:
        text = few("; ", known.foreign)
        return NoPayloadReason(
            Why.OTHER_SCHEMA, f"{text}. Give the trainer the rollout's schema, or the two runs different names"
        )
    faults = known.reached.faults
    if each := [f"{place}: {fault}" for place, fault in faults.items() if not isinstance(fault, SchemaError)]:
        return NoPayloadReason(Why.UNREACHABLE, f"no ring of {known.places} can be reached: {few('; ', each)}")
    there = (
        f". This host has rings of other runs ({few(', ', known.others)}): to read one of these, set the same run "
        "(TRANSPORT_RUN) for rollouts and trainers, or give rings= that text"
        if known.others
        else ""
    )
    why = "it has not started yet, or it has ended"
    if known.lost:
        why = (
            f"the rollout of ring {few(', ', (ring[:8] for ring in known.lost))} is gone, and has not said its end. "
            "If it was killed, start it again with its name=, or "
        )
        if known.expected is None:
            why += "give expected_rollouts=, how many ends are waited for"
        else:
            why += f"lower expected_rollouts={known.expected}: so many ends are waited for, and {known.ends} have come"
    text = f"no rollout of this run is running ({known.places} finds none): {why}"
    return NoPayloadReason(Why.NO_RING, f"{text}{there}")


def _full(known: Known) -> NoPayloadReason | None:
    """Explain whom rollouts without a free slot wait for; None: for trainers that hold everything, and work."""
    if known.other_ranks:
        text = (
            f"what is unread is for {few(', ', known.other_ranks)}: its trainer is slow or not running, or it has the "
            "rank= of another one"
        )
    elif known.own:
        text = (
            f"this process holds {count(known.own, 'payload')}: let it consume and release these before it claims "
            "more, accumulate over fewer payloads, or give the rollout more slots"
        )
    else:
        return None
    return NoPayloadReason(Why.FULL, f"no slot of {known.places} is free, and {text}")


def crowded(incomplete: Mapping[str, int], slots: Mapping[str, int], share: float) -> list[str]:
    """Return a sentence for each ring of whose slots at least this share waits until a group or step is complete."""
    return [
        f"{held} of the {slots[ring]} slots of ring {ring[:8]} are held for groups or a step that are not complete"
        for ring, held in incomplete.items()
        if slots.get(ring) and held >= share * slots[ring]
    ]


def few(between: str, texts: Iterable[str]) -> str:
    """Join the first texts, and say how many more there are."""
    listed = list(texts)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return between.join(listed[:_NAMED]) + more


class Waiting:
    """Wait of one trainer for a payload: when to look for the reason, and whether to log it."""

    def __init__(self) -> None:
        self.counts: Counter[Why] = Counter()  # looks that found it
        self._overdue = Overdue()
        self._found: NoPayloadReason | None = None  # by the last look
        self._said = {why: LogLimit(SAY_AGAIN_S) for why in Why}

    def text(self) -> str:
        """Say why nothing comes, as `transport top` shows it; empty where payloads come, or no call asks for any."""
        return self._found.text if self._overdue.looked and self._found is not None else ""

    def came(self) -> None:
        """Note that a payload came."""
        self._found = None
        self._overdue.came()

    def due(self) -> bool:
        """Return whether to look for the reason now, since nothing came."""
        return self._overdue.due()

    def found(self, found: NoPayloadReason | None) -> bool:
        """Note what a look has found, and count it. Whether to log it."""
        self._found = found
        if found is None:
            return False
        self.counts[found.why] += 1
        return self._said[found.why].due() is not None


# --- what rings say -----------------------------------------------------------------------------------
def holders_of(ring: SharedRingBuffer, rank: int | None = None) -> list[Holder]:
    """Return the holders of this ring's claims, of one rank or of all; this process sees its own, too."""
    native = ring.native
    held: Counter[int] = Counter()
    for slot in range(min(ring.slot_count, _MOST_SLOTS)):
        info = native.info(slot)
        if info.state not in (_ring.READY, _ring.READING):
            continue
        for each in range(info.readers) if rank is None else [rank]:
            if not info.done >> each & 1 and (holder := native.claim_word(slot, each)[0]) >= 0:
                held[holder] += 1
    if not held:
        return []
    now = time.monotonic_ns()
    found = []
    for owner in native.owners():
        if owner.index not in held:
            continue
        leased = owner.lease_ns > 0 and not owner.port and owner.alive
        silent_s = max(0, now - owner.heard_ns) / 1e9 if leased else 0.0
        found.append(
            Holder(
                ring=ring.ring_id,
                pid=owner.pid,
                port=owner.port,
                payloads=held[owner.index],
                silent_s=silent_s,
                left_s=owner.lease_ns / 1e9 - silent_s if leased else None,
                suspended=owner.alive and suspended(owner.pid),
                dead=not owner.alive,
            )
        )
    return found


def ranks_of(ring: SharedRingBuffer) -> int:
    """Return for how many ranks the payloads of this ring are or were, at most; 0: there was none."""
    return max(ring.native.info(slot).readers for slot in range(min(ring.slot_count, _MOST_SLOTS)))


def unread_of(ring: SharedRingBuffer) -> dict[int, int]:
    """Deliveries that nobody holds, by rank, of the ranks that have some."""
    return {rank: count for rank in range(_ring.MAX_READERS) if (count := ring.native.depth(rank)["ready"])}


def name_of(ring: SharedRingBuffer, rank: int) -> str:
    """Return a rank as its trainer gives it."""
    for name, ranks in ring.consumers.items():
        if rank in ranks:
            return name if len(ranks) == 1 else f"{name}:{rank - ranks.start}"
    return f"rank {rank}"


def held_here(ring: SharedRingBuffer, holders: Iterable[Holder]) -> int:
    """Count payloads that this process has claimed from a ring that it maps, or looks at after their claim's end."""
    claimed = sum(each.payloads for each in holders if each.pid == os.getpid() and not each.port)
    return max(claimed, ring.native.lent)


def foreign(place: str, fingerprint: str, schema: Schema | None, wanted: Sequence[Schema]) -> str:
    """Return a sentence about a ring whose payloads are of none of the schemas that a trainer wants."""
    ours = ", ".join(each.fingerprint for each in wanted)
    where = difference(schema, wanted) if schema is not None else ""
    return f"ring {place} has schema {fingerprint}, this trainer {ours}{f': {where}' if where else ''}"


def schema_of(encoded: bytes) -> Schema | None:
    """Return the schema that a ring's header or its listener says; None: none, or one of another version."""
    try:
        return Schema.decode(encoded) if encoded else None
    except SchemaError:
        return None


def run_of(segment: str) -> str:
    """Return where the ring of this name is found, as a URL of `open_rings`; "": its name is no run's."""
    found = _OF_A_RUN.fullmatch(segment)
    return f"rings:{found[1]}" if found else ""

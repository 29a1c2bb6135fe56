"""The rings of a run: those that a process gives, or those that are found by name, address or directory.

    this host    attached and claimed from (mapped.py); the payload is a view of its slot
    elsewhere    a demand waits at the listener (network.py); the payload comes with its claim

There is no second ledger beside the slots:

* A payload that a writer publishes in its ring is published.
* A part owns the claims of its payloads. When nothing refers to it any more they go back. Claims last while their
  holder lives and is heard: the attachment that claimed, or the connection. Any call is a sign of life, and so is what
  a client's loop sends by itself; the holder says with ``lease_s`` after how much silence its claims end.
* A payload that was claimed for the last time in vain is dead when the next one asks for it.
* What ended is remembered as counts, and as the last failures of each ring.
* Rings end with their host, and with them what they held.
* A writer says the end of its data in the header of its ring (`SharedRingBuffer.end_data`). Who maps the ring looks
  there (mapped.py), who asks a listener is answered so (demands.py), who comes later has it from the directory.
* A waiting `take_parts` sleeps on the event words of the rings that are mapped here, which `publish` advances
  (`Ring.wait_any`, native/ring/futex_any.hpp). For rings elsewhere a thread of the listener sleeps on the word
  (native/ucp/publish_watch.hpp); the answer to the demand rings a bell that ends the same wait.

What a trainer has of rings elsewhere beyond its batches, or has asked for, is at most three times what it takes at a
time, and one payload for each ring beside; of large payloads three times what one answer brings.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from transport import _ring
from transport.claims.deliveries import MAX_DELIVERIES, Failure, QueueDepth
from transport.claims.looks import depth_of, failures_of
from transport.claims.mapped import Ranked, RingsOfHost
from transport.claims.network import MOST_FAILURES, NetworkSource, summed
from transport.claims.notices import FirstAnnouncements, NoNotices, Notice, Notices, RingNotices, StoreNotices
from transport.claims.places import UNNAMED, Discovery, OnThisHost, RingAddress, each_observed, starts_of
from transport.claims.taken_part import TakenPart
from transport.claims.waiting import Holder, Known, NoPayloadReason, Waiting, crowded, few, is_final, own_fault, reason
from transport.config import configuration, lease_or_configured
from transport.errors import OWN_FAULTS, ClosedError, OpenFilesError, SchemaError, TransportError, UsageError, bare
from transport.ring.buffer import SharedRingBuffer
from transport.runtime.amounts import count
from transport.runtime.arguments import at_least, number, number_or_none, seconds
from transport.runtime.logs import LOOK_S, SAY_AGAIN_S, LogLimit
from transport.runtime.loop_thread import gone
from transport.runtime.waits import Flag
from transport.store.base import Store

if TYPE_CHECKING:
    from transport.ring.attached import AttachedRings
    from transport.runtime.loop_thread import LoopThread
    from transport.schema import Schema
    from transport.wires import Wire

log = logging.getLogger(__name__)

_NONE: Final[Sequence[Ranked]] = ()
_LOOK_S: Final = 0.1  # how often rings are looked for while something waits
_SLICE_S: Final = 0.1  # longest wait without a look for what has no wake-up


class TrainerClient(Protocol):
    """The part of a trainer's client (`UCXXClient`) that rings use."""

    why_nothing: Callable[[], str]  # the rings say it, for `transport top`
    places: str  # of the rings, likewise

    @property
    def claims(self) -> Any: ...

    def allows(self, wire: Wire) -> bool: ...

    def share(self, attached: AttachedRings) -> None: ...

    def uses_network(self) -> bool: ...


class FoundRings:
    """The rings of a run. `open_rings` makes one. All methods are thread-safe and block, so call them from threads and
    not from an event loop; all raise ClosedError after `close`.

    Several trainers of a process may use one: `connect` gives each its own, with its client's connections, over the
    same attachments.

    Args:
        places: where the rings are; closed with this object.
        store: for notices, of the directory; closed with this object.
        lease_s: after how much silence of this process its claims of mapped rings end; None: as configured. Claims over
            the network have the ``claim_lease_s`` of their client.
        max_deliveries: claims in vain after which a delivery is dead.

    Attributes:
        incomplete: tells how many claims of each ring wait until their group or step is complete; who plans steps sets
            it on the rings that it is connected to.
    """

    def __init__(
        self,
        places: Discovery | None = None,
        *,
        store: Store | None = None,
        lease_s: float | None = None,
        max_deliveries: int = MAX_DELIVERIES,
    ) -> None:
        if not 1 <= max_deliveries <= _ring.MAX_ATTEMPTS:
            raise UsageError(f"max_deliveries={max_deliveries}; 1 to {_ring.MAX_ATTEMPTS} are counted")
        self.places: Discovery = OnThisHost() if places is None else places
        self.lease_s = _lease(lease_s)
        self._store = store
        self._announced = FirstAnnouncements()
        self._notices: Notices = NoNotices()
        if store is not None:
            self._notices = StoreNotices(store)
        elif self.places.prefix:
            self._notices = RingNotices(self.places.prefix)
        self._max_deliveries = max_deliveries
        self._here = RingsOfHost(self.places, self.lease_s, max_deliveries)
        self._closed = Flag()
        self._process = os.getpid()
        # Of each user, with payloads and without; the one without a client is this one's:
        self._networks: dict[tuple[TrainerClient | None, bool], NetworkSource] = {}
        # Of users that have left:
        self._past: Counter[tuple[str, int, str]] = Counter()
        self._past_failures: deque[Failure] = deque(maxlen=MOST_FAILURES)
        # Of this user:
        wires = configuration().wires
        self._maps = not wires or "mapped" in wires
        self._uses_network = not wires or set(wires) != {"mapped"}
        self.incomplete: Callable[[], Mapping[str, int]] = dict
        self._schemas: frozenset[str] = frozenset()
        self._wanted: Sequence[Schema] = ()
        self._network = self._networks[None, True] = NetworkSource(self._served, max_deliveries, self._here.bell.ring)
        self._begin()

    def _begin(self) -> None:
        self._look_at = 0.0
        self._elsewhere = False  # whether one is asked over the network, or something came, as of the last look
        self._met = False  # whether a ring of this host was ever claimed from, as of the last look
        self._waiting = Waiting()
        self._has_waited = False
        self._missed = LogLimit(float("inf"))
        self._missing = LogLimit(SAY_AGAIN_S)
        self._mixed = LogLimit(float("inf"))
        self._expected: int | None = None  # rollouts whose ends are waited for; None: of those that were seen
        self._checked: frozenset[str] = frozenset()  # rings whose rollouts' starts were looked at
        self._turns = itertools.count()  # of rings here and elsewhere, which are asked first in turn

    def __repr__(self) -> str:
        return f"<FoundRings {self.places!r}, {self._here!r}, {self._network!r}>"

    @property
    def store(self) -> Store | None:
        """Store of the directory; None: there is none."""
        return self._store

    @property
    def max_deliveries(self) -> int:
        """Claims in vain after which a delivery is dead."""
        return self._max_deliveries

    # --- who uses it ----------------------------------------------------------------------------------
    def hand_out(self, ring: SharedRingBuffer) -> None:
        """Add the ring of a writer of this process, which stays the writer's own."""
        self._here.add(ring)

    def connect(
        self,
        thread: LoopThread,
        client: TrainerClient,
        schemas: Sequence[Schema],
        *,
        expected_rollouts: int | None = None,
        contents: bool = True,
    ) -> FoundRings:
        """Return the rings as a trainer uses them that has this client, and payloads of these schemas.

        Payloads from elsewhere come through the client; without ``contents`` their claims alone. `finished` waits for
        the ends of ``expected_rollouts``.
        """
        self._check_open()
        own = copy.copy(self)
        own._schemas = frozenset(schema.fingerprint for schema in schemas)
        own._wanted = schemas
        own._maps, own._uses_network = client.allows("mapped"), client.uses_network()
        client.share(self._here.attached)
        own._network = self._networks[client, contents] = NetworkSource(
            own._served, self._max_deliveries, self._here.bell.ring, thread, client.claims, contents, schemas
        )
        own._begin()
        own._expected = expected_rollouts
        if contents:
            own.says_why(client)
        return own

    def says_why(self, client: TrainerClient) -> None:
        """Have the client's status say where its rings are looked for, and why nothing comes to this user."""
        client.places = repr(self.places)
        client.why_nothing = self._waiting.text

    def disconnect(self, client: TrainerClient) -> None:
        """Give up what was claimed through this client, which is closed from now on."""
        for key in [key for key in list(self._networks) if key[0] is client]:
            network = self._networks[key]
            network.close()
            self._networks.pop(key, None)
            self._past.update(network.counts)
            self._past_failures.extend(network.failures)

    def _served(self) -> Mapping[str, RingAddress]:
        return self._here.served(self._schemas, mapped=self._maps, foreign=self._network.foreign)

    # --- taking -----------------------------------------------------------------------------------------
    def take_parts(
        self, n: int, timeout_s: float = 0.0, *, rank: int | str = 0, consumer: str, oldest_version: int | None = None
    ) -> list[_ring.ClaimedBatch | TakenPart]:
        """Take up to ``n`` payloads, of each ring the oldest first; waits ``timeout_s`` for the first.

        ``rank`` may be the name that a ring has for a consumer; ``consumer`` names the claimant in reports. What is of
        an older policy than ``oldest_version`` is discarded instead, with that reason, and counted as ``aged``; what
        was written without a version is never too old.

        Raises what keeps this process itself from every ring, when the time is over, or at once where every address
        refuses it; RankError where all rings are here and none has the consumer of this name.
        """
        give_up = 0.0
        while True:
            if time.monotonic() >= self._look_at or self._closed.is_set or os.getpid() != self._process:
                self._look()
            here, unknown = self._here.ranked(self._schemas, rank) if self._maps else (_NONE, None)
            if unknown is not None and not self._elsewhere:
                raise unknown
            slice_s = min(give_up - time.monotonic(), _SLICE_S) if give_up else 0.0  # at first without a wait
            parts: list[_ring.ClaimedBatch | TakenPart] = []
            try:
                if here and self._elsewhere:
                    self._take(parts, n, max(0.0, slice_s), here, rank, consumer, oldest_version)
                elif here:
                    parts += self._here.take_parts(here, n, slice_s, None, consumer, oldest_version)
                elif self._elsewhere:
                    parts += self._network.take_parts(n, slice_s, rank, consumer, oldest_version)
            except TransportError:
                if not parts:
                    raise  # else the next call meets it again: what was taken is the caller's
            if parts:
                if self._has_waited:
                    self._has_waited = False
                    self._waiting.came()
                return parts
            if not give_up:
                give_up = time.monotonic() + timeout_s
            elif self._waited(rank, give_up, here):
                return parts
            elif not here and not self._elsewhere:
                self._closed.wait(slice_s)

    def _take(
        self,
        parts: list[_ring.ClaimedBatch | TakenPart],
        n: int,
        wait_s: float,
        here: Sequence[Ranked],
        rank: int | str,
        consumer: str,
        oldest_version: int | None,
    ) -> None:
        """Take one round; rings here and elsewhere are first in turn. ``parts`` grows with each half."""
        rung = self._here.bell.rung
        for mapped in (True, False) if next(self._turns) % 2 else (False, True):
            left = n - sum(map(len, parts))
            if left and mapped:
                parts += self._here.take_parts(here, left, 0.0, None, consumer, oldest_version)
            elif left:
                parts += self._network.take_parts(left, 0.0, rank, consumer, oldest_version)
        if not parts:  # the bell, or a ring here, ends the wait
            parts += self._here.take_parts(here, n, wait_s, rung, consumer, oldest_version)

    def heard(self) -> None:
        """Say to the rings of this host that this process lives; those elsewhere hear it from their connections."""
        if not self._closed.is_set:
            self._here.attached.heard()

    def rest(self) -> None:
        """Leave payloads of rings elsewhere to others until the next take: no demand waits, and what came goes back."""
        self._network.rest()

    def rest_at_once(self) -> None:
        """`rest`, and return when no demand is left that discards by an older limit."""
        self._network.rest_at_once()

    def _waited(self, rank: int | str, give_up: float, here: Sequence[Ranked]) -> bool:
        """Return whether the time is over, after a look that found nothing.

        Raises what is this process's own fault: at the end of the time, or at once where nothing else can come.
        """
        self._has_waited = True
        if self._waiting.due():
            with contextlib.suppress(TransportError):  # the caller meets it
                found = self.why_nothing(rank)
                if self._waiting.found(found) and found is not None:
                    log.warning("no payload has come for %.0f s: %s", LOOK_S, found.text)
        over = time.monotonic() >= give_up
        if self._elsewhere and (over or self.places.fixed):
            reached = self._network.reached(rank, named=bool(here), met=self._met)
            fault = own_fault(reached)
            if fault is not None and (over or is_final(reached, len(self._served()))):
                raise bare(fault)
        return over

    def why_nothing(self, rank: int | str | None = None) -> NoPayloadReason | None:
        """Say why there is nothing to claim at the moment; None: its rings are there, and their turn is next."""
        return reason(self._known(rank))

    def slots(self) -> dict[str, int]:
        """Return how many slots each ring has that payloads are claimed from."""
        here = {ring.ring_id: ring.slot_count for ring in self._here.rings(self._schemas)} if self._maps else {}
        return {**self._network.slots(), **here}

    def crowded(self, share: float = 1.0) -> list[str]:
        """Return a sentence for each ring whose slots are held for what is not complete, at least this share of them.

        Where it is every slot, the ring's rollout waits for a group or step that waits for it.
        """
        return crowded(self.incomplete(), self.slots(), share)

    def finished(self, expected_rollouts: int | None = None) -> bool:
        """Return True when no payload comes any more: every rollout has closed cleanly, and every payload is done.

        Ask when a `take_parts` has brought nothing. At addresses the ring that each of them served last is expected to
        end.

        A killed rollout has not ended: another one is expected in its place. Without addresses or ``expected_rollouts``
        its ring keeps this False, unless a rollout of the same name ends on this host. The ends of an earlier start of
        a job with the same directory count as those of its own: where no others are known, a warning says so.

        Args:
            expected_rollouts: how many have to end; None: as many as the trainer said, else all of those, at least one,
                that this process has seen; 0: none has to, but none that this process has seen goes on.
        """
        self._check_open()
        expected_rollouts = self._expected if expected_rollouts is None else expected_rollouts
        ended, living = self._ends(mapped=self._maps)
        if living or not self._are_all(ended, expected_rollouts):
            return False
        if expected_rollouts is not None or not self._at_addresses:
            self._say_missed(ended)
        return True

    def all_written(self, rank: int | str, held: Mapping[str, int]) -> bool:
        """Return whether every rollout has said its last write, and the rings have only what this user holds.

        Which rollouts these are: as for `finished`. What a ring has left only falls behind its end, and what is held is
        of it: a count from before, of rings elsewhere, says too much at most.

        Args:
            rank: whose payloads.
            held: claims of this user that were not asked to end, by ring.
        """
        self._check_open()
        ended, living = self._ends(mapped=self._maps)
        left = self._network.left(rank) if self._uses_network else {}
        if self._maps:
            left |= self._here.left(self._schemas, rank)
        if any(ring not in left or left[ring] > held.get(ring, 0) for ring in living):
            return False
        return self._are_all({**ended, **dict.fromkeys(living, True)}, self._expected)

    @property
    def _at_addresses(self) -> list[RingAddress]:
        """Places where whatever is served belongs to the run."""
        return [place for place in self._served().values() if not place.ring] if self._uses_network else []

    def _are_all(self, ended: Mapping[str, bool], expected_rollouts: int | None) -> bool:
        """Return whether those that have said their end are all rollouts of the run."""
        if expected_rollouts is None and self._at_addresses:  # some may be one ring's
            return all(ended.get(self._network.ring_at(place)) for place in self._at_addresses)
        said = sum(ended.values())
        return said >= expected_rollouts if expected_rollouts is not None else 0 < said == len(ended)

    def _say_missed(self, ended: Mapping[str, bool]) -> None:
        """Warn where every ring had ended before this process first looked: the next start of a job looks the same."""
        before = self.places.ended_before()
        if ended and ended.keys() <= before.keys() and self._missed.due() is not None:
            log.warning(
                "finished without a payload: every rollout that %r know (%d) had ended before this process looked, the "
                "last one %.0f s ago. A job that is started again needs a new run name (run=…) or a new file: these "
                "ends count as those of its own rollouts, and the payloads of these are not taken",
                self.places,
                len(ended),
                max(0.0, time.time() - max(before[ring] for ring in ended)),
            )

    def _ends(self, *, mapped: bool) -> tuple[dict[str, bool], set[str]]:
        """Return, of rings that are gone, or ``mapped`` and done, whether each has said its end; and the others."""
        ended, living, replaced = self._here.ended(self._schemas, mapped=mapped)
        if self._uses_network:
            there, waiting = self._network.ended()
            ended |= {ring: said or ended.get(ring, False) for ring, said in there.items()}
            served = {place.ring for place in self._served().values() if place.ring}
            lost = self._lost()
            ended = dict.fromkeys(lost & served, False) | ended
            living |= waiting | {ring for ring in served - lost if not ended.get(ring)}
        if mapped:
            living |= self._left_out().keys()
        return {ring: said for ring, said in ended.items() if said or ring not in replaced}, living

    def _lost(self) -> set[str]:
        """Return the rings of which nobody has answered for a lease's time.

        A directory names those of killed rollouts for as long as they may last.
        """
        directory, networks = self.places.directory, list(self._networks.values())
        lost: set[str] = set()
        if directory is not None:
            lost.update(*(each.unreached(directory.lease_s) for each in networks))
        return lost.difference(*(each.ended()[1] for each in networks)) if lost else lost

    def has_met_rings(self) -> bool:
        """Return whether a ring was met, which may be there, have ended, or have been killed."""
        self._check_open()
        ended, living, _ = self._here.ended(self._schemas, mapped=self._maps)
        return bool(ended or living or (self._uses_network and any(self._network.ended())))

    def holders(self) -> list[Holder]:
        """Return the holders of claims of the rings on this host."""
        return list(self._known(None).holders)

    def reasons(self) -> Mapping[str, int]:
        """Return how often a look, every few seconds without a payload, found why none comes."""
        return {why.value: count for why, count in self._waiting.counts.items()}

    def _known(self, rank: int | str | None) -> Known:
        self._check_open()
        here = self._here.known(self._wanted, rank)
        reached = self._network.reached(rank, named=bool(here.rings), met=self._met)
        fitting = set(here.rings) if self._maps else set()
        fitting |= reached.rings if reached.rings or reached.faults else set(self._served())
        elsewhere = self._here.elsewhere()
        foreign = [each for ring, each in self._network.foreign.items() if ring in elsewhere]
        foreign += [each for each in reached.faults.values() if isinstance(each, SchemaError)]
        strangers = [*here.foreign, *map(str, foreign)]
        ends, _ = self._ends(mapped=False)
        own = (OpenFilesError, *OWN_FAULTS)  # this process's, at these places alone
        limited = [f"{place}: {fault}" for place, fault in reached.faults.items() if isinstance(fault, own)]
        number = rank if isinstance(rank, int) else None
        held = (summed(each.counted(), number, set())["claimed"] for each in list(self._networks.values()))
        return Known(
            repr(self.places),
            len(fitting),
            here.unread,
            strangers,
            [*self._left_out().values(), *here.unnamed, *limited],
            reached,
            here.holders,
            self.places.others(),
            [ring for ring, said in ends.items() if not said],
            sum(ends.values()),
            self._expected,
            number,
            here.ranks,
            full=not here.free and fitting <= here.rings,
            own=sum(held, here.own if self._maps else 0),
            other_ranks=here.other_ranks,
            crowded=self.crowded(),
        )

    # --- following ------------------------------------------------------------------------------------
    def _look(self) -> None:
        """Look for rings here and elsewhere."""
        now = time.monotonic()
        self._check_open()
        if self._maps:
            self._here.look(self._schemas)
            self._met = self._met or bool(self._here.rings(self._schemas))
        self._elsewhere = self._uses_network and (bool(self._served()) or self._network.in_hand)
        if self.places.prefix == UNNAMED:
            self._say_mixed()
        left_out = self._left_out()
        if left_out and self._missing.due() is not None:
            log.warning(
                "left out %s of %r: %s", count(len(left_out), "ring"), self.places, few("; ", left_out.values())
            )
        self._look_at = now + _LOOK_S

    def _say_mixed(self) -> None:
        """Warn where rollouts of several starts name no run: a trainer takes from all of them."""
        rings = self._here.seen()
        ids = frozenset(ring.ring_id for ring in rings)
        if ids == self._checked:
            return
        self._checked = ids
        starts = starts_of(rings)
        if len(starts) > 1 and self._mixed.due() is not None:
            log.warning(
                "rollouts that name no run were started apart, and this trainer takes from all of them: %s. Where they "
                "are of different jobs, set another TRANSPORT_RUN for each job, or give its processes the same rings=",
                few("; ", (f"processes {', '.join(map(str, sorted(pids)))}" for pids in starts.values())),
            )

    def say_ended(self) -> None:
        """Tell of rings here that said their end before: their ends count, be they of this job or of a former one."""
        told = []
        for ring in each_observed(self._here.segments()):
            with contextlib.suppress(ClosedError):  # closed meanwhile
                if ring.native.ended and ring.native.unread:
                    pids = sorted(set().union(*starts_of([ring]).values()))
                    told.append(f"{ring.name} (processes {', '.join(map(str, pids)) or 'killed'})")
        if told:
            log.info(
                "rings of %r had said their end before this trainer came, and it takes what they hold, as a trainer "
                "that was started again does: %s. Where these rings are of a former job, end that one first, or give "
                "each job another run (TRANSPORT_RUN, or rings=)",
                self.places,
                few("; ", told),
            )

    def _left_out(self) -> dict[str, str]:
        """Return a sentence for each ring of this host that is not mapped, and not asked either, by its segment."""
        unmapped = {**self.places.unseen(), **(self._here.unmapped() if self._maps else {})}
        if unmapped and self._uses_network:
            for place in self._served().values():
                unmapped.pop(place.segment or "", None)
        return {name: f"ring {name} is not reached: {why}" for name, why in unmapped.items()}

    # --- looking --------------------------------------------------------------------------------------
    def depth(self, rank: int | None = None) -> QueueDepth:
        """Return counts of one rank, or of all, of the rings on this host; of others what this process has claimed."""
        self._check_open()
        rank = number_or_none(rank, "rank of depth()")
        seen = self._here.seen()
        but = {ring.ring_id for ring in seen}
        past = self._here.past()
        counts = summed(past, rank, but)
        but |= {ring for ring, *_ in past}
        counts.update(summed(self._past, rank, but))
        for network in list(self._networks.values()):
            counts.update(network.depth(rank, but))
        return depth_of(seen, rank, counts)

    def failures(self, limit: int = 100) -> list[Failure]:
        """Return the last deliveries that were discarded or died, the latest published first.

        Rings on this host remember theirs; of others it is what this process discarded.
        """
        self._check_open()
        limit = at_least(0, number(limit, "limit of failures()"), "limit of failures()")
        found = failures_of(self._here.seen(), limit)
        known = {(failure.ticket_id, failure.rank) for failure in found}
        logs = [*(network.failures for network in list(self._networks.values())), self._past_failures]
        elsewhere = [each for log in logs for each in reversed(list(log))]
        return [*(each for each in elsewhere if (each.ticket_id, each.rank) not in known), *found][:limit]

    def segments_here(self) -> list[str]:
        """Names of the segments of the rings on this host."""
        self._check_open()
        return [ring.name for ring in self._here.seen()]

    def not_counted(self) -> dict[str, RingAddress]:
        """Return the rings, by id, whose hosts alone know their depth and failures: they cannot be seen from here."""
        self._check_open()
        elsewhere, directory = self._here.elsewhere(), self.places.directory
        lost = sorted(self._lost() & elsewhere.keys())
        gone = directory.absent(lost) if directory is not None and lost else []  # a living rollout's are in question
        return {ring: place for ring, place in elsewhere.items() if ring not in gone}

    # --- notices --------------------------------------------------------------------------------------
    def announce(self, topic: str, version: int, payload: bytes = b"") -> bool:
        """Replace the topic's notice, unless it has this version or a later one: then False.

        On one host the notice ends with the last process that announced on its topic.
        """
        self._check_open()
        version = number(version, "version of announce()")
        accepted = self._notices.announce(topic, version, payload)
        return self._announced.answer(topic, version, accepted, lambda: self.latest(topic, version))

    def latest(self, topic: str, newer_than: int | None = None, timeout_s: float = 0.0) -> Notice | None:
        """Return the topic's notice if later than ``newer_than``; waits for one up to ``timeout_s``."""
        self._check_open()
        seconds(timeout_s, "timeout_s of latest()")
        newer_than = number_or_none(newer_than, "newer_than of latest()")
        notice = self._notices.latest(topic, newer_than, float(timeout_s), self._closed)
        self._check_open()
        return notice

    def close(self) -> None:
        """Leave the rings that were found, and give up what is claimed. Idempotent; nothing in a forked child."""
        if gone(self._process):
            return
        self._closed.set()
        self._here.bell.ring()
        for network in list(self._networks.values()):
            network.close()
        self._here.close()
        self._notices.close()
        if self._store is not None:
            self._store.close()

    def _check_open(self) -> None:
        if gone(self._process):
            raise ClosedError("a forked child does not have its parent's claims; open the rings in the child")
        if self._closed.is_set:
            raise ClosedError("these rings are closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lease(lease_s: float | None) -> float:
    """Return how long claims last: what the caller gave, else what the operator configured."""
    chosen = lease_or_configured(lease_s)
    seconds(chosen, "lease_s")
    if not 0 < chosen < math.inf:
        raise UsageError(f"lease_s={chosen}; give a number of seconds above 0, with an end")
    return float(chosen)

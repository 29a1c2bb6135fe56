"""StepRecords: what the ranks of a mesh know of its steps, in their store.

    step/K       the plan of step K: groups, and who trains on which samples; or that the data has ended
    part/K/R     the tickets of replica R in it
    vote/K/N     rank N has "read" its part, and then has "learned"
    state/K      what all ranks follow:
                     planned ──all have read──► go ──all have learned──► consumed
                        └──a rank cannot read its part──► void
    next         the number of the next plan
    planner      who plans; its lease is the planner's life

A step's state is final where nothing leads on, and each change is a compare-and-set: whoever sees the last vote makes
it. A plan is written together with ``next`` and the planner's record, so that a planner that was followed by another
one writes none.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from transport.errors import RankError, RunLostError
from transport.runtime.hiding import hiding
from transport.store.base import ABSENT, Change, Entry, Store, check_key
from transport.store.decision import Next, advance, decide
from transport.store.stored import decode, encode
from transport.ticket import Delivery, Identity
from transport.training.layout import SampleSize

State = Literal["planned", "go", "consumed", "void"]

READ: Final = "read"
LEARNED: Final = "learned"


class PlannedGroup(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A group of a plan.

    Attributes:
        identities: of its samples where they are.
        deliveries: what a record has of its samples, who keep it when they are restored into another ring.
        marks: payloads without fields that say its end.
        short: it has fewer samples than it should.
    """

    name: str
    tokens: list[int]
    identities: list[Identity]
    deliveries: list[Delivery]
    marks: list[Identity] = []
    short: bool = False


class PlannedStep(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The plan of a step; without replicas: the data has ended.

    Attributes:
        layout: of each replica its micro-batches, each of them samples as (group, number).
        shape: of the mesh: replicas, and ranks of each.
        said: of an end, another text each time that it is said.
        voids: of an end, void steps whose groups have come again.
    """

    number: int
    groups: list[PlannedGroup] = []
    layout: list[list[list[tuple[int, int]]]] = []
    shape: tuple[int, int] = (0, 0)
    said: str = ""
    voids: list[int] = []

    @property
    def ends(self) -> bool:
        """True if there is no such step, since the data has ended."""
        return not self.layout

    def identities(self) -> list[Identity]:
        """Return what the step has of the rings."""
        return [each for group in self.groups for each in (*group.identities, *group.marks)]

    def deliveries(self) -> list[Delivery]:
        """Return what a record has of its samples."""
        return [each for group in self.groups for each in group.deliveries]

    def origins(self) -> list[Identity]:
        """Return as what its samples were first written."""
        return [(ring, slot, generation) for ring, slot, generation, _ in self.deliveries()]

    def names(self) -> list[str]:
        """Return the names of its groups, of those that have one."""
        return [group.name for group in self.groups if group.name]

    def samples(self, replica: int) -> list[list[SampleSize]]:
        """Return the micro-batches of a replica."""
        return [[SampleSize(*each) for each in micro] for micro in self.layout[replica]]


@hiding("tickets")
class PlannedPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A replica's part of a step: of each micro-batch the tickets, encoded, and the versions of their policies."""

    tickets: list[list[bytes]] = []
    versions: list[list[int | None]] = []


class _Followed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The state of a step; why it is void, and what could not be read of it."""

    state: State
    why: str = ""
    unread: list[Identity] = []


class _Planner(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Record of the rank that plans."""

    process: str
    rank: int


class Standing(NamedTuple):
    """A step that is not forgotten, and its state."""

    step: PlannedStep
    state: State


_PLANNED = _Followed("planned")


class StepRecords:
    """The records of one mesh, as one rank sees them. All methods block, and raise StoreError; any thread.

    Attributes:
        lease_s: after how much silence another rank plans on.
    """

    def __init__(self, store: Store, name: str, rank: int, ranks: int, lease_s: float) -> None:
        self._store = store
        self._prefix = check_key(f"mesh/{name}/")
        self._rank = rank
        self._ranks = ranks
        self.lease_s = lease_s
        self._token = secrets.token_hex(8)
        self._lead: int | None = None  # version of the planner's record, while it is this rank's
        self._term = 0
        self.id = decide(store, self._key("id"), secrets.token_hex(8))
        self._seat = store.put(self._key("rank", rank), encode(self._token))  # another process of the rank is out
        self.end_before = next((step.said for step, _ in self.standing() if step.ends), "")

    def __repr__(self) -> str:
        return f"<StepRecords {self._prefix} rank {self._rank} of {self._ranks}{', planner' if self._lead else ''}>"

    def _key(self, *parts: object) -> str:
        return self._prefix + "/".join(map(str, parts))

    # --- planning -----------------------------------------------------------------------------------
    def lead(self) -> int:
        """Become the planner where there is none, or go on as the planner: the number of its term. 0: another rank is.

        After a silence that was longer than the lease it is another term, although nobody was faster. A planner that is
        started again need not wait for the lease of the process that it was: that one is out.
        """
        key = self._key("planner")
        if self._lead is not None:
            if key in self._store.renew({key: self._lead}, self.lease_s):
                return self._term
            self._lead = None
        expected = self._seat
        found, *there = self._store.get_many([key, *self._there()])
        self._check_there(there, expected)
        if found is not None and decode(_Planner, key, found.value).rank != self._rank:
            return 0
        lead = Change(key, encode(self._mine()), ABSENT if found is None else found.version, self.lease_s)
        seat = Change(self._key("rank", self._rank), encode(self._token), expected)
        written = self._store.put_many([lead, seat])
        if written is None:
            return 0
        self._lead, self._seat = written
        self._term += 1
        return self._term

    def _mine(self) -> _Planner:
        return _Planner(self._token, self._rank)

    def _as_planner(self, changes: Sequence[Change]) -> bool:
        """Make changes where this rank is the planner still, and each record is as expected."""
        if self._lead is None:
            return False
        written = self._store.put_many(
            [Change(self._key("planner"), encode(self._mine()), self._lead, self.lease_s), *changes]
        )
        if written is None:
            return False
        self._lead = written[0]
        return True

    def leave(self) -> None:
        """Let another rank plan."""
        if self._lead is not None:
            self._store.compare_and_set(self._key("planner"), None, self._lead)
            self._lead = None  # last, so that after an interrupt the next call finishes

    def planner(self) -> int | None:
        """Return the rank that plans; None: there is none at the moment."""
        entry = self._store.get(self._key("planner"))
        return None if entry is None else decode(_Planner, self._key("planner"), entry.value).rank

    def next_number(self) -> int:
        """Return the number of the next plan."""
        return self._next()[0]

    def _next(self) -> tuple[int, int]:
        """Return the number of the next plan, and the version of its record."""
        key = self._key("next")
        entry = self._store.get(key)
        return (0, ABSENT) if entry is None else (decode(int, key, entry.value), entry.version)

    def plan(self, step: PlannedStep, parts: Sequence[PlannedPart]) -> bool:
        """Write the next plan. False: this rank is not the planner any more, or another one has written it."""
        number, version = self._next()
        if number != step.number:
            return False
        return self._as_planner(
            [
                Change(self._key("next"), encode(step.number + 1), version),
                Change(self._key("step", step.number), encode(step)),
                *(Change(self._key("part", step.number, at), encode(each)) for at, each in enumerate(parts)),
            ]
        )

    def end(self, number: int, voids: Sequence[int]) -> None:
        """Say that there is no step of this number, since the data has ended. Ranks that come later need it again.

        It does not hold once a step is void that is none of ``voids``: see `is_the_end`.
        """
        next_number, version = self._next()
        if next_number == number:
            same = [] if version == ABSENT else [Change(self._key("next"), encode(number), version)]
            end = PlannedStep(number, said=secrets.token_hex(8), voids=list(voids))
            self._as_planner([*same, Change(self._key("step", number), encode(end))])

    def take_back_end(self, number: int) -> bool:
        """Say that other steps follow, and none has this number. False: this rank is not the planner any more."""
        next_number, version = self._next()
        following = Change(self._key("next"), encode(number + 1), version)
        return next_number == number and self._as_planner([following, *self._forgotten(number)])

    def everybody_has_seen(self, number: int) -> bool:
        """Tell whether every rank has voted that it has seen the end."""
        return self._all_voted(number, READ)

    def standing(self) -> list[Standing]:
        """Return the steps that are not forgotten, in their order."""
        prefix = self._key("step") + "/"
        found = self._store.scan(prefix)
        steps = [decode(PlannedStep, key, entry.value) for key, entry in found.items()]
        states = self.states([step.number for step in steps])
        return sorted(map(Standing, steps, states), key=lambda each: each.step.number)

    def forget(self, number: int) -> None:
        """Remove what is known of a step that has ended, as the planner."""
        self._as_planner(self._forgotten(number))

    def _forgotten(self, number: int) -> list[Change]:
        parts = self._store.scan(self._key("part", number) + "/")
        votes = self._store.scan(self._key("vote", number) + "/")
        keys = [self._key("step", number), self._key("state", number), *parts, *votes]
        return [Change(key, None) for key in keys]

    def void(self, number: int) -> tuple[str, set[Identity]]:
        """Return why a step is void, and what could not be read of it."""
        (found,) = self._followed([number])
        return found.why, set(found.unread)

    # --- following ----------------------------------------------------------------------------------
    def wait(self, number: int, timeout_s: float) -> PlannedStep | None:
        """Return the plan of this number as soon as there is one; None: not in this time."""
        key = self._key("step", number)
        entry = self._store.watch(key, ABSENT, timeout_s)
        return None if entry is None else decode(PlannedStep, key, entry.value)

    def is_the_end(self, end: PlannedStep) -> bool:
        """Return whether an end holds: it is of this start of the job, and no step became void since it was said."""
        voids = {step.number for step, state in self.standing() if state == "void"}
        return end.said != self.end_before and voids <= set(end.voids)

    def part(self, number: int, replica: int) -> PlannedPart:
        """Return what a replica reads; nothing where the step is forgotten."""
        key = self._key("part", number, replica)
        entry = self._store.get(key)
        return PlannedPart() if entry is None else decode(PlannedPart, key, entry.value)

    def states(self, numbers: Sequence[int]) -> list[State]:
        """Return the states of steps."""
        return [each.state for each in self._followed(numbers)]

    def _followed(self, numbers: Sequence[int]) -> list[_Followed]:
        keys = [self._key("state", number) for number in numbers]
        entries = self._store.get_many(keys)
        return [_followed(key, entry) for key, entry in zip(keys, entries, strict=True)]

    def wait_state(self, number: int, after: State, timeout_s: float) -> State:
        """Return the state of a step as soon as it is another one than ``after``, or that when the time is over."""
        key = self._key("state", number)
        entry = self._store.get(key)
        if _followed(key, entry).state == after:
            entry = self._store.watch(key, ABSENT if entry is None else entry.version, timeout_s)
        return _followed(key, entry).state

    def has_read(self, number: int) -> None:
        """Vote that this rank has what it trains on."""
        self._vote(number, READ)
        if self._all_voted(number, READ):
            self._advance(number, "planned", _Followed("go"))

    def has_seen_the_end(self, number: int) -> None:
        """Vote that this rank knows that there is no step of this number."""
        self._vote(number, READ)

    def cannot_read(self, number: int, why: str, unread: Sequence[Identity]) -> None:
        """Say that this rank cannot have what it is to train on: no rank trains on the step, unless all have read."""
        self._advance(number, "planned", _Followed("void", why, list(unread)))

    def has_learned(self, number: int) -> State:
        """Vote that this rank has trained on the step; returns the step's state then."""
        self._vote(number, LEARNED)
        if self._all_voted(number, LEARNED):
            self._advance(number, "go", _Followed("consumed"))
        return self.states([number])[0]

    def make_void(self, number: int, why: str) -> None:
        """Say that no rank trains on a step of a mesh that has another shape by now."""
        void = Next(_Followed("void", why))
        advance(
            self._store,
            self._key("state", number),
            _Followed,
            lambda found: None if (found or _PLANNED).state in ("consumed", "void") else void,
        )

    def take_back_vote(self, number: int) -> None:
        """Take back what an earlier start of this rank has voted on a step, without what it had learned.

        Where no rank has learned the step it is to be read by all again: what this rank needs may be gone by now.
        """
        self._store.delete(self._key("vote", number, self._rank))
        state = self._key("state", number)
        keys = [state, *(self._key("vote", number, rank) for rank in range(self._ranks))]
        while True:
            entry, *votes = self._store.get_many(keys)
            if (
                entry is None
                or _followed(state, entry).state != "go"
                or encode(LEARNED) in (vote.value for vote in votes if vote is not None)
            ):
                return
            still = [  # a rank that votes meanwhile may have learned it
                Change(key, None, ABSENT)
                if vote is None
                else Change(key, encode(decode(str, key, vote.value)), vote.version)
                for key, vote in zip(keys[1:], votes, strict=True)
            ]
            if self._store.put_many([Change(state, None, entry.version), *still]) is not None:
                return

    def silent(self, number: int, vote: str) -> list[int]:
        """Return the ranks that have not voted so."""
        entries = self._store.get_many([self._key("vote", number, rank) for rank in range(self._ranks)])
        enough = (encode(LEARNED), encode(vote))
        return [rank for rank, entry in enumerate(entries) if entry is None or entry.value not in enough]

    def _vote(self, number: int, vote: str) -> None:
        seat, mine = self._key("rank", self._rank), encode(self._token)
        key = self._key("vote", number, self._rank)
        while True:
            expected = self._seat
            written = self._store.put_many([Change(seat, mine, expected), Change(key, encode(vote))])
            if written is not None:
                self._seat = written[0]
                return
            # Another thread of this process votes as well, or another process does.
            entry = self._check_there(self._store.get_many(self._there()), expected)
            if entry.value != mine:
                raise RankError(
                    f"another process has begun to train as rank {self._rank} of {self._prefix}: end this one"
                )
            self._seat = entry.version

    def _there(self) -> list[str]:
        """Return the keys of what `_check_there` looks at."""
        return [self._key("id"), self._key("rank", self._rank)]

    def _check_there(self, there: Sequence[Entry | None], before: int) -> Entry:
        """Return this rank's seat, whose version was this one before.

        RunLostError where the store has lost what it knew of the mesh, or a part, and perhaps has another mesh of the
        name: a rank's seat, which each of its votes writes, never goes back.
        """
        entry, seat = there
        known = entry is not None and decode(str, self._key("id"), entry.value) == self.id
        if not known or seat is None or seat.version < before:
            raise RunLostError(
                f"{self._prefix}: the store has lost records of the steps: it was emptied, or started without its file "
                "or with an earlier one. Go back to the checkpoint with every rank"
            )
        return seat

    def _all_voted(self, number: int, vote: str) -> bool:
        return not self.silent(number, vote)

    def _advance(self, number: int, state: State, following: _Followed) -> None:
        key = self._key("state", number)
        advance(
            self._store, key, _Followed, lambda found: Next(following) if (found or _PLANNED).state == state else None
        )


def _followed(key: str, entry: Entry | None) -> _Followed:
    return _PLANNED if entry is None else decode(_Followed, key, entry.value)

"""Planner: makes steps of what the rings have, while its rank leads the mesh; another rank follows it where it dies.

    claims without bytes ──► groups (assembling.py) ──► layout (layout.py) ──► plan, in the records (step_records.py)
    a step's state: consumed ──► its claims are consumed at the rings      void ──► they are given back

`turn` is called again and again, from one thread at a time. The planner holds the claims of all that it has seen; who
follows it claims them anew, and goes on with the steps that stand in the records: their payloads are in no other group.

A sample is trained once: it is known by its origin, which a restored one keeps, and by the name of its group, where a
rollout writes it anew. What comes of a complete group or of a step that stands waits for what becomes of these:

    learned ──► left out      void, given up, lost ──► it is taken like any other

What was learned the record says, from which the model began, and not the records of steps: those of a job that went
back to a checkpoint have steps behind it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Literal

import msgspec

from transport.claims.lead import LeadSaid
from transport.errors import StoreError, TransportError
from transport.group import returned
from transport.runtime.amounts import count
from transport.runtime.error_text import error_text
from transport.runtime.logs import LOOK_S, SAY_AGAIN_S, LogLimit
from transport.ticket import Identity, Ticket
from transport.training.assembling import Arrival, Assembly, GivenUp, Group, Reason
from transport.training.counts import StepCounts
from transport.training.holding import HeldSample, Holding
from transport.training.layout import lay_out
from transport.training.learned import Learned
from transport.training.step_records import PlannedGroup, PlannedPart, PlannedStep, StepRecords

log = logging.getLogger(__name__)

MOST: Final = 1024  # claims in one turn
_SLICE_S: Final = 0.05  # of a wait for claims, after which states are looked at
_RENEW_S: Final = 1.0
_KEEP: Final = 3  # steps that are consumed and stay in the records, for ranks that look at their state
_ANSWERS_S: Final = 5.0  # for rings to consume, at a close, what is learned
_LAST_S: Final = 30.0  # for votes on the last steps
_GONE_S: Final = 10.0  # for a ring that nobody answers for to come back
_BACK_S: Final = 0.2  # until what a step could not have is claimed again

Choose = Callable[[Group], bool]


class StepTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Terms that all steps of a run share.

    Attributes:
        groups: of a step.
        max_tokens: of a micro-batch; None: a replica has one micro-batch.
        choose: tells of a complete group whether it is trained on; what it refuses is consumed, and not told.
        incomplete: what becomes of a group that will not complete.
        group_timeout_s: after which an open group does not wait for more samples; None: for ever.
        dropped: function of a group that no step gets, and the reason; called in the planner's thread.
        stale: what becomes of a group with a sample that is older than the trainer's ``max_age``.
        tail: what becomes of the last groups, where they are fewer than ``groups``.
    """

    groups: int
    max_tokens: int | None = None
    choose: Choose | None = None
    incomplete: Literal["drop", "short"] = "drop"
    group_timeout_s: float | None = 600.0
    dropped: Callable[[Group, Reason], object] | None = None
    stale: Literal["drop", "keep", "return"] = "drop"
    tail: Literal["drop", "short"] = "short"


class Planner:
    """Planner of the steps of a mesh.

    Args:
        shape: replicas, and ranks of each.
        rank: of the readers that the mesh is, among those of each payload.
        oldest: gives the version below which a group is stale, at the moment; None: none is.
        fits: raises for a ticket that the trainer cannot lay out.
        lead: tells rollouts how many steps wait.
        learned: what the model of this rank has.
        counts: of the trainer.
    """

    def __init__(
        self,
        holding: Holding,
        records: StepRecords,
        terms: StepTerms,
        *,
        shape: tuple[int, int],
        rank: int,
        oldest: Callable[[], int | None],
        fits: Callable[[Ticket], object],
        lead: LeadSaid,
        learned: Learned,
        counts: StepCounts,
    ) -> None:
        self._holding = holding
        self._records = records
        self._terms = terms
        self._shape = shape
        self._rank = rank
        self._oldest = oldest
        self._fits = fits
        self._model = learned
        self._learned = learned.copied()  # and what it saw consumed
        self._lead = lead
        self._share = terms.groups  # of a step, in each ring
        self._counts = counts
        self._assembly = Assembly(timeout_s=terms.group_timeout_s, short=terms.incomplete == "short")
        self._term = 0  # of this rank as the planner; 0: another one plans
        self._renew_at = 0.0
        self._steps: dict[int, PlannedStep] = {}  # neither consumed nor void
        self._voids: set[int] = set()  # steps that were said to be
        self._reserved: set[Identity] = set()  # what they have
        self._origins: set[Identity] = set()  # of what they have
        self._names: set[str] = set()  # of their groups
        self._late: dict[Identity, HeldSample] = {}  # wait for what becomes of a group, or of a step
        self._decided = False  # something has become of one
        self._consumed: dict[int, set[Identity]] = {}  # steps, and what of them no ring has said to be consumed
        self._lost_since: dict[int, float] = {}  # claims of steps
        self._spent: set[Identity] = set()  # of those that were consumed behind the checkpoint of this start
        self._done: set[int] = set()  # steps that nothing waits for
        self._next = 0
        self._end: int | None = None
        self._end_voids: set[int] = set()  # void steps whose groups had come again when it was said
        self._waits_since: float | None = None
        self._said = LogLimit()
        self._stale_said = LogLimit(float("inf"))
        self._surplus_said = LogLimit(SAY_AGAIN_S)
        self._restored_said = LogLimit(SAY_AGAIN_S)
        self._ageless_said = LogLimit(SAY_AGAIN_S)

    def __repr__(self) -> str:
        return f"<Planner {'leads, ' if self._term else ''}{self._assembly!r}, {len(self._steps)} steps>"

    @property
    def leads(self) -> bool:
        """True if this rank plans."""
        return self._term > 0

    @property
    def open_groups(self) -> int:
        """Number of groups that wait for samples."""
        return self._assembly.open_count

    def turn(self) -> bool:
        """Do what is due. False: another rank plans.

        Raises StoreError, and what keeps this process from every ring.
        """
        now = time.monotonic()
        if now >= self._renew_at or not self._term:
            term = self._records.lead()
            self._renew_at = now + _RENEW_S
            self._lead.again()
            self._share = math.ceil(self._terms.groups / max(1, len(self._holding.rings())))
            if term != self._term:
                self._stop()
                self._begin(term)
            if self._term and self._end is not None:
                self._records.end(self._end, sorted(self._end_voids))
        if not self._term:
            return False
        try:
            self._turn()
        except StoreError:  # a write may stand whose answer was lost: the records say so
            self._stop()
            raise
        return True

    def _turn(self) -> None:
        self._look_at_steps()
        if self._end is not None and not self._voids & self._done <= self._end_voids:
            self._take_back_end(self._end)
        if not self._term:  # another rank plans, and what is held is that one's to take
            return
        written = self._holding.all_written()  # before the look at what came
        changed = self._take(0.0 if self._may_plan() and self._enough() else _SLICE_S)
        now = time.monotonic()
        self._look_at_claims()
        over = written and not changed  # what was lost or came may change what is left
        self._give_up(now, over)
        if self._may_plan():
            self._plan(now, over)
        waiting = sum(not self._model.has(number) for number in self._steps)
        self._lead.say(waiting + len(self._assembly.complete) // self._terms.groups, self._share)

    def _take(self, timeout_s: float) -> bool:
        """Note what was lost and what comes, and return whether anything was or did."""
        lost = self._holding.lost()
        if lost:
            self._assembly.lose(lost)
            self._decided = True
        came = self._holding.take(MOST, timeout_s)
        now = time.monotonic()
        for sample in [*self._due(), *came]:
            self._came(sample, now)
        return bool(lost or came)

    def close(self, learned: Collection[int] = ()) -> None:
        """Consume what is learned, give the rest back, and let another rank plan.

        At the end of the data wait first for what other ranks vote on the steps that this rank has learned. After an
        interrupt call it again: until then all that is held stays so, also what is consumed and not answered for.
        """
        try:
            if self._term:
                self._finish(set(learned))
                if self._end is not None and self._records.everybody_has_seen(self._end):
                    for number in [*self._done, self._end]:
                        self._records.forget(number)
                self._lead.say(0, self._share)  # nobody waits for a planner that is gone
            self._records.leave()
        except StoreError as error:  # who plans next finds in the records what was learned
            log.warning("the store of the steps does not answer at the close: %s", error_text(error))
        except Exception:  # an interrupt keeps what is held: the next call finishes
            self._holding.close()
            raise
        self._holding.close()

    def _finish(self, learned: set[int]) -> None:
        voted_by = time.monotonic() + _LAST_S
        self._look_at_steps()
        while self._end is not None and self._term and not self._steps.keys().isdisjoint(learned):
            if time.monotonic() >= voted_by:
                left = sorted(self._steps.keys() & learned)
                log.warning("steps %s are not consumed by every rank yet: another rank plans on", left)
                break
            self.turn()
        self._settle(time.monotonic() + _ANSWERS_S)

    def _settle(self, give_up: float) -> None:
        """Wait for the rings' answers, which the loop notes, and for claims that were lost; at a close only."""
        claims = [each for waiting in self._consumed.values() for each in waiting]
        self._holding.consume([each for each in claims if each in self._holding])  # an interrupt may have prevented it
        while self._consumed and time.monotonic() < give_up:
            time.sleep(_SLICE_S / 10)
            if any(each not in self._holding for waiting in self._consumed.values() for each in waiting):
                with suppress(TransportError):  # perhaps no ring is left
                    self._take(0.0)
            self._look_at_claims()

    # --- leading --------------------------------------------------------------------------------------
    def _begin(self, term: int) -> None:
        """Go on from the records, as the planner of this term; 0: another one plans."""
        if not term:
            return
        self._learned = self._model.copied()
        self._next = self._records.next_number()
        for step, state in self._records.standing():
            if step.ends:
                if step.said == self._records.end_before:
                    self._records.forget(step.number)  # of an earlier start of the job
                else:
                    self._end, self._end_voids = step.number, set(step.voids)
            elif state == "consumed":
                if self._model.is_of_model(step.number):
                    self._note_learned(step)
                else:
                    self._spent.update(step.identities())
                self._done.add(step.number)
            else:
                if state != "void" and step.shape != self._shape:
                    self._records.make_void(step.number, "the mesh has another shape by now")
                self._stands(step)
        self._term = term

    def _stop(self) -> None:
        """Forget all: the planner that comes, perhaps this one again, begins from the records."""
        if self._term:
            log.warning("the steps of this mesh are planned anew from its records")
        self._term, self._end, self._renew_at = 0, None, 0.0
        self._holding.let_go()
        self._assembly = Assembly(timeout_s=self._terms.group_timeout_s, short=self._terms.incomplete == "short")
        self._steps.clear()
        self._reserved.clear()
        self._origins.clear()
        self._names.clear()
        self._late.clear()
        self._lost_since.clear()
        self._consumed.clear()
        self._spent.clear()
        self._done.clear()

    def _stands(self, step: PlannedStep) -> None:
        """Note a step that `_look_at_steps` has not seen consumed or void."""
        self._steps[step.number] = step
        self._reserved.update(step.identities())
        self._origins.update(step.origins())
        self._names.update(step.names())

    def _is_decided(self, step: PlannedStep) -> None:
        """Note that a step is consumed, or void."""
        self._reserved.difference_update(step.identities())
        self._origins.difference_update(step.origins())
        self._names.difference_update(step.names())
        self._lost_since.pop(step.number, None)
        self._decided = True
        del self._steps[step.number]

    # --- steps that are planned -----------------------------------------------------------------------
    def _look_at_steps(self) -> None:
        if not self._steps:
            return
        for step, state in zip(list(self._steps.values()), self._records.states(list(self._steps)), strict=True):
            if state not in ("consumed", "void"):
                if state == "planned":
                    self._give_up_lost(step)
                continue
            if state == "consumed":
                self._note_learned(step)
                self._consume(step)
            else:
                why, unread = self._records.void(step.number)
                if step.number not in self._voids:
                    self._voids.add(step.number)
                    self._counts.void_steps += 1
                    log.warning("step %d is void, and its groups come again: %s", step.number, why)
                held = [each for each in step.identities() if each in self._holding]
                self._holding.give_back([each for each in held if each in unread], _BACK_S)
                self._holding.give_back([each for each in held if each not in unread], _BACK_S, in_vain=False)
                self._done.add(step.number)
            self._is_decided(step)  # last, so that after an interrupt of a close the next call finishes

    def _give_up_lost(self, step: PlannedStep) -> None:
        """Make a step void that not all have read, where claims of it are lost and do not come back."""
        if why := self._gone(step.number, step.identities()):
            self._records.cannot_read(step.number, why, [])

    def _gone(self, number: int, claims: Iterable[Identity]) -> str:
        """Say why claims of a step that are lost do not come back: rings are gone. "": none is lost, or they may."""
        now = time.monotonic()
        lost = {each[0] for each in claims if each not in self._holding}
        if not lost:
            self._lost_since.pop(number, None)
            return ""
        since = self._lost_since.setdefault(number, now)
        served = lost <= self._holding.rings()
        if now < since + (self._records.lease_s if served else _GONE_S):
            return ""
        rings, waited = ", ".join(sorted(each[:8] for each in lost)), f"for {now - since:.0f} s"
        not_claimed = f"its samples in rings {rings} could not be claimed {waited}"
        return not_claimed if served else f"nobody has served rings {rings} {waited}"

    def _note_learned(self, step: PlannedStep) -> None:
        self._learned.accept_all(step.deliveries())
        self._learned.groups.add(step.names())

    def _consume(self, step: PlannedStep) -> None:
        """Ask the rings to consume what is held of a step; what is lost is asked for when it comes again."""
        self._holding.consume([each for each in step.identities() if each in self._holding])
        self._consumed[step.number] = set(step.identities())

    def _look_at_claims(self) -> None:
        self._holding.settle(self._note_answers)
        for number, waiting in list(self._consumed.items()):
            if not waiting or self._gone(number, waiting):
                self._done.add(number)
                self._lost_since.pop(number, None)
                del self._consumed[number]
        for number in sorted(self._done):
            if number < self._next - _KEEP:
                self._records.forget(number)
                self._done.discard(number)

    def _note_answers(self, answers: Mapping[Identity, bool | None]) -> None:
        consumed = [each for each, answer in answers.items() if answer]
        for waiting in self._consumed.values():
            waiting.difference_update(consumed)
        if again := [each for each, answer in answers.items() if answer is None and each in self._holding]:
            self._holding.consume(again)

    # --- samples that come ----------------------------------------------------------------------------
    def _due(self) -> list[HeldSample]:
        """Return what has waited for what became of groups and steps."""
        if not self._decided:
            return []
        late, self._late, self._decided = self._late, {}, False
        return [each for each in late.values() if each.identity in self._holding]

    def _came(self, sample: HeldSample, now: float) -> None:
        identity = sample.identity
        if identity in self._reserved:  # of a step that another planner made
            return
        try:
            ticket = Ticket.decode(sample.note)
            end, group = ticket.ends_group, ticket.group
            name = end.name if end is not None else group.name if group is not None else ""
            if identity in self._spent or self._learned.contains(*ticket.origin, sample.rank):
                if ticket.origin != identity and self._model.trusts:
                    self._say_restored(ticket)
                self._holding.consume([identity])
            elif not self._assembly.waits_for(name) and name in self._learned.groups:
                self._leave_out(identity, name, is_sample=end is None)
            elif ticket.origin in self._origins or name in self._names or not self._add(sample, ticket, now):
                self._late[identity] = sample
        except TransportError as error:
            log.warning("a payload of ring %s was discarded: %s", identity[0][:8], error_text(error))
            self._holding.discard([identity], error_text(error))

    def _say_restored(self, ticket: Ticket) -> None:
        if self._restored_said.due() is not None:
            log.warning(
                "payload %s was restored, and is left out: the records of the steps have it as learned, and this job "
                "was begun without the record of a checkpoint. Give Trainer(record=), or the mesh another store",
                ticket.name,
            )

    def _add(self, sample: HeldSample, ticket: Ticket, now: float) -> bool:
        """Add it to its group. False: it waits for what becomes of that."""
        if ticket.ends_group is not None:
            return self._assembly.end(ticket.ends_group, sample.identity, ticket.origin, now)
        self._fits(ticket)
        group = ticket.group
        tokens = sample.size if group is None or group.tokens is None else group.tokens
        name, of = ("", 1) if group is None else (group.name, group.of)
        arrival = Arrival(sample.identity, name, of, tokens, sample.version, sample.note, ticket.origin)
        return self._assembly.add(arrival, now)

    def _leave_out(self, identity: Identity, name: str, *, is_sample: bool) -> None:
        """End what comes of a group that was learned."""
        if not is_sample:
            self._holding.consume([identity])
            return
        self._holding.discard([identity], f"group {name!r} was learned without it")
        self._counts.surplus += 1
        if self._surplus_said.due() is not None:
            log.warning(
                "a sample of group %r is left out: a group of this name was learned before. A rollout may write it "
                "anew; else give each group a name of its own, and write no more samples than of= says",
                name,
            )

    def _give_up(self, now: float, over: bool) -> None:
        oldest = None if self._terms.stale == "keep" else self._oldest()
        ageless = oldest is not None and any(None in group.versions for group in self._assembly.complete)
        if ageless and self._ageless_said.due() is not None:
            log.warning("samples without a version have no age for max_age: have their rollouts write version=")
        for given_up in self._assembly.turn(now, over, oldest):
            group, reason, why = given_up
            self._decided = True
            self._say_given_up(given_up)
            returns = reason == "stale" and self._terms.stale == "return"
            told = returned(group.name) if returns else f"its group: {why}"
            self._holding.discard([each.identity for each in group.samples], told)
            self._holding.consume(group.marks)
            if group.samples:
                self._drop(group, reason)

    def _say_given_up(self, given_up: GivenUp) -> None:
        group, reason, why = given_up
        if not group.samples:
            log.info("group %r is over: %s", group.name, why)
        elif reason != "stale":
            log.warning("group %r is given up: %s", group.name, why)
        else:
            self._counts.stale_samples += len(group)
            if self._stale_said.due() is not None:
                log.warning(
                    "group %r is too old for max_age: %s. What waits is rings x slots / samples of a step versions "
                    "old: give fewer slots, Rollout(ahead=), or a greater max_age. This is said once, and counted",
                    group.name,
                    why,
                )

    def _drop(self, group: Group, reason: Reason) -> None:
        """Count a group that no step gets, and tell of it."""
        self._counts.dropped[reason] += 1
        if self._terms.dropped is not None:
            try:
                self._terms.dropped(group, reason)
            except Exception as error:  # whatever it is, the steps of all ranks go on
                log.warning("dropped= failed for group %r: %s", group.name, error_text(error))

    # --- planning -------------------------------------------------------------------------------------
    def _may_plan(self) -> bool:
        """Return whether every planned step has been read, so that the next may be read ahead, and none is void."""
        if self._end is not None:
            return False
        return {"planned", "void"}.isdisjoint(self._records.states(list(self._steps))) if self._steps else True

    def _enough(self) -> bool:
        return len(self._assembly.complete) >= self._terms.groups

    def _plan(self, now: float, over: bool) -> None:
        for group in [each for each in self._assembly.complete if not each.chosen]:
            group.chosen = True
            if self._terms.choose is not None and not self._terms.choose(group):
                self._assembly.leave(group)
                self._decided = True
                self._holding.consume(group.identities)
                self._drop(group, "not chosen")
        if self._enough():
            self._write(self._assembly.pick(self._terms.groups))
            self._waits_since = None
        elif over and not self._assembly.open:
            rest = self._assembly.pick(self._terms.groups)
            if rest and self._terms.tail == "short":
                self._write(rest)
                return
            for group in rest:
                log.info("group %r is left out: fewer than %s left", group.name, count(self._terms.groups, "group"))
                self._holding.consume(group.identities)
                self._drop(group, "tail")
                self._decided = True
            if not self._decided:  # else what has waited for that comes first
                self._end, self._end_voids = self._next, self._voids & self._done
                self._records.end(self._end, sorted(self._end_voids))
        else:
            self._say_waiting(now)

    def _say_waiting(self, now: float) -> None:
        self._waits_since = self._waits_since or now
        if now < self._waits_since + LOOK_S or not (len(self._assembly) or self._steps) or self._said.due() is None:
            return
        waits = sorted(self._assembly.open, key=lambda each: each.since)
        named = ", ".join(f"{each.name!r} ({len(each)} of {each.of or '?'})" for each in waits[:5])
        held = count(len(self._reserved), "slot")
        steps = f"; not every rank has consumed {count(len(self._steps), 'step')}, with {held}"
        log.warning(
            "the next step has waited for %.0f s: it has %d of %s, and %d without all samples%s%s%s%s",
            now - self._waits_since,
            len(self._assembly.complete),
            count(self._terms.groups, "complete group"),
            len(waits),
            f": {named}" if named else "",
            ", …" if len(waits) > 5 else "",
            steps if self._steps else "",
            "".join(f"; {each}" for each in self._holding.crowded()),
        )

    def _take_back_end(self, end: int) -> None:
        """Plan on: a rank that began anew could not read a step that stood when the end was said."""
        if not self._records.take_back_end(end):
            self._stop()  # another rank plans
            return
        self._end, self._next = None, end + 1

    def waiting(self) -> Mapping[str, int]:
        """Return by ring how many claims wait for their group, or for a step."""
        groups = (*self._assembly.complete, *self._assembly.open)
        return Counter(ring for ring, *_ in (*self._late, *(each for group in groups for each in group.identities)))

    def _write(self, groups: Sequence[Group]) -> None:
        layout = lay_out([group.tokens for group in groups], self._shape[0], self._terms.max_tokens)
        planned = [
            PlannedGroup(
                group.name,
                group.tokens,
                [each.identity for each in group.samples],
                [(*each.origin, self._rank) for each in group.samples],
                list(group.marks),
                len(group) < (group.of or 0),
            )
            for group in groups
        ]
        rows = [[[(each.group, each.number) for each in micro] for micro in batches] for batches in layout]
        step = PlannedStep(self._next, planned, rows, self._shape)
        parts = []
        for batches in layout:
            samples = [[groups[each.group].samples[each.number] for each in micro] for micro in batches]
            tickets = [[each.note for each in micro] for micro in samples]
            parts.append(PlannedPart(tickets, [[each.version for each in micro] for micro in samples]))
        if not self._records.plan(step, parts):
            self._stop()  # another rank plans
            return
        self._next += 1
        self._counts.planned += len(groups)
        self._stands(step)

"""One simulated run of members: rendezvous, election and the epochs' ends, with the real decisions, faults by seed.

Every member is a real `Session` with a clock of its own, which may be minutes off or jump. The member of rank 0
coordinates epochs with a real `Coordinator` and `Ledger`; who is elected reports an upload. Members are killed between
two calls to the store or within one, stopped, leave, ask for new rounds; the store is away for one or for all, or its
answers are lost.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import secrets
from collections import Counter
from functools import partial
from typing import Final, NamedTuple
from unittest import mock

from accounts import Accounts, Violation
from member import RUN, Member
from plans import Result

from transport.cooldown.epochs.election import checkpointers, elect
from transport.cooldown.epochs.records import EpochRecord
from transport.cooldown.epochs.records import Phase as EpochPhase
from transport.decoders import json_decoder
from transport.rendezvous.member_states import State
from transport.rendezvous.records import Place, Roster, Round, RoundPhase, Status
from transport.rendezvous.rules import Rules
from transport.store.base import Change
from transport.store.memory import MemoryStore

_EPOCH_S: Final = 60.0  # between two cooldowns
_OVERTAKEN: Final = 0.1  # of writes
_STOPPED: Final = 0.003
_STOPPED_AT_END: Final = 0.1  # of the writes that end an epoch
_SETTLE_S: Final = 400.0  # after the last fault
_LAST_ROUND_S: Final = 200.0  # after it, in a run without growth, which gives spares a rank in its next round only


class MembersPlan(NamedTuple):
    """The size of a run, and how often each fault comes."""

    members: int
    spares: int
    least: int
    minutes: float
    faults_per_minute: float


def drawn(seed: int) -> MembersPlan:
    """A run of the seed's own size."""
    rng = random.Random(f"members {seed}")
    members = rng.choice([1, 2, 3, 5, 8, 13, 30])
    return MembersPlan(
        members, rng.randint(0, 3), rng.randint(1, members), rng.uniform(2.0, 6.0), rng.choice([1.0, 4.0, 10.0])
    )


class Members:
    """Everything of one run. ``run`` is the whole of it."""

    def __init__(self, seed: int, plan: MembersPlan) -> None:
        self.seed, self.plan = seed, plan
        self.rng = random.Random(f"run {seed}")
        self.accounts = Accounts()
        self.rules = Rules(
            least=plan.least, most=plan.members, lease_s=10.0, last_call_s=5.0, join_timeout_s=90.0, grow=seed % 2 == 0,
            store_patience_s=60.0,
        )  # fmt: skip
        self.now = 1000.0
        self.away_until = 0.0
        self.next_epoch_at = self.now + _EPOCH_S
        self.store = MemoryStore(clock=lambda: self.now)
        self.members: list[Member] = []
        self._numbers = itertools.count()
        self._last: dict[str, Round] = {}
        self._actors: dict[tuple[str, int], str] = {}
        self._ended: dict[str, bytes] = {}  # epochs, as they ended
        self._ranks: dict[tuple[int, int], str] = {}  # by round and rank, of the incarnation
        self.most_records = 0
        self._last_fault = self.now + plan.minutes * 60.0
        self._within = False  # a step of a member

    def run(self) -> Result:
        """Raises Violation."""
        with mock.patch.object(secrets, "token_hex", lambda size: f"{self.rng.getrandbits(8 * size):0{2 * size}x}"):
            return self._run()

    def _run(self) -> Result:
        begun = self.now
        for _ in range(self.plan.members + self.plan.spares):
            self._new()
        last_fault = self._last_fault
        fault_at = self.now + self.rng.expovariate(self.plan.faults_per_minute / 60.0)
        steps = [(self.now, order, member) for order, member in enumerate(self.members)]
        order = itertools.count(len(steps))
        known = len(self.members)
        last_round_at = math.inf if self.rules.grow else last_fault + _LAST_ROUND_S
        while self.now < last_fault + _SETTLE_S:
            due, _, member = heapq.heappop(steps)
            self.now = max(self.now, due)
            self.accounts.now = self.now
            if fault_at <= self.now < last_fault:
                fault_at = self.now + self.rng.expovariate(self.plan.faults_per_minute / 60.0)
                self._fault()
            if self.now >= last_round_at and member.session.view.state is State.ACTIVE:
                last_round_at = math.inf
                member.do(partial(member.session.say, Status.RESTART, "a round for the spares"))
            member.do(member.step)
            for each in (member, *self.members[known:]):
                if each.alive:
                    wait_s = max(each.session.wait_s(), 0.05) * self.rng.uniform(0.9, 1.1)
                    heapq.heappush(steps, (self.now + wait_s, next(order), each))
            known = len(self.members)
            self._check_records()
            if self._closed() or not steps:
                break
        else:
            self._check_settled()
        return Result(
            self.accounts.digest, self.accounts.counts, self.now - begun, 0, len(self.members), self.most_records
        )

    def _new(self) -> None:
        member = Member(self, f"m{next(self._numbers)}")
        self.members.append(member)
        member.do(member.session.join)

    def _living(self) -> list[Member]:
        return [member for member in self.members if member.alive and not member.session.ended]

    def _closed(self) -> bool:
        current = next(iter(self._last.values()), None)
        return current is not None and current.phase is RoundPhase.CLOSED

    def meanwhile(self, name: str, ends_epoch: bool = False) -> None:
        """Between what a member has read and what it writes others may step; it may be stopped there for a while.

        ``ends_epoch``: the write ends an epoch, which another one can have ended before the member goes on.
        """
        chance = self.rng.random()
        if self._within or chance > _OVERTAKEN:
            return
        self._within = True
        others = [member for member in self._living() if member.name != name]
        stopped = chance < (_STOPPED_AT_END if ends_epoch else _STOPPED) and self.now < self._last_fault
        seconds = self.rng.uniform(1.0, 25.0) if stopped else 0.0
        until = self.now + seconds
        while True:
            for other in others if seconds else others and [self.rng.choice(others)]:
                other.do(other.step)
            if self.now >= until:
                break
            self.now += 1.0
        self._within = False

    # --- faults ---------------------------------------------------------------------------------------------
    def _fault(self) -> None:
        living = self._living()
        if not living:
            return
        member = self.rng.choice(living)
        kind = self.rng.choices(
            ["kill", "die", "stop", "away", "all", "forget", "unheard", "jump", "leave", "restart", "join"],
            [2, 2, 2, 2, 0.5, 1, 2, 1, 1, 1, 3],
        )[0]
        self.accounts.note(f"fault_{kind} {member.name}")
        match kind:
            case "kill":
                member.alive = False
                self._new()
            case "die":
                member.line.die_after = self.rng.randint(0, 6)
                member.line.die_before_the_write = self.rng.random() < 0.5
                self._new()
            case "stop":
                member.stopped_until = self.now + self.rng.uniform(1.0, 40.0)
            case "away":
                member.line.away_from, member.line.away_until = self.now, self.now + self.rng.uniform(0.5, 30.0)
            case "all":
                self.away_until = self.now + self.rng.uniform(0.5, 20.0)
            case "forget":
                member.line.forgets_until = self.now + self.rng.uniform(0.5, 30.0)
            case "unheard":  # a round waits for stopped members; one that waits loses its seat, which still stands
                others = [each for each in living if each is not member]
                for each in self.rng.sample(others, min(len(others), len(living) - self.rules.least + 1)):
                    each.stopped_until = self.now + self.rng.uniform(25.0, 45.0)
                member.unheard_s = self.rules.lease_s + self.rng.uniform(0.2, 4.0)
            case "jump":
                member.skew_s += self.rng.choice([5.0, 40.0])
            case "leave":
                member.do(member.session.leave)
                member.alive = False
                self._new()
            case "restart":
                member.do(lambda: member.session.say(Status.RESTART, "by chance"))
            case _:
                if len(living) <= self.plan.members + self.plan.spares:
                    self._new()

    # --- what must hold ---------------------------------------------------------------------------------------
    def written(self, name: str, change: Change) -> None:
        """Each record is checked as it is written."""
        if change.key == f"rendezvous/{RUN}/round" and change.value is not None:
            self._round(name, json_decoder(Round)(change.value))
        elif "/epoch/" in change.key and change.value is not None:
            before = self._ended.get(change.key)
            if before is not None and before != change.value:
                raise Violation(f"{name} changes {change.key}, which has ended")
            record = json_decoder(EpochRecord)(change.value)
            if record.phase is EpochPhase.ENDED:
                self._epoch(record)
                self._ended[change.key] = bytes(change.value)

    def _round(self, name: str, current: Round) -> None:
        self.accounts.note(f"round_{current.phase.value} {current.number} {current.term} {name}")
        before = self._last.get(current.incarnation)
        if before is not None:
            if before.phase is RoundPhase.CLOSED:
                raise Violation(f"{name} goes on with a run that is closed")
            if current.term < before.term or not before.number <= current.number <= before.number + 1:
                raise Violation(f"{name} writes {current} after {before}")
        self._last[current.incarnation] = current
        if current.phase is RoundPhase.CLOSED:
            return
        if self._actors.setdefault((current.incarnation, current.term), name) != name or current.host != name:
            raise Violation(f"{name} acts in term {current.term} of {current.host}")
        if current.phase is RoundPhase.RUNNING:
            self._roster(current)

    def _roster(self, current: Round) -> None:
        entry = self.store.get(f"rendezvous/{RUN}/{current.number}/roster")
        if entry is None:
            raise Violation(f"round {current.number} runs without a roster")
        names = [peer.member for peer in json_decoder(Roster)(entry.value).peers]
        if len(set(names)) != len(names) or not current.least <= len(names) <= current.most:
            raise Violation(f"round {current.number} has the roster {names}, of {current.least} to {current.most}")
        shuffled = self.rng.sample(names, len(names))
        elected = elect(names, seed=self.seed, epoch=current.number)
        if elect(shuffled * 2, seed=self.seed, epoch=current.number) != elected or not set(elected) <= set(names):
            raise Violation(f"two members elect differently of {names}")
        if len(set(elected)) != checkpointers(len(names)):
            raise Violation(f"{len(elected)} of {len(names)} are elected")

    def placed(self, member: Member, place: Place) -> None:
        """A rank of a round is one member's."""
        if place.rank >= 0 and self._ranks.setdefault((place.round, place.rank), member.name) != member.name:
            other = self._ranks[place.round, place.rank]
            raise Violation(f"{member.name} and {other} both have rank {place.rank} of round {place.round}")

    def _epoch(self, record: EpochRecord) -> None:
        self.accounts.note(f"epoch_{record.outcome.value if record.outcome else None} {record.epoch}")
        self.next_epoch_at = self.now + _EPOCH_S
        if record.checkpoint is not None and record.checkpoint.client not in record.elected:
            raise Violation(f"epoch {record.epoch} ends with the checkpoint of {record.checkpoint.client}")

    def _check_records(self) -> None:
        records = len(self.store._records)
        self.most_records = max(self.most_records, records)
        epochs = len(self._ended) + 1
        if records > 8 * (len(self.members) + self.plan.members) + 3 * epochs * (self.plan.members + 2) + 64:
            raise Violation(f"the store has {records} records of {len(self.members)} members and {epochs} epochs")

    def _check_settled(self) -> None:
        """Check that long after the last fault, a run gives every rank that it can."""
        living = self._living()
        active = [member for member in living if member.session.view.state is State.ACTIVE]
        wanted = min(len(living), self.plan.members)
        if len(living) >= self.plan.least and len(active) < wanted:
            states = Counter(member.session.view.state.value for member in living)
            raise Violation(f"starved: {len(active)} of {wanted} members have a rank: {dict(states)}")
        for key, entry in self.store.scan("cooldown/run/epoch/").items():
            record = json_decoder(EpochRecord)(entry.value)
            old = record.epoch < len(self._ended)
            if active and old and record.phase is not EpochPhase.ENDED:
                raise Violation(f"{key} has not ended")

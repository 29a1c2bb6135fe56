"""Random joins, deaths in the middle of a call, stops, jumping clocks and failing stores: what must hold in every case.

While anything happens: at most one host acts in a term and every roster is a permutation of living members of its round
(`SimulatedRun.check_history`, `check_roster`), and success and failure are never confused. In the end everybody who
waits has ended with the right code within a bound.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from properties import examples
from simulated_run import SimulatedMember, SimulatedRun

from transport.errors import RunLostError, StaleRoundError, TransportError
from transport.rendezvous.member_states import State
from transport.rendezvous.records import Reason, RoundPhase, Status
from transport.rendezvous.rules import ExitCodes, Rules

RULES = Rules(
    least=2,
    most=3,
    lease_s=6.0,
    last_call_s=4.0,
    join_timeout_s=30.0,
    store_patience_s=20.0,
    exit_codes=ExitCodes(no_restart=77),
)
BOUND_S = 150.0  # two leases, a join timeout, the member's own, and the store's patience
CODES = {Reason.SUCCESS: 0, Reason.FAILURE: 1, Reason.NO_RESTART: 77}

who = st.integers(0, 7)


class RunOfMembers(RuleBasedStateMachine):
    the_rules = RULES

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()

    @initialize(count=st.integers(1, 5), archive=st.booleans())
    def begin(self, count: int, archive: bool) -> None:
        self.simulated = SimulatedRun(Path(self.folder.name) if archive else None, self.the_rules)
        self.emptied = False
        self.asked: set[Reason] = set()
        self.simulated.joined(count)

    def pick(self, number: int) -> SimulatedMember:
        return self.simulated.members[number % len(self.simulated.members)]

    # --- what members do ------------------------------------------------------------------------------
    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 9.0]))
    def time_passes(self, seconds: float) -> None:
        self.simulated.run(seconds, step_s=0.5)

    @rule(number=who)
    def one_steps(self, number: int) -> None:
        member = self.pick(number)
        member.do(member.session.step)

    @precondition(lambda self: len(self.simulated.members) < 8)
    @rule()
    def somebody_comes(self) -> None:
        self.simulated.joined(1)

    @rule()
    def programs_join_again(self) -> None:
        for member in self.simulated.members:
            if member.state is State.AWAY:
                member.do(member.session.join)

    @rule(number=who, status=st.sampled_from([Status.DONE, Status.DONE, Status.RESTART]))
    def one_says(self, number: int, status: Status) -> None:
        member = self.pick(number)
        member.do(lambda: member.session.say(status, "said"))

    @rule(number=who, reason=st.sampled_from(Reason))
    def one_closes(self, number: int, reason: Reason) -> None:
        member = self.pick(number)
        self.asked.add(reason)

        def close() -> None:
            try:
                member.session.close(reason)
            except TransportError as error:
                assert isinstance(error, StaleRoundError | RunLostError) or error.retryable or member.session.view.error

        member.do(close)

    @rule(number=who)
    def one_leaves(self, number: int) -> None:
        member = self.pick(number)
        member.do(member.session.leave)
        member.alive = False

    # --- what happens to them ---------------------------------------------------------------------------
    @rule(number=who, calls=st.integers(0, 5), before=st.booleans())
    def one_dies_in_a_call(self, number: int, calls: int, before: bool) -> None:
        member = self.pick(number)
        member.line.die_after, member.line.die_before_the_write = calls, before
        member.do(member.session.step)

    @rule()
    def the_host_dies(self) -> None:
        for member in self.simulated.members:
            member.alive = member.alive and not member.session.is_host

    @rule(number=who)
    def one_is_stopped_or_goes_on(self, number: int) -> None:
        member = self.pick(number)
        member.frozen = not member.frozen

    @rule(number=who, jump_s=st.sampled_from([2.0, 40.0]))
    def a_clock_jumps(self, number: int, jump_s: float) -> None:
        self.pick(number).skew_s += jump_s

    @rule(number=who)
    def a_line_breaks_or_is_mended(self, number: int) -> None:
        line = self.pick(number).line
        line.down = not line.down

    @rule(number=who)
    def a_line_loses_answers_or_is_mended(self, number: int) -> None:
        line = self.pick(number).line
        line.forgets_answers = not line.forgets_answers

    @precondition(lambda self: not self.emptied)
    @rule()
    def the_store_is_emptied(self) -> None:
        self.emptied = True
        for key in list(self.simulated.store.scan("")):
            self.simulated.store.delete(key)

    # --- what must hold ---------------------------------------------------------------------------------
    @invariant()
    def history_is_in_order(self) -> None:
        if hasattr(self, "simulated"):
            self.simulated.check_history()

    @invariant()
    def nobody_has_another_rank_than_the_roster_says(self) -> None:
        if not hasattr(self, "simulated"):
            return
        for member in self.simulated.members:
            place, incarnation = member.session.view.place, member.session._member.incarnation
            if place is not None and place.rank >= 0:
                roster = self.simulated.rosters[incarnation, place.round]
                assert roster.peers[place.rank].member == member.name

    @invariant()
    def everybody_heard_what_was_closed(self) -> None:
        if not hasattr(self, "simulated"):
            return
        written = self.simulated.closings()
        for incarnation in {each for each, _ in written}:
            assert len({reason for each, reason in written if each == incarnation}) == 1
        for member in self.simulated.members:
            closing = member.session.view.closing
            if closing is not None:
                assert (closing.incarnation, closing.reason) in written
                assert member.exit_code == CODES[closing.reason]
                assert closing.incarnation == (member.session._member.incarnation or closing.incarnation)

    @invariant()
    def success_is_proven(self) -> None:
        """Only by somebody who said so, or by a host that saw everybody done."""
        if not hasattr(self, "simulated"):
            return
        for _, current in self.simulated.written:
            if current.closing is not None and current.closing.reason is Reason.SUCCESS:
                assert Reason.SUCCESS in self.asked or "are done" in current.closing.message

    def teardown(self) -> None:
        try:
            if hasattr(self, "simulated"):
                self.finish()
        finally:
            self.folder.cleanup()

    def finish(self) -> None:
        """Whatever happened: faults end, programs that wait go on waiting, and all of them learn an end."""
        simulated = self.simulated
        for member in simulated.members:
            member.frozen = False
            member.line.down = member.line.forgets_answers = False
            member.line.die_after = None
        living = [each for each in simulated.members if each.alive]
        end = simulated.now + BOUND_S
        while simulated.now < end and any(each.state is not State.ENDED for each in living):
            simulated.run(1.0)
            for member in living:
                if member.state is State.AWAY:
                    member.do(member.session.join)
                elif member.state is State.ACTIVE:
                    member.do(lambda member=member: member.session.say(Status.DONE))
        for member in living:
            assert member.state is State.ENDED, f"{member.session!r} still waits in {simulated.round()}"
            view = member.session.view
            assert (view.closing is None) == (view.error is not None)
            if view.closing is None:
                assert member.exit_code == 1
        if living and not self.emptied:
            current = simulated.round()
            assert current is not None
            assert current.phase is RoundPhase.CLOSED or all(each.session.view.error for each in living)
        simulated.check_history()
        simulated.check_archive()
        simulated.store.close()


class ElasticRun(RunOfMembers):
    """With the rules of launchers that restart their work by themselves."""

    the_rules = msgspec.structs.replace(RULES, least=1, grow=True, done_stays=True)


TestRunOfMembers = RunOfMembers.TestCase
TestElasticRun = ElasticRun.TestCase
TestRunOfMembers.settings = TestElasticRun.settings = examples(25, stateful_step_count=30)

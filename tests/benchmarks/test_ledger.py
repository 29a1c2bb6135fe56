"""What soak and cluster account with: the ledger judges rightly what processes say, payloads show every wrong byte."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benchmark_programs import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS / "harness"))
try:
    import payloads
    from ledger import TWICE, VANISHED, Delivery, Journal, Ledger, Lines, Tally
finally:
    sys.path.pop(0)


def heard(*lines: str, ledger: Ledger | None = None) -> Ledger:
    """What "source: line" lines amount to, a second apart; writer 1 has two ranks."""
    ledger = ledger or Ledger(lambda writer: 1 + writer)
    for at, line in enumerate(lines):
        source, _, said = line.partition(": ")
        ledger.hear(source, said.split(), float(at))
    return ledger


def test_what_every_rank_consumed_once_is_in_order() -> None:
    tally = heard("w1: I 1 0 2", "w1: P 1 0 1", "t0: C 0 1=0 1=1", "t2: C 1 1=0 1=1").close()
    assert tally == Tally(payloads=2, deliveries=4, consumed=4)


def test_what_one_rank_never_got_is_lost() -> None:
    tally = heard("w1: P 1 0", "t0: C 0 1=0").close()
    assert (tally.lost, tally.named) == (1, ["writer 1 number 0 rank 1: vanished"])


def test_what_was_only_intended_may_be_missing_but_not_for_one_rank_only() -> None:
    assert heard("w1: I 1 0 3").close().never_published == 3
    ledger = heard("w1: I 1 0 3", "t0: C 0 1=1")
    assert ledger.waited_for() == [(1, 1, 1)]
    assert (ledger.close().lost, ledger.close().never_published) == (1, 2)


def test_what_was_consumed_twice_is_a_duplicate_whoever_it_was() -> None:
    tally = heard("w0: P 0 0", "t0: C 0 0=0", "t1: C 0 0=0").close()
    assert (tally.lost, tally.duplicated) == (0, 1)


def test_what_was_ended_for_a_reason_and_consumed_is_a_duplicate() -> None:
    ended = "t1: D 0 0=0 because discarded: why", "t1: K 0 0=0"
    for lines in (("t0: C 0 0=0", *ended), (*ended, "t0: C 0 0=0")):
        tally = heard("w0: P 0 0", *lines).close()
        assert (tally.lost, tally.duplicated) == (0, 1)


def test_wrong_bytes_are_counted_and_named() -> None:
    tally = heard("w0: P 0 0", "t0: X 0 0=0 tcp", "t0: C 0 0=0").close()
    assert (tally.lost, tally.wrong) == (0, 1)
    assert "tcp" in tally.named[0]


@pytest.mark.parametrize("asked", ["A 0 0=0", "Q 0 0=0"])
def test_what_a_dead_trainer_had_asked_for_is_its_own_unless_another_has_it(asked: str) -> None:
    ledger = heard("w0: P 0 0 1", f"t0: {asked}")
    assert len(ledger.waited_for()) == 2  # it lives, and may yet say so itself
    ledger.died("t0")
    assert ledger.waited_for() == [(0, 0, 1)]
    assert (ledger.close().silent, ledger.close().lost) == (1, 1)
    tally = heard("t1: C 0 0=0 0=1", ledger=ledger).close()
    assert (tally.silent, tally.consumed, tally.lost, tally.duplicated) == (0, 2, 0, 0)


def test_what_a_dead_trainer_had_asked_for_is_due_to_other_ranks_though_its_writer_never_said_so() -> None:
    ledger = heard("w1: I 1 0 1", "t0: A 0 1=0")
    ledger.died("t0")
    assert (ledger.close().silent, ledger.close().lost) == (1, 1)


def test_a_trainer_that_was_answered_before_it_died_is_in_no_question() -> None:
    ledger = heard("w0: P 0 0 1", "t0: A 0 0=0 0=1", "t0: Q 0", "t0: C 0 0=0")
    ledger.died("t0")
    assert ledger.waited_for() == [(0, 0, 1)]


def excused(delivery: Delivery, how: str) -> str:
    """Number 0 may vanish, number 1 may be late, number 2 may come twice."""
    return {(0, VANISHED): "gone", (1, "late"): "expired", (2, TWICE): "forgotten"}.get((delivery[2], how), "")


def test_only_what_is_allowed_of_a_delivery_is_excused() -> None:
    of_all = "w0: P 0 0 1 2", "t0: C 0 0=2 0=2", "t0: D 0 0=1 because late", "t0: K 0 0=1"
    ledger = heard(*of_all, ledger=Ledger(excused=excused))
    assert ledger.waited_for() == []  # number 0 may have vanished
    tally = ledger.close()
    assert (tally.lost, tally.duplicated, tally.excused) == (0, 0, {"gone": 1, "expired": 1, "forgotten": 1})
    ledger = heard("w0: P 0 0 1 2", "t0: C 0 0=0 0=0", "t0: D 0 0=2 because late", ledger=Ledger(excused=excused))
    ledger.died("t0")
    tally = ledger.close()
    assert (tally.lost, tally.duplicated, tally.excused) == (2, 1, {})


def test_a_claim_that_was_another_s_by_then_did_not_end() -> None:
    ledger = heard("w0: P 0 1", "t0: D 0 0=1 because late", "t0: R 0 0=1", ledger=Ledger(excused=excused))
    assert (ledger.settled, ledger.waited_for()) == (0, [(0, 0, 1)])


def test_a_writer_is_done_when_its_last_life_has_written_everything_and_its_ring_is_empty() -> None:
    ledger = heard("w0: P 0 0", "w0: E 0", "w0: S 0 1")
    assert not ledger.emptied(0)
    heard("w0: S 0 0", ledger=ledger)
    assert ledger.emptied(0)
    ledger.died("w0", writer=0)
    assert not ledger.emptied(0)
    heard("w0: E 0", "w0: S 0 0", ledger=ledger)
    assert ledger.emptied(0)


def test_what_was_due_before_a_time_is_waited_for_and_what_was_carried_since_is_known() -> None:
    ledger = heard("w0: P 0 0", "w0: P 0 1", "t0: C 0 0=1")
    assert (ledger.waited_for(0.5), ledger.waited_for(-1.0)) == ([(0, 0, 0)], [])
    assert (ledger.carried[0], ledger.last["t0"]) == (1.0, 2.0)


# --- journals and payloads -----------------------------------------------------------------------------
def test_a_torn_line_was_never_said_and_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    killed = Journal(path)
    killed.say("C", 0, "0=1")
    with path.open("ab") as file:
        file.write(b"C 0 0=2 0=3")
    lines = Lines(path)
    assert list(lines.new()) == [["C", "0", "0=1"]]
    successor = Journal(path)
    successor.say("C", 0, "0=4")
    assert list(lines.new()) == [["C", "0", "0=4"]]
    killed.close()
    successor.close()


def test_one_wrong_byte_and_another_payload_are_seen() -> None:
    for number in range(300):
        data = payloads.make(1, number)
        assert payloads.is_right(1, number, data)
        assert not payloads.is_right(0, number, data)
        assert not payloads.is_right(1, number + 1, data)
        data[-1] ^= 1
        assert not payloads.is_right(1, number, data)
        assert not payloads.is_right(1, number, data[:-1])

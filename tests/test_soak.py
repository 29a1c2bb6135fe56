"""The soak's accountant judges rightly, and a short soak with every kind of fault loses nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOAK = ROOT / "benchmarks" / "soak"
BUILD = ROOT / "build" / "faults"

sys.path.insert(0, str(SOAK))
try:
    import payloads
    from accounts import Accounts
    from faults import schedule
    from journal import Journal, Reader
finally:
    sys.path.remove(str(SOAK))


def heard(*lines: str, readers: tuple[int, ...] = (1, 2)) -> Accounts:
    """What "source: line" lines amount to."""
    accounts = Accounts(readers)
    for line in lines:
        source, _, said = line.partition(": ")
        accounts.hear(source, said.split())
    return accounts


# --- the accountant --------------------------------------------------------------------------------
def test_what_every_rank_consumed_once_is_in_order() -> None:
    verdict = heard("w1: I 1 0 2", "w1: P 1 0=a 1=b", "t0: C 0 1=0 1=1", "t2: C 1 1=0 1=1").verdict()
    assert (verdict.payloads, verdict.deliveries) == (2, 4)
    assert (verdict.lost, verdict.wrong, verdict.duplicated, verdict.never_published) == (0, 0, 0, 0)


def test_what_one_rank_never_got_is_lost() -> None:
    verdict = heard("w1: I 1 0 1", "w1: P 1 0=a", "t0: C 0 1=0").verdict()
    assert verdict.lost == 1
    assert verdict.named == ["writer 1 number 0 rank 1: no trace"]


def test_what_was_only_intended_may_be_missing_but_not_for_one_rank_only() -> None:
    assert heard("w1: I 1 0 3").verdict().never_published == 3
    verdict = heard("w1: I 1 0 3", "t0: C 0 1=1").verdict()
    assert (verdict.lost, verdict.never_published) == (1, 2)


def test_a_payload_that_one_rank_consumed_is_due_to_every_rank_though_its_writer_never_said_that_it_is_there() -> None:
    accounts = heard("w1: I 1 0 2", "w1: P 1 0=a", "t0: C 0 1=0 1=1", "t2: C 1 1=0")
    assert (accounts.consumed_total, accounts.expected()) == (3, 4)


def test_what_a_successor_found_in_the_ring_counts_as_published() -> None:
    assert heard("w0: I 0 0 2", "w0: F 0 1").verdict().lost == 1


def test_what_was_consumed_twice_is_a_duplicate_whoever_it_was() -> None:
    verdict = heard("w0: I 0 0 1", "w0: P 0 0=a", "t0: C 0 0=0", "t1: C 0 0=0").verdict()
    assert (verdict.lost, verdict.duplicated) == (0, 1)


def test_a_claim_that_the_queue_accepted_from_a_dead_trainer_is_consumption() -> None:
    accounts = heard("w0: I 0 0 2", "w0: P 0 0=a 1=b", "t0: A 0 0=0=7:1 1=0=8:1")
    assert accounts.open_questions("t0") == ["7:1", "8:1"]
    accounts.answer("t0", ["7:1"])
    assert accounts.open_questions("t0") == []
    assert (accounts.verdict().lost, accounts.verdict().silent) == (1, 1)
    accounts.hear("t1", ["C", "0", "0=0", "0=1"])
    assert (accounts.verdict().lost, accounts.verdict().duplicated) == (0, 1)


def test_a_report_excuses_only_for_the_reasons_that_are_allowed() -> None:
    accounts = heard("w0: I 0 0 1", "w0: P 0 0=a")
    accounts.report(0, 0, 0, "StaleSlotError: gone")
    assert accounts.verdict().lost == 1
    assert accounts.verdict(allowed=["expired"]).lost == 1
    verdict = accounts.verdict(allowed=["StaleSlotError"])
    assert (verdict.lost, verdict.reported) == (0, {"StaleSlotError": 1})


def test_wrong_bytes_are_counted_and_named() -> None:
    verdict = heard("w0: I 0 0 1", "w0: P 0 0=a", "t0: X 0 0=0 tcp", "t0: C 0 0=0").verdict()
    assert verdict.wrong == 1
    assert "tcp" in verdict.named[0]


# --- journals, payloads, schedule ------------------------------------------------------------------------
def test_a_torn_line_was_never_said_and_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    killed = Journal(path)
    killed.say("C", 0, "0=1")
    with path.open("ab") as file:
        file.write(b"C 0 0=2 0=3")
    reader = Reader(path)
    assert list(reader.lines()) == [["C", "0", "0=1"]]
    successor = Journal(path)
    successor.say("C", 0, "0=4")
    assert list(reader.lines()) == [["C", "0", "0=4"]]
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


def test_a_schedule_follows_from_its_seed_and_has_what_was_asked_for() -> None:
    faults = schedule(7, 1000, 50, {"stop": 5, "stall": 2})
    assert faults == schedule(7, 1000, 50, {"stop": 5, "stall": 2}) != schedule(8, 1000, 50, {"stop": 5, "stall": 2})
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    kinds = [fault.kind for fault in faults]
    assert (kinds.count("kill"), kinds.count("stop"), kinds.count("stall")) == (50, 5, 2)


# --- a short soak ----------------------------------------------------------------------------------------
@pytest.mark.ucx
@pytest.mark.slow
def test_a_short_soak_loses_mixes_up_and_leaves_behind_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, SOAK, "--payloads", "2500", "--kills", "8", "--seed", "5", "--json", report]
    command += ["--folder", tmp_path / "run", "--stuck-s", "60"]
    if (BUILD / "stamp").exists():
        command += ["--build", BUILD]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=110)
    said = json.loads(report.read_text())
    assert done.returncode == 0, json.dumps(said, indent=1)
    assert (said["lost"], said["wrong"], said["duplicated"], said["unfinished"]) == (0, 0, 0, 0)
    assert said["payloads"] >= 2500
    assert said["kills"] >= 6

"""The soak's accountant judges rightly, a short soak with every kind of fault loses nothing, and one with a planted
fault finds it."""

from __future__ import annotations

import importlib.util
import json
import secrets
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from found_rings import ring_of, some
from frame_codec import HEADER, encode_control, encode_status, sealed
from helpers import eventually
from preloaded import needs_compiler
from redis_server import needs_redis, redis_server

from transport import SharedRingBuffer
from transport.claims import connection
from transport.claims.connection import ClaimConnection
from transport.claims.network import NetworkClaim
from transport.claims.places import OnThisHost
from transport.packer.rollout import ticket_id
from transport.queue import FoundRings, RedisQueue
from transport.queue.base import DeliveryState, Failure, QueuedTicket, TicketQueue
from transport.storage.urls import RedisURL, parse_url
from transport.wire.frames import VERSION, Answer, Hello, Kind, Record, encode_handshake

ROOT = Path(__file__).resolve().parents[2]
SOAK = ROOT / "benchmarks" / "soak"
BUILD = ROOT / "build" / "faults"

sys.path.insert(0, str(SOAK))
try:
    import audit
    import mutations
    import network_proxy
    import payloads
    from accounts import Accounts
    from faults import schedule
    from journal import Journal, Reader
    from plan import Plan
    from planted import PLANTS
    from report import allowed, reason_of
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
    assert accounts.open_questions() == []  # it lives, and may yet say so itself
    accounts.died("t0")
    assert accounts.open_questions() == [(0, "7:1"), (0, "8:1")]
    accounts.answer(0, "7:1", True)
    assert accounts.open_questions() == [(0, "8:1")]
    accounts.hear("t0", ["A", "0", "1=0=9:1"])  # its next life has questions of its own
    accounts.answer(0, "8:1", False)
    assert accounts.open_questions() == []
    assert (accounts.verdict().lost, accounts.verdict().silent) == (1, 1)
    accounts.hear("t1", ["C", "0", "0=0", "0=1"])
    assert (accounts.verdict().lost, accounts.verdict().duplicated) == (0, 1)


# --- with the rings as the queue, which keep no claims --------------------------------------------------
def of_rings(*lines: str) -> Accounts:
    """Number 0 of writer 0 may end without a word, the others not."""
    accounts = Accounts((2,), perishes=lambda writer, number: number == 0)
    for line in lines:
        source, _, said = line.partition(": ")
        accounts.hear(source, said.split())
    return accounts


def test_a_delivery_that_ended_was_its_dead_claimants_unless_another_says_or_may_say_that_it_was_its_own() -> None:
    accounts = of_rings("w0: P 0 1=a 2=b", "t0: A 0 1=0=a|0|1 2=0=b|0|1", "t1: A 0 2=0=b|0|2")
    accounts.died("t0")
    for _, token in accounts.open_questions():
        accounts.over(0, token)
    assert accounts.open_questions() == [(0, "b|0|1")]  # t1 may have it
    assert (accounts.verdict().silent, accounts.consumed_total) == (1, 1)
    accounts.hear("t1", ["C", "0", "0=2"])
    accounts.over(0, "b|0|1")
    assert (accounts.open_questions(), accounts.verdict().silent, accounts.verdict().duplicated) == ([], 1, 0)


def test_a_claim_that_was_about_to_be_discarded_ends_with_its_reason_or_goes_on() -> None:
    said = ["t0: D 0 1=0=a|0|1 because expired: late", "t0: D 0 2=0=b|0|1 because expired: late"]
    accounts = of_rings("w0: P 0 1=a 2=b", *said, "t0: K 0 0=1", "t0: R 0 0=2")
    assert accounts.settled(["expired"]) == 1
    accounts.died("t0")
    assert accounts.open_questions() == []
    accounts = of_rings("w0: P 0 1=a", said[0])
    accounts.died("t0")
    accounts.over(0, "a|0|1")
    assert (accounts.settled(["expired"]), accounts.consumed_total) == (1, 0)


def test_only_what_has_a_deadline_perishes_and_only_while_nobody_has_it() -> None:
    accounts = of_rings("w0: P 0 0=a 1=b", "t0: A 0 0=0=a|0|1", "t2: A 1 0=0=a|1|1")
    assert accounts.perishable() == {(0, "a"): (0, 0, 0), (1, "a"): (1, 0, 0)}
    accounts.perished((0, 0, 0))
    assert accounts.settled(["expired"]) == 0
    accounts.died("t0")
    accounts.perished((0, 0, 0))  # t0 may have consumed it
    assert accounts.settled(["expired"]) == 0
    accounts.over(0, "a|0|1")  # nobody lives who has trained on it
    assert (accounts.settled(["expired"]), accounts.verdict().silent) == (1, 0)
    accounts.hear("t2", ["C", "1", "0=0"])
    accounts.perished((1, 0, 0))
    assert accounts.perishable() == {}
    verdict = accounts.verdict(["expired"])
    assert (verdict.lost, verdict.duplicated, verdict.reported) == (2, 0, {"expired": 1})


def test_the_auditor_sees_in_its_slot_that_a_delivery_has_ended() -> None:
    prefix = f"soak-audit-{secrets.token_hex(4)}-"
    with SharedRingBuffer.create(slots=2, slot_bytes=64, name=f"/transport-{prefix}0") as ring:
        first, second = (ticket_id(ring.write_raw(b"x", readers=2)) for _ in range(2))
        questions = [(rank, f"{each}|{rank}|1|t0") for each in (first, second) for rank in (0, 1)]
        [claimed] = ring.claim(1, rank=0)
        assert claimed.consume()
        assert audit.ended(prefix, questions) == {(0, f"{first}|0|1|t0")}
        gone = [(0, "another-ring/0/1|0|1|t0")]
        assert audit.ended(prefix, gone) == set(gone)


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


def test_what_was_reported_and_consumed_is_a_duplicate() -> None:
    accounts = heard("w0: I 0 0 1", "w0: P 0 0=a", "t0: C 0 0=0")
    accounts.report(0, 0, 0, "expired: late")
    verdict = accounts.verdict(allowed=["expired"])
    assert (verdict.lost, verdict.duplicated, verdict.reported) == (0, 1, {})


def test_what_was_reported_to_one_rank_is_due_to_the_others_and_settles_once() -> None:
    accounts = heard("w1: I 1 0 2", "t0: N 0 id=1=0")
    assert accounts.named("id") == (1, 0)
    assert accounts.named("another") is None
    for _ in range(2):  # the queue is asked again and again
        accounts.report(0, 1, 0, "expired: late")
    assert (accounts.settled(["expired"]), accounts.settled(), accounts.expected()) == (1, 0, 2)
    verdict = accounts.verdict(allowed=["expired"])
    assert (verdict.payloads, verdict.lost, verdict.reported, verdict.never_published) == (1, 1, {"expired": 1}, 1)


def numbers(with_deadline: bool) -> int:
    """The first number of a payload that has a deadline, or has none."""
    return next(each for each in range(1000) if (payloads.deadline_s(0, each) is not None) == with_deadline)


@pytest.mark.parametrize(
    ("state", "reason", "with_deadline", "excused"),
    [
        (DeliveryState.DISCARDED, "StaleSlotError: the deadline has passed", True, True),
        (DeliveryState.DISCARDED, "StaleSlotError: the deadline has passed", False, False),
        (DeliveryState.DISCARDED, "its deadline has passed", True, True),
        (DeliveryState.DISCARDED, "PayloadLostError: nobody serves it", True, False),
        (DeliveryState.DEAD, "StaleSlotError: gone", True, False),
    ],
)
def test_only_a_deadline_excuses_a_delivery(
    state: DeliveryState, reason: str, with_deadline: bool, excused: bool
) -> None:
    plan = Plan(folder="", queue="", run="", seed=1)
    failure = Failure("id", 0, state, 1, "t0", reason)
    said = reason_of(failure, 0, numbers(with_deadline), plan)
    assert (said.partition(":")[0] in allowed(plan)) == excused


# --- what became of a dead trainer's claims -----------------------------------------------------------
def asks(queue: TicketQueue, place: str) -> None:
    """Claims in every state, as the auditor finds them."""
    queue.publish([QueuedTicket(f"ring/{each}/1", b"ticket") for each in range(4)])
    acked, retried, held, lapsed = queue.claim(4, consumer="t0")
    assert queue.ack(acked)
    assert queue.retry(retried)
    assert queue.discard(lapsed, "no more")
    questions = [(0, each.token) for each in (acked, retried, held, lapsed)]
    fates = audit.fates(place, questions)
    assert fates == {questions[0]: True, questions[1]: False, questions[3]: False}  # one may yet be accepted
    [again] = queue.claim(1, consumer="t1")
    assert queue.ack(again)
    assert audit.fates(place, questions[1:2]) == {questions[1]: False}  # done, and by another


@needs_redis
def test_the_auditor_finds_on_a_server_what_was_accepted_and_nothing_while_it_is_away() -> None:
    with redis_server() as server:
        place = parse_url(server.place())
        assert isinstance(place, RedisURL)
        with RedisQueue(place) as queue:
            asks(queue, server.place())
        server.kill()
        assert audit.fates(server.place(), [(0, "1:1:x")]) == {}


def test_what_a_trainer_asks_about_again_has_not_perished() -> None:
    accounts = Accounts((1,), lambda writer, number: True)
    for line in ("I 0 0 1", "P 0 0=a"):
        accounts.hear("w0", line.split())
    for line in ("A 0 0=0=token", "Q 0 0=0=token", "C 0"):
        accounts.hear("t0", line.split())
    accounts.perished((0, 0, 0))
    for line in ("Q 0", "C 0 0=0"):
        accounts.hear("t0", line.split())
    verdict = accounts.verdict()
    assert (verdict.lost, verdict.duplicated, verdict.reported) == (0, 0, {})


# --- planted faults -----------------------------------------------------------------------------------
def test_every_module_that_is_marked_or_planted_into_is_there() -> None:
    """Where a module has moved, nothing would be marked, and nobody would notice."""
    spec = importlib.util.spec_from_file_location("soak_points", SOAK / "points" / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    points = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(points)
    marked = {*points.CHANGES, *(name for plant in PLANTS.values() for name in plant.changes)}
    assert [name for name in sorted(marked) if importlib.util.find_spec(name) is None] == []


def test_every_planted_fault_finds_what_it_changes() -> None:
    """In a process of its own, which has them all afterwards."""
    program = "import sys; sys.path.append(sys.argv[1]); from importlib import import_module as module\n"
    program += "from planted import PLANTS\n"
    program += (
        "for plant in PLANTS.values():\n    for name, change in plant.changes.items():\n        change(module(name))\n"
    )
    subprocess.run([sys.executable, "-c", program, str(SOAK)], check=True)


@pytest.mark.ucx
def test_planted_into_the_rings_the_claims_of_a_dead_connection_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    for name in ("_settle", "end"):
        monkeypatch.setattr(ClaimConnection, name, getattr(ClaimConnection, name))  # is what it was after the test
    prefix = f"planted-{secrets.token_hex(4)}-"
    with ring_of(prefix) as ring, FoundRings(OnThisHost(prefix)) as queue:
        PLANTS["dead-connection"].changes["transport.claims.connection"](connection)
        ring.write_raw(b"held")
        [claim] = some(queue, 1)
        assert isinstance(claim, NetworkClaim)
        claims = claim.batch.claims
        claims.soon(claims.connection.link.abort)
        eventually(lambda: claims.connection.lost, "its connection is gone")
        assert queue.ack(claim)


def test_a_planted_fault_is_found_only_by_its_own_figure() -> None:
    clean = {"passed": True, "deliveries": 9, "lost": 0, "wrong": 0, "duplicated": 0, "crashes": [], "left_behind": []}
    assert mutations.found("", clean)
    assert not mutations.found("unfenced", clean)
    assert mutations.found("unfenced", clean | {"passed": False, "duplicated": 1})
    assert not mutations.found("unfenced", clean | {"passed": False, "lost": 1})
    assert not mutations.found("dropped", clean | {"passed": False, "lost": 9})
    assert not mutations.found("flipped", clean | {"passed": False, "lost": 1, "wrong": 1})


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
@needs_redis
def test_a_soak_finds_a_queue_that_does_not_fence(tmp_path: Path) -> None:
    """With every planted fault it is `make soak-planted`."""
    size = ["--queue", "redis", "--payloads", "2000", "--kills", "0", "--lapses", "12", "--stuck-s", "30"]
    report = mutations.run("unfenced", tmp_path, size)
    assert mutations.found("unfenced", report), json.dumps(report, indent=1)


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
@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.parametrize("queue", ["rings", pytest.param("redis", marks=needs_redis)])
def test_a_short_soak_loses_mixes_up_and_leaves_behind_nothing(tmp_path: Path, queue: str) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, SOAK, "--payloads", "2500", "--kills", "8", "--seed", "5", "--json", report]
    command += ["--queue", queue, "--folder", tmp_path / "run", "--stuck-s", "60"]
    if (BUILD / "stamp").exists():
        command += ["--build", BUILD]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=110)
    said = json.loads(report.read_text())
    assert done.returncode == 0, json.dumps(said, indent=1)
    assert (said["lost"], said["wrong"], said["duplicated"], said["unfinished"]) == (0, 0, 0, 0)
    assert said["payloads"] >= 2500
    assert said["kills"] >= 6


# --- over a bad network ------------------------------------------------------------------------------------
def over_the_network(folder: Path, *options: str) -> dict[str, Any]:
    """The report of a short run of network.py, with as many faults as fit into it."""
    command = [sys.executable, SOAK / "network.py", "--seed", "1", "--every-s", "0.03", "--stuck-s", "60"]
    command += ["--minutes", "0.1", "--folder", folder / "run", "--json", folder / "report.json", *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=110)
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    assert (done.returncode == 0) == report["passed"]
    return report


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
@needs_compiler
def test_over_a_network_that_cuts_and_changes_every_payload_is_consumed_once_with_its_own_bytes(tmp_path: Path) -> None:
    report = over_the_network(tmp_path)
    assert report["passed"], json.dumps(report, indent=1)
    assert report["payloads"] > 100
    assert {"cut by RST", "cut by FIN", "stall", "slow", "flip in a payload", "flip in a message"} <= {
        *report["network"]
    }


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(("plant", "only"), [("unverified", "flip in a payload"), ("dead-connection", "cut by RST")])
def test_a_soak_over_the_network_finds_a_planted_fault(tmp_path: Path, plant: str, only: str) -> None:
    report = over_the_network(tmp_path, "--plant", plant, "--only", only)
    assert mutations.found(plant, report), json.dumps(report, indent=1)


def test_the_proxy_recognises_messages_by_their_checksums_and_nothing_else() -> None:
    noise = payloads.NOISE[:1000].tobytes()
    note = b"a ticket"
    taken = bytearray(24 + 48) + note
    HEADER.pack_into(taken, 0, 0, VERSION, Kind.STATUS, 1, 7, 0, 0)
    struct.pack_into("<12xH", taken, 24, len(note))
    sent = [
        encode_control(7, [Record(Kind.RENEW), Record(Kind.FINISH, slot=3)]),
        encode_status(7, [Answer(0, 0), Answer(3, 1)]),
        sealed(taken),
        encode_handshake(Hello(oldest=VERSION, newest=VERSION, ring="one", tag_base=9, nonce=bytes(16))),
    ]
    passing = bytearray(noise)
    for message in sent:
        passing += message + noise
    found = list(network_proxy.messages(bytes(passing)))
    prefixed = sent[-1][8:]  # what a handshake begins with has no checksum
    assert [passing[begin:end] for begin, end in found] == [*sent[:-1], prefixed]
    for begin, _ in found:
        passing[begin + 9] ^= 1
    assert not list(network_proxy.messages(bytes(passing)))

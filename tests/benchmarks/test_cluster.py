"""The cluster's books judge rightly, a short run with faults accounts for every payload, and an aborted one leaves
nothing behind. The long version of these tests is `make cluster`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import eventually
from redis_server import needs_redis

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "benchmarks" / "cluster"
COMMAND = [sys.executable, "-P", str(CLUSTER)]
SKIPPED = 77
sys.path.insert(0, str(CLUSTER))
try:
    from books import Books, Tally
finally:
    sys.path.pop(0)


# --- the books ----------------------------------------------------------------------------------------
class Story:
    """Lines of journals, one second apart."""

    def __init__(self) -> None:
        self.books = Books()
        self.books.fault = 1
        self.now = 0.0

    def hear(self, source: str, line: str) -> None:
        self.now += 1.0
        self.books.hear(source, line.split(), self.now)

    def verdict(self, reports: bool = False) -> Tally:
        self.books.close(reports)
        return self.books.total()


@pytest.fixture
def story() -> Story:
    made = Story()
    made.hear("rollout-0.1", "I 0 0 3")
    made.hear("rollout-0.1", "P 0 0=a 1=b 2=c")
    return made


def test_what_is_consumed_once_is_delivered(story: Story) -> None:
    story.hear("trainer-1.1", "C 0 0=0 0=1 0=2")
    assert story.verdict() == Tally(delivered=3)


def test_what_has_no_end_is_lost(story: Story) -> None:
    story.hear("trainer-1.1", "C 0 0=0 0=1")
    assert story.verdict() == Tally(delivered=2, lost=1)
    assert story.books.named == ["writer 0 number 2: no trace"]


def test_what_is_consumed_by_two_trainers_is_twice(story: Story) -> None:
    story.hear("trainer-1.1", "C 0 0=0 0=1 0=2")
    story.hear("trainer-2.1", "C 0 0=1")
    assert story.verdict() == Tally(delivered=4, twice=1)


def test_what_is_consumed_and_reported_is_twice(story: Story) -> None:
    story.hear("trainer-1.1", "C 0 0=0 0=1 0=2")
    story.books.report((0, 1), "dead: why", 9.0)
    assert story.verdict() == Tally(delivered=3, twice=1)


def test_wrong_bytes_are_wrong(story: Story) -> None:
    story.hear("trainer-1.1", "X 0 0=1 tcp")
    story.hear("trainer-1.1", "C 0 0=0 0=1 0=2")
    assert story.verdict() == Tally(delivered=3, wrong=1)


def test_what_goes_with_its_host_is_no_loss_where_nothing_reports_it(story: Story) -> None:
    story.books.removed("rollout-0.1", 0)
    assert story.verdict() == Tally(with_host=3)


def test_what_goes_with_its_host_has_to_be_reported_by_a_queue_beside_the_rings(story: Story) -> None:
    story.books.removed("rollout-0.1", 0)
    story.books.report((0, 0), "discarded: PayloadLostError", 9.0)
    assert story.verdict(reports=True) == Tally(reported=1, lost=2)


def test_a_report_of_a_host_that_lives_is_a_loss(story: Story) -> None:
    story.hear("trainer-1.1", "D 0 1=0=token because dead: why")
    story.hear("trainer-1.1", "K 0 0=1")
    story.hear("trainer-1.1", "C 0 0=0 0=2")
    assert story.verdict() == Tally(delivered=2, lost=1)


def test_a_report_that_a_host_is_lost_is_none_while_it_is_out_of_reach_for_long(story: Story) -> None:
    story.books.cut_off(0)
    story.books.report((0, 0), "discarded: PayloadLostError: why", 9.0)
    story.books.report((0, 1), "dead: it crashes", 9.0)
    story.hear("trainer-1.1", "C 0 0=2")
    assert story.verdict() == Tally(delivered=1, reported=1, lost=1)


def test_what_a_removed_trainer_had_asked_for_counts_when_the_ring_is_empty_and_not_before(story: Story) -> None:
    story.hear("trainer-1.1", "C 0 0=0 0=1")
    story.hear("trainer-1.1", "A 0 2=0=token")
    story.books.removed("trainer-1.1")
    story.hear("rollout-0.1", "S 0 1")
    story.books.answer_emptied(story.now)
    assert story.books.questions() == ["token"]
    assert not story.books.waited_for(story.now, gone_counts=True)
    story.hear("rollout-0.1", "S 0 0")
    story.books.answer_emptied(story.now)
    assert story.verdict() == Tally(delivered=2, silent=1)


@pytest.mark.parametrize("queue_says", [False, True])
def test_a_question_about_a_ring_that_was_removed_too_is_not_waited_for_where_only_the_ring_could_answer(
    story: Story, queue_says: bool
) -> None:
    story.hear("trainer-1.1", "A 0 2=0=token")
    story.books.removed("trainer-1.1")
    assert story.books.answerable(queue_says)
    story.books.removed("rollout-0.1", 0)
    assert story.books.answerable(queue_says) == queue_says
    story.hear("trainer-2.1", "C 0 0=0 0=1")
    assert story.verdict() == Tally(delivered=2, with_host=1)


def test_what_a_removed_trainer_had_asked_for_may_be_another_s(story: Story) -> None:
    story.hear("trainer-1.1", "A 0 0=0=one 1=0=two 2=0=three")
    story.books.removed("trainer-1.1")
    story.hear("trainer-2.1", "C 0 0=0 0=1 0=2")
    assert not story.books.questions()
    assert story.verdict() == Tally(delivered=3)


def test_a_second_consumption_is_allowed_only_of_what_a_promoted_redis_may_have_forgotten(story: Story) -> None:
    story.hear("trainer-1.1", "C 0 0=0 0=1 0=2")
    story.books.forgot_at = story.now
    story.hear("rollout-0.1", "P 0 3=d")
    story.hear("trainer-1.1", "C 0 0=0 0=3")
    story.hear("trainer-2.1", "C 0 0=3")
    assert story.verdict() == Tally(delivered=6, forgotten=1, twice=1)


# --- real runs ----------------------------------------------------------------------------------------
@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Any]:
    """Processes that name this test's folder, anywhere on the machine; there must be none in the end."""

    def there() -> list[str]:
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes()
            except OSError:
                continue
            if str(tmp_path).encode() in words and entry.parent.name != "self":
                found.append(words.replace(b"\0", b" ").decode())
        return found

    yield there
    eventually(lambda: not there(), "no process of the cluster is left")


@pytest.mark.skipif(shutil.which("setpriv") is None or os.geteuid() != 0, reason="needs root, to give rights up")
def test_where_namespaces_are_refused_the_run_says_why(tmp_path: Path) -> None:
    without = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
    options = ["--hosts", "4", "--folder", str(tmp_path / "run")]
    done = subprocess.run([*without, *COMMAND, *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == SKIPPED
    assert done.stderr == "there can be no cluster here: namespaces are refused: Operation not permitted; run as root\n"


@pytest.mark.nightly
@needs_redis
@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.timeout(400)  # where a fault does not settle, the run waits for a minute and says so
def test_a_short_run_with_faults_accounts_for_every_payload(tmp_path: Path, processes: Any) -> None:
    report = tmp_path / "report.json"
    options = ["--hosts", "6", "--find", "directory", "--faults", "one-way,returned,redis-promoted", "--seed", "3"]
    places = ["--folder", str(tmp_path / "run"), "--json", str(report)]
    done = subprocess.run([*COMMAND, *options, *places], capture_output=True, text=True, timeout=400)
    if done.returncode == SKIPPED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = json.loads(report.read_text())
    assert run["passed"]
    assert {each["name"] for each in run["episodes"]} == {"one-way", "returned", "redis-promoted"}
    total = run["total"]
    accounted = total["delivered"] + total["silent"] + total["with_host"] + total["reported"] - total["forgotten"]
    assert accounted == run["payloads"] > 0


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_aborted_run_leaves_no_process_no_namespace_and_no_link(
    tmp_path: Path, processes: Any, number: signal.Signals
) -> None:
    def named() -> list[str]:
        listed = [subprocess.run(["ip", *words], capture_output=True, text=True).stdout for words in _LISTS]
        return [line for text in listed for line in text.splitlines() if "br0" in line or "host" in line]

    before = named()
    options = ["--hosts", "4", "--find", "addresses", "--folder", str(tmp_path / "run")]
    with subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        for line in run.stdout:
            if "fault 1" in line:
                break
        else:
            assert run.wait() == SKIPPED, run.stderr.read()
            pytest.skip("there can be no cluster here")
        assert len(processes()) > 4
        run.send_signal(number)
        run.wait(60)
        assert run.returncode != 0
    eventually(lambda: not processes(), "every process of the cluster ends")
    assert named() == before


_LISTS = (("netns",), ("-brief", "link"))

"""torchrun with our rendezvous: real agents, and gloo workers that all-reduce; each of them and the store is killed."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis_server import needs_redis, redis_server
from torchrun_agents import WHY_NOT, Agents, torchrun_agents

from transport.rendezvous.closing import close_run
from transport.rendezvous.records import Keys, Reason
from transport.store.open import open_store

pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=f"torchrun is not tested: {WHY_NOT}"),
    pytest.mark.slow,
    pytest.mark.timeout(240),
]
QUICK = "lease_s=4,last_call_s=3"
PATIENT = "lease_s=60,last_call_s=3"  # whoever is not heard to leave is waited for longer than the test takes

KEYS = Keys("job")

Start = Callable[..., Agents]


@contextlib.contextmanager
def started(folder: Path, url: str, conf: str, *more: str) -> Iterator[Agents]:
    arguments = ["--rdzv-backend=transport", f"--rdzv-endpoint={url}", "--rdzv-id=job", f"--rdzv-conf={conf}"]
    with torchrun_agents(folder, *arguments, *more) as agents:
        agents.store = url
        yield agents


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:
        url = f"sqlite:{tmp_path}/store.sqlite3"
        yield lambda *more, conf=QUICK: stack.enter_context(started(tmp_path, url, conf, *more))


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(redis_server())

        def start(*more: str, conf: str = QUICK) -> Agents:
            url = f"redis://127.0.0.1:{server.port}/0"
            agents = stack.enter_context(started(tmp_path, url, conf, *more))
            agents.server = server
            agents.store = f"{url}?run=job"  # what the adapter makes of it
            return agents

        yield start


def pair_and_spare(agents: Agents) -> None:
    """Agents a and b have the ranks, c waits."""
    agents.start("a")
    agents.start("b")
    agents.wait_round("ab")
    agents.start("c")
    waits(agents, "c")


def waits(agents: Agents, node: str) -> None:
    """Until an agent has a seat or waits for one; its name has its process id."""
    name = f":{agents.running[node].pid}:"

    def here() -> bool:
        with open_store(agents.store) as store:
            return any(name in key or name.encode() in entry.value for key, entry in store.scan(KEYS.all).items())

    agents.until(here, f"agent {node} waits")


def goes_on(agents: Agents, rounds: int, seconds: int) -> None:
    """For so long no worker starts or ends, and every agent lives."""
    for _ in range(seconds):
        time.sleep(1)
        assert len(agents.lines()) == rounds, agents.everything()
        assert all(each.poll() is None for each in agents.running.values())


# --- the run's end --------------------------------------------------------------------------------------
def test_a_spare_that_is_never_needed_exits_0(sqlite: Start) -> None:
    agents = sqlite("--nnodes=2")
    pair_and_spare(agents)
    agents.stop()
    assert [agents.code(node) for node in "abc"] == [0, 0, 0]
    assert "run 'job' ended in round 1: success" in agents.output("c")


@needs_redis
def test_the_run_of_a_redis_url_is_the_rdzv_id_and_a_closed_one_says_so(redis: Start) -> None:
    agents = redis("--nnodes=1")
    agents.start("a")
    agents.wait_round("a")
    agents.stop()
    assert agents.code("a") == 0
    agents.start("z")
    assert agents.code("z") == 0  # the code of the run's end
    assert "ended in round 1: success" in agents.output("z")
    assert "give another --rdzv-id" in agents.output("z")
    assert "Traceback" not in agents.output("z")


@needs_redis
def test_the_command_to_paste_runs(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "TORCH.md"
    block = page.read_text(encoding="utf-8").split("```console\n$ ")[1].split("```")[0]
    with redis_server() as server:
        here = {"store.example:6379": f"127.0.0.1:{server.port}", "$SLURM_JOB_ID": "job", "per-node=8": "per-node=1"}
        for there, own in here.items():
            assert there in block
            block = block.replace(there, own)
        program, *arguments, script = shlex.split(block.replace("\\\n", " "))
        assert (program, script) == ("torchrun", "train.py")
        with torchrun_agents(tmp_path, *arguments, "--rdzv-conf=last_call_s=3") as agents:
            agents.start("a")
            agents.start("b")
            agents.wait_round("ab")
            agents.stop()
            assert [agents.code(node) for node in "ab"] == [0, 0]


@pytest.mark.parametrize(("given", "code"), [(7, 1), (93, 93)])
def test_the_last_failure_ends_the_run_for_all_with_its_reason(sqlite: Start, given: int, code: int) -> None:
    agents = sqlite("--nnodes=2")
    agents.start("a", "--max-restarts=3")
    agents.start("b", "--max-restarts=0")
    agents.wait_round("ab")
    agents.start("c")
    waits(agents, "c")
    (agents.folder / "fail-b").write_text(str(given))
    assert [agents.code(node) for node in "abc"] == [code] * 3
    for node in "ac":
        assert f"ended with exit code {given}, no restart is left" in agents.output(node)
    assert "FAILED" in agents.output("b")  # torch's own report


@pytest.mark.parametrize(("reason", "code"), [(Reason.SUCCESS, 0), (Reason.FAILURE, 1), (Reason.NO_RESTART, 93)])
def test_a_run_that_is_closed_ends_all_agents_with_its_code(sqlite: Start, reason: Reason, code: int) -> None:
    agents = sqlite("--nnodes=2")
    pair_and_spare(agents)
    with open_store(agents.store) as store:
        close_run(store, KEYS, reason, "operator", "enough for today")
    assert [agents.code(node) for node in "abc"] == [code] * 3
    for node in "abc":
        assert f"{reason} (enough for today)" in agents.output(node)
        assert "Traceback" not in agents.output(node).split("torchrun --rdzv-backend")[1]


# --- who dies ---------------------------------------------------------------------------------------------
def test_a_killed_worker_is_started_again(sqlite: Start) -> None:
    agents = sqlite("--nnodes=2", "--max-restarts=1")
    pair_and_spare(agents)
    before = agents.lines()[-1].at
    os.kill(agents.worker("b"), signal.SIGKILL)
    agents.wait_round("ab", before)
    agents.stop()
    assert [agents.code(node) for node in "abc"] == [0, 0, 0]


@needs_redis
@pytest.mark.parametrize("node", [False, True], ids=["agent", "agent and worker"])
def test_a_spare_takes_the_place_of_the_killed(redis: Start, node: bool) -> None:
    agents = redis("--nnodes=2", "--max-restarts=2")
    pair_and_spare(agents)
    before = agents.lines()[-1].at
    if node:
        agents.kill_node("b")
    else:
        os.kill(agents.running["b"].pid, signal.SIGKILL)
    agents.wait_round("ac", before)
    agents.stop()
    assert [agents.code(each) for each in "abc"] == [0, -9, 0]


def test_without_a_spare_the_run_goes_on_smaller_and_grows_again(sqlite: Start) -> None:
    agents = sqlite("--nnodes=1:2", "--max-restarts=2")
    agents.start("a")
    agents.start("b")
    agents.wait_round("ab")
    before = agents.lines()[-1].at
    agents.kill_node("b")
    lines = agents.wait_round("a", before)
    agents.start("c")
    agents.wait_round("ac", lines[-1].at)
    agents.stop()
    assert [agents.code(each) for each in "ac"] == [0, 0]
    assert "joined: more ranks than 1 are possible" in agents.output("a")


def test_who_is_done_stays_done_when_its_agent_dies(sqlite: Start) -> None:
    agents = sqlite("--nnodes=2")
    (agents.folder / "hold-b").touch()
    pair_and_spare(agents)
    agents.stop()
    agents.wait(lambda lines: any(line.what == "end" and line.node == "a" for line in lines))
    agents.until(lambda: _seats_done(agents) == 1, "one seat is done")
    os.kill(agents.running["a"].pid, signal.SIGKILL)
    agents.code("a")
    (agents.folder / "hold-b").unlink()
    assert [agents.code(node) for node in "bc"] == [0, 0]


def test_when_a_peer_dies_at_the_end_the_others_wait_for_its_replacement(sqlite: Start) -> None:
    agents = sqlite("--nnodes=1:2")
    (agents.folder / "hold-b").touch()
    pair_and_spare(agents)
    agents.stop()
    agents.until(lambda: _seats_done(agents) == 1, "one seat is done")
    agents.kill_node("b")
    assert [agents.code(node) for node in "ac"] == [0, 0]
    assert "ended in round 2" not in agents.output("a")  # success needs no line
    ends = {line.node for line in agents.lines() if line.what == "end"}
    assert ends == {"a", "c"}


def _seats_done(agents: Agents) -> int:
    with open_store(agents.store) as store:
        return sum(b'"status":"done"' in entry.value for entry in store.scan(f"{KEYS.of_round(1)}seat/").values())


# --- who comes and leaves ---------------------------------------------------------------------------------
@needs_redis
def test_a_newcomer_makes_the_run_larger_without_a_restart_being_counted(redis: Start) -> None:
    agents = redis("--nnodes=1:3", "--max-restarts=0")
    agents.start("a")
    agents.wait_round("a")
    agents.start("b")
    lines = agents.wait_round("ab")
    assert {line.restarts for line in lines} == {0}
    agents.stop()
    assert [agents.code(node) for node in "ab"] == [0, 0]


@needs_redis
def test_after_sigterm_the_others_do_not_wait_for_the_lease(redis: Start) -> None:
    agents = redis("--nnodes=2", "--max-restarts=2", conf=PATIENT)
    pair_and_spare(agents)
    before = agents.lines()[-1].at
    agents.running["b"].send_signal(signal.SIGTERM)
    agents.wait_round("ac", before, within_s=55.0)
    agents.stop()
    assert [agents.code(node) for node in "abc"] == [0, 1, 0]


def test_a_host_that_waits_leaves_at_sigterm(sqlite: Start) -> None:
    agents = sqlite("--nnodes=2", conf=PATIENT)
    agents.start("z")
    waits(agents, "z")
    agents.running["z"].send_signal(signal.SIGTERM)
    assert agents.code("z") == 128 + signal.SIGTERM
    assert "got SIGTERM while waiting for a rank" in agents.output("z")
    agents.start("a")
    agents.start("b")
    agents.wait_round("ab", within_s=55.0)
    agents.stop()
    assert [agents.code(node) for node in "ab"] == [0, 0]


@pytest.mark.parametrize("restarts", [0, 3])
def test_an_agent_stopped_beyond_its_lease_does_not_end_the_run(sqlite: Start, restarts: int) -> None:
    agents = sqlite("--nnodes=2")
    agents.start("a", "--max-restarts=3")
    agents.start("b", f"--max-restarts={restarts}")
    agents.wait_round("ab")
    agents.start("c")
    waits(agents, "c")
    before = agents.lines()[-1].at
    agents.running["b"].send_signal(signal.SIGSTOP)
    agents.wait_round("ac", before)
    agents.running["b"].send_signal(signal.SIGCONT)
    if restarts == 0:
        assert agents.code("b") == 1
    agents.stop()
    assert [agents.code(node) for node in "abc"] == [0, 0 if restarts else 1, 0]


def test_ranks_follow_the_positions_of_the_hosts(sqlite: Start) -> None:
    agents = sqlite("--nnodes=3")
    hosts = {"a": "rack10/host1", "b": "rack2/host7", "c": "rack2/host30"}
    for node, where in hosts.items():
        agents.start(node, f"--rdzv-conf={QUICK},where=env:WHERE", WHERE=where)
    lines = agents.wait_round("abc")
    assert {line.node: line.rank for line in lines} == {"b": 0, "c": 1, "a": 2}
    agents.stop()
    assert [agents.code(node) for node in "abc"] == [0, 0, 0]


# --- the store ----------------------------------------------------------------------------------------------
@needs_redis
def test_a_store_that_comes_back_in_time_costs_nothing(redis: Start) -> None:
    agents = redis("--nnodes=2", "--max-restarts=0", conf="lease_s=30,last_call_s=3")
    pair_and_spare(agents)
    rounds = len(agents.lines())
    agents.server.kill()
    agents.server.start()
    agents.stop()
    assert [agents.code(node) for node in "abc"] == [0, 0, 0]
    assert [line.what for line in agents.lines()[rounds:]] == ["end", "end"]


@needs_redis
def test_a_store_that_is_away_for_20_s_ends_no_round_and_a_loss_is_noticed_after_it(redis: Start) -> None:
    agents = redis("--nnodes=2", "--max-restarts=2", conf="last_call_s=3")
    pair_and_spare(agents)
    rounds = len(agents.lines())
    agents.server.kill()
    goes_on(agents, rounds, 20)
    agents.server.start()
    goes_on(agents, rounds, 5)
    before = agents.lines()[-1].at
    agents.kill_node("b")
    agents.wait_round("ac", before, within_s=60.0)
    agents.stop()
    assert [agents.code(each) for each in "abc"] == [0, -9, 0]


@needs_redis
def test_a_store_that_stays_away_ends_the_agents_with_a_line(redis: Start) -> None:
    agents = redis("--nnodes=2", conf=f"{QUICK},store_patience_s=3")
    pair_and_spare(agents)
    agents.server.kill()
    assert [agents.code(node) for node in "abc"] == [1, 1, 1]
    for node in "abc":
        lines = agents.output(node).splitlines()  # the last may be that its loop takes long to end
        assert any(
            each.startswith("torchrun --rdzv-backend=transport: run 'job': store unavailable for") for each in lines
        )


def test_a_file_that_is_removed_ends_the_agents_with_a_line(sqlite: Start) -> None:
    agents = sqlite("--nnodes=2", conf=f"{QUICK},store_patience_s=3")
    pair_and_spare(agents)
    for path in agents.folder.glob("store.sqlite3*"):
        path.unlink()
    assert [agents.code(node) for node in "abc"] == [1, 1, 1]
    assert "torchrun --rdzv-backend=transport: run 'job'" in agents.output("a")


def test_a_file_that_is_locked_for_a_while_costs_nothing(sqlite: Start) -> None:
    agents = sqlite("--nnodes=2", "--max-restarts=0", conf="lease_s=30,last_call_s=3")
    pair_and_spare(agents)
    rounds = len(agents.lines())
    other = sqlite3.connect(agents.folder / "store.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    agents.stop()
    agents.wait(lambda lines: sum(line.what == "end" for line in lines) == 2)
    other.execute("ROLLBACK")
    other.close()
    assert [agents.code(node) for node in "abc"] == [0, 0, 0]
    assert [line.what for line in agents.lines()[rounds:]] == ["end", "end"]


# --- a program that starts agents itself ----------------------------------------------------------------
def test_an_agent_that_is_started_as_another_error_is_handled_ends_in_order(tmp_path: Path) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from transport.adapters.torchrun.handler import make

    ended: list[str] = []
    try:
        raise ValueError("the first attempt, with other settings")
    except ValueError:
        handler = make(RendezvousParameters("transport", f"sqlite:{tmp_path}/store.sqlite3", "job", 1, 1))
        handler._finish = lambda: ended.append("done")
        handler.shutdown()  # by torchrun, as no worker failed
    assert ended == ["done"]


# --- bad input ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--rdzv-endpoint=10.0.0.1:29400"], "is no URL: give redis://10.0.0.1:29400/0"),
        (["--rdzv-endpoint=http://host"], "unknown URL scheme 'http'"),
        (["--rdzv-endpoint="], "give --rdzv-endpoint=redis://host:6379/0, or sqlite:/path/of/file"),
        (
            ["--rdzv-endpoint=redis://127.0.0.1:1/0", "--rdzv-conf=lease_s=1"],
            "check --rdzv-endpoint, and that the server runs",
        ),
        (["--rdzv-endpoint=redis://no.such.host.invalid/0"], "no.such.host.invalid"),
        (["--rdzv-endpoint=sqlite:/no/such/folder/file"], "/no/such/folder"),
        (["--rdzv-endpoint=sqlite:x", "--rdzv-conf=lease=3"], "unknown name 'lease'; it takes lease_s"),
        (["--rdzv-endpoint=sqlite:x", "--rdzv-conf=lease_s=soon"], "lease_s=soon: give a number"),
        (["--rdzv-endpoint=sqlite:x", "--rdzv-conf=where=rack"], "give where=slurm"),
        (["--rdzv-endpoint=sqlite:x", "--local-addr=255.255.255.255"], "give --local-addr one of its own addresses"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(tmp_path: Path, arguments: list[str], line: str) -> None:
    with torchrun_agents(tmp_path, "--rdzv-backend=transport", "--rdzv-id=job", "--nnodes=2", *arguments) as agents:
        agents.start("a")
        assert agents.code("a") == 1
        assert "Traceback" not in agents.output("a")
        printed = [each for each in agents.output("a").splitlines() if each.startswith("torchrun --rdzv-backend")]
        assert len(printed) == 1, agents.output("a")
        assert line in printed[0]


def test_a_missing_redis_package_is_named_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "redis.py").write_text("raise ImportError('not here')")
    arguments = ["--rdzv-backend=transport", "--rdzv-endpoint=redis://127.0.0.1/0", "--rdzv-id=job"]
    with torchrun_agents(tmp_path, *arguments) as agents:
        agents.start("a", PYTHONPATH=str(tmp_path))
        assert agents.code("a") == 1
        printed = agents.output("a").splitlines()
        assert len(printed) == 1, printed
        assert "pip install 'redis[hiredis]>=5.0'" in printed[0]

"""What an operator of torchrun sees when something fails: the backend `transport` beside torch's own `c10d`.

    build/adapters/bin/python benchmarks/torchrun_faults.py [--only NAME,…] [--backends c10d,c10d-own,redis,sqlite]

Prints two Markdown tables: seconds and exit codes, and what the operator sees. Each case starts real agents with one
gloo worker each, which all-reduce and check the sum, and then does what the row says. The seconds run from there to the
first line of the last worker of the next round, before it imports torch. All have --max-restarts=3, and their own
defaults for all times. The store of c10d is in a process of its own, so that no agent's death is the store's. The
backend `c10d-own` is c10d with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: workers have a store of their own for each round.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from torchrun_agents import Agents, torchrun_agents

WITHIN_S = 100.0
CLOSE_C10D = """
import sys
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
get_rendezvous_handler(RendezvousParameters("c10d", sys.argv[1], "job", 1, 2, is_host=False)).set_closed()
"""
OWN_LINE = re.compile(r"run '?job'?[: ].*|^\w[\w.]*(?:Error|Exception)\b.*", re.MULTILINE)


class Setup:
    """One backend: its store, and agents that use it."""

    def __init__(self, backend: str, folder: Path) -> None:
        self.backend = backend
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.endpoint = {
            "c10d": f"127.0.0.1:{self.port}",
            "c10d-own": f"127.0.0.1:{self.port}",
            "redis": f"redis://127.0.0.1:{self.port}/0",
            "sqlite": f"sqlite:{folder}/store.sqlite3",
        }[backend]

    def start_store(self) -> None:
        """c10d: a store in a process of its own, so that no agent's death is the store's. SQLite needs none."""
        if self.backend == "redis":
            options = ["--save", "", "--appendonly", "yes", "--dir", str(self.folder), "--bind", "127.0.0.1"]
            self.process = subprocess.Popen(
                ["redis-server", "--port", str(self.port), *options], stdout=subprocess.DEVNULL
            )
        elif self.backend.startswith("c10d"):
            serve = f"import time, torch.distributed as d; s = d.TCPStore('127.0.0.1', {self.port}, None, True, "
            serve += "wait_for_workers=False, multi_tenant=True); time.sleep(1e6)"
            self.process = subprocess.Popen([sys.executable, "-P", "-c", serve])
        while self.process is not None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.05)

    def kill_store(self) -> None:
        """SIGKILL; of SQLite the file is removed."""
        if self.process is None:
            for path in self.folder.glob("store.sqlite3*"):
                path.unlink()
        else:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close_run(self) -> None:
        """End the run from outside, as failed where a reason can be given."""
        if self.backend.startswith("c10d"):
            subprocess.run([sys.executable, "-P", "-c", CLOSE_C10D, self.endpoint], check=True, capture_output=True)
            return
        from transport.rendezvous.closing import close_run
        from transport.rendezvous.records import Keys, Reason
        from transport.store.open import open_store

        with open_store(self.endpoint + ("?run=job" if self.backend == "redis" else "")) as store:
            close_run(store, Keys("job"), Reason.FAILURE, "operator", "no budget left")

    @contextlib.contextmanager
    def agents(self, *more: str) -> Iterator[Agents]:
        """Agents of one run."""
        name = "c10d" if self.backend.startswith("c10d") else "transport"
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = str(int(self.backend == "c10d-own"))
        arguments = [f"--rdzv-backend={name}", f"--rdzv-endpoint={self.endpoint}", "--rdzv-id=job"]
        arguments += ["--rdzv-conf=is_host=0"] if name == "c10d" else []
        self.start_store()
        try:
            with torchrun_agents(self.folder, *arguments, "--max-restarts=3", *more) as agents:
                yield agents
        finally:
            if self.process is not None:
                self.kill_store()


class Outcome(NamedTuple):
    """A row's cells for one backend. ``seconds``: until the next round, or why there was none."""

    seconds: str
    codes: str
    sees: str


class Case(NamedTuple):
    """``agents``: letters of those that are started first; then one by one those of ``spares``."""

    name: str
    title: str
    nodes: str
    agents: str
    spares: str
    fault: Callable[[Setup, Agents], object]
    next_round: str = ""  # agents of the next round; empty: none is expected
    stop: bool = True  # the work then ends


def _kill(setup: Setup, agents: Agents) -> None:
    os.kill(agents.worker("b"), signal.SIGKILL)


def _signalled(number: signal.Signals) -> Callable[[Setup, Agents], object]:
    return lambda setup, agents: os.kill(agents.running["b"].pid, number)


def _restarted(setup: Setup, agents: Agents) -> None:
    if setup.process is not None:
        setup.kill_store()
        time.sleep(2.0)
        setup.start_store()
    else:
        with contextlib.closing(sqlite3.connect(setup.folder / "store.sqlite3", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            time.sleep(2.0)
            other.execute("ROLLBACK")
    time.sleep(3.0)


CASES = (
    Case("none", "nothing; a spare that is not needed", "2", "ab", "c", lambda setup, agents: None),
    Case("worker", "a worker is killed", "2", "ab", "c", _kill, "ab"),
    Case("agent", "an agent is killed, its worker lives", "2", "ab", "c", _signalled(signal.SIGKILL), "ac"),
    Case("node", "agent and worker are killed", "2", "ab", "c", lambda setup, agents: agents.kill_node("b"), "ac"),
    Case("smaller", "the same without a spare, 1 to 2 nodes", "1:2", "ab", "", lambda s, a: a.kill_node("b"), "a"),
    Case("sigterm", "SIGTERM to an agent", "2", "ab", "c", _signalled(signal.SIGTERM), "ac"),
    Case("sigstop", "an agent stopped for longer than its lease", "2", "ab", "c", _signalled(signal.SIGSTOP), "ac"),
    Case("late", "one more node comes, 1 to 3 nodes", "1:3", "ab", "", lambda setup, agents: agents.start("c"), "abc"),
    Case("closed", "the run is closed from outside", "2", "ab", "c", lambda s, a: s.close_run(), stop=False),
    Case("restart", "the store is killed, or locked, for 2 s", "2", "ab", "c", _restarted),
    Case("store", "the store is lost for good", "2", "ab", "c", lambda setup, agents: setup.kill_store(), stop=False),
)


def measure(case: Case, backend: str) -> Outcome:
    """Run one case."""
    folder = Path(tempfile.mkdtemp(prefix="torchrun-"))
    setup = Setup(backend, folder)
    try:
        with setup.agents(f"--nnodes={case.nodes}") as agents:
            for node in case.agents:
                agents.start(node)
            agents.wait_round(case.agents)
            for node in case.spares:
                agents.start(node)
                time.sleep(8.0)  # it imports torch and waits; c10d does not say that it does
            before, seconds = time.time(), "-"
            case.fault(setup, agents)
            if case.next_round:
                seconds = _next_round(agents, case.next_round, before)
            if case.name == "sigstop":
                agents.running["b"].send_signal(signal.SIGCONT)
            if case.stop:
                agents.stop()
            codes = {node: _code(agents, node) for node in agents.running}
            return Outcome(seconds, " ".join(f"{node}={code}" for node, code in codes.items()), _sees(agents))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _next_round(agents: Agents, nodes: str, before: float) -> str:
    try:
        agents.wait_round(nodes, before, WITHIN_S)
    except AssertionError:
        return f"none in {WITHIN_S:.0f} s"
    starts = {line.node: line.at for line in agents.lines() if line.what == "start" and line.world == len(nodes)}
    return f"{max(starts[node] for node in nodes) - before:.1f} s"


def _code(agents: Agents, node: str) -> str:
    try:
        return str(agents.running[node].wait(WITHIN_S))
    except subprocess.TimeoutExpired:
        return "still-runs"


def _sees(agents: Agents) -> str:
    """The last line of the rendezvous that an agent printed, and the lines of tracebacks."""
    found, trace = [], 0
    for node in agents.running:
        text = agents.output(node)
        trace += sum(line.startswith('  File "') for line in text.splitlines() if "torch/distributed" in line)
        found += [line.strip() for line in OWN_LINE.findall(text)]
    last = re.sub(r"\(\S+?:(\d+):\w+\)", r"(pid \1)", found[-1]) if found else "nothing of the rendezvous"
    return f"{last[:140]}" + (f" ({trace} lines of tracebacks)" if trace else "")


def tables(found: Mapping[tuple[str, str], Outcome], backends: Sequence[str]) -> str:
    """What was found, by title and backend: seconds and exit codes, then what the operator sees."""
    titles = [case.title for case in CASES if any((case.title, backend) in found for backend in backends)]
    empty = Outcome("not run", "", "not run")
    parts = []
    for cell in (lambda each: f"{each.seconds}; {each.codes}".strip("; ").removeprefix("-; "), lambda each: each.sees):
        rows = [[title, *(cell(found.get((title, backend), empty)) for backend in backends)] for title in titles]
        head = [["what happens", *backends], ["---"] * (len(backends) + 1)]
        parts.append("\n".join("| " + " | ".join(row) + " |" for row in head + rows))
    return "\n\n".join(parts)


def main() -> None:
    """Rows as they come on stderr, the tables at the end."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", default=",".join(case.name for case in CASES))
    arguments.add_argument("--backends", default="c10d,c10d-own,redis,sqlite")
    chosen = arguments.parse_args()
    backends, found = chosen.backends.split(","), {}
    for case in CASES:
        for backend in backends if case.name in chosen.only.split(",") else ():
            found[case.title, backend] = outcome = measure(case, backend)
            print(f"| {case.title} | {backend} | {' | '.join(outcome)} |", file=sys.stderr, flush=True)
    print(tables(found, backends))


if __name__ == "__main__":
    main()

"""A mesh of real processes that are killed at any moment, and what their notes have to say at the end."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

from mesh_rollout import SAMPLES

RANK: Final = Path(__file__).with_name("mesh_rank.py")
ROLLOUT: Final = Path(__file__).with_name("mesh_rollout.py")
_HALTS_S: Final = 300.0  # until a rank comes to a point, on a busy machine
DP, TP, RINGS, GROUPS, EVERY = 2, 2, 3, 6, 3  # of a step; steps between checkpoints


class Place(Protocol):
    """A host of ranks and rollouts."""

    address: str

    def command(self, *words: str) -> list[str]: ...


class ThisHost:
    """The host of the tests themselves."""

    address = "127.0.0.1"

    def command(self, *words: str) -> list[str]:
        return list(words)


class MeshRun:
    """A mesh of 2 x 2 ranks, and the three rings on which they train. Made by `mesh_run`.

    Args:
        places: of ranks and rings, in turn.
        rings, store: texts of the rings and of the mesh's records.
        folder: of the ranks' checkpoints and logs.
    """

    def __init__(self, places: Sequence[Place], rings: str, store: str, folder: Path, *, wires: str) -> None:
        self._folder = folder
        shares = [places[rank * len(places) // (DP * TP)] for rank in range(DP * TP)]
        self._commands = [
            place.command(
                *(sys.executable, "-P", str(RANK), rings, store),
                *map(str, (DP, TP, rank, folder, GROUPS, EVERY)),
                wires,
            )
            for rank, place in enumerate(shares)
        ]
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self._rollouts = [
            subprocess.Popen(
                place.command(sys.executable, "-P", str(ROLLOUT), rings, place.address, str(number), str(RINGS)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for number, place in enumerate(places[number % len(places)] for number in range(RINGS))
        ]

    def begin(self) -> None:
        """Start every rank, once the rings are there."""
        for each in self._rollouts:
            assert each.stdout is not None and each.stdout.readline() == b"open\n"
        for rank in range(DP * TP):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Start a rank, whose output goes to a file."""
        with (self._folder / f"{rank}.log").open("ab") as out:
            self.running[rank] = subprocess.Popen(self._commands[rank], stdout=out, stderr=out)

    def kill(self, rank: int) -> None:
        """Kill a rank."""
        self.running[rank].kill()
        self.running[rank].wait()

    # --- kills at any moment ---------------------------------------------------------------------------
    def outlive(
        self,
        chances: random.Random,
        kills: int,
        *,
        all_at_once: int = 0,
        victim: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Kill one rank after the other while they learn, and start it again.

        all_at_once: how many of the kills are of all ranks.
        victim: says which rank is killed; None: any.
        """
        every = set(chances.sample(range(kills), all_at_once))
        for kill in range(kills):
            time.sleep(chances.uniform(0.05, 1.0))  # the moment of a kill is any
            self.look()
            chosen = victim()
            one = [chosen if chosen is not None and chosen < DP * TP else chances.choice(list(self.running))]
            for rank in list(self.running) if kill in every else one:
                self.kill(rank)
                self.start(rank)

    # --- kills at a point ------------------------------------------------------------------------------
    def halt(self, role: str, point: str) -> int:
        """Have the first rank of this role that comes to the point stop there; returns which it is."""
        asked = self._folder / "halt"
        asked.with_suffix(".new").write_text(f"{role} {point}")
        asked.with_suffix(".new").rename(asked)
        found: list[Path] = []

        def halted() -> list[Path]:
            self.look()
            found[:] = self._folder.glob("halted-*")
            return found

        give_up = time.monotonic() + _HALTS_S
        while not halted():
            assert time.monotonic() < give_up, f"no rank that is {role} comes to {point!r}"
            time.sleep(0.005)
        [said] = found
        said.unlink()
        rank = int(said.name.rpartition("-")[2])
        os.waitid(os.P_PID, self.running[rank].pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return rank

    def go_on(self, rank: int) -> None:
        """Let a rank that has halted go on."""
        self.running[rank].send_signal(signal.SIGCONT)

    def is_back(self, rank: int) -> bool:
        """Whether a rank that was started has begun with its steps."""
        self.look()
        return (self._folder / f"begun-{rank}-{self.running[rank].pid}").exists()

    # --- the end -----------------------------------------------------------------------------------------
    def look(self) -> None:
        """Take leave of ranks that have ended; AssertionError where one failed."""
        for rank, process in list(self.running.items()):
            if (status := process.poll()) is not None:
                assert status == 0, (self._folder / f"{rank}.log").read_text()[-3000:]
                del self.running[rank]

    def _told(self, words: str) -> list[int]:
        """Tell the rollouts something, and return the number that each says then."""
        for each in self._rollouts:
            assert each.stdin is not None
            each.stdin.write(f"{words}\n".encode())
            each.stdin.flush()
        return [int(each.stdout.readline()) for each in self._rollouts if each.stdout is not None]

    def end(self, within_s: float = 300.0) -> None:
        """End the data, and look at what the ranks have learned.

        Each group is in each rank's weights once, all ranks have the same steps, replicas divide the samples, and the
        rings have nothing left.
        """
        count = max(self._told("pause"))
        give_up = time.monotonic() + within_s
        for each in self._rollouts:
            assert each.stdin is not None
            each.stdin.write(f"{count}\n".encode())
            each.stdin.flush()
        while self.running:
            assert time.monotonic() < give_up, f"no end after {within_s} s"
            self.look()
            time.sleep(0.05)
        notes = [json.loads((self._folder / f"{rank}.json").read_text()) for rank in range(DP * TP)]
        assert all(rank["over"] for rank in notes)
        of = [rank["steps"] for rank in notes]
        steps = [[(number, groups, micro) for number, groups, _, micro in rank] for rank in of]
        assert all(each == steps[0] for each in steps), "ranks differ in their steps"
        groups = Counter(name for _, names, _ in steps[0] for name in names)
        assert groups == Counter(f"p{number}" for number in range(count))
        for replica in range(0, len(of), TP):
            assert all(rank == of[replica] for rank in of[replica : replica + TP])
        samples = Counter(value for rank in of[::TP] for _, _, values, _ in rank for value in values)
        assert samples == Counter(dict.fromkeys(range(count), SAMPLES))
        assert self._told("bye") == [0] * RINGS
        for each in self._rollouts:
            each.communicate(timeout=60)

    def stop(self) -> None:
        """Kill what still runs."""
        for process in [*self.running.values(), *self._rollouts]:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def mesh_run(places: Sequence[Place], rings: str, store: str, folder: Path, *, wires: str) -> Iterator[MeshRun]:
    """Start rollouts and ranks, and kill at the end what is left of them."""
    run = MeshRun(places, rings, store, folder, wires=wires)
    try:
        run.begin()
        yield run
    finally:
        run.stop()

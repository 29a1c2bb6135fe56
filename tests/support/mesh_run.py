"""A mesh of real processes that are killed at any moment, and what their notes have to say at the end."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from transport import SharedRingBuffer
from transport.group import in_group

RANK = Path(__file__).with_name("mesh_rank.py")
OF = 4


class MeshRun:
    """Ranks as processes, and the rings that they train on.

    Args:
        rings: of this process, whose samples `feed` divides over them.
        folder: of the ranks' checkpoints and logs.
    """

    def __init__(
        self, prefix: str, rings: Sequence[SharedRingBuffer], folder: Path, dp: int, tp: int, *, groups: int, wire: str
    ) -> None:
        self._rings = rings
        self._folder = folder
        self._ranks = dp * tp
        store = f"sqlite:///{folder}/steps.db"
        self._command = [
            [
                sys.executable,
                "-P",
                str(RANK),
                prefix,
                store,
                str(dp),
                str(tp),
                str(rank),
                str(folder),
                str(groups),
                "3",
                wire,
            ]
            for rank in range(self._ranks)
        ]
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._feeder: threading.Thread | None = None
        self.kills = 0

    def feed(self, count: int) -> None:
        """Write so many groups in a thread, each into several rings, and then say the end."""

        def write() -> None:
            for number in range(count):
                for sample in range(OF):
                    ring = self._rings[(number + sample) % len(self._rings)]
                    fields = {"tokens": np.full(8 + number % 50, number, np.int32)}
                    ring.write(fields, metadata=in_group(None, f"p{number}", OF, 8 + number % 50), timeout_s=120)
            for ring in self._rings:
                ring.end_data()

        self._feeder = threading.Thread(target=write)
        self._feeder.start()

    def start(self, rank: int) -> None:
        """Start a rank, whose output goes to a file."""
        with (self._folder / f"{rank}.log").open("ab") as out:
            self._running[rank] = subprocess.Popen(self._command[rank], stdout=out, stderr=out)

    def run(
        self,
        chances: random.Random,
        kills: int,
        within_s: float,
        *,
        all_at_once: int = 0,
        victim: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Have the ranks learn until the data has ended; meanwhile one after the other is killed and started again.

        all_at_once: how many of the kills are of all ranks.
        victim: says which rank is killed; None: any.
        """
        for rank in range(self._ranks):
            self.start(rank)
        give_up = time.monotonic() + within_s
        every = set(chances.sample(range(kills), all_at_once))
        while self._running:
            assert time.monotonic() < give_up, f"no end after {within_s} s: {self.notes(partly=True)}"
            if self.kills < kills:
                time.sleep(chances.uniform(0.05, 1.0))  # the moment of a kill is any
                left = list(self._running)
                chosen = victim()
                one = [chosen if chosen in self._running else chances.choice(left)]
                for rank in left if self.kills in every else one:
                    self._running[rank].kill()
                    self._running[rank].wait()
                    self.start(rank)
                self.kills += 1
            else:
                time.sleep(0.1)
            for rank, process in list(self._running.items()):
                if (status := process.poll()) is not None:
                    assert status == 0, (self._folder / f"{rank}.log").read_text()[-3000:]
                    del self._running[rank]
        assert self._feeder is not None
        self._feeder.join(30)

    def stop(self) -> None:
        """Kill what still runs."""
        for process in self._running.values():
            process.kill()
            process.wait()

    def notes(self, *, partly: bool = False) -> list[list[tuple[int, list[str], list[int], int]]]:
        """What each rank has learned: of each step its number, its groups, the samples of this rank."""
        found = []
        for rank in range(self._ranks):
            place = self._folder / f"{rank}.json"
            if partly and not place.exists():
                found.append([])
                continue
            read = json.loads(place.read_text())
            assert read["over"] or partly, f"rank {rank} has not seen the end"
            found.append(read["steps"])
        return found

    def check(self, count: int, tp: int) -> None:
        """Each group is in each rank's weights once, all ranks have the same steps, replicas divide the samples."""
        notes = self.notes()
        steps = [[(number, groups, micro) for number, groups, _, micro in rank] for rank in notes]
        assert all(each == steps[0] for each in steps), "ranks differ in their steps"
        groups = Counter(name for _, names, _ in steps[0] for name in names)
        assert groups == Counter(f"p{number}" for number in range(count))
        for replica in range(0, len(notes), tp):
            assert all(rank == notes[replica] for rank in notes[replica : replica + tp])
        samples = Counter(value for rank in notes[::tp] for _, _, values, _ in rank for value in values)
        assert samples == Counter(dict.fromkeys(range(count), OF))

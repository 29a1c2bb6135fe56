"""Two rollouts, two trainers and a hot spare; one of them is killed, the spare takes over, and the run succeeds.

.venv/bin/python examples/elastic/run.py [--kill rollout|trainer]
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from worker import EPISODES, ROLLOUTS

from transport.rendezvous import Archive, Reason

TRAINERS = 2
MEMBERS = ROLLOUTS + TRAINERS
LAUNCHER = Path(__file__).with_name("launcher.py")


class Launcher:
    """A launcher's process; what it says is known line by line."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, str(LAUNCHER), str(folder), str(MEMBERS)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def kill(self) -> None:
        """As if its host had crashed: SIGKILL for the launcher and its worker."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def hear(self, first: str) -> list[str]:
        """The words of the next line that begins with ``first``."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(first):
                return line.split()
        raise SystemExit(f"a launcher ended with {self.process.wait()} before it printed {first!r}")


def run(folder: Path, victim: str) -> int:
    launchers = [Launcher(folder) for _ in range(MEMBERS)]
    spare: Launcher | None = None
    try:
        by_rank = {int(each.hear("rank")[1]): each for each in launchers}
        spare = Launcher(folder)
        spare.hear("waits")
        print(f"{ROLLOUTS} rollouts and {TRAINERS} trainers at work, a hot spare waits")
        rank = ROLLOUTS - 1 if victim == "rollout" else ROLLOUTS
        by_rank[rank].kill()
        heard = spare.hear("rank")
        print(f"rank {rank}, a {victim}, was killed; the spare has rank {heard[1]} in round {heard[3]}")
        statuses = [each.process.wait() for each in (*(by_rank[at] for at in by_rank if at != rank), spare)]
    finally:
        for each in [*launchers, *([spare] if spare is not None else [])]:
            if each.process.poll() is None:
                each.kill()
            each.process.communicate()
    closing = Archive(folder / "closed.json").read()
    done = sum(int(each.read_text()) for each in folder.glob("trained-*"))
    print(f"{done} episodes were trained on; the run ended as {closing.reason if closing else 'nobody knows'}")
    ended_well = closing is not None and closing.reason is Reason.SUCCESS and done >= EPISODES
    return max(statuses) if ended_well else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kill", choices=["rollout", "trainer"], default="rollout")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        return run(Path(folder), arguments.kill)


if __name__ == "__main__":
    sys.exit(main())

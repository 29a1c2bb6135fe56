"""One member of an elastic run: waits for a rank, keeps that rank's worker running, and ends as the run ends.

.venv/bin/python examples/elastic/launcher.py FOLDER MEMBERS     # started by run.py; the last one to come is the spare
"""

import asyncio
import subprocess
import sys
from pathlib import Path

from transport.rendezvous import Archive, Place, Rendezvous, Rules
from transport.store import SQLiteStore

WORKER = Path(__file__).with_name("worker.py")
STOP_S = 30.0


def say(*words: object) -> None:
    print(*words, flush=True)


class Worker:
    """The process that does a rank's work. It ends when its standard input does, so it never outlives its launcher."""

    def __init__(self, rank: int, process: asyncio.subprocess.Process) -> None:
        self.rank = rank
        self.process = process
        self.ended = asyncio.create_task(process.wait())

    @classmethod
    async def start(cls, folder: Path, rank: int) -> "Worker":
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(WORKER), str(folder), str(rank), stdin=subprocess.PIPE
        )
        return cls(rank, process)

    async def stop(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            await asyncio.wait_for(asyncio.shield(self.ended), STOP_S)
        except TimeoutError:
            self.process.kill()
            await self.ended


async def launch(folder: Path, members: int) -> int:
    rules = Rules(least=members, lease_s=2.0, poll_s=0.2, last_call_s=5.0, most_rounds=10)
    worker: Worker | None = None
    with SQLiteStore(folder / "store.sqlite3") as store:
        async with Rendezvous(store, "elastic", rules, archive=Archive(folder / "closed.json")) as rendezvous:
            say("waits")
            try:
                while isinstance(place := await rendezvous.join(), Place):
                    say("rank", place.rank, "round", place.round)
                    if worker is not None and worker.rank != place.rank:
                        await worker.stop()
                        worker = None
                    if worker is None:  # otherwise the others' trouble is none of its business
                        worker = await Worker.start(folder, place.rank)
                    over = asyncio.create_task(rendezvous.over())
                    await asyncio.wait([over, worker.ended], return_when=asyncio.FIRST_COMPLETED)
                    if worker.ended.done():
                        status, worker = worker.ended.result(), None
                        if status == 0:
                            await rendezvous.finish()
                        else:
                            await rendezvous.restart(f"its worker ended with {status}")
                    await over
            finally:
                if worker is not None:
                    await worker.stop()
            say("ends", rendezvous.exit_code)
            return rendezvous.exit_code


if __name__ == "__main__":
    sys.exit(asyncio.run(launch(Path(sys.argv[1]), int(sys.argv[2]))))

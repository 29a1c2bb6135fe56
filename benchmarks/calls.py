"""Count the Python calls that one payload costs at each end, in the steady state: written, and taken to consumed.

    python benchmarks/calls.py                     # both wires
    python benchmarks/calls.py --wire tcp --top 80

A rollout in a process of its own writes into a ring; a `Trainer` here takes one payload at a time, looks at its field
and consumes it. Counted are calls of Python functions, in all threads of a process: those of the package, by function,
and beside them those of other modules. Comprehensions and each step of a generator are calls before Python 3.12.
"""

from __future__ import annotations

import argparse
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import transport
from transport import Rollout, Schema, Trainer, UpTo
from transport.runtime.loop_thread import LoopThread

SCHEMA = Schema.of(tokens=("int32", UpTo(4096)))
PACKAGE = str(Path(transport.__file__).parent)
WARM = 50  # payloads before those that are counted


class Calls:
    """Calls of functions, by file and name."""

    def __init__(self) -> None:
        self.own: Counter[tuple[str, str]] = Counter()
        self.others = 0

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Count one; for `sys.setprofile`."""
        if event == "call":
            code = frame.f_code
            if code.co_filename.startswith(PACKAGE):
                self.own[str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname] += 1
            else:
                self.others += 1

    @contextmanager
    def counted(self, *threads: LoopThread) -> Iterator[None]:
        """Count in this thread and in these."""

        async def profile(function: Any) -> None:
            sys.setprofile(function)

        for thread in threads:
            thread.run(profile(self.note))
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)
            for thread in threads:
                thread.run(profile(None))

    def show(self, what: str, payloads: int, top: int) -> None:
        """Print the calls for each payload, and the functions that are called most."""
        files = {file for file, _ in self.own}
        print(
            f"{what}: {sum(self.own.values()) / payloads:.1f} calls, {len(self.own)} functions in {len(files)} files, "
            f"and {self.others / payloads:.1f} of other modules"
        )
        for (file, name), count in self.own.most_common(top):
            print(f"  {count / payloads:6.2f}  {file}: {name}")


def write(prefix: str, payloads: int, top: int) -> None:
    """Write so many payloads into a ring with room for all, and count; end with standard input."""
    values = [{"tokens": np.arange(1 + at % 7, dtype=np.int32)} for at in range(WARM + payloads)]
    with Rollout(SCHEMA, f"rings:{prefix}", slots=WARM + payloads) as rollout:
        for each in values[:WARM]:
            rollout.write(each)
        calls = Calls()
        with calls.counted():
            for each in values[WARM:]:
                rollout.write(each)
        calls.show("written", payloads, top)
        print(flush=True)
        sys.stdin.read()


def take(trainer: Trainer) -> None:
    """Take one payload, look at its field, consume it."""
    batch = trainer.take(1, 60.0)
    assert batch is not None
    [payload] = batch.payloads
    payload["tokens"]
    batch.consume()


def count(wire: Any, payloads: int, top: int) -> None:
    """Run both ends over one wire."""
    prefix = f"calls-{secrets.token_hex(4)}-"
    command = [sys.executable, __file__, "--writes", prefix, "--payloads", str(payloads), "--top", str(top)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rollout:
        assert rollout.stdout is not None
        said = "".join(iter(rollout.stdout.readline, "\n"))
        calls = Calls()
        with Trainer(SCHEMA, f"rings:{prefix}", wire={wire}) as trainer:
            for _ in range(WARM):
                take(trainer)
            with calls.counted(trainer._thread):
                for _ in range(payloads):
                    take(trainer)
        rollout.communicate()
    print(f"{wire}, {said}", end="")
    calls.show(f"{wire}, taken and consumed", payloads, top)


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", default="mapped,tcp", help="mapped, tcp, shm or rdma, separated by commas")
    parser.add_argument("--payloads", type=int, default=400)
    parser.add_argument("--top", type=int, default=0, help="functions that are listed")
    parser.add_argument("--writes", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.writes:
        write(given.writes, given.payloads, given.top)
        return
    for wire in given.wire.split(","):
        count(wire, given.payloads, given.top)


if __name__ == "__main__":
    main()

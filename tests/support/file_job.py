"""A job whose rings lie in files and whose model is a ledger: the numbers of the payloads that it was trained on.

    python file_job.py FOLDER RUN BOOT COUNT SYNC WIRES      its first process: ends with all, when all is trained on

Two rollouts write ``COUNT`` payloads each; a payload's number is never used again in a later run of the job. Each
appends to its log what it is about to write, and then what it has written. The trainer learns, stores its checkpoint
(ledger and record), and consumes: what was claimed and not stored comes again, and what was stored is refused.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from transport.client.payload import ReceivedPayload
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.options import RingOptions
from transport.packer.ready import Rollout, Trainer
from transport.queue import open_queue
from transport.schema import Schema, UpTo

SCHEMA = Schema.of(number=("int64",), data=("uint8", UpTo(20_000)))
ROLLOUTS = 2
_BATCH = 5


def content(number: int) -> np.ndarray:
    """The bytes of a payload; every seventh is large."""
    return np.random.default_rng(number).integers(0, 256, 20_000 if number % 7 == 0 else 300, dtype=np.uint8)


def log_of(folder: Path, rollout: int) -> Path:
    """What a rollout was about to write ("b") and has written ("w")."""
    return folder / f"rollout-{rollout}.log"


def written(folder: Path) -> tuple[set[int], set[int]]:
    """The numbers that writing was begun of, and those whose write returned."""
    found: dict[str, set[int]] = {"b": set(), "w": set()}
    for rollout in range(ROLLOUTS):
        log = log_of(folder, rollout)
        for line in log.read_text().splitlines() if log.exists() else []:
            found[line[0]].add(int(line[1:]))
    return found["b"], found["w"]


def checkpoint(folder: Path) -> tuple[list[int], ConsumedRecord]:
    """The model as it was stored last, and its record."""
    path = folder / "checkpoint.json"
    if not path.exists():
        return [], ConsumedRecord()
    stored = json.loads(path.read_text())
    return stored["ledger"], ConsumedRecord.from_bytes(bytes.fromhex(stored["record"]))


def roll_out(folder: Path, run: str, boot: int, count: int, sync: str, number: int) -> None:
    """One rollout."""
    log = os.open(log_of(folder, number), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with (
        open_queue(f"rings:{run}") as queue,
        Rollout(
            SCHEMA,
            slots=8,
            file=folder / f"rollout-{number}.ring",
            queue=queue,
            ring=RingOptions(sync=sync),  # type: ignore[arg-type]
            drain_s=60.0,
        ) as rollout,
    ):
        for each in range(count):
            name = (boot * ROLLOUTS + number) * 100_000 + each
            os.write(log, f"b{name}\n".encode())
            rollout.write_to_buffer({"number": name, "data": content(name)})
            os.write(log, f"w{name}\n".encode())


def learned(payloads: list[ReceivedPayload]) -> list[int]:
    """Their numbers."""
    for payload in payloads:
        number = int(payload["number"])
        assert np.array_equal(payload["data"], content(number)), f"other bytes than those of {number}"
    return [int(payload["number"]) for payload in payloads]


def train(folder: Path, run: str) -> None:
    """The trainer, from its last checkpoint on."""
    ledger, record = checkpoint(folder)
    with (
        open_queue(f"rings:{run}") as queue,
        Trainer(schemas=[SCHEMA], queue=queue, consumed=record, expected_rollouts=ROLLOUTS) as trainer,
    ):
        while True:
            claims = trainer.claim_tickets(_BATCH, 0.5)
            if not claims:
                if trainer.finished():
                    return
                continue
            trainer.start_prefetch(claims)
            del claims
            batch = trainer.collect_prefetch()
            assert batch is not None
            ledger += learned(trainer.accept(batch))
            stored = {"ledger": ledger, "record": trainer.consumed_record().to_bytes().hex()}
            (folder / "next.json").write_text(json.dumps(stored))
            (folder / "next.json").replace(folder / "checkpoint.json")
            trainer.consume(batch)
            del batch  # mapped payloads keep their slots


def main() -> None:
    """The job, or one of its processes."""
    logging.basicConfig()
    folder, run, boot, count, sync, wires, *role = sys.argv[1:]
    if role == ["train"]:
        train(Path(folder), run)
    elif role:
        roll_out(Path(folder), run, int(boot), int(count), sync, int(role[0]))
    else:
        environment = os.environ | {"TRANSPORT_WIRES": wires, "TRANSPORT_LINGER_S": "30"}
        roles = ["train", *map(str, range(ROLLOUTS))]
        parts = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:], each], env=environment) for each in roles]
        sys.exit(max(abs(part.wait()) for part in parts))


if __name__ == "__main__":
    main()

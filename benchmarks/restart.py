"""A run that is killed whole and restored: whether every payload is trained on once, and what snapshots cost.

    python benchmarks/restart.py --seeds 200 --json build/restart.json
    python benchmarks/restart.py --costs

The model is a ledger: which payload ids it was trained on, and how often; it is checkpointed as a model is, with the
record of consumed payloads and the name of a snapshot. For each seed a job of 1 to 4 rollouts and a trainer is killed
with SIGKILL as one process group, some times at random instants, at the cut of a snapshot, or while it restores. Its
segments are removed. What was published before a cut is never written again: what a snapshot lacks is lost for good.
The next life restores the newest checkpoint whose snapshot is complete, with another number of
rings. The last life runs to the end, and its ledger must have every id once. Exit status 1 if one has not.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import json
import mmap
import os
import random
import secrets
import select
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np

from transport import Schema, SharedRingBuffer, Trainer, UpTo
from transport.claims.open import open_rings
from transport.packer.consumed_record import ConsumedRecord
from transport.ring.attachment import remove_dead
from transport.runtime.durable import write_whole
from transport.snapshots import Saved, Snapshot, snapshot, steps

SCHEMA: Final = Schema.of(id=("int64",), values=("uint8", UpTo(40_000)))
BATCH, EVERY, SLOTS = 8, 5, 24
RUN: Final = "ledger"
_PR_SET_CHILD_SUBREAPER: Final = 36
_LIFE_S: Final = 60.0
_MOST_RINGS: Final = 4


# --- the job ------------------------------------------------------------------------------------------
class Job(NamedTuple):
    """One run, through all of its lives. ``folder`` has its checkpoints; ``payloads`` is how many ids there are.

    ``journal`` has a byte for each id, which is 1 when the id's write has returned in this life.
    """

    folder: Path
    payloads: int
    size: int  # bytes of the largest
    journal: mmap.mmap
    restored: mmap.mmap  # a byte for each rollout, which is 1 when its share is in its ring

    @property
    def destination(self) -> str:
        """Where its snapshots go."""
        return str(self.folder / "snapshots")

    @property
    def final(self) -> Path:
        """The ledger of the life that came to its end."""
        return self.folder / "final.json"


class Checkpoint(NamedTuple):
    """The model, and what belongs to it."""

    step: int
    ledger: Counter[int]
    record: ConsumedRecord
    attempt: str
    published: frozenset[int]  # before the cut: each of these is in the ledger or in the snapshot


def newest(job: Job) -> Checkpoint | None:
    """The newest checkpoint whose snapshot is complete."""
    complete = steps(job.destination, RUN)
    for path in sorted(job.folder.glob("checkpoint-*.json"), reverse=True):
        found = json.loads(path.read_text())
        if found["attempt"] in complete.get(found["step"], []):
            ledger = Counter({int(name): count for name, count in found["ledger"].items()})
            record = ConsumedRecord.from_bytes(base64.b64decode(found["record"]))
            return Checkpoint(found["step"], ledger, record, found["attempt"], frozenset(found["published"]))
    return None


def values_of(number: int, size: int) -> np.ndarray[Any, Any]:
    """The payload of an id."""
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, rng.integers(1, size + 1), np.uint8)


def rollout(job: Job, index: int, of: int, prefix: str, say: Any) -> None:
    """Restore a share of the snapshot, then write the ids that were not published before its cut."""
    found = newest(job)
    with SharedRingBuffer.create(SCHEMA, slots=SLOTS, prefix=prefix) as ring:
        known: set[int] = set()
        if found is not None:
            say(f"restoring {index}")
            with Saved(job.destination, found.step, run=RUN, attempt=found.attempt) as saved:
                # The ledger may have an id whose writer had not come to note it in the journal.
                ids = (cast("int", each.ticket.metadata["id"]) for each in saved.payloads)
                known = {*found.published, *found.ledger, *ids}
                saved.restore(ring, share=(index, of), consumed=[found.record])
            say(f"restored {index}")
        for number in known:
            job.journal[number] = 1
        job.restored[index] = 1
        for number in range(index, job.payloads, of):
            if number not in known:
                ring.write({"id": number, "values": values_of(number, job.size)}, metadata={"id": number})
                job.journal[number] = 1
        ring.end_data()
        while not job.final.exists():
            time.sleep(0.01)  # trainers look into this ring until then


def trainer(job: Job, rings: int, prefix: str, say: Any) -> None:
    """Train until the ledger has every id. Takes no snapshot before every share of the last one is restored."""
    found = newest(job)
    step, ledger, record, _, before = found or Checkpoint(0, Counter(), ConsumedRecord(), "", frozenset())
    taken: Snapshot | None = None
    with (
        open_rings(f"rings:{prefix}") as queue,
        Trainer(schemas=[SCHEMA], queue=queue, consumed=record, wire=("mapped",)) as trainer,
    ):
        while len(ledger) < job.payloads:
            batch = trainer.collect_prefetch()
            claims = trainer.claim_tickets(BATCH, timeout_s=0.05 if batch is None else 0.0)
            if claims:
                trainer.start_prefetch(claims)  # held and on its way while the step ends: also at a cut
            if batch is None:
                continue
            for payload in trainer.consume(batch):
                number = int(payload["id"])
                assert np.array_equal(payload["values"], values_of(number, job.size)), f"payload {number} is wrong"
                ledger[number] += 1
            batch.release()
            step += 1
            if step % EVERY == 0 and all(job.restored[:rings]):
                if taken is not None:
                    taken.wait()
                    say(f"complete {taken.step}")
                kept = base64.b64encode(trainer.consumed_record().to_bytes()).decode()
                published = sorted(before | {number for number, is_there in enumerate(job.journal[:]) if is_there})
                taken = snapshot(queue, job.destination, step, run=RUN)
                say(f"taken {step}")
                model = {
                    "step": step, "ledger": ledger, "record": kept, "attempt": taken.attempt, "published": published,
                }  # fmt: skip
                write_whole(job.folder / f"checkpoint-{step:012d}.json", [json.dumps(model).encode()])
        if taken is not None:
            taken.wait()
        write_whole(job.final, [json.dumps(ledger).encode()])


# --- its lives ----------------------------------------------------------------------------------------
def forked(work: Any) -> int:
    """A process that does the work and exits."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def live(job: Job, rings: int, prefix: str, out: int) -> int:
    """Start a life as a process group of its own; its number."""

    def say(what: str) -> None:
        os.write(out, f"{what}\n".encode())

    def lead() -> None:
        os.setpgid(0, 0)
        children = [forked(lambda at=at: rollout(job, at, rings, prefix, say)) for at in range(rings)]
        try:
            trainer(job, rings, prefix, say)
        except BaseException:
            traceback.print_exc()
            os.killpg(0, signal.SIGKILL)
        if any(os.waitpid(child, 0)[1] for child in children):
            raise RuntimeError("a rollout failed")

    pid = forked(lead)
    with contextlib.suppress(OSError):  # both do it: whichever is first, it is a group before it is killed
        os.setpgid(pid, pid)
    return pid


class Plan(NamedTuple):
    """When a life is killed: ``delay_s`` after the ``nth`` line that begins so ("": after its start)."""

    event: str
    nth: int
    delay_s: float


def plan_of(rng: random.Random, life: int, only: str) -> Plan:
    """At a random instant, at a cut, while a snapshot is uploaded, or while the life restores.

    ``only``: at these events; the first life is killed behind a snapshot, so that there is one to restore.
    """
    kind = rng.choice(["", "taken", "taken", "complete", *(["restoring", "restored"] if life else [])])
    if only:
        kind = only if life else "complete"
    most = {"": 0.5, "taken": 0.02, "complete": 0.02, "restoring": 0.01, "restored": 0.05}[kind]
    count = rng.randint(1, 4) if kind in ("taken", "complete") and not only else 1
    return Plan(kind, count, rng.random() * most)


def run_life(job: Job, rings: int, kill: Plan | None) -> str:
    """How it ended: "killed", "ended", or what went wrong."""
    prefix = f"ledger-{secrets.token_hex(6)}-"
    job.journal[:], job.restored[:] = bytes(job.payloads), bytes(_MOST_RINGS)
    job.final.unlink(missing_ok=True)  # of a life that was killed behind its end: this one goes on from a checkpoint
    reading, writing = os.pipe()
    pid = live(job, rings, prefix, writing)
    os.close(writing)
    seen = 0
    kill_at = time.monotonic() + kill.delay_s if kill is not None and not kill.event else float("inf")
    give_up = time.monotonic() + _LIFE_S
    text = b""
    ended = ""
    while not ended:
        now = time.monotonic()
        if now >= kill_at:
            ended = "killed"
        elif now >= give_up:
            ended = f"stuck for {_LIFE_S:g} s"
        elif select.select([reading], [], [], max(min(kill_at, give_up) - now, 0.0))[0]:
            data = os.read(reading, 1 << 16)
            if not data:
                ended = "ended"
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                seen += kill is not None and bool(kill.event) and line.startswith(kill.event.encode())
            if kill is not None and kill.event and seen >= kill.nth and kill_at == float("inf"):
                kill_at = time.monotonic() + kill.delay_s
    os.close(reading)
    if ended != "ended":
        os.killpg(pid, signal.SIGKILL)
    statuses = []
    with contextlib.suppress(ChildProcessError):
        while True:
            statuses.append(os.waitpid(-1, 0)[1])
    if not remove_dead(prefix):
        return "segments in use remain"
    if ended == "ended" and any(statuses):
        return "a process failed"
    return ended


def run_seed(seed: int, folder: Path, payloads: int, size: int, kills: int, only: str) -> dict[str, Any]:
    """One job; what became of it."""
    rng = random.Random(seed)
    job = Job(folder, payloads, size, mmap.mmap(-1, payloads), mmap.mmap(-1, _MOST_RINGS))
    Path(job.destination).mkdir(parents=True)
    lives, planned = 0, kills if only else rng.randint(1, kills)
    how: Counter[str] = Counter()
    problem = ""
    while not problem:
        kill = plan_of(rng, lives, only) if lives < planned else None
        ended = run_life(job, rng.randint(1, _MOST_RINGS), kill)
        lives += 1
        if ended == "killed" and kill is not None:
            how[kill.event or "instant"] += 1
        elif ended == "ended":
            break
        else:
            problem = f"life {lives}: {ended}"
    ledger = (
        Counter({int(name): count for name, count in json.loads(job.final.read_text()).items()})
        if not problem
        else Counter()
    )
    lost = [number for number in range(payloads) if not ledger[number]]
    twice = [number for number, count in ledger.items() if count > 1 or number >= payloads]
    return {
        "seed": seed, "lives": lives, "kills": dict(how), "lost": 0 if problem else len(lost), "twice": len(twice),
        "problem": problem, "passed": not (problem or lost or twice),
    }  # fmt: skip


# --- what it costs ------------------------------------------------------------------------------------
@contextlib.contextmanager
def filled(size: int, count: int, prefix: str) -> Iterator[SharedRingBuffer]:
    """A ring of this many payloads."""
    schema = Schema.of(values=("uint8", size))
    values = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    with SharedRingBuffer.create(schema, slots=count, prefix=prefix) as ring:
        ring.write_many([{"values": values}] * count)
        yield ring


def costs(folder: Path, repeats: int) -> list[dict[str, Any]]:
    """A row for each size: pause, bytes a second beside a plain write of the same bytes, time to the first batch."""
    rows = []
    for size, count in ((4 << 10, 4096), (64 << 10, 1024), (1 << 20, 128), (16 << 20, 16)):
        pauses, processor, rates, plain, firsts = [], [], [], [], []
        for number in range(repeats):
            root = folder / f"{size}-{number}"
            root.mkdir()
            prefix = f"costs-{secrets.token_hex(4)}-"
            with filled(size, count, prefix) as ring:
                began, cpu = time.monotonic(), time.thread_time()
                taken = snapshot(f"rings:{prefix}", str(root), number)
                pauses.append(time.monotonic() - began)
                processor.append(time.thread_time() - cpu)
                taken.wait()
                rates.append(size * count / (time.monotonic() - began) / 1e9)
                schema = ring.schema
            began = time.monotonic()
            with (root / "plain").open("wb") as file:
                for _ in range(count):
                    file.write(bytes(size))
                file.flush()
                os.fsync(file.fileno())
            plain.append(size * count / (time.monotonic() - began) / 1e9)
            began = time.monotonic()
            with Saved(str(root)) as saved, SharedRingBuffer.create(schema, slots=count, prefix=prefix) as ring:
                saved.restore(ring)
                assert len(ring.claim(32)) == min(32, count)
                firsts.append(time.monotonic() - began)
            shutil.rmtree(root)
        rows.append(
            {
                "size_bytes": size, "payloads": count, "pause_ms": 1e3 * statistics.median(pauses),
                "pause_ms_most": 1e3 * max(pauses), "pause_cpu_ms": 1e3 * statistics.median(processor),
                "snapshot_gb_per_s": statistics.median(rates),
                "plain_write_gb_per_s": statistics.median(plain), "first_batch_s": statistics.median(firsts),
            }
        )  # fmt: skip
    return rows


def main() -> int:
    """The exit status."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=20)
    options.add_argument("--first", type=int, default=1, help="the first seed")
    options.add_argument("--payloads", type=int, default=600)
    options.add_argument("--size", type=int, default=4000, help="bytes of the largest payload, at most 40 000")
    options.add_argument("--kills", type=int, default=3, help="lives that are killed, at most")
    options.add_argument(
        "--only", default="", choices=("", "taken", "complete", "restoring", "restored"), help="events"
    )
    options.add_argument("--seconds", type=float, default=float("inf"), help="begin no further seed after this")
    options.add_argument("--costs", action="store_true", help="measure what snapshots cost instead")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--folder", type=Path, help="of checkpoints; default: a temporary one")
    options.add_argument("--json", default=None)
    chosen = options.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what is orphaned by a kill is waited for here
    rows: list[dict[str, Any]] = []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="restart-") as folder:
        if chosen.costs:
            rows = costs(Path(folder), chosen.repeats)
        for seed in () if chosen.costs else range(chosen.first, chosen.first + chosen.seeds):
            if time.monotonic() - begun > chosen.seconds:
                break
            rows.append(
                run_seed(seed, Path(folder) / str(seed), chosen.payloads, chosen.size, chosen.kills, chosen.only)
            )
            shutil.rmtree(Path(folder) / str(seed), ignore_errors=not rows[-1]["passed"])
            if not rows[-1]["passed"]:
                print(rows[-1], file=sys.stderr, flush=True)
    failed = [] if chosen.costs else [row for row in rows if not row["passed"]]
    kills: Counter[str] = Counter()
    for row in rows:
        kills.update(row.get("kills", {}))
    report = {"rows": rows, "seeds": len(rows), "failed": len(failed), "kills": dict(kills)}
    if chosen.json == "-":
        print(json.dumps(report))
    elif chosen.costs:
        for row in rows:
            print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
    else:
        print(f"{len(rows)} seeds, {sum(kills.values())} kills ({dict(kills)}), {len(failed)} failed")
    if chosen.json not in (None, "-"):
        Path(chosen.json).write_text(json.dumps(report))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

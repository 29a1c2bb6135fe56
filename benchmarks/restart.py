"""A run that is killed whole and started again: whether every payload is trained on once, and what snapshots cost.

    python benchmarks/restart.py --seeds 200 --json build/restart.json
    python benchmarks/restart.py --way files --hosts 4 --seeds 200
    python benchmarks/restart.py --costs

The model is a ledger: which payload ids it was trained on, and how often; it is checkpointed as a model is, with the
record of consumed payloads. For each seed a job of a trainer and rollouts with 1 to 4 rings is killed with SIGKILL,
some times, at random instants or around a step that it has named. The next life goes on from the newest checkpoint,
with another number of rings. The last life runs to the end, and its ledger must have every id once. Exit status 1 if
one has not. An id whose write has returned is never written again: what is lost stays lost.

--way snapshot  The rings lie in /dev/shm and go with the life. A checkpoint counts when its snapshot is complete.
--way files     The rings lie in files, which each life opens again; with fewer rollouts one of them opens several.
--hosts 1       One process group, killed at once. The trainer maps the rings.
--hosts 4       Namespaces on one bridge, as in benchmarks/cluster: three hosts with rings, one with the trainer, which
                takes over TCP. All processes of a host die with it, host by host in any order; the next life has hosts
                with other boot ids. Files are on a disk that all hosts share; a snapshot has a part of each host.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import logging
import mmap
import os
import random
import secrets
import select
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

import numpy as np

from transport import Rollout, Schema, SharedRingBuffer, UpTo
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.options import RingOptions, ServerOptions
from transport.ring.attachment import remove_dead
from transport.ring.buffer import Sync
from transport.runtime.durable import write_whole
from transport.snapshots import Saved, Snapshot, snapshot, steps
from transport.snapshots.manifest import new_attempt
from transport.training.batch import Batch
from transport.training.trainer import Trainer

sys.path.insert(0, str(Path(__file__).resolve().parent / "cluster"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))

import isolation
from command import write_json
from hosts import Host, make_bridge, why_not
from processes import become_reaper

SCHEMA: Final = Schema.of(id=("int64",), values=("uint8", UpTo(40_000)))
BATCH, EVERY, SLOTS = 8, 5, 24
RUN: Final = "ledger"
_LIFE_S: Final = 120.0
_MOST_RINGS: Final = 4
_TRAINED: Final = "trained on everything"
_FIRST_PORT: Final = 7001
_LINE_BYTES: Final = 1000  # of a report, which a pipe takes as a whole

Say = Callable[[str], None]


# --- the job ------------------------------------------------------------------------------------------
class Job(NamedTuple):
    """One run, through all of its lives. ``folder`` has its checkpoints; ``payloads`` is how many ids there are.

    ``journal`` has a byte for each id, which is 1 when the id's write has returned, or it was found to be published.
    What it says of rings that are gone is forgotten.
    """

    folder: Path
    payloads: int
    size: int  # bytes of the largest
    way: Literal["snapshot", "files"]
    sync: Sync
    hosts: Sequence[Host]  # the first has the trainer, the others the rings; none: all on this host
    journal: mmap.mmap
    restored: mmap.mmap  # a byte for each rollout, which is 1 when what its rings are to hold is there
    doomed: mmap.mmap  # one byte: whether this life is to be killed, and so comes to no end of its own

    @property
    def destination(self) -> str:
        """Where its snapshots go."""
        return str(self.folder / "snapshots")

    @property
    def final(self) -> Path:
        """The ledger of the life that came to its end."""
        return self.folder / "final.json"

    @property
    def files(self) -> list[Path]:
        """Those that there are, by number."""
        return sorted(self.folder.glob("*.ring"))


class Life(NamedTuple):
    """One life of a job: how many rings, and the beginning of their names; ``say`` tells the harness."""

    job: Job
    rings: int
    prefix: str
    say: Say
    links: Sequence[tuple[socket.socket, socket.socket]]  # between the trainer and each host with rings

    def host_of(self, index: int) -> Host | None:
        """The host of a rollout."""
        others = self.job.hosts[1:]
        return others[index % len(others)] if others else None

    def files_of(self, index: int) -> list[Path | None]:
        """The files that a rollout opens: its own, and those of former rollouts that this life does not have.

        None: of a ring in memory.
        """
        if self.job.way == "snapshot":
            return [None]
        own = self.job.folder / f"{index}.ring"
        others = [path for path in self.job.files if int(path.stem) >= self.rings]
        return [own, *(path for path in others if int(path.stem) % self.rings == index)]

    @property
    def queue(self) -> str:
        """How the trainer finds the rings."""
        if not self.job.hosts:
            return f"rings:{self.prefix}"
        there = [
            f"{host.address}:{_FIRST_PORT + int(file.stem) if file else _FIRST_PORT + index}"
            for index in range(self.rings)
            for file in self.files_of(index)
            if (host := self.host_of(index)) is not None
        ]
        return f"rings://{','.join(there)}"


class Checkpoint(NamedTuple):
    """The model, and what belongs to it."""

    step: int
    ledger: Counter[int]
    record: ConsumedRecord
    attempt: str
    published: frozenset[int]  # before the cut: each of these is in the ledger or in the snapshot


def newest(job: Job) -> Checkpoint | None:
    """The newest checkpoint; one with a snapshot only if that is complete."""
    complete = steps(job.destination, RUN) if job.way == "snapshot" else {}
    for path in sorted(job.folder.glob("checkpoint-*.json"), reverse=True):
        found = json.loads(path.read_text())
        if job.way == "files" or found["attempt"] in complete.get(found["step"], []):
            ledger = Counter({int(name): count for name, count in found["ledger"].items()})
            record = ConsumedRecord.from_bytes(base64.b64decode(found["record"]))
            return Checkpoint(found["step"], ledger, record, found["attempt"], frozenset(found["published"]))
    return None


def store(job: Job, step: int, ledger: Counter[int], record: bytes, attempt: str, published: Sequence[int]) -> None:
    """A checkpoint."""
    kept = base64.b64encode(record).decode()
    model = {"step": step, "ledger": ledger, "record": kept, "attempt": attempt, "published": published}
    write_whole(job.folder / f"checkpoint-{step:012d}.json", [json.dumps(model).encode()])


def values_of(number: int, size: int) -> np.ndarray[Any, Any]:
    """The payload of an id."""
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, rng.integers(1, size + 1), np.uint8)


@contextlib.contextmanager
def ring_of(life: Life, index: int, file: Path | None) -> Iterator[SharedRingBuffer]:
    """One ring of a rollout; on one of several hosts it is served."""
    job, host = life.job, life.host_of(index)
    sync: Sync = job.sync if file else "never"
    if host is None:
        with SharedRingBuffer.create(SCHEMA, slots=SLOTS, prefix=life.prefix, file=file, sync=sync) as ring:
            yield ring
        return
    port = _FIRST_PORT + (int(file.stem) if file else index)
    with (
        Rollout(
            SCHEMA,
            f"rings:{life.prefix}",
            slots=SLOTS,
            mode="thread",
            drain_s=0.0,
            ring=RingOptions(file=file, sync=sync),
            server=ServerOptions(ports=(port,), addresses=(host.address,)),
        ) as rollout,
    ):
        yield rollout.ring


def rollout(life: Life, index: int) -> None:
    """Have in its rings what is to be there, then write the ids of its share that are not published."""
    job, of = life.job, life.rings
    with contextlib.ExitStack() as stack:
        rings = [stack.enter_context(ring_of(life, index, file)) for file in life.files_of(index)]
        if job.way == "snapshot":
            restore(life, index, rings[0])
        life.say(f"restored {index}")
        job.restored[index] = 1
        for number in range(index, job.payloads, of):
            if not job.journal[number]:
                values = {"id": number, "values": values_of(number, job.size)}
                rings[0].write(values, metadata={"id": number})
                job.journal[number] = 1
        for ring in rings:
            ring.end_data()
        while not job.final.exists():
            time.sleep(0.01)  # trainers look into these rings until then


def restore(life: Life, index: int, ring: SharedRingBuffer) -> None:
    """Write a rollout's share of the snapshot into its ring."""
    job = life.job
    found = newest(job)
    if found is None:
        return
    life.say(f"restoring {index}")
    with Saved(job.destination, found.step, run=RUN, attempt=found.attempt) as saved:
        # The ledger may have an id whose writer had not come to note it in the journal.
        ids = (cast("int", each.ticket.metadata["id"]) for each in saved.payloads)
        for number in (*found.published, *found.ledger, *ids):
            job.journal[number] = 1
        saved.restore(ring, share=(index, life.rings), consumed=[found.record])


def look_into_files(life: Life) -> None:
    """Note what former lives have published, and did not come to note. No trainer consumes meanwhile."""
    job = life.job
    life.say("restoring")
    for file in job.files:
        with SharedRingBuffer.create(SCHEMA, slots=SLOTS, prefix=life.prefix, file=file, sync=job.sync) as ring:
            for each in ring.unread():
                job.journal[cast("int", each.ticket.metadata["id"])] = 1
    found = newest(job)
    for number in found.ledger if found else ():
        job.journal[number] = 1


def learn(job: Job, payloads: Sequence[Any], ledger: Counter[int]) -> None:
    """The ledger has these, too."""
    for payload in payloads:
        number = int(payload["id"])
        assert np.array_equal(payload["values"], values_of(number, job.size)), f"payload {number} is wrong"
        ledger[number] += 1


class Ahead:
    """A trainer's batches; the next one is held while a step ends, also at a cut."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._next: Batch | None = None

    def take(self) -> tuple[Batch | None, bool]:
        """The batch that was held, and whether another one is now."""
        batch = self._next
        self._next = self._trainer.take(BATCH, 0.05 if batch is None else 0.0)
        return batch, self._next is not None


def consumed(batch: Batch) -> list[dict[str, Any]]:
    """Consume a batch: copies of the payloads that were this trainer's."""
    payloads = [{"id": int(each["id"]), "values": np.array(each["values"])} for each in batch]
    batch.consume()
    accepted = batch.accepted.tolist()
    batch.release()
    return [each for each, ours in zip(payloads, accepted, strict=True) if ours]


def train(life: Life) -> None:
    """Train until the ledger has every id."""
    job = life.job
    found = newest(job)
    step, ledger, record, _, before = found or Checkpoint(0, Counter(), ConsumedRecord(), "", frozenset())
    with Trainer(SCHEMA, life.queue, record=record, wire=("tcp",) if job.hosts else ("mapped",)) as trainer:
        if job.way == "files":
            beside_files(life, trainer, step, ledger)
        else:
            with_snapshots(life, trainer, step, ledger, before)
    life.say(_TRAINED)
    if job.doomed[0]:
        threading.Event().wait()  # for the kill, which is on its way
    write_whole(job.final, [json.dumps(ledger).encode()])


def beside_files(life: Life, trainer: Trainer, step: int, ledger: Counter[int]) -> None:
    """Accept, learn, checkpoint, consume: several batches in a checkpoint, or what there is."""
    job, ahead = life.job, Ahead(trainer)
    learned: list[Batch] = []
    while len(ledger) < job.payloads or learned:
        batch, more = ahead.take()
        if batch is not None:
            batch.accept()
            learn(job, batch.payloads, ledger)
            learned.append(batch)
            step += 1
        if len(learned) == EVERY - 2 or (learned and not more):
            store(job, step, ledger, trainer.record.to_bytes(), "", [])
            life.say(f"taken {step}")
            for each in learned:
                each.consume()
                each.release()
            learned.clear()
            life.say(f"complete {step}")


def with_snapshots(life: Life, trainer: Trainer, step: int, ledger: Counter[int], before: frozenset[int]) -> None:
    """Learn, consume, and now and then a snapshot; none before every share of the last one is restored."""
    job, ahead = life.job, Ahead(trainer)
    taken: Snapshot | Parts | None = None
    while len(ledger) < job.payloads:
        batch, _ = ahead.take()
        if batch is None:
            continue
        learn(job, consumed(batch), ledger)
        step += 1
        if step % EVERY == 0 and all(job.restored[: life.rings]):
            if taken is not None:
                taken.wait()
                life.say(f"complete {taken.step}")
            record = trainer.record.to_bytes()
            published = sorted(before | {number for number, is_there in enumerate(job.journal[:]) if is_there})
            taken = Parts(life, step) if job.hosts else snapshot(trainer.rings, job.destination, step, run=RUN)
            life.say(f"taken {step}")
            store(job, step, ledger, record, taken.attempt, published)
    if taken is not None:
        taken.wait()


class Parts:
    """A snapshot of which each host with rings takes a part."""

    def __init__(self, life: Life, step: int) -> None:
        self.step, self.attempt = step, new_attempt()
        self._life = life
        self._ask(f"{step} {self.attempt}")

    def _ask(self, what: str) -> None:
        for own, _ in self._life.links:
            own.sendall(f"{what}\n".encode())
        for own, _ in self._life.links:
            assert own.recv(1) == b"."

    def wait(self) -> None:
        """Until it is complete."""
        self._ask("wait")


def host_with_rings(life: Life, number: int) -> None:
    """The rollouts of one host, and its part of each snapshot."""
    job = life.job
    _, link = life.links[number]
    asked = link.makefile("r")
    asked.readline()  # the trainer has looked into the files
    for index in range(number, life.rings, len(life.links)):
        forked(partial(rollout, life, index), life.say)
    taken: Snapshot | None = None
    for line in asked:
        if line.strip() == "end":
            break
        if line.strip() == "wait":
            assert taken is not None
            taken.wait()
        else:
            step, attempt = line.split()
            part = number, len(life.links)
            taken = snapshot(f"rings:{life.prefix}", job.destination, int(step), run=RUN, part=part, attempt=attempt)
        link.sendall(b".")
    require_success()


def lead(life: Life) -> None:
    """The trainer; on one host the rollouts as well."""
    if life.job.way == "files":
        look_into_files(life)
    if not life.links:
        for index in range(life.rings):
            forked(partial(rollout, life, index), life.say)
    for own, _ in life.links:
        own.sendall(b"go\n")
    train(life)
    for own, _ in life.links:
        own.sendall(b"end\n")
    require_success()


# --- its lives ----------------------------------------------------------------------------------------
def forked(work: Callable[[], None], say: Say) -> int:
    """A process that does the work and exits; its number. It says why it failed."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:  # where it was about to be killed the harness does not listen any more
        with contextlib.suppress(OSError):
            say(f"failed {traceback.format_exc()[-_LINE_BYTES:]}".replace("\n", " | "))
    finally:
        os._exit(status)


def wait_for_children() -> list[int]:
    """All of them have ended: their statuses."""
    statuses = []
    with contextlib.suppress(ChildProcessError):
        while True:
            statuses.append(os.waitpid(-1, 0)[1])
    return statuses


def require_success() -> None:
    """All children have ended well."""
    if any(wait_for_children()):
        raise RuntimeError("a process failed")


def born(life: Life) -> list[int]:
    """The first processes of a life: on one host one, which leads a process group; else one for each host."""
    job = life.job
    if not job.hosts:

        def alone() -> None:
            os.setpgid(0, 0)
            lead(life)

        pid = forked(alone, life.say)
        with contextlib.suppress(OSError):  # both do it: whichever is first, it is a group before it is killed
            os.setpgid(pid, pid)
        return [pid]

    def there(number: int) -> None:
        job.hosts[number].enter()
        forked(partial(lead, life) if number == 0 else partial(host_with_rings, life, number - 1), life.say)
        os._exit(any(wait_for_children()))

    return [forked(partial(there, number), life.say) for number in range(len(job.hosts))]


def kill(job: Job, pids: Sequence[int], rng: random.Random) -> None:
    """The whole job."""
    if not job.hosts:
        os.killpg(pids[0], signal.SIGKILL)
    for host in rng.sample(job.hosts, len(job.hosts)):
        host.kill()


class Plan(NamedTuple):
    """When a life is killed: ``delay_s`` after the ``nth`` line that begins so ("": after its start).

    A life that has trained on everything by then is killed there, before its end is known.
    """

    event: str
    nth: int
    delay_s: float


def plan_of(rng: random.Random, life: int, only: str, hosts: int) -> Plan:
    """At a random instant, at a cut or checkpoint, while a snapshot is uploaded, or while the life restores.

    ``only``: at these events; the first life is killed behind a checkpoint, so that there is one to restore.
    """
    kind = rng.choice(["", "taken", "taken", "complete", *(["restoring", "restored"] if life else [])])
    if only:
        kind = only if life else "complete"
    most = {"": 0.5 if hosts == 1 else 4.0, "taken": 0.02, "complete": 0.02, "restoring": 0.01, "restored": 0.05}[kind]
    count = rng.randint(1, 4) if kind in ("taken", "complete") and not only else 1
    return Plan(kind, count, rng.random() * most)


def run_life(job: Job, rings: int, plan: Plan | None, rng: random.Random) -> str:
    """How it ended: "killed", "ended", or what went wrong."""
    prefix = f"ledger-{secrets.token_hex(6)}-"
    job.restored[:] = bytes(_MOST_RINGS)
    if job.way == "snapshot":
        job.journal[:] = bytes(job.payloads)
    job.doomed[:] = bytes([plan is not None])
    reading, writing = os.pipe()
    with contextlib.ExitStack() as stack:
        for host in job.hosts:
            stack.callback(host.close)
            host.start()
        links = [socket.socketpair() for _ in job.hosts[1:]]
        for link in links:
            for end in link:
                stack.callback(end.close)
        pids = born(Life(job, rings, prefix, partial(said, writing), links))
        os.close(writing)
        ended = watched(reading, plan)
        os.close(reading)
        if ended != "ended":
            kill(job, pids, rng)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    wait_for_children()  # of those that were killed, and what is left of hosts
    if not remove_dead(prefix):
        return "segments in use remain"
    if ended == "ended" and any(statuses):
        return "a process failed"
    return ended


def said(writing: int, what: str) -> None:
    """Tell the harness."""
    os.write(writing, f"{what}\n".encode())


def watched(reading: int, plan: Plan | None) -> str:
    """Until a life has ended or is to be killed."""
    seen = 0
    kill_at = time.monotonic() + plan.delay_s if plan is not None and not plan.event else float("inf")
    give_up = time.monotonic() + _LIFE_S
    text = b""
    while True:
        now = time.monotonic()
        if now >= kill_at:
            return "killed"
        if now >= give_up:
            return f"stuck for {_LIFE_S:g} s"
        if not select.select([reading], [], [], max(min(kill_at, give_up) - now, 0.0))[0]:
            continue
        data = os.read(reading, 1 << 16)
        if not data:
            return "ended"
        *lines, text = (text + data).split(b"\n")
        for line in lines:
            if line.startswith(b"failed"):
                return line.decode()
            if plan is not None and line == _TRAINED.encode():
                return "killed"
            seen += plan is not None and bool(plan.event) and line.startswith(plan.event.encode())
        if plan is not None and plan.event and seen >= plan.nth and kill_at == float("inf"):
            kill_at = time.monotonic() + plan.delay_s


def run_seed(seed: int, folder: Path, chosen: argparse.Namespace, hosts: Sequence[Host]) -> dict[str, Any]:
    """One job; what became of it."""
    rng = random.Random(seed)
    payloads = chosen.payloads
    job = Job(
        folder, payloads, chosen.size, chosen.way, rng.choice(("never", "never", "publish")), hosts,
        mmap.mmap(-1, payloads), mmap.mmap(-1, _MOST_RINGS), mmap.mmap(-1, 1),
    )  # fmt: skip
    Path(job.destination).mkdir(parents=True)
    lives, planned = 0, chosen.kills if chosen.only else rng.randint(1, chosen.kills)
    how: Counter[str] = Counter()
    problem = ""
    rings = []
    while not problem:
        plan = plan_of(rng, lives, chosen.only, chosen.hosts) if lives < planned else None
        rings.append(rng.randint(1, _MOST_RINGS))
        ended = run_life(job, rings[-1], plan, rng)
        lives += 1
        if ended == "killed" and plan is not None:
            how[plan.event or "instant"] += 1
        elif ended == "ended" and job.final.exists():
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
        "seed": seed, "lives": lives, "rings": rings, "kills": dict(how), "lost": 0 if problem else len(lost),
        "twice": len(twice), "problem": problem, "passed": not (problem or lost or twice),
    }  # fmt: skip


# --- what it costs ------------------------------------------------------------------------------------
def costs(folder: Path, repeats: int) -> list[dict[str, Any]]:
    """A row for each size: the pause of a snapshot, its bytes a second beside a plain write of the same bytes, and the
    time to the first batch."""
    rows = []
    for size, count in ((4 << 10, 4096), (64 << 10, 1024), (1 << 20, 128), (16 << 20, 16)):
        schema = Schema.of(values=("uint8", size))
        payload = {"values": np.random.default_rng(0).integers(0, 256, size, np.uint8)}
        pauses, processor, rates, plain, firsts = [], [], [], [], []
        for number in range(repeats):
            root = folder / f"{size}-{number}"
            root.mkdir()
            prefix = f"costs-{secrets.token_hex(4)}-"
            with SharedRingBuffer.create(schema, slots=count, prefix=prefix) as ring:
                ring.write_many([payload] * count)
                began, cpu = time.monotonic(), time.thread_time()
                taken = snapshot(f"rings:{prefix}", str(root), number)
                pauses.append(time.monotonic() - began)
                processor.append(time.thread_time() - cpu)
                taken.wait()
                rates.append(size * count / (time.monotonic() - began) / 1e9)
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
                assert len(ring.native.claim_batch(32, 0.0)) == min(32, count)
                firsts.append(time.monotonic() - began)
            shutil.rmtree(root)
        rows.append(
            {
                "size_bytes": size, "payloads": count, "pause_ms": 1e3 * statistics.median(pauses),
                "pause_ms_most": 1e3 * max(pauses), "pause_cpu_ms": 1e3 * statistics.median(processor),
                "snapshot_gb_per_s": statistics.median(rates), "plain_write_gb_per_s": statistics.median(plain),
                "first_batch_s": statistics.median(firsts),
            }
        )  # fmt: skip
    return rows


def report_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows, and what they are together."""
    kills: Counter[str] = Counter()
    for row in rows:
        kills.update(row.get("kills", {}))
    return {
        "rows": rows, "seeds": len(rows), "failed": sum(not row.get("passed", True) for row in rows),
        "lost": sum(row.get("lost", 0) for row in rows), "twice": sum(row.get("twice", 0) for row in rows),
        "kills": dict(kills),
    }  # fmt: skip


def main() -> int:
    """The exit status."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=20)
    options.add_argument("--first", type=int, default=1, help="the first seed")
    options.add_argument("--way", default="snapshot", choices=("snapshot", "files"))
    options.add_argument("--hosts", type=int, default=1, choices=(1, 4))
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
    options.add_argument("--json", help="where the report goes besides; -: instead of the table")
    chosen = options.parse_args()
    target = Path(chosen.json) if chosen.json not in (None, "-") else None
    logging.basicConfig(level="ERROR")  # each take-over is a warning
    if chosen.hosts > 1:
        try:
            isolation.enter()
            if reason := why_not():
                raise isolation.Refused(reason)
        except isolation.Refused as error:
            print(f"there can be no hosts here: {error}", file=sys.stderr)
            return isolation.SKIPPED
        make_bridge()
    become_reaper()  # what is orphaned by a kill is waited for here
    rows: list[dict[str, Any]] = []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="restart-") as folder:
        if chosen.costs:
            rows = costs(Path(folder), chosen.repeats)
        for seed in () if chosen.costs else range(chosen.first, chosen.first + chosen.seeds):
            if time.monotonic() - begun > chosen.seconds:
                break
            made = range(chosen.hosts) if chosen.hosts > 1 else ()
            hosts = [Host(number, Path(folder), random.Random(seed * 8 + number)) for number in made]
            rows.append(run_seed(seed, Path(folder) / str(seed), chosen, hosts))
            shutil.rmtree(Path(folder) / str(seed), ignore_errors=not rows[-1]["passed"])
            if not rows[-1]["passed"]:
                print(rows[-1], file=sys.stderr, flush=True)
            write_json(report_of(rows), target)  # each time, for a run that is stopped
    report = report_of(rows)
    if chosen.json == "-":
        print(json.dumps(report))
    elif chosen.costs:
        for row in rows:
            print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
    else:
        counts = ", ".join(f"{report[what]} {what}" for what in ("seeds", "lost", "twice", "failed"))
        print(f"{chosen.way}, {chosen.hosts} hosts: {counts}; {sum(report['kills'].values())} kills {report['kills']}")
    write_json(report, target)
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""A writer and a trainer as processes that do one step each time they are told to, and answer with it.

A test so decides between which two steps a process is killed or stopped. Both sides are also usable in the test itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from patience import PATIENCE

from transport import Trainer, UCXXDataPackerMixin
from transport.claims.places import OnThisHost
from transport.config import configuration
from transport.errors import RingNotFoundError
from transport.observe.statistics import PackerStatistics
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.options import ClientOptions, RingOptions, ServerOptions
from transport.packer.prefetch import FetchedBatch
from transport.packer.rollout import Rollout
from transport.ring.buffer import SharedRingBuffer
from transport.schema import Schema, UpTo
from transport.settings import Settings
from transport.store.directory import Directory
from transport.store.open import open_store
from transport.ticket import Ticket
from transport.training.batch import Batch
from transport.wire import frames

SIZE = 200_000
SCHEMA = Schema.of(data=("uint8", UpTo(SIZE)), number=("int64",))
LONG_S = 60.0
DIRECTORY_LEASE_S = 2.0
MARKED = "= "  # lines that are answers; UCX writes others
SETTINGS = "TOLD_SETTINGS"  # a variable: settings that a test chooses, as JSON


def chosen() -> Settings:
    """What the operator configured, and what the test chose."""
    return msgspec.structs.replace(configuration().settings, **json.loads(os.environ.get(SETTINGS, "{}")))


def content(number: int) -> np.ndarray:
    """The bytes of a payload, which are nowhere in another one."""
    return np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8)


def middle(number: int) -> list[bytes]:
    """Bytes of the middle of a payload, by which it is found on its way; UCX may cut the first in two, not both."""
    data = content(number).tobytes()
    return [data[at : at + 16] for at in (SIZE // 2, SIZE // 2 + 1000)]


def label(number: int) -> str:
    """A text in the payload's metadata, which is in its ticket."""
    return f"the payload with the number {number:08}"


def metadata(number: int) -> dict[str, object]:
    """What is written with the payload."""
    return {"number": number, "label": label(number)}


def rings_of(url: str) -> str:
    """The rings of a place; those of ``tickets:PREFIX`` are read by ticket."""
    return f"rings:{url.removeprefix('tickets:')}" if url.startswith("tickets:") else url


class Checked:
    """What trainers and readers share: they compare every payload that they may train on, byte by byte."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.changed = 0

    def compare(self, number: int, payload: Any) -> None:
        """Fail unless these are the bytes of this number."""
        assert payload["data"].tobytes() == content(number).tobytes(), f"other bytes than those of {number}"
        assert int(payload["number"]) == number
        self.changed += payload.metadata != metadata(number)

    def changed_tickets(self) -> int:
        """How many consumed payloads had other metadata than was written, since this was last asked."""
        changed, self.changed = self.changed, 0
        return changed

    def logged(self) -> list[str]:
        """What the package has logged in this process, in a process of its own."""
        return self.messages


class Taken:
    """A batch that was taken, the numbers of its payloads, and which of them were accepted."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.numbers = [int(payload["number"]) for payload in batch]
        self.accepted: set[int] = set()


class ToldTrainer(Checked):
    """A trainer whose steps are calls. Payloads have numbers."""

    def __init__(self, url: str, consumed: str = "") -> None:
        """``consumed``: what `record` answered to a former trainer."""
        super().__init__()
        record = ConsumedRecord.from_bytes(bytes.fromhex(consumed)) if consumed else None
        self.trainer = Trainer(SCHEMA, url, record=record, client=ClientOptions(settings=chosen()))
        self.batches: list[Taken] = []

    def take(self, n: int, timeout_s: float = LONG_S) -> list[int]:
        """Take so many, waiting for them; the numbers of the payloads."""
        came: list[int] = []
        while len(came) < n and (batch := self.trainer.take(n - len(came), timeout_s)) is not None:
            self.batches.append(Taken(batch))
            came += self.batches[-1].numbers
        return sorted(came)

    def accept(self) -> list[int]:
        """Accept what was taken; the numbers of what is to be trained on."""
        for each in self.batches:
            each.batch.accept()
        return sorted(number for each in self.batches for number in each.numbers)

    def give_back(self) -> None:
        """Give what was taken back."""
        while self.batches:
            self.batches.pop().batch.give_back()

    def record(self) -> str:
        """For a checkpoint."""
        return self.trainer.record.to_bytes().hex()

    def consume(self) -> list[int]:
        """Consume what was taken, or is in question; the numbers of what was accepted."""
        accepted = []
        for each in self.batches:
            each.batch.consume()
            for at, (number, ours) in enumerate(zip(each.numbers, each.batch.accepted.tolist(), strict=True)):
                if ours and number not in each.accepted:
                    self.compare(number, each.batch[at])
                    each.accepted.add(number)
                    accepted.append(number)
        self.batches = [each for each in self.batches if each.batch.in_question.any()]
        return sorted(accepted)

    def in_question(self) -> list[int]:
        """The numbers of what the ring may have accepted; `consume` asks again."""
        return sorted(
            number
            for each in self.batches
            for number, unsure in zip(each.numbers, each.batch.in_question.tolist(), strict=True)
            if unsure
        )

    def train(self, n: int) -> list[int]:
        """Take and consume until so many were accepted; their numbers. Fail where nothing comes for long."""
        accepted: list[int] = []
        came_at = time.monotonic()
        while len(accepted) < n:
            assert time.monotonic() - came_at < LONG_S * PATIENCE, f"nothing comes: {self.trainer.why_nothing()}"
            if self.take(1):
                came_at = time.monotonic()
            self.take(n - len(accepted) - 1, 0.0)
            accepted += self.consume()
        return sorted(accepted)

    def drain(self) -> tuple[list[int], int]:
        """Train until nothing is unfinished: what was accepted, and how many payloads failed."""
        accepted: list[int] = []
        while self.trainer.rings.depth().unfinished:
            if self.take(1, 0.2):
                self.take(8, 0.0)
                accepted += self.consume()
        return sorted(accepted), self.trainer.statistics().failed

    def counted(self) -> dict[str, int]:
        """Counters of the trainer and of its client, those above 0."""
        return counted(self.trainer.statistics())

    def end(self) -> None:
        """Clean up."""
        self.trainer.close()


class Reader(UCXXDataPackerMixin):
    """The mixin alone."""


class ToldReader(Checked):
    """A data packer whose steps are calls. It reads by the tickets of what is unread, each once, over its wires."""

    def __init__(self, url: str, store: str = "") -> None:
        """``store``: of a directory."""
        super().__init__()
        self.places = OnThisHost(url.partition(":")[2])
        directory = Directory(open_store(store), lease_s=DIRECTORY_LEASE_S) if store else None
        self.packer = Reader()
        self.packer.setup_ucxx_packer(schemas=[SCHEMA], client=ClientOptions(directory=directory, settings=chosen()))
        self.given: set[str] = set()
        self.tickets: list[Ticket] = []
        self.batches: list[FetchedBatch] = []

    def choose(self, n: int, timeout_s: float = LONG_S) -> list[int]:
        """Find the tickets of so many payloads that are unread, waiting for them; their numbers."""
        chosen: list[Ticket] = []
        give_up = time.monotonic() + timeout_s
        while len(chosen) < n:
            fresh = [ticket for ticket in self._unread() if ticket.id not in self.given][: n - len(chosen)]
            chosen += fresh
            self.given |= {ticket.id for ticket in fresh}
            if len(chosen) < n and time.monotonic() >= give_up:
                break
        self.tickets += chosen
        return sorted(int(ticket.metadata["number"]) for ticket in chosen)  # type: ignore[call-overload]

    def _unread(self) -> list[Ticket]:
        found: list[Ticket] = []
        for segment in self.places.segments():
            with contextlib.suppress(RingNotFoundError), SharedRingBuffer.attach(segment, role="observer") as ring:
                found += ring.tickets()
        return found

    def fetch(self) -> list[int]:
        """Read what was chosen; the numbers of what arrived."""
        self.packer.start_prefetch(self.tickets)
        self.tickets = []
        batch = self.packer.collect_prefetch(LONG_S)
        assert batch is not None
        self.batches.append(batch)
        return sorted(int(payload["number"]) for payload in batch.payloads)

    def take(self, n: int, timeout_s: float = LONG_S) -> list[int]:
        """Choose and read so many; the numbers of what arrived."""
        return self.fetch() if self.choose(n, timeout_s) else []

    def consume(self) -> list[int]:
        """Consume what was read; the numbers. What was not read may be chosen again."""
        accepted = []
        for batch in self.batches:
            for payload in self.packer.consume(batch):
                number = int(payload["number"])
                self.compare(number, payload)
                accepted.append(number)
            self.given -= {item.ticket.id for item in batch.failures}
            batch.release()
        self.batches = []
        return sorted(accepted)

    def train(self, n: int) -> list[int]:
        """Read and consume until so many were consumed; their numbers."""
        accepted: list[int] = []
        while len(accepted) < n:
            self.take(n - len(accepted))
            accepted += self.consume()
        return sorted(accepted)

    def read(self, tickets: list[str]) -> tuple[list[int], list[str]]:
        """Read by these tickets, as a framework hands them out, and consume: the numbers, and the errors' kinds."""
        self.tickets = [Ticket.parse(each) for each in tickets]
        self.fetch()
        errors = [type(each.error).__name__ for each in self.batches[-1].failures]
        return self.consume(), errors

    def counted(self) -> dict[str, int]:
        """Counters of the packer and of its client, those above 0."""
        return counted(self.packer.ucxx_statistics())

    def end(self) -> None:
        """Clean up."""
        self.packer.cleanup_ucxx_packer()
        self.places.close()


def counted(statistics: PackerStatistics) -> dict[str, int]:
    """Counters of a trainer or packer and of its client, those above 0."""
    found = {name: getattr(each, name) for each in (statistics, statistics.client) for name in each.__struct_fields__}
    return {name: value for name, value in found.items() if isinstance(value, int) and value}


class ToldWriter:
    """A rollout worker whose steps are calls."""

    def __init__(
        self,
        url: str,
        name: str = "",
        slots: int = 16,
        store: str = "",
        port: int = 0,
        file: str = "",
        address: str = "127.0.0.1",
    ) -> None:
        directory = Directory(open_store(store), lease_s=DIRECTORY_LEASE_S) if store else None
        self.rollout = Rollout(
            SCHEMA,
            slots=slots,
            name=name or None,
            ring=RingOptions(file=file or None),
            rings=rings_of(url),
            server=ServerOptions(addresses=(address,), directory=directory, ports=(port,), settings=chosen()),
        )

    def write(self, first: int, count: int) -> None:
        """Write payloads with these numbers."""
        for number in range(first, first + count):
            values = {"data": content(number), "number": number}
            self.rollout.write_to_buffer(values, metadata=metadata(number), timeout_s=LONG_S)

    def ports(self) -> list[int]:
        """Of its listeners."""
        return list(self.rollout.ring.native.ports())

    def listeners(self) -> list[int]:
        """Their processes."""
        return [owner.pid for owner in self.rollout.ring.native.owners() if owner.alive and owner.port]

    def ring(self) -> dict[str, int]:
        """States of slots and counters, those above 0."""
        look = self.rollout.ring.statistics()
        return {name: value for name in look.__struct_fields__ if (value := getattr(look, name))}

    def begin(self, number: int) -> None:
        """Take a slot, fill half of it, say so, and wait for ever."""
        ring = self.rollout.ring
        lease = ring.reserve({"data": SIZE})
        lease["data"][: SIZE // 2] = content(number)[: SIZE // 2]
        answer(None)
        sys.stdin.readline()

    def tickets(self) -> list[str]:
        """Of what is unread, as text, the oldest first."""
        return [ticket.to_text() for ticket in self.rollout.ring.tickets()]

    def segment(self) -> str:
        """The ring's."""
        return self.rollout.ring.name

    def end(self) -> None:
        """Clean up."""
        self.rollout.close()


def answer(what: object) -> None:
    print(MARKED + json.dumps(what), flush=True)


class _Kept(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self._messages.append(record.getMessage())


def main() -> None:
    """The side that the command line names, with its arguments; then a line with its process, and one for each step."""
    kind, arguments = sys.argv[1], json.loads(sys.argv[2])
    messages: list[str] = []
    logging.getLogger("transport").addHandler(_Kept(messages))
    url = arguments["url"]
    side: Any = None
    if kind == "writer":
        side = ToldWriter(**arguments)
    else:
        side = (ToldReader if url.startswith("tickets:") else ToldTrainer)(**arguments)
        side.messages = messages
    answer([os.getpid(), frames.VERSION])
    for line in sys.stdin:
        step, *given = json.loads(line)
        answer(getattr(side, step)(*given))
        if step == "end":
            return


PROGRAM = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import told; told.main()"

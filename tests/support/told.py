"""A writer and a trainer of the packer as processes that do one step each time they are told to, and answer with it.

A test so decides between which two steps a process is killed or stopped. Both sides are also usable in the test itself.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from transport.claims.places import OnThisHost
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.mixin import FetchedBatch, TicketTrainer
from transport.packer.options import ClientOptions, ServerOptions
from transport.packer.rollout import Rollout
from transport.queue import Claim, FoundRings, RingQueue, open_queue
from transport.queue.group import GroupQueue
from transport.ring.buffer import SharedRingBuffer
from transport.schema import Schema, UpTo
from transport.store.directory import Directory
from transport.store.open import open_store
from transport.ticket import Ticket
from transport.wire import frames

SIZE = 200_000
SCHEMA = Schema.of(data=("uint8", UpTo(SIZE)), number=("int64",))
LONG_S = 60.0
DIRECTORY_LEASE_S = 2.0
MARKED = "= "  # lines that are answers; UCX writes others


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


class ByTicket(FoundRings):
    """Rings of this host whose claims bring tickets alone: payloads are read by them, over the wires of the client."""

    def __init__(self, prefix: str) -> None:
        super().__init__(OnThisHost(prefix))
        self._maps, self._carries = True, False

    def connect(self, *_: object) -> FoundRings:
        """Whatever wires the client has, rings are claimed from here."""
        return self

    def payload_bytes(self, claim: Claim) -> None:
        """None comes with a claim."""


def queue_of(url: str) -> FoundRings:
    """As `open_queue`; and those of ``tickets:PREFIX``."""
    kind, _, prefix = url.partition(":")
    return ByTicket(prefix) if kind == "tickets" else open_queue(url)


class ToldTrainer:
    """A trainer whose steps are calls. Payloads have numbers; what is consumed has been compared byte by byte."""

    def __init__(
        self,
        url: str,
        store: str = "",
        segment: str = "",
        group: str = "",
        rank: int = 0,
        consumed: str = "",
    ) -> None:
        """``segment``: claim from this ring alone. ``store``: of a directory, or of the ``group`` of two ranks.

        ``consumed``: what `record` answered to a former trainer.
        """
        self.queue = RingQueue([SharedRingBuffer.attach(segment, role="reader")]) if segment else queue_of(url)
        directory = Directory(open_store(store), lease_s=DIRECTORY_LEASE_S) if store and not group else None
        if group:
            self.queue = GroupQueue(self.queue, open_store(store), group, rank, 2, patience_s=LONG_S)
        record = ConsumedRecord.from_bytes(bytes.fromhex(consumed)) if consumed else None
        self.packer = TicketTrainer(
            schemas=[SCHEMA], queue=self.queue, rank=rank, client=ClientOptions(directory=directory), consumed=record
        )
        self.claims: list[Claim] = []
        self.batches: list[FetchedBatch] = []
        self.messages: list[str] = []
        self.changed = 0

    def claim(self, n: int, timeout_s: float = LONG_S) -> list[int]:
        """Claim so many, waiting for them; the numbers of the payloads."""
        came: list[Claim] = []
        while len(came) < n and (some := self.packer.claim_tickets(n - len(came), timeout_s)):
            came += some
        self.claims += came
        return sorted(number_of(claim) for claim in came)

    def collect(self) -> list[int]:
        """Fetch what is claimed, and have it here; the numbers of what arrived."""
        self.packer.start_prefetch(self.claims)
        self.claims = []
        batch = self.packer.collect_prefetch(LONG_S)
        assert batch is not None
        self.batches.append(batch)
        return sorted(int(item.payload["number"]) for item in batch.items if item.payload is not None)

    def errors(self) -> list[str]:
        """What the reads of the last batch raised."""
        return [type(item.error).__name__ for item in self.batches[-1].items if item.error is not None]

    def accept(self) -> list[int]:
        """Accept what was collected; the numbers of what is to be trained on."""
        return sorted(int(each["number"]) for batch in self.batches for each in self.packer.accept(batch))

    def abandon(self) -> None:
        """Give up what was collected."""
        while self.batches:
            self.packer.abandon(self.batches.pop())

    def record(self) -> str:
        """For a checkpoint."""
        return self.packer.consumed_record().to_bytes().hex()

    def consume(self) -> list[int]:
        """Consume what was collected, or is in question; the numbers of what was accepted."""
        accepted = []
        for batch in self.batches:
            for payload in self.packer.consume(batch):
                number = int(payload["number"])
                assert payload["data"].tobytes() == content(number).tobytes(), f"other bytes than those of {number}"
                self.changed += payload.metadata != metadata(number)
                accepted.append(number)
        self.batches = [batch for batch in self.batches if _in_question(batch)]
        return sorted(accepted)

    def in_question(self) -> list[int]:
        """The numbers of what the ring may have accepted; `consume` asks again."""
        return sorted(number_of(item.claim) for batch in self.batches for item in _in_question(batch))

    def read(self, tickets: list[str]) -> tuple[list[int], list[str]]:
        """Read by these tickets, as a framework hands them out, and consume: the numbers, and the errors' kinds."""
        self.packer.start_prefetch(tickets)
        batch = self.packer.collect_prefetch(LONG_S)
        assert batch is not None
        self.batches.append(batch)
        return self.consume(), [type(each.error).__name__ for each in batch.failures]

    def train(self, n: int) -> list[int]:
        """Claim, collect and consume until so many were accepted; their numbers."""
        accepted: list[int] = []
        while len(accepted) < n:
            self.claim(1)
            self.claim(n - len(accepted) - 1, 0.0)
            self.collect()
            accepted += self.consume()
        return sorted(accepted)

    def train_once(self, most: int) -> list[int]:
        """Consume what one claim brings: the same for all ranks of a group."""
        self.claims += self.packer.claim_tickets(most, LONG_S)
        self.collect()
        return self.consume()

    def drain(self) -> tuple[list[int], list[str]]:
        """Train until nothing is unfinished: what was accepted, and the kinds of errors of the rest, once each."""
        accepted: list[int] = []
        errors: set[str] = set()
        while self.queue.depth().unfinished:
            if self.claim(1, 0.2):
                self.claim(8, 0.0)
                self.collect()
                errors |= set(self.errors())
                accepted += self.consume()
        return sorted(accepted), sorted(errors)

    def changed_tickets(self) -> int:
        """How many consumed payloads had other metadata than was written, since this was last asked."""
        changed, self.changed = self.changed, 0
        return changed

    def counted(self) -> dict[str, int]:
        """Counters of the packer and of its client, those above 0."""
        statistics = self.packer.ucxx_statistics()
        both = [statistics, statistics.client]
        found = {name: getattr(each, name) for each in both for name in each.__struct_fields__}
        return {name: value for name, value in found.items() if isinstance(value, int) and value}

    def logged(self) -> list[str]:
        """What the package has logged in this process, in a process of its own."""
        return self.messages

    def end(self) -> None:
        """Clean up."""
        self.packer.close()
        self.queue.close()


class ToldWriter:
    """A rollout worker whose steps are calls."""

    def __init__(
        self,
        url: str,
        name: str = "",
        slots: int = 16,
        store: str = "",
        port: int = 0,
        group: bool = False,
        file: str = "",
        address: str = "127.0.0.1",
    ) -> None:
        self.queue = queue_of(url)
        directory = Directory(open_store(store), lease_s=DIRECTORY_LEASE_S) if store else None
        self.rollout = Rollout(
            SCHEMA,
            slots=slots,
            name=name or None,
            file=file or None,
            rings=self.queue,
            readers=1 + group,
            grouped=group,
            server=ServerOptions(addresses=(address,), directory=directory, ports=(port,)),
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
        self.queue.close()


def answer(what: object) -> None:
    print(MARKED + json.dumps(what), flush=True)


def _in_question(batch: FetchedBatch) -> list[Any]:
    return getattr(batch, "in_question", [])  # a former build has none


def number_of(claim: Claim) -> int:
    return int(Ticket.decode(claim.data).metadata["number"])


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
    side = (ToldTrainer if kind == "trainer" else ToldWriter)(**arguments)
    if isinstance(side, ToldTrainer):
        side.messages = messages
    answer([os.getpid(), frames.VERSION])
    for line in sys.stdin:
        step, *given = json.loads(line)
        answer(getattr(side, step)(*given))
        if step == "end":
            return


PROGRAM = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import told; told.main()"

"""A rollout worker: writes numbered payloads, killed and started again as often as it takes.

A line on standard input ends the writing, the end of standard input the process.
"""

from __future__ import annotations

import faulthandler
import itertools
import logging
import os
import select
import signal
import sys
import time

import numpy as np
import payloads
from ledger import Journal
from plan import RolloutPart, opened, patiently

from transport import UCXXRolloutMixin
from transport.decoders import json_decoder
from transport.packer.options import RingOptions, ServerOptions
from transport.ticket import Ticket

_BATCH = 32
_SINGLE_EVERY = 8  # one batch in so many goes payload by payload through `write_to_buffer`
_EVERY_S = 0.1  # between two batches, where the rate is limited


class Worker(UCXXRolloutMixin):
    """Publishes payloads by number."""

    def __init__(self, part: RolloutPart) -> None:
        self.part = part
        self.next = part.first
        self.journal = Journal(part.journal)
        self.queue = None if part.queue.startswith("rings://") else patiently(lambda: opened(part), _complain)
        self._used = -1

    def start(self) -> None:
        """Make the ring, or take over what a killed predecessor left."""
        part = self.part

        def made() -> None:  # not while the disk is full, or the server away
            self.setup_ucxx(
                slots=part.slots,
                readers=part.readers,
                name=part.ring,
                rings=self.queue,
                ring=RingOptions(slot_bytes=payloads.LARGEST),
                server=ServerOptions(ports=part.ports, addresses=(part.address,), settings=part.settings),
            )

        patiently(made, _complain)
        self._say_published(self.ring.tickets())

    def batch(self, count: int, single: bool) -> None:
        """Publish the next ``count`` payloads."""
        first = self.next
        self.next += count
        self.journal.say("I", self.part.writer, first, self.next)
        tickets: list[Ticket] = []
        for number in range(first, self.next):
            data = payloads.make(self.part.writer, number)
            metadata = {"w": self.part.writer, "n": number}
            deadline_s = payloads.deadline_s(self.part.writer, number) if self.part.deadlines else None
            tickets.append((self._single if single else self._write)(data, metadata, deadline_s))
        self._say_published(tickets)

    def _say_published(self, tickets: list[Ticket]) -> None:
        if tickets:
            self.journal.say("P", self.part.writer, *(ticket.metadata["n"] for ticket in tickets))

    def _write(self, data: np.ndarray, metadata: dict[str, int], deadline_s: float | None) -> Ticket:
        return self.ring.write_raw(data, readers=self.part.readers, metadata=metadata, deadline_s=deadline_s)

    def _single(self, data: np.ndarray, metadata: dict[str, int], deadline_s: float | None) -> Ticket:
        return self.write_to_buffer({"data": data}, metadata=metadata, deadline_s=deadline_s)

    def say_used(self) -> None:
        """How many slots are not free."""
        ring = self.ring_statistics()
        if ring.slots - ring.free != self._used:
            self._used = ring.slots - ring.free
            self.journal.say("S", self.part.writer, self._used)


def _complain(what: str) -> None:
    print(f"{time.strftime('%X')} writer: {what}", file=sys.stderr)


def _heard(timeout_s: float) -> bytes | None:
    """What standard input has; None: nothing within this time."""
    return os.read(0, 100) if select.select([0], [], [], max(0.0, timeout_s))[0] else None


def main() -> None:
    """Until standard input ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level="INFO", format="%(asctime)s writer %(process)d %(levelname)s %(message)s")
    part = json_decoder(RolloutPart)(sys.argv[1])
    worker = Worker(part)
    worker.start()
    size = max(1, round(part.per_s * _EVERY_S)) if part.per_s else _BATCH
    due = time.monotonic()
    heard = None
    for turn in itertools.count():
        count = min(size, part.first + part.left - worker.next)
        if count <= 0 or heard is not None:
            break
        worker.batch(count, single=turn % _SINGLE_EVERY == 0)
        if part.per_s:
            due = max(due + count / part.per_s, time.monotonic())
        heard = _heard(due - time.monotonic())
    worker.journal.say("E", part.writer)
    while heard != b"":
        worker.say_used()
        heard = _heard(0.5)
    worker.cleanup_ucxx(10.0)


if __name__ == "__main__":
    main()

"""A rollout worker of the cluster: writes numbered payloads at a steady rate until standard input says to stop.

The first line of standard input ends the writing, its end the process. The journal has what the soak's has
(benchmarks/soak/journal.py), and ``S writer used``: how many slots of its ring are not free, when that has changed.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import sys
import time

import msgspec
import payloads
from journal import Journal
from parts import RolloutPart, opened
from saying import patiently

from transport import UCXXRolloutMixin
from transport.errors import QueueError, RingFullError
from transport.packer.options import RingOptions, ServerOptions
from transport.packer.rollout import ticket_id
from transport.ticket import Ticket

_EVERY_S = 0.1
_PAUSE_S = 0.2
_FULL_S = 1.0  # longest wait for a slot before standard input is looked at


class Worker(UCXXRolloutMixin):
    """Publishes payloads by number."""

    def __init__(self, part: RolloutPart) -> None:
        self.part = part
        self.next = 0
        self._journal = Journal(part.journal)
        self._unsaid: list[str] = []  # in the ring, and perhaps not in the queue yet
        self._used = -1

    def start(self) -> None:
        """Make the ring, as soon as the queue answers."""
        part = self.part

        def made() -> None:
            self.setup_ucxx(
                slots=part.slots,
                queue=None if part.finding == "addresses" else opened(part),
                ring=RingOptions(slot_bytes=payloads.LARGEST),
                server=ServerOptions(ports=part.ports, addresses=(part.address,), directory=part.directory()),
                settings=part.settings,
            )

        patiently(made, _complain)

    def batch(self, count: int) -> None:
        """The next ones, or as many as there is room for."""
        self._journal.say("I", self.part.writer, self.next, self.next + count)
        for _ in range(count):
            ticket = self._write(self.next)
            if ticket is None:
                break
            self._unsaid.append(f"{self.next}={ticket_id(ticket)}")
            self.next += 1
        self.say_published()

    def _write(self, number: int) -> Ticket | None:
        data = {"data": payloads.make(self.part.writer, number)}
        metadata = {"w": self.part.writer, "n": number}
        try:
            return self.write_to_buffer(data, metadata=metadata, timeout_s=_FULL_S)
        except RingFullError:
            return None
        except QueueError as error:  # of tickets before; this one is not written
            _complain(str(error))
            return None

    def say_published(self) -> bool:
        """Say what the queue has; whether that is everything."""
        try:
            self.flush_ucxx(_EVERY_S)
        except (TimeoutError, QueueError) as error:
            _complain(str(error))
            return not self._unsaid
        if self._unsaid:
            self._journal.say("P", self.part.writer, *self._unsaid)
            self._unsaid.clear()
        ring = self.ring_statistics()
        used = ring.slots - ring.free
        if used != self._used:
            self._used = used
            self._journal.say("S", self.part.writer, used)
        return True

    def finished(self) -> None:
        """Everything is published."""
        self._journal.say("E", self.part.writer)


def _complain(what: str) -> None:
    print(f"rollout: {what}", file=sys.stderr)


def _heard(timeout_s: float) -> bytes | None:
    """What standard input has; None: nothing within this time."""
    return os.read(0, 100) if select.select([0], [], [], max(0.0, timeout_s))[0] else None


def main() -> None:
    """Until standard input ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level="INFO", format="%(asctime)s rollout %(process)d %(levelname)s %(message)s")
    part = msgspec.json.decode(sys.argv[1], type=RolloutPart)
    worker = Worker(part)
    worker.start()
    count = max(1, round(part.per_s * _EVERY_S))
    every_s = count / part.per_s
    due = time.monotonic()
    heard = None
    while heard is None:
        worker.batch(count)
        due = max(due + every_s, time.monotonic())
        heard = _heard(due - time.monotonic())
    while not worker.say_published():
        time.sleep(_PAUSE_S)  # the pace of tries: the queue has failed, and says nothing when it is back
    worker.finished()
    while heard != b"":
        worker.say_published()
        try:
            worker.reconcile()
        except QueueError as error:
            _complain(str(error))
        heard = _heard(1.0)
    worker.cleanup_ucxx(5.0)


if __name__ == "__main__":
    main()

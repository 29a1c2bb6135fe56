"""A rollout worker of the soak: writes its share of payloads, killed and started again as often as it takes."""

from __future__ import annotations

import faulthandler
import logging
import select
import signal
import sys
import time

import msgspec
import numpy as np
import payloads
from journal import Journal
from plan import WriterPlan
from queues import opened_in_time
from saying import patiently

from transport import UCXXRolloutMixin
from transport.errors import RingFullError
from transport.packer.options import RingOptions, ServerOptions
from transport.packer.rollout import queued, ticket_id
from transport.ticket import Ticket

BATCH = 32
SINGLE_EVERY = 8  # one batch in so many goes payload by payload through `write_to_buffer`


class Worker(UCXXRolloutMixin):
    """Publishes payloads by number."""

    def __init__(self, part: WriterPlan) -> None:
        self.part = part
        self.next = part.first
        self.journal = Journal(part.plan.journal(f"writer-{part.number}"))
        self.queue = opened_in_time(part.plan, _complain)

    def start(self) -> None:
        """Make the ring, or take over what a killed predecessor left."""
        plan = self.part.plan

        def made() -> None:  # not while the disk is full, or the server away
            self.setup_ucxx(
                slots=plan.slots,
                readers=self.part.readers,
                name=plan.ring(self.part.number),
                queue=self.queue,
                ring=RingOptions(slot_bytes=payloads.LARGEST),
                server=ServerOptions(ports=(0,) * self.part.ports, addresses=("127.0.0.1",)),
                settings=plan.settings,
            )

        patiently(made, _complain)
        found = [f"{ticket.metadata['n']}={ticket_id(ticket)}" for ticket in self.ring.tickets()]
        if found:
            self.journal.say("F", self.part.number, *found)

    def batch(self, count: int, single: bool) -> None:
        """Publish the next ``count`` payloads."""
        first = self.next
        self.next += count
        self.journal.say("I", self.part.number, first, self.next)
        tickets: list[Ticket] = []
        for number in range(first, self.next):
            data = payloads.make(self.part.number, number)
            metadata = {"w": self.part.number, "n": number}
            deadline_s = payloads.deadline_s(self.part.number, number) if self.part.plan.deadlines else None
            tickets.append((self._single if single else self._write)(data, metadata, deadline_s))
        if not single:
            patiently(lambda: self.queue.publish(map(queued, tickets), readers=self.part.readers), _complain)
        self.journal.say("P", self.part.number, *(f"{each.metadata['n']}={ticket_id(each)}" for each in tickets))

    def _write(self, data: np.ndarray, metadata: dict[str, int], deadline_s: float | None) -> Ticket:
        while True:
            try:
                return self.ring.write_raw(
                    data, readers=self.part.readers, metadata=metadata, deadline_s=deadline_s, timeout_s=1.0
                )
            except RingFullError:
                patiently(self.reconcile, _complain)

    def _single(self, data: np.ndarray, metadata: dict[str, int], deadline_s: float | None) -> Ticket:
        return patiently(
            lambda: self.write_to_buffer({"data": data}, metadata=metadata, deadline_s=deadline_s), _complain
        )


def _complain(what: str) -> None:
    print(f"writer: {what}", file=sys.stderr)


def main() -> None:
    """Until the share is published and standard input ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level="WARNING", format="%(asctime)s writer %(process)d %(levelname)s %(message)s")
    part = msgspec.json.decode(sys.argv[1], type=WriterPlan)
    worker = Worker(part)
    worker.start()
    end = None if part.seconds is None else time.monotonic() + part.seconds
    for turn, left in enumerate(range(part.left, 0, -BATCH)):
        if end is not None and time.monotonic() >= end:
            break
        worker.batch(min(BATCH, left), single=turn % SINGLE_EVERY == 0)
        if part.per_second is not None:
            time.sleep(BATCH / part.per_second)
    patiently(worker.flush_ucxx, _complain)
    worker.journal.say("E", part.number)
    while not select.select([sys.stdin], [], [], 1.0)[0]:
        patiently(worker.reconcile, _complain)  # slots of trainers that died between queue and ring
    worker.cleanup_ucxx(10.0)


if __name__ == "__main__":
    main()

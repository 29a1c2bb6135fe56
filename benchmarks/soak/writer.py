"""A rollout worker of the soak: writes its share of payloads, killed and started again as often as it takes."""

from __future__ import annotations

import faulthandler
import logging
import select
import signal
import sys
import time

import msgspec
import payloads
from journal import Journal
from plan import MAX_DELIVERIES, WriterPlan

from transport import UCXXRolloutMixin
from transport.errors import QueueError, RingFullError
from transport.queue import SQLiteQueue
from transport.rollout import queued, ticket_id
from transport.ticket import Ticket

BATCH = 32
SINGLE_EVERY = 8  # one batch in so many goes payload by payload through `write_to_buffer`
_PAUSE_S = 0.05  # before a queue that failed is asked again


class Worker(UCXXRolloutMixin):
    """Publishes payloads by number."""

    def __init__(self, part: WriterPlan) -> None:
        self.part = part
        self.next = part.first
        self.journal = Journal(part.plan.journal(f"writer-{part.number}"))
        self.queue = SQLiteQueue(
            part.plan.queue, lease_s=part.plan.settings.claim_lease_s, max_deliveries=MAX_DELIVERIES
        )

    def start(self) -> None:
        """Make the ring, or take over what a killed predecessor left."""
        plan = self.part.plan
        while True:
            try:
                self.setup_ucxx(
                    slots=plan.slots,
                    slot_bytes=payloads.LARGEST,
                    readers=self.part.readers,
                    ports=(0,) * self.part.ports,
                    name=plan.ring(self.part.number),
                    queue=self.queue,
                    addresses=("127.0.0.1",),
                    settings=plan.settings,
                )
                break
            except QueueError as error:  # the disk is full just now
                print(f"writer: {error}", file=sys.stderr)
                time.sleep(_PAUSE_S)
        found = [ticket.metadata["n"] for ticket in self.ring.tickets()]
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
            tickets.append(self._single(data, metadata) if single else self._write(data, metadata))
        if not single:
            self.patiently(lambda: self.queue.publish(map(queued, tickets), readers=self.part.readers))
        self.journal.say("P", self.part.number, *(f"{each.metadata['n']}={ticket_id(each)}" for each in tickets))

    def _write(self, data: object, metadata: dict[str, int]) -> Ticket:
        while True:
            try:
                return self.ring.write_raw(data, readers=self.part.readers, metadata=metadata, timeout_s=1.0)
            except RingFullError:
                self.patiently(self.reconcile)

    def _single(self, data: object, metadata: dict[str, int]) -> Ticket:
        return self.patiently(lambda: self.write_to_buffer({"data": data}, metadata=metadata))

    def patiently(self, action):  # type: ignore[no-untyped-def]
        while True:
            try:
                return action()
            except QueueError as error:
                print(f"writer: {error}", file=sys.stderr)
                time.sleep(_PAUSE_S)


def main() -> None:
    """Until the share is published and standard input ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level="WARNING", format="%(asctime)s writer %(process)d %(levelname)s %(message)s")
    part = msgspec.json.decode(sys.argv[1], type=WriterPlan)
    worker = Worker(part)
    worker.start()
    for turn, left in enumerate(range(part.left, 0, -BATCH)):
        worker.batch(min(BATCH, left), single=turn % SINGLE_EVERY == 0)
    worker.journal.say("E", part.number)
    while not select.select([sys.stdin], [], [], 1.0)[0]:
        worker.patiently(worker.reconcile)  # slots of trainers that died between queue and ring
    worker.cleanup_ucxx(10.0)


if __name__ == "__main__":
    main()

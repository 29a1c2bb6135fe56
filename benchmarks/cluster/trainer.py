"""A trainer of the cluster: claims, fetches, compares every byte, consumes, until standard input ends.

The journal has what the soak's has (benchmarks/soak/journal.py), and ``G rank count``: of these claims, others had had
so many before.
"""

from __future__ import annotations

import faulthandler
import logging
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import payloads
from journal import Journal
from parts import TrainerPart, opened
from queues import SaidRings

from transport import UCXXDataPackerMixin
from transport.errors import QueueError, StoreError
from transport.packer.mixin import FetchedBatch
from transport.packer.options import ClientOptions
from transport.queue.base import Claim, DeliveryState, TicketQueue
from transport.ticket import Ticket

_PAUSE_S = 0.1
_RANK = 0
Answer = TypeVar("Answer")


class Trainer(UCXXDataPackerMixin):
    """Trains on nothing, but says what it would have trained on."""

    def __init__(self, part: TrainerPart) -> None:
        self.part = part
        self.journal = Journal(part.journal)
        self.setup_ucxx_packer(
            queue=self._opened(),
            consumer=part.name,
            client=ClientOptions(directory=part.directory()),
            settings=part.settings,
        )

    def _opened(self) -> TicketQueue:
        while True:
            try:
                queue = opened(self.part)
                break
            except (QueueError, StoreError) as error:
                _complain(str(error))
                time.sleep(_PAUSE_S)
        if isinstance(queue, SaidRings):
            queue.ending, queue.ended = self.ending, self.ended
        return queue

    def ending(self, claims: Sequence[Claim], state: DeliveryState, reason: str) -> None:
        """Claims are about to end without consumption."""
        for claim in claims:
            writer, number = _named(claim)
            said = f"{number}={writer}={claim.token.replace(' ', '|')}"
            self.journal.say("D", _RANK, said, "because", *f"{state}: {reason}".split())

    def ended(self, claims: Sequence[Claim], good: bool) -> None:
        """What became of it."""
        names = ["=".join(map(str, _named(claim))) for claim in claims]
        if names:
            self.journal.say("K" if good else "R", _RANK, *names)

    def train(self, batch: object) -> None:
        """Compare, and consume what came."""
        assert isinstance(batch, FetchedBatch)
        asked, again = [], 0
        for item in batch.items:
            if item.payload is None or item.claim is None:
                continue
            writer, number = _named(item.claim)
            again += item.claim.attempts > 1
            if not payloads.is_right(writer, number, item.payload.data):
                self.journal.say("X", _RANK, f"{writer}={number}", item.payload.wire)
            asked.append(f"{number}={writer}={item.claim.token.replace(' ', '|')}")
        if again:
            self.journal.say("G", _RANK, again)
        self.journal.say("A", _RANK, *asked)
        trained = self.patiently(partial(self.consume, batch))
        self.journal.say("C", _RANK, *(f"{each.ticket.metadata['w']}={each.ticket.metadata['n']}" for each in trained))

    def patiently(self, action: Callable[[], Answer]) -> Answer:
        """Until the queue does not fail."""
        while True:
            try:
                return action()
            except (QueueError, StoreError) as error:
                _complain(str(error))
                time.sleep(_PAUSE_S)


def _named(claim: Claim) -> tuple[int, int]:
    metadata: Any = Ticket.decode(claim.data).metadata
    return metadata["w"], metadata["n"]


def _complain(what: str) -> None:
    print(f"{time.strftime('%X')} trainer: {what}", file=sys.stderr)


def main() -> None:
    """Until standard input ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level="INFO", format="%(asctime)s trainer %(process)d %(levelname)s %(message)s")
    part = msgspec.json.decode(sys.argv[1], type=TrainerPart)
    trainer = Trainer(part)
    fetching = 0
    while True:
        claims = trainer.patiently(partial(trainer.claim_tickets, part.batch, 0.0 if fetching else 0.3))
        if claims:
            trainer.defer_prefetch(claims)
            fetching += 1
        if fetching == 2 or (fetching and not claims):
            trainer.train(trainer.collect_prefetch())  # not kept: its views would keep slots of a mapped ring
            fetching -= 1
        elif not claims and select.select([sys.stdin], [], [], 0)[0]:
            break
    trainer.cleanup_ucxx_packer()


if __name__ == "__main__":
    main()

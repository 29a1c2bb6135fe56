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
from functools import partial

import msgspec
from journal import Journal
from parts import TrainerPart, opened
from queues import SaidRings
from saying import SayingTrainer, patiently

from transport.packer.options import ClientOptions
from transport.queue.base import TicketQueue


class Trainer(SayingTrainer):
    """A trainer of one rank, whose queue may be away when it starts."""

    say_again = True

    def __init__(self, part: TrainerPart) -> None:
        super().__init__()
        self.part = part
        self.journal = Journal(part.journal)
        self.setup_ucxx_packer(
            queue=self._opened(),
            consumer=part.name,
            client=ClientOptions(directory=part.directory()),
            settings=part.settings,
        )

    def _opened(self) -> TicketQueue:
        queue = patiently(partial(opened, self.part), self.complain)
        if isinstance(queue, SaidRings):
            queue.ending, queue.ended = self.ending, self.ended
        return queue

    def complain(self, what: str) -> None:
        """Into its log."""
        print(f"{time.strftime('%X')} trainer: {what}", file=sys.stderr)


def main() -> None:
    """Until standard input ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level="INFO", format="%(asctime)s trainer %(process)d %(levelname)s %(message)s")
    part = msgspec.json.decode(sys.argv[1], type=TrainerPart)
    trainer = Trainer(part)
    fetching = 0
    while True:
        claims = patiently(partial(trainer.claim_tickets, part.batch, 0.0 if fetching else 0.3), trainer.complain)
        if claims:
            trainer.defer_prefetch(claims)
            fetching += 1
        if fetching == 2 or (fetching and not claims):
            trainer.train(trainer.collect_prefetch())  # type: ignore[arg-type]  # not kept: its views would keep slots of a mapped ring
            fetching -= 1
        if not trainer.ask_again() and not claims and not fetching and select.select([sys.stdin], [], [], 0)[0]:
            break
    trainer.cleanup_ucxx_packer()


if __name__ == "__main__":
    main()

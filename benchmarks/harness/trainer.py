"""A trainer: claims, fetches, compares every byte, consumes; killed and started again at any moment."""

from __future__ import annotations

import faulthandler
import logging
import select
import signal
import sys
import time
from functools import partial
from typing import Any

import msgspec
import payloads
from ledger import Journal
from plan import TrainerPart, opened, patiently, tell_discards, words_of

from transport import UCXXDataPackerMixin
from transport.packer.mixin import FetchedBatch
from transport.queue import Claim, DeliveryState
from transport.ticket import Ticket

_ABANDON_EVERY = 8  # one batch in so many is given back instead of trained on, the first of each life among them
_DROP_EVERY = 16  # the claims of one batch in so many are dropped without a word
_ASK_AGAIN_S = 2.0


def _named(claim: Claim) -> tuple[int, int]:
    metadata: Any = Ticket.decode(claim.data).metadata
    return metadata["w"], metadata["n"]


class Trainer(UCXXDataPackerMixin):
    """Trains on nothing, but says in its journal what it would have trained on."""

    def __init__(self, part: TrainerPart) -> None:
        self.rank = part.rank
        self.journal = Journal(part.journal)
        self._questions: list[FetchedBatch] = []
        self._ask_at = 0.0
        queue = patiently(partial(opened, part), self.complain)
        tell_discards(queue, self._ending, self._ended)
        self.setup_ucxx_packer(
            queue=queue,
            rank=part.rank,
            consumer=part.name,
            wire=frozenset(part.wire) if part.wire else "auto",  # type: ignore[arg-type]
            settings=part.settings,
        )

    def complain(self, what: str) -> None:
        """Into its log."""
        print(f"{time.strftime('%X')} trainer: {what}", file=sys.stderr)

    def _ending(self, claim: Claim, reason: str) -> None:
        why = f"{DeliveryState.DISCARDED}: {reason}".split()
        self.journal.say("D", self.rank, *words_of([_named(claim)]), "because", *why)

    def _ended(self, claim: Claim, good: bool) -> None:
        self.journal.say("K" if good else "R", self.rank, *words_of([_named(claim)]))

    def train(self, batch: FetchedBatch) -> None:
        """Compare, and consume what came."""
        asked = []
        for item in batch.items:
            if item.payload is None or item.claim is None:
                continue
            writer, number = _named(item.claim)
            if not payloads.is_right(writer, number, item.payload.data):
                self.journal.say("X", self.rank, *words_of([(writer, number)]), item.payload.wire)
            asked.append((writer, number))
        self.journal.say("A", self.rank, *words_of(asked))
        self._consume(batch)

    def _consume(self, batch: FetchedBatch) -> None:
        trained = patiently(lambda: self.consume(batch), self.complain)
        if batch.in_question:
            self._questions.append(batch)
            self._ask_at = time.monotonic() + _ASK_AGAIN_S
        unsure = [_named(item.claim) for each in self._questions for item in each.in_question if item.claim is not None]
        self.journal.say("Q", self.rank, *words_of(unsure))
        self.journal.say(
            "C", self.rank, *words_of([(each.ticket.metadata["w"], each.ticket.metadata["n"]) for each in trained])
        )

    def ask_again(self) -> bool:
        """Consume what is in question once more, every few seconds; whether anything is."""
        if self._questions and time.monotonic() >= self._ask_at:
            for batch in list(self._questions):
                self._questions.remove(batch)
                self._consume(batch)
        return bool(self._questions)


def main() -> None:
    """Until standard input ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level="INFO", format="%(asctime)s trainer %(process)d %(levelname)s %(message)s")
    part = msgspec.json.decode(sys.argv[1], type=TrainerPart)
    trainer = Trainer(part)
    fetching = collected = claimed = 0
    while True:
        claims = patiently(partial(trainer.claim_tickets, part.batch, 0.0 if fetching else 0.3), trainer.complain)
        claimed += bool(claims)
        if claims and claimed % _DROP_EVERY == 0:
            continue
        if claims:
            trainer.defer_prefetch(claims)
            fetching += 1
        if fetching == 2 or (fetching and not claims):
            batch: FetchedBatch | None = trainer.collect_prefetch()
            assert batch is not None
            fetching -= 1
            collected += 1
            if collected % _ABANDON_EVERY == 1:
                patiently(partial(trainer.abandon, batch), trainer.complain)
            else:
                trainer.train(batch)
            batch = None  # its views would keep slots of a mapped ring
        elif not claims and not trainer.ask_again() and select.select([sys.stdin], [], [], 0)[0]:
            break
    trainer.cleanup_ucxx_packer()


if __name__ == "__main__":
    main()

"""A trainer of the soak: claims, fetches, compares every byte, consumes; killed and started again at any moment."""

from __future__ import annotations

import faulthandler
import logging
import select
import signal
import sys
from functools import partial

import msgspec
from journal import Journal
from plan import TrainerPlan
from queues import SaidRings, opened_in_time
from report import reason_of
from saying import SayingTrainer, named, patiently

from transport.packer.mixin import FetchedBatch
from transport.queue.base import Claim, DeliveryState, Failure
from transport.ticket import Ticket

ABANDON_EVERY = 8  # one batch in so many is given back instead of trained on, the first of each life among them
DROP_EVERY = 16  # the claims of one batch in so many are dropped without a word


class Trainer(SayingTrainer):
    """One rank's; names in its journal what the queue may come to report."""

    def __init__(self, part: TrainerPlan) -> None:
        super().__init__()
        self.part = part
        self.rank = part.rank
        self.journal = Journal(part.plan.journal(f"trainer-{part.number}"))
        queue = opened_in_time(part.plan, self.complain)
        if isinstance(queue, SaidRings):
            queue.ending, queue.ended = self.ending, self.ended
        self.setup_ucxx_packer(
            queue=queue,
            rank=part.rank,
            consumer=f"trainer-{part.number}",
            wire=frozenset(part.wire) if part.wire else "auto",  # type: ignore[arg-type]
            settings=part.plan.settings,
        )

    def complain(self, what: str) -> None:
        """Into its log."""
        print(f"trainer: {what}", file=sys.stderr)

    def why(self, claim: Claim, state: DeliveryState, reason: str) -> str:
        """As the report will have it."""
        failure = Failure(claim.ticket_id, claim.rank, state, claim.attempts, "", reason)
        return reason_of(failure, *named(claim), self.part.plan)

    def claimed(self, n: int, timeout_s: float) -> list[Claim]:
        """Claims, named in the journal where the queue may come to report them: the queue names no payload."""
        claims = patiently(partial(self.claim_tickets, n, timeout_s), self.complain)
        words = []
        for claim in claims:
            ticket = Ticket.decode(claim.data)
            if ticket.deadline is not None:
                words.append(f"{claim.ticket_id}={ticket.metadata['w']}={ticket.metadata['n']}")
        if words:
            self.journal.say("N", self.rank, *words)
        return claims


def main() -> None:
    """Until standard input ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level="WARNING", format="%(asctime)s trainer %(process)d %(levelname)s %(message)s")
    part = msgspec.json.decode(sys.argv[1], type=TrainerPlan)
    trainer = Trainer(part)
    fetching = collected = claimed = 0
    while True:
        claims = trainer.claimed(part.batch, 0.0 if fetching else 0.3)
        claimed += bool(claims)
        if claims and claimed % DROP_EVERY == 0:
            continue
        if claims:
            trainer.defer_prefetch(claims)
            fetching += 1
        if fetching == 2 or (fetching and not claims):
            batch: FetchedBatch = trainer.collect_prefetch()  # type: ignore[assignment]
            fetching -= 1
            collected += 1
            if collected % ABANDON_EVERY == 1:
                patiently(partial(trainer.abandon, batch), trainer.complain)
            else:
                trainer.train(batch)
        elif not claims and not trainer.ask_again() and select.select([sys.stdin], [], [], 0)[0]:
            break
    trainer.cleanup_ucxx_packer()


if __name__ == "__main__":
    main()

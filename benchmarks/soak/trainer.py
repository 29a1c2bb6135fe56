"""A trainer of the soak: claims, fetches, compares every byte, consumes; killed and started again at any moment."""

from __future__ import annotations

import faulthandler
import logging
import select
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import payloads
from journal import Journal
from plan import TrainerPlan
from queues import SaidRings, opened_in_time
from report import reason_of

from transport import UCXXDataPackerMixin
from transport.errors import QueueError
from transport.packer.mixin import FetchedBatch
from transport.queue.base import Claim, DeliveryState, Failure
from transport.ticket import Ticket

ABANDON_EVERY = 8  # one batch in so many is given back instead of trained on, the first of each life among them
_PAUSE_S = 0.05


class Trainer(UCXXDataPackerMixin):
    """Trains on nothing, but says what it would have trained on."""

    def __init__(self, part: TrainerPlan) -> None:
        self.part = part
        self.journal = Journal(part.plan.journal(f"trainer-{part.number}"))
        queue = opened_in_time(part.plan, _complain)
        if isinstance(queue, SaidRings):
            queue.ending, queue.ended = self.ending, self.ended
        self.setup_ucxx_packer(
            queue=queue,
            rank=part.rank,
            consumer=f"trainer-{part.number}",
            ack=part.plan.ack,
            wire=frozenset(part.wire) if part.wire else "auto",  # type: ignore[arg-type]
            settings=part.plan.settings,
        )

    def ending(self, claims: Sequence[Claim], state: DeliveryState, reason: str) -> None:
        """Claims are about to end without consumption; `SaidRings` says so, from any thread."""
        for claim in claims:
            writer, number = _named(claim)
            failure = Failure(claim.ticket_id, claim.rank, state, claim.attempts, "", reason)
            why = reason_of(failure, writer, number, self.part.plan)
            said = f"{number}={writer}={_token(claim)}"
            self.journal.say("D", self.part.rank, said, "because", *why.split())

    def ended(self, claims: Sequence[Claim], good: bool) -> None:
        """What became of it."""
        names = ["=".join(map(str, _named(claim))) for claim in claims]
        if names:
            self.journal.say("K" if good else "R", self.part.rank, *names)

    def claimed(self, n: int, timeout_s: float) -> list[Claim]:
        """Claims, named in the journal where the queue may come to report them: the queue names no payload."""
        claims: list[Claim] = self.patiently(partial(self.claim_tickets, n, timeout_s))
        named = []
        for claim in claims:
            ticket = Ticket.decode(claim.data)
            if ticket.deadline is not None or self.part.plan.ack == "on_arrival":
                named.append(f"{claim.ticket_id}={ticket.metadata['w']}={ticket.metadata['n']}")
        if named:
            self.journal.say("N", self.part.rank, *named)
        return claims

    def train(self, batch: FetchedBatch) -> None:
        """Compare, and consume what is right."""
        rank = self.part.rank
        asked = []
        for item in batch.items:
            if item.payload is None or item.claim is None:
                continue
            named: Any = item.ticket.metadata
            writer, number = named["w"], named["n"]
            if not payloads.is_right(writer, number, item.payload.data):
                self.journal.say("X", rank, f"{writer}={number}", item.payload.wire)
            asked.append(f"{number}={writer}={_token(item.claim)}")
        self.journal.say("A", rank, *asked)
        trained = self.patiently(lambda: self.consume(batch))
        self.journal.say("C", rank, *(f"{each.ticket.metadata['w']}={each.ticket.metadata['n']}" for each in trained))

    def patiently(self, action: Any) -> Any:
        """Until the queue does not fail."""
        while True:
            try:
                return action()
            except QueueError as error:
                _complain(str(error))
                time.sleep(_PAUSE_S)


def _named(claim: Claim) -> tuple[int, int]:
    """Writer and number of the payload."""
    metadata: Any = Ticket.decode(claim.data).metadata
    return metadata["w"], metadata["n"]


def _token(claim: Claim) -> str:
    """As one word of the journal."""
    return claim.token.replace(" ", "|")


def _complain(what: str) -> None:
    print(f"trainer: {what}", file=sys.stderr)


def main() -> None:
    """Until standard input ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level="WARNING", format="%(asctime)s trainer %(process)d %(levelname)s %(message)s")
    part = msgspec.json.decode(sys.argv[1], type=TrainerPlan)
    trainer = Trainer(part)
    fetching = collected = 0
    while True:
        claims = trainer.claimed(part.batch, 0.0 if fetching else 0.3)
        if claims:
            trainer.defer_prefetch(claims)
            fetching += 1
        if fetching == 2 or (fetching and not claims):
            batch: FetchedBatch = trainer.collect_prefetch()  # type: ignore[assignment]
            fetching -= 1
            collected += 1
            if collected % ABANDON_EVERY == 1 and part.plan.ack == "on_consumed":
                trainer.patiently(partial(trainer.abandon, batch))
            else:
                trainer.train(batch)
        elif not claims and select.select([sys.stdin], [], [], 0)[0]:
            break
    trainer.cleanup_ucxx_packer()


if __name__ == "__main__":
    main()

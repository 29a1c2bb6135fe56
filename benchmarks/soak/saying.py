"""What the trainers of soak and cluster share: they compare and consume, and say in a journal what they did."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import payloads
from journal import Journal

from transport import UCXXDataPackerMixin
from transport.errors import QueueError, StoreError
from transport.packer.mixin import FetchedBatch
from transport.queue.base import Claim, DeliveryState
from transport.ticket import Ticket

Answer = TypeVar("Answer")

_PAUSE_S = 0.1
_ASK_AGAIN_S = 2.0


def patiently(action: Callable[[], Answer], complain: Callable[[str], object]) -> Answer:
    """Until queue and store do not fail. They have waited for their server themselves; the pause is the pace of tries.

    No event says that a disk has room again, or that a server is back.
    """
    while True:
        try:
            return action()
        except (QueueError, StoreError) as error:
            complain(str(error))
            time.sleep(_PAUSE_S)


def named(claim: Claim) -> tuple[int, int]:
    """Writer and number of its payload."""
    metadata: Any = Ticket.decode(claim.data).metadata
    return metadata["w"], metadata["n"]


def as_word(claim: Claim) -> str:
    """As the journal names a claim."""
    writer, number = named(claim)
    return f"{number}={writer}={claim.token.replace(' ', '|')}"


class SayingTrainer(UCXXDataPackerMixin):
    """Trains on nothing, but says what it would have trained on."""

    journal: Journal
    rank = 0
    say_again = False  # how many claims others had had before

    def __init__(self) -> None:
        self._questions: list[FetchedBatch] = []
        self._ask_at = 0.0

    def complain(self, what: str) -> None:
        """Into its log."""
        raise NotImplementedError

    def why(self, claim: Claim, state: DeliveryState, reason: str) -> str:
        """As the report will have it."""
        return f"{state}: {reason}"

    def ending(self, claims: Sequence[Claim], state: DeliveryState, reason: str) -> None:
        """Claims are about to end without consumption; `SaidRings` says so, from any thread."""
        for claim in claims:
            self.journal.say("D", self.rank, as_word(claim), "because", *self.why(claim, state, reason).split())

    def ended(self, claims: Sequence[Claim], good: bool) -> None:
        """What became of it."""
        names = ["=".join(map(str, named(claim))) for claim in claims]
        if names:
            self.journal.say("K" if good else "R", self.rank, *names)

    def train(self, batch: FetchedBatch) -> None:
        """Compare, and consume what came."""
        asked, again = [], 0
        for item in batch.items:
            if item.payload is None or item.claim is None:
                continue
            writer, number = named(item.claim)
            again += item.claim.attempts > 1
            if not payloads.is_right(writer, number, item.payload.data):
                self.journal.say("X", self.rank, f"{writer}={number}", item.payload.wire)
            asked.append(as_word(item.claim))
        if again and self.say_again:
            self.journal.say("G", self.rank, again)
        self.journal.say("A", self.rank, *asked)
        self._consume(batch)

    def _consume(self, batch: FetchedBatch) -> None:
        trained = patiently(lambda: self.consume(batch), self.complain)
        if batch.in_question:
            self._questions.append(batch)
            self._ask_at = time.monotonic() + _ASK_AGAIN_S
        unsure = [item.claim for each in self._questions for item in each.in_question if item.claim is not None]
        self.journal.say("Q", self.rank, *map(as_word, unsure))
        self.journal.say(
            "C", self.rank, *(f"{each.ticket.metadata['w']}={each.ticket.metadata['n']}" for each in trained)
        )

    def ask_again(self) -> bool:
        """Consume what is in question once more, every few seconds; whether anything is."""
        if self._questions and time.monotonic() >= self._ask_at:
            for batch in list(self._questions):
                self._questions.remove(batch)
                self._consume(batch)
        return bool(self._questions)

"""A trainer: takes, compares every byte, consumes; killed and started again at any moment."""

from __future__ import annotations

import faulthandler
import logging
import select
import signal
import sys
import time
from collections import deque
from functools import partial
from typing import Any

import payloads
from ledger import Journal
from plan import TrainerPart, opened, patiently, words_of

from transport import ClientOptions, Trainer
from transport.decoders import json_decoder
from transport.training.batch import Batch

_ABANDON_EVERY = 8  # one batch in so many is given back instead of trained on, the first of each life among them
_DROP_EVERY = 16  # one batch in so many is dropped without a word
_ASK_AGAIN_S = 2.0
_IN_HAND = 2  # batches


class Held:
    """A batch, the names of its payloads, and which of them were consumed."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        metadata: Any = batch.metadata
        self.names = [(each["w"], each["n"]) for each in metadata]
        self._consumed: set[int] = set()

    def consumed(self) -> list[tuple[int, int]]:
        """Consume what is not consumed; the names of what was."""
        self.batch.consume()
        fresh = [at for at, ours in enumerate(self.batch.accepted.tolist()) if ours and at not in self._consumed]
        self._consumed.update(fresh)
        return [self.names[at] for at in fresh]

    def unsure(self) -> list[tuple[int, int]]:
        """The names of what is in question."""
        return [name for name, asked in zip(self.names, self.batch.in_question.tolist(), strict=True) if asked]


class Training:
    """Trains on nothing, but says in its journal what it would have trained on."""

    def __init__(self, part: TrainerPart) -> None:
        self.rank = part.rank
        self.journal = Journal(part.journal)
        self._questions: list[Held] = []
        self._ask_at = 0.0
        self.rings = patiently(partial(opened, part), self.complain)
        self.trainer = Trainer(
            None,
            self.rings,
            rank=part.rank,
            wire=frozenset(part.wire) if part.wire else "auto",  # type: ignore[arg-type]
            client=ClientOptions(name=part.name, settings=part.settings),
        )

    def complain(self, what: str) -> None:
        """Into its log."""
        print(f"{time.strftime('%X')} trainer: {what}", file=sys.stderr)

    def train(self, held: Held) -> None:
        """Compare, and consume what came."""
        for (writer, number), payload in zip(held.names, held.batch, strict=True):
            if not payloads.is_right(writer, number, payload.data):
                wires = ",".join(held.batch.bytes_by_wire)
                self.journal.say("X", self.rank, *words_of([(writer, number)]), wires)
        self.journal.say("A", self.rank, *words_of(held.names))
        self._consume(held)

    def _consume(self, held: Held) -> None:
        trained = held.consumed()
        if held.unsure():
            self._questions.append(held)
            self._ask_at = time.monotonic() + _ASK_AGAIN_S
        self.journal.say("Q", self.rank, *words_of([name for each in self._questions for name in each.unsure()]))
        self.journal.say("C", self.rank, *words_of(trained))

    def ask_again(self) -> bool:
        """Consume what is in question once more, every few seconds; whether anything is."""
        if self._questions and time.monotonic() >= self._ask_at:
            for held in list(self._questions):
                self._questions.remove(held)
                self._consume(held)
        return bool(self._questions)

    def close(self) -> None:
        """Give back what was not consumed."""
        self.trainer.close()
        self.rings.close()


def main() -> None:
    """Until standard input ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level="INFO", format="%(asctime)s trainer %(process)d %(levelname)s %(message)s")
    part = json_decoder(TrainerPart)(sys.argv[1])
    training = Training(part)
    in_hand: deque[Held] = deque()
    taken = trained = 0
    while True:
        unsure = training.ask_again()
        batch = training.trainer.take(part.batch, 0.0 if in_hand else 0.3)
        taken += batch is not None
        if batch is not None and taken % _DROP_EVERY == 0:
            continue
        if batch is not None:
            in_hand.append(Held(batch))
        if in_hand and (batch is None or len(in_hand) == _IN_HAND):
            trained += 1
            if trained % _ABANDON_EVERY == 1:
                in_hand.popleft().batch.give_back()
            else:
                training.train(in_hand.popleft())
        elif batch is None and not unsure and select.select([sys.stdin], [], [], 0)[0]:
            break
    training.close()


if __name__ == "__main__":
    main()

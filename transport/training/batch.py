"""Batch: payloads that a trainer has claimed together, and the ends of their claims.

claimed ──consume──► asked ──(the rings' answers)──► consumed: no other trainer gets them
   │                    └──(a ring out of reach)───► in question: `consume` again asks the ring
   ├──accept──► accepted: a checkpoint's record has them before they are consumed
   └──give_back, or dropped──► may be claimed again, by any trainer
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from transport import _ring
from transport.claims.taken_part import TakenPart
from transport.errors import UsageError
from transport.ring.batch import Gathered
from transport.ring.batch_shape import Shape
from transport.runtime import spans
from transport.schema import Schema
from transport.training.payloads import Payloads

if TYPE_CHECKING:
    from opentelemetry.trace import Span

Claimed = _ring.ClaimedBatch | TakenPart

_NONE: Final = np.zeros(0, np.bool_)


class Book(Protocol):
    """A trainer's book of its batches."""

    remembers: bool
    unanswered: deque[Batch]

    def consumed(self, batch: Batch, verdicts: npt.NDArray[np.bool_]) -> None: ...
    def given_back(self, batch: Batch) -> None: ...


class Batch(Payloads):
    """Payloads that were claimed together. Belongs to one thread at a time.

    What ends claims may be called again after an interrupt: each of its steps may run again, and the state comes last.

        batch["tokens"]         a tensor of all payloads: padded, or as the trainer's ``layout`` says
        batch.payloads          a mapping of fields for each payload; so does iterating over the batch
        batch.consume()         they were used: no other trainer gets them

    Dropped without `consume`, a batch gives its payloads back. Payloads that were consumed from mapped rings stay in
    their slots until the trainer takes again: look before, or keep their arrays. `Payloads` has what can be looked at.

    Attributes:
        parts: what was claimed of each ring; the claims are the batch's to end.
        claimed_in: span of the claim; None where the program has no OpenTelemetry.
        learned: whether the model has learned from the payloads, as `accept` says.
        in_slots: whether payloads that were consumed lie in slots of mapped rings.
        counted: how many payloads the book has counted as consumed, and as lost.
    """

    parts: Sequence[Claimed]

    def __init__(
        self,
        parts: Sequence[Claimed],
        gathered: Gathered | None,
        shape: Shape,
        schemas: Mapping[str, Schema],
        book: Book,
        training_version: int | None = None,
    ) -> None:
        super().__init__(parts, gathered, shape, schemas, training_version)
        self._book = book
        self._state: Literal["claimed", "accepted", "asked", "in question", "consumed", "given back"] = "claimed"
        self.learned = self.in_slots = False
        self.counted = 0, 0
        self._verdicts: npt.NDArray[np.bool_] = _NONE
        self.claimed_in: Span | None = None

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} payloads, {int(self.sizes.sum())} bytes, {self._state}>"

    # --- the ends of the claims -----------------------------------------------------------------------
    def accept(self) -> None:
        """Say that the model has learned from the payloads, which are consumed later: `Trainer.record` has them now.

        For checkpoints: learn, accept, store the weights and the record, and only then `consume`. Killed before the
        checkpoint is stored, a trainer gets the payloads again; killed behind it, its successor leaves them out.
        """
        self._require("accept")
        self._book.remembers = True
        self.learned = True
        self._state = "accepted"

    def consume(self) -> None:
        """Say that the payloads were used. Rings of this host know it at once; those elsewhere are told without a wait.

        Their answers are waited for when somebody looks at `accepted`, when the trainer has taken two more batches, and
        at its `close`. Called again it does nothing, but asks again the rings of payloads that are `in_question`.
        """
        if self._state == "consumed":
            return
        if self._state == "given back":
            self._require("consume")
        begun = time.monotonic()
        keep = self._gathered is None or self._shape.layout == "list"  # payloads stay where they are
        answers: list[bytes | None] = []  # None: not yet
        for part in self.parts:
            answers.append(part.finish(keep))  # noqa: PERF401  # a comprehension is a call before Python 3.12
        self.in_slots = keep and any(answers)
        if None in answers:
            self._book.unanswered.append(self)
        self._state = "asked"
        if None not in answers:
            self.settle()
        if self.claimed_in is not None:
            spans.ended("transport.consume", begun, links=spans.links_to(self.claimed_in), payloads=len(self))

    @property
    def answered(self) -> bool:
        """True if every ring has answered `consume`, so that `accepted` does not wait."""
        return all(part.answered for part in self.parts)

    @property
    def accepted(self) -> npt.NDArray[np.bool_]:
        """True for each payload that counts as consumed by this trainer; waits for the rings' answers.

        What is False another trainer has: this one was silent for longer than its lease, or its connection was lost.
        UsageError before `consume`.
        """
        if self._state == "asked":
            self.settle()
        if self._state not in ("consumed", "in question"):
            raise UsageError(f"accepted of a batch that is {self._state}: consume() it first")
        return self._verdicts

    @property
    def settled(self) -> bool:
        """True if what the rings answered is noted: what was not consumed may come again."""
        return self._state in ("consumed", "in question")

    def settle(self) -> None:
        """Wait for the answers of the rings that were asked."""
        if self._state != "asked":
            return
        answers = b""
        for part in self.parts:
            answers += part.consumption()
        verdicts = np.frombuffer(answers, np.bool_)
        self._book.consumed(self, verdicts)
        self._verdicts = verdicts
        self._state = "consumed" if verdicts.all() or not self.in_question.any() else "in question"

    @property
    def in_question(self) -> npt.NDArray[np.bool_]:
        """True for each payload whose ring went out of reach before its answer: it may count as consumed."""
        return np.frombuffer(b"".join([part.in_question() for part in self.parts]), np.bool_)

    def give_back(self, delay_s: float = 0.0) -> None:
        """Let other trainers claim the payloads, after the delay. For weights that have not learned from them.

        It counts as a delivery in vain: what was delivered ``max_deliveries`` times is dead.
        """
        self._require("give_back")
        for part in self.parts:
            part.release(delay_s)
        self._book.given_back(self)
        self._state = "given back"
        self._let_go()

    def release(self) -> None:
        """Let the payloads go; what was not consumed goes back, uncounted. Idempotent; so does dropping the batch.

        What is in question stays, so that `consume` can ask again.
        """
        if self._state in ("claimed", "accepted"):
            for part in self.parts:
                part.release(in_vain=False)
            self._book.given_back(self)
            self._state = "given back"
        else:
            self.settle()
        if self._state != "in question":
            self._let_go()

    def let_go_of_slots(self) -> None:
        """Let consumed payloads of mapped rings go: their slots are free when no array looks into them."""
        if self._state == "consumed":
            self._let_go()

    def _require(self, call: str) -> None:
        asked = self._state in ("asked", "in question")
        if self._state in ("consumed", "given back") or (call != "consume" and asked):
            raise UsageError(f"{call}() of a batch that is {self._state}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

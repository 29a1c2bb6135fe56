"""Claims in question: their connection broke before the ring said whether they had ended, and no port was reached.

    ended ──no answer, and none elsewhere──► in question ──asked again──► accepted, refused, or still in question

The ring keeps what it has accepted, so the answer is as good later. A question has no payload: who asks again has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import numpy as np

from transport.client.takes.link import TakeLink
from transport.queue.base import Claim
from transport.runtime.loop_thread import LoopThread
from transport.taking.batch import Rows

_MOST: Final = 4096  # questions; of more than that the first are dropped


class Question(NamedTuple):
    """``what`` is how the claim was to end: a count of `QueueDepth`."""

    claim: Claim
    link: TakeLink
    row: Rows
    what: str


class Questions:
    """Of one trainer. `_asked` runs on the client's loop, everything else in any thread.

    Args:
        lock: may be acquired again by the thread that has it.
        accepted: is called on the loop, under the lock, once for each claim that was accepted after all.
    """

    def __init__(self, lock: AbstractContextManager[Any], accepted: Callable[[Question], object]) -> None:
        self._lock = lock
        self._accepted = accepted
        self._open: dict[str, Question] = {}
        self._said: dict[str, str] = {}  # accepted, as what, and no caller has been told yet

    def __contains__(self, token: str) -> bool:
        return token in self._open or token in self._said

    def __len__(self) -> int:
        return len(self._open)

    def any(self, claims: Sequence[Claim]) -> bool:
        """Whether one of these is in question."""
        return bool(self._open or self._said) and any(claim.token in self for claim in claims)

    def note(self, claim: Claim, link: TakeLink, row: Rows, what: str) -> None:
        """The end of a claim was not accepted, or not answered: then it is in question."""
        if row.tobytes() in link.in_question:
            self._open[claim.token] = Question(claim, link, np.atleast_1d(row).copy(), what)
            while len(self._open) > _MOST:
                del self._open[next(iter(self._open))]

    def settle(self, claims: Sequence[Claim], what: str, thread: LoopThread | None, settled: dict[str, Claim]) -> None:
        """Ask again for those that were to end so; the accepted ones are in ``settled`` by token, also if it raises."""
        with self._lock:
            known = [self._open[claim.token] for claim in claims if claim.token in self._open]
            asked = [each for each in known if each.what == what]
        if asked and thread is not None and not thread.closed:
            thread.run(self._ask(asked))
        with self._lock:
            for claim in claims:
                if self._said.get(claim.token) == what:
                    settled[claim.token] = claim
                    del self._said[claim.token]

    def put_back(self, settled: Sequence[Claim], what: str) -> None:
        """The caller was interrupted before it had them."""
        with self._lock:
            self._said.update((claim.token, what) for claim in settled)

    async def _ask(self, asked: Sequence[Question]) -> None:
        by_link: dict[TakeLink, list[Question]] = {}
        for each in asked:
            by_link.setdefault(each.link, []).append(each)
        await asyncio.gather(*(self._asked(link, group) for link, group in by_link.items()))

    async def _asked(self, link: TakeLink, group: Sequence[Question]) -> None:
        verdicts = await link.finish(np.concatenate([each.row for each in group]))
        with self._lock:
            for each, accepted in zip(group, verdicts.tolist(), strict=True):
                token = each.claim.token
                if each.row.tobytes() not in link.in_question and self._open.pop(token, None) is not None and accepted:
                    self._said[token] = each.what
                    self._accepted(each)

"""How claims of rings elsewhere end, and the answers of the rings: an interrupted call leaves them to the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from transport.queue.demands import Brought
from transport.taking.batch import Rows, Verdicts
from transport.wire.frames import Ended

UNTRAINED: Final = {"discarded": Ended.DISCARDED, "dead": Ended.DEAD, "aged": Ended.AGED}


class End(NamedTuple):
    """What claims are to become: ``what`` is a count of `QueueDepth`."""

    what: str
    reason: str = ""
    delay_s: float = 0.0

    async def asked(self, brought: Brought, rows: Rows, consumer: str) -> Verdicts:
        """Have the ring end them so; for which it was accepted."""
        if self.what in ("done", "arrived"):
            return await brought.demands.finish(brought, rows, arrived=self.what == "arrived")
        if self.what == "retried":
            return await brought.demands.give_back(brought, rows, self.delay_s)
        return await brought.demands.end(brought, rows, UNTRAINED[self.what], self.reason, consumer)


class Held(NamedTuple):
    """A claim: one payload of what was brought."""

    brought: Brought
    at: int

    @property
    def key(self) -> tuple[int, int]:
        """Of it while `brought` lives."""
        return id(self.brought), self.at


class Said(NamedTuple):
    """What became of a claim. It keeps what was brought alive, since the key is of that."""

    end: End
    accepted: bool
    brought: Brought


class Answers:
    """What rings have said of claims and no caller has been told yet.

    `ask` belongs to the client's loop, the others to any thread.
    """

    def __init__(self) -> None:
        self._said: dict[tuple[int, int], Said] = {}
        self._asking: dict[tuple[int, int], asyncio.Task[None]] = {}  # belongs to the loop

    def __contains__(self, held: Held) -> bool:
        return held.key in self._said

    def take(self, held: Held) -> Said | None:
        """The answer, which is forgotten; None: there is none, because every connection is closed."""
        return self._said.pop(held.key, None)

    async def ask(self, groups: Sequence[tuple[Brought, list[int]]], end: End, consumer: str) -> None:
        """Have the answers for these claims, of a first question that is under way or has been answered meanwhile, too.

        Where this is cancelled the question goes on.
        """
        waited: dict[asyncio.Task[None], None] = {}
        for brought, positions in groups:
            fresh = []
            for at in positions:
                key = Held(brought, at).key
                if (asking := self._asking.get(key)) is not None:
                    waited[asking] = None
                elif key not in self._said:
                    fresh.append(at)
            if fresh:
                task = asyncio.get_running_loop().create_task(self._ask(brought, fresh, end, consumer))
                self._asking.update((Held(brought, at).key, task) for at in fresh)
                waited[task] = None
        await asyncio.shield(asyncio.gather(*waited))

    async def _ask(self, brought: Brought, positions: list[int], end: End, consumer: str) -> None:
        rows = brought.batch.rows
        if len(positions) < len(rows):
            rows = rows[np.asarray(positions, np.intp)]
        try:
            verdicts = await end.asked(brought, rows, consumer)
            for at, accepted in zip(positions, verdicts.tolist(), strict=True):
                self._said[Held(brought, at).key] = Said(end, accepted, brought)
        finally:
            for at in positions:
                del self._asking[Held(brought, at).key]

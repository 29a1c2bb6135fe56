"""A ring whose listeners are out of reach just when a trainer consumes what it took: claims in question."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from helpers import eventually, free

from transport import Schema, SharedRingBuffer, UCXXServer
from transport.claims.outcomes import Outcomes
from transport.queue import Claim

LONG_S = 30.0
NUMBERED = Schema.of(number=("int64",))


class Host:
    """A ring whose listeners come and go at one port."""

    def __init__(self, ring: SharedRingBuffer, patch: pytest.MonkeyPatch) -> None:
        self.ring = ring
        self._patch = patch
        self._served = contextlib.ExitStack()
        self.port = 0
        self.serve()

    def serve(self) -> None:
        server = UCXXServer(self.ring, ports=(self.port,), addresses=("127.0.0.1",), mode="thread")
        [self.port] = self._served.enter_context(server).ports
        self._patch.setattr(Outcomes, "patience_s", LONG_S)

    def end(self) -> None:
        self._served.close()
        self._patch.setattr(Outcomes, "patience_s", 0.3)

    def ends_between(self, claims: list[Claim]) -> None:
        """It consumes what is asked next, and is out of reach before it answers."""
        [link] = {claim.batch.claims.connection for claim in claims}  # type: ignore[attr-defined]
        outcome = link._outcome

        async def lost(future: Any, limit_s: float, what: str) -> Any:
            if what != "the end of claims":
                return await outcome(future, limit_s, what)
            link._outcome = outcome  # type: ignore[method-assign]
            eventually(lambda: free(self.ring), "the ring has consumed them")
            self.end()
            link.link.abort()
            return await outcome(future, limit_s, what)

        link._outcome = lost  # type: ignore[method-assign]

"""Payloads that came over a wire, as a part of a trainer's batch.

The lengths stand in the answer's tickets, so each tensor is copied once, from the answer's buffer to where it belongs,
while its checksum is taken. Payloads of a list stay in that buffer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from transport import _ring
from transport.claims.batch import CONSUME, ClaimedRows, End, Rows, Verdict
from transport.wires import Wire

_IN_QUESTION, _CONSUMED = int(Verdict.IN_QUESTION), int(Verdict.CONSUMED)  # numpy looks for attributes in a member


class TakenPart(_ring.ReceivedPayloads):
    """The payloads that one TAKE brought, or some of them. Belongs to one thread at a time.

    What is neither consumed nor given back goes back with the object. So do payloads that cannot be used;
    ``most_attempts`` of a later TAKE ends them. There is no object for one payload.

    Args:
        memory: an answer, see `_ring.ReceivedPayloads`; or another part, and how many of its first payloads leave it.

    Attributes:
        claims, owned, positions: what the payloads are claimed by; who keeps ``owned`` keeps the claims.
        ring: its id.
        wire: what carried the payloads.
    """

    def __init__(self, claims: ClaimedRows, owned: _ring.OwnedClaims, *memory: Any) -> None:
        super().__init__(*memory)
        self.claims = claims
        self.owned = owned
        self.positions = np.arange(owned.begin, owned.begin + len(owned))
        self.ring = claims.connection.ring
        self.wire: Wire = claims.connection.link.wire

    def __repr__(self) -> str:
        return f"<TakenPart of {len(self)} payloads, ring {self.ring[:4]}…>"

    @property
    def rows(self) -> Rows:
        """A row of `TAKEN` for each payload."""
        return self.claims.rows[self.positions]

    def first(self, count: int) -> TakenPart:
        """Return the first payloads as a part of their own, in the same memory; this one has the others."""
        owned = self.owned.take(int(self.positions[count - 1]) + 1 - self.owned.begin)
        part = TakenPart(self.claims, owned, self, count)
        part.positions, self.positions = self.positions[:count], self.positions[count:]
        return part

    # --- the ends of the claims -------------------------------------------------------------------
    def finish(self, keep: bool = False) -> None:
        """Ask the ring to consume the claims, or again what is in question, without waiting for the answer."""
        self.claims.end(self.positions, CONSUME)

    @property
    def answered(self) -> bool:
        """True if the ring has answered `finish`, or is out of reach."""
        return self.claims.answered(self.positions)

    def consumption(self) -> bytes:
        """Wait for the answer to `finish`: which claims count as consumed, 1 or 0 for each."""
        verdicts: npt.NDArray[np.int8] = self.claims.verdicts[self.positions]
        if int(verdicts.min(initial=_CONSUMED)) < _CONSUMED:
            self.claims.wait(self.positions)
            verdicts = self.claims.verdicts[self.positions]
        self.owned.settled()  # nothing goes back with the object
        return bytes(verdicts == _CONSUMED)

    def in_question(self) -> bytes:
        """Return 1 for each whose ring went out of reach before its answer, else 0."""
        return bytes(self.claims.verdicts[self.positions] == _IN_QUESTION)

    def consume(self, index: int) -> None:
        """Consume one payload, which leaves the part, without waiting for the answer."""
        self.leave_out(index, CONSUME)

    def leave_out(self, index: int, end: End) -> None:
        """End the claim of the payload so, which leaves the part, without waiting for the answer."""
        self.claims.end(self.positions[index : index + 1], end)
        self._leave(index)

    def drop(
        self,
        index: int,
        reason: str,
        dead: bool,
        consumer: str = "",
        delay_s: float = 0.0,
        in_vain: bool = True,
    ) -> None:
        """See `ClaimedPart`."""
        if dead:
            self.leave_out(index, End(Verdict.DEAD, reason, consumer))
            return
        self.claims.return_soon(self.positions[index : index + 1], delay_s, in_vain)
        self._leave(index)

    def _leave(self, index: int) -> None:
        self.leave(index)
        self.positions = np.delete(self.positions, index)

    def release(self, delay_s: float = 0.0, in_vain: bool = True) -> None:
        """See `ClaimedPart`."""
        self.claims.return_soon(self.positions, delay_s, in_vain)

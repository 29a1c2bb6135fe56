"""Payloads that came over a wire, as a part of a trainer's batch.

The lengths stand in the answer's tickets, so each tensor is copied once, from the answer's buffer to where it belongs,
while its checksum is taken. Payloads of a list stay in that buffer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from transport import _ring
from transport.claims.batch import CONSUME, ClaimedRows, End, Positions, TakenBatch, Verdict, Verdicts
from transport.runtime.loop_thread import Job, LoopThread
from transport.wires import Wire

_IN_QUESTION, _CONSUMED = int(Verdict.IN_QUESTION), int(Verdict.CONSUMED)  # numpy looks for attributes in a member

_COLUMNS = tuple("sequence" if name == "offset" else name for name in _ring.BATCH_COLUMNS)  # offsets are the pieces'


class TakenPart:
    """The payloads of a `TakenBatch` as a part of a batch. Any thread.

    What is neither consumed nor given back goes back with the object. So do payloads that cannot be used;
    ``most_attempts`` of a later TAKE ends them.

    Args:
        thread: whose loop is the connection's, for `consumption`.
        verified: whether the checksums were compared on arrival.

    Attributes:
        claims, owned, positions: what the payloads are claimed by; who keeps ``owned`` keeps the claims.
    """

    def __init__(self, taken: TakenBatch, thread: LoopThread | None = None, *, verified: bool = False) -> None:
        self._thread = thread
        self.claims = taken.claims
        self.owned = taken.owned
        self._rows = taken.rows
        self.positions = np.arange(taken.first, taken.first + len(taken))
        self.dropped = taken.dropped  # before it was a part
        self._received = taken.received(verified=verified)
        self._again: Job[Verdicts] | None = None  # the question about what is in question

    def __repr__(self) -> str:
        return f"<TakenPart of {len(self)} payloads>"

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def ring(self) -> str:
        """Whose payloads they are."""
        return self.claims.connection.ring

    @property
    def wire(self) -> Wire:
        """Name of the wire that carried the payloads."""
        wire: Wire = self.claims.connection.link.wire
        return wire

    def strange(self, fingerprint: str) -> list[int]:
        """Return the positions of payloads whose tickets name another schema."""
        return self._received.strange(fingerprint)

    def marked(self, text: bytes) -> list[int]:
        """See `ClaimedPart`."""
        return self._received.marked(text)

    # --- contents ---------------------------------------------------------------------------------
    def columns(self, out: npt.NDArray[np.int64]) -> None:
        """See `ClaimedPart`."""
        for row, name in zip(out, _COLUMNS, strict=True):
            row[:] = self._rows[name]

    def empty(self) -> list[int]:
        """Return the positions of payloads without bytes."""
        return self._received.empty()

    def measure(self, fields: _ring.BatchFields, out: Any) -> list[int]:
        """See `ClaimedPart`."""
        return self._received.measure(fields, out)

    def gather(
        self, fields: _ring.BatchFields, targets: list[tuple[Any, int, int, bool, bytes] | None], verify: bool
    ) -> list[int]:
        """See `ClaimedPart`."""
        return self._counted(self._received.gather(fields, targets, verify))

    def verify(self) -> list[int]:
        """See `ClaimedPart`."""
        return self._counted(self._received.verify())

    def _counted(self, wrong: list[int]) -> list[int]:
        if wrong:
            self.claims.soon(self.claims.connection.changed, len(wrong))
        return wrong

    def note(self, index: int) -> bytes:
        """See `ClaimedPart`."""
        return self._received.note(index)

    def place(self, index: int) -> tuple[Any, int]:
        """The read-only memory that has the payload's bytes, and where they begin in it."""
        return self._received.place(index)

    # --- the ends of the claims -------------------------------------------------------------------
    def drop(self, index: int, reason: str, dead: bool, consumer: str = "", delay_s: float = 0.0) -> None:
        """See `ClaimedPart`."""
        if dead:
            self.leave_out(index, End(Verdict.DEAD, reason, consumer))
            return
        self.claims.soon(self.claims.return_soon, self.positions[index : index + 1], delay_s, True)
        self._forget(index)

    def _forget(self, index: int) -> None:
        self._received.drop(index)
        self._rows = np.delete(self._rows, index)
        self.positions = np.delete(self.positions, index)

    def finish(self, keep: bool = False) -> None:
        """Ask the ring to consume the claims, or again what is in question, without waiting for the answer."""
        if self._thread is not None and self.in_question().any():
            self._again = Job(self._thread, partial(self.claims.end, self.positions, CONSUME))
            self._again.start()
        else:
            self.claims.soon(self.claims.end, self.positions, CONSUME)

    @property
    def answered(self) -> bool:
        """Whether the ring has answered, or is out of reach."""
        if self._again is not None and not self._again.done():
            return False
        return int(self.claims.verdicts[self.positions].min(initial=_IN_QUESTION)) >= _IN_QUESTION

    def consumption(self) -> bytes:
        """Wait for the answer to `finish`: which claims count as consumed. Asked again, it is the same."""
        if self._again is not None:  # whose verdicts are the former ones until it has begun
            self._again.wait(None)
            self._again = None
        if not self.answered:
            assert self._thread is not None, "consumption() waits for the loop of a thread"
            job: Job[None] = Job(self._thread, partial(self.claims.answered, self.positions))
            job.start()
            job.result()
        if self.answered:
            self.owned.settled()  # nothing goes back with the object
        verdicts: npt.NDArray[np.int8] = self.claims.verdicts[self.positions]
        return bytes(verdicts == _CONSUMED)

    def in_question(self) -> npt.NDArray[np.bool_]:
        """Tell for each whether its ring went out of reach before its answer."""
        found: npt.NDArray[np.bool_] = self.claims.verdicts[self.positions] == _IN_QUESTION
        return found

    def leave_out(self, index: int, end: End) -> None:
        """End the claim of the payload so, which leaves the part, without waiting for the answer."""
        self.claims.soon(_end_owned, self.claims, self.owned, self.positions[index : index + 1], end)
        self._forget(index)

    def release(self, delay_s: float = 0.0, in_vain: bool = True) -> None:
        """See `ClaimedPart`."""
        self.claims.soon(self.claims.return_soon, self.positions, delay_s, in_vain)


def _end_owned(claims: ClaimedRows, owned: _ring.OwnedClaims, positions: Positions, end: End) -> None:
    """End claims whose owner may be dropped meanwhile, which would give back what has no end yet. On the loop."""
    claims.end(positions, end)
    del owned

"""What one TAKE brought, as a part of a batch. Its payloads lie in the answer, its claims are the connection's."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import numpy.typing as npt

from transport import _ring
from transport.taking.batch import Holder, TakenBatch

_COLUMNS = tuple("sequence" if name == "offset" else name for name in _ring.BATCH_COLUMNS)  # offsets are the pieces'


class TakenPart:
    """The payloads of a `TakenBatch` for a batch in place; made in the thread of its connection, used in any.

    What is neither consumed nor given back goes back with the object. So do payloads that cannot be used;
    ``most_attempts`` of a later TAKE ends them.
    """

    def __init__(self, taken: TakenBatch, holder: Holder | None = None) -> None:
        self._link = taken.link if holder is None else holder  # who ends the claims
        self._rows = taken.rows
        self.dropped = taken.dropped  # before it was a part
        self._held = np.ones(len(taken), np.bool_)
        self._received = taken.received()

    def __repr__(self) -> str:
        return f"<TakenPart of {len(self)} payloads, {int(self._held.sum())} claimed>"

    def __len__(self) -> int:
        return len(self._rows)

    def __del__(self) -> None:
        if hasattr(self, "_received"):
            with contextlib.suppress(Exception):  # the interpreter may be ending
                self.release(in_vain=False)

    @property
    def ring(self) -> str:
        """Whose payloads they are."""
        return self._link.ring

    def schemas(self) -> list[str]:
        """Fingerprints that the tickets name, each once; "" for a ticket that cannot be read."""
        return self._received.schemas()

    # --- contents ---------------------------------------------------------------------------------
    def columns(self, out: npt.NDArray[np.int64]) -> None:
        """See `Part`."""
        for row, name in zip(out, _COLUMNS, strict=True):
            row[:] = self._rows[name]

    def measure(self, fields: _ring.BatchFields, out: Any) -> list[int]:
        """See `Part`."""
        return self._received.measure(fields, out)

    def gather(
        self, fields: _ring.BatchFields, targets: list[tuple[Any, int, int, bool, bytes] | None], verify: bool
    ) -> list[int]:
        """See `Part`."""
        return self._counted(self._received.gather(fields, targets, verify))

    def verify(self) -> list[int]:
        """See `Part`."""
        return self._counted(self._received.verify())

    def _counted(self, wrong: list[int]) -> list[int]:
        if wrong:
            self._link.changed(len(wrong))
        return wrong

    def note(self, index: int) -> bytes:
        """See `Part`."""
        return self._received.note(index)

    def place(self, index: int) -> tuple[Any, int]:
        """The read-only memory that has the payload's bytes, and where they begin in it."""
        return self._received.place(index)

    # --- the ends of the claims -------------------------------------------------------------------
    def drop(self, index: int, reason: str, dead: bool, consumer: str = "", delay_s: float = 0.0) -> None:
        """See `Part`."""
        del reason, dead, consumer
        if self._held[index]:
            self._link.let_go(self._rows[index : index + 1], delay_s)
        self._received.drop(index)
        self._rows = np.delete(self._rows, index)
        self._held = np.delete(self._held, index)

    async def finish(self, keep: bool = False) -> bytes:
        """Consume what was not consumed before: 1 or 0 for each. In the connection's loop.

        What is in question then is not ended: the next call asks the ring again.
        """
        del keep  # the memory is this process's own
        asked, self._held = self._held, np.zeros(len(self), np.bool_)
        accepted = np.zeros(len(self), np.bool_)
        if asked.any():
            try:
                accepted[asked] = await self._link.finish(self._rows[asked])
            except BaseException:  # cancelled, say: asked again, the connection has the same answer
                self._held |= asked
                raise
            if questions := self._link.in_question:
                for at in np.flatnonzero(asked).tolist():
                    self._held[at] = self._rows[at].tobytes() in questions
        return accepted.tobytes()

    def renew(self) -> int:
        """See `EndingPart`; by the connection, as far as this side knows. In the connection's loop."""
        if self._link.lost:
            return 0
        self._link.renew()
        return int(self._held.sum())

    def release(self, delay_s: float = 0.0, in_vain: bool = True) -> None:
        """See `Part`."""
        held, self._held = self._held, np.zeros(len(self), np.bool_)
        if held.any():
            self._link.let_go(self._rows[held], delay_s, in_vain)

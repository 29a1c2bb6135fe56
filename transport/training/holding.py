"""Holding: claims of a run's rings that a planner has taken, here and elsewhere, without a byte of their payloads.

    samples = holding.take(256, timeout_s=0.1)         # tickets and what rings say of them
    holding.consume(each.identity for each in samples) # asks, and does not wait
    holding.settle(note)                               # note({identity: True, …}), as the rings answer

    held ──consume──► asked ──(the ring's answer)──► consumed, or another's
      │                 ▲└────(out of reach)───────► in question, and held: `consume` asks again
      ├── give_back, close ──► may be claimed again
      ├── discard ──► dead
      └── (connection lost, lease over) ──► `lost`

Mapped rings answer at once. What became of claims elsewhere stands in their `ClaimedRows`, by position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np

from transport import _ring
from transport.claims.batch import CONSUME, ClaimedRows, End, Positions, Verdict
from transport.claims.rings import FoundRings
from transport.claims.taken_part import TakenPart
from transport.errors import ClosedError
from transport.ring.batch import columns_of
from transport.runtime.hiding import hiding
from transport.ticket import Identity, Ticket

_CONSUMED = int(Verdict.CONSUMED)
_CROWDED: Final = 0.75  # of a ring's slots, held by groups that wait: a warning says so


@hiding("note")
class HeldSample(NamedTuple):
    """A payload that was claimed, without its bytes; or the end of a group (`Ticket.ends_group`).

    Attributes:
        note: the encoded ticket.
        attempts, in_vain: how often the delivery was claimed, this time included; how often in vain before.
        size: bytes of the payload.
        version: of the policy that made it, where the writer said so.
    """

    identity: Identity
    note: bytes
    rank: int
    attempts: int
    in_vain: int
    size: int
    version: int | None

    @property
    def ticket(self) -> Ticket:
        """The ticket, decoded anew each time. TicketError: the writer has put something else there."""
        return Ticket.decode(self.note)


class _Here:
    """A claim of a mapped ring."""

    __slots__ = ("asked", "claim")

    def __init__(self, claim: _ring.ClaimedBatch) -> None:
        self.claim = claim
        self.asked = False

    @property
    def lost(self) -> bool:
        try:
            return not self.asked and not self.claim.renew()
        except ClosedError:
            return True

    def consumed(self) -> bool:
        """Consume; asked again, the answer is the same."""
        try:
            return self.claim.finish() == b"\1"
        except ClosedError:  # the claim has ended with its ring
            return False


class _There:
    """A claim of a ring elsewhere; goes back with the last that has ``owned``."""

    __slots__ = ("asked", "claims", "owned", "position")

    def __init__(self, claims: ClaimedRows, owned: _ring.OwnedClaims, position: int) -> None:
        self.claims = claims
        self.owned = owned
        self.position = position
        self.asked = False

    @property
    def lost(self) -> bool:
        return not self.asked and self.claims.connection.lost


_Held = _Here | _There
_Answer = tuple[Identity, _Held | None, bool | None]
_Group = list[tuple[Identity, _There]]  # of one answer, in its order
_Groups = dict[ClaimedRows, _Group]


class Holding:
    """Claims that a planner holds. Belongs to one thread.

    They last while the process lives and is heard, as a trainer's do: somebody calls `FoundRings.heard`.

    Args:
        rings: connected without contents, see `FoundRings.connect`.
        rank: whose deliveries; or the name of a consumer of one rank.
        consumer: names the holder in the rings' reports.
    """

    def __init__(self, rings: FoundRings, rank: int | str, consumer: str) -> None:
        self._rings = rings
        self._rank = rank
        self._consumer = consumer
        self._held: dict[Identity, _Held] = {}
        self._answers: list[_Answer] = []  # that were not passed to `settle`'s function yet
        self._asked: list[tuple[ClaimedRows, _Group]] = []  # of rings elsewhere, likewise
        self._closed = False

    def __repr__(self) -> str:
        return f"<Holding of {len(self)} claims, rank {self._rank}{' closed' if self._closed else ''}>"

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, identity: Identity) -> bool:
        return identity in self._held

    @property
    def identities(self) -> list[Identity]:
        """Identities of what is held, also where a ring was asked and has not answered."""
        return list(self._held)

    def take(self, n: int, timeout_s: float = 0.0, oldest_version: int | None = None) -> list[HeldSample]:
        """Claim up to ``n`` payloads, of each ring the oldest first; waits ``timeout_s`` for the first.

        What is older than ``oldest_version`` is discarded. A delivery whose claim was lost may come again.

        Raises:
            ClosedError: the holding is closed, or the rings are.
            WireNotAllowedError, AuthenticationError and the like: what keeps this process from every ring.
        """
        if self._closed:
            raise ClosedError("this holding is closed")
        samples: list[HeldSample] = []
        came: dict[Identity, _Held] = {}
        for part in self._rings.take_parts(
            n, timeout_s, rank=self._rank, consumer=self._consumer, oldest_version=oldest_version
        ):
            notes = [part.note(at) for at in range(len(part))]
            rows = columns_of([part]).T.tolist()
            for row, note, held in zip(rows, notes, _claims_of(part), strict=True):
                slot, generation, rank, attempts, size, version, _, in_vain = row
                identity = (part.ring, slot, generation)
                came[identity] = held
                known = None if version == _ring.NO_VERSION else version
                samples.append(HeldSample(identity, note, rank, attempts, in_vain, size, known))
        self._held.update(came)  # at once: what an interrupt leaves out goes back
        return samples

    # --- ends ---------------------------------------------------------------------------------------
    def consume(self, identities: Iterable[Identity]) -> None:
        """Ask the rings to consume what was learned, without a wait: `settle` has their answers, one for each."""
        here, there, strange = self._divided(identities)
        self._answers += [(identity, None, False) for identity in strange]
        for identity, held in here:
            held.asked = True
            self._answers.append((identity, held, held.consumed()))
        for claims, group in there.items():
            for _, each in group:
                each.asked = True
            claims.end(_positions(group), CONSUME)
            self._asked.append((claims, group))

    def settle(self, note: Callable[[Mapping[Identity, bool | None]], object]) -> None:
        """Tell ``note`` the answers that have come; those deliveries are held no longer then, but for None.

        True: consumed. False: its claim had ended, and others may have it, or this holding by another `take`. None: its
        ring went out of reach before it answered, so that it may have been consumed; `consume` asks it again.

        What ``note`` does may be done again: after an interrupt or an error the next call tells the same answers.
        """
        answered = [(claims, group) for claims, group in self._asked if claims.answered(_positions(group))]
        here = len(self._answers)
        answers = list(self._answers)
        for claims, group in answered:
            verdicts = claims.verdicts[_positions(group)].tolist()
            for (identity, held), verdict in zip(group, verdicts, strict=True):
                answers.append((identity, held, None if verdict < _CONSUMED else verdict == _CONSUMED))
        note({identity: consumed for identity, _, consumed in answers})
        for identity, claim, consumed in answers:
            if consumed is not None and self._held.get(identity) is claim:
                self._held.pop(identity, None)
        for each in answered:
            self._asked.remove(each)
        del self._answers[:here]

    def give_back(self, identities: Iterable[Identity], delay_s: float = 0.0, *, in_vain: bool = True) -> None:
        """Let others claim these after the delay; ``in_vain``: it counts towards ``max_deliveries``."""
        self._end(
            identities,
            lambda claim: claim.release(delay_s, in_vain),
            lambda claims, positions: claims.return_soon(positions, delay_s, in_vain),
        )

    def discard(self, identities: Iterable[Identity], reason: str) -> None:
        """Have these deliveries dead, for this reason: nobody gets them."""
        end = End(Verdict.DEAD, reason, self._consumer)
        self._end(
            identities,
            lambda claim: claim.drop(0, end.reason, True, end.consumer),
            lambda claims, positions: claims.end(positions, end),
        )

    def lost(self) -> set[Identity]:
        """Return what was held, and is not any more, since its connection broke or its lease is over; each once."""
        lost = {identity for identity, held in self._held.items() if held.lost}
        for identity in lost:
            del self._held[identity]
        return lost

    def rings(self) -> set[str]:
        """Return the ids of the rings from which claims can be taken at the moment."""
        return set(self._rings.slots())

    def all_written(self) -> bool:
        """Return whether no rollout writes any more, and the rings have only what is held."""
        held = Counter(ring for (ring, *_), held in self._held.items() if not held.asked)
        return self._rings.all_written(self._rank, held)

    def crowded(self) -> list[str]:
        """Return a sentence for each ring whose slots are nearly all held for what is not complete."""
        return self._rings.crowded(_CROWDED)

    def let_go(self) -> None:
        """Give back what is held and not asked about, uncounted, and ask for nothing until the next `take`."""
        self._rings.rest()
        self.give_back(list(self._held), in_vain=False)

    def close(self) -> None:
        """Let go of everything, for good. Idempotent; after an interrupt call it again."""
        if not self._closed:
            self.let_go()
            self._closed = True  # last, so that after an interrupt the next call finishes

    def _end(
        self,
        identities: Iterable[Identity],
        end_here: Callable[[_ring.ClaimedBatch], object],
        end_there: Callable[[ClaimedRows, Positions], object],
    ) -> None:
        """Let go of these; their claims end so, those elsewhere on the loop."""
        here, there, _ = self._divided(identities)
        for _, held in here:
            with suppress(ClosedError):  # the claim has ended with its ring
                end_here(held.claim)
        for claims, group in there.items():
            end_there(claims, _positions(group))
        for identity in [each for each, _ in here] + [each for group in there.values() for each, _ in group]:
            self._held.pop(identity, None)

    def _divided(self, identities: Iterable[Identity]) -> tuple[list[tuple[Identity, _Here]], _Groups, list[Identity]]:
        """Deliveries of mapped rings, of rings elsewhere by the answers that brought them, and what is not held."""
        here: list[tuple[Identity, _Here]] = []
        there: _Groups = {}
        strange: list[Identity] = []
        for identity in dict.fromkeys(identities):
            held = self._held.get(identity)
            if held is None:
                strange.append(identity)
            elif isinstance(held, _Here):
                here.append((identity, held))
            else:
                there.setdefault(held.claims, []).append((identity, held))
        for group in there.values():
            group.sort(key=lambda each: each[1].position)
        return here, there, strange


def _claims_of(part: _ring.ClaimedBatch | TakenPart) -> Sequence[_Held]:
    """Take the claims of a part apart."""
    if isinstance(part, TakenPart):
        return [_There(part.claims, part.owned, position) for position in part.positions.tolist()]
    return [_Here(claim) for claim in part.divide()]


def _positions(group: _Group) -> Positions:
    return np.array([held.position for _, held in group], np.intp)

"""Assembly: samples of several rings become complete groups. No I/O; the caller says what has come, and the time.

A sample is known by its origin: a restored one may come from two rings.

open ──as many samples as `of`──────────────────────► complete ──pick──► a step
  ├──end_group, all that its writer wrote, and SETTLE_S without another one──► complete with what there is
  ├──timeout, or the data is over──► short, or given up
  └──a sample is too old──► stale
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple, get_args

from transport.group import EndOf
from transport.runtime.hiding import hiding
from transport.ticket import Identity, Ticket

SETTLE_S: Final = 1.0  # in which samples of other rings come that were written before `end_group`


@hiding("note")
class Arrival(NamedTuple):
    """A sample whose claim is held.

    Attributes:
        group: its name; "": the sample is a group of its own.
        of: of how many samples the group is; None: not known.
        tokens: its size, for balancing.
        version: of the policy that made it; None: its writer gave none.
        note: its ticket, encoded.
        origin: the identity under which it was first written, which a record has.
    """

    identity: Identity
    group: str
    of: int | None
    tokens: int
    version: int | None
    note: bytes
    origin: Identity


class Group(Sequence[Ticket]):
    """A group of samples, as `Trainer.steps` gives it to ``choose``: a sequence of tickets.

    Attributes:
        name: that its rollouts gave it.
        of: of how many samples it should be; None: not known.
        marks: payloads that said its end, and what each was at first.
    """

    def __init__(self, name: str, since: float) -> None:
        self.name = name
        self.of: int | None = None
        self.since = since  # when its first sample came
        self.ended_at: float | None = None
        self.marks: dict[Identity, Identity] = {}
        self._written: dict[str, int] = {}  # by ring, as the ends say
        self.chosen = False
        self.samples: list[Arrival] = []

    def __repr__(self) -> str:
        return f"<Group {self.name!r} {len(self)} of {self.of or '?'} samples>"

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, at: Any) -> Any:
        """Return the ticket of a sample, decoded anew each time."""
        if isinstance(at, slice):
            return [Ticket.decode(each.note) for each in self.samples[at]]
        return Ticket.decode(self.samples[at].note)

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """Metadata that the writer gave with each sample."""
        return [ticket.users_metadata for ticket in self]

    @property
    def tokens(self) -> list[int]:
        """Size of each sample."""
        return [each.tokens for each in self.samples]

    @property
    def versions(self) -> list[int | None]:
        """Version of the policy that made each sample."""
        return [each.version for each in self.samples]

    @property
    def identities(self) -> list[Identity]:
        """All that the rings have of it."""
        return [*(each.identity for each in self.samples), *self.marks]

    @property
    def origins(self) -> list[Identity]:
        """Identities that all of these had at first."""
        return [*(each.origin for each in self.samples), *self.marks.values()]

    def ends(self, ring: str, written: int | None, now: float) -> None:
        """Note that a ring has its end, behind so many samples."""
        self.ended_at = now
        self._written[ring] = written or 0

    def goes_on(self) -> None:
        """Forget its end."""
        self.ended_at = None
        self._written.clear()

    @property
    def has_ended(self) -> bool:
        """True if it has an end, and the samples that were written before to the same ring."""
        came = Counter(each.origin[0] for each in self.samples)
        return self.ended_at is not None and all(came[ring] >= count for ring, count in self._written.items())

    def is_older_than(self, oldest: int) -> bool:
        """Tell whether the policy of any of its samples is older."""
        return any(each.version is not None and each.version < oldest for each in self.samples)


Reason = Literal["incomplete", "stale", "not chosen", "tail"]
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)


class GivenUp(NamedTuple):
    """A group that no step gets, and why: the reason in one word, and in a sentence."""

    group: Group
    reason: Reason
    why: str


class Assembly:
    """Groups that are open, and those that are complete.

    Args:
        timeout_s: after which an open group does not wait for more samples; None: for ever.
        short: a group that will not complete is trained with the samples that it has; else it is given up.
    """

    def __init__(self, *, timeout_s: float | None, short: bool) -> None:
        self._timeout_s = timeout_s
        self._short = short
        self._open: dict[str, Group] = {}
        self._complete: list[Group] = []
        self._known: dict[Identity, Identity] = {}  # by origin
        self._whole: set[str] = set()  # names of groups that are complete

    def __repr__(self) -> str:
        return f"<Assembly {len(self._complete)} complete, {len(self._open)} open groups>"

    @property
    def complete(self) -> Sequence[Group]:
        """Groups that a step can have, the oldest first."""
        return self._complete

    @property
    def open(self) -> Sequence[Group]:
        """Groups that wait for samples."""
        return list(self._open.values())

    def waits_for(self, name: str) -> bool:
        """Tell whether a group of this name waits for samples."""
        return name in self._open

    @property
    def open_count(self) -> int:
        """Number of groups that wait for samples; any thread."""
        return len(self._open)

    def __len__(self) -> int:
        return sum(map(len, self._open.values())) + sum(map(len, self._complete))

    def add(self, sample: Arrival, now: float) -> bool:
        """Note a sample that has come. False: its group is complete without it, or it is there from another ring.

        One that is there already came again, since its claim was lost for a moment.
        """
        if sample.origin in self._known or sample.group in self._whole:
            return self._known.get(sample.origin) == sample.identity
        self._known[sample.origin] = sample.identity
        if not sample.group:
            alone = Group("", now)
            alone.of, alone.samples = 1, [sample]
            self._complete.append(alone)
            return True
        group = self._open.setdefault(sample.group, Group(sample.group, now))
        group.samples.append(sample)
        group.of = sample.of if group.of is None else group.of
        if group.ended_at is not None:
            group.ended_at = now
        self._settle(group)
        return True

    def end(self, end: EndOf, mark: Identity, origin: Identity, now: float) -> bool:
        """Note that no more samples of a group are written, as the payload without fields at ``mark`` says.

        False: it is there from another ring, or its group is complete without it.
        """
        if origin in self._known or end.name in self._whole:
            return self._known.get(origin) == mark
        self._known[origin] = mark
        group = self._open.setdefault(end.name, Group(end.name, now))
        group.marks[mark] = origin
        if end.of is None:
            group.ends(origin[0], end.written, now)
        else:
            group.of = end.of
            self._settle(group)
        return True

    def _settle(self, group: Group) -> None:
        if group.of is not None and len(group) >= group.of:
            self._close(group)

    def _close(self, group: Group) -> None:
        del self._open[group.name]
        self._whole.add(group.name)
        self._complete.append(group)
        self._complete.sort(key=lambda each: each.since)

    def lose(self, identities: Iterable[Identity]) -> None:
        """Note samples whose claims are lost: they come again, or others have them. Their groups are open again."""
        lost = set(identities)
        for group in [*self._complete, *self._open.values()] if lost else []:
            if lost.isdisjoint(group.identities):
                continue
            for identity, origin in zip(group.identities, group.origins, strict=True):
                if identity in lost:
                    del self._known[origin]
            group.samples = [each for each in group.samples if each.identity not in lost]
            group.marks = {mark: origin for mark, origin in group.marks.items() if mark not in lost}
            if not group.marks:
                group.goes_on()
            if self._open.get(group.name) is group:
                if not group.identities:
                    del self._open[group.name]
                continue
            self._complete.remove(group)
            self._whole.discard(group.name)
            if group.identities:
                self._open[group.name] = group  # none of its name is open: what comes to a complete group is surplus

    def turn(self, now: float, over: bool, oldest: int | None) -> list[GivenUp]:
        """Close what waits no longer; returns the groups that no step gets.

        Args:
            over: no sample comes any more.
            oldest: version of a policy; a group with a sample of an older one is stale. None: none is.
        """
        given_up: list[GivenUp] = []
        for group in list(self._open.values()):
            if group.has_ended and (over or now >= (group.ended_at or 0.0) + SETTLE_S):
                if group.samples:
                    self._close(group)
                else:
                    given_up.append(self._left(group, "incomplete", "it has no samples"))
                continue
            late = self._timeout_s is not None and now >= group.since + self._timeout_s
            if not (over or late):
                continue
            if self._short and group.samples:
                self._close(group)
                continue
            after = "every rollout has ended" if over else f"none came for {now - group.since:.0f} s"
            why = f"{len(group)} of {group.of or '?'} samples came, and {after}"
            given_up.append(self._left(group, "incomplete", why))
        if oldest is not None:
            stale = [each for each in self._complete if each.is_older_than(oldest)]
            given_up += [self._left(each, "stale", f"a sample's version is below {oldest}") for each in stale]
        return given_up

    def _left(self, group: Group, reason: Reason, why: str) -> GivenUp:
        """Take a group out; its name may be that of another one."""
        self.leave(group)
        return GivenUp(group, reason, why)

    def pick(self, most: int) -> list[Group]:
        """Take the oldest complete groups, at most so many."""
        picked = self._complete[:most]
        for group in picked:
            self.leave(group)
        return picked

    def leave(self, group: Group) -> None:
        """Take a group out."""
        for origin in group.origins:
            del self._known[origin]
        if self._open.get(group.name) is group:
            del self._open[group.name]
        else:
            self._complete.remove(group)
            self._whole.discard(group.name)

"""The rules that all members of a run share: size, times, exit codes. Times in seconds, on monotonic clocks."""

from __future__ import annotations

import operator

import msgspec

from transport.errors import ConfigurationError
from transport.rendezvous.records import Closing, Reason

_MOST_BEAT_S = 3.0
_MOST_HOST_POLLS = 5


class ExitCodes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exit codes of a process by the run's end. A scheduler reads them."""

    success: int = 0
    failure: int = 1
    no_restart: int = 93  # the run failed, and starting it again would fail again

    def of(self, closing: Closing | None) -> int:
        """Return the code of a closing; None: the end is unknown, which is a failure."""
        codes = {Reason.SUCCESS: self.success, Reason.NO_RESTART: self.no_restart}
        return self.failure if closing is None else codes.get(closing.reason, self.failure)


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rules of a run, the same for all members; ``least`` and ``most`` are taken of the one that opens the first round.

    ConfigurationError for rules that contradict each other.

    Attributes:
        least: members that a round needs.
        most: members that get a rank; further ones are standby. None: as ``least``.
        lease_s: a member that does not renew its lease for so many seconds is gone.
        poll_s: longest time between two reads of the store; the host reads all members as often, or, where they are
            thousands, up to five times more rarely.
        join_timeout_s: the run fails if fewer than ``least`` members join a round in this time.
        last_call_s: how long a round waits for members of the previous one, and for more than ``least`` members. For a
            member of the previous one whose lease still runs it waits for ``lease_s`` at least.
        store_patience_s: a store that is unavailable for so long is lost.
        most_rounds: the run fails instead of opening one more round; None: no limit.
        grow: a spare ends a round that has fewer than ``most`` members, so that the next one has it as well. Since no
            newcomer misses a round then, a later one closes its gate after one poll, if nobody is missing that is known
            to be alive.
        done_stays: work that was reported as done stays done when its member ends. Such a member does not come back.
    """

    least: int = 1
    most: int | None = None
    lease_s: float = 10.0
    poll_s: float = 1.0
    join_timeout_s: float = 600.0
    last_call_s: float = 30.0
    store_patience_s: float = 60.0
    most_rounds: int | None = None
    grow: bool = False
    done_stays: bool = False
    exit_codes: ExitCodes = ExitCodes()

    @property
    def places(self) -> int:
        """``most``, spelled out."""
        return self.least if self.most is None else self.most

    @property
    def beat_s(self) -> float:
        """Seconds between renewals: two may fail before the lease ends, and a long lease covers a long outage."""
        return min(self.lease_s / 3, _MOST_BEAT_S)

    @property
    def settle_s(self) -> float:
        """Seconds for which a later round is open at least."""
        return min(self.poll_s, self.last_call_s) if self.grow else self.last_call_s

    def host_poll_s(self, members: int) -> float:
        """Return the seconds between the host's snapshots: up to five polls in a large run, as each reads everybody."""
        return min(max(members / 2000, self.poll_s), _MOST_HOST_POLLS * self.poll_s)

    def __post_init__(self) -> None:
        for name in ("least", "most", "most_rounds"):
            if (number := getattr(self, name)) is not None:
                try:
                    msgspec.structs.force_setattr(self, name, operator.index(number))  # numpy's are no JSON
                except TypeError:
                    raise ConfigurationError(f"{name}={number!r}: give a whole number") from None
        if not 1 <= self.least <= self.places:
            raise ConfigurationError(f"least={self.least}, most={self.most}: give 1 <= least <= most")
        for name in ("lease_s", "poll_s", "join_timeout_s", "store_patience_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigurationError(f"{name}={getattr(self, name)}: give seconds above 0")
        if not 0 <= self.last_call_s < self.join_timeout_s:
            raise ConfigurationError(
                f"last_call_s={self.last_call_s}: give 0 <= last_call_s < join_timeout_s={self.join_timeout_s}"
            )
        if self.most_rounds is not None and self.most_rounds < 1:
            raise ConfigurationError(f"most_rounds={self.most_rounds}: give 1 or more, or None")

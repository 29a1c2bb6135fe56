"""What callers pass to a queue, looked at before anything is done with it."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

from transport.config import lease_or_configured
from transport.errors import UsageError
from transport.queue.base import Claim
from transport.ring.claiming import check_claim
from transport.ring.consumers import check_consumer
from transport.runtime.arguments import at_least, seconds, several


def number(value: Any, what: str) -> int:
    """A whole number of 64 bits; also one of numpy's."""
    found = operator.index(value)
    if not -(2**63) <= found < 2**63:
        raise UsageError(f"{what} is {found}: give a whole number that 64 bits hold")
    return found


def number_or_none(value: Any, what: str) -> int | None:
    """A number that may be left out."""
    return None if value is None else number(value, what)


def most(value: Any, what: str) -> int:
    """How many are wanted; 0: none."""
    return at_least(0, number(value, what), what)


def lease(lease_s: float | None) -> float:
    """How long claims last: what the caller gave, else what the operator configured."""
    chosen = lease_or_configured(lease_s)
    seconds(chosen, "lease_s")
    if not 0 < chosen < math.inf:
        raise UsageError(f"lease_s={chosen}; give a number of seconds above 0, with an end")
    return float(chosen)


def claimed(n: Any, timeout_s: Any, rank: Any, oldest_version: Any) -> tuple[int, float, int | str, int | None]:
    """The arguments of a `claim`, without the consumer's name. UsageError, RankError: nothing can be claimed so."""
    n = number(n, "n of claim()")
    seconds(timeout_s, "timeout_s of claim()")
    rank = check_consumer(rank, "rank of claim()") if isinstance(rank, str) else number(rank, "rank of claim()")
    check_claim(n, rank)
    return n, float(timeout_s), rank, number_or_none(oldest_version, "oldest_version of claim()")


def held(claims: Iterable[Claim], call: str) -> list[Claim]:
    """The claims of a call, each once."""
    return list({(claim.token, claim.rank): claim for claim in several(claims, f"{call}()")}.values())


def delayed(delay_s: float, call: str) -> float:
    """The delay of claims that are given back."""
    seconds(delay_s, f"delay_s of {call}()")
    if math.isinf(delay_s):
        raise UsageError(f"delay_s of {call}() is infinite: this delivery would never be handed out again; discard it")
    return float(delay_s)


def waited_for(newer_than: Any, timeout_s: Any) -> tuple[int | None, float]:
    """The arguments of a `latest`, without the topic."""
    seconds(timeout_s, "timeout_s of latest()")
    return number_or_none(newer_than, "newer_than of latest()"), float(timeout_s)

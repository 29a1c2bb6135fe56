"""What callers pass to a queue, looked at before anything is done with it: the same words from every queue."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transport.queue.base import Claim, QueuedTicket
from transport.runtime.arguments import expect, seconds, several, whole

_TICKETS = "a QueuedTicket or several of them (transport.packer.rollout.queued makes one of a Ticket)"


def published(
    tickets: QueuedTicket | Iterable[QueuedTicket], readers: int, policy_version: int | None
) -> list[QueuedTicket]:
    """The tickets of a `publish`."""
    whole(readers, "readers of publish()")
    if policy_version is not None:
        whole(policy_version, "policy_version of publish()")
    batch = [tickets] if isinstance(tickets, QueuedTicket) else several(tickets, QueuedTicket, "publish()", _TICKETS)
    for ticket in batch:
        expect(ticket.id, str, "id of a QueuedTicket", "text")
        expect(ticket.data, bytes, "data of a QueuedTicket", "bytes, as Ticket.encode() makes them")
    return batch


def asked(ids: Iterable[str]) -> list[str]:
    """The ids of a `known`."""
    return several(ids, str, "known()", "several ids of tickets, in a list")


def claimed(n: Any, timeout_s: Any, rank: Any, consumer: Any, oldest_version: Any) -> None:
    """The arguments of a `claim`."""
    whole(n, "n of claim()")
    seconds(timeout_s, "timeout_s of claim()")
    whole(rank, "rank of claim()")
    expect(consumer, str, "consumer of claim()", "a name for reports")
    if oldest_version is not None:
        whole(oldest_version, "oldest_version of claim()")


def held(claims: Iterable[Claim], call: str) -> list[Claim]:
    """The claims of a call."""
    return several(claims, Claim, f"{call}()", "claims, several in a list")


def given_back(claim: Any, delay_s: Any, reason: Any, call: str) -> None:
    """The arguments of a `retry` or `discard`."""
    held([claim], call)
    seconds(delay_s, f"delay_s of {call}()")
    expect(reason, str, f"reason of {call}()", "text")


def noticed(topic: Any, version: Any, call: str) -> None:
    """Topic and version of a notice."""
    expect(topic, str, f"topic of {call}()", "text")
    if version is not None:
        whole(version, f"{'newer_than' if call == 'latest' else 'version'} of {call}()")


def counted(limit: Any, what: str) -> None:
    """A number that may be left out."""
    if limit is not None:
        whole(limit, what)

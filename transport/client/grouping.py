"""Which small payloads, or parts of payloads, share a message: groups of tickets of one ring."""

from __future__ import annotations

from transport.settings import Settings
from transport.ticket import Ticket

BATCH_BYTES = 256 << 10  # small payloads answered by one message


def grouped_parts(tickets: list[Ticket], fields: int, settings: Settings) -> list[list[tuple[int, Ticket]]]:
    """Groups of (index, ticket) of one ring whose parts of so many fields fit one message. Keeps a ring's order."""
    most = max(1, settings.records_per_message // 2 // fields)
    groups: list[list[tuple[int, Ticket]]] = []
    opened: dict[str, list[tuple[int, Ticket]]] = {}
    for indexed in enumerate(tickets):
        group = opened.get(indexed[1].ring)
        if group is None or len(group) >= most:
            group = opened[indexed[1].ring] = []
            groups.append(group)
        group.append(indexed)
    return groups


def grouped(tickets: list[Ticket], settings: Settings) -> list[list[tuple[int, Ticket]]]:
    """Groups of (index, ticket) whose payloads come in one answer; large ones are alone. Keeps a ring's order."""
    groups: list[list[tuple[int, Ticket]]] = []
    open_groups: dict[str, tuple[list[tuple[int, Ticket]], int]] = {}
    for indexed in enumerate(tickets):
        ticket = indexed[1]
        if ticket.size > settings.inline_limit:
            groups.append([indexed])
            continue
        group, size = open_groups.get(ticket.ring, ([], 0))
        # half of the records, so that acknowledgements fit into the message
        if not group or len(group) >= settings.records_per_message // 2 or size + ticket.size > BATCH_BYTES:
            group, size = [], 0
            groups.append(group)
        group.append(indexed)
        open_groups[ticket.ring] = (group, size + ticket.size)
    return groups

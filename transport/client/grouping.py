"""Which small payloads, or parts of payloads, share a message: groups of tickets of one ring."""

from __future__ import annotations

from transport.settings import Settings
from transport.ticket import Ticket

BATCH_BYTES = 512 << 10  # small payloads answered by one message


def grouped(tickets: list[Ticket], settings: Settings, fields: int | None = None) -> list[list[tuple[int, Ticket]]]:
    """Groups of (index, ticket) whose payloads come in one answer; large ones are alone. Keeps a ring's order.

    ``fields``: how many of each payload are wanted, whatever their size; None: whole payloads.
    """
    # half of the records, so that acknowledgements fit into the message
    most = max(1, settings.records_per_message // 2 // (fields or 1))
    groups: list[list[tuple[int, Ticket]]] = []
    open_groups: dict[str, tuple[list[tuple[int, Ticket]], int]] = {}
    for indexed in enumerate(tickets):
        ticket = indexed[1]
        own = ticket.size if fields is None else 0
        if own > settings.inline_limit:
            groups.append([indexed])
            continue
        group, size = open_groups.get(ticket.ring, ([], 0))
        if not group or len(group) >= most or size + own > BATCH_BYTES:
            group, size = [], 0
            groups.append(group)
        group.append(indexed)
        open_groups[ticket.ring] = (group, size + own)
    return groups

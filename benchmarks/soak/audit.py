"""Looks into the queue's file for what nobody lived to say."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path

from transport.queue import SQLiteQueue


def accepted(queue: Path, rank: int, tokens: Iterable[str]) -> list[str]:
    """Of these claims, those that the queue has accepted."""
    found = []
    connection = sqlite3.connect(f"file:{queue}?mode=ro", uri=True, timeout=30.0, isolation_level=None)
    try:
        for token in tokens:
            seq, attempts = token.split(":")
            row = connection.execute(
                "SELECT state, attempts FROM deliveries WHERE seq = ? AND rank = ?", (int(seq), rank)
            ).fetchone()
            if row == ("done", int(attempts)):
                found.append(token)
    finally:
        connection.close()
    return found


def reports(queue: SQLiteQueue, limit: int = 100_000) -> list[tuple[int, str, str]]:
    """(rank, ticket id, reason) of every delivery that the queue ended without consumption."""
    return [(each.rank, each.ticket_id, f"{each.reason}") for each in queue.failures(limit)]

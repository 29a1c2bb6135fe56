"""Amounts in messages: "1 ring", "2 rings"."""

from __future__ import annotations


def count(number: int, what: str) -> str:
    """Return so many of what is counted, as text."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"

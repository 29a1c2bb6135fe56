"""Removes credentials from messages: the environment's secrets, and signatures in URLs."""

from __future__ import annotations

import os
import re
from typing import Final

_SECRET_NAME: Final = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|ACCESS_KEY|API_KEY|PRIVATE", re.IGNORECASE)
_SHORTEST: Final = 6  # shorter values ("1", "auto") occur in any text
_IN_URLS: Final = (
    (re.compile(r"(\w+://)[^/\s@]+@"), r"\1***@"),
    (
        re.compile(
            r"((?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|AWSAccessKeyId|Signature|access_token|sig|token)=)"
            r"[^&\s\"'<>]+",
            re.IGNORECASE,
        ),
        r"\1***",
    ),
    (re.compile(r"((?:Authorization|Bearer)[:\s]+)(?:(?:Bearer|Basic)\s+)?\S+", re.IGNORECASE), r"\1***"),
)


def masked(text: str) -> str:
    """Return the text with ``***`` in place of secrets.

    A variable is a secret if its name says so; others are not masked.
    """
    values = {value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= _SHORTEST}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "***")
    for pattern, replacement in _IN_URLS:
        text = pattern.sub(replacement, text)
    return text

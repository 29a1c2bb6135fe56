"""Challenge and response with a shared secret; the secret itself never travels."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

NONCE_BYTES = 16


def nonce() -> bytes:
    """Fresh random bytes; one per side and handshake, so that no answer can be played back."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, side: Literal["client", "listener"], client_nonce: bytes, listener_nonce: bytes) -> bytes:
    """What only a holder of ``secret`` can compute. The side is part of it, so that a proof cannot be mirrored back."""
    message = b"transport-1 " + side.encode() + b"\0" + client_nonce + listener_nonce
    return hmac.digest(secret, message, hashlib.sha256)


def same(one: bytes, other: bytes) -> bool:
    """Equality in constant time."""
    return hmac.compare_digest(one, other)

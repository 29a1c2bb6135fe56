"""Challenge and response with a shared secret; the secret itself is never sent.

The proof (an HMAC) covers HELLO and the wire's version: a client and a listener that do not have both alike refuse each
other.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

from transport.errors import UsageError
from transport.wire import frames

NONCE_BYTES = 16


def checked_secret(secret: bytes | None) -> bytes | None:
    """Return a shared secret, or None for none. UsageError for anything else: text has several forms as bytes."""
    if secret is not None and not isinstance(secret, bytes):
        raise UsageError(f"secret is a {type(secret).__name__}: give bytes")
    return secret


def nonce() -> bytes:
    """Fresh random bytes, one nonce per side and handshake, so that no answer can be replayed."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(
    secret: bytes,
    side: Literal["client", "listener"],
    client_nonce: bytes,
    listener_nonce: bytes,
    hello: bytes,
) -> bytes:
    """Return the HMAC that only a holder of ``secret`` can compute; with the side, so that it cannot be reflected.

    Args:
        hello: body of HELLO, every byte as this side has sent or received it.
    """
    message = b"transport-%d %s\0" % (frames.VERSION, side.encode()) + client_nonce + listener_nonce
    message += hashlib.sha256(hello).digest()
    return hmac.digest(secret, message, hashlib.sha256)


def same(one: bytes, other: bytes) -> bool:
    """Equality in constant time."""
    return hmac.compare_digest(one, other)

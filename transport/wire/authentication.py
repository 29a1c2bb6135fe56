"""Challenge and response with a shared secret; the secret itself never travels.

The choice of the wire's version is part of what is proven, so that nobody in between can have two sides agree on less
than both know. Since version 2 a proof covers HELLO, which has the range on offer, and the version chosen. One of
version 1 does not; but both cover the listener's nonce, and a listener that chooses less than it knows says so there.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

NONCE_BYTES = 16
_MARK = b"knows"  # one nonce in 2**40 ends with it by chance, and then one connection is made anew
_FIRST_THAT_COVERS_HELLO = 2


def nonce() -> bytes:
    """Fresh random bytes; one per side and handshake, so that no answer can be played back."""
    return secrets.token_bytes(NONCE_BYTES)


def listener_nonce(chosen: int, newest: int) -> bytes:
    """The nonce of a listener that knows versions up to ``newest``. With an older one chosen, 80 bits are random."""
    if chosen >= newest:
        return nonce()
    marked = _MARK + bytes((min(newest, 255),))
    return secrets.token_bytes(NONCE_BYTES - len(marked)) + marked


def newest_known(listener_nonce: bytes) -> int:
    """The newest version of a listener that has chosen an older one, as its nonce says; 0: it says nothing."""
    return listener_nonce[-1] if listener_nonce[:-1].endswith(_MARK) else 0


def proof(
    secret: bytes,
    side: Literal["client", "listener"],
    client_nonce: bytes,
    listener_nonce: bytes,
    *,
    version: int,
    hello: bytes,
) -> bytes:
    """What only a holder of ``secret`` can compute. The side is part of it, so that a proof cannot be mirrored back.

    Args:
        version: the one that the listener has chosen.
        hello: body of HELLO, every byte as this side has sent or received it.
    """
    message = b"transport-%d %s\0" % (version, side.encode()) + client_nonce + listener_nonce
    if version >= _FIRST_THAT_COVERS_HELLO:
        message += hashlib.sha256(hello).digest()
    return hmac.digest(secret, message, hashlib.sha256)


def same(one: bytes, other: bytes) -> bool:
    """Equality in constant time."""
    return hmac.compare_digest(one, other)

"""Challenge and response with a shared secret; the secret itself is never sent.

The proof (an HMAC) covers the choice of the wire version, so that an attacker in the middle cannot downgrade it. Since
version 2 it covers HELLO, which contains the offered range, and the chosen version. A proof of version 1 does not; but
both cover the listener's nonce, and a listener that chooses less than its newest version marks the nonce.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

NONCE_BYTES = 16
_MARK = b"knows"  # one nonce in 2**40 contains it by chance; that connection is refused and tried again
_FIRST_THAT_COVERS_HELLO = 2


def nonce() -> bytes:
    """Fresh random bytes, one nonce per side and handshake, so that no answer can be replayed."""
    return secrets.token_bytes(NONCE_BYTES)


def listener_nonce(chosen: int, newest: int) -> bytes:
    """The nonce of a listener that supports versions up to ``newest``. If it chose an older one, 80 bits are random."""
    if chosen >= newest:
        return nonce()
    marked = _MARK + bytes((min(newest, 255),))
    return secrets.token_bytes(NONCE_BYTES - len(marked)) + marked


def newest_known(listener_nonce: bytes) -> int:
    """The newest version of a listener that chose an older one, from its nonce; 0: the nonce has no mark."""
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
    """The HMAC that only a holder of ``secret`` can compute. It includes the side, so that it cannot be reflected.

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

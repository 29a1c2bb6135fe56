"""Challenge and response: what a proof depends on."""

from __future__ import annotations

from typing import Any

from transport.wire.authentication import proof

CLIENT_NONCE = bytes(16)
LISTENER_NONCE = bytes(range(16))


def made(**changes: Any) -> bytes:
    arguments = {
        "secret": b"secret",
        "side": "client",
        "client_nonce": CLIENT_NONCE,
        "listener_nonce": LISTENER_NONCE,
        "version": 2,
        "hello": b"hello",
        **changes,
    }
    return proof(**arguments)


def test_proof_golden() -> None:
    # Checked with: (printf 'transport-2 client\0…'; printf hello | openssl dgst -sha256 -binary) |
    #               openssl dgst -sha256 -hmac secret
    assert made().hex() == "92a644fbf3cfe06ad147af112b55c3af0791ec025b57d043fb0dc37bb42192aa"
    assert made(side="listener").hex() == "549d1aa90acb6ad1b4e65dd9e1adef7ffacf017c71dc274762071e87a3b9590a"


def test_proof_depends_on_secret_side_both_nonces_version_and_hello() -> None:
    proofs = [
        made(),
        made(secret=b"Secret"),
        made(secret=b""),
        made(side="listener"),
        made(client_nonce=LISTENER_NONCE),
        made(listener_nonce=CLIENT_NONCE),
        made(client_nonce=LISTENER_NONCE, listener_nonce=CLIENT_NONCE),
        made(version=1),
        made(version=3),
        made(hello=b"Hello"),
    ]
    assert len(set(proofs)) == len(proofs)

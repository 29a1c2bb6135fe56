"""Challenge and response: what a proof depends on."""

from __future__ import annotations

from typing import Any

import pytest

from transport.wire import frames
from transport.wire.authentication import proof

CLIENT_NONCE = bytes(16)
LISTENER_NONCE = bytes(range(16))


def made(**changes: Any) -> bytes:
    arguments = {
        "secret": b"secret",
        "side": "client",
        "client_nonce": CLIENT_NONCE,
        "listener_nonce": LISTENER_NONCE,
        "hello": b"hello",
        **changes,
    }
    return proof(**arguments)


def test_proof_golden() -> None:
    # Checked with: (printf 'transport-10 client\0…'; printf hello | openssl dgst -sha256 -binary) |
    #               openssl dgst -sha256 -hmac secret
    assert made().hex() == "605697c750d7bea6bdd0c47daafa7c470f9facb143db1f2a65f1770ce64e9eb0"
    assert made(side="listener").hex() == "adac4442e23f44b4c1ac4e9faa36322b5f4a929f97dfc1ab39cc8a21dd150105"


def test_proof_depends_on_secret_side_both_nonces_version_and_hello(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proofs = [
        made(),
        made(secret=b"Secret"),
        made(secret=b""),
        made(side="listener"),
        made(client_nonce=LISTENER_NONCE),
        made(listener_nonce=CLIENT_NONCE),
        made(client_nonce=LISTENER_NONCE, listener_nonce=CLIENT_NONCE),
        made(hello=b"Hello"),
    ]
    monkeypatch.setattr(frames, "VERSION", frames.VERSION + 1)
    proofs.append(made())
    assert len(set(proofs)) == len(proofs)

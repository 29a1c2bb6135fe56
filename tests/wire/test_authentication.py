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
    # Checked with: (printf 'transport-9 client\0…'; printf hello | openssl dgst -sha256 -binary) |
    #               openssl dgst -sha256 -hmac secret
    assert made().hex() == "20968cdf232fee2aa862f556316a572bd1f147e43e8248dfcb877b2a58bfeba4"
    assert made(side="listener").hex() == "b026ac53d46eed1a8b7892072641e98dd90bde684346d6b08743487305ebcaf0"


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

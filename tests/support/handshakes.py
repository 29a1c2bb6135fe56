"""What the tests of handshakes share: a listener's messages, and a client that opens a scripted endpoint."""

from __future__ import annotations

from typing import Any

from scripted_endpoint import ScriptedEndpoint, ScriptedWorker
from scripted_listener import RING

from transport.client.connections.connection import Link
from transport.errors import (
    AuthenticationError,
    BusyError,
    LengthMismatchError,
    ProtocolError,
    RankError,
    RingEndedError,
    StaleSlotError,
    TransportError,
    VersionMismatchError,
    WrongKeyError,
    WrongRingError,
)
from transport.settings import Settings
from transport.wire import frames as wire
from transport.wire.frames import Challenge, Welcome

OURS, THEIRS = 0x11111111, 0x22222222  # tag bases
LISTENER_NONCE = bytes(range(16))


def welcome(**changes: Any) -> Welcome:
    fields = {"version": wire.VERSION, "ring": RING, "tag_base": THEIRS, "ports": (5, 6), "inline_limit": 100}
    return Welcome(**{**fields, **changes})


def challenge(proof: bytes, nonce: bytes = LISTENER_NONCE, version: int = wire.VERSION) -> Challenge:
    return Challenge(nonce, proof, version)


def opening(endpoint: ScriptedEndpoint, **options: Any) -> Any:
    settings = Settings(**options.pop("settings", {}))
    arguments: dict[str, Any] = {"ring": RING, "tag_base": OURS, "secret": None, "settings": settings, **options}
    return Link.open(ScriptedWorker(endpoint), "host", 5, **arguments)  # type: ignore[arg-type]


CODES: dict[int, type[TransportError]] = {
    1: StaleSlotError,
    2: WrongKeyError,
    3: WrongRingError,
    4: VersionMismatchError,
    5: AuthenticationError,
    6: RankError,
    7: LengthMismatchError,
    8: BusyError,
    9: ProtocolError,
    11: RingEndedError,
}

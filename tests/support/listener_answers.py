"""What a scripted listener answers to a request."""

from __future__ import annotations

from typing import Any

from scripted_listener import (
    Side,
)

from transport.wire.frames import Answer


async def answer(side: Side, *answers: Answer, payloads: dict[int, Any] | None = None, first: bool = False) -> int:
    """Answer the next message; payloads that are messages of their own go behind the answer, or before it."""
    number, _ = await side.asked()

    async def send() -> None:
        for position, data in (payloads or {}).items():
            await side.payload(number, position, data)

    if first:
        await send()
    await side.status(number, *answers)
    if not first:
        await send()
    return number

"""Looks into the queue for what nobody lived to say: which claims of a killed trainer it has accepted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from transport import SharedRingBuffer
from transport._ring import segments
from transport.errors import MissingDependencyError, TransportError
from transport.storage.urls import RedisURL, parse_url

Question = tuple[int, str]  # rank, token of the claim
_PATIENCE_S = 1.0


class Row(msgspec.Struct):
    """One delivery, as the queue has it."""

    state: str
    token: str


def ended(prefix: str, questions: Iterable[Question]) -> set[Question]:
    """Of claims of the rings that are named so: those whose delivery has ended, whoever ended it.

    A slot says that a rank is done with its payload, and not through which claim. A ring that is gone had no payload
    left, or gave it up.
    """
    rings = {}
    with contextlib.ExitStack() as attached:
        for name in segments():
            if name.startswith(f"/transport-{prefix}"):
                with contextlib.suppress(TransportError):  # gone again, or being made
                    ring = attached.enter_context(SharedRingBuffer.attach(name, role="observer"))
                    rings[ring.ring_id] = ring
                    continue
                return set()
        return {question for question in questions if _has_ended(rings, *question)}


def _has_ended(rings: Mapping[str, SharedRingBuffer], rank: int, token: str) -> bool:
    ring_id, slot, generation = token.partition("|")[0].split("/")
    if ring_id not in rings:
        return True
    info = rings[ring_id].native.info(int(slot))
    return info.generation > int(generation) or bool(info.done >> rank & 1)


def fates(queue: str, questions: Iterable[Question]) -> dict[Question, bool]:
    """Whether the queue has accepted each claim, as far as that is decided; empty while the queue is away."""
    url = parse_url(queue)
    assert isinstance(url, RedisURL)
    decided: dict[Question, bool] = {}
    for question, row in _rows(url, list(questions)).items():
        mine = row is not None and row.token == question[1]
        if row is None or not mine or row.state != "claimed":  # else it may be accepted yet, until its lease ends
            decided[question] = mine and row is not None and row.state == "done"
    return decided


def _rows(url: RedisURL, questions: list[Question]) -> dict[Question, Row | None]:
    try:
        import redis
    except ImportError as error:
        raise MissingDependencyError(str(error)) from error
    client = redis.Redis.from_url(url.url, socket_timeout=_PATIENCE_S, socket_connect_timeout=_PATIENCE_S)
    try:
        fields = [f"{token.partition(':')[0]}/{rank}" for rank, token in questions]
        rows: Any = client.hmget(f"transport:{{{url.run}}}:queue:rows", fields)
    except (redis.exceptions.RedisError, OSError):
        return {}
    finally:
        client.close()
    return {
        question: None if row is None else msgspec.msgpack.decode(row, type=Row)
        for question, row in zip(questions, rows, strict=True)
    }

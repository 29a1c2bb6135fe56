"""Log lines: text for people, JSON with ticket, port and attempt for machines."""

from __future__ import annotations

import json
import logging

import pytest
from helpers import dead_port

from transport import BlockingClient, Settings, SharedRingBuffer
from transport.errors import RetriesExhaustedError
from transport.runtime.logs import JsonLines


def record(level: int = logging.WARNING, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("transport.x", level, __file__, 1, "port %d is gone", (7,), None)
    made.__dict__.update(extra)
    return made


def test_a_line_is_one_object_with_what_it_speaks_of() -> None:
    line = JsonLines("listener").format(record(ticket="ab/1/2", port="h:7", attempt=3, unrelated="x"))
    assert "\n" not in line
    found = json.loads(line)
    assert (found["level"], found["logger"], found["who"]) == ("WARNING", "transport.x", "listener")
    assert (found["message"], found["ticket"], found["port"], found["attempt"]) == (
        "port 7 is gone",
        "ab/1/2",
        "h:7",
        3,
    )
    assert "unrelated" not in found
    assert "traceback" not in found


def test_half_of_a_surrogate_pair_loses_no_line() -> None:
    found = json.loads(JsonLines("\udcff").format(record(ticket="\udcff/1/2")).encode())
    assert (found["who"], found["ticket"], found["message"]) == ("?", "?/1/2", "port 7 is gone")


@pytest.mark.ucx
def test_failed_attempts_name_ticket_port_and_attempt(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(backoff_first_s=0.01, backoff_most_s=0.02)
    with (
        caplog.at_level("INFO", "transport"),
        dead_port() as port,
        SharedRingBuffer.create(slots=1, slot_bytes=64) as ring,
    ):
        ring.native.addresses = "127.0.0.1"
        ring.native.set_ports((port,))
        ticket = ring.write({"a": 1})
        with (
            BlockingClient(wire={"tcp"}, settings=settings) as client,
            pytest.raises(RetriesExhaustedError),
        ):
            client.read(ticket)
    attempts = [json.loads(JsonLines().format(each)) for each in caplog.records if hasattr(each, "attempt")]
    assert [line["attempt"] for line in attempts] == [1, 2]
    assert {line["ticket"] for line in attempts} == {f"{ticket.ring}/{ticket.slot}/{ticket.generation}"}
    assert {line["port"] for line in attempts} == {f"127.0.0.1:{port}"}

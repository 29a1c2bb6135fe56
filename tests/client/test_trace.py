"""Traces: each read's phases, in the format that chrome://tracing and Perfetto read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import NETWORK, NETWORK_WIRE, dead_port

from transport import BlockingClient, Settings, SharedRingBuffer, StaleSlotError, UCXXServer
from transport.client.trace import Trace, events, key_of, merge
from transport.errors import RetriesExhaustedError


def phases(path: Path) -> list[tuple[str, str, dict[str, object]]]:
    """Name, id and arguments of every span and instant, in the order of their ends."""
    return [(each["name"], each["id"], each["args"]) for each in events(path) if each["ph"] in "bn"]


@pytest.mark.ucx
def test_a_read_over_a_wire_has_its_phases(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with SharedRingBuffer.create(slots=2, slot_bytes=16 << 20) as ring, UCXXServer(ring, mode="thread"):
        ticket = ring.write_raw(bytes(16 << 20))
        with Trace(path, "reader") as trace, BlockingClient(wire=NETWORK, trace=trace) as client:
            client.read(ticket).release()
    found = {name: (key, about) for name, key, about in phases(path)}
    assert set(found) == {"connect", "transfer", "verify", "acknowledge", "read"}
    assert {key for key, _ in found.values()} == {key_of(ticket)}
    assert found["read"][1] == {"outcome": NETWORK_WIRE, "rank": 0, "bytes": 16 << 20}
    assert found["transfer"][1]["wire"] == NETWORK_WIRE
    begun = {each["name"]: each["ts"] for each in events(path) if each["ph"] == "b"}
    ended = {each["name"]: each["ts"] for each in events(path) if each["ph"] == "e"}
    assert begun["read"] <= begun["connect"] <= ended["connect"] <= begun["transfer"] <= ended["transfer"]
    assert ended["transfer"] <= begun["verify"] <= ended["verify"] <= ended["read"]


@pytest.mark.ucx
def test_failures_and_pauses_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    settings = Settings(backoff_first_s=0.01, backoff_most_s=0.02)
    with dead_port() as port, SharedRingBuffer.create(slots=1, slot_bytes=64) as ring:
        ring.native.addresses = "127.0.0.1"
        ring.native.set_ports((port,))
        ticket = ring.write({"a": 1})
        with (
            Trace(path, "reader") as trace,
            BlockingClient(wire=NETWORK, settings=settings, trace=trace) as client,
            pytest.raises(RetriesExhaustedError),
        ):
            client.read(ticket)
    found = phases(path)
    assert ("read", key_of(ticket), {"outcome": "RetriesExhaustedError", "rank": 0, "bytes": ticket.size}) in found
    assert "back-off" in [name for name, *_ in found]


def test_mapped_reads_are_traced_and_refusals_named(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with (
        SharedRingBuffer.create(slots=2, slot_bytes=64) as ring,
        Trace(path, "reader") as trace,
        BlockingClient(trace=trace) as client,
    ):
        ticket = ring.write({"a": 1})
        client.read(ticket).release()
        with pytest.raises(StaleSlotError):
            client.read(ticket)
    assert [about["outcome"] for name, _, about in phases(path) if name == "read"] == ["mapped", "StaleSlotError"]


def test_files_of_several_processes_become_one_document(tmp_path: Path) -> None:
    for name in ("b", "a"):
        with Trace(tmp_path / name, name) as trace:
            trace.span("read", f"key {name}", 1.0, bytes=3)
    with (tmp_path / "a").open("a") as torn:
        torn.write('{"name": "half a li')  # of a process that was killed
    count = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all.json")
    document = json.loads((tmp_path / "all.json").read_text())
    assert len(document["traceEvents"]) == count == 2 * 3
    assert [each.get("ts", 0) for each in document["traceEvents"]] == sorted(
        each.get("ts", 0) for each in document["traceEvents"]
    )
    assert {each["args"]["name"] for each in document["traceEvents"] if each["ph"] == "M"} == {"a", "b"}


def test_spans_after_the_end_are_dropped(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace", "x")
    trace.close()
    trace.close()
    trace.instant("acknowledge", "key")
    assert [each["ph"] for each in events(tmp_path / "trace")] == ["M"]


def test_a_full_disk_ends_the_trace_with_one_line_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("ERROR"), Trace("/dev/full", "trainer 0") as trace:
        for _ in range(500):  # more than is buffered
            trace.span("read", "ring/0/1", 0.0, bytes=1)
    with caplog.at_level("ERROR"), Trace("/dev/full", "trainer 0") as trace:
        trace.instant("acknowledge", "ring/0/1")  # which fails as it closes
    assert [record.getMessage() for record in caplog.records] == [
        "the trace /dev/full ends here: No space left on device"
    ] * 2

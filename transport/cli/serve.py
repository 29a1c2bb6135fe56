"""``transport serve``: creates a ring that other processes write into, and serves it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from transport.cli.output import JsonTarget
from transport.errors import UsageError
from transport.runtime.amounts import count

if TYPE_CHECKING:
    from transport.ring.buffer import SharedRingBuffer
    from transport.runtime.signals import Stopped

log = logging.getLogger(__name__)

EXAMPLE = "Example: transport serve --schema episode.json --slots 64 --ports 7000,7001 --name episodes"


class ServerReady(msgspec.Struct, frozen=True, kw_only=True):
    """The line printed when the server is ready; with --json the same as JSON."""

    segment: str
    ring: str
    addresses: tuple[str, ...]
    ports: tuple[int, ...]
    slots: int
    slot_bytes: int
    metrics_port: int | None

    def __str__(self) -> str:
        """One line: the addresses of the listeners, and the segment that writers attach to."""
        from transport.wire.addresses import host_port

        where = " ".join(host_port(self.addresses[0], port) for port in self.ports)
        metrics = f" metrics {self.metrics_port}" if self.metrics_port is not None else ""
        return f"{where} segment {self.segment} {self.slots} slots of {self.slot_bytes} bytes{metrics}"


def serve(
    schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON of the payloads' schema, as Schema.to_json() writes it. Default: payloads describe themselves.",
        ),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Slots of the ring: payloads that it holds at a time.")] = 64,
    slot_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes of the largest payload. Default: the schema's largest payload."),
    ] = None,
    ports: Annotated[str, typer.Option(metavar="PORT,…", help="Ports, one listener for each; 0: any free port.")] = "0",
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the ring; a restart with the same name takes over its unread payloads. Default: random."
        ),
    ] = None,
    drain: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds to wait at the end until unread payloads are read; a second Ctrl-C ends the wait.",
        ),
    ] = 0.0,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port of the Prometheus metrics; 0: any free port. Default: as configured."
        ),
    ] = None,
    json_target: JsonTarget = None,
) -> None:
    """Create a ring and serve it until SIGTERM or Ctrl-C. Other processes of this user write into it.

    A writer attaches with SharedRingBuffer.attach(segment, schema, role="writer"); at most 16 processes attach. The
    data end when all attached writers have called end_data(): attach those of a job before the first of them ends.
    """
    from transport.bench.units import parse_numbers, parse_size
    from transport.config import load
    from transport.observe.metrics import Exporter
    from transport.ring.buffer import SharedRingBuffer
    from transport.runtime.interruption import owning_segment
    from transport.runtime.logs import set_up_logging
    from transport.runtime.signals import until_stopped
    from transport.schema import Schema
    from transport.server.server import UCXXServer

    if schema is None and slot_bytes is None:
        raise UsageError("give --schema FILE, or --slot-bytes SIZE for payloads that describe themselves")
    configuration = load().configuration
    set_up_logging(configuration.log_level, configuration.log_format, "serve")
    wanted = parse_numbers("--ports", ports, 0, 65535)
    layout = None if schema is None else Schema.from_json(schema.read_bytes())
    largest = None if slot_bytes is None else parse_size(slot_bytes)
    metrics = configuration.metrics_port if metrics_port is None else metrics_port
    with (
        until_stopped(drain, starting=True) as stopped,
        SharedRingBuffer.create(layout, slots=slots, slot_bytes=largest, name=name, begins=False) as ring,
        owning_segment(ring.name),
        _unread_kept_by_a_failed_start(ring, stopped),
    ):
        ring.only_serve()
        server = UCXXServer(
            ring,
            wanted,
            addresses=configuration.addresses or None,
            bind=configuration.bind,
            settings=configuration.settings,
            secret=configuration.secret(),
            wires=configuration.server_wires,
            log_level=configuration.log_level,
            log_format=configuration.log_format,
        )
        exporter = None if metrics is None else Exporter(metrics, configuration.metrics_bind)
        try:
            if exporter is not None:
                exporter.add_ring(ring)
            server.start()
            ring.begin_data()
            stopped.starting = False
            serving = ServerReady(
                segment=ring.name,
                ring=ring.ring_id,
                addresses=server.addresses,
                ports=server.ports,
                slots=ring.slot_count,
                slot_bytes=ring.slot_capacity,
                metrics_port=None if exporter is None else exporter.port,
            )
            _say(serving, json_target)
            log.info("ready: %s", serving)
            stopped.wait()
        finally:
            log.info(
                "stopping: %s unread, waiting up to %.0f s for the readers",
                count(ring.get_ready_count(), "payload"),
                drain,
            )
            server.close(drain, told_s=drain)
            if exporter is not None:
                exporter.close()


@contextlib.contextmanager
def _unread_kept_by_a_failed_start(ring: SharedRingBuffer, stopped: Stopped) -> Iterator[None]:
    """Leave the payloads of a ring that was taken over as they were found, where the start fails."""
    try:
        yield
    except Exception:  # not for Ctrl-C, which ends the ring as well
        if stopped.starting:
            ring.close(keep_unread=ring.native.taken_over)
        raise


def _say(serving: ServerReady, json_target: str | None) -> None:
    """Print one line and flush it: the starting process waits for it."""
    document = msgspec.json.encode(serving).decode()
    if json_target not in (None, "-"):
        Path(json_target).write_text(f"{document}\n", encoding="utf-8")
    print(document if json_target == "-" else serving)
    sys.stdout.flush()

"""``transport read``: fetches one payload by its ticket."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from transport.cli.output import JsonTarget, emit, naming

if TYPE_CHECKING:
    import numpy as np

    from transport.client.client import WirePolicy
    from transport.client.payload import Payload
    from transport.schema import Schema
    from transport.ticket import Ticket
    from transport.wires import Wire

EXAMPLE = "Example: transport read ticket.txt --schema episode.json --out episode.npz"


def read(
    ticket: Annotated[str, typer.Argument(metavar="TICKET", help="The ticket's text or JSON, or a file with it.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Write the arrays to this file. Default: show them only.")
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON of the ring's schema, for payloads that do not describe themselves."),
    ] = None,
    wire: Annotated[
        str | None,
        typer.Option(
            metavar="WIRE,…", help="Allowed wires: auto, or some of mapped, shm, tcp, rdma. Default: as configured."
        ),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, max=15, help="Rank to read as, of the payload's readers.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the payload.")] = 10.0,
    consume: Annotated[
        bool, typer.Option("--consume", help="Consume the payload, so that this rank's trainer does not get it.")
    ] = False,
    json_target: JsonTarget = None,
) -> None:
    """Fetch one payload and show its arrays. The payload remains for its trainer unless --consume is given.

    In the file, bfloat16 and float8 arrays are unsigned integers of the same bits, because .npz lacks these types;
    text, bytes and nested values are the bytes that stand for them.
    """
    wanted = _ticket(ticket)
    schemas = [] if schema is None else [_schema(schema)]

    from transport.client.blocking import BlockingClient
    from transport.config import configuration

    operator = configuration()
    named: WirePolicy = (
        "auto" if wire == "auto" else cast("list[Wire]", (wire or "").split(","))
    )  # the client checks them
    policy = operator.wire_policy if wire is None else named
    with BlockingClient(
        schemas=schemas, wire=policy, ack="manual", secret=operator.secret(), settings=operator.settings
    ) as client:
        payload = client.read(wanted, rank=rank, timeout=timeout)
        arrays = _arrays(payload)
        if out is not None:
            _save(_as_bytes(payload, arrays), out)
        emit(_description(payload, arrays), _table(payload, arrays, out), json_target)
        if consume:
            payload.ack()
        arrays.clear()
        payload.release()


def _ticket(source: str) -> Ticket:
    """Return the ticket that is in this file, or is this text."""
    from transport.errors import TicketError
    from transport.ticket import Ticket

    try:
        content: str | bytes = Path(source).read_bytes()
        what = f"the file {source}"
    except PermissionError:
        raise
    except (OSError, ValueError):  # no file, or a text that cannot be the name of one
        content = source
        what = f"TICKET {source[:40]!r} is not a file, and its text"
    try:
        return Ticket.parse(content)
    except TicketError as error:
        raise TicketError(
            f"{what} is not a ticket: {error}; give what Ticket.to_text() or to_json() returned, or a file with it"
        ) from error


def _schema(path: Path) -> Schema:
    from transport.schema import Schema

    return Schema.from_json(path.read_bytes())


def _as_bytes(payload: Payload, arrays: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays, and the bytes of what is none."""
    places = {each.name: slice(each.offset, each.offset + each.nbytes) for each in payload.layout().placements}
    kinds = payload.schema.kinds if payload.schema else {}
    there = {name: array for name, array in arrays.items() if array is not None}
    return {name: payload.data[places[name]] if name in kinds else array for name, array in there.items()}


def _arrays(payload: Payload) -> dict[str, Any]:
    from transport.errors import SchemaError

    try:
        return dict(payload)
    except SchemaError as error:
        raise SchemaError(
            f"payload {payload.ticket.name} does not describe itself: give its ring's schema with --schema FILE "
            "(what Schema.to_json() wrote)"
        ) from error


def _save(arrays: Mapping[str, np.ndarray[Any, Any]], path: Path) -> None:
    # Not numpy.savez: it takes names as keywords, and a tensor may well be called "file".
    import numpy as np

    try:
        with naming(path), zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, array in arrays.items():
                plain = array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, plain, allow_pickle=False)
    except BaseException:
        if path.is_file():  # a part of it is of no use
            path.unlink()
        raise


def _description(payload: Payload, arrays: Mapping[str, Any]) -> dict[str, Any]:
    ticket = payload.ticket
    kinds = payload.schema.kinds if payload.schema else {}
    return {
        "ring": ticket.ring,
        "slot": ticket.slot,
        "generation": ticket.generation,
        "bytes": ticket.size,
        "rank": payload.rank,
        "wire": payload.wire,
        "created": ticket.created,
        "metadata": ticket.metadata,
        "arrays": [
            {
                "name": each.name,
                "dtype": kinds.get(each.name, each.dtype.name),
                "shape": each.shape,
                "bytes": each.nbytes,
            }
            for each in payload.layout().placements
            if not each.absent
        ],
    }


def _table(payload: Payload, arrays: Mapping[str, Any], out: Path | None) -> str:
    head = f"payload {payload.ticket.name}: {payload.ticket.size} bytes by {payload.wire}"
    rows = [("array", "dtype", "shape", "first values"), *(_row(*each) for each in arrays.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
        for row in rows
    ]
    metadata = [f"{name}: {value}" for name, value in payload.ticket.metadata.items()]
    return "\n".join([head, *lines, *metadata, *([f"written to {out}"] if out is not None else [])])


def _row(name: str, array: Any) -> tuple[str, str, str, str]:
    if not hasattr(array, "dtype"):
        text = repr(array)
        return name, type(array).__name__, "", text if len(text) <= 60 else f"{text[:59]}…"
    first = " ".join(str(value) for value in array.flat[:4])
    shape = "×".join(map(str, array.shape)) or "scalar"
    return name, array.dtype.name, shape, first + (" …" if array.size > 4 else "")

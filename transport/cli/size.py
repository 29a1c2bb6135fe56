"""``transport size``: computes the size of a ring and its slots from a schema and a rate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Final

import typer

from transport.cli.output import JsonTarget, emit
from transport.errors import UsageError
from transport.runtime.amounts import count

EXAMPLE = (
    "Example: transport size --schema episode.json --rate 50 --batch 256 --stall 30 --rings 8; of groups: "
    "transport size --schema sample.json --rate 50 --groups 16 --samples 8 --unfinished 32"
)
_BATCH: Final = 16


def size(
    schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON of the payloads' schema, as Schema.to_json() writes it. Either this or --slot-bytes.",
        ),
    ] = None,
    slot_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes of the largest payload. Either this or --schema.")
    ] = None,
    rate: Annotated[float, typer.Option(min=0, help="Payloads per second that are written to one ring.")] = 1.0,
    held: Annotated[float, typer.Option(min=0, help="Seconds from publish to the last acknowledgement.")] = 1.0,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=str(_BATCH), help="Payloads of one ring in a trainer's batch. Either this or --groups."
        ),
    ] = None,
    groups: Annotated[
        int | None, typer.Option(min=1, help="Groups of one ring in a training step, in the place of --batch.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples of a group.")] = 1,
    unfinished: Annotated[
        int, typer.Option(min=0, help="Groups that one ring has begun and not completed, at a time.")
    ] = 0,
    ahead: Annotated[
        int | None, typer.Option(min=0, help="Steps that may wait, as Rollout(ahead=) has it, in the place of --stall.")
    ] = None,
    stall: Annotated[
        float, typer.Option(min=0, help="Seconds that the trainer may pause without blocking rollouts.")
    ] = 30.0,
    rings: Annotated[int, typer.Option(min=1, help="Rings on this host.")] = 1,
    mean: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes of the mean payload. Default: those of the largest.")
    ] = None,
    json_target: JsonTarget = None,
) -> None:
    """Compute how many slots of which size a ring needs, and how much of /dev/shm they take."""
    from transport.bench.units import parse_size
    from transport.ring.sizing import sized
    from transport.schema import Schema

    if (schema is None) == (slot_bytes is None):
        raise UsageError("give either --schema FILE or --slot-bytes SIZE")
    if batch is not None and groups is not None:
        raise UsageError("give either --batch N or --groups N")
    largest = Schema.from_json(schema.read_bytes()).max_bytes if schema is not None else parse_size(slot_bytes or "")
    trained = groups * samples if groups is not None else batch or _BATCH
    result = sized(
        largest,
        rate=rate,
        held_s=held,
        batch=trained,
        stall_s=stall,
        rings=rings,
        mean_bytes=parse_size(mean) if mean is not None else 0,
        samples=samples,
        unfinished=unfinished,
        ahead=ahead,
    )
    age = (
        f"up to {math.ceil(result.steps)} batches or steps: where max_age is less, give fewer slots or --ahead"
        if ahead is None
        else f"about {count(ahead, 'step')}, by Rollout(ahead={ahead}): where max_age is less, give a smaller one"
    )
    text = (
        f"slots      {result.slots} of {result.slot_bytes} bytes: {result.explanation}\n"
        f"ring       {result.ring_bytes / 2**20:.1f} MiB of /dev/shm: the slots in whole pages, 2.4 KiB for each "
        "one's ticket and claims, and 0.4 MiB for the ring\n"
        f"host       {count(rings, 'ring')}, {result.host_bytes / 2**20:.0f} MiB with a fifth in reserve: "
        f"--shm-size={(result.host_bytes + (1 << 20) - 1) >> 20}m\n"
        f"age        payloads wait {age}\n"
        f"traffic    {result.bytes_per_s / 1e6:.1f} MB/s leave the host\n"
        f"check      transport doctor --ring {result.host_bytes}"
    )
    emit(result, text, json_target)

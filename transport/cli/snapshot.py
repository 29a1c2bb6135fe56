"""``transport snapshot``: what the rings of a run hold and no trainer has consumed, to a destination."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from transport.cli.output import JsonTarget, emit, shown
from transport.errors import SnapshotError, UsageError
from transport.runtime.amounts import count

if TYPE_CHECKING:
    from transport.snapshots import Manifest

EXAMPLE = "Example: transport snapshot rings:run-7- s3://bucket/models --run grpo --step 4000"

RunName = Annotated[
    str | None, typer.Option(help="Name below which the destination has the run. Default: the setting run, else run.")
]
Attempt = Annotated[
    str | None, typer.Option(metavar="DIGITS", help="Name of one cut at this step, 16 hexadecimal digits.")
]


def snapshot(
    queue: Annotated[str, typer.Argument(metavar="URL", help="The run's rings: rings:NAME, or rings+URL.")],
    destination: Annotated[str, typer.Argument(metavar="URL", help="A folder, s3://bucket/prefix or gs://….")],
    step: Annotated[int, typer.Option(min=0, help="Of the model whose checkpoint it belongs to.")],
    run: RunName = None,
    part: Annotated[
        str, typer.Option(metavar="I/N", help="Where N hosts have rings: the part of host I, from 0 on.")
    ] = "0/1",
    attempt: Attempt = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Then remove the snapshots of all steps but so many, the newest.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be saved; write nothing.")] = False,
    json_target: JsonTarget = None,
) -> None:
    """Save what the rings of this host hold, while no trainer consumes; `snapshot` in a trainer is the usual way.

    The manifest is written last: an interrupted snapshot is none.
    """
    from transport.runtime.progress import bar
    from transport.snapshots import prune
    from transport.snapshots import snapshot as taken

    if dry_run:
        manifest = _looked(queue, step, run, _part(part))
        return emit(manifest, f"{text_of(manifest)}\nnothing was written", json_target)
    with bar("saving") as progress:
        saving = taken(queue, destination, step, run=run, part=_part(part), attempt=attempt, progress=progress)
        try:
            manifest = saving.wait()
        except BaseException:
            saving.cancel()
            with contextlib.suppress(Exception):
                saving.wait()  # it removes what it has written
            raise
    if keep is not None:
        prune(destination, keep, manifest.run)
    return emit(manifest, f"{text_of(manifest)}\nin {destination}, attempt {manifest.attempt}", json_target)


def _part(text: str) -> tuple[int, int]:
    number, slash, parts = text.partition("/")
    if not (slash and number.isdecimal() and parts.isdecimal()):
        raise UsageError(f"--part {text}: give I/N, for example 0/2 on the first of two hosts")
    return int(number), int(parts)


def _looked(queue: str, step: int, run: str | None, part: tuple[int, int]) -> Manifest:
    """Return what a snapshot would have, without its files."""
    import time

    from transport.claims.open import open_rings
    from transport.ring.buffer import SharedRingBuffer
    from transport.snapshots import Manifest
    from transport.snapshots.listing import run_of
    from transport.snapshots.taking import missing, part_of, require_in_memory

    rings = []
    with open_rings(queue) as found:
        for segment in found.segments_here():
            with SharedRingBuffer.attach(segment, role="observer") as ring:
                require_in_memory(ring)
                sizes = [each.size for each in ring.tickets()]
                rings.append(part_of(ring, len(sizes), sum(sizes)))
        elsewhere = tuple(found.not_counted())
        if not rings and part[1] == 1 and (why := missing(found)):
            raise SnapshotError(why)
    name = run_of(run)
    return Manifest(run=name, step=step, attempt="", created=time.time(), rings=tuple(rings), elsewhere=elsewhere)


def text_of(manifest: Manifest) -> str:
    """Return a line for each ring, and one for all."""
    lines = [
        f"{ring.segment}  {count(ring.payloads, 'payload')}, {shown(ring.bytes)}, "
        f"{ring.slots} slots of {shown(ring.slot_bytes)}"
        for ring in manifest.rings
    ]
    lines += [f"{ring}  on another host: it needs a part of its own" for ring in manifest.elsewhere]
    total = f"{count(manifest.payloads, 'payload')} of {count(len(manifest.rings), 'ring')}, {shown(manifest.total)}"
    return "\n".join([*lines, f"{manifest.run}: step {manifest.step}, {total}"])

"""``transport cooldown upload``, ``restore`` and ``prune``: checkpoints to a destination, from it, and out of it."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from transport.cli.output import JsonTarget, emit, shown
from transport.errors import NoCheckpointError, RunError, UsageError
from transport.runtime.amounts import count

if TYPE_CHECKING:
    from transport.cooldown.epochs.records import EpochRecord

UPLOAD_EXAMPLE = (
    "Example: transport cooldown upload ./model --destination s3://bucket/checkpoints --run grpo --step 4000"
)
RESTORE_EXAMPLE = "Example: transport cooldown restore ./model --destination s3://bucket/checkpoints --run grpo"
PRUNE_EXAMPLE = "Example: transport cooldown prune --run grpo --keep 3 --dry-run"

StoreURL = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="The run's store. Default: TRANSPORT_STORE, else the demo's."),
]
FromDestination = Annotated[
    str | None,
    typer.Option("--destination", metavar="URL", help="Read the epochs there instead of in a store; needs --run."),
]


class UploadedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of ``upload``."""

    run: str
    epoch: int
    step: int
    outcome: str  # checkpointed, timed_out or skipped
    destination: str
    files: int
    bytes: int


class RestoredCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of ``restore``."""

    run: str
    epoch: int
    step: int
    folder: str
    files: int
    bytes: int
    verified: bool  # by the record of its epoch, or only by its own manifest


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """File or record that was removed, or would be, or was kept."""

    run: str
    path: str
    why: str


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of ``prune``."""

    removed: list[Removed]
    kept: list[Removed]
    dry_run: bool


def upload(
    folder: Annotated[Path, typer.Argument(help="The model as plain files. All of it is one checkpoint.")],
    destination: Annotated[
        str,
        typer.Option(metavar="URL", help="A folder, s3://bucket/prefix, gs://bucket/prefix or hf://user/repository."),
    ],
    run: Annotated[str, typer.Option(help="The run's name; the checkpoint becomes its next epoch.")],
    step: Annotated[int, typer.Option(help="The training step of the model.")] = 0,
    store: StoreURL = None,
    limit: Annotated[float, typer.Option("--time-limit", help="Seconds for the upload.", min=1)] = 3600.0,
    read_back: Annotated[
        bool, typer.Option("--read-back", help="Verify by reading every byte back, even if the service has checksums.")
    ] = False,
    skip_upload: Annotated[
        bool,
        typer.Option("--skip-upload", help="Only check files and permissions; upload and record nothing."),
    ] = False,
    json_target: JsonTarget = None,
) -> None:
    """Upload a folder as a run's checkpoint, verify it, and record it in the store and at the destination.

    The folder stays as it is until the command has ended. An earlier upload of the run that is not complete by then
    counts as timed out.

    Files are sent several at a time, large ones in parts. Nothing counts as a checkpoint before it was verified. What
    fails is tried again until the time limit. Credentials come from the environment, as for each service's own tools.
    """
    import asyncio

    from transport.cooldown.client import check_destination
    from transport.cooldown.destinations.base import normalise
    from transport.cooldown.epochs.records import check_name
    from transport.cooldown.upload import plain_files

    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; give the folder that contains the model's files")
    files = plain_files(folder)
    if not files:
        raise UsageError(f"{folder} contains no file to upload")
    check_name(run, "run")
    url = normalise(destination)
    check_destination(url)
    if skip_upload:
        total = sum(path.stat().st_size for _, path in files)
        result = UploadedCheckpoint(
            run=run, epoch=0, step=step, outcome="skipped", destination=url, files=len(files), bytes=total
        )
        text = f"skipped: {count(len(files), 'file')}, {shown(total)} could be uploaded to {url}; nothing was uploaded"
        return emit(result, text, json_target)
    record = asyncio.run(_cooldown(folder, url, run, step, store, limit, read_back))
    checkpoint = record.checkpoint
    if checkpoint is None:
        notes = "; ".join(note.detail for note in record.notes.values() if note.detail)
        raise RunError(f"epoch {record.epoch} has no checkpoint: {notes or 'it timed out, or a later one ended first'}")
    result = UploadedCheckpoint(
        run=run, epoch=record.epoch, step=step, outcome="checkpointed", destination=url, files=checkpoint.files,
        bytes=checkpoint.bytes,
    )  # fmt: skip
    text = (
        f"{run}: epoch {record.epoch}, {count(checkpoint.files, 'file')}, {shown(checkpoint.bytes)}, verified, at {url}"
    )
    return emit(result, text, json_target)


async def _cooldown(
    folder: Path, url: str, run: str, step: int, store_url: str | None, limit: float, read_back: bool
) -> EpochRecord:
    """One epoch with one client, whose local copy is the folder itself."""
    import asyncio
    import re

    from transport.cli.epochs import store_to_write
    from transport.cooldown import CheckpointProof, CooldownClient, CooldownHost
    from transport.runtime.progress import bar
    from transport.store.open import open_store

    name = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()).lstrip(".-") or "host"
    whole = await asyncio.to_thread(folder.absolute)
    with (
        open_store(store_to_write(store_url)) as store,
        tempfile.TemporaryDirectory() as scratch,
        bar("uploading") as progress,
    ):
        proof = CheckpointProof.READ if read_back else CheckpointProof.STORED
        host = CooldownHost(store, run, url, cooldown_s=limit, seed=0, proof=proof)
        client = CooldownClient(
            store,
            run,
            name,
            save=lambda into, _: _stand_for(whole, into),
            scratch=Path(scratch),
            keep_steps=0,
            progress=progress,
        )
        opened = await host.open()
        record, _ = await asyncio.gather(host.cooldown(opened.epoch, step, [name]), client.cooldown(opened.epoch))
        return record


def _stand_for(folder: Path, into: Path) -> None:
    """Have the files read where they are: a copy would need their space, and remain when this process is killed."""
    into.rmdir()
    into.symlink_to(folder)


def restore(
    into: Annotated[Path, typer.Argument(help="The folder to make. It appears complete or not at all.")],
    store: StoreURL = None,
    destination: FromDestination = None,
    run: Annotated[str | None, typer.Option(help="The run. Default: the only one in the store.")] = None,
    epoch: Annotated[int | None, typer.Option(help="The epoch. Default: the newest with a checkpoint.")] = None,
    unverified: Annotated[
        str | None,
        typer.Option(
            "--unverified",
            metavar="CLIENT/ATTEMPT",
            help="An upload that was complete, but not verified before its epoch timed out; needs --epoch.",
        ),
    ] = None,
    json_target: JsonTarget = None,
) -> None:
    """Copy a run's newest checkpoint, or that of one epoch, into a new folder.

    Every byte is verified by the checkpoint's manifest, and the manifest by the record of its epoch, in the store or at
    the destination. A sharded checkpoint becomes one folder, as torch.distributed.checkpoint loads it.
    """
    from transport.cooldown.destinations.open import open_destination
    from transport.cooldown.restoring import restore as restored
    from transport.runtime.progress import bar

    if into.exists():
        raise UsageError(f"{into} already exists; give the name of a new folder")
    if unverified is not None and epoch is None:
        raise UsageError("--unverified needs --epoch, the epoch of the upload")
    name, records = _one_run(store, destination, run)
    record = _chosen(records, name, epoch)
    with open_destination(destination or record.destination) as place, bar("restoring") as progress:
        done = restored(record, place, into, upload=unverified, progress=progress)
    result = RestoredCheckpoint(
        run=name, epoch=record.epoch, step=done.manifest.step, folder=str(into), files=len(done.files),
        bytes=done.manifest.total, verified=unverified is None,
    )  # fmt: skip
    text = f"{name}: epoch {record.epoch}, step {result.step}, {count(result.files, 'file')}, {shown(result.bytes)}"
    return emit(result, f"{text}, into {into}", json_target)


def prune(
    store: StoreURL = None,
    destination: FromDestination = None,
    run: Annotated[str | None, typer.Option(help="The run. Default: the only one in the store.")] = None,
    keep: Annotated[int, typer.Option(help="How many checkpoints to keep, the newest; at least 1.", min=1)] = 2,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Also remove complete uploads of epochs that timed out.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
    json_target: JsonTarget = None,
) -> None:
    """Remove old checkpoints of a run with their snapshots, and what killed uploaders left at the destination.

    Only what lies in epochs that have ended is removed, and never the newest checkpoint. An epoch keeps its record. An
    upload that may be good, since its epoch timed out before it was verified, is kept and named.
    """
    from transport.cooldown.destinations.open import open_destination
    from transport.cooldown.pruning import carry_out, plan
    from transport.runtime.progress import bar
    from transport.snapshots.listing import plan as old_snapshots
    from transport.snapshots.listing import withdraw

    name, records = _one_run(store, destination, run)
    removed, kept, left = [], [], 0
    for url in sorted({destination} if destination else {record.destination for record in records.values()}):
        here = records if destination else {epoch: each for epoch, each in records.items() if each.destination == url}
        with open_destination(url) as place, bar("removing") as progress:
            found = plan(here, place, name, keep, unverified=unverified)
            removed += [Removed(run=name, path=each.path, why=each.what) for each in found.surplus]
            kept += [Removed(run=name, path=path, why=why) for path, why in found.kept]
            left += len(found.steps)
            older = old_snapshots(place, name, keep, min(found.steps)) if found.steps else []
            removed += [Removed(run=name, path=each.path, why="snapshot") for each in older]
            if not dry_run:
                carry_out(found, place, name, progress)
                for each in older:
                    withdraw(place, each.path)
    verb = "would be removed" if dry_run else "removed"
    lines = [
        *(f"{verb}: {each.path} ({each.why})" for each in removed),
        *(f"kept: {each.path}: {each.why}" for each in kept),
    ]
    there = left + sum(each.why == "checkpoint" for each in removed)
    lines.append(f"{name}: {count(len(removed), 'upload')} {verb}; {left} of {count(there, 'checkpoint')} kept")
    return emit(Pruned(removed=removed, kept=kept, dry_run=dry_run), "\n".join(lines), json_target)


def _one_run(store: str | None, destination: str | None, run: str | None) -> tuple[str, dict[int, EpochRecord]]:
    from transport.cli.epochs import recorded

    found = recorded(store, destination, run)
    names = sorted({record.run for record in found})
    if len(names) > 1:
        raise UsageError(f"the store has the runs {', '.join(names)}; choose one with --run")
    if not names:
        raise NoCheckpointError("there are no epochs in the store")
    return names[0], {record.epoch: record for record in found}


def _chosen(records: dict[int, EpochRecord], run: str, epoch: int | None) -> EpochRecord:
    from transport.cooldown.epochs.ledger import newest_checkpoint

    if epoch is None:
        return newest_checkpoint(records, run)
    if epoch not in records:
        known = f"{min(records)} to {max(records)}"
        raise UsageError(f"run {run} has no epoch {epoch}; it has {known}; see `transport cooldown status`")
    return records[epoch]

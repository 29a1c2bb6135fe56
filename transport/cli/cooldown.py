"""``transport cooldown``: the epochs of a run, their outcome and their checkpoints."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from transport.cli import checkpoints
from transport.cli.epochs import recorded
from transport.cli.output import JsonTarget, emit, shown
from transport.errors import TransportError
from transport.runtime.amounts import count

if TYPE_CHECKING:
    from transport.cooldown.epochs.records import EpochRecord

EXAMPLE = "Example: transport cooldown status --store sqlite:///var/lib/run/store.sqlite3 --json -"

app = typer.Typer(help="Checkpoints of a run: list, upload, restore, prune.", epilog=EXAMPLE)
app.command("upload", epilog=checkpoints.UPLOAD_EXAMPLE)(checkpoints.upload)
app.command("restore", epilog=checkpoints.RESTORE_EXAMPLE)(checkpoints.restore)
app.command("prune", epilog=checkpoints.PRUNE_EXAMPLE)(checkpoints.prune)


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """An elected client, or one whose report was refused."""

    client: str
    elected: bool
    report: str = ""  # uploaded, skipped, cancelled or failed; empty: no report
    refusal: str = ""
    detail: str = ""


class Epoch(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch."""

    run: str
    epoch: int
    phase: str
    outcome: str  # checkpointed or timed_out; empty before the end
    step: int
    destination: str
    checkpoint: str  # where it lies below the destination; empty without, and when it was removed
    files: int
    bytes: int
    seconds: float  # of the cooldown so far
    ended_at: str  # UTC; empty before the end
    clients: list[Client]

    def __str__(self) -> str:
        """One line, and one for each client of an epoch without a checkpoint."""
        line = f"{self.run}  epoch {self.epoch}  step {self.step}  {self.outcome or self.phase}"
        if self.checkpoint:
            size = f"{count(self.files, 'file')}, {shown(self.bytes)}"
            return f"{line}  {size}, {self.ended_at}, {self.destination}/{self.checkpoint}"
        if self.outcome == "checkpointed":
            return f"{line}  not found at its destination"
        heard = [each for each in self.clients if each.report or self.phase != "training"]
        return "\n".join([line, *(f"    {each.client}: {_told(each)}" for each in heard)])


class CooldownStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The command's JSON."""

    epochs: list[Epoch]
    checkpointed: int  # whose checkpoints are there
    unknown: list[str]  # why a destination does not say which are there; they are shown as they were recorded


@app.command("status", epilog=EXAMPLE)
def status(
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The run's store: sqlite:///path. Default: TRANSPORT_STORE, else a file in ~/.local/state.",
        ),
    ] = None,
    destination: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Read the outcomes here, when the store is lost. Default: read the store."),
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Show this run only; required with --destination. Default: all runs.")
    ] = None,
    json_target: JsonTarget = None,
) -> None:
    """List epochs, how their cooldowns ended, and where their checkpoints lie.

    The destinations are asked which checkpoints are still there.
    """
    records = recorded(store, destination, run)
    there, unknown = _still_there(records, destination)
    epochs = [_described(record, (record.run, record.epoch) in there) for record in records]
    result = CooldownStatus(epochs=epochs, checkpointed=len(there), unknown=unknown)
    lines = [*map(str, epochs), *(f"not known whether checkpoints are still there: {why}" for why in unknown)]
    lines.append(f"{result.checkpointed} of {count(len(epochs), 'epoch')} with a checkpoint")
    emit(result, "\n".join(lines), json_target)


def _still_there(records: list[EpochRecord], destination: str | None) -> tuple[set[tuple[str, int]], list[str]]:
    """Run and epoch of the checkpoints that are there, and why a destination does not say; then all of its records."""
    from transport.cooldown.destinations.open import open_destination
    from transport.cooldown.restoring import still_there
    from transport.cooldown.upload import FILES_AT_ONCE
    from transport.runtime.blocking_calls import in_parallel
    from transport.runtime.progress import slow

    there: set[tuple[str, int]] = set()
    unknown = []
    with_one = [record for record in records if record.checkpoint is not None]
    for url in sorted({destination or record.destination for record in with_one}):
        here = [record for record in with_one if url in (destination, record.destination)]
        try:
            with slow(f"asking {url}"), open_destination(url) as place:
                looks = [partial(still_there, record, place) for record in here]
                found = in_parallel(looks, FILES_AT_ONCE, lambda: None)
        except TransportError as error:
            unknown.append(str(error))
            found = [True for _ in here]
        there |= {(record.run, record.epoch) for record, is_there in zip(here, found, strict=True) if is_there}
    return there, unknown


def _described(record: EpochRecord, there: bool) -> Epoch:

    checkpoint = record.checkpoint if there else None
    elected = set(record.elected)
    clients = [
        Client(
            client=name,
            elected=name in elected,
            report=note.kind.value if (note := record.notes.get(name)) else "",
            refusal=note.refusal.value if note and note.refusal else "",
            detail=note.detail if note else "",
        )
        for name in [*record.elected, *sorted(set(record.notes) - elected)]
    ]
    return Epoch(
        run=record.run,
        epoch=record.epoch,
        phase=record.phase.value,
        outcome=record.outcome.value if record.outcome else "",
        step=record.step,
        destination=record.destination,
        checkpoint=record.folder(checkpoint.upload) if checkpoint else "",
        files=checkpoint.files if checkpoint else 0,
        bytes=checkpoint.bytes if checkpoint else 0,
        seconds=round(record.elapsed_s, 3),
        ended_at=datetime.fromtimestamp(record.ended_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if record.ended_at else "",
        clients=clients,
    )


def _told(client: Client) -> str:
    what = client.report or "no report"
    refused = f", refused: {client.refusal}" if client.refusal else ""
    detail = f" ({client.detail})" if client.detail else ""
    return f"{what}{refused}{detail}{'' if client.elected else ', not elected'}"

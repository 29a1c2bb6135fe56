"""``transport cooldown``: the epochs of a run, their outcome and their checkpoints."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from transport.cli import checkpoints
from transport.cli.epochs import records_from_destination, records_from_store
from transport.cli.output import JsonTarget, emit

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
    checkpoint: str  # where it lies below the destination; empty without
    files: int
    bytes: int
    seconds: float  # of the cooldown so far
    ended_at: str  # UTC; empty before the end
    clients: list[Client]

    def __str__(self) -> str:
        """One line, and one for each client of an epoch without a checkpoint."""
        line = f"{self.run}  epoch {self.epoch}  step {self.step}  {self.outcome or self.phase}"
        if self.checkpoint:
            size = f"{self.files} files, {self.bytes / 1e6:.1f} MB"
            return f"{line}  {size}, {self.ended_at}, {self.destination}/{self.checkpoint}"
        heard = [each for each in self.clients if each.report or self.phase != "training"]
        return "\n".join([line, *(f"    {each.client}: {_told(each)}" for each in heard)])


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The command's JSON."""

    epochs: list[Epoch]
    checkpointed: int


@app.command("status", epilog=EXAMPLE)
def status(
    store: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The run's store: sqlite:///path. Default: TRANSPORT_STORE, else the demo's."),
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
    """List epochs, how their cooldowns ended, and where their checkpoints lie."""
    records = records_from_store(store, run) if destination is None else records_from_destination(destination, run)
    epochs = [_described(record) for record in records]
    result = Status(epochs=epochs, checkpointed=sum(epoch.outcome == "checkpointed" for epoch in epochs))
    text = "\n".join([*map(str, epochs), f"{result.checkpointed} of {len(epochs)} epochs have a checkpoint"])
    emit(result, text, json_target)


def _described(record: EpochRecord) -> Epoch:
    from transport.cooldown.epochs.records import upload_folder

    checkpoint = record.checkpoint
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
        checkpoint=upload_folder(record.run, record.epoch, checkpoint.client, checkpoint.attempt) if checkpoint else "",
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

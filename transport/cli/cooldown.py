"""``transport cooldown``: lists the epochs of a run, their outcome and their checkpoints."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from transport.cli.output import JsonTarget, emit
from transport.config import configuration
from transport.errors import UsageError
from transport.storage.urls import SQLiteURL, parse_url

if TYPE_CHECKING:
    from transport.cooldown.epochs.records import EpochRecord

EXAMPLE = "Example: transport cooldown status --store sqlite:///var/lib/run/store.sqlite3 --json -"

app = typer.Typer(help="List epochs and their checkpoints.", epilog=EXAMPLE)


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
    records = _from_store(store, run) if destination is None else _from_destination(destination, run)
    epochs = [_described(record) for record in records]
    result = Status(epochs=epochs, checkpointed=sum(epoch.outcome == "checkpointed" for epoch in epochs))
    text = "\n".join([*map(str, epochs), f"{result.checkpointed} of {len(epochs)} epochs have a checkpoint"])
    emit(result, text, json_target)


def default_store() -> str:
    """The store's URL where none is given: the configured one, or the file in which the demo keeps its epochs."""
    given = configuration().store
    if given:
        return given
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return SQLiteURL(state / "transport" / "store.sqlite3").text


def _from_store(url: str | None, run: str | None) -> list[EpochRecord]:
    from transport.cooldown.epochs.ledger import Ledger, runs
    from transport.store.open import open_store

    url = url or default_store()
    parsed = parse_url(url)
    if isinstance(parsed, SQLiteURL) and not parsed.path.exists():  # looking must not make one
        raise UsageError(f"--store {url}: the file does not exist; give the run's store")
    with open_store(url) as store:
        chosen = runs(store) if run is None else [run]
        return [record for name in chosen for record in Ledger(store, name).epochs().values()]


def _from_destination(url: str, run: str | None) -> list[EpochRecord]:
    from transport.cooldown.coordination import recorded_outcomes
    from transport.cooldown.destinations.open import open_destination

    if run is None:
        raise UsageError("--destination needs --run, the run's name")
    with open_destination(url) as destination:
        return [record for _, record in sorted(recorded_outcomes(destination, run).items())]


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

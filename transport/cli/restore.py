"""``transport restore``: a snapshot's payloads into a ring of a new run, which is served until they are consumed."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from transport.cli.output import JsonTarget, emit, say, shown
from transport.cli.snapshot import Attempt, RunName, text_of
from transport.errors import SnapshotError
from transport.runtime.amounts import count

if TYPE_CHECKING:
    from transport.packer.rollout import Rollout
    from transport.runtime.signals import Stopped
    from transport.snapshots import Manifest, Saved
    from transport.snapshots.restoring import SavedPayload

EXAMPLE = "Example: transport restore s3://bucket/models --run grpo --step 4000 --queue rings:run-8-"

_LOOK_S = 0.2


class RestorablePayload(msgspec.Struct, frozen=True, kw_only=True):
    """One of them, in the JSON of ``--dry-run``."""

    id: str  # ring/slot/generation, as it was first written
    bytes: int
    due: list[int]
    policy_version: int | None
    metadata: dict[str, object]


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """The command's JSON."""

    manifest: Manifest
    restored: int
    expired: int
    dry_run: bool
    payloads: list[RestorablePayload] = []  # of a dry run


def restore(
    destination: Annotated[str, typer.Argument(metavar="URL", help="As given to transport snapshot.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Of the model that training goes on from. Default: the newest.")
    ] = None,
    run: RunName = None,
    attempt: Attempt = None,
    queue: Annotated[
        str,
        typer.Option(metavar="URL", help="Where trainers look: rings:NAME, or rings+URL. Default: as Rollout()."),
    ] = "rings:",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the payloads and verify every byte; write nothing.")
    ] = False,
    json_target: JsonTarget = None,
) -> None:
    """Verify a snapshot, write it into rings of its own, and serve these until every payload is consumed.

    Trainers need the records of the same checkpoint. Ctrl-C before the end gives up what is not consumed: the snapshot
    stays.
    """
    from transport.runtime.progress import bar
    from transport.runtime.signals import until_stopped
    from transport.snapshots import Saved

    with contextlib.ExitStack() as stack:
        saved = stack.enter_context(Saved(destination, step, run=run, attempt=attempt))
        if dry_run:
            with bar("verifying") as progress:
                saved.verify(progress=progress)
            return emit(_listed(saved), _lines(saved), json_target)
        stopped = stack.enter_context(until_stopped(starting=True))
        rollouts, expired = _served(saved, queue, stack)
        stopped.starting = False
        restored = sum(rollout.ring.get_ready_count() for rollout in rollouts)
        report = RestoreReport(manifest=saved.manifest, restored=restored, expired=expired, dry_run=False)
        text = f"{text_of(saved.manifest)}\nrestored {count(restored, 'payload')}; serving until they are consumed"
        emit(report, text, json_target)
        sys.stdout.flush()
        left = _until_consumed(rollouts, stopped)
        if left:
            raise SnapshotError(f"stopped with {count(left, 'payload')} not consumed; restore the snapshot again")
        if json_target != "-":
            say("all payloads are consumed")
    return None


def _listed(saved: Saved) -> RestoreReport:
    payloads = [
        RestorablePayload(
            id="/".join(map(str, each.ticket.origin)),
            bytes=each.ticket.size,
            due=list(each.due),
            policy_version=each.policy_version,
            metadata=dict(each.ticket.metadata),
        )
        for each in saved.payloads
    ]
    return RestoreReport(manifest=saved.manifest, restored=0, expired=0, dry_run=True, payloads=payloads)


def _lines(saved: Saved) -> str:
    lines = [
        f"{'/'.join(map(str, each.ticket.origin))}  {shown(each.ticket.size)}  due for {', '.join(map(str, each.due))}"
        for each in saved.payloads
    ]
    return "\n".join([*lines, text_of(saved.manifest), "every byte is as it was saved; nothing was written"])


def _served(saved: Saved, url: str, stack: contextlib.ExitStack) -> tuple[list[Rollout], int]:
    """Return a rollout for each schema and number of ranks, with its payloads; how many had expired."""
    from transport.claims.open import open_rings
    from transport.packer.options import RingOptions
    from transport.packer.rollout import Rollout
    from transport.ring.consumers import consumers_of

    queue = stack.enter_context(open_rings(url))
    groups: dict[tuple[str, str, int], list[SavedPayload]] = {}
    for each in saved.payloads:
        groups.setdefault((each.ring.fingerprint, each.ring.consumers, each.ticket.readers), []).append(each)
    rollouts, expired = [], 0
    for (_, consumers, readers), payloads in groups.items():
        schema = None if payloads[0].ticket.schema is not None else saved.schema_of(payloads[0])
        if schema is None and payloads[0].ticket.schema is None:
            raise SnapshotError("the schema of these payloads is too long for a snapshot: restore them in a Rollout")
        names = {name: len(ranks) for name, ranks in consumers_of(consumers).items()}
        options = RingOptions(slot_bytes=max(each.ticket.size for each in payloads) or 1, consumers=names or None)
        if schema is not None:
            options = RingOptions(consumers=names or None)
        rollout = stack.enter_context(
            Rollout(schema, slots=len(payloads), readers=readers, ring=options, rings=queue, drain_s=0.0)
        )
        done = saved.restore(rollout, only=payloads)
        expired += done.expired
        rollouts.append(rollout)
    return rollouts, expired


def _until_consumed(rollouts: list[Rollout], stopped: Stopped) -> int:
    """Wait until payloads are consumed; return how many are left."""
    while True:
        left = sum(len(rollout.ring.tickets()) for rollout in rollouts)
        if not left or stopped.wait(_LOOK_S):
            return left

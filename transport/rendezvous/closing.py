"""The end of a run: the final value of its record in the store, and a copy that remains when the store is lost."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from transport.errors import RunLostError, StaleRoundError, StoreUnsuitableError
from transport.rendezvous.member_states import Member
from transport.rendezvous.records import Closing, Keys, Reason, Round, RoundPhase
from transport.runtime.durable import write_whole
from transport.runtime.error_text import error_text, reportable
from transport.store.base import Store
from transport.store.decision import Next, advance
from transport.store.stored import decode, encode

log = logging.getLogger(__name__)


def closed(run: str, current: Round, reason: Reason, by: str, message: str) -> Round:
    """Return the round's last value."""
    closing = Closing(
        run=run,
        reason=reason,
        round=current.number,
        incarnation=current.incarnation,
        by=by,
        message=reportable(message),
    )
    return msgspec.structs.replace(current, phase=RoundPhase.CLOSED, closing=closing)


def close_run(
    store: Store, keys: Keys, reason: Reason, by: str, message: str = "", *, member: Member | None = None
) -> Closing:
    """Close a run in its store, or return how it was already closed; the first writer wins.

    ``member`` is the member that closes the run, and must be of the current round; None: an operator, at any time.

    Raises:
        StaleRoundError: the member is of an older round.
        RunLostError: the run is not in the store.
        StoreError: the store failed. Whether the run is closed is unknown; call again to find out.
    """

    def step(current: Round | None) -> Next[Round] | None:
        if current is None:
            raise RunLostError(f"run {keys.run} is not in the store")
        if member is not None and member.incarnation not in (None, current.incarnation):
            raise RunLostError(f"the store now contains another run named {keys.run}")
        if current.closing is not None:
            return None
        if member is not None and 0 < member.round < current.number:
            raise StaleRoundError(f"round {member.round} is over; round {current.number} decides about run {keys.run}")
        return Next(closed(keys.run, current, reason, by, message))

    last = advance(store, keys.round, Round, step)
    assert last is not None and last.closing is not None  # the step returns one, leaves one, or raises
    return last.closing


class Archive:
    """The file of one run, on a disk that does not depend on the store, best shared by all members. Thread-safe.

    The first writer wins: the end of a run is never replaced by another end of that run. A later run with the same file
    ignores the end that is there, and replaces it with its own. The file appears complete or not at all.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"<Archive {self.path}>"

    def read(self) -> Closing | None:
        """Return the closing, of any run, if the file exists. Raises StoreUnsuitableError for anything else there."""
        try:
            return decode(Closing, str(self.path), self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, StoreUnsuitableError) as error:
            what = f"{self.path} is not an archive of a run, or cannot be read"
            raise StoreUnsuitableError(f"{what}: {error_text(error)}; choose another file") from error

    def write(self, closing: Closing) -> bool:
        """Write and sync the closing to disk; False if its run has one there. OSError; StoreUnsuitableError."""
        before = self.read()
        if before is not None and before.run == closing.run:
            return False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return write_whole(self.path, [encode(closing)], replace=before is not None)


def write_archive(archive: Archive | None, closing: Closing) -> None:
    """Copy the closing into the archive. The store has it, so a failure is logged and not raised."""
    if archive is not None:
        try:
            archive.write(closing)
        except (OSError, StoreUnsuitableError) as error:
            log.error(
                "the run's end (%s) is recorded in the store only: cannot write %s: %s",
                closing.reason,
                archive.path,
                error,
            )

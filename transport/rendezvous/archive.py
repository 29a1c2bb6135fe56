"""A copy of the run's closing in a file, written once, which remains when the store is lost."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import msgspec

from transport.errors import StoreUnsuitableError
from transport.rendezvous.records import Closing
from transport.runtime.durable import flush


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
        """The closing, if the file exists; of which run it says. Raises StoreUnsuitableError for something else."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Closing)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise StoreUnsuitableError(
                f"{self.path} is not an archive of a run: {error}; choose another file"
            ) from error

    def write(self, closing: Closing) -> bool:
        """Write and sync the closing to disk; False if its run has one there. OSError; StoreUnsuitableError."""
        before = self.read()
        if before is not None and before.run == closing.run:
            return False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f".{self.path.name}.{secrets.token_hex(6)}")
        try:
            with draft.open("xb") as file:
                file.write(msgspec.json.encode(closing))
                file.flush()
                os.fsync(file.fileno())
            if before is not None:
                draft.replace(self.path)
            else:
                try:
                    os.link(draft, self.path)  # unlike a rename it fails if the file exists
                except FileExistsError:
                    return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                draft.unlink()
        flush(self.path.parent)
        return True

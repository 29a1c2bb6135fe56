"""A copy of the run's closing in a file, written once, which remains when the store is lost."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from transport.errors import StoreUnsuitableError
from transport.rendezvous.records import Closing
from transport.runtime.durable import write_whole


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
        return write_whole(self.path, [msgspec.json.encode(closing)], replace=before is not None)

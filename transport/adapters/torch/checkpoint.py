"""Checkpoints of `transport.cooldown` for `torch.distributed.checkpoint`, without a local copy of them.

    record = Ledger(store, "run").newest_checkpoint()
    with open_destination(record.destination) as destination:
        dcp.load(state, storage_reader=CheckpointReader(record, destination))

Each rank reads the blocks of the files that have its tensors, `transport.cooldown.epochs.manifest.BLOCK` bytes each,
and each block is proven by its SHA-256 before torch sees a byte of it. The checkpoint is one that `ShardedClient` or
`CooldownClient` uploaded after a save by `dcp.save`, on however many ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
from collections.abc import Generator
from pathlib import PurePosixPath
from typing import Any, cast

from transport.adapters.torch import tensors as _says_what_to_do_without_torch
from transport.cooldown.destinations.base import Destination
from transport.cooldown.epochs.manifest import BLOCK, CheckpointManifest, File
from transport.cooldown.epochs.records import EpochRecord
from transport.cooldown.restoring import checkpoint_manifest
from transport.cooldown.verify import RefusedUpload, check_size, checked_block
from transport.errors import CheckpointDamagedError, UsageError

from torch.distributed.checkpoint import FileSystemReader, LoadPlan, ReadItem  # isort: skip
from torch.distributed.checkpoint.filesystem import FileSystem  # isort: skip

__all__ = ["CheckpointReader"]
assert _says_what_to_do_without_torch

_METADATA = ".metadata"  # torch's, with the places of all tensors


class CheckpointReader(FileSystemReader):  # type: ignore[misc]  # torch is not installed for mypy
    """A storage reader over one epoch's checkpoint, on each rank, for one load after the other.

    torch decodes the files: it unpickles ``.metadata``, which a member of the run wrote and the epoch's record proves.

    Args:
        record: of the epoch, as `Ledger` and `recorded_outcomes` return it.
        destination: where the checkpoint is; open while the reader is used.
        folder: below the folder that was given to ``save``, where ``dcp.save`` wrote. ``checkpoint_id`` of ``dcp.load``
            is the same.

    `dcp.load` raises torch's CheckpointException, whose text has the name of the error of each rank:
        CheckpointDamagedError: a file that is read is missing, was truncated or changed; the message names it.
        UsageError: the folder was not written by ``dcp.save``.
        DestinationError: the destination cannot be read now.

    Raises NoCheckpointError, CheckpointDamagedError and DestinationError as `restore` does.
    """

    def __init__(self, record: EpochRecord, destination: Destination, folder: str = "") -> None:
        super().__init__(folder)
        self.fs = _Files(checkpoint_manifest(record, destination), destination)
        self.path = self.fs.init_path(folder)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """torch's plan in the order of the bytes, so that a block is read once."""

        def place(item: ReadItem) -> tuple[str, int]:
            found = self.storage_data[item.storage_index]
            return found.relative_path, found.offset

        return dataclasses.replace(super().prepare_local_plan(plan), items=sorted(plan.items, key=place))


class _Files(FileSystem):  # type: ignore[misc]
    """The files of a checkpoint as torch's reader opens them."""

    def __init__(self, manifest: CheckpointManifest, destination: Destination) -> None:
        self._manifest = manifest
        self._destination = destination
        self._files = {file.name: file for file in manifest.files}

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return str(PurePosixPath(path, suffix))

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        name = os.fspath(path)
        file = self._files.get(name)
        try:
            if file is None and PurePosixPath(name).name == _METADATA:
                raise UsageError(
                    f"the checkpoint has no {name}: it was not saved by torch.distributed.checkpoint, or in another "
                    f"folder; it has {', '.join(sorted(self._files)[:5])}"
                )
            if file is None:
                raise CheckpointDamagedError(f"{name} is missing in the checkpoint's manifest")
            check_size(self._destination, self._manifest.path(file), file)
            yield _Blocks(self._destination, self._manifest.path(file), file)
        except RefusedUpload as error:
            raise CheckpointDamagedError(
                f"run {self._manifest.run}, epoch {self._manifest.epoch}: the checkpoint at {self._destination.url} is "
                f"damaged: {error}"
            ) from error


class _Blocks(io.RawIOBase):
    """A file, of which two blocks are in memory: torch reads the end of a tensor before its beginning."""

    def __init__(self, destination: Destination, path: str, file: File) -> None:
        self._block = functools.lru_cache(2)(functools.partial(checked_block, destination, path, file))
        self._size = file.size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read as much as was asked for, as files of a disk do, since torch asks once."""
        target = memoryview(cast(bytearray, buffer)).cast("B")
        target = target[: max(0, self._size - self._at)]
        done = 0
        while done < len(target):
            number, inside = divmod(self._at, BLOCK)
            part = self._block(number)[inside : inside + len(target) - done]
            target[done : done + len(part)] = part
            done += len(part)
            self._at += len(part)
        return done

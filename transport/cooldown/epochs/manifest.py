"""The manifest of an upload: its files, sizes and checksums. It is written last; without it an upload is incomplete."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Final

import msgspec

from transport.cooldown.epochs.records import is_upload, upload_folder
from transport.decoders import json_decoder
from transport.errors import CheckpointDamagedError, UsageError
from transport.store.stored import encode

NAME: Final = "manifest.json"
FILES: Final = "files"  # the folder beside it
LAYOUT: Final = 1
MOST_BYTES: Final = 64 << 20
BLOCK: Final = 16 << 20  # bytes of a file with a checksum of their own
MOST_NAME: Final = 512

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One file; ``name`` is its path below the uploaded folder, with slashes."""

    name: str
    size: int
    blocks: tuple[str, ...]  # SHA-256 of each `BLOCK` bytes and of the rest; of an empty file, of no bytes
    proofs: dict[str, str] = {}  # by kind, checksums as the destination computes them; these the uploader computed
    upload: str = ""  # whose folder has it; empty: that of the manifest

    @property
    def plausible(self) -> bool:
        """True if it has a name below its folder, and a checksum for each block of its size."""
        digests = len(self.blocks) == max(1, -(-self.size // BLOCK)) and all(map(_DIGEST.fullmatch, self.blocks))
        return is_safe(self.name) and self.size >= 0 and digests


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files of an upload, and its epoch."""

    run: str
    epoch: int
    step: int
    client: str
    attempt: str
    files: tuple[File, ...]
    layout: int = LAYOUT

    @property
    def total(self) -> int:
        """Total size of all files."""
        return sum(file.size for file in self.files)

    @property
    def place(self) -> str:
        """Folder of the upload that it belongs to."""
        return upload_folder(self.run, self.epoch, f"{self.client}/{self.attempt}")

    @property
    def uploads(self) -> set[str]:
        """The uploads of others that have files of it."""
        return {file.upload for file in self.files} - {""}

    def path(self, file: File) -> str:
        """Return the path of one of its files at the destination."""
        place = upload_folder(self.run, self.epoch, file.upload) if file.upload else self.place
        return f"{place}/{FILES}/{file.name}"

    def encode(self) -> bytes:
        """Return the manifest as JSON: the same bytes for the same files."""
        return encode(self)


class Blocks:
    """The checksums of a file's blocks, as its bytes come, in pieces of any size."""

    def __init__(self) -> None:
        self.size = 0
        self._block = hashlib.sha256()
        self._complete: list[str] = []

    def update(self, piece: bytes) -> None:
        """Take these bytes as the next ones."""
        rest = memoryview(piece)
        while rest:
            if self.size == (len(self._complete) + 1) * BLOCK:
                self._complete.append(self._block.hexdigest())
                self._block = hashlib.sha256()
            part = rest[: BLOCK - self.size % BLOCK]
            self._block.update(part)
            self.size += len(part)
            rest = rest[len(part) :]

    def checksums(self) -> tuple[str, ...]:
        """Return the checksums of the bytes that have come, as `File.blocks`."""
        return (*self._complete, self._block.hexdigest())


def decode(data: bytes) -> CheckpointManifest:
    """Return the manifest. Raises CheckpointDamagedError if it is invalid or lists files outside its folder."""
    try:
        manifest = json_decoder(CheckpointManifest)(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointDamagedError(f"the manifest cannot be decoded: {error}") from error
    if manifest.layout != LAYOUT:
        raise CheckpointDamagedError(f"manifest layout mismatch: found {manifest.layout}, this build reads {LAYOUT}")
    names = [file.name for file in manifest.files]
    if not names or len(set(names)) != len(names):
        raise CheckpointDamagedError("the manifest lists no file, or one file twice")
    if both := folder_and_file(names):
        raise CheckpointDamagedError(f"the manifest lists {both} as a file and as a folder")
    for file in manifest.files:
        other = not file.upload or is_upload(file.upload)
        if not (other and file.plausible):
            raise CheckpointDamagedError(
                f"invalid entry {file.name!r} in the manifest: its name, size or checksum is not valid"
            )
    return manifest


def folder_and_file(names: Iterable[str]) -> str:
    """Return a name that is also the folder of another one, as no folder of files can have; "" if there is none."""
    known = set(names)
    parents = (str(parent) for name in known for parent in PurePosixPath(name).parents)
    return min((parent for parent in parents if parent in known), default="")


def is_safe(name: str) -> bool:
    """Return whether a relative path stays below its folder, on every system."""
    parts = PurePosixPath(name).parts
    return (
        0 < len(name) <= MOST_NAME
        and name.isprintable()
        and not set(name) & set('\\:*?"<>|')
        and "/".join(parts) == name
        and not name.startswith("/")
        and ".." not in parts
    )


def check_file_name(name: str) -> str:
    """Return the name of a file to upload, or raise UsageError."""
    if not is_safe(name):
        raise UsageError(
            f'the file name {name!r} is not portable; rename it: printable characters, without \\ : * ? " < > |'
        )
    return name

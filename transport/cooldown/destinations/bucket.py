"""An object store as destination, through fsspec: Google Cloud Storage, and what S3 has in common with it.

An object appears complete or not at all. An upload that failed must not be completed later: fsspec's files do that when
they are closed or garbage-collected.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, BinaryIO, Final

from transport.cooldown.destinations import base
from transport.cooldown.destinations.base import PIECE, Destination, service_errors
from transport.cooldown.destinations.masking import masked
from transport.errors import DestinationError, MissingDependencyError
from transport.runtime.error_text import error_text
from transport.runtime.installing import install

log = logging.getLogger(__name__)

PART: Final = 16 << 20  # of a multipart upload
MOST_PARTS: Final = 9_000  # S3 takes 10 000
MD5: Final = "md5"  # the kind of proof of Google's service: of all bytes, in base64
ETAG: Final = "etag"  # the kind of proof of S3
_PACKAGES: Final = {"s3": "s3fs", "gs": "gcsfs"}  # each is an extra named like the scheme
_PROOFS: Final = {ETAG: "ETag", MD5: "md5Hash"}  # what fsspec calls them


def _limits() -> Any:
    """Return the limits of one request over aiohttp."""
    from aiohttp import ClientTimeout

    return ClientTimeout(total=base.REQUEST_S, sock_connect=base.CONNECT_S, sock_read=base.ANSWER_S)


class Bucket(Destination):
    """Objects below one prefix. Each bucket has its own fsspec file system, outside fsspec's instance cache."""

    def __init__(self, url: str) -> None:
        self.url = url
        scheme, _, self._root = url.partition("://")
        try:
            import_module(_PACKAGES[scheme])
            import fsspec
            from fsspec.config import apply_config

            # Other processes write here too.
            options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
            # What the operator has in fsspec's configuration: an argument would replace all of its key.
            given = apply_config(fsspec.get_filesystem_class(scheme), {})
            if scheme == "s3":
                limits = {"connect_timeout": base.CONNECT_S, "read_timeout": base.ANSWER_S}
                options |= {"max_concurrency": 1, "config_kwargs": limits | given.get("config_kwargs", {})}
            else:
                limits = {"requests_timeout": _limits(), "timeout": base.REQUEST_S}  # none by default
                options |= {name: given.get(name, limit) for name, limit in limits.items()}
            self._fs = fsspec.filesystem(scheme, **options)
        except ImportError as error:
            raise MissingDependencyError(
                f"destinations {scheme}://… need {_PACKAGES[scheme]} ({error}): {install(scheme)}"
            ) from error
        except Exception as error:  # the services' packages have no common base
            raise DestinationError(f"{url}: cannot be opened: {masked(error_text(error))}") from error

    def __repr__(self) -> str:
        return f"<Bucket {self.url}>"

    def names(self, path: str) -> list[str]:
        with self.translated("list", path):
            try:
                found = self._fs.ls(self._at(path), detail=False)
            except FileNotFoundError:
                return []
            return sorted({name.rstrip("/").rpartition("/")[2] for name in found} - {""})

    def size(self, path: str) -> int | None:
        with self.translated("look at", path):
            try:
                found = self._fs.info(self._at(path))
            except FileNotFoundError:
                return None
            return int(found["size"]) if found["type"] == "file" else None

    def open(self, path: str, *, seeks: bool = False) -> BinaryIO:
        cache = "none" if seeks else "readahead"
        file: BinaryIO = self._fs.open(self._at(path), "rb", block_size=PIECE, cache_type=cache)
        return file

    def write(self, path: str, size: int, pieces: Iterable[bytes]) -> dict[str, str]:
        digest = hashlib.md5(usedforsecurity=False)
        with self.translated("write", path):
            file = self._fs.open(self._at(path), "wb", block_size=part_size(size))
            try:
                for piece in pieces:
                    digest.update(piece)
                    file.write(piece)
                file.close()
            except BaseException:
                file.forced = file.closed = True  # else its own close, or its end, would complete the upload
                with self._removing(path):
                    file.discard()
                raise
        return {MD5: in_base64(digest)}

    @contextlib.contextmanager
    def _removing(self, path: str) -> Iterator[None]:
        """Remove the parts of a failed upload, whose reason the caller reports; a failure of the removal is logged."""
        try:
            with self.translated("remove the parts of", path), contextlib.suppress(FileNotFoundError):
                yield
        except DestinationError as error:
            log.warning("%s; its uploaded parts may stay, invisible as a file", error)

    def proofs(self, path: str) -> dict[str, str]:
        with self.translated("look at", path):
            found = self._fs.info(self._at(path))
            return {kind: found[name].strip('"') for kind, name in _PROOFS.items() if found.get(name)}

    def delete(self, path: str) -> None:
        with self.translated("delete", path), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._at(path), recursive=True)

    def close(self) -> None:
        """See `Destination`. Connections of gcsfs, and the thread that fsspec keeps for all, end with the process."""

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")

    def translated(self, operation: str, path: str) -> contextlib.AbstractContextManager[None]:
        return service_errors(self.url, operation, path)


def part_size(size: int) -> int:
    """Return the bytes of each part of a file of ``size`` bytes."""
    return max(PART, size // MOST_PARTS + 1)


def in_base64(digest: Any) -> str:
    """Return a digest of hashlib as the services want it."""
    return base64.b64encode(digest.digest()).decode()

"""An object store as destination, through fsspec: Google Cloud Storage, and what S3 has in common with it.

An object appears complete or not at all, so `put` is atomic. A discarded upload must not be completed later: fsspec's
files do that when they are closed or garbage-collected.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

from transport.cooldown.destinations import base
from transport.cooldown.destinations.base import PIECE, Destination, Writer, within
from transport.cooldown.destinations.masking import masked
from transport.errors import DestinationDeniedError, DestinationError, MissingDependencyError, TransportError
from transport.runtime.arguments import expect
from transport.runtime.installing import install

log = logging.getLogger(__name__)

PART: Final = 16 << 20  # of a multipart upload
MOST_PARTS: Final = 9_000  # S3 takes 10 000
MD5: Final = "md5"  # the kind of proof of Google's service: of all bytes, in base64
_PACKAGES: Final = {"s3": "s3fs", "gs": "gcsfs"}  # each is an extra named like the scheme
_DENIALS: Final = (
    "AccessDenied",
    "Forbidden",
    "Unauthorized",
    "NoCredentials",
    "PartialCredentials",
    "InvalidAccessKeyId",
)


def _limits() -> Any:
    """The limits of one request over aiohttp."""
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
            raise DestinationError(f"{url}: cannot be opened: {masked(str(error))}") from error

    def __repr__(self) -> str:
        return f"<Bucket {self.url}>"

    def names(self, path: str) -> list[str]:
        """See `Destination`."""
        with self._translated("list", path):
            self._forget()
            try:
                found = self._fs.ls(self._at(path), detail=False)
            except FileNotFoundError:
                return []
            return sorted({name.rstrip("/").rpartition("/")[2] for name in found} - {""})

    def size(self, path: str) -> int | None:
        """See `Destination`."""
        with self._translated("look at", path):
            self._forget()
            try:
                found = self._fs.info(self._at(path))
            except FileNotFoundError:
                return None
            return int(found["size"]) if found["type"] == "file" else None

    @contextlib.contextmanager
    def pieces(self, path: str) -> Iterator[Iterator[bytes]]:
        """See `Destination`."""
        with self._translated("read", path):
            file = self._fs.open(self._at(path), "rb", block_size=PIECE, cache_type="readahead")
        try:
            yield self._pieces(file, path)
        finally:
            file.close()

    def _pieces(self, file: Any, path: str) -> Iterator[bytes]:
        while True:
            with self._translated("read", path):
                piece = file.read(PIECE)
            if not piece:
                return
            yield piece

    def writer(self, path: str, size: int) -> Writer:
        """See `Destination`."""
        with self._translated("create", path):
            part = max(PART, size // MOST_PARTS + 1)
            return _ObjectWriter(self, path, self._fs.open(self._at(path), "wb", block_size=part))

    def proofs(self, path: str) -> dict[str, str]:
        """See `Destination`."""
        with self._translated("look at", path):
            self._forget()
            found = self._fs.info(self._at(path)).get("md5Hash")
            return {MD5: found} if found else {}

    def put(self, path: str, data: bytes) -> None:
        """See `Destination`."""
        expect(data, bytes, "data of put()", "bytes")
        with self._translated("create", path):
            self._fs.pipe_file(self._at(path), data)

    def delete(self, path: str) -> None:
        """See `Destination`."""
        with self._translated("delete", path):
            self._forget()
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(self._at(path), recursive=True)

    def close(self) -> None:
        """See `Destination`. Ends the service's connections; the thread that fsspec keeps for all stays."""
        session, loop = getattr(self._fs, "_s3creator", None), getattr(self._fs, "_loop", None)
        if session is not None and loop is not None and loop.is_running():
            import fsspec.asyn

            try:
                with self._translated("close the connections of", ""):
                    fsspec.asyn.sync(loop, session.__aexit__, None, None, None, timeout=5.0)
            except DestinationError as error:  # they end with the process
                log.warning("%s", error)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")

    def _forget(self) -> None:
        """Drop cached listings, because other processes write here too."""
        self._fs.invalidate_cache()

    def _translated(self, operation: str, path: str) -> contextlib.AbstractContextManager[None]:
        return translated(self.url, operation, path)


@contextlib.contextmanager
def translated(url: str, operation: str, path: str) -> Iterator[None]:
    """Raise a service's errors as DestinationError, or DestinationDeniedError, without secrets in their text."""
    within(path, root=operation in ("list", "close the connections of"))
    try:
        yield
    except TransportError:
        raise
    except Exception as error:  # the services' packages have no common base, and some errors none but this
        where = f"{url}: cannot {operation} {path or 'it'}"
        kind = type(error).__name__
        why = masked(f"{kind}: {error}")
        text = f"{kind} {error}"
        if isinstance(error, PermissionError) or any(each in text for each in _DENIALS):
            raise DestinationDeniedError(f"{where}: {why}") from None  # the cause's text has not been masked
        raise DestinationError(f"{where}: {why}") from None


class _ObjectWriter(Writer):
    def __init__(self, bucket: Bucket, path: str, file: Any) -> None:
        self._bucket = bucket
        self._path = path
        self._file = file
        self._digest = hashlib.md5(usedforsecurity=False)

    def write(self, data: bytes) -> None:
        """See `Writer`."""
        self._digest.update(data)
        with self._bucket._translated("write", self._path):
            self._file.write(data)

    def finish(self) -> None:
        """See `Writer`."""
        with self._bucket._translated("write", self._path):
            self._file.close()

    def discard(self) -> None:
        """See `Writer`. Marks the file closed first: its own close, or its end, would complete the upload."""
        if self._file.closed:
            return
        self._file.forced = True
        self._file.closed = True
        try:
            with self._bucket._translated("remove the parts of", self._path), contextlib.suppress(FileNotFoundError):
                self._file.discard()
        except DestinationError as error:  # the upload has failed already, for another reason that its caller reports
            log.warning(
                "%s; its uploaded parts may stay, invisible as a file, until the bucket's rules end them", error
            )

    def proofs(self) -> dict[str, str]:
        """See `Writer`."""
        return {MD5: base64.b64encode(self._digest.digest()).decode()}

"""Destinations of checkpoints: their interface, the check of permissions before a client joins, and their URLs.

    /path or file:///path    a folder of this host or a shared file system; no extra is needed
    s3://bucket/prefix       extra "s3";  gs://bucket/prefix  extra "gs";  hf://user/repository  extra "hf"

Credentials come from the environment, as for each service's own tools. A URL with credentials is refused, so that they
are never stored or shown.
"""

from __future__ import annotations

import abc
import contextlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self
from urllib.parse import unquote, urlsplit

from transport.cooldown.destinations.masking import masked
from transport.errors import DestinationDeniedError, DestinationError, TransportError, UsageError
from transport.folders import expanded
from transport.runtime.error_text import error_text

PROBE: Final = ".probe-"  # what names of test files begin with
PIECE: Final = 4 << 20  # bytes copied between two checks for a cancellation
SCHEMES: Final = ("s3", "gs", "hf")
# Of one try of one request; the services' packages repeat it some times.
CONNECT_S: Final = 5.0  # of S3 and Google's
ANSWER_S: Final = 60.0  # without a byte from the service
REQUEST_S: Final = 300.0  # of S3, repeats included, and of one try at Google's: in all, with the bytes of a part
_DENIALS: Final = (
    "AccessDenied",
    "Forbidden",
    "Unauthorized",
    "NoCredentials",
    "PartialCredentials",
    "InvalidAccessKeyId",
)


def within(path: str, *, root: bool = False) -> None:
    """UsageError unless this is a relative path that stays below the root: deleting "" would be deleting everything."""
    parts = path.split("/")
    if not (root and not path) and not all(part.isprintable() and part not in ("", ".", "..") for part in parts):
        raise UsageError(f"{path[:200]!a} is no path below a destination: give names with slashes between them")


class Destination(abc.ABC):
    """Files under relative paths with slashes. All methods are thread-safe and block; call them from threads.

    Paths name what is below the root; UsageError for an empty one, but for `names`, and for "..".
    All raise DestinationError, or DestinationDeniedError for a missing permission. Messages contain no secrets.
    """

    url: str
    publishes = False  # whether `publish` does anything

    @abc.abstractmethod
    def names(self, path: str) -> list[str]:
        """Sorted names of a folder's entries; none if the folder does not exist. "" is the root."""

    @abc.abstractmethod
    def size(self, path: str) -> int | None:
        """Return the bytes of a file; None if it does not exist."""

    @contextlib.contextmanager
    def pieces(self, path: str) -> Iterator[Iterator[bytes]]:
        """Yield a file's bytes from the beginning, in pieces of at most `PIECE`."""
        with self.translated("read", path):
            file = self.open(path)
        with contextlib.closing(file):
            yield self._pieces(file, path)

    def _pieces(self, file: BinaryIO, path: str) -> Iterator[bytes]:
        while True:
            with self.translated("read", path):
                piece = file.read(PIECE)
            if not piece:
                return
            yield piece

    def part(self, path: str, start: int, size: int) -> bytes:
        """``size`` bytes of a file from byte ``start`` on, and no others; fewer where the file ends before."""
        with self.translated("read", path), contextlib.closing(self.open(path, seeks=True)) as file:
            file.seek(start)
            return file.read(size)

    @abc.abstractmethod
    def open(self, path: str, *, seeks: bool = False) -> BinaryIO:
        """Return a file to read from its beginning, or from anywhere.

        Its errors are the service's: callers translate them.
        """

    @abc.abstractmethod
    def write(self, path: str, size: int, pieces: Iterable[bytes]) -> dict[str, str]:
        """Write a file of ``size`` bytes in place of the one that is there; missing folders are created.

        Readers see all of it or what was there before; on return it survives a crash. When this or ``pieces`` raises,
        nothing is left of it, where the destination permits its removal.

        Returns checksums of what was written, computed here, in the form of `proofs`.
        """

    def put(self, path: str, data: bytes) -> None:
        """Write as `write`, for a small file that needs no `settle`."""
        self.write(path, len(data), [data])

    @abc.abstractmethod
    def translated(self, operation: str, path: str) -> AbstractContextManager[None]:
        """Raise what goes wrong in an operation on a path as DestinationError, or DestinationDeniedError."""

    def settle(self, place: str) -> None:  # noqa: B027  (most destinations have nothing to do)
        """Make the files complete that were written below this upload's folder; until then they may be invisible."""

    def proofs(self, path: str) -> dict[str, str]:
        """Return the checksums by kind that the destination itself has computed from a file's bytes.

        They are empty where it has none.
        """
        return {}

    def publish(self, name: str, files: Mapping[str, str]) -> str:
        """Offer a checkpoint's files, paths by name, as this service's own tools expect it; returns where, or ""."""
        return ""

    def unpublish(self, name: str) -> None:  # noqa: B027
        """Undo `publish`. What was not published is no error."""

    def leftovers(self, path: str) -> list[str]:
        """Return the names below ``path`` of what was begun and not completed; readers see none of them."""
        return []

    def remove_leftover(self, path: str) -> None:  # noqa: B027
        """Remove all that was begun and not completed under this name."""

    @abc.abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file, or a folder with its contents. A missing one is no error."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close connections. Idempotent."""

    def read(self, path: str, most: int) -> bytes | None:
        """Return a small file's content; None if it does not exist. DestinationError for more than ``most`` bytes."""
        size = self.size(path)
        if size is None:
            return None
        if size > most:
            raise DestinationError(f"{self.url}: {path} is too large: {size} bytes, at most {most} are read")
        with self.pieces(path) as pieces:
            return b"".join(pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def service_errors(url: str, operation: str, path: str) -> Iterator[None]:
    """Raise a service's errors as DestinationError, or DestinationDeniedError, without secrets in their text."""
    within(path, root=operation == "list")
    try:
        yield
    except TransportError:
        raise
    except Exception as error:  # the services' packages have no common base, and some errors none but this
        text = error_text(error)
        denied = isinstance(error, PermissionError) or any(each in text for each in _DENIALS)
        kind = DestinationDeniedError if denied else DestinationError
        # The cause's text has not been masked.
        raise kind(f"{url}: cannot {operation} {path or 'it'}: {masked(text)}") from None


def check_permissions(destination: Destination) -> None:
    """Prove that this process can list, create, read and delete at the destination. Called before a client joins.

    Leaves nothing. Raises DestinationDeniedError naming the denied operation, DestinationError if it is unreachable.
    """
    probe = f"{PROBE}{secrets.token_hex(8)}"
    content = secrets.token_bytes(16)
    operation = "list"
    made = False
    try:
        destination.names("")
        operation = "create files in"
        made = True
        destination.put(probe, content)
        operation = "read"
        found = destination.read(probe, len(content))
        if found is None:  # as `transport cooldown prune` does with those of killed processes
            raise DestinationError(f"{destination.url}: another process removed the test file; try again")
        if found != content:
            raise DestinationDeniedError(
                f"{destination.url}: content mismatch: the test file does not have the bytes that were written"
            )
        operation = "delete from"
        made = False
        destination.delete(probe)
        if destination.size(probe) is not None:
            raise DestinationDeniedError(f"{destination.url}: the test file {probe} still exists after it was deleted")
    except DestinationError as error:
        raise type(error)(
            f"this client cannot join: it cannot {operation} the destination {destination.url} ({error})"
        ) from error
    finally:
        if made:  # perhaps: what failed, or an interrupt, came before its removal
            with contextlib.suppress(DestinationError):
                destination.delete(probe)


def normalise(url: str) -> str:
    """Return the URL in its stored form: absolute folder, no slash at the end.

    Raises UsageError for an unknown scheme, or if the URL seems to contain a credential.
    """
    scheme, _, rest = url.partition("://")
    if not _:
        return _folder_url(url)
    parts = urlsplit(url)
    if scheme != "file" and (parts.query or parts.fragment or "@" in parts.netloc):
        raise UsageError(
            f"destination {scheme}://… contains credentials or options: give scheme, bucket and path only, and "
            f"credentials in the environment"
        )
    if scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise UsageError(f"{url}: a folder's URL has three slashes, file:///path")
        if parts.query or parts.fragment or url[-1:] in "?#":
            raise UsageError(f"{url}: in a folder's URL write %3F for ? and %23 for #; or give the path itself")
        return _folder_url(unquote(parts.path))
    if scheme not in SCHEMES:
        raise UsageError(
            f"destination {scheme}://…: choose a folder, or one of {', '.join(f'{s}://' for s in SCHEMES)}"
        )
    if not parts.netloc:
        raise UsageError(f"destination {url}: the {'repository' if scheme == 'hf' else 'bucket'} is missing")
    return f"{scheme}://{rest.strip('/')}"


def _folder_url(path: str) -> str:
    if not path:
        raise UsageError("the destination is empty: give a folder or a URL")
    return expanded(path).resolve().as_uri()


def folder_of(url: str) -> Path | None:
    """Return the folder that a normalised URL names; None for a service."""
    return Path(unquote(urlsplit(url).path)) if url.startswith("file://") else None

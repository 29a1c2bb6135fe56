"""The destination that a URL names."""

from __future__ import annotations

from transport.cooldown.destinations.base import Destination, folder_of, normalise
from transport.cooldown.destinations.bucket import Bucket
from transport.cooldown.destinations.folder import Folder
from transport.cooldown.destinations.hub import Hub
from transport.cooldown.destinations.s3 import S3


def open_destination(url: str) -> Destination:
    """Open the destination of a URL. Nothing is read or written yet, except by a service's package when it starts.

    Raises UsageError as `normalise` does, MissingDependencyError if the service's package is not installed.
    """
    url = normalise(url)
    folder = folder_of(url)
    if folder is not None:
        return Folder(folder)
    if url.startswith("hf://"):
        return Hub(url)
    return S3(url) if url.startswith("s3://") else Bucket(url)

"""S3 as destination: files are uploaded in parts, several at a time, and proven by the service's own checksums.

The service's ETag of an object is the MD5 of its bytes, or of the MD5s of its parts with their number; the writer
computes the same from what it read. Where the service encrypts with managed keys the ETag is something else, and files
are read back instead.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import concurrent.futures
import hashlib
import logging
from collections.abc import Coroutine
from typing import Any, Final

from transport.cooldown.destinations import base
from transport.cooldown.destinations.base import Writer
from transport.cooldown.destinations.bucket import MOST_PARTS, PART, Bucket
from transport.errors import DestinationError

log = logging.getLogger(__name__)

PARTS_AT_ONCE: Final = 4  # of one file: its writer's memory is this many parts and one
ETAG: Final = "etag"  # the kind of proof
_CHECK_S: Final = 0.5


class S3(Bucket):
    """A bucket of S3, or of a service that speaks its protocol."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        call = self._fs._call_s3

        async def bounded(*arguments: Any, **named: Any) -> Any:
            """s3fs's limits do not count while an upload waits for "100 Continue"."""
            async with asyncio.timeout(base.REQUEST_S):
                return await call(*arguments, **named)

        self._fs._call_s3 = bounded

    def writer(self, path: str, size: int) -> Writer:
        """See `Destination`."""
        part = max(PART, size // MOST_PARTS + 1)
        return _PartsWriter(self, path, part, in_parts=size > part)

    def proofs(self, path: str) -> dict[str, str]:
        """See `Destination`."""
        with self._translated("look at", path):
            found = self.call("head_object", path).result()
            return {ETAG: str(found["ETag"]).strip('"')}

    def leftovers(self, path: str) -> list[str]:
        """See `Destination`. Multipart uploads of killed processes, which cost money where no listing shows them."""
        with self._translated("list the unfinished uploads of", path):
            below = f"{self._key(path)}/" if self._key(path) else ""
            begun = [each["Key"] for each in self._unfinished() if each["Key"].startswith(below)]
            skip = len(self._key("")) + 1 if self._key("") else 0
            return [key[skip:] for key in begun]

    def remove_leftover(self, path: str) -> None:
        """See `Destination`."""
        with self._translated("remove the unfinished uploads of", path):
            for each in self._unfinished():
                if each["Key"] == self._key(path):
                    self.call("abort_multipart_upload", path, UploadId=each["UploadId"]).result()

    def call(self, method: str, path: str, **options: Any) -> concurrent.futures.Future[dict[str, Any]]:
        """Begin a call on an object; fsspec's thread runs it, and repeats it when the service asks to slow down."""
        name = self._at(path)
        bucket, key, _ = self._fs.split_path(name)
        return self._begin(self._fs._call_s3(method, Bucket=bucket, Key=key, **options))

    def _begin(self, call: Coroutine[Any, Any, dict[str, Any]]) -> concurrent.futures.Future[dict[str, Any]]:
        return asyncio.run_coroutine_threadsafe(call, self._fs.loop)

    def _key(self, path: str) -> str:
        return self._at(path).partition("/")[2]

    def _unfinished(self) -> list[dict[str, Any]]:
        bucket = self._root.partition("/")[0]
        found: list[dict[str, Any]] = []
        marker: dict[str, Any] = {}
        while True:
            page = self._begin(self._fs._call_s3("list_multipart_uploads", Bucket=bucket, **marker)).result()
            found += page.get("Uploads") or []
            if not page.get("IsTruncated"):
                return found
            marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


class _PartsWriter(Writer):
    """One object: a single put, or a multipart upload that is aborted when it is discarded."""

    def __init__(self, bucket: S3, path: str, part: int, *, in_parts: bool) -> None:
        self._bucket = bucket
        self._path = path
        self._part = part
        self._buffer = bytearray()
        self._digests: list[bytes] = []  # of each part
        self._tags: list[str] = []
        self._sending: collections.deque[concurrent.futures.Future[dict[str, Any]]] = collections.deque()
        self._upload_id = ""
        self._ended = False
        self._etag = ""
        if in_parts:
            with bucket._translated("create", path):
                self._upload_id = bucket.call("create_multipart_upload", path).result()["UploadId"]

    def write(self, data: bytes) -> None:
        """See `Writer`. Waits for a part to be sent when `PARTS_AT_ONCE` are."""
        self._buffer += data
        while self._upload_id and len(self._buffer) >= self._part:
            piece = bytes(memoryview(self._buffer)[: self._part])
            del self._buffer[: self._part]
            self._send(piece)

    def finish(self) -> None:
        """See `Writer`."""
        with self._bucket._translated("write", self._path):
            if not self._upload_id:
                data = bytes(self._buffer)
                digest = hashlib.md5(data, usedforsecurity=False)
                self._etag = digest.hexdigest()
                self._bucket.call("put_object", self._path, Body=data, ContentMD5=_base64(digest.digest())).result()
            else:
                if self._buffer or not self._digests:
                    self._send(bytes(self._buffer))
                while self._sending:
                    self._sent()
                parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(self._tags, 1)]
                whole = hashlib.md5(b"".join(self._digests), usedforsecurity=False)
                self._etag = f"{whole.hexdigest()}-{len(parts)}"
                complete = {"UploadId": self._upload_id, "MultipartUpload": {"Parts": parts}}
                self._bucket.call("complete_multipart_upload", self._path, **complete).result()
        self._ended = True

    def discard(self) -> None:
        """See `Writer`."""
        if self._ended:
            return
        self._ended = True
        for call in self._sending:
            call.cancel()
        concurrent.futures.wait(self._sending, _CHECK_S)
        if not self._upload_id:
            return
        try:
            with self._bucket._translated("remove the parts of", self._path):
                self._bucket.call("abort_multipart_upload", self._path, UploadId=self._upload_id).result()
        except DestinationError as error:  # the upload has failed already, for another reason that its caller reports
            if "NoSuchUpload" not in str(error) and "FileNotFoundError" not in str(error):
                log.warning("%s; its parts stay, invisible as a file, until transport cooldown prune ends them", error)

    def proofs(self) -> dict[str, str]:
        """See `Writer`."""
        return {ETAG: self._etag}

    def _send(self, piece: bytes) -> None:
        if len(self._sending) >= PARTS_AT_ONCE:
            with self._bucket._translated("write", self._path):
                self._sent()
        digest = hashlib.md5(piece, usedforsecurity=False).digest()
        self._digests.append(digest)
        options = {"UploadId": self._upload_id, "PartNumber": len(self._digests), "ContentMD5": _base64(digest)}
        self._sending.append(self._bucket.call("upload_part", self._path, Body=piece, **options))

    def _sent(self) -> None:
        """Wait for the oldest part that is being sent."""
        self._tags.append(self._sending.popleft().result()["ETag"])


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()

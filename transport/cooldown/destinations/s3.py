"""S3 as destination: files are uploaded in parts, several at a time, and proven by the service's own checksums.

The service's ETag of an object is the MD5 of its bytes, or of the MD5s of its parts with their number; `write` computes
the same from what it sends. Where the service encrypts with managed keys the ETag is something else, and files are read
back instead.

fsspec's own files send one part at a time, and its whole-file upload reads the file a second time for the checksum. So
parts are sent here, each by a call of s3fs to the service.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Final

from transport.cooldown.destinations import base
from transport.cooldown.destinations.bucket import ETAG, Bucket, in_base64, part_size
from transport.runtime.blocking_calls import started

log = logging.getLogger(__name__)

PARTS_AT_ONCE: Final = 4  # of one file: the memory of `write` is this many parts and one
_STOP_S: Final = 5.0  # for parts on their way when an upload fails


class S3(Bucket):
    """A bucket of S3, or of a service that speaks its protocol."""

    _used = False  # by then there may be connections

    def write(self, path: str, size: int, pieces: Iterable[bytes]) -> dict[str, str]:
        part = part_size(size)
        with self.translated("write", path):
            if size > part:
                return {ETAG: self._write_parts(path, part, pieces)}
            data = b"".join(pieces)
            digest = hashlib.md5(data, usedforsecurity=False)
            self._call("put_object", path, Body=data, ContentMD5=in_base64(digest))
            return {ETAG: digest.hexdigest()}

    def _write_parts(self, path: str, part: int, pieces: Iterable[bytes]) -> str:
        upload = self._call("create_multipart_upload", path)["UploadId"]
        digests: list[bytes] = []  # of each part
        sent: list[Future[dict[str, Any]]] = []
        try:
            for number, data in enumerate(_parts(pieces, part), 1):
                if len(sent) >= PARTS_AT_ONCE:
                    sent[-PARTS_AT_ONCE].result()
                digest = hashlib.md5(data, usedforsecurity=False)
                digests.append(digest.digest())
                options = {"UploadId": upload, "PartNumber": number, "ContentMD5": in_base64(digest), "Body": data}
                sent.append(started(partial(self._call, "upload_part", path, **options)))
            parts = [{"PartNumber": number, "ETag": each.result()["ETag"]} for number, each in enumerate(sent, 1)]
            self._call("complete_multipart_upload", path, UploadId=upload, MultipartUpload={"Parts": parts})
        except BaseException:
            wait(sent, _STOP_S)  # a part that arrives behind the end stays until `transport cooldown prune`
            with self._removing(path):
                self._call("abort_multipart_upload", path, UploadId=upload)
            raise
        return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"

    def leftovers(self, path: str) -> list[str]:
        """See `Destination`. Multipart uploads of killed processes, which cost money where no listing shows them."""
        with self.translated("list the unfinished uploads of", path):
            skip = len(self._key(path)) - len(path)
            return [each["Key"][skip:] for each in self._unfinished(f"{self._key(path)}/")]

    def remove_leftover(self, path: str) -> None:
        with self.translated("remove the unfinished uploads of", path):
            for each in self._unfinished(self._key(path)):
                if each["Key"] == self._key(path):
                    self._call("abort_multipart_upload", path, UploadId=each["UploadId"])

    def close(self) -> None:
        """See `Destination`. Ends the service's connections; the thread that fsspec keeps for all stays."""
        if self._used and self._fs.loop.is_running():
            import fsspec.asyn

            with contextlib.suppress(Exception):  # they end with the process
                fsspec.asyn.sync(self._fs.loop, self._fs.s3.close, timeout=base.CONNECT_S)

    def translated(self, operation: str, path: str) -> contextlib.AbstractContextManager[None]:
        self._used = True
        return super().translated(operation, path)

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Call a method on an object, which s3fs repeats when the service asks to slow down.

        It is given up after `REQUEST_S`: the service's own limits do not count while bytes wait for "100 Continue".
        """
        bucket, key, _ = self._fs.split_path(self._at(path))
        done: dict[str, Any] = self._fs.call_s3(method, Bucket=bucket, Key=key, timeout=base.REQUEST_S, **options)
        return done

    def _key(self, path: str) -> str:
        return self._at(path).partition("/")[2]

    def _unfinished(self, prefix: str) -> list[dict[str, Any]]:
        where = {"Bucket": self._root.partition("/")[0], "Prefix": prefix}
        found: list[dict[str, Any]] = []
        marker: dict[str, Any] = {}
        while True:
            page = self._fs.call_s3("list_multipart_uploads", **where, timeout=base.REQUEST_S, **marker)
            found += page.get("Uploads") or []
            if not page.get("IsTruncated"):
                return found
            marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def _parts(pieces: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Return the same bytes in parts of ``size``, the last one smaller."""
    buffer = bytearray()
    for piece in pieces:
        buffer += piece
        while len(buffer) >= size:
            yield bytes(memoryview(buffer)[:size])
            del buffer[:size]
    if buffer:
        yield bytes(buffer)

"""A repository of Hugging Face as destination: an upload is a branch with its files at the root.

    RUN/epoch-N/CLIENT/ATTEMPT/files/NAME      NAME                    on branch upload/RUN/epoch-N/CLIENT/ATTEMPT
    RUN/epoch-N/CLIENT/ATTEMPT/manifest.json   .transport/manifest.json  on that branch
    everything else                            the same path           on main

The bytes of a file go to the service when it is written; one commit makes all files of an upload visible, since commits
are limited in number. A published checkpoint is a branch of its own, named RUN-epoch-N, with the files at its root, so
that ``from_pretrained(repository, revision="RUN-epoch-N")`` loads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar
from urllib.parse import quote

from transport.cooldown.destinations import base
from transport.cooldown.destinations.base import Destination
from transport.errors import MissingDependencyError, UsageError
from transport.runtime.installing import install

MAIN: Final = "main"
BRANCHES: Final = "upload/"
MANIFEST: Final = ".transport/manifest.json"
SHA256: Final = "sha256"  # the service's checksum of a large file
GIT: Final = "git"  # of a small one: git's, of a blob
TRIES: Final = 5  # of a commit to main, where others commit too
_UPLOAD: Final = re.compile(r"([^/]+/epoch-\d{12}/[^/]+/[0-9a-f]{16})(?:/(.*))?")
_KEPT: Final = (".gitattributes", "README.md")  # of what main has, in a published checkpoint

T = TypeVar("T")


def _bound_requests() -> None:
    """Bound the requests that the service's package makes without a limit; what the program has set stays as it is.

    The limit for connecting is that of an answer: urllib3 also applies it while it sends the bytes, during which a
    service may pause. An adapter that is not the package's own is the program's.
    """
    from huggingface_hub.utils import get_session

    session = get_session()
    hooks = getattr(session, "event_hooks", None)
    if hooks is not None:  # httpx, one for all threads: from 1.0 on
        if _limit not in hooks["request"]:
            hooks["request"].append(_limit)
        return
    for adapter in session.adapters.values():  # requests, one for each thread
        if type(adapter).__module__.startswith("huggingface_hub") and "send" not in vars(adapter):
            adapter.send = partial(_send, adapter.send)


def _send(send: Callable[..., Any], request: Any, *, timeout: Any = None, **options: Any) -> Any:
    return send(request, timeout=(base.ANSWER_S, base.ANSWER_S) if timeout is None else timeout, **options)


def _limit(request: Any) -> None:
    """Limit a request of httpx, by its extensions."""
    given = request.extensions.get("timeout") or {}
    if not any(given.values()):
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), base.ANSWER_S)


class Hub(Destination):
    """One repository. Methods block; commits of one process are made one after the other."""

    publishes = True

    def __init__(self, url: str) -> None:
        self.url = url
        parts = url.partition("://")[2].split("/")
        kind = parts.pop(0)[:-1] if parts[0] in ("datasets", "spaces", "models") else "model"
        if len(parts) != 2 or "@" in url:
            raise UsageError(f"destination {url}: give hf://user/repository; each upload gets a revision of its own")
        self._repository = {"repo_id": "/".join(parts), "repo_type": kind}
        try:
            from huggingface_hub import HfApi
        except ImportError as error:
            raise MissingDependencyError(
                f"destinations hf://… need huggingface_hub ({error}): {install('hf')}"
            ) from error
        self._api: Any = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="payload-transport")
        self._lock = threading.Lock()
        self._pending: dict[str, list[Any]] = {}  # operations by branch
        self._made: set[str] = set()  # branches

    def __repr__(self) -> str:
        return f"<Hub {self.url}>"

    def names(self, path: str) -> list[str]:
        branch, inner = _placed(path)
        with self.translated("list", path):
            if branch != MAIN:
                found = self._files(branch)
                return sorted({"files" if name != MANIFEST else "manifest.json" for name in found}) if not inner else []
            below = f"{path}/" if path else ""
            known = [*(name.removeprefix(BRANCHES) for name in self._branches()), *self._files(MAIN)]
            inside = [name.removeprefix(below) for name in known if name.startswith(below)]
            return sorted({name.partition("/")[0] for name in inside})

    def size(self, path: str) -> int | None:
        with self.translated("look at", path):
            found = self._info(path)
            return None if found is None else int(found.size)

    def proofs(self, path: str) -> dict[str, str]:
        with self.translated("look at", path):
            found = self._info(path)
            if found is None:
                return {}
            return {SHA256: str(found.lfs.sha256)} if found.lfs else {GIT: str(found.blob_id)}

    def open(self, path: str, *, seeks: bool = False) -> BinaryIO:
        from huggingface_hub import HfFileSystem

        branch, inner = _placed(path)
        kind = self._repository["repo_type"]
        repository = ("" if kind == "model" else f"{kind}s/") + self._repository["repo_id"]
        system = HfFileSystem(endpoint=os.environ.get("HF_ENDPOINT"), skip_instance_cache=True)
        how: dict[str, Any] = {"cache_type": "none"} if seeks else {"block_size": 0}  # 0: one answer, as it comes
        file: BinaryIO = system.open(f"{repository}@{quote(branch, safe='')}/{inner}", "rb", **how)
        return file

    def write(self, path: str, size: int, pieces: Iterable[bytes]) -> dict[str, str]:
        """See `Destination`. Visible after `settle`. From a copy: the service gets a file's checksum before its bytes.

        The copy of a large file goes as soon as the service has the bytes, that of a small one with its commit.
        The service has git's checksum of a small file, which is computed here, or SHA-256 of a large one, which its
        package computes for it.
        """
        from huggingface_hub import CommitOperationAdd

        branch, inner = _placed(path)
        digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
        with self.translated("write", path):
            descriptor, name = tempfile.mkstemp(prefix="transport-")
            try:
                with os.fdopen(descriptor, "wb") as copy:
                    for piece in pieces:
                        digest.update(piece)
                        copy.write(piece)
                self._make(branch)
                operation = CommitOperationAdd(path_in_repo=inner, path_or_fileobj=name)
                self._api.preupload_lfs_files(**self._repository, additions=[operation], revision=branch)
                if not operation.path_or_fileobj:  # the package forgets what it has sent
                    Path(name).unlink()
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
            with self._lock:
                self._pending.setdefault(branch, []).append(operation)
        return {GIT: digest.hexdigest(), SHA256: operation.upload_info.sha256.hex()}

    def settle(self, place: str) -> None:
        branch, _ = _placed(place)
        with self._lock:
            pending = self._pending.pop(branch, [])
        try:
            if pending:
                with self.translated("write", place):
                    self._commit(branch, pending, f"Upload {place}")
        finally:
            _remove_copies(pending)

    def put(self, path: str, data: bytes) -> None:
        from huggingface_hub import CommitOperationAdd

        branch, inner = _placed(path)
        with self.translated("create", path):
            self._make(branch)
            self._commit(branch, [CommitOperationAdd(path_in_repo=inner, path_or_fileobj=data)], f"Write {path}")

    def delete(self, path: str) -> None:
        """See `Destination`. An upload ends with its branch; the service frees its bytes later."""
        from huggingface_hub import CommitOperationDelete

        branch, inner = _placed(path)
        with self.translated("delete", path):
            if branch != MAIN and inner:
                if self._info(path) is not None:
                    self._commit(branch, [CommitOperationDelete(path_in_repo=inner)], f"Delete {path}")
                return
            for name in self._branches():
                if f"{name}/".startswith(f"{BRANCHES}{path}/"):
                    self._discard(name)
            gone = [name for name in self._files(MAIN) if f"{name}/".startswith(f"{path}/")]
            if gone:
                self._commit(MAIN, [CommitOperationDelete(path_in_repo=name) for name in gone], f"Delete {path}")

    def publish(self, name: str, files: Mapping[str, str]) -> str:
        """See `Destination`. Large files are not copied: the new branch names the same bytes."""
        from huggingface_hub import CommitOperationCopy, CommitOperationDelete

        with self.translated("publish", name):
            first = _placed(next(iter(files.values())))[0]
            self._api.create_branch(**self._repository, branch=name, revision=first, exist_ok=True)
            there = self._files(name)
            places = {file: _placed(path) for file, path in files.items()}
            copies = [
                CommitOperationCopy(src_path_in_repo=inner, path_in_repo=file, src_revision=branch)
                for file, (branch, inner) in sorted(places.items(), key=lambda place: place[1])
                if branch != first or inner != file
            ]
            surplus = [CommitOperationDelete(path_in_repo=each) for each in there if each not in {*files, *_KEPT}]
            if copies or surplus:
                self._commit(name, [*copies, *surplus], f"Publish {name}")
            return f"published: {self._repository['repo_id']}, revision {name}"

    def unpublish(self, name: str) -> None:
        with self.translated("delete", name):
            self._discard(name)

    def close(self) -> None:
        """See `Destination`. Removes the temporary files of uploads that were not completed, and forgets connections.

        The service's package keeps a session for each thread that ever called it.
        """
        with self._lock:
            for operations in self._pending.values():
                _remove_copies(operations)
            self._pending.clear()  # last, so that after an interrupt the next call finishes
        import huggingface_hub.utils as package

        forget = getattr(package, "reset_sessions", None) or getattr(package, "close_session", None)
        if forget is not None:
            forget()

    def translated(self, operation: str, path: str) -> contextlib.AbstractContextManager[None]:
        _bound_requests()
        return base.service_errors(self.url, operation, path)

    # --- the service ----------------------------------------------------------------------------------
    def _make(self, branch: str) -> None:
        with self._lock:
            if branch != MAIN and branch not in self._made:
                self._api.create_branch(**self._repository, branch=branch, exist_ok=True)
                self._made.add(branch)

    def _discard(self, branch: str) -> None:
        with self._lock:
            self._made.discard(branch)
        _absent(lambda: self._api.delete_branch(**self._repository, branch=branch))

    def _branches(self) -> list[str]:
        return [each.name for each in self._api.list_repo_refs(**self._repository).branches]

    def _files(self, branch: str) -> list[str]:
        def listed() -> list[str]:
            found = self._api.list_repo_tree(**self._repository, revision=branch, recursive=True)
            return [each.path for each in found if hasattr(each, "blob_id")]

        return _absent(listed) or []

    def _info(self, path: str) -> Any:
        branch, inner = _placed(path)
        if not inner:
            return None
        found = _absent(lambda: self._api.get_paths_info(**self._repository, paths=[inner], revision=branch))
        return found[0] if found and hasattr(found[0], "blob_id") else None

    def _commit(self, branch: str, operations: list[Any], message: str) -> None:
        """Make one commit; again if another process has committed meanwhile."""
        from huggingface_hub.errors import HfHubHTTPError

        for left in reversed(range(TRIES)):
            try:
                self._api.create_commit(
                    **self._repository, operations=operations, commit_message=message, revision=branch
                )
                return
            except HfHubHTTPError as error:
                if not left or error.response is None or error.response.status_code not in (409, 412):
                    raise


def _remove_copies(operations: list[Any]) -> None:
    """Remove the files of these operations that the service does not have yet. Idempotent."""
    for each in operations:
        if each.path_or_fileobj:
            Path(each.path_or_fileobj).unlink(missing_ok=True)


def _placed(path: str) -> tuple[str, str]:
    """Branch of a path, and path in the repository."""
    found = _UPLOAD.fullmatch(path)
    if found is None:
        return MAIN, path
    place, inner = found.groups()
    if inner == "manifest.json":
        return BRANCHES + place, MANIFEST
    return BRANCHES + place, (inner or "").removeprefix("files").removeprefix("/")


def _absent(call: Callable[[], T]) -> T | None:
    """Return the call's result; None if branch or file does not exist.

    A repository that does not exist stays an error.
    """
    from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

    try:
        return call()
    except (EntryNotFoundError, RevisionNotFoundError):
        return None

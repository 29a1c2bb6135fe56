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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

from transport.cooldown.destinations import base
from transport.cooldown.destinations.base import PIECE, Destination, Writer
from transport.cooldown.destinations.bucket import translated
from transport.errors import DestinationError, MissingDependencyError, UsageError
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
    """Bound the requests of the service's package that have no limit, unless the program makes its own sessions."""
    http: Any = import_module("huggingface_hub.utils._http")
    if hasattr(http, "set_client_factory"):  # from 1.0 on
        default, current, use = http.default_client_factory, http._GLOBAL_CLIENT_FACTORY, http.set_client_factory
        bound: Callable[[Any], None] = _bound_client
    else:
        default, current, use = http._default_backend_factory, http._GLOBAL_BACKEND_FACTORY, http.configure_http_backend
        bound = _bound_session
    if default != current:
        return

    def bounded() -> Any:
        made = default()
        bound(made)
        return made

    use(bounded)


def _bound_session(session: Any) -> None:
    """Of requests."""
    for adapter in session.adapters.values():
        adapter.send = partial(_send, adapter.send)


def _send(send: Callable[..., Any], request: Any, *, timeout: Any = None, **options: Any) -> Any:
    """Send through an adapter; a request without a limit gets one.

    The limit for connecting is that of an answer: urllib3 also applies it while it sends the bytes, during which a
    service may pause.
    """
    return send(request, timeout=(base.ANSWER_S, base.ANSWER_S) if timeout is None else timeout, **options)


def _bound_client(client: Any) -> None:
    """Of httpx: the limits of a request stand in its extensions."""
    client.event_hooks["request"].append(_limit)


def _limit(request: Any) -> None:
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
        _bound_requests()
        self._api: Any = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="payload-transport")
        self._lock = threading.Lock()
        self._pending: dict[str, list[tuple[Any, Path]]] = {}  # by branch: operations, and their temporary files
        self._made: set[str] = set()  # branches

    def __repr__(self) -> str:
        return f"<Hub {self.url}>"

    def names(self, path: str) -> list[str]:
        """See `Destination`."""
        branch, inner = _placed(path)
        with translated(self.url, "list", path):
            if branch != MAIN:
                found = self._files(branch)
                return sorted({"files" if name != MANIFEST else "manifest.json" for name in found}) if not inner else []
            below = f"{path}/" if path else ""
            known = [*(name.removeprefix(BRANCHES) for name in self._branches()), *self._files(MAIN)]
            inside = [name.removeprefix(below) for name in known if name.startswith(below)]
            return sorted({name.partition("/")[0] for name in inside})

    def size(self, path: str) -> int | None:
        """See `Destination`."""
        with translated(self.url, "look at", path):
            found = self._info(path)
            return None if found is None else int(found.size)

    def proofs(self, path: str) -> dict[str, str]:
        """See `Destination`."""
        with translated(self.url, "look at", path):
            found = self._info(path)
            if found is None:
                return {}
            return {SHA256: str(found.lfs.sha256)} if found.lfs else {GIT: str(found.blob_id)}

    @contextlib.contextmanager
    def pieces(self, path: str) -> Iterator[Iterator[bytes]]:
        """See `Destination`."""
        from huggingface_hub import HfFileSystem

        branch, inner = _placed(path)
        kind = self._repository["repo_type"]
        repository = ("" if kind == "model" else f"{kind}s/") + self._repository["repo_id"]
        with translated(self.url, "read", path):
            system = HfFileSystem(endpoint=os.environ.get("HF_ENDPOINT"), skip_instance_cache=True)
            file = system.open(f"{repository}@{quote(branch, safe='')}/{inner}", "rb", block_size=0)
        try:
            yield self._pieces(file, path)
        finally:
            file.close()

    def _pieces(self, file: Any, path: str) -> Iterator[bytes]:
        while True:
            with translated(self.url, "read", path):
                piece = file.read(PIECE)
            if not piece:
                return
            yield piece

    def writer(self, path: str, size: int) -> Writer:
        """See `Destination`. The file is first written to a temporary one: its checksum comes before its bytes."""
        return _HubWriter(self, path, size)

    def send(self, path: str, file: Path) -> None:
        """Send a file's bytes; `settle` makes it visible."""
        from huggingface_hub import CommitOperationAdd

        branch, inner = _placed(path)
        with translated(self.url, "write", path):
            self._make(branch)
            operation = CommitOperationAdd(path_in_repo=inner, path_or_fileobj=file)
            self._api.preupload_lfs_files(**self._repository, additions=[operation], revision=branch)
            with self._lock:
                self._pending.setdefault(branch, []).append((operation, file))

    def settle(self, place: str) -> None:
        """See `Destination`."""
        branch, _ = _placed(place)
        with self._lock:
            pending = self._pending.pop(branch, [])
        try:
            if pending:
                with translated(self.url, "write", place):
                    self._commit(branch, [operation for operation, _ in pending], f"Upload {place}")
        finally:
            for _, file in pending:
                file.unlink(missing_ok=True)

    def put(self, path: str, data: bytes) -> None:
        """See `Destination`."""
        from huggingface_hub import CommitOperationAdd

        branch, inner = _placed(path)
        with translated(self.url, "create", path):
            self._make(branch)
            self._commit(branch, [CommitOperationAdd(path_in_repo=inner, path_or_fileobj=data)], f"Write {path}")

    def delete(self, path: str) -> None:
        """See `Destination`. An upload ends with its branch; the service frees its bytes later."""
        from huggingface_hub import CommitOperationDelete

        branch, inner = _placed(path)
        with translated(self.url, "delete", path):
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

        with translated(self.url, "publish", name):
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
        """See `Destination`."""
        with translated(self.url, "delete", name):
            self._discard(name)

    def close(self) -> None:
        """See `Destination`. Removes the temporary files of uploads that were not completed, and forgets connections.

        The service's package keeps a session for each thread that ever called it.
        """
        with self._lock:
            pending, self._pending = self._pending, {}
        for _, file in [each for some in pending.values() for each in some]:
            file.unlink(missing_ok=True)
        import huggingface_hub.utils as package

        forget = getattr(package, "reset_sessions", None) or getattr(package, "close_session", None)
        if forget is not None:
            forget()

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
        """One commit; again if another process has committed meanwhile."""
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


class _HubWriter(Writer):
    def __init__(self, hub: Hub, path: str, size: int) -> None:
        self._hub = hub
        self._path = path
        self._digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
        descriptor, name = tempfile.mkstemp(prefix="transport-")
        self._file = os.fdopen(descriptor, "wb")
        self._name = Path(name)
        self._sent = False

    def write(self, data: bytes) -> None:
        """See `Writer`."""
        self._digest.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            raise DestinationError(f"{self._name}, on the way to {self._path}: {error.strerror}") from error

    def finish(self) -> None:
        """See `Writer`."""
        self._file.close()
        self._hub.send(self._path, self._name)
        self._sent = True

    def discard(self) -> None:
        """See `Writer`."""
        if not self._sent:
            with contextlib.suppress(OSError):
                self._file.close()
            self._name.unlink(missing_ok=True)

    def proofs(self) -> dict[str, str]:
        """See `Writer`."""
        return {GIT: self._digest.hexdigest()}


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
    """The call's result; None if branch or file does not exist. A repository that does not exist stays an error."""
    from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

    try:
        return call()
    except (EntryNotFoundError, RevisionNotFoundError):
        return None

"""The only file that imports ucxx: settings, the worker and its progress, error classes, proof of the wire.

UCXX's own awaits spin a core while anything is pending. Here the worker's epoll descriptor stands in the event
loop: progress runs when UCX has something to do, completed requests resolve futures, and the descriptor is armed
again. A bounded spin (SPIN_S) follows activity, since an answer mostly comes within microseconds.

Memory rule: a posted buffer is referenced from here until UCX has completed its request, whatever happens to the
future that waits for it. `Endpoint.abort` ends all of an endpoint's requests; afterwards its buffers are free.

Everything in this file belongs to the thread of the loop that made the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any

from transport.errors import (
    BusyPortError,
    ClosedError,
    ConnectionLostError,
    InternalError,
    MissingDependencyError,
    TransportError,
    UnreachableError,
    UsageError,
    WireNotAllowedError,
)
from transport.lanes import forget_cancelled, knows_cuda_memory, query_transports
from transport.wires import Wire, user_settings

log = logging.getLogger(__name__)

SPIN_S = 50e-6  # longer gains nothing on loopback and costs the neighbour its core (measured)


# --- the import ---------------------------------------------------------------------------------
@cache
def library() -> ModuleType:
    """ucxx's low-level module.

    Raises:
        MissingDependencyError: ucxx is not installed.
    """
    user = {name for name in os.environ if name.startswith("UCX_")}
    user_settings()
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("UCXX_LOG_LEVEL", "FATAL")  # what it would print of lost peers is raised here as errors
    try:
        import ucxx._lib.libucxx as low
    except ImportError as error:
        raise MissingDependencyError(
            "ucxx is not installed, so payloads can be read on their own host only (wire 'mapped'); "
            "install it with: pip install 'payload-transport[cu12]' (CUDA 13: cu13; neither needs a GPU)"
        ) from error
    # ucxx's own choices must not reach child processes as if the user had made them.
    for name in [name for name in os.environ if name.startswith("UCX_") and name not in user]:
        if name != "UCX_WARN_UNUSED_ENV_VARS":
            del os.environ[name]
    module: ModuleType = low
    return module


def version() -> str:
    """Version of the UCX library that is loaded, e.g. "1.21.0"."""
    return ".".join(str(part) for part in library().get_ucx_version())


# --- errors -------------------------------------------------------------------------------------
@cache
def _error_classes() -> tuple[tuple[type[BaseException], type[TransportError]], ...]:
    """UCXX's classes and ours, most exact first."""
    low = library()
    return (
        (low.UCXXBusyError if hasattr(low, "UCXXBusyError") else low.UCXBusyError, BusyPortError),
        (low.UCXNotConnectedError, UnreachableError),
        (low.UCXUnreachableError, UnreachableError),
        (low.UCXNoDeviceError, WireNotAllowedError),
        (low.UCXInvalidParamError, UsageError),
        (low.UCXMessageTruncatedError, ConnectionLostError),  # also what a stream that was cut off ends with
        (low.UCXError, ConnectionLostError),
    )


def translate(error: BaseException) -> TransportError:
    """Our error for one of UCXX's, by class."""
    if isinstance(error, TransportError):
        return error
    if isinstance(error, AttributeError):  # what UCXX raises on an endpoint this side has closed
        return ClosedError("the endpoint was closed by this side")
    for theirs, ours in _error_classes():
        if isinstance(error, theirs):
            return ours(str(error) or type(error).__name__)
    return InternalError(f"unexpected {type(error).__name__} from ucxx: {error}")


@contextlib.contextmanager
def translated(doing: str) -> Iterator[None]:
    """Map what ucxx raises to our errors, saying what was being done."""
    try:
        yield
    except (TransportError, asyncio.CancelledError):
        raise
    except Exception as error:  # ucxx's classes are made in C++ and share no public base with ours
        ours = translate(error)
        raise type(ours)(f"{doing}: {ours}") from error


# --- requests -----------------------------------------------------------------------------------
class _Posted:
    """A request UCX has not completed, and all that must live until it has."""

    __slots__ = ("buffer", "future", "peer", "request")

    def __init__(self, request: Any, buffer: object, future: asyncio.Future[None], peer: str) -> None:
        self.request = request
        self.buffer = buffer
        self.future = future
        self.peer = peer

    def settle(self) -> None:
        """Hand the outcome of a completed request to whoever waits."""
        self.buffer = None
        if self.future.done():
            return
        try:
            self.request.check_error()
        except Exception as error:  # as in translated()
            ours = translate(error)
            self.future.set_exception(type(ours)(f"{self.peer}: {ours}"))
            self.future.exception()  # an outcome nobody awaits any more is not worth a warning
        else:
            self.future.set_result(None)


class Worker:
    """One UCX context and worker on the running loop.

    Args:
        settings: UCX settings as `settings_for` gives them.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        low = library()
        self._loop = asyncio.get_running_loop()
        with translated("making a UCX context"):
            self._context = low.UCXContext(dict(settings), (low.Feature.TAG, low.Feature.WAKEUP, low.Feature.STREAM))
            self._worker = low.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
        self._descriptor: int = self._worker.epoll_file_descriptor
        self._posted: list[_Posted] = []
        self._scheduled = False
        self._closed = False
        self._spin_until = 0.0
        self.endpoints: set[Endpoint] = set()
        self._loop.add_reader(self._descriptor, self._drive)

    def __repr__(self) -> str:
        return f"<Worker {len(self.endpoints)} endpoints, {len(self._posted)} requests posted>"

    # Invariant: whenever control is back in the loop, either _drive is scheduled or the descriptor is armed.
    def _kick(self) -> None:
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._drive)

    def _drive(self) -> None:
        self._scheduled = False
        if self._closed:
            return
        while True:
            self._worker.progress()
            if self._settle():
                self._spin_until = time.perf_counter() + SPIN_S
                self._kick()  # whoever was waiting runs first and may post more
                return
            if not self._posted or time.perf_counter() >= self._spin_until:
                break
        if not self._worker.arm():
            self._kick()

    def _settle(self) -> bool:
        """Resolve the futures of completed requests; True if there was one."""
        posted = self._posted
        for each in posted:
            if each.request.completed:
                break
        else:
            return False  # the common case while spinning
        completed = [each for each in posted if each.request.completed]
        self._posted = [each for each in posted if not each.request.completed] if len(posted) > len(completed) else []
        for each in completed:
            each.settle()
        return True

    def _post(self, request: Any, buffer: object, peer: str) -> _Posted:
        posted = _Posted(request, buffer, self._loop.create_future(), peer)
        if request.completed:
            posted.settle()
        else:
            self._posted.append(posted)
            self._kick()
        return posted

    @property
    def device_memory(self) -> bool:
        """Whether CUDA memory may be sent from and received into."""
        return knows_cuda_memory(self._context.handle)

    def expect_soon(self) -> None:
        """An answer is under way: spin for a moment before sleeping."""
        self._spin_until = time.perf_counter() + SPIN_S
        self._kick()

    def flush(self, settled: Callable[[], bool], most: int = 10_000) -> bool:
        """Progress in place until ``settled()``; for teardown, where no await is possible."""
        for _ in range(most):
            if settled():
                return True
            self._worker.progress()
            self._settle()
        return settled()

    async def connect(self, host: str, port: int) -> Endpoint:
        """An endpoint to a listener; a dead one may show only at its first message.

        Raises:
            UnreachableError: the name does not resolve, or there is no route.
        """
        try:
            found = await self._loop.getaddrinfo(host, port, family=socket.AF_INET, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UnreachableError(f"{host} does not resolve to an IPv4 address: {error}") from error
        if self._closed:
            raise ClosedError("the worker was closed while connecting")
        with translated(f"connecting to {host}:{port}"):
            raw = library().UCXEndpoint.create(self._worker, found[0][4][0], port, True)
        self._kick()
        return Endpoint(self, raw, f"{host}:{port}")

    def listen(self, port: int, accept: Callable[[Endpoint], None]) -> Listening:
        """Listen on ``port`` (0: assigned), all IPv4 addresses; ``accept`` gets each new endpoint.

        Raises:
            BusyPortError: another program has the port.
        """
        return Listening(self, port, accept)

    def close(self) -> None:
        """Abort every endpoint, stop progress, let go. In this order, since UCX may be in the memory until then."""
        if self._closed:
            return
        for endpoint in list(self.endpoints):
            endpoint.abort()
        for posted in self._posted:
            posted.future.cancel()
        self._posted.clear()
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        del self._worker
        del self._context


class Listening:
    """A listening port of a worker."""

    def __init__(self, worker: Worker, port: int, accept: Callable[[Endpoint], None]) -> None:
        self._owner = worker
        self._accept: Callable[[Endpoint], None] | None = accept
        self._accepted = 0
        with translated(f"listening on port {port}"):
            self._listener = library().UCXListener.create(worker._worker, port, self._arrived, cb_args=(), cb_kwargs={})
        self.port: int = self._listener.port

    def _arrived(self, request: int) -> None:
        if self._accept is None:
            return
        self._accepted += 1
        try:
            raw = self._listener.create_endpoint_from_conn_request(request, True)
        except Exception as error:  # as in translated()
            log.debug("client %d was gone before it was accepted: %s", self._accepted, error)
            return
        self._accept(Endpoint(self._owner, raw, f"client {self._accepted}"))
        self._owner._kick()

    def close(self) -> None:
        """Accept no more; endpoints that exist go on."""
        self._accept = None
        self._listener = None


class Endpoint:
    """One connection. Sends and receives return futures; the buffers stay referenced until UCX is done with them."""

    def __init__(self, worker: Worker, raw: Any, name: str) -> None:
        self._worker = worker
        self._raw = raw
        self.name = name
        self._mine: list[_Posted] = []
        self._array = _array_type()
        self._tag = library().UCXXTag
        worker.endpoints.add(self)

    def __repr__(self) -> str:
        return f"<Endpoint {self.name} {'alive' if self.alive else 'gone'}>"

    @property
    def alive(self) -> bool:
        """False once UCX has seen the peer gone, or after abort."""
        return self._raw is not None and bool(self._raw.alive)

    def _run(self, doing: str, start: Callable[[Any], Any], buffer: object) -> asyncio.Future[None]:
        if self._raw is None:
            raise ClosedError(f"{doing} on an endpoint that this side has closed")
        if not self._raw.alive:  # UCX would never complete a stream's receive that is posted now
            raise ConnectionLostError(f"{doing} {self.name}: the peer is gone")
        try:
            request = start(self._array(buffer))
        except Exception as error:  # as in translated(), which would cost as much as the call itself
            ours = translate(error)
            raise type(ours)(f"{doing} {self.name}: {ours}") from error
        posted = self._worker._post(request, buffer, self.name)
        if not request.completed:
            if len(self._mine) > 64:
                self._mine = [each for each in self._mine if not each.request.completed]
            self._mine.append(posted)
        return posted.future

    def send(self, buffer: object, tag: int) -> asyncio.Future[None]:
        """Send ``buffer``; done means that the buffer may be reused, not that the peer has it."""
        sent = self._run("sending to", lambda array: self._raw.tag_send(array, self._tag(tag)), buffer)
        self._worker.expect_soon()
        return sent

    def receive(self, buffer: object, tag: int) -> asyncio.Future[None]:
        """Receive into ``buffer``, which must be writable, contiguous and large enough: UCX does not check."""
        return self._run("receiving from", lambda array: self._raw.tag_recv(array, self._tag(tag)), buffer)

    def send_stream(self, buffer: object) -> asyncio.Future[None]:
        """Send on the endpoint's own byte stream (the handshake)."""
        return self._run("sending to", lambda array: self._raw.stream_send(array), buffer)

    def receive_stream(self, buffer: object) -> asyncio.Future[None]:
        """Fill ``buffer`` from the endpoint's own byte stream."""
        return self._run("receiving from", lambda array: self._raw.stream_recv(array), buffer)

    def withdraw(self, future: asyncio.Future[None]) -> None:
        """Take back a receive whose message will not come. Its tag must not be used again."""
        for posted in self._mine:
            if posted.future is future:
                self._mine.remove(posted)
                if posted in self._worker._posted:
                    self._worker._posted.remove(posted)
                future.cancel()
                posted.request = None  # the last reference: UCX cancels the unmatched receive
                self._worker._kick()
                return

    def abort(self) -> None:
        """Close at once. On return UCX touches none of this endpoint's buffers any more; waiting futures fail."""
        if self._raw is None:
            return
        raw, self._raw = self._raw, None
        self._worker.endpoints.discard(self)
        with contextlib.suppress(Exception):  # the peer may have been faster; the endpoint is closed either way
            raw.close_blocking(0, 1)
        mine = self._mine
        if not self._worker.flush(lambda: all(posted.request.completed for posted in mine)):
            raise InternalError(f"UCX did not give back the buffers of {self.name}")
        for posted in mine:
            posted.settle()
        self._mine = []
        forget_cancelled(raw.ucxx_ptr)
        self._worker._kick()

    def transports(self) -> list[tuple[str, str]]:
        """(transport, device) of every lane, as UCX reports them, e.g. ("tcp", "eth0")."""
        if self._raw is None:
            return []
        return query_transports(self._raw.handle)

    def wire(self) -> Wire:
        """The wire that carries the payload bytes of this endpoint."""
        names = {name for name, _ in self.transports()}
        if any(name.startswith(("rc", "dc", "ud")) for name in names):
            return "rdma"
        if names & {"sysv", "posix", "xpmem", "cma", "knem"}:
            return "shm"
        return "tcp"


@cache
def _array_type() -> Any:
    library()
    from ucxx._lib.arr import Array

    return Array

"""The worker and its progress, its endpoints and listening port, the wire of an endpoint.

ucxx provides the context and the worker. UCXX's own awaits use a full core while anything is pending, so the engine
(native/ucp) implements endpoints, listeners and requests: the event loop watches the worker's descriptor,
and when it is readable the engine makes progress without the GIL and returns the completed requests. After activity it
spins for a limited time, since an answer mostly comes within microseconds; the limit adapts to the answer times.

Memory rule: the engine references a posted buffer until UCX has completed its request, whatever happens to the future
that waits for it. `Endpoint.abort` ends all requests of an endpoint; afterwards its buffers are free, except those that
`Engine.abandoned` counts: UCX may continue to receive messages that it has begun, until the worker is closed.

All of this file runs in the thread of the loop that made the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from transport.errors import ClosedError, ConnectionLostError, ForkedError, TransportError, UsageError
from transport.runtime.descriptors import OF_A_WORKER, promised
from transport.runtime.forks import unforked
from transport.wire.addresses import host_port, is_ipv6
from transport.wire.interfaces import Network
from transport.wire.joining import MAPPED, ConnectionSetup, address_of, maps_memory, of_this_host
from transport.wire.library import engine, failure, library, translated
from transport.wires import Wire, admits_rdma

if TYPE_CHECKING:
    from transport import _ucp

log = logging.getLogger(__name__)

_LOOK_S = 0.1  # between two looks for new sockets, each at every descriptor of the process
SPIN_S = 200e-6  # upper limit; the engine spins less when answers take longer (measured)


# --- fork and exec --------------------------------------------------------------------------------
_open: weakref.WeakSet[Worker] = weakref.WeakSet()
_inherited = False  # UCX was open in the process that forked this one, which has its memory, and not its threads
_sockets: dict[int, int] = {}  # UCX's, by descriptor, with their inodes
_others: set[int] = set()  # inodes of inheritable sockets that are not UCX's


def _inheritable_sockets() -> Iterator[tuple[int, int]]:
    """Descriptor and inode of each socket of TCP that a child would inherit, but for the standard streams."""
    with os.scandir("/proc/self/fd") as entries:
        descriptors = [int(entry.name) for entry in entries]
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # it is closed by now
            found = os.fstat(descriptor)
            if descriptor < 3 or not stat.S_ISSOCK(found.st_mode) or not os.get_inheritable(descriptor):
                continue
            if not os.get_blocking(descriptor):
                with socket.socket(fileno=os.dup(descriptor)) as copy:  # an interrupt here would close what it holds
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                        yield descriptor, found.st_ino


def keep_sockets() -> None:
    """Keep UCX's new sockets, which it makes inheritable, from children, in which a connection would outlive us.

    A peer learns of our end when the last copy is closed. A program that is executed has none, nor has a forked child.
    """
    for descriptor, inode in _inheritable_sockets():
        if inode not in _others:
            with contextlib.suppress(OSError):  # a worker of another thread has closed it by now
                os.set_inheritable(descriptor, False)
            _sockets[descriptor] = inode


def check_fork() -> None:
    """ForkedError: UCX was open in the process that forked this one."""
    if _inherited:
        raise ForkedError(
            "this process was forked from one that had UCX open, which does not survive a fork: start it by "
            'spawning (of a loader: multiprocessing_context="spawn"), or close every client and server first'
        )


def _in_use() -> bool:
    return any(not worker.closed for worker in _open)


def _before_fork() -> None:
    with unforked:  # no worker is made meanwhile
        if _in_use():
            keep_sockets()


def _after_fork_in_child() -> None:
    global _inherited
    _inherited = _inherited or _in_use()
    if not _sockets:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor, inode in _sockets.items():
        with contextlib.suppress(OSError):  # it was closed before
            if os.fstat(descriptor).st_ino == inode:
                os.dup2(nothing, descriptor, inheritable=False)  # not closed: UCX would take another file for it
    os.close(nothing)
    _sockets.clear()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


# --- the worker -----------------------------------------------------------------------------------
class Worker:
    """One UCX context and worker on the running loop.

    Args:
        settings: UCX settings as `settings_for` gives them.

    Raises:
        ForkedError: UCX was open in the process that forked this one.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        check_fork()
        low, native = library(), engine()
        self._closed = False
        self._looked: asyncio.TimerHandle | None = None  # for new sockets; for a moment they are not looked for again
        self._more_sockets = False
        self.loop = asyncio.get_running_loop()
        self.network = Network.now()  # before UCX looks
        self.retired = False  # by its owner: no new connections, and those that stand are parted from
        with unforked, promised(OF_A_WORKER, "UCX"), translated("making a UCX context"):
            if not _in_use():
                _others.update(inode for _, inode in _inheritable_sockets())
            context = low.UCXContext(dict(settings), (low.Feature.TAG, low.Feature.WAKEUP, low.Feature.STREAM))
            worker = low.UCXWorker(context)
            self.engine: _ucp.Engine = native.Engine(context.handle, worker.handle, (worker, context))
            _open.add(self)  # before another thread may fork
            keep_sockets()
        # UCXX's own test returns True for every context, because it uses the number of the memory type as a bit mask.
        self.device_memory: bool = native.knows_cuda_memory(context.handle)  # else UCX would crash in it
        self.maps_memory = maps_memory(settings)
        self.admits_rdma = admits_rdma(settings)
        families = settings.get("TCP_AF_PRIO", os.environ.get("UCX_TCP_AF_PRIO", ""))
        self._prefers_ipv6 = families.startswith("inet6")
        self._joining: list[ConnectionSetup] = []
        self._endpoint_type = native.Endpoint
        self._descriptor: int = self.engine.descriptor
        self._scheduled = False
        self.endpoints: set[Endpoint] = set()
        self.loop.add_reader(self._descriptor, self.drive)

    def __repr__(self) -> str:
        return f"<Worker {len(self.endpoints)} endpoints, {self.engine.requests} requests posted>"

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    # Invariant: whenever control is back in the loop, either _drive is scheduled or the descriptor is armed.
    def kick(self) -> None:
        """Schedule progress, because something was posted."""
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self.loop.call_soon(self._drive)

    def sent(self) -> None:
        """`kick`, unless the descriptor tells what becomes of what was posted. For answers that may take long."""
        if not self.engine.armed:
            self.kick()

    def drive(self) -> None:
        """Make progress now. For what the loop calls when a descriptor is readable."""
        if not self._scheduled:  # else _drive runs soon, after the callbacks of the last results, which may post more
            self._drive()

    def _drive(self) -> None:
        self._scheduled = False
        if self._closed:
            return
        events = self.engine.drive(SPIN_S)
        if self._joining:
            self._look(True)
        self._tell(events)
        if not self.engine.armed:  # the callbacks of these results run first and may post more
            self.kick()

    def _tell(self, events: list[tuple[Any, Any]], *, soon: bool = False) -> None:
        """Deliver results to their futures, or call what was given in place of one; ``soon``: not inside this call."""
        for token, outcome in events:
            try:
                result = failure(*outcome) if isinstance(outcome, tuple) else outcome
                if not isinstance(token, asyncio.Future):
                    if soon:
                        self.loop.call_soon(token, result)
                    else:
                        token(result)
                elif token.done():
                    pass
                elif isinstance(result, TransportError):
                    token.set_exception(result)
                    token.exception()  # no warning of asyncio for a future that is no longer awaited
                else:
                    token.set_result(result)
            except Exception:  # one failure must not keep the other results from their futures
                log.exception("delivering a UCX result failed; continuing with the next one")

    def _look(self, progressed: bool) -> None:
        moved = [each.look(progressed) for each in self._joining]
        if any(moved):
            self.kick()
        self._joining = [each for each in self._joining if not each.over]

    def join(self, joining: ConnectionSetup) -> None:
        """Have a connection looked at after each round of progress, until it stands or has failed."""
        self._joining.append(joining)
        self.kick()

    def settle(self) -> None:
        """Deliver the results of completed requests now."""
        self._tell(self.engine.collect(), soon=True)
        self._look(False)
        self.kick()

    def keep_new_sockets(self) -> None:
        """`keep_sockets`, where a connection was made; once for those that are made in the next tenth of a second."""
        self._more_sockets = True
        if self._looked is None:
            self._keep_new()

    def _keep_new(self) -> None:
        self._looked = None
        if self._more_sockets:
            self._more_sockets = False
            keep_sockets()
            self._looked = self.loop.call_later(_LOOK_S, self._keep_new)

    async def connect(self, host: str, port: int) -> Endpoint:
        """Return an endpoint to a listener; that the listener is dead may show only at the first message.

        Raises:
            UnreachableError: the name does not resolve, or there is no route.
        """
        address = await address_of(host)
        if self._closed:
            raise ClosedError("the worker was closed while connecting")
        self._check_family(address)
        with translated(f"connecting to {host_port(host, port)}"):
            native = self._endpoint_type.connect(self.engine, address, port)
        self.kick()
        return Endpoint(self, native, host_port(host, port), self.maps_memory and of_this_host(address))

    def listen(
        self,
        port: int,
        accept: Callable[[Endpoint], None],
        address: str = "",
        most: int = sys.maxsize,
        failed: Callable[[TransportError], None] | None = None,
    ) -> Listening:
        """Listen on ``port`` (0: assigned) of a local ``address``; ``accept`` gets each new endpoint.

        ``address``: "" is all of IPv4, "::" all of IPv6. While the worker has ``most`` endpoints, UCX rejects further
        clients. ``failed`` gets what kept UCX from making the endpoint of a client.

        Raises:
            BusyPortError: another program has the port.
            UsageError: the address is not one of this host.
        """
        if self._closed:
            raise ClosedError("the worker was closed")
        self._check_family(address)
        return Listening(self, address, port, accept, most, failed)

    def _check_family(self, address: str) -> None:
        """Refuse IPv6 where UCX prefers IPv4, and would write behind its memory: see wires.py."""
        if is_ipv6(address) and not self._prefers_ipv6:
            raise UsageError(
                f"{address} is an IPv6 address, and UCX_TCP_AF_PRIO={os.environ.get('UCX_TCP_AF_PRIO', 'inet,inet6')}: "
                "UCX needs inet6 first for it"
            )

    def close(self) -> None:
        """Abort every endpoint, stop progress, release the worker; in this order, because UCX may access the memory."""
        if self._closed:
            return
        for endpoint in list(self.endpoints):
            endpoint.abort()
        self._closed = True
        if self._looked is not None:
            self._looked.cancel()
        self.loop.remove_reader(self._descriptor)
        self._tell(self.engine.close(), soon=True)


class Listening:
    """A listening port of a worker."""

    def __init__(
        self,
        worker: Worker,
        address: str,
        port: int,
        accept: Callable[[Endpoint], None],
        most: int,
        failed: Callable[[TransportError], None] | None,
    ) -> None:
        self._worker = worker
        self._accept: Callable[[Endpoint], None] | None = accept
        self._failed = failed
        if address and not of_this_host(address):  # UCX would only report an input/output error
            raise UsageError(f"listening on {host_port(address, port)}: not an IP address of this host")
        with translated(f"listening on {host_port(address or '*', port)}"):
            self._native = engine().Listener(worker.engine, address, port, most, self._arrived)
        self.port: int = self._native.port
        keep_sockets()

    def _arrived(self, native: _ucp.Endpoint | TransportError) -> None:
        if isinstance(native, TransportError):
            if self._failed is not None:
                self._failed(native)
        elif self._accept is None:
            native.abort()
        else:
            self._accept(Endpoint(self._worker, native, native.peer))
            self._worker.keep_new_sockets()

    def end_strangers(self, patience_s: float) -> bool:
        """Close connections that sent no valid connection request within ``patience_s``, or more bytes than one has.

        While descriptors are few the port takes no connection. True: look again soon, some still have time, or
        descriptors are few. UCX would wait for them without limit, and would spin on unexpected bytes.
        """
        some: bool = self._native.end_strangers(patience_s)
        return some

    @property
    def shut(self) -> bool:
        """True if newcomers are ignored, since the reserve of descriptors is in use."""
        shut: bool = self._native.shut
        return shut

    def close(self) -> None:
        """Accept no new connections; existing endpoints stay open. The port is released when the worker is closed."""
        self._accept = None
        self._native.close()


class Endpoint:
    """One connection. Sends and receives return futures; the buffers stay referenced until UCX is done with them."""

    def __init__(self, worker: Worker, native: _ucp.Endpoint, name: str, maps_memory: bool = False) -> None:
        self.worker = worker
        self._maps_memory = maps_memory  # it is this side that connects, and shared memory may be joined
        self.native = native
        self.name = name
        worker.endpoints.add(self)

    def __repr__(self) -> str:
        return f"<Endpoint {self.name} {'alive' if self.alive else 'gone'}>"

    @property
    def alive(self) -> bool:
        """False once UCX has detected that the peer disconnected, or after abort."""
        return self.native.alive

    def _future(self, doing: str) -> asyncio.Future[int]:
        self._check(doing)
        return self.worker.loop.create_future()

    def _check(self, doing: str) -> None:
        if not self.native.open:
            raise ClosedError(f"{doing} on an endpoint that this side has closed")
        if not self.native.alive:
            raise ConnectionLostError(f"{doing} {self.name}: the peer disconnected")
        self.worker.kick()

    def joined(self) -> asyncio.Future[None]:
        """Done when something may be sent: where shared memory may be joined, not before all lanes stand.

        What is sent earlier crashes UCX where that memory cannot be joined (joining.py).
        """
        future: asyncio.Future[Any] = self._future("connecting to")
        if self._maps_memory:
            self.worker.join(ConnectionSetup(self.native, self._lost, future))
        else:
            future.set_result(None)
        return future

    def _lost(self) -> TransportError:
        return failure(self.native.failure, f"connecting to {self.name}")

    def send(self, buffer: Any, tag: int) -> asyncio.Future[int]:
        """Send ``buffer``. When done, the buffer may be reused; the peer need not have received it."""
        future = self._future("sending to")
        self.native.send(future, buffer, tag)
        return future

    def receive(self, buffer: Any, tag: int) -> asyncio.Future[int]:
        """Receive into ``buffer``, which must be writable, contiguous and large enough."""
        future = self._future("receiving from")
        self.native.receive(future, buffer, tag)
        return future

    def expect(self, buffer: Any, tag: int, came: Callable[[int | TransportError], object]) -> None:
        """Receive into ``buffer``, and call ``came`` before anybody learns that the peer has gone since."""
        self._check("receiving from")
        self.native.receive(came, buffer, tag)

    def send_stream(self, buffer: Any) -> asyncio.Future[int]:
        """Send on the endpoint's own byte stream (the handshake)."""
        future = self._future("sending to")
        self.native.send_stream(future, buffer)
        return future

    def say(self, data: Any) -> None:
        """Send on that stream; a failure shows at the receive that waits for an answer, or as the connection ends."""
        self.send_stream(data).add_done_callback(_look_at)

    def tell(self, data: Any, tag: int) -> None:
        """`say`, by a message with a tag: it is heard also where the end of this side is noticed first."""
        self.send(data, tag).add_done_callback(_look_at)

    def receive_stream(self, buffer: Any) -> asyncio.Future[int]:
        """Fill ``buffer`` from the endpoint's own byte stream."""
        future = self._future("receiving from")
        self.native.receive_stream(future, buffer)
        return future

    def abort(self) -> None:
        """Close at once. On return UCX no longer accesses this endpoint's buffers; waiting futures fail."""
        if not self.native.open:
            return
        self.worker.endpoints.discard(self)
        self.native.abort()
        self.worker.settle()

    def transports(self) -> list[tuple[str, str]]:
        """(transport, device) of every lane, as UCX reports them, e.g. ("tcp", "eth0")."""
        with translated("querying transports"):
            return self.native.transports()

    def wire(self) -> Wire:
        """Return the wire that carries this endpoint's payload bytes. Raises ConnectionLostError when it is closed."""
        names = {name for name, _ in self.transports()}
        if not names:  # no lane is no choice of UCX's
            raise ConnectionLostError(f"the connection to {self.name} was closed")
        if any(name.startswith(("rc", "dc", "ud")) for name in names):
            return "rdma"
        if names & MAPPED:
            return "shm"
        return "tcp"


def _look_at(sent: asyncio.Future[int]) -> None:
    if not sent.cancelled():
        sent.exception()

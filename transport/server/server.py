"""UCXXServer: what a rollout worker starts so that its ring can be read from other hosts.

Two modes. "process" (default): a supervisor process with one listener process per port. The rollout worker's GIL and
crashes do not affect them, and its published payloads stay readable for ``linger_s`` after it ended.
"thread": one listener per port on one loop in a thread of this process, for tests and the examples of the
documentation: it starts sooner, a fault of UCX ends the process, and nobody serves what is unread then.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import os
import resource
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, NoReturn, Self

import msgspec

from transport import _ring
from transport.config import Address
from transport.decoders import convert
from transport.errors import BusyPortError, ConfigurationError, RingError, UsageError
from transport.ring.attachment import attached, file_of
from transport.ring.buffer import MAX_READERS, SharedRingBuffer
from transport.runtime import hurry, stacks
from transport.runtime.amounts import count
from transport.runtime.arguments import several
from transport.server.running import OneThread, Processes
from transport.server.starting import ListenerConfig
from transport.settings import DEFAULTS, LogFormat, LogLevel, Settings
from transport.wire.addresses import advertised, is_ipv6, is_loopback, listened_on
from transport.wire.authentication import checked_secret
from transport.wire.library import library
from transport.wires import MAX_ADDRESSES, Wire, named_wires

log = logging.getLogger(__name__)

MAX_PORTS = MAX_READERS - 1  # each listener takes one of the ring's 16 owner numbers, the writer another
_ADDRESSES = Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]
_HEARD_S = 0.02  # between two looks whether every trainer has heard the end
TELL_S = 5.0  # for trainers to hear it, beyond the drain: those whose hands are full are sent away first
_LEAST_FILES = 64  # a listener without connections has 36 open, and a connection over tcp takes up to eight


class UCXXServer:
    """Server of a ring on ports of this host.

    Args:
        ring: the writer's ring.
        ports: one listener each; 0 is assigned by the system. `ports` reports the actual ones after `start`.
        addresses: what tickets advertise, best first; default: that of an RDMA interface if there is
            one, else that of the default route.
        bind: local address the listeners listen on, and which tickets then advertise unless ``addresses`` says
            otherwise; "": all addresses of this host, of the family of what tickets advertise ("::": all of IPv6).
        secret: shared secret that clients must prove to have.
        wires: the wires UCX may use ("shm", "tcp", "rdma", "cuda"); None: UCX chooses.
        mode: "process" or "thread", see above.
        log_level, log_format: of what supervisor and listeners write to standard error.
    """

    def __init__(
        self,
        ring: SharedRingBuffer,
        ports: Sequence[int] = (0,),
        *,
        addresses: Sequence[str] | None = None,
        bind: str = "",
        settings: Settings = DEFAULTS,
        secret: bytes | None = None,
        wires: frozenset[Wire] | None = None,
        mode: Literal["process", "thread"] = "process",
        log_level: LogLevel = "WARNING",
        log_format: LogFormat = "text",
    ) -> None:
        ports = [operator.index(port) for port in ports]
        if addresses is not None:
            addresses = _checked(several(addresses, "addresses"))
        if mode not in ("process", "thread"):
            raise UsageError(f"mode={mode!r}; choose 'process' or 'thread'")
        if not 1 <= len(ports) <= MAX_PORTS:
            raise UsageError(f"{len(ports)} ports; a ring is served on 1 to {MAX_PORTS}")
        for port in ports:
            if not 0 <= port <= 65535:
                raise UsageError(f"port {port} is not in 0..65535 (0: assigned by the system)")
        if len(set(filter(None, ports))) != len([port for port in ports if port]):
            raise UsageError(f"ports {tuple(ports)} name one port twice")
        self._ring = ring
        self._wanted = tuple(ports)
        if addresses is None:
            every = bind in ("", "0.0.0.0", "::")
            addresses = advertised(is_ipv6(bind) if bind else None) if every else (bind,)
            if every and all(map(is_loopback, addresses)):
                log.warning(
                    "this host has no default route: tickets name %s, which trainers on other hosts do not reach; set "
                    "TRANSPORT_ADDRESSES to an address that they do",
                    addresses[0],
                )
        bind = listened_on(bind, addresses)
        self._addresses = tuple(addresses)
        self._mode = mode
        self._config = ListenerConfig(
            segment=ring.name,
            port=0,
            settings=settings.validate(),
            secret=checked_secret(secret),
            wires=None if wires is None else named_wires(wires),
            bind=bind,
            log_level=log_level,
            log_format=log_format,
        ).checked()
        self._run: Processes | OneThread | None = None
        self._process = 0  # that started it
        self._closing = False
        self.given_up = 0  # payloads that were not consumed when `close` ended the ring's data

    def __reduce__(self) -> NoReturn:
        """Raise UsageError, for `pickle` and `copy`."""
        raise UsageError("a server is not pickled: a ticket is enough to read from it")

    def __repr__(self) -> str:
        return f"<UCXXServer {self._mode} ports {self.ports} of ring {self._ring.ring_id[:8]}>"

    @property
    def ports(self) -> tuple[int, ...]:
        """Ports that are listened on; empty before `start`."""
        return () if self._run is None or self._closing else self._ring.native.ports()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses that tickets advertise."""
        return self._addresses

    @property
    def linger_s(self) -> float:
        """Seconds that it serves what its killed writer has left."""
        return self._config.settings.linger_s if self._mode == "process" else 0.0

    def start(self) -> Self:
        """Start listening and wait until every port answers.

        Raises:
            BusyPortError: another ring or program has one of the ports; no listener is left running.
            ConfigurationError: this process may have too few open files for a listener.
            MissingDependencyError: ucxx is not installed.
        """
        if self._run is not None:
            raise UsageError("this server has been started already")
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit < _LEAST_FILES:
            raise ConfigurationError(f"the limit of {limit} open files (ulimit -n) is below {_LEAST_FILES}; raise it")
        library()  # raises for a missing ucxx here instead of in a child's log
        self._ring.native.addresses = ",".join(self._addresses)
        self._process, self._closing = os.getpid(), True
        run = self._run = (Processes if self._mode == "process" else OneThread)(self._ring, self._config, self._wanted)
        try:
            self._ring.native.set_ports(run.start())
            self._closing = False
            return self
        except BaseException as error:  # also Ctrl-C; where another ends this, too, `close` goes on
            self._stop(run)
            if isinstance(error, BusyPortError) and (ring := self._ring_there()):
                raise BusyPortError(ring) from None
            raise

    def _ring_there(self) -> str:
        """Say which ring of this host has one of the wanted ports, and what to do; "": none."""
        for name in _ring.segments():
            with contextlib.suppress(RingError), attached(name, "observer") as ring:  # gone, or another user's
                ports = {port for port in ring.native.ports() if port in self._wanted}
                owners = [owner for owner in ring.native.owners() if owner.alive]
                writers = [owner.pid for owner in owners if owner.role == _ring.ROLE_WRITER]
                if not ports or name == self._ring.name:
                    continue
                whose = f"port {min(ports)} is that of ring {name}"
                if writers:
                    return f"{whose}, which process {writers[0]} writes; port 0 takes a free one"
                if any(owner.port in ports for owner in owners):
                    file = file_of(name)
                    taking_over = f"file={file!r}" if file else f"name={name.removeprefix('/transport-')!r}"
                    return (
                        f"{whose}, whose writer has ended, and which serves what is unread. Give {taking_over} to take "
                        f"it over, or wait until it is read, at most {self._config.settings.linger_s:g} s (linger_s); "
                        "port 0 takes a free one"
                    )
        return ""

    def close(self, drain_s: float = 0.0, *, told_s: float | None = None) -> None:
        """Stop listening. Idempotent. An interrupt ends the wait for readers; call again to finish an interrupted stop.

        Nothing in a forked child: the parent continues to serve.

        Args:
            drain_s: wait this long for unread payloads to be consumed first. Payloads that are still unread
                afterwards stay in the ring, but no listener serves them. Behind `end_data` they are given up, and the
                trainers that have asked hear the end: at most 5 s more.
            told_s: wait at most until so many seconds after the signal that ends the program (`until_stopped`), also
                where it comes during the wait. None: a signal changes nothing.
        """
        run = self._run
        if run is None or os.getpid() != self._process:
            return
        try:
            told_s = math.inf if told_s is None else told_s
            self._drain(drain_s, told_s)
            self._give_up_unread()
            self._tell(min(told_s, drain_s + TELL_S))  # several that close one after the other have it together
            self._closing = True  # from here on: until then it serves, and a directory is to have it
        finally:
            with contextlib.ExitStack() as stack:
                stack.callback(self._no_ports)
                stack.callback(self._stop, run)

    def _stop(self, run: Processes | OneThread) -> None:
        try:
            run.stop()
        except Exception:  # a second try would fail as well; after an interrupt the next `close` tries again
            self._run = None
            raise
        self._run = None

    def _no_ports(self) -> None:
        if not self._ring.native.closed:
            self._ring.native.set_ports(())
            self._ring.reclaim()

    def _drain(self, drain_s: float, told_s: float) -> None:
        """Wait until every payload is consumed, and every trainer has heard the end that was said."""
        self._wait(drain_s, told_s, lambda: self._ring.native.pending)

    def _tell(self, told_s: float) -> None:
        """Wait until every trainer has heard the end, now that nothing is unread: its demand may be on its way."""
        self._wait(TELL_S, told_s, lambda: self._ring.native.drained and self._ring.native.pending)

    def _wait(self, most_s: float, told_s: float, pending: Callable[[], int]) -> None:
        give_up = time.monotonic() + most_s
        native = self._ring.native
        say_at, pause_s = time.monotonic() + stacks.FIRST_S, stacks.FIRST_S
        while not native.closed and (left := min(give_up, hurry.signalled_at() + told_s) - time.monotonic()) > 0:
            seen = native.freed_event()
            if not pending():
                return
            unread = native.unread
            if time.monotonic() >= say_at:
                pause_s *= 2
                say_at = time.monotonic() + pause_s
                what = f"{count(unread, 'payload')} not consumed" if unread else "trainers are yet to hear the end"
                log.warning("ring %s is draining: %s; at most %.0f s more", self._ring.ring_id[:8], what, left)
            native.wait_freed(seen, min(left, 1.0 if unread else _HEARD_S))

    def _give_up_unread(self) -> None:
        """End what is not consumed after `end_data`, before the ring ends, so that the listeners can tell of both.

        In a file it waits, and the data end when trainers have consumed it, unless a next writer begins first.
        """
        native = self._ring.native
        if native.closed or native.file or not native.ended:
            return
        given_up = native.discard_unread()
        self.given_up += given_up
        if given_up:
            log.info("ring %s ends with %s not consumed", self._ring.ring_id[:8], count(given_up, "payload"))

    def __enter__(self) -> Self:
        return self if self._run is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses, or raise UsageError for what no ticket may have, or no reader can connect to."""
    try:
        found: tuple[str, ...] = convert(addresses, _ADDRESSES)
    except msgspec.ValidationError:
        raise UsageError(
            f"addresses={addresses!r:.200}: give at most {MAX_ADDRESSES} IP addresses or names of hosts, without ports"
        ) from None
    return found

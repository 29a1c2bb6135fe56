"""The handler that torchrun's agent calls: the calls of `BlockingRendezvous` under torch's names.

For every round rank 0 serves a new TCPStore, through which torch's agents and workers find each other. Every agent
opens one before it joins, so that its address stands in its seat, and nothing is published afterwards.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.agent.server import api as agent_api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

from transport.adapters.torchrun.options import (
    BACKEND,
    EndVerdict,
    RendezvousOptions,
    check_address,
    ended,
    exit_with,
    options_of,
    own_address,
    verdict,
)
from transport.errors import RunError, StaleRoundError, StoreError, StoreUnavailableError, TransportError
from transport.rendezvous.blocking import BlockingRendezvous
from transport.rendezvous.closing import Archive
from transport.rendezvous.records import Closing, Place, Reason
from transport.runtime.blocking_calls import started
from transport.runtime.error_text import error_text
from transport.storage.urls import RedisURL
from transport.store.base import Store
from transport.store.redis import RedisStore
from transport.store.sqlite import SQLiteStore

log = logging.getLogger(__name__)

_BARRIER = agent_api._TERMINAL_STATE_SYNC_ID
_TRIES = 3  # rounds in which rank 0 cannot be reached, until this agent gives up
_CONNECT_S = 30.0
_AGENT_S = 300.0  # torch's own time limit of a store
_LOOK_S = 0.2  # between two looks whether the round goes on

T = TypeVar("T")


def make(parameters: RendezvousParameters) -> TransportRendezvousHandler:
    """Return a handler of torchrun's arguments, connected to its store. Raises TransportError."""
    options = options_of(
        parameters.endpoint,
        parameters.run_id,
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.config,
        environ=os.environ,
        host=socket.gethostname(),
    )
    address = own_address(options.url, parameters.local_addr)
    check_address(address)
    if options.warning:
        log.warning("torchrun --rdzv-backend=%s: %s", BACKEND, options.warning)
    return TransportRendezvousHandler(_open(options), options, address, parameters.run_id)


def _open(options: RendezvousOptions) -> Store:
    if isinstance(options.url, RedisURL):
        try:
            return RedisStore(options.url, patience_s=min(options.rules.lease_s / 2, 5.0))  # below the lease
        except StoreUnavailableError as error:
            raise StoreUnavailableError(f"{error}; check --rdzv-endpoint, and that the server runs") from error
    return SQLiteStore(options.url.path)


def _there(store: dist.Store, keys: Sequence[str], agents: int, still: Callable[[], bool]) -> bool:
    """Wait for the keys while ``still``.

    Returns whether they are in the store. A wait with a time limit would make torch warn.
    """
    while still():
        if store.check(list(keys)):
            return True
        time.sleep(min(max(agents / 2000, 0.05), 1.0))  # so that rank 0 has at most 2000 questions a second
    return False


def _while(still: Callable[[], bool], call: Callable[[], T]) -> T | None:
    """Return the result of a call of torch's store; None if ``still`` ends before.

    The call has no time limit of its own: it hangs when rank 0's host vanishes without closing the connection.
    """
    answer = started(call)
    while not wait([answer], _LOOK_S).done:
        if not still():
            return None
    return answer.result()


class RoundStore:
    """The store of one round for torch's agent. Its exit barrier is the run's end, for which `shutdown` waits.

    torch's agents exchange their ranks in it, and fail if one of them dies meanwhile. Here the exchange ends with the
    round instead: the agent gets ranks that are not right, and `num_nodes_waiting` makes it stop its workers at once.
    """

    def __init__(self, store: dist.Store, member: BlockingRendezvous, place: Place) -> None:
        self._store = store
        self._member = member
        self._place = place
        self._own: dict[str, bytes] = {}  # what this agent has set

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value as the store does."""
        self._own[key] = value.encode() if isinstance(value, str) else value
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """Get a value as the store does; invented ranks if the round is over."""
        found = self._found([key], lambda: bytes(self._store.get(key)))
        rank, size = self._place.rank, self._place.size
        return json.dumps([rank, size, rank, size]).encode() if found is None else found

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Get values as the store does; this agent's own value for all that are missing when the round is over."""
        found = self._found(keys, lambda: [bytes(value) for value in self._store.multi_get(list(keys))])
        return [self._own[keys[self._place.rank]]] * len(keys) if found is None else found

    def add(self, key: str, amount: int) -> int:
        """Add as the store does. An agent that enters the exit barrier has workers that are done."""
        if key.startswith(_BARRIER):
            self._member.done()
            return 0  # not the last one; no agent waits in the store of another
        return int(self._ask(lambda: self._store.add(key, amount)) or 0)

    def wait(self, keys: Sequence[str], *timeout: timedelta) -> None:
        """Wait as the store does."""
        if not any(key.startswith(_BARRIER) for key in keys):
            self._ask(lambda: self._store.wait(list(keys), *timeout))

    def _found(self, keys: Sequence[str], read: Callable[[], T]) -> T | None:
        """Return what ``read`` returns once the keys are there; None if the round ends before."""
        still = self._still
        return self._ask(lambda: read() if _there(self._store, keys, self._place.size, still) else None)

    def _still(self) -> bool:
        return self._member.in_round

    def _ask(self, call: Callable[[], T]) -> T | None:
        """Return the answer of rank 0's store; None when the round ends before it, or the connection does."""
        try:
            return _while(self._still, call)
        except dist.DistNetworkError as error:
            self._lost(error)
            return None

    def _lost(self, error: Exception) -> None:
        """Rank 0's agent is gone, and its store with it: the round cannot go on."""
        self._member.restart(f"lost the connection to rank 0 at {self._place.leader}: {_line(error)}")
        self._member.wait_over()


class TransportRendezvousHandler(RendezvousHandler):  # type: ignore[misc]  # torch is not installed for mypy
    """One agent's part of a run."""

    def __init__(self, store: Store, options: RendezvousOptions, address: str, run_id: str) -> None:
        self._store = store
        self._options = options
        self._address = address
        self._run_id = run_id
        archive = None if options.archive is None else Archive(options.archive)
        self._member = BlockingRendezvous(store, options.run, options.rules, archive=archive, where=options.where)
        self._server: dist.TCPStore | None = None
        self._started = self._left = False
        self._pid = os.getpid()
        self._before = sys.exception()  # of the caller, where it starts torchrun as it handles one
        atexit.register(self._leave)  # after a signal torchrun does not call `shutdown`

    # --- torch's interface ------------------------------------------------------------------------------
    def get_backend(self) -> str:
        """Return the name on torchrun's command line."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Workers use the store of their round, which rank 0's agent serves."""
        return True

    def get_run_id(self) -> str:
        """Return the run's id as given by --rdzv-id."""
        return self._run_id

    def is_closed(self) -> bool:
        """Return whether the run has ended, as far as this agent knows."""
        return self._member.view.closing is not None

    def set_closed(self) -> None:
        """End the run as failed, since nothing proves that it is done."""
        self._close(EndVerdict(reason=Reason.FAILURE, message="closed by set_closed()"))

    def num_nodes_waiting(self) -> int:
        """1 when this agent's round is over: torch then stops the workers and calls `next_rendezvous`. Never waits."""
        return 0 if self._member.in_round else 1

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a rank, or exit with the run's code."""
        with _leaving_at_signals():
            try:
                return self._next()
            except (RunError, StoreError) as error:
                exit_with(self._options.rules.exit_codes.failure, f"run {self._options.run!r}: {error}")

    def shutdown(self) -> bool:
        """torchrun calls it last, while its own exception passes; this is how the agent's end is known."""
        error = sys.exception()
        error = None if error is self._before else error
        failures = None
        if isinstance(error, ChildFailedError):
            first, _ = error.get_first_failure()
            failures = {first: error.failures[first].exitcode}
            failures |= {rank: failure.exitcode for rank, failure in error.failures.items()}
        codes = self._options.rules.exit_codes
        result = verdict(
            failures, interrupted=error is not None, no_restart=codes.no_restart, host=socket.gethostname()
        )
        try:
            if result.done:
                self._finish()
            elif result.reason is not None:
                self._close(result)
                if result.reason is Reason.NO_RESTART:
                    log.error("%s", error)
                    exit_with(codes.no_restart, result.message)
        finally:
            self._leave()
        return True

    # --- rounds -----------------------------------------------------------------------------------------
    def _next(self) -> RendezvousInfo:
        if not self._started:
            self._started = True
            self._member.start()
            closing = self._member.view.closing
            if closing is not None:
                self._exit(closing, before=True)
        self._member.restart(f"workers on {socket.gethostname()} failed")
        failed = 0
        while True:
            found = self._join()
            if isinstance(found, Closing):
                self._exit(found, before=False)
            try:
                store = self._meet(found)
            except dist.DistError as error:
                failed += 1
                why = f"no connection to rank 0 at {found.leader}: {_line(error)}"
                if failed == _TRIES:
                    exit_with(1, f"run {self._options.run!r}: {why}; check the firewall, or give --local-addr there")
                self._member.restart(why)
                continue
            if store is not None:
                host, _, port = found.leader.rpartition(":")
                info = RendezvousStoreInfo(host, int(port))
                return RendezvousInfo(RoundStore(store, self._member, found), found.rank, found.size, info)

    def _join(self) -> Place | Closing:
        self._server = None  # the workers that used it have been stopped
        limit = timedelta(seconds=_CONNECT_S)
        try:
            self._server = dist.TCPStore(self._address, 0, None, True, timeout=limit, wait_for_workers=False)
        except dist.DistError as error:
            why = f"this host no longer reaches itself at {self._address}: {_line(error)}"
            exit_with(1, f"run {self._options.run!r}: {why}")
        return self._member.join(f"{self._address}:{self._server.port}")

    def _meet(self, place: Place) -> dist.TCPStore | None:
        """Rank 0's store, once all of the round have met there; None: the round is over."""
        assert self._server is not None
        store = self._server
        if place.rank:
            self._server = None
            host, _, port = place.leader.rpartition(":")
            limit = timedelta(seconds=_CONNECT_S)
            store = dist.TCPStore(host, int(port), None, False, timeout=limit, wait_for_workers=False)
        store.set_timeout(timedelta(seconds=_AGENT_S))

        def still() -> bool:
            return self._member.in_round

        def all_have_met() -> bool:
            if store.add("transport/here", 1) == place.size:
                store.set("transport/all", "")
            return _there(store, ["transport/all"], place.size, still)

        if not _while(still, all_have_met):
            return None
        if place.round > 1:
            why = self._member.view.why
            log.warning("run %s: round %d, %d agents: %s", self._options.run, place.round, place.size, why)
        return store

    # --- the end ----------------------------------------------------------------------------------------
    def _finish(self) -> None:
        """Wait for the other agents' workers, since only the run's end says whether it succeeded."""
        try:
            self._member.done()
            closing = self._member.wait_closed()
        except (RunError, StoreError) as error:
            exit_with(
                self._options.rules.exit_codes.failure,
                f"run {self._options.run!r}: the workers of this agent are done, but the run's end is unknown: {error}",
            )
        code = self._options.rules.exit_codes.of(closing)
        if code:
            exit_with(code, ended(self._options.run, closing, before=False))

    def _close(self, result: EndVerdict) -> None:
        assert result.reason is not None
        try:
            self._member.close(result.reason, result.message)
        except StaleRoundError:
            log.warning("run %s goes on without this agent, which is of an older round", self._options.run)
        except TransportError as error:
            log.warning("run %s could not be closed: %s", self._options.run, error)

    def _exit(self, closing: Closing, *, before: bool) -> NoReturn:
        code = self._options.rules.exit_codes.of(closing)
        exit_with(code, ended(self._options.run, closing, before=before))

    def _leave(self) -> None:
        if not self._left and os.getpid() == self._pid:  # a forked child also runs what atexit has
            self._left = True
            atexit.unregister(self._leave)
            self._member.leave()
            self._store.close()


def _line(error: Exception) -> str:
    """Return the first line of an error of torch, whose messages have a stack behind it, or are empty."""
    return error_text(error).splitlines()[0]


@contextlib.contextmanager
def _leaving_at_signals() -> Iterator[None]:
    """Leave at signals until the first workers start: torchrun has no handlers, the agent would die with its leases."""

    def leave(number: int, frame: FrameType | None) -> None:
        exit_with(128 + number, f"got {signal.Signals(number).name} while waiting for a rank; leaving the run")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    mine = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    try:
        for each in mine:
            signal.signal(each, leave)
        yield
    finally:
        for each in mine:
            signal.signal(each, signal.SIG_DFL)

"""One Redis server: connections, scripts, errors of the store that uses it, and wake-ups.

It handles:

* After a lost connection, a restart of the server, or a reply that says "not now" (it runs another client's script,
  or its replicas are away), it tries again with back-off, for at most ``patience_s``. A write
  whose answer was lost is repeated under the same number, and the server returns the answer that it stored: the write
  is done once. The retries of the redis package would do a write twice and are off.
  The server forgets its answers after a minute by its own clock, which may be set. A script can tell whether the answer
  to what it is asked again may have been forgotten (`forgotten`), and then answers nothing that it does not know.
* Every key begins with ``transport:{run}:``. Runs share a server, and all keys of a run are in one slot of a cluster.
* A connection must not be used across a fork: each process makes its own.
* It refuses a server that evicts keys when its memory is full, one that is too old, and one without append-only file
  unless the URL has ``may_forget=yes``.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import random
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from transport.errors import (
    ClosedError,
    ConfigurationError,
    MissingDependencyError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    StoreUnsuitableError,
)
from transport.runtime import hurry, threads
from transport.runtime.installing import install
from transport.storage.urls import RedisURL

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)

OLDEST = (6, 2)
MOST_PATIENCE_S = 30.0  # well below that
_COMMAND_TIMEOUT_S = 5.0  # upper limit, for a suspended server or a cut cable
_HURRIED_TIMEOUT_S = 0.5  # of a process that ends: see hurry.py
_LEAST_COMMAND_TIMEOUT_S = 1.0  # a server that writes its file may take as long on a loaded disk
# Probes find a server that is gone without a word: the connection that waits for wake-ups sends nothing, and the
# kernel's own probes begin after two hours.
_PROBES = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
_BACKOFF_FIRST_S, _BACKOFF_MOST_S = 0.02, 1.0
_BELL_LOOK_S = 1.0
# What a server says that has not run the call, and may run a later one. The package has classes of its own for some.
_NOT_NOW = re.compile(r"(?:^|\s-)(?:BUSY|NOREPLICAS|READONLY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|LOADING) ")
_NOT_CONNECTED = (ConnectionRefusedError, FileNotFoundError)  # nothing listens at the port, or there is no socket
_JOIN_S = 10.0
REMEMBER_MS = 60_000  # answers to writes
_LOST = "decisions, the ends of rollouts and notices, which are written only once"

# Before each script. KEYS[1] is the hash of this client's answers. ARGV[1] is the time in ms (empty: the server's own),
# a stroke, the field of the answer, and a plus where the call may have run before. Fields are numbers that grow. The
# hash keeps the one it began with: what was asked after that, and has no answer there, has not run.
_PRELUDE = f"""
local function now_ms()
    local given = string.match(ARGV[1], '^(.-)/')
    if given ~= '' then return tonumber(given) end
    local time = redis.call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end
local answer_field, again = string.match(ARGV[1], '/(%d+)(%+?)$')
local function remembered()
    local answer = redis.call('HGET', KEYS[1], answer_field)
    return answer and cmsgpack.unpack(answer)
end
local function forgotten()
    if again ~= '+' then return false end
    local first = redis.call('HGET', KEYS[1], 'first')
    return not first or tonumber(first) > tonumber(answer_field)
end
local function remember(answer)
    redis.call('HSETNX', KEYS[1], 'first', answer_field)
    redis.call('HSET', KEYS[1], answer_field, cmsgpack.pack(answer))
    redis.call('PEXPIRE', KEYS[1], {REMEMBER_MS})
    return answer
end
"""


def require_redis() -> Any:
    """Return the redis package. MissingDependencyError where it is not installed."""
    try:
        import redis
    except ImportError as error:
        raise MissingDependencyError(f"a redis:// URL needs the redis package ({error}): {install('redis')}") from error
    return redis


class Script:
    """A Lua script that runs as one step of the server."""

    def __init__(self, body: str) -> None:
        self.text = _PRELUDE + body
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class _Room:
    """Connections and wake-ups that the threads of one process share."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.hurried = False  # the client's limits are those of an end
        # `with` is on the lock: a Condition's own is Python code, in which an interrupt would leave the lock held.
        self.lock = threading.RLock()
        self.condition = threading.Condition(self.lock)
        self.rings = 0  # Invariant: this and `listener` are guarded by lock
        self.listener: threading.Thread | None = None
        self.ended = False

    def pause(self, most_s: float) -> None:
        """Pause, less where the connection is closed."""
        with self.lock:
            self.condition.wait_for(lambda: self.ended, most_s)


class RedisConnection:
    """A server, for the store of one run.

    Args:
        patience_s: how long to wait for a server that does not answer, at most ``MOST_PATIENCE_S``. With a suspended
            server the wait may be longer by the time limit of a command: ``patience_s``, at least 1 s and at most 5 s.
    """

    def __init__(self, url: RedisURL, *, patience_s: float = 10.0) -> None:
        if not 0 <= patience_s <= MOST_PATIENCE_S:
            raise ConfigurationError(f"patience_s={patience_s}: give 0 to {MOST_PATIENCE_S:.0f} seconds")
        self._redis = require_redis()
        self._url = url
        self._patience_s = patience_s
        self._prefix = f"transport:{{{url.run}}}:store:"
        self._closed = False
        # By process id: a lock that another thread held at the fork would stay locked in the child.
        self._rooms: dict[int, _Room] = {}
        self._client = secrets.token_hex(6)
        self._fields = itertools.count()
        self._failed_at = -1.0  # monotonic time of the last attempt, if it got no answer
        hurry.watch(self)
        try:
            self._check_server()
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        """True if ``close`` was called."""
        return self._closed

    @property
    def server(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self._url.url)
        return parts.hostname or "localhost", parts.port or 6379

    @property
    def name(self) -> str:
        """Server and run, without the password."""
        host = self._url.url.rpartition("@")[2].rpartition("//")[2]
        return f"{host} run {self._url.run}"

    def key(self, name: str) -> str:
        """Return the key's name on the server."""
        return self._prefix + name

    def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Any], now_ms: int | None = None) -> Any:
        """Run a script once. StoreUnavailableError: the server did not answer in time; the script may have run."""
        name, field = self._place()
        first = f"{'' if now_ms is None else now_ms}/{field}"
        every_key = [self.key(name), *map(self.key, keys)]
        # The name of a file in an error may have halves of surrogate pairs, which UTF-8 does not have.
        arguments = [each.encode("utf-8", "replace") if isinstance(each, str) else each for each in arguments]
        again = ""

        def attempt(client: redis.Redis) -> Any:
            nonlocal again
            words = (len(every_key), *every_key, first + again, *arguments)
            before, again = again, "+"
            handled = sys.exc_info()[1]  # by the caller: the context of an error that has none of its own
            try:
                try:
                    return client.evalsha(script.sha, *words)
                except self._redis.exceptions.NoScriptError:  # the server was restarted
                    return client.eval(script.text, *words)
            except self._redis.exceptions.RedisError as error:
                unsent = error.__context__ is not handled and isinstance(error.__context__, _NOT_CONNECTED)
                if unsent or self._not_now(error):
                    again = before
                raise

        return self._patiently(attempt)

    def _place(self) -> tuple[str, str]:
        """Hash and field of the next answer. A new hash each minute, so that the ones before expire."""
        minute = int(time.monotonic() * 1000) // REMEMBER_MS
        return f"answers:{self._client}:{os.getpid()}:{minute}", str(next(self._fields))

    def _patiently(self, attempt: Any) -> Any:
        give_up_at = time.monotonic() + self._patience_s
        pause_s = _BACKOFF_FIRST_S
        faults = self._redis.exceptions
        begun = time.monotonic()
        while True:
            room = self._room()
            if self._failed_at > hurry.since() and time.monotonic() > hurry.until():
                raise StoreUnavailableError(f"the store at {self.name} is away, and this process is ending")
            client = room.client
            try:
                with self._translated():
                    answer = attempt(client)
                self._failed_at = -1.0
                return answer
            except (faults.ConnectionError, faults.TimeoutError, OSError) as error:
                if room.client is not client:
                    continue  # `cut` has ended it, perhaps on its way from a server that answers
                self._failed_at = now = time.monotonic()
                if now + pause_s > min(give_up_at, hurry.until()):
                    ending = now + pause_s <= give_up_at
                    waited = f"{now - begun:.3g} s, and this process is ending"
                    patience = waited if ending else f"{self._patience_s:g} s"
                    raise StoreUnavailableError(
                        f"the store at {self.name} did not answer for {patience}: "
                        f"{str(error).rstrip('.')}; check the address, and that Redis runs there"
                    ) from error
            except (AttributeError, TypeError, ValueError):
                if not self._closed and room.client is client:  # else another thread closed or cut it during the call
                    raise
            finally:
                # What it has connected since its client was replaced, or closed, is closed by no other call.
                if room.client is not client or self._rooms.get(os.getpid()) is not room:
                    client.connection_pool.disconnect()
            room.pause(pause_s * random.uniform(0.5, 1.0))  # closed meanwhile: the next iteration raises ClosedError
            pause_s = min(2 * pause_s, _BACKOFF_MOST_S)

    def _not_now(self, error: redis.RedisError) -> bool:
        """Return whether the server has not run the call, and is to be asked again."""
        faults = self._redis.exceptions
        known = (faults.BusyLoadingError, faults.ReadOnlyError, faults.ClusterDownError, faults.TryAgainError)
        return isinstance(error, known) or _NOT_NOW.search(str(error)) is not None

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Map the server's refusals to errors of a store. What a retry may cure is the package's own error."""
        what, faults = f"the store at {self.name}", self._redis.exceptions
        try:
            yield
        except (faults.AuthenticationError, faults.NoPermissionError) as error:
            raise StoreUnsuitableError(f"{what} denies access: {error}; check user, password and ACL") from error
        except (faults.ConnectionError, faults.TimeoutError):
            if self._closed:
                self._room()
            raise
        except faults.RedisError as error:
            text = str(error)
            if self._not_now(error):
                raise faults.ConnectionError(text) from error
            if isinstance(error, faults.OutOfMemoryError) or "OOM " in text or "MISCONF" in text:
                raise StoreFullError(f"{what} is full: {error}; raise maxmemory, or free disk space") from error
            raise StoreError(f"{what} failed: {error}") from error

    def _check_server(self) -> None:
        info = self._patiently(self._info)
        version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
        if version < OLDEST:
            raise StoreUnsuitableError(f"{self.name} runs Redis {info['redis_version']}; use 6.2 or newer")
        policy = str(info.get("maxmemory_policy", ""))
        if policy.startswith("allkeys") and info.get("maxmemory"):
            raise StoreUnsuitableError(
                f"{self.name} evicts keys when its memory is full (maxmemory-policy {policy}): set noeviction"
            )
        if not self._url.may_forget:
            self._check_append_only_file(info.get("aof_enabled"))

    def _check_append_only_file(self, kept: object) -> None:
        """Require that answered writes survive a kill of the server, unless the user accepts the loss."""
        if kept is None:
            log.warning(
                "%s does not report whether its append-only file is enabled: without one, it loses %s if it is killed",
                self.name,
                _LOST,
            )
        elif not kept:
            raise StoreUnsuitableError(
                f"{self.name} has no append-only file: if it is killed, it loses {_LOST}. Enable the file "
                "(redis-cli CONFIG SET appendonly yes, then CONFIG REWRITE), or accept the loss with may_forget=yes in "
                "the URL"
            )

    def _info(self, client: redis.Redis) -> Mapping[str, Any]:
        found: Mapping[str, Any] = client.info()
        if found.get("loading"):  # until it is done, the server says that it has no append-only file
            raise self._redis.exceptions.BusyLoadingError("the server is loading its append-only file")
        return found

    # --- connections ---------------------------------------------------------------------------
    def _room(self) -> _Room:
        if self._closed:
            raise ClosedError(f"the store at {self.name} was closed")
        room = self._rooms.get(os.getpid())
        if room is None:
            room = self._rooms.setdefault(os.getpid(), _Room(self._make_client()))
            room.hurried = hurry.until() < float("inf")
        if room.hurried and hurry.until() == float("inf"):  # the end is over, and this connection goes on
            self._replace(room, hurried=False)
        return room

    def _replace(self, room: _Room, *, hurried: bool) -> None:
        """Go on with other limits. Calls in progress fail, and are made again."""
        room.hurried = hurried
        before, room.client = room.client, self._make_client()
        before.connection_pool.disconnect(inuse_connections=True)

    def _make_client(self) -> redis.Redis:
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        most_s = _COMMAND_TIMEOUT_S if hurry.until() > time.monotonic() else _HURRIED_TIMEOUT_S
        timeout_s = min(max(_LEAST_COMMAND_TIMEOUT_S, self._patience_s), most_s)
        client: redis.Redis = self._redis.Redis.from_url(
            self._url.url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            socket_keepalive=True,
            socket_keepalive_options=_PROBES,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        return client

    def cut(self) -> None:
        """End the calls that are in progress; those to come have a short limit. For a process that ends."""
        room = self._rooms.get(os.getpid())
        if room is not None:
            self._replace(room, hurried=True)

    def close(self) -> None:
        """Close all connections of this process, and end its waits with ClosedError. Idempotent."""
        self._closed = True
        room = self._rooms.get(os.getpid())
        if room is None:
            return
        with room.lock:
            room.ended = True
            listener, room.listener = room.listener, None
            room.condition.notify_all()
        if listener is not None:
            with contextlib.suppress(self._redis.exceptions.RedisError, OSError):
                room.client.publish(self.channel, "")  # else it looks within _BELL_LOOK_S
            listener.join(_JOIN_S)
        room.client.close()
        self._rooms.pop(os.getpid(), None)  # behind it, so that after an interrupt the next call finishes
        room.client.close()  # what a call has connected meanwhile; later ones see that the room is gone

    # --- wake-ups ------------------------------------------------------------------------------
    @property
    def channel(self) -> str:
        """The channel on which scripts publish to wake all waiters."""
        return self.key("bell")

    def seen(self) -> int:
        """Return the number of wake-ups until now; read it before reading the data, and pass it to ``wait``."""
        room = self._room()
        with room.lock:
            if room.listener is None and not self._closed:
                room.listener = threading.Thread(target=self._listen, args=(room,), name="redis store", daemon=True)
                threads.start(room.listener)
            return room.rings

    def wait(self, seen: int, timeout_s: float) -> None:
        """Wait for a wake-up after ``seen``, at most ``timeout_s``. Raises ClosedError after ``close``."""
        room = self._room()
        with room.lock:
            room.condition.wait_for(lambda: room.rings != seen or self._closed, timeout_s)
        self._room()

    def _listen(self, room: _Room) -> None:
        """Run in a thread: every message, every new subscription and every lost connection is a wake-up."""
        pause_s = _BACKOFF_FIRST_S
        while not room.ended:
            bell = room.client.pubsub()  # type: ignore[no-untyped-call]  # the package leaves it so
            try:
                bell.subscribe(self.channel)
                while not room.ended:
                    if bell.get_message(timeout=_BELL_LOOK_S) is not None:
                        pause_s = _BACKOFF_FIRST_S
                        self._ring(room)
            except Exception as error:  # of whatever class where another thread closed the connection meanwhile
                log.info("the subscription to wake-ups of %s failed: %s; subscribing again", self.name, error)
                self._ring(room)  # waiters read the data and get the error themselves
                room.pause(pause_s)
                pause_s = min(2 * pause_s, _BACKOFF_MOST_S)
            finally:
                with contextlib.suppress(self._redis.exceptions.RedisError, OSError):
                    bell.close()

    @staticmethod
    def _ring(room: _Room) -> None:
        with room.lock:
            room.rings += 1
            room.condition.notify_all()

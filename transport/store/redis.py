"""Store on a Redis server, for the members of a cluster. See base.py for the contract of a store.

Every operation is one Lua script, which the server runs in one step. A record whose lease has ended by the server's
clock (its wall clock: a step of it moves leases) is absent for each of them; each first removes the oldest thousand of
such records. While the server is unreachable, leases cannot be renewed: those that end meanwhile have ended. What
survives its restart is what its append-only file has: everything that was answered with ``appendfsync always``, up to
the last second with ``everysec``.

Values and versions are two hashes, so that a counter is the server's own; a sorted set of keys serves `scan`, one of
lease ends serves their end. A revision of the whole store gives the versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from transport.errors import StoreUnavailableError, UsageError
from transport.storage.redis_connection import RedisConnection, Script
from transport.storage.urls import RedisURL
from transport.store.base import Change, Entry, Store, watched
from transport.wire.addresses import address_towards

_KEYS = ("values", "versions", "index", "leases", "revision")

_COMMON = """
local values, versions, index, leases, revision = KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local channel = ARGV[2]
local now = now_ms()
local function remove(key)
    redis.call('HDEL', values, key)
    redis.call('HDEL', versions, key)
    redis.call('ZREM', index, key)
    redis.call('ZREM', leases, key)
end
local ended = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, 1000)
for _, key in ipairs(ended) do remove(key) end
if #ended > 0 then redis.call('PUBLISH', channel, '') end
local function over(ends) return ends and tonumber(ends) <= now end
local function remove_if_over(key)
    if over(redis.call('ZSCORE', leases, key)) then remove(key) end
end
"""
_GET_ANY = """
local function get_many(keys)
    local found = {}
    for first = 1, #keys, 1000 do
        local part = {unpack(keys, first, math.min(first + 999, #keys))}
        local their_values = redis.call('HMGET', values, unpack(part))
        local their_versions = redis.call('HMGET', versions, unpack(part))
        local ends = redis.call('ZMSCORE', leases, unpack(part))
        for at = 1, #part do
            found[#found + 1] = not over(ends[at]) and their_values[at]
            found[#found + 1] = not over(ends[at]) and their_versions[at]
        end
    end
    return found
end
"""
_GET_MANY = Script(_COMMON + _GET_ANY + "return get_many(cmsgpack.unpack(ARGV[3]))")
_LOOK = Script(
    _COMMON
    + """
local ends = redis.call('ZSCORE', leases, ARGV[3])
if over(ends) then return {false, false} end
return {redis.call('HGET', values, ARGV[3]), redis.call('HGET', versions, ARGV[3]), ends and tostring(ends - now)}
"""
)
_SCAN = Script(
    _COMMON
    + _GET_ANY
    + """
local from = ARGV[3] == '' and '-' or '[' .. ARGV[3]
local to = ARGV[3] == '' and '+' or '(' .. ARGV[3] .. '\\127'
local keys = redis.call('ZRANGEBYLEX', index, from, to)
return {keys, get_many(keys)}
"""
)
# A conditional write that is asked again, because its answer was lost, is not refused for what it has itself written:
# it gets the same answer, or -1 where the server has forgotten that.
# Each change is five arguments: key, "1" for a value and "" for a deletion, value, expected version, lease in ms.
_PUT_MANY = Script(
    _COMMON
    + """
local before = remembered()
if before then return before end
for at = 3, #ARGV, 5 do
    remove_if_over(ARGV[at])
    local expected, version = ARGV[at + 3], redis.call('HGET', versions, ARGV[at]) or '0'
    if expected ~= '' and version ~= expected then return forgotten() and -1 or 0 end
end
local made = {}
for at = 3, #ARGV, 5 do
    local key, lease = ARGV[at], ARGV[at + 4]
    if ARGV[at + 1] == '' then
        remove(key)
        made[#made + 1] = 0
    else
        local version = redis.call('INCR', revision)
        redis.call('HSET', values, key, ARGV[at + 2])
        redis.call('HSET', versions, key, version)
        redis.call('ZADD', index, 0, key)
        if lease == '' then redis.call('ZREM', leases, key) else redis.call('ZADD', leases, now + lease, key) end
        made[#made + 1] = version
    end
end
redis.call('PUBLISH', channel, '')
return remember(made)
"""
)
_ADD = Script(
    _COMMON
    + """
local before = remembered()
if before then return before end
remove_if_over(ARGV[3])
local sum = redis.pcall('HINCRBY', values, ARGV[3], ARGV[4])
if type(sum) == 'table' then
    if not string.find(sum.err, 'integer') and not string.find(sum.err, 'overflow') then return sum end
    return 0
end
redis.call('HSET', versions, ARGV[3], redis.call('INCR', revision))
redis.call('ZADD', index, 0, ARGV[3])
redis.call('PUBLISH', channel, '')
return remember(redis.call('HGET', values, ARGV[3]))
"""
)
_RENEW = Script(
    _COMMON
    + """
local kept = {}
for at = 4, #ARGV, 2 do
    remove_if_over(ARGV[at])
    -- ZREM first: a server at its maxmemory refuses a ZADD until the script has written.
    if redis.call('HGET', versions, ARGV[at]) == ARGV[at + 1] and redis.call('ZREM', leases, ARGV[at]) == 1 then
        redis.call('ZADD', leases, now + ARGV[3], ARGV[at])
        kept[#kept + 1] = ARGV[at]
    end
end
return kept
"""
)


class RedisStore(Store):
    """A store of one run on a server.

    Args:
        url: server and run, see `parse_url`.
        patience_s: how long to wait for a server that is away before StoreUnavailableError.
        clock: seconds that leases are measured with; None: the server's own, which all members share.
    """

    def __init__(self, url: RedisURL, *, patience_s: float = 10.0, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._connection = RedisConnection(url, patience_s=patience_s)

    def __repr__(self) -> str:
        return f"<RedisStore {self.place} {'closed' if self._connection.closed else 'open'}>"

    @property
    def place(self) -> str:
        """Return server and run, without the password."""
        return self._connection.name

    def close(self) -> None:
        """Close the connections and end waits in other threads with ClosedError. The records stay."""
        self._connection.close()

    def reached_from(self) -> str | None:
        return address_towards(*self._connection.server)

    def _now_ms(self) -> int | None:
        return None if self._clock is None else round(self._clock() * 1000)

    def _run(self, script: Script, *arguments: str | bytes | int) -> object:
        return self._connection.run(script, _KEYS, (self._connection.channel, *arguments), self._now_ms())

    # --- reading -------------------------------------------------------------------------------
    def _look(self, key: str) -> tuple[Entry | None, float | None]:
        """Return the record, and in how many seconds its lease ends."""
        answer = self._run(_LOOK, key)
        assert isinstance(answer, list)
        value, version, *ends = answer
        entry = None if version is None else Entry(value, int(version))
        return entry, float(ends[0]) / 1000 if ends and ends[0] is not None else None

    def _get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        return _entries(self._run(_GET_MANY, msgspec.msgpack.encode(keys)))

    def _scan(self, prefix: str) -> Mapping[str, Entry]:
        answer = self._run(_SCAN, prefix)
        assert isinstance(answer, list)
        keys, flat = answer
        return {key.decode(): entry for key, entry in zip(keys, _entries(flat), strict=True) if entry is not None}

    # --- writing -------------------------------------------------------------------------------
    def _put_many(self, changes: Sequence[Change]) -> list[int] | None:
        arguments: list[str | bytes | int] = []
        for key, value, expected, lease_s in changes:
            arguments += (
                key,
                "" if value is None else "1",
                b"" if value is None else value,
                "" if expected is None else expected,
                "" if lease_s is None else max(1, round(lease_s * 1000)),
            )
        answer = self._run(_PUT_MANY, *arguments)
        if answer == -1:
            raise StoreUnavailableError(
                f"{self!r}: whether a write took place is not known, since its answer was lost and the server has "
                "forgotten it: read the record"
            )
        return [int(version) for version in answer] if isinstance(answer, list) else None

    def _add(self, key: str, amount: int) -> int:
        answer = self._run(_ADD, key, str(amount))
        if not isinstance(answer, bytes):
            raise UsageError(f"store key {key} is not a counter, or the sum exceeds 64 bits; use another key")
        return int(answer)

    def _renew(self, leases: Mapping[str, int], lease_s: float) -> set[str]:
        arguments = [part for lease in leases.items() for part in lease]
        answer = self._run(_RENEW, max(1, round(lease_s * 1000)), *arguments)
        assert isinstance(answer, list)
        return {key.decode() for key in answer}

    # --- waiting -------------------------------------------------------------------------------
    def _watch(self, key: str, version: int, timeout_s: float) -> Entry | None:
        return watched(self._connection, lambda: self._look(key), version, timeout_s)


def _entries(flat: object) -> list[Entry | None]:
    """Values and versions in turn, as records."""
    assert isinstance(flat, list)
    return [
        None if version is None else Entry(value, int(version))
        for value, version in zip(flat[::2], flat[1::2], strict=True)
    ]

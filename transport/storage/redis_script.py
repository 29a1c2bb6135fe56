"""The redis package, and a script of its server: what each begins with, time and the answers that are remembered."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from transport.errors import MissingDependencyError
from transport.runtime.installing import install

REMEMBER_MS: Final = 60_000  # answers to writes

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
    """The redis package. MissingDependencyError where it is not installed."""
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

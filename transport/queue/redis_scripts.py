"""What `RedisQueue` does on the server: one script for each operation, each one step of the server.

Names: ``seq`` is a ticket's number, never used twice, and its entry in the stream is ``seq-0``. A delivery is
``seq/rank``; it has a row once it was claimed or is to be remembered, and is READY before. All scripts but the notices'
first end the expired leases, so what they see never depends on whether another call came before.
"""

from __future__ import annotations

from transport.storage.redis_connection import Script

KEYS = ("tickets", "ids", "info", "rows", "leases", "back", "failed", "finished", "counts", "seq", "notices")

_COMMON = """
local tickets, ids, info, rows, leases, back = KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local failed, finished, counts, sequence, notices = KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local channel, max_deliveries, keep_finished = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local now = now_ms()

local function row_of(delivery)
    local packed = redis.call('HGET', rows, delivery)
    return packed and cmsgpack.unpack(packed)
        or {state = 'ready', attempts = 0, consumer = '', reason = '', token = ''}
end
local function keep_row(delivery, row) redis.call('HSET', rows, delivery, cmsgpack.pack(row)) end
local function count(rank, name, amount) redis.call('HINCRBY', counts, rank .. '/' .. name, amount) end
local function parts(delivery)
    local seq, rank = string.match(delivery, '(%d+)/(%d+)')
    return seq, tonumber(rank)
end

-- The sorted sets of a rank: returned deliveries, by position; delayed retries, by time.
local function back_of(rank) return back .. ':' .. rank end
local function delayed_of(rank) return back .. ':delayed:' .. rank end

local function forget(seq)
    local ticket = cmsgpack.unpack(redis.call('HGET', info, seq))
    redis.call('HDEL', ids, ticket.id)
    redis.call('HDEL', info, seq)
    for rank = 0, ticket.readers - 1 do
        redis.call('HDEL', rows, seq .. '/' .. rank)
        redis.call('ZREM', failed, seq .. '/' .. rank)
    end
end

-- The delivery will not be claimed any more. With its last one, the ticket's bytes go.
local function close(seq, rank)
    redis.call('XACK', tickets, 'rank' .. rank, seq .. '-0')
    local ticket = cmsgpack.unpack(redis.call('HGET', info, seq))
    ticket.open = ticket.open - 1
    redis.call('HSET', info, seq, cmsgpack.pack(ticket))
    if ticket.open == 0 then
        redis.call('XDEL', tickets, seq .. '-0')
        redis.call('RPUSH', finished, seq)
        while redis.call('LLEN', finished) > keep_finished do forget(redis.call('LPOP', finished)) end
    end
end

-- The only function that changes a state after publication. Returns whether the delivery can be claimed now.
local function move(delivery, row, to, reason, ready_at)
    local seq, rank = parts(delivery)
    count(rank, row.state, -1)
    count(rank, to, 1)
    row.state = to
    if reason then row.reason = reason end
    keep_row(delivery, row)
    if to == 'arrived' then return false end
    redis.call('ZREM', leases, delivery)
    if to == 'ready' then
        if ready_at and ready_at > now then
            redis.call('ZADD', delayed_of(rank), ready_at, seq)
        else
            redis.call('ZADD', back_of(rank), seq, seq)
        end
        return true
    end
    if to ~= 'done' then
        redis.call('ZADD', failed, tonumber(seq) * 16 + 15 - rank, delivery)
    end
    close(seq, rank)
    return false
end
"""
_END_LEASES = """
local ended = redis.call('ZRANGEBYSCORE', leases, '-inf', now)
for _, delivery in ipairs(ended) do
    local row = row_of(delivery)
    local _, rank = parts(delivery)
    count(rank, 'expired', 1)
    local to = 'ready'
    if row.state == 'arrived' then to = 'lost' elseif row.attempts >= max_deliveries then to = 'dead' end
    move(delivery, row, to, 'the lease of ' .. row.consumer .. ' ended')
end
if #ended > 0 then redis.call('PUBLISH', channel, '') end
"""
_ONCE = """
local before = remembered()
if before then return before end
"""
_PREPARED = _COMMON + _END_LEASES

# readers, policy version, bound, then id and data of each ticket. -1: beyond the bound.
PUBLISH = Script(
    _PREPARED
    + _ONCE
    + """
local readers, version, bound = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])
local new, seen = {}, {}
for at = 8, #ARGV, 2 do
    if not seen[ARGV[at]] and redis.call('HEXISTS', ids, ARGV[at]) == 0 then
        seen[ARGV[at]] = true
        new[#new + 1] = at
    end
end
if bound and #new > 0 and redis.call('XLEN', tickets) + #new > bound then return -1 end
for _, at in ipairs(new) do
    local seq = string.format('%.0f', redis.call('INCR', sequence))
    redis.call('HSET', ids, ARGV[at], seq)
    redis.call('HSET', info, seq, cmsgpack.pack({id = ARGV[at], readers = readers, open = readers, version = version}))
    redis.call('XADD', tickets, seq .. '-0', 'data', ARGV[at + 1])
end
if #new > 0 then
    for rank = 0, readers - 1 do count(rank, 'ready', #new) end
    redis.call('PUBLISH', channel, '')
end
return remember(#new)
"""
)

# rank, how many, consumer, lease in ms, random part of the tokens, oldest version or "". Five words for each claim.
# What is remembered are deliveries, not their bytes.
CLAIM = Script(
    _PREPARED
    + """
local rank, wanted, consumer, lease, random = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8]), ARGV[9]
local oldest = tonumber(ARGV[10])
local group = 'rank' .. rank
local taken = remembered()
local answer = {}
local function give(seq, data)
    local row = row_of(seq .. '/' .. rank)
    local ticket = cmsgpack.unpack(redis.call('HGET', info, seq))
    for _, word in ipairs({ticket.id, data, row.attempts, row.token, ticket.version}) do answer[#answer + 1] = word end
end
if taken then
    for _, seq in ipairs(taken) do
        local entry = redis.call('XRANGE', tickets, seq .. '-0', seq .. '-0')[1]
        local row = row_of(seq .. '/' .. rank)
        if entry and row.state == 'claimed' and string.find(row.token, random, 1, true) then give(seq, entry[2][2]) end
    end
    return answer
end
taken = {}
local function take(seq, data)
    local delivery = seq .. '/' .. rank
    local row = row_of(delivery)
    local version = tonumber(cmsgpack.unpack(redis.call('HGET', info, seq)).version)
    if oldest and version and version < oldest then
        row.consumer = consumer
        count(rank, 'aged', 1)
        local reason = string.format('policy version %.0f is older than %.0f', version, oldest)
        move(delivery, row, 'discarded', reason)
        return
    end
    count(rank, row.state, -1)
    count(rank, 'claimed', 1)
    row.state, row.consumer, row.attempts = 'claimed', consumer, row.attempts + 1
    row.token = seq .. ':' .. row.attempts .. ':' .. random
    keep_row(delivery, row)
    redis.call('ZADD', leases, now + lease, delivery)
    taken[#taken + 1] = seq
    give(seq, data)
end
for _, seq in ipairs(redis.call('ZRANGEBYSCORE', delayed_of(rank), '-inf', now)) do
    redis.call('ZREM', delayed_of(rank), seq)
    redis.call('ZADD', back_of(rank), seq, seq)
end
while #taken < wanted do
    local seq = redis.call('ZRANGE', back_of(rank), 0, 0)[1]
    if not seq then break end
    redis.call('ZREM', back_of(rank), seq)
    local entry = redis.call('XCLAIM', tickets, group, consumer, 0, seq .. '-0')[1]
    take(seq, entry[2][2])
end
while #taken < wanted and redis.call('EXISTS', tickets) == 1 do
    redis.pcall('XGROUP', 'CREATE', tickets, group, '0')
    local left = wanted - #taken
    local streams = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', left, 'STREAMS', tickets, '>')
    if not streams then break end
    for _, entry in ipairs(streams[1][2]) do
        local seq = string.match(entry[1], '%d+')
        if cmsgpack.unpack(redis.call('HGET', info, seq)).readers > rank then
            take(seq, entry[2][2])
        else
            redis.call('XACK', tickets, group, entry[1])  -- written for fewer ranks
        end
    end
end
if #taken > 0 then remember(taken) end
return answer
"""
)

# rank. How many ms until a delayed delivery may be claimed; -1: there is none.
NEXT_DUE = Script(
    _COMMON
    + """
local first = redis.call('ZRANGE', delayed_of(ARGV[5]), 0, 0, 'WITHSCORES')
return first[2] and math.max(0, math.ceil(tonumber(first[2]) - now)) or -1
"""
)

# state before and after, reason, delay in ms, then token and rank of each claim. 1 for each that was the caller's.
MOVE = Script(
    _PREPARED
    + _ONCE
    + """
local held, to, reason, delay = ARGV[5], ARGV[6], ARGV[7], tonumber(ARGV[8])
local accepted, wake = {}, false
for at = 9, #ARGV, 2 do
    local delivery = string.match(ARGV[at], '%d+') .. '/' .. ARGV[at + 1]
    local row = row_of(delivery)
    if row.state == held and row.token == ARGV[at] then
        local target = to
        if to == 'ready' then
            count(ARGV[at + 1], 'retried', 1)
            if row.attempts >= max_deliveries then target = 'dead' end
        end
        wake = move(delivery, row, target, reason, now + delay) or wake
        accepted[#accepted + 1] = 1
    else
        accepted[#accepted + 1] = 0
    end
end
if wake then redis.call('PUBLISH', channel, '') end
return remember(accepted)
"""
)

# lease in ms, then token and rank of each claim. 1 for each that is the caller's.
RENEW = Script(
    _PREPARED
    + """
local accepted = {}
for at = 6, #ARGV, 2 do
    local delivery = string.match(ARGV[at], '%d+') .. '/' .. ARGV[at + 1]
    local mine = row_of(delivery).token == ARGV[at] and redis.call('ZSCORE', leases, delivery)
    if mine then redis.call('ZADD', leases, now + ARGV[5], delivery) end
    accepted[#accepted + 1] = mine and 1 or 0
end
return accepted
"""
)

# ids. For each the states of its ranks in one word, "" where it is not known.
KNOWN = Script(
    _PREPARED
    + """
local answer = {}
for at = 5, #ARGV do
    local seq = redis.call('HGET', ids, ARGV[at])
    local states = {}
    if seq then
        for rank = 0, cmsgpack.unpack(redis.call('HGET', info, seq)).readers - 1 do
            states[#states + 1] = row_of(seq .. '/' .. rank).state
        end
    end
    answer[#answer + 1] = table.concat(states, ' ')
end
return answer
"""
)

DEPTH = Script(_PREPARED + "return redis.call('HGETALL', counts)")

# limit. Six words for each.
FAILURES = Script(
    _PREPARED
    + """
local answer = {}
for _, delivery in ipairs(redis.call('ZREVRANGE', failed, 0, ARGV[5] - 1)) do
    local seq, rank = parts(delivery)
    local row = row_of(delivery)
    local id = cmsgpack.unpack(redis.call('HGET', info, seq)).id
    for _, word in ipairs({id, rank, row.state, row.attempts, row.consumer, row.reason}) do
        answer[#answer + 1] = word
    end
end
return answer
"""
)

# limit
UNFINISHED = Script(
    _COMMON
    + """
local answer = {}
for _, entry in ipairs(redis.call('XREVRANGE', tickets, '+', '-', 'COUNT', ARGV[5])) do
    answer[#answer + 1] = entry[2][2]
end
return answer
"""
)

# topic, version, payload
ANNOUNCE = Script(
    _COMMON
    + _ONCE
    + """
local before = redis.call('HGET', notices, 'version/' .. ARGV[5])
if before and tonumber(before) >= tonumber(ARGV[6]) then return 0 end
redis.call('HSET', notices, 'version/' .. ARGV[5], ARGV[6], 'payload/' .. ARGV[5], ARGV[7])
redis.call('PUBLISH', channel, '')
return remember(1)
"""
)

LATEST = Script(_COMMON + "return redis.call('HMGET', notices, 'version/' .. ARGV[5], 'payload/' .. ARGV[5])")

"""What `RedisQueue` does on the server: one script for each operation, each one step of the server.

Names: ``seq`` is a ticket's number, never used twice, and its entry in the stream is ``seq-0``. A delivery is
``seq/rank``; it has a row once it was claimed or is to be remembered, and is READY before. All scripts that look at
deliveries first end the oldest of the expired leases, MOST at a time, so that no step lasts longer the larger a run is.
What a claim asks for whose lease is over is refused, whether or not a script has ended it.

A server at its maxmemory refuses a command that may grow until the script has written, and nothing behind that. Each
script but PUBLISH and ANNOUNCE therefore writes first with one that cannot (ZREM, XREADGROUP): a full queue is drained.
"""

from __future__ import annotations

from transport.storage.redis_connection import Script

KEYS = ("tickets", "ids", "info", "rows", "leases", "back", "failed", "finished", "counts", "seq", "notices", "dead")

COMMON = """
local tickets, ids, info, rows, leases, back = KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local failed, finished, counts, sequence, notices = KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local dead = KEYS[13]  -- tickets with a dead delivery, whose entries remain in the stream
local channel, max_deliveries, keep_finished = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local now = now_ms()

-- Each call of a command costs more than what it does here. Rows and tickets are therefore fetched many at a time,
-- changed in these tables, and what a script has changed is written by `write_back`, with which it ends.
local row_cache, ticket_cache, dirty_rows, dirty_tickets = {}, {}, {}, {}
local added, passed, closed = {}, {}, {}

-- The most deliveries of one command, and of one end of leases. Commands get this bound, never a caller's number: a
-- number of Lua is a double, and a large one is no integer to Redis.
local MOST = 1000

local function bulk(command, key, words, first)
    for at = 1, #words, MOST do
        local upto = math.min(at + MOST - 1, #words)
        if first then
            redis.call(command, key, first, unpack(words, at, upto))
        else
            redis.call(command, key, unpack(words, at, upto))
        end
    end
end
local function fetch(cache, key, names)
    local missing = {}
    for _, name in ipairs(names) do
        if cache[name] == nil then missing[#missing + 1] = name end
    end
    for at = 1, #missing, MOST do
        local found = redis.call('HMGET', key, unpack(missing, at, math.min(at + MOST - 1, #missing)))
        for offset, packed in ipairs(found) do
            cache[missing[at + offset - 1]] = packed and cmsgpack.unpack(packed) or false
        end
    end
end
local function row_of(delivery)
    if row_cache[delivery] == nil then fetch(row_cache, rows, {delivery}) end
    if not row_cache[delivery] then
        row_cache[delivery] = {state = 'ready', attempts = 0, consumer = '', reason = '', token = ''}
    end
    return row_cache[delivery]
end
local function ticket_of(seq)
    if ticket_cache[seq] == nil then fetch(ticket_cache, info, {seq}) end
    return ticket_cache[seq]
end
local function keep_row(delivery) dirty_rows[delivery] = true end
local function count(rank, name, amount)
    local field = rank .. '/' .. name
    added[field] = (added[field] or 0) + amount
end
-- Of versions, as text: as numbers they would be doubles, which have 53 bits.
local function less(one, other)
    local negative = string.sub(one, 1, 1) == '-'
    if negative ~= (string.sub(other, 1, 1) == '-') then return negative end
    if negative then one, other = other, one end
    if #one ~= #other then return #one < #other end
    return one < other
end
local function parts(delivery)
    local seq, rank = string.match(delivery, '(%d+)/(%d+)')
    return seq, tonumber(rank)
end

-- The sorted sets of a rank: returned deliveries, by position; delayed retries, by time.
local function back_of(rank) return back .. ':' .. rank end
local function delayed_of(rank) return back .. ':delayed:' .. rank end

local function forget(seq)
    local ticket = ticket_of(seq)
    redis.call('HDEL', ids, ticket.id)
    redis.call('HDEL', info, seq)
    if redis.call('SREM', dead, seq) == 1 then redis.call('XDEL', tickets, seq .. '-0') end
    for rank = 0, ticket.readers - 1 do
        redis.call('HDEL', rows, seq .. '/' .. rank)
        redis.call('ZREM', failed, seq .. '/' .. rank)
    end
end

-- The delivery will not be claimed any more. With its last one, the ticket's bytes go, unless one is dead.
local function close(seq, rank)
    passed[rank] = passed[rank] or {}
    table.insert(passed[rank], seq .. '-0')
    local ticket = ticket_of(seq)
    ticket.open = ticket.open - 1
    dirty_tickets[seq] = true
    if ticket.open == 0 then closed[#closed + 1] = seq end
end

local function written(dirty, cache)
    local words = {}
    for name in pairs(dirty) do
        words[#words + 1] = name
        words[#words + 1] = cmsgpack.pack(cache[name])
    end
    return words
end
local function write_back()
    bulk('HSET', rows, written(dirty_rows, row_cache))
    bulk('HSET', info, written(dirty_tickets, ticket_cache))
    for rank, entries in pairs(passed) do bulk('XACK', tickets, entries, 'rank' .. rank) end
    if #closed > 0 then
        local entries = {}
        for _, seq in ipairs(closed) do
            if (ticket_of(seq).died or 0) > 0 then
                redis.call('SADD', dead, seq)
            else
                entries[#entries + 1] = seq .. '-0'
            end
        end
        bulk('XDEL', tickets, entries)
        bulk('RPUSH', finished, closed)
        for _ = 1, redis.call('LLEN', finished) - keep_finished do forget(redis.call('LPOP', finished)) end
    end
    for field, amount in pairs(added) do
        if amount ~= 0 then redis.call('HINCRBY', counts, field, amount) end
    end
    dirty_rows, dirty_tickets, added, passed, closed = {}, {}, {}, {}, {}
end

-- The only function that changes a state after publication. Returns whether the delivery can be claimed now.
local function move(delivery, row, to, reason, ready_at)
    local seq, rank = parts(delivery)
    count(rank, row.state, -1)
    count(rank, to, 1)
    if row.state == 'dead' then ticket_of(seq).died = ticket_of(seq).died - 1 end
    if to == 'dead' then ticket_of(seq).died = (ticket_of(seq).died or 0) + 1 end
    row.state = to
    if reason then row.reason = reason end
    keep_row(delivery)
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

local function holds(delivery, token)
    local ends = row_of(delivery).token == token and redis.call('ZSCORE', leases, delivery)
    return ends and tonumber(ends) > now
end
local function end_leases()
    local ended = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, MOST)
    if #ended == 0 then return end
    bulk('ZREM', leases, ended)
    fetch(row_cache, rows, ended)
    for _, delivery in ipairs(ended) do
        local row = row_of(delivery)
        local _, rank = parts(delivery)
        count(rank, 'expired', 1)
        local to = 'ready'
        if row.attempts >= max_deliveries then to = 'dead' end
        move(delivery, row, to, 'the lease of ' .. row.consumer .. ' ended')
    end
    write_back()
    redis.call('PUBLISH', channel, '')
end
"""
ONCE = """
local before = remembered()
if before then return before end
"""
PREPARED = COMMON + "end_leases()"

# readers, policy version, bound, then id and data of each ticket. -1: beyond the bound.
PUBLISH = Script(
    COMMON
    + ONCE
    + """
local readers, version, bound = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])
local new, seen = {}, {}
for start = 8, #ARGV, 2000 do
    local asked = {}
    for at = start, math.min(start + 1998, #ARGV), 2 do asked[#asked + 1] = ARGV[at] end
    for offset, known in ipairs(redis.call('HMGET', ids, unpack(asked))) do
        if not known and not seen[asked[offset]] then
            seen[asked[offset]] = true
            new[#new + 1] = start + 2 * (offset - 1)
        end
    end
end
if bound and #new > 0 and redis.call('XLEN', tickets) - redis.call('SCARD', dead) + #new > bound then return -1 end
if #new > 0 then
    local last = redis.call('INCRBY', sequence, #new) - #new
    local named, described = {}, {}
    for offset, at in ipairs(new) do
        local seq = string.format('%.0f', last + offset)
        named[2 * offset - 1], named[2 * offset] = ARGV[at], seq
        local ticket = {id = ARGV[at], readers = readers, open = readers, version = version}
        described[2 * offset - 1], described[2 * offset] = seq, cmsgpack.pack(ticket)
        redis.call('XADD', tickets, seq .. '-0', 'data', ARGV[at + 1])
    end
    bulk('HSET', ids, named)
    bulk('HSET', info, described)
    for rank = 0, readers - 1 do count(rank, 'ready', #new) end
    write_back()
    redis.call('PUBLISH', channel, '')
end
return remember(#new)
"""
)

# rank, how many, consumer, lease in ms, random part of the tokens, oldest version or "". Five words for each claim.
# What is remembered are deliveries, not their bytes.
CLAIM = Script(
    PREPARED
    + """
local rank, wanted, consumer, lease, random = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8]), ARGV[9]
local oldest = ARGV[10]
local group = 'rank' .. rank
local taken = remembered()
local answer = {}
local function give(seq, data)
    local row = row_of(seq .. '/' .. rank)
    local ticket = ticket_of(seq)
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
local leased = {}
local function take(seq, data)
    local delivery = seq .. '/' .. rank
    local row = row_of(delivery)
    local version = ticket_of(seq).version
    if oldest ~= '' and version ~= '' and less(version, oldest) then
        row.consumer = consumer
        count(rank, 'aged', 1)
        move(delivery, row, 'discarded', 'policy version ' .. version .. ' is older than ' .. oldest)
        return
    end
    count(rank, row.state, -1)
    count(rank, 'claimed', 1)
    row.state, row.consumer, row.attempts = 'claimed', consumer, row.attempts + 1
    row.token, row.ended = seq .. ':' .. row.attempts .. ':' .. random, nil
    keep_row(delivery)
    leased[#leased + 1] = now + lease
    leased[#leased + 1] = delivery
    taken[#taken + 1] = seq
    give(seq, data)
end
for _, seq in ipairs(redis.call('ZRANGEBYSCORE', delayed_of(rank), '-inf', now, 'LIMIT', 0, MOST)) do
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
local function read(call)
    local most = math.min(wanted - #taken, MOST)
    return call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', most, 'STREAMS', tickets, '>')
end
while #taken < wanted do
    local streams = read(redis.pcall)
    if streams and streams.err then  -- NOGROUP before the rank's first claim; any other error comes again
        if string.find(streams.err, 'NOGROUP') then redis.call('XGROUP', 'CREATE', tickets, group, '0', 'MKSTREAM') end
        streams = read(redis.call)
    end
    if not streams then break end
    local entries, seqs, deliveries = streams[1][2], {}, {}
    for at, entry in ipairs(entries) do
        seqs[at] = string.match(entry[1], '%d+')
        deliveries[at] = seqs[at] .. '/' .. rank
    end
    fetch(ticket_cache, info, seqs)
    fetch(row_cache, rows, deliveries)
    for at, entry in ipairs(entries) do
        if ticket_of(seqs[at]).readers > rank then
            take(seqs[at], entry[2][2])
        else
            redis.call('XACK', tickets, group, entry[1])  -- written for fewer ranks
        end
    end
end
bulk('ZADD', leases, leased)
write_back()
if #taken > 0 then remember(taken) end
return answer
"""
)

# rank. How many ms until a delayed delivery may be claimed; -1: there is none.
NEXT_DUE = Script(
    COMMON
    + """
local first = redis.call('ZRANGE', delayed_of(ARGV[5]), 0, 0, 'WITHSCORES')
return first[2] and math.max(0, math.ceil(tonumber(first[2]) - now)) or -1
"""
)

# state afterwards, reason, delay in ms, then token and rank of each claim. 1 for each that was the caller's. How a
# claim ended stands in its row beside its token, so another call that asks for this end has the same answer.
MOVE = Script(
    PREPARED
    + ONCE
    + """
local to, reason, delay = ARGV[5], ARGV[6], tonumber(ARGV[7])
local accepted, wake = {}, false
local seqs, deliveries, mine = {}, {}, {}
for at = 8, #ARGV, 2 do
    seqs[#seqs + 1] = string.match(ARGV[at], '%d+')
    deliveries[#deliveries + 1] = seqs[#seqs] .. '/' .. ARGV[at + 1]
end
fetch(row_cache, rows, deliveries)
fetch(ticket_cache, info, seqs)
for at, delivery in ipairs(deliveries) do
    local row, token = row_of(delivery), ARGV[6 + 2 * at]
    local held = holds(delivery, token)
    if held then mine[#mine + 1] = delivery end
    accepted[at] = (held or row.token == token and row.ended == to) and 1 or 0
end
if #mine == 0 then return accepted end
bulk('ZREM', leases, mine)
for _, delivery in ipairs(mine) do
    local row, target = row_of(delivery), to
    local _, rank = parts(delivery)
    if to == 'ready' then
        count(rank, 'retried', 1)
        if row.attempts >= max_deliveries then target = 'dead' end
    end
    wake = move(delivery, row, target, reason, now + delay) or wake
    row.ended = to
end
write_back()
if wake then redis.call('PUBLISH', channel, '') end
return remember(accepted)
"""
)

# lease in ms, then token and rank of each claim. 1 for each that is the caller's.
RENEW = Script(
    PREPARED
    + """
local accepted = {}
for at = 6, #ARGV, 2 do
    local delivery = string.match(ARGV[at], '%d+') .. '/' .. ARGV[at + 1]
    local mine = holds(delivery, ARGV[at])
    if mine then
        redis.call('ZREM', leases, delivery)  -- first: a ZADD alone is refused by a server at its maxmemory
        redis.call('ZADD', leases, now + ARGV[5], delivery)
    end
    accepted[#accepted + 1] = mine and 1 or 0
end
return accepted
"""
)

# limit. How many dead deliveries may be claimed again. They stand in `back`, and in the group as given out.
REQUEUE = Script(
    PREPARED
    + ONCE
    + """
local again = 0
for _, delivery in ipairs(redis.call('ZRANGE', failed, 0, -1)) do
    if again >= tonumber(ARGV[5]) then break end
    local row = row_of(delivery)
    local seq, rank = parts(delivery)
    if row.state == 'dead' then
        local ticket = ticket_of(seq)
        redis.call('ZREM', failed, delivery)
        if ticket.open == 0 then
            redis.call('LREM', finished, 1, seq)
            redis.call('SREM', dead, seq)
        end
        ticket.open = ticket.open + 1
        dirty_tickets[seq] = true
        redis.call('XCLAIM', tickets, 'rank' .. rank, 'requeue', 0, seq .. '-0', 'FORCE', 'JUSTID')
        move(delivery, row, 'ready')
        again = again + 1
    end
end
if again == 0 then return 0 end
write_back()
redis.call('PUBLISH', channel, '')
return remember(again)
"""
)


# --- looks, which move no delivery, and notices --------------------------------------------------------
# ids. For each the states of its ranks in one word, "" where it is not known.
KNOWN = Script(
    PREPARED
    + """
local answer = {}
for at = 5, #ARGV do
    local seq = redis.call('HGET', ids, ARGV[at])
    local states = {}
    if seq then
        for rank = 0, ticket_of(seq).readers - 1 do
            states[#states + 1] = row_of(seq .. '/' .. rank).state
        end
    end
    answer[#answer + 1] = table.concat(states, ' ')
end
return answer
"""
)

DEPTH = Script(PREPARED + "return redis.call('HGETALL', counts)")

# limit. Six words for each.
FAILURES = Script(
    PREPARED
    + """
local answer = {}
for _, delivery in ipairs(redis.call('ZREVRANGEBYSCORE', failed, '+inf', '-inf', 'LIMIT', 0, ARGV[5])) do
    local seq, rank = parts(delivery)
    local row = row_of(delivery)
    local id = ticket_of(seq).id
    for _, word in ipairs({id, rank, row.state, row.attempts, row.consumer, row.reason}) do
        answer[#answer + 1] = word
    end
end
return answer
"""
)

# limit
UNFINISHED = Script(
    COMMON
    + """
local answer, upto, wanted = {}, '+', tonumber(ARGV[5])
local most = math.min(wanted, MOST)
while #answer < wanted do
    local entries = redis.call('XREVRANGE', tickets, upto, '-', 'COUNT', most)
    for _, entry in ipairs(entries) do
        local finished = redis.call('SISMEMBER', dead, string.match(entry[1], '%d+')) == 1
        if not finished and #answer < wanted then answer[#answer + 1] = entry[2][2] end
        upto = '(' .. entry[1]
    end
    if #entries < most then break end
end
return answer
"""
)

# topic, version, payload
ANNOUNCE = Script(
    COMMON
    + ONCE
    + """
local before = redis.call('HGET', notices, 'version/' .. ARGV[5])
if before and not less(before, ARGV[6]) then return 0 end
redis.call('HSET', notices, 'version/' .. ARGV[5], ARGV[6], 'payload/' .. ARGV[5], ARGV[7])
redis.call('PUBLISH', channel, '')
return remember(1)
"""
)

LATEST = Script(COMMON + "return redis.call('HMGET', notices, 'version/' .. ARGV[5], 'payload/' .. ARGV[5])")

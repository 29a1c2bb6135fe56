"""What `RedisQueue` asks the server without moving a delivery, and its notices: scripts as in redis_moves.py."""

from __future__ import annotations

from transport.queue.statements.redis_moves import COMMON, ONCE, PREPARED
from transport.storage.redis_script import Script

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
while #answer < wanted do
    local entries = redis.call('XREVRANGE', tickets, upto, '-', 'COUNT', wanted)
    for _, entry in ipairs(entries) do
        local finished = redis.call('SISMEMBER', dead, string.match(entry[1], '%d+')) == 1
        if not finished and #answer < wanted then answer[#answer + 1] = entry[2][2] end
        upto = '(' .. entry[1]
    end
    if #entries < wanted then break end
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

"""The Lua scripts, each of which the server runs atomically."""

from __future__ import annotations

from .prelude import script

ACQUIRE = script("""
local queue, alive, rung, bell = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local owner, lease, max_hold = ARGV[1], ARGV[2], ARGV[3]
local explicit, id = ARGV[7] == '1', ARGV[8]
local begin, ticket = tonumber(ARGV[9]), ARGV[10]
local size = #KEYS - 4
local chosen, version, since, soonest, expires_first
local free = 0

for i = 0, size - 1 do
  local permit = (begin + i) % size
  local row = KEYS[5 + permit]
  local f = redis.call('HMGET', row, 'owner', 'version', 'expires', 'max_until', 'id')
  local expires = number(f[3])
  if expires <= now then
    free = free + 1
    if free == 1 then chosen, version, since = permit, number(f[2]), expires end
  elseif f[1] == owner then
    local max_until = number(f[4])
    if explicit then
      redis.call('HINCRBY', row, 'count', 1)
    end
    -- With several servers, this one's grant may have no majority. What has one is
    -- renewed afterwards.
    local extends = not explicit or id == ''
    if explicit or id <= (f[5] or '') then
      id = f[5] or ''
    else
      -- Undoing the earlier request must not undo this one.
      redis.call('HSET', row, 'id', id)
    end
    if extends then
      expires = math.max(expires, math.min(now + lease, max_until))
      redis.call('HSET', row, 'expires', expires)
      keep(row, expires, number(f[2]))
    end
    return {1, permit, number(f[2]), max_until - now, explicit and 1 or 0, id}
  elseif not soonest or expires < expires_first then
    soonest, expires_first = permit, expires
  end
end

if free == 0 then
  return {0, soonest, describe(KEYS[5 + soonest])}
end

local queued = redis.call('EXISTS', queue, rung) > 0
if queued and not (ticket ~= '' and redis.call('ZSCORE', rung, ticket)) then
  local place = place_of(queue, alive, ticket)
  local wait = wait_of(place)
  if ticket == '' then wait = math.min(place, NEXT + 3) * GRACE end
  local turn = since + wait
  if reserved(rung) >= free or turn > now then
    return {0, chosen, describe(KEYS[5 + chosen])}
  end
end

version = math.max(version + 1, now)
grant(KEYS[5 + chosen], version, id)
if ticket ~= '' then
  redis.call('ZREM', queue, ticket)
  redis.call('HDEL', alive, ticket)
  redis.call('ZREM', rung, ticket)
  redis.call('DEL', bell)
end
if queued and free - 1 > reserved(rung) then ring(queue, alive, rung) end
return {1, chosen, version, tonumber(max_hold)}
""")
"""Grant a key, or the first of its permits that is free, beginning with a given one.

Keys: queue, alive, rung, bell, rows. Arguments: owner; lease, max_hold and
hold_at_least; holder; note; whether the owner is explicit; an id for a new grant; the
permit to begin with; the ticket, or nothing. If the owner has a grant already, the
answer also tells whether this counts as another hold, and the grant's id.
"""

ACQUIRE_ALL = script("""
local owner, found = ARGV[1], {}

for i = 1, #KEYS, 3 do
  local f = redis.call('HMGET', KEYS[i + 2], 'owner', 'version', 'expires', 'id')
  local mine = ARGV[7] ~= '1' and f[1] == owner
  if number(f[3]) > now and not mine then return {} end
  -- This request is late: its sender has asked again.
  if mine and (f[4] or '') > ARGV[8] then return {} end
  if redis.call('EXISTS', KEYS[i], KEYS[i + 1]) > 0 then return {} end
  found[#found + 1] = number(f[3]) > now and number(f[2])
    or math.max(number(f[2]) + 1, now)
end

for i, version in ipairs(found) do grant(KEYS[3 * i], version, ARGV[8]) end
return found
""")
"""Grant several free keys that nobody waits for, or none.

Keys: queue, rung and row of each. Arguments: as for one key, up to the id.
"""

RELEASE = script("""
local left, undo, act = tonumber(ARGV[1]), ARGV[2] == '1', ARGV[3]
local answers = {}

for i = 1, #KEYS / 4 do
  local queue, alive, rung, row = unpack(KEYS, 4 * i - 3, 4 * i)
  local owner, mark = ARGV[2 + 2 * i], ARGV[3 + 2 * i]
  local f = redis.call('HMGET', row, 'owner', 'version', 'id', 'count', 'min_until',
    'acts')
  local current, acts = is_grant(f, owner, mark), f[6] or ''
  -- If the act arrives again, others may have had the key meanwhile.
  answers[i] = (current or string.find(acts, act, 1, true)) and 1 or 0
  if current then
    -- Redis keeps up to 64 bytes in a compact form.
    acts = string.sub(act .. acts, 1, 64)
    local count = left or number(f[4]) - (is_repeated(queue, act) and 0 or 1)
    if count > 0 then
      redis.call('HSET', row, 'count', count, 'acts', acts)
    else
      local free_at = undo and now or math.max(now, number(f[5]))
      redis.call('HSET', row, 'owner', '', 'count', 0, 'expires', free_at,
        'requested', 0, 'id', undo and '' or f[3] or '', 'acts', acts)
      keep(row, free_at, number(f[2]))
      if redis.call('EXISTS', queue) > 0 then
        if free_at <= now then
          ring(queue, alive, rung)
        else
          alert(queue, free_at)
        end
      end
    end
  end
end
return answers
""")
"""Give back holds.

Keys: queue, alive, rung and row of each. Arguments: how many holds are left, or nothing
to count down; whether keys don't cool; an id of this act; owner and mark of each.
"""

RENEW = script("""
local answers = {}
for i, row in ipairs(KEYS) do
  local owner, mark, lease = unpack(ARGV, 3 * i - 1, 3 * i + 1)
  local f = redis.call('HMGET', row, 'owner', 'version', 'id', 'expires', 'max_until',
    'requested')
  local expires = number(f[4])
  if is_grant(f, owner, mark) and expires > now then
    expires = math.max(expires, math.min(now + lease, number(f[5])))
    redis.call('HSET', row, 'expires', expires)
    keep(row, expires, number(f[2]))
    if ARGV[1] == 'up' then
      redis.call('HINCRBY', row, 'count', 1)
    elseif ARGV[1] ~= '' then
      redis.call('HSET', row, 'count', ARGV[1])
    end
    answers[i] = number(f[6]) > 0 and 2 or 1
  else
    answers[i] = describe(row)
  end
end
return answers
""")
"""Extend grants. For each, answer 1, or 2 if its holder is asked to finish; or what the
row says if the grant is over.

Keys: rows. Arguments: the new number of holds, ``up`` for one more, or nothing; owner,
mark and lease of each.
"""

FORFEIT = script("""
local queue, row = KEYS[1], KEYS[2]
local f = redis.call('HMGET', row, 'owner', 'version', 'id', 'count')
if is_grant(f, ARGV[1], ARGV[2]) and not is_repeated(queue, ARGV[4]) then
  redis.call('HSET', row, 'count', math.max(1, number(f[4]) - ARGV[3]))
end
""")
"""Subtract holds from the count of a grant.

Keys: queue, row. Arguments: owner, mark, how many, an id of this act.
"""

READ = script("""
local answers = {}
for i, row in ipairs(KEYS) do answers[i] = describe(row) end
return answers
""")
"""Look at keys. Keys: rows."""

QUEUE = script("""
local queue, alive, rung = KEYS[1], KEYS[2], KEYS[3]
local ticket, seconds = ARGV[1], ARGV[2]
local free, since = 0, nil
for i = 4, #KEYS do
  local expires = number(redis.call('HGET', KEYS[i], 'expires'))
  if expires <= now then free = free + 1 end
  since = math.min(since or expires, expires)
end
if redis.call('ZSCORE', rung, ticket) then
  if free > 0 then return {1, 0} end
  redis.call('ZREM', rung, ticket)
end

-- This comes first, because Redis refuses it when it is out of memory.
redis.call('ZADD', queue, 'NX', now, ticket)
redis.call('HSET', alive, ticket, now + seconds)
redis.call('DEL', told(queue, ticket))
redis.call('PEXPIRE', queue, FORGET)
redis.call('PEXPIRE', alive, FORGET)

local kept, place = reserved(rung), place_of(queue, alive, ticket)
local turn = since + wait_of(place)
if free > kept and turn <= now then
  let_in(queue, alive, rung, ticket)
  return {1, 0}
end
if free > 0 and kept >= free then
  local lapses = redis.call('ZRANGE', rung, 0, 0, 'WITHSCORES')[2]
  turn = math.max(turn, lapses + math.min(place, NEXT + 1) * GRACE)
end
return {0, turn - now + later_by(place)}
""")
"""Queue for a key, or go on queueing. Answer whether the key is free for this waiter,
and if not, in what time to look if the bell doesn't ring.

Keys: queue, alive, rung, rows. Arguments: ticket; how long its waiter is thought to
wait.
"""

LEAVE = script("""
local queue, alive, rung, bell = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
redis.call('ZREM', queue, ARGV[1])
redis.call('HDEL', alive, ARGV[1])
redis.call('DEL', bell)
if redis.call('ZREM', rung, ARGV[1]) == 1 then ring(queue, alive, rung) end
tell(queue, ARGV[1], 'gone')
redis.call('PEXPIRE', bell, 1000)
""")
"""Leave the queue. Keys: queue, alive, rung, bell. Argument: ticket."""

WAITERS = script("""
local found = {}
for _, ticket in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if number(redis.call('HGET', KEYS[2], ticket)) > now then
    found[#found + 1] = {ticket, redis.call('ZSCORE', KEYS[1], ticket)}
  end
end
return found
""")
"""Who waits. Keys: queue, alive."""

MAKE_OLDER = script("""
for i = 1, #KEYS, 2 do
  local queue, row = KEYS[i], KEYS[i + 1]
  for _, ticket in ipairs(redis.call('ZRANGE', queue, 0, -1)) do
    tell(queue, ticket, 'now')
  end
  if number(redis.call('HGET', row, 'expires')) > now then
    for _, moment in ipairs({'acquired', 'expires', 'min_until', 'max_until'}) do
      local value = number(redis.call('HGET', row, moment))
      if value > 0 then redis.call('HSET', row, moment, value - ARGV[1]) end
    end
  end
end
""")
"""Let time pass, for tests. Keys: queue and row of each. Argument: how much."""

REQUEST_RELEASE = script("""
local row = KEYS[1]
local f = redis.call('HMGET', row, 'owner', 'version', 'expires', 'holder', 'requested')
if not f[1] or f[1] == '' or number(f[3]) <= now then return {} end
if ARGV[1] ~= '' and f[2] ~= ARGV[1] then return {} end
if number(f[5]) == 0 then redis.call('HSET', row, 'requested', now) end
return {f[1], f[4], number(f[2])}
""")
"""Ask the holder of a key to finish.

Key: row. Argument: the version, or nothing for any.
"""

FORCE_RELEASE = script("""
local queue, alive, rung, row = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local f = redis.call('HMGET', row, 'owner', 'version', 'acquired', 'expires', 'holder')
local version, acquired = number(f[2]), number(f[3])
local act = done(queue, ARGV[3])
local ended = redis.call('LRANGE', act, 0, -1)
if ended[1] then return {ended[1], ended[2], number(ended[3])} end
if f[1] == '' and number(f[4]) <= now then return {} end
if not f[2] or (ARGV[1] ~= '' and f[2] ~= ARGV[1]) then return {} end
if acquired == 0 or now - acquired < tonumber(ARGV[2]) then return {} end
redis.call('HSET', row, 'owner', '', 'count', 0, 'version', version + 1,
  'acquired', 0, 'expires', now, 'min_until', 0, 'max_until', 0,
  'requested', 0)
keep(row, now, version + 1)
redis.call('RPUSH', act, f[1], f[5], f[2])
redis.call('PEXPIRE', act, 30000)
ring(queue, alive, rung)
return {f[1], f[5], version}
""")
"""Free a key without its holder's consent.

Keys: queue, alive, rung, row. Arguments: the version, or nothing for any; how long it
must have been held; an id of this act.
"""

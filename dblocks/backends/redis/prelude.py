"""The Lua that every script begins with: how a server keeps a lock, and who is next.

A lock's keys share a hash tag, so that a cluster keeps them on one node:

* ``…:row``, or ``…:row:N`` for a permit, a hash: the holder, the expiry, the version,
  an id that tells grants apart where the version doesn't, and the latest acts that
  released it. An act is a command of a caller's, which may arrive more than once;
* ``…:queue``, a sorted set: the waiters' tickets, in order of arrival;
* ``…:alive``, a hash: until when each waiter is expected to wait;
* ``…:rung``, a sorted set: the tickets that were told that the key is free, and until
  when it is reserved for them;
* ``…:bell:TICKET``, a list on which the waiter blocks: what it is told;
* ``…:told:TICKET``, which exists until that waiter is due to look for itself;
* ``…:done:ACT``, kept for half a minute: this act has counted holds down, or what it
  has ended.

The first waiter may take a key that is free and not reserved for another. Waiters may
have died, so the second may take it after half a second, one more after each further
quarter, all from the fifth on at once, and callers that don't queue come last.

Times are microseconds of the server's clock. A version is the time of its grant, or one
more than the version before: a hybrid logical clock (Kulkarni et al., 2014). So
versions rise even after a row is forgotten, or a server without persistence restarts.
"""

from __future__ import annotations

from hashlib import sha1
from typing import NamedTuple


class Script(NamedTuple):
    """A script's text, and the digest that the server knows it by."""

    text: str
    digest: str


_PRELUDE = """
-- Redis passes numbers on with up to 17 digits; these have 16.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local GRACE, FORGET, RETAIN, NEXT, APART = 250000, 3600000, 86400000, 3, 20000

local function number(value) return tonumber(value) or 0 end

-- A row outlives the time that its version stands for: else the next version could be
-- smaller.
local function keep(row, expires, version)
  redis.call('PEXPIREAT', row, math.ceil(math.max(expires, version) / 1000) + RETAIN)
end

-- The arguments begin with owner, lease, max_hold, hold_at_least, holder and note.
local function grant(row, version, id)
  local owner, lease, max_hold, at_least, holder, note = unpack(ARGV, 1, 6)
  local expires = now + math.min(lease, max_hold)
  -- Without hold_at_least, a release frees the key even if the clock was set back.
  local min_until = tonumber(at_least) > 0 and now + at_least or 0
  redis.call('HSET', row, 'owner', owner, 'holder', holder, 'note', note, 'count', 1,
    'version', version, 'acquired', now, 'expires', expires, 'min_until', min_until,
    'max_until', now + max_hold, 'requested', 0, 'id', id)
  keep(row, math.max(expires, min_until), version)
end

local function describe(row)
  local f = redis.call('HMGET', row, 'owner', 'holder', 'note', 'version', 'acquired',
    'expires', 'max_until', 'count', 'requested', 'id')
  if not f[4] then return {} end
  return {f[1], f[2], f[3], number(f[4]), number(f[5]), number(f[6]) - now,
    number(f[7]) - now, number(f[8]), number(f[6]), number(f[9]), f[10] or ''}
end

-- The fields begin with 'owner', 'version' and 'id'. A mark is a version or an id.
local function is_grant(f, owner, mark)
  return f[1] == owner and (f[2] == mark or f[3] == mark)
end

local function first(queue, alive)
  while true do
    local ticket = redis.call('ZRANGE', queue, 0, 0)[1]
    if not ticket then return nil end
    if number(redis.call('HGET', alive, ticket)) > now then return ticket end
    redis.call('ZREM', queue, ticket)
    redis.call('HDEL', alive, ticket)
  end
end

local function name_of(queue, part, which)
  return string.sub(queue, 1, -6) .. part .. ':' .. which
end

local function id_of(ticket) return string.match(ticket, '^%x+') end

local function tell(queue, ticket, word)
  local bell = name_of(queue, 'bell', id_of(ticket))
  redis.call('RPUSH', bell, word)
  redis.call('PEXPIRE', bell, 30000)
end

local function told(queue, ticket) return name_of(queue, 'told', id_of(ticket)) end

local function let_in(queue, alive, rung, ticket)
  redis.call('ZREM', queue, ticket)
  redis.call('HDEL', alive, ticket)
  redis.call('ZADD', rung, now + GRACE, ticket)
  redis.call('PEXPIRE', rung, 30000)
end

-- While the queue moves, most of these were told a moment ago, and can sleep on.
local function alert_some(queue, first, last, due)
  for number, ticket in ipairs(redis.call('ZRANGE', queue, first, last)) do
    local mine, mark = due + (number - 1) * APART, told(queue, ticket)
    local left = redis.call('PTTL', mark) * 1000
    if left < 0 or left > mine + NEXT * APART then
      redis.call('SET', mark, 1, 'PX', math.ceil(mine / 1000))
      tell(queue, ticket, mine)
    end
  end
end

-- Tell the next waiters when to look, because those before them may have died. Tell the
-- last ones, too: they are the likeliest to be alive if all of these have died.
local function alert(queue, from)
  local due = from - now
  alert_some(queue, 0, NEXT - 1, due)
  local size = redis.call('ZCARD', queue)
  alert_some(queue, math.max(NEXT, size - NEXT), -1, due + (NEXT + 1) * GRACE)
end

-- Tell the first waiter that the key is free, and reserve it for a while.
local function ring(queue, alive, rung)
  local ticket = first(queue, alive)
  if not ticket then return end
  let_in(queue, alive, rung, ticket)
  tell(queue, ticket, 'go')
  alert(queue, now + GRACE)
end

local function reserved(rung)
  redis.call('ZREMRANGEBYSCORE', rung, '-inf', now)
  return redis.call('ZCARD', rung)
end

-- Return how many queue before this one; a caller that doesn't queue comes last.
local function place_of(queue, alive, ticket)
  first(queue, alive)
  return redis.call('ZRANK', queue, ticket) or redis.call('ZCARD', queue)
end

-- Return how long a key must have been free before this place's waiter may take it. The
-- second waits for two graces: after one, the reservation of a waiter that has died
-- lapses, and the first may take the key late.
local function wait_of(place)
  return math.min(place > 0 and place + 1 or 0, NEXT + 2) * GRACE
end

-- From the fifth on, all may take it at the same time, so they look one by one.
local function later_by(place)
  return math.max(0, math.min(place, 50) - NEXT - 1) * APART
end

local function done(queue, act) return name_of(queue, 'done', act) end

-- An act that arrives again must not count down again.
local function is_repeated(queue, act)
  return not redis.call('SET', done(queue, act), 1, 'NX', 'PX', 30000)
end
"""


def script(text: str) -> Script:
    """Return a script that begins with the prelude."""
    text = _PRELUDE + text
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())

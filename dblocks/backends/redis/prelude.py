"""What all scripts begin with: how a lock is kept on a server, and who is next.

A lock's keys share a hash tag, so that a cluster has them in one place:

* ``…:row``, or ``…:row:N`` for a permit, a hash: who has it, until when, its version,
  an id, which marks a grant where the version doesn't, and the last acts that released
  it;
* ``…:queue``, a sorted set: the tickets of the waiters, by their arrival;
* ``…:alive``, a hash: until when each waiter is thought to wait;
* ``…:rung``, a sorted set: tickets that were told that the key is free, and until when
  it is kept for them;
* ``…:bell:TICKET``, a list: what a waiter, blocked on it, is told;
* ``…:told:TICKET``, which exists until that waiter is due to look by itself;
* ``…:done:ACT``, for half a minute: that this act counted holds down, or what it ended.

The first waiter may take a key that is free and not kept for another. As those before
them may be dead, the second may after half a second, with each further quarter one
more, from the fifth on all of them, and in the end callers that don't queue.

Moments are microseconds of the server's clock. A version is the moment of its grant,
or one more than the last: a hybrid logical clock (Kulkarni et al., 2014), so that
versions rise although rows are forgotten, even by a restart without persistence.
"""

from __future__ import annotations

from hashlib import sha1
from typing import NamedTuple


class Script(NamedTuple):
    """A script's text, and the digest that the server knows it by."""

    text: str
    digest: str


_PRELUDE = """
-- Redis hands numbers on with 17 digits; these have 16.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local GRACE, FORGET, RETAIN, NEXT, APART = 250000, 3600000, 86400000, 3, 20000

local function number(value) return tonumber(value) or 0 end

-- Not before the moment that its version stands for, or later ones would be smaller.
local function keep(row, expires, version)
  redis.call('PEXPIREAT', row, math.ceil(math.max(expires, version) / 1000) + RETAIN)
end

-- The arguments begin with owner, lease, max_hold, hold_at_least, holder and note.
local function grant(row, version, id)
  local owner, lease, max_hold, at_least, holder, note = unpack(ARGV, 1, 6)
  local expires = now + math.min(lease, max_hold)
  -- Without hold_at_least nothing keeps a row back, not even a clock that is set back.
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

-- Begins with the fields 'owner', 'version', 'id'. A mark is a version or an id.
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

-- In a queue that moves on, most of these were told a moment ago, and need not wake.
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

-- The next are told when to look: those before them may be dead. So are the last, who
-- are the likeliest to be alive if all of these are dead.
local function alert(queue, from)
  local due = from - now
  alert_some(queue, 0, NEXT - 1, due)
  local size = redis.call('ZCARD', queue)
  alert_some(queue, math.max(NEXT, size - NEXT), -1, due + (NEXT + 1) * GRACE)
end

-- The first is told that the key is free, and has it kept for a while.
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

-- How many queue before it; one that doesn't queue comes last.
local function place_of(queue, alive, ticket)
  first(queue, alive)
  return redis.call('ZRANK', queue, ticket) or redis.call('ZCARD', queue)
end

-- For how long a key must have been free before the waiter in that place may take it.
-- The second needs two graces, because the first may be late when what was kept for one
-- that has died lapses, after one.
local function wait_of(place)
  return math.min(place > 0 and place + 1 or 0, NEXT + 2) * GRACE
end

-- All from the fifth on may take it at the same moment: they look one after the other.
local function later_by(place)
  return math.max(0, math.min(place, 50) - NEXT - 1) * APART
end

local function done(queue, act) return name_of(queue, 'done', act) end

-- What counts down must not do so again when it is sent again.
local function is_repeated(queue, act)
  return not redis.call('SET', done(queue, act), 1, 'NX', 'PX', 30000)
end
"""


def script(text: str) -> Script:
    """Return a script that begins with the prelude."""
    text = _PRELUDE + text
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())

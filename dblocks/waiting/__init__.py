"""Getting a key: one attempt, the wait for a free key, in a thread or an event loop.

Waiting has three layers, and correctness depends on none of them:

* In one process, the waiters for a key that count the same permits stand in a wait
  queue (:mod:`.queue`). Only the first asks the engine, and a release in the same
  process wakes it.
* Among processes, the first of each wait queue queues at a gate, if the engine has
  one: on servers a session lock, which the server hands on in order. The waiter that
  has the gate looks at the key after half a millisecond, then ever less often, and
  keeps the gate until it releases the key. So nobody barges in, and the server itself
  wakes the next waiter.
* Without a gate, waiters look with jittered pauses. These grow with the time for which
  the same grant has been seen: if they grew with each look, the longest waiter would
  starve.
"""

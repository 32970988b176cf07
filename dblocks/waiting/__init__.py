"""Getting a key: one attempt, the wait for a free key, in a thread or an event loop.

Waiting has three layers, and correctness depends on none of them:

* In one process, the waiters for a key stand in a wait queue (:mod:`.queue`). Only the
  first asks the engine, and a release in the same process wakes it.
* Among processes, the first of each wait queue queues at a gate, which an engine may
  have: on servers a session lock, which the server hands on in order. Whoever has it
  looks at the key every few milliseconds, and keeps the gate until it releases the
  key, so that nobody barges in and the server wakes the next waiter by itself.
* Without a gate, waiters look with jittered pauses. These grow with the time for which
  the same grant has been seen: pauses that grow with each look would starve the one
  that has waited longest.
"""

"""One process at the daemon: handshake, requests and replies, leases, reservations, and reconnection after a failure.

It knows no engine, and a failure of the daemon is a miss, never an exception on the fast path.
"""

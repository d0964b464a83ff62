"""A process's session with the daemon: handshake, requests, leases, reservations, reconnection after a failure.

It knows no engine, and a failure of the daemon is a miss, never an exception on the fast path.
"""

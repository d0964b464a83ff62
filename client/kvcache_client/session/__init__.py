"""One process at the daemon: handshake, requests and replies, leases, reservations, and the way back after a failure.

It knows no engine, and a failure of the daemon is a miss.
"""

"""The cache as pure state: index, pool, leases, reservations, sessions, eviction.

It never opens a socket or a file, reads a clock, starts a thread or logs. Time is an argument.
"""

"""What outlives a daemon: the region, the state file, checksums, session files; and the start that restores them.

It never answers a client.
"""

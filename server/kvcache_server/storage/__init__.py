"""What outlives a daemon: the region, the state file, checksums, session files, and the start that finds them again.

It never answers a client.
"""

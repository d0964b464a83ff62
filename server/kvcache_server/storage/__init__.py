"""Files that outlive the daemon (region, state file, checksums, session files), and the code that restores them.

It never answers a client.
"""

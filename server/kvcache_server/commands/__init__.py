"""Commands such as `top`, `why` and `demo`, one module per command.

They never touch the region: a command asks the daemon, as any client does.
"""

"""Commands such as `top`, `why` and `pin`, one module per command.

They never touch the region: a command sends requests to the daemon, as any client does.
"""

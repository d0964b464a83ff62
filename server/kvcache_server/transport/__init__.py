"""Unix sockets and ZeroMQ's wire protocol, as the daemon serves them.

It never looks into messages.
"""

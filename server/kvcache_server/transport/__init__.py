"""Unix sockets and the daemon's implementation of ZeroMQ's wire protocol.

It never interprets messages.
"""

"""KV events for subscribers: numbered batches on two sockets that speak ZeroMQ's protocol.

It never delays a request of an engine.
"""

"""KV events for whoever follows the cache: numbered batches on two sockets that speak ZeroMQ's protocol.

It never holds up a request of an engine.
"""

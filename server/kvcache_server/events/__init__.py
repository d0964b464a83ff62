"""Publishes KV events to subscribers, as numbered batches on two sockets that speak ZeroMQ's protocol.

It never delays a request of an engine.
"""

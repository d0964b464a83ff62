"""The code that client and daemon share: types, messages, codec, region layout, errors.

It imports only the standard library and msgspec, and nothing of the client or the daemon.
"""

__version__ = "0.2.0"

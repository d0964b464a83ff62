"""The process around the core: event loop, handshake, requests, sessions, signals, systemd.

It never decides what is cached.
"""

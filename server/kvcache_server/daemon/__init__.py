"""The shell around the core: one loop, the handshake, requests, sessions, signals, systemd.

It never decides what is cached.
"""

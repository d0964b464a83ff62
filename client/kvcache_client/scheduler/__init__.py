"""The decisions in an engine's scheduler: which blocks each step loads and saves.

It sees plain values and a session's protocol; it never touches a tensor, the engine's objects or a socket.
"""

"""Tiers below and beyond the host's memory: its disk, and stores that many hosts share.

Each tier runs in a process of its own, which is a session of the daemon's.
"""

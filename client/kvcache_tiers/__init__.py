"""Tiers below and beyond the host's memory: its disk, and stores shared by many hosts.

Each tier runs in its own process, which has a session with the daemon.
"""

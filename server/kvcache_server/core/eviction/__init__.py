"""Which blocks are evicted when the pool is full: the policy, the worth of blocks, and floors.

It never decides what may be read or written.
"""

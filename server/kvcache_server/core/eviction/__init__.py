"""Which blocks are evicted when the pool is full: the policy, what blocks are worth, and floors.

It never decides what may be read or written.
"""

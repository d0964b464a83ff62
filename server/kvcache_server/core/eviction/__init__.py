"""Which blocks are evicted when the pool is full: the policy, fair shares, and what was evicted recently.

It never decides what may be read or written.
"""

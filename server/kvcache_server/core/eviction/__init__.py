"""Who gives way when the pool is full: the policy, the shares of the engines, and what was evicted lately.

It never decides what may be read or written.
"""

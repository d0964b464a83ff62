"""The daemon's reports about its work: statistics, residency times of blocks, misses and their explanations.

It never changes what is cached.
"""

"""What the daemon reports about its work: figures, residency, missed lookups and their explanations.

It never changes what is cached.
"""

"""What the daemon can say about its work: figures, residency, missed lookups and their explanations.

It never changes what is cached.
"""

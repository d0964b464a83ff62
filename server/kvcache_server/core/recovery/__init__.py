"""After a restart: reads the region's rows, and rebuilds the cache from them.

No row is trusted: each is checked first. Importing a module of this package imports numpy.
"""

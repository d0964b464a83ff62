"""After a restart: reads the region's rows, and builds the cache again from what they say.

It never trusts a row: each is checked first. Importing a module of it imports numpy.
"""

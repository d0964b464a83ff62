"""The inference engines that the cache serves, a package each.

What is here knows an engine; nothing else does.
"""

"""The inference engines that can use the cache, one package per engine.

Only this package knows engines.
"""

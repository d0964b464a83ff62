"""The inference engines that the cache serves, one package per engine.

Only this package knows engines.
"""

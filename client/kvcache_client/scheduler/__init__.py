"""What an engine's scheduler decides: which blocks a step loads and saves.

It never touches a tensor.
"""

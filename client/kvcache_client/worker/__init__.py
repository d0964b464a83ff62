"""The code that runs in each rank of an engine: it carries out the plan of each step, and verifies blocks.

It never decides what is loaded or saved.
"""

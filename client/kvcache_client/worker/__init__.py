"""What each rank of an engine does: it carries out the plan of a step, and verifies blocks.

It never decides what is loaded or saved.
"""

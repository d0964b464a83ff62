"""What each rank of an engine does: it carries out the plan of a step, and verifies bytes.

It never decides what is loaded or saved.
"""

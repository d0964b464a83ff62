"""HTTP in the daemon's loop: health, figures, an operator's actions; and the dashboard, a process of its own.

No engine needs it, and it never takes more than a small part of the loop.
"""

"""HTTP in the daemon's loop: health, figures, operators' actions; and the dashboard, a process of its own.

No engine needs it, and it never takes more than a small share of the loop's time.
"""

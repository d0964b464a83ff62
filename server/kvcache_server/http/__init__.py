"""HTTP in the daemon's event loop: health, statistics, operators' actions. The dashboard is a separate process.

No engine needs it, and it never takes more than a small share of the loop's time.
"""

"""Commands that never run in a daemon, an engine or a tier: for planning, installing, trying out and examining."""

"""Commands that never run in a daemon, an engine or a tier: they plan, install, try out and examine."""

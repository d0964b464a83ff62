"""Requests to the tiers below the region: to look up, bring and store blocks. Pure: a tier is a session."""

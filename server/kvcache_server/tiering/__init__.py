"""Requests to the tiers below the region: look up, fetch and store blocks. Pure: tiers poll for them."""

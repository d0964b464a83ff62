"""What the tiers below the region are asked for, and what they are given to store. Pure: a tier is a session."""

"""How much is done at once. Pure."""

STEP = 64  # blocks granted, settled, removed or evicted in one slice: half a millisecond
LOOK = 4096  # blocks, hashes or rows examined in one slice

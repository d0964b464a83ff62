"""How the blocks of a KV cache group are matched and saved: one strategy per kind of group. Pure.

A kind that comes has its own class with the methods of `FullAttention`, and a line in `KINDS`. Of an engine's blocks,
`blocks_per_slot` make one cached block, which has one slot.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache_client.scheduler.views import RequestView
from kvcache_client.step_plan import LoadJob
from kvcache_proto.types import REF_BYTES


class FullAttention:
    """Full attention and MLA: a block is of use only below all blocks before it.

    A prefix is matched from its root on, up to the first miss, and every full block is saved.

    Attributes:
        block_tokens: tokens of a block of the engine.
        blocks_per_slot: blocks of the engine in a cached block.
        slot_tokens: tokens of a cached block.
    """

    def __init__(self, block_tokens: int, blocks_per_slot: int, volatile: int = 0, prompt_only: bool = False) -> None:
        """`volatile` cached blocks at the end of a hit are computed all the same: a drafter's KV depends on the next
        token. With `prompt_only`, nothing that was generated is saved."""
        self.block_tokens, self.blocks_per_slot = block_tokens, blocks_per_slot
        self.slot_tokens = block_tokens * blocks_per_slot
        self.prompt_only = prompt_only
        self._volatile = volatile

    def keys(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Return the hashes of the cached blocks: the chained hash of the last engine block covers those before it."""
        return hashes if self.blocks_per_slot == 1 else hashes[self.blocks_per_slot - 1 :: self.blocks_per_slot]

    def loadable(self, request: RequestView) -> int:
        """Return how many cached blocks the request may load: at least one token is left to compute."""
        return min(max(request.tokens - 1, 0) // self.slot_tokens, len(request.hashes) // self.blocks_per_slot)

    def usable(self, hits: int) -> int:
        """Return how many of `hits` cached blocks may be loaded."""
        return max(0, hits - self._volatile)

    def full(self, request: RequestView, computed: int) -> int:
        """Return how many cached blocks are full, hashed and to be saved once `computed` tokens are computed.

        A hash exists for known tokens only, so that placeholders of tokens still being sampled do not count, even where
        `computed` includes them.
        """
        full = min(len(request.hashes), computed // self.block_tokens) // self.blocks_per_slot
        return min(full, request.prompt_tokens // self.slot_tokens) if self.prompt_only else full

    def unsaved(self, request: RequestView, saved: int, computed: int) -> Sequence[bytes]:
        """Return the hashes of full cached blocks beyond the first `saved`, generated ones included."""
        full = min(len(request.hashes), computed // self.block_tokens) // self.blocks_per_slot
        return self.keys(request.hashes)[saved:full] if full > saved else ()

    def cut_load(
        self,
        request: str,
        region: bytes,
        packed: bytes,
        blocks: Sequence[int],
        first: int,
        count: int,
        sums: bytes = b"",
    ) -> LoadJob:
        """Return the job that fills `count` of a request's device blocks from `first` on.

        Args:
            packed: references of the chain's slots, from the chain's root on.
            blocks: all device blocks of the request.
            sums: checksums of the chain's slots, alike; b"" for none.
        """
        slot = first // self.blocks_per_slot
        end = -(-(first + count) // self.blocks_per_slot)
        width = len(sums) // (len(packed) // REF_BYTES) if sums else 0
        return LoadJob(
            request,
            region,
            packed[slot * REF_BYTES : end * REF_BYTES],
            list(blocks[first : first + count]),
            first - slot * self.blocks_per_slot,
            sums[slot * width : end * width],
        )


KINDS = {"full": FullAttention}  # by `GroupSpec.kind`

"""The needs of some prompts: a region that keeps all of them, and memory for the engines. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvcache_proto.errors import ConfigError
from kvcache_proto.region import ALIGN, MAX_REGION, pages_of, plan_geometry
from kvcache_tools.plan.host import check_block
from kvcache_tools.plan.models import read_model
from kvcache_tools.plan.pages import pages, shards, slots
from kvcache_tools.plan.weights import weight_bytes

FLOAT32 = 4


class Workload(NamedTuple):
    """`prompts` of at most `tokens` tokens, with their answers; an engine has two at once: one runs, one is saved."""

    prompts: int
    tokens: int
    block_tokens: int
    batched_tokens: int
    ranks: int = 1


class Needs(NamedTuple):
    """Memory in bytes: of the region, as for `serve --size`; of an engine's weights; of each rank's own cache."""

    region: int
    weights: int
    cache: int


def needs(config: Mapping[str, object], name: str, work: Workload) -> Needs:
    """Return the needs of `work` with the model that `config`, a parsed config.json, describes, in float32.

    Raises ConfigError if `kvcache-server plan` does not know such a model, or no region is large enough.
    """
    model = read_model(config, name)._replace(dtype="float32")
    laid_out = pages(model, work.ranks, FLOAT32, work.block_tokens, 2 * work.batched_tokens)
    number = shards(model, work.ranks)
    block_tokens, found = slots(model, laid_out, work.ranks, FLOAT32, work.block_tokens)
    for slot in found:
        check_block(number, slot.bytes)
    # Fewer windows and states are saved: this is the maximum.
    blocks = work.prompts * -(-work.tokens // block_tokens)
    return Needs(
        region_for(blocks, [number * slot.bytes for slot in found]),
        weight_bytes(model, config, 1),
        (2 * laid_out.blocks_of(work.tokens) + 1) * laid_out.block_bytes,
    )


def region_for(blocks: int, block_bytes: list[int]) -> int:
    """Return the smallest `--size`, to within 3 %, that holds `blocks` blocks of each of these sizes.

    Raises ConfigError if no region does.
    """
    size = max(blocks * sum(block_bytes), 8 * ALIGN)
    while size <= MAX_REGION:
        if _holds(size, blocks, block_bytes):
            return size
        size += max(size // 32, ALIGN)
    raise ConfigError(f"{blocks:,} blocks of {sum(block_bytes):,} bytes: more than a region can hold")


def _holds(size: int, blocks: int, block_bytes: list[int]) -> bool:
    geometry = plan_geometry(bytes(16), size)
    return blocks * sum(pages_of(each, geometry.page_bytes) for each in block_bytes) <= geometry.pages

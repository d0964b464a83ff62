"""The layout of one rank's cache: pages, the groups that share a block table, and the blocks of a request. Pure.

This is vLLM's arithmetic (0.32, `v1/core/kv_cache_utils.py`), applied to a config.json. A page is the data that one
layer keeps of one block, its indexer's included. With several groups, all pages get the same size, and all groups the
same number of layers; a request takes blocks of each group from one pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvcache_client import compression
from kvcache_proto.errors import ConfigError
from kvcache_tools.plan.models import Attention, Latent, Layer, Model, State

# Per sequence, with prefix caching: the current state and the one at the last block boundary. Mamba 2, the only kind
# with groups, also keeps the one at the end of the prompt.
STATE_BLOCKS, STATE_BLOCKS_MAMBA2 = 2, 3
STRIPES = 8  # as the client's `engines.vllm.identity`


class LayerGroup(NamedTuple):
    """Layers that share a block table. `spec` is the first of them, and `page` the bytes that it keeps of a block."""

    spec: Layer
    layers: int
    block_tokens: int
    page: int


class Pages(NamedTuple):
    """The cache of one rank.

    Attributes:
        groups: one block table each; all take blocks from one pool.
        block_bytes: size of a block of the pool, padding included.
        in_flight: tokens that may be scheduled but not finished; a window keeps as many tokens more.
    """

    groups: tuple[LayerGroup, ...]
    block_bytes: int
    in_flight: int

    def blocks_of(self, tokens: int) -> int:
        """Return the maximum number of blocks of the pool that one request of `tokens` tokens needs."""
        return sum(_blocks(group, tokens, self.in_flight) for group in self.groups)

    def longest(self, blocks: int, limit: int) -> int:
        """Return the maximum number of tokens, up to `limit`, of one request that fit in `blocks` blocks; 0 if none
        fits."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks_of(middle) <= blocks else (low, middle - 1)
        return low


class Slot(NamedTuple):
    """The part of a cached block that one rank saves in one group of the daemon; a prompt needs the last
    `window_blocks` of them.

    `kind` is full, sliding, or state, `window` the tokens of a window. For full attention, `window_blocks` is 0: a
    prompt needs all of them.
    """

    kind: str
    window: int
    layers: int
    bytes: int
    window_blocks: int


def slots(
    model: Model, found: Pages, tp: int, kv_item: int, block_tokens: int, compress: bool = False
) -> tuple[int, list[Slot]]:
    """Return the tokens of a cached block, and its slots: that of full attention first. `compress` is the connector's.

    That is `block_tokens`, rounded up to a common end of the blocks of all groups of the engine; with states, which
    exist at few boundaries, a block ends at each of these.
    """
    grid = math.lcm(*(group.block_tokens for group in found.groups))
    states = any(isinstance(group.spec, State) for group in found.groups)
    tokens = grid if states else -(-block_tokens // grid) * grid
    made: dict[tuple[str, int], Slot] = {}
    for group in found.groups:
        kind, window, window_blocks, blocks = "full", 0, 0, tokens // group.block_tokens
        if isinstance(group.spec, State):
            kind, window_blocks, blocks = "state", 1, 1
        elif isinstance(group.spec, Attention) and group.spec.window:
            kind, window = "sliding", group.spec.window
            window_blocks = max(1, -(-(window - 1) // tokens))
            if window_blocks == 1:  # only the end of a block is ever read
                blocks = min(blocks, -(-(window - 1) // group.block_tokens))
        size = group.layers * page(group.spec, group.block_tokens, tp, kv_item, model)
        if kind == "full" and len(found.groups) == 1:
            size = found.block_bytes  # layers of several shapes
        parts = stripes(model, found)
        plain = kind != "state" and not _has_indexer(model)
        if compress and plain and not compression.unsupported_reason(size // parts):
            size = compression.stored_bytes(size // parts) * parts
        size *= blocks
        before = made.get((kind, window), Slot(kind, window, 0, 0, window_blocks))
        made[kind, window] = before._replace(layers=before.layers + group.layers, bytes=before.bytes + size)
    return tokens, sorted(made.values(), key=lambda slot: slot.window_blocks)


def shards(model: Model, tp: int) -> int:
    """Return the number of different parts of a block that the ranks hold: one each, or one if every rank has all of
    the KV.

    If there are fewer KV heads than ranks, several ranks have a copy. vLLM 0.32 does not report which ones, so all are
    kept. Raises ConfigError if `tp` does not divide the heads.
    """
    if tp < 1 or model.heads % tp:
        raise ConfigError(f"--tp {tp}: does not divide the {model.heads} attention heads of {model.name}")
    for layer in model.layers:
        if isinstance(layer, Attention) and layer.heads % tp and tp % layer.heads:
            raise ConfigError(f"--tp {tp}: no divisor or multiple of the {layer.heads} KV heads of {model.name}")
        if isinstance(layer, State):
            _check_state(model, layer, tp)
    return 1 if all(isinstance(layer, Latent) for layer in model.layers) else tp


def stripes(model: Model, found: Pages) -> int:
    """Return the number of shards into which such a part is cut: with MLA, each rank writes some of them."""
    latent = all(isinstance(layer, Latent) for layer in model.layers)
    return STRIPES if latent and not any(group.page % STRIPES for group in found.groups) else 1


def _has_indexer(model: Model) -> bool:
    """Whether bytes of an indexer are saved with the KV, which is then not compressed."""
    return any(isinstance(layer, Latent) and layer.indexer for layer in model.layers)


def _check_state(model: Model, layer: State, tp: int) -> None:
    if layer.channels % tp or layer.recurrent % tp or (layer.groups % tp and layer.groups != 1):
        raise ConfigError(f"--tp {tp}: the states of {model.name} cannot be split that way")


def page(layer: Layer, tokens: int, tp: int, kv_item: int, model: Model) -> int:
    """Return the bytes that one rank keeps in `layer` for a block of `tokens`; for a state, its size."""
    if isinstance(layer, Attention):
        return tokens * max(1, layer.heads // tp) * (layer.key + layer.value) * kv_item
    if isinstance(layer, Latent):
        vector = layer.fp8 if layer.fp8 and kv_item == 1 else layer.width * kv_item
        return tokens * (vector + layer.indexer)
    groups = layer.groups if layer.groups % tp == 0 else tp
    channels = (layer.channels + groups * layer.group_channels) // tp
    return layer.rows * channels * model.item + layer.recurrent // tp * model.state_item


def pages(model: Model, tp: int, kv_item: int, block_tokens: int, in_flight: int, hybrid: bool = True) -> Pages:
    """Return the layout of the cache of a rank of `tp` in blocks of `block_tokens`; states may need longer blocks.

    Without `hybrid` (vLLM's `--disable-hybrid-kv-cache-manager`), layers with a window keep all tokens, if other layers
    do.
    """
    layers = list(model.layers)
    if not hybrid and any(_is_full(each) for each in layers):
        layers = [each._replace(window=0, chunk=0) if isinstance(each, Attention) else each for each in layers]
    kept = [each for each in layers if not isinstance(each, State)]
    states = [each for each in layers if isinstance(each, State)]
    if states:
        if not kept:
            raise ConfigError(f"{model.name}: only layers with states: there is no KV")
        token = max(page(each, 1, tp, kv_item, model) for each in kept)
        largest = max(page(each, 0, tp, kv_item, model) for each in states)
        step = max(block_tokens, 128) if any(isinstance(each, Latent) for each in kept) else block_tokens
        block_tokens = step * -(-largest // (step * token))
    sizes: dict[Layer, int] = {each: page(each, block_tokens, tp, kv_item, model) for each in kept}
    common = max(sizes.values())
    if all(_is_full(each) for each in layers):
        # A single table, even if page sizes differ.
        total = sum(sizes[each] for each in layers)
        return Pages((LayerGroup(layers[0], len(layers), block_tokens, sizes[layers[0]]),), total, in_flight)
    counts = {each: layers.count(each) for each in dict.fromkeys(layers)}
    size = _group_layers(list(counts.values()))
    groups: list[LayerGroup] = []
    for layer, count in counts.items():
        tokens = block_tokens
        if not isinstance(layer, State) and common % sizes[layer] == 0:
            tokens *= common // sizes[layer]  # a smaller page holds more tokens, or is padded if it does not divide
        tables = -(-count // size)
        groups += [LayerGroup(layer, len(range(table, count, tables)), tokens, common) for table in range(tables)]
    return Pages(tuple(groups), max(group.layers for group in groups) * common, in_flight)


def _is_full(layer: Layer) -> bool:
    return isinstance(layer, Latent) or (isinstance(layer, Attention) and not (layer.window or layer.chunk))


def _group_layers(counts: Sequence[int]) -> int:
    """Return the layers per group: as many as the rarest kind has, or the most common kind if that pads little."""
    least, most = min(counts), max(counts)
    return most if most < 1.5 * least else least


def _blocks(group: LayerGroup, tokens: int, in_flight: int) -> int:
    if isinstance(group.spec, State):
        return STATE_BLOCKS_MAMBA2 if group.spec.groups else STATE_BLOCKS
    if isinstance(group.spec, Attention) and group.spec.window:
        held = min(group.spec.window - 1 + in_flight, tokens)
        return -(-held // group.block_tokens) + 1  # a window need not start at a block boundary
    if isinstance(group.spec, Attention) and group.spec.chunk:
        tokens = min(group.spec.chunk + in_flight, tokens)
    return -(-tokens // group.block_tokens)

"""What one rank of an engine keeps: pages, the groups that share a block table, and what a request takes. Pure.

This is vLLM's arithmetic (0.32, `v1/core/kv_cache_utils.py`), over a config.json: a page is what one layer keeps of one
block; all pages are made equal, and so all groups of layers; a request takes blocks of each group out of one pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcache_proto.errors import ConfigError
from kvcache_server.capacity.models import Attention, Latent, Layer, Model, State

# Of one sequence, with prefix caching: the running state and the one at the last boundary; Mamba 2, which alone has
# groups, writes that of a prompt's end, too.
STATE_BLOCKS, STATE_BLOCKS_MAMBA2 = 2, 3


class Group(NamedTuple):
    """Layers that share a block table. `spec` is the layer that stands for all; `page` the bytes of a block in one."""

    spec: Layer
    layers: int
    block_tokens: int
    page: int


class Pages(NamedTuple):
    """The cache of one rank.

    Attributes:
        groups: one block table each, for all of which one pool of blocks is there.
        block_bytes: what one block of the pool takes, padding included.
        in_flight: tokens that may be scheduled and not yet settled; a window keeps as many more.
    """

    groups: tuple[Group, ...]
    block_bytes: int
    in_flight: int

    def blocks_of(self, tokens: int) -> int:
        """Return the blocks of the pool that one request of `tokens` tokens needs at most."""
        return sum(_blocks(group, tokens, self.in_flight) for group in self.groups)

    def longest(self, blocks: int, limit: int) -> int:
        """Return the most tokens, up to `limit`, that one request may have in `blocks` blocks; 0 where not one fits."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks_of(middle) <= blocks else (low, middle - 1)
        return low


def shards(model: Model, tp: int) -> int:
    """Return the shards of a block, one a rank, one for all where each has the whole. Raises ConfigError where `tp`
    does not divide the heads.

    Of KV heads fewer than ranks several ranks have a copy each. vLLM 0.32 does not tell which, and all are kept.
    """
    if tp < 1 or model.heads % tp:
        raise ConfigError(f"--tp {tp}: {model.name} has {model.heads} attention heads, which it does not divide")
    for layer in model.layers:
        if isinstance(layer, Attention) and layer.heads % tp and tp % layer.heads:
            raise ConfigError(f"--tp {tp}: {model.name} has {layer.heads} KV heads: neither divides the other")
        if isinstance(layer, State):
            _check_state(model, layer, tp)
    return 1 if all(isinstance(layer, Latent) for layer in model.layers) else tp


def _check_state(model: Model, layer: State, tp: int) -> None:
    if layer.channels % tp or layer.recurrent % tp or (layer.groups % tp and layer.groups != 1):
        raise ConfigError(f"--tp {tp}: the states of {model.name} cannot be split so")


def page(layer: Layer, tokens: int, tp: int, kv_item: int, model: Model) -> int:
    """Return the bytes that one rank keeps in `layer` of a block of `tokens`; of a state, those of a whole one."""
    if isinstance(layer, Attention):
        return tokens * max(1, layer.heads // tp) * (layer.key + layer.value) * kv_item
    if isinstance(layer, Latent):
        return tokens * layer.width * kv_item
    groups = layer.groups if layer.groups % tp == 0 else tp
    channels = (layer.channels + groups * layer.group_channels) // tp
    return layer.rows * channels * model.item + layer.recurrent // tp * model.state_item


def pages(model: Model, tp: int, kv_item: int, block_tokens: int, in_flight: int, hybrid: bool = True) -> Pages:
    """Return how a rank of `tp` keeps the model's cache in blocks of `block_tokens`, which states may need longer.

    Without `hybrid` (vLLM's `--disable-hybrid-kv-cache-manager`) layers with a window keep all tokens beside full ones.
    """
    layers = list(model.layers)
    if not hybrid and any(_is_full(each) for each in layers):
        layers = [each._replace(window=0, chunk=0) if isinstance(each, Attention) else each for each in layers]
    kept = [each for each in layers if not isinstance(each, State)]
    states = [each for each in layers if isinstance(each, State)]
    if states:
        if not kept:
            raise ConfigError(f"{model.name}: states alone: there is no KV to size")
        token = max(page(each, 1, tp, kv_item, model) for each in kept)
        largest = max(page(each, 0, tp, kv_item, model) for each in states)
        step = max(block_tokens, 128) if any(isinstance(each, Latent) for each in kept) else block_tokens
        block_tokens = step * -(-largest // (step * token))
    sizes: dict[Layer, int] = {each: page(each, block_tokens, tp, kv_item, model) for each in kept}
    common = max(sizes.values())
    if all(_is_full(each) for each in layers):
        # One table, whatever the sizes of the pages.
        total = sum(sizes[each] for each in layers)
        return Pages((Group(layers[0], len(layers), block_tokens, sizes[layers[0]]),), total, in_flight)
    counts = {each: layers.count(each) for each in dict.fromkeys(layers)}
    size = _group_layers(list(counts.values()))
    groups: list[Group] = []
    for layer, count in counts.items():
        tokens = block_tokens
        if not isinstance(layer, State) and common % sizes[layer] == 0:
            tokens *= common // sizes[layer]  # a smaller page holds more tokens; one that does not divide is padded
        tables = -(-count // size)
        groups += [Group(layer, len(range(table, count, tables)), tokens, common) for table in range(tables)]
    return Pages(tuple(groups), max(group.layers for group in groups) * common, in_flight)


def _is_full(layer: Layer) -> bool:
    return isinstance(layer, Latent) or (isinstance(layer, Attention) and not (layer.window or layer.chunk))


def _group_layers(counts: Sequence[int]) -> int:
    """Return the layers of a group: as many as the rarest kind has, unless that pads the others but little."""
    least, most = min(counts), max(counts)
    return most if most < 1.5 * least else least


def _blocks(group: Group, tokens: int, in_flight: int) -> int:
    if isinstance(group.spec, State):
        return STATE_BLOCKS_MAMBA2 if group.spec.groups else STATE_BLOCKS
    if isinstance(group.spec, Attention) and group.spec.window:
        held = min(group.spec.window - 1 + in_flight, tokens)
        return -(-held // group.block_tokens) + 1  # a window need not begin with a block
    if isinstance(group.spec, Attention) and group.spec.chunk:
        tokens = min(group.spec.chunk + in_flight, tokens)
    return -(-tokens // group.block_tokens)

"""An estimate of the device memory for a model's weights, from its config.json. Pure.

Only the large matrices count: embeddings, attention, feed-forward, experts, state layers. Norms, biases, and the vision
and audio towers of multimodal models are left out. vLLM logs the true figure ("Model loading took"), for `--weights`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvcache_tools.plan.models import Attention, Latent, Model, State, layer_count, number

_BITS = {"fp8": 8.0, "fbgemm_fp8": 8.0, "modelopt": 8.0, "modelopt_fp4": 4.5, "awq": 4.25, "gptq": 4.25, "mxfp4": 4.25}
_UNGATED = {"gpt2", "gpt_neox", "gptj", "opt", "falcon", "phi", "mpt", "bloom", "starcoder2", "nemotron", "nemotron_h"}


def weight_bytes(model: Model, config: Mapping[str, Any], tp: int) -> int:
    """Return the bytes of the weights on one of `tp` ranks, quantised as the checkpoint is."""
    dense, experts = _item(model, config)
    text = model.text
    hidden = number(text, "hidden_size", "n_embd", "d_model", name=model.name)
    gemma = str(text.get("model_type", "")).startswith("gemma")
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", gemma))
    embedded = number(text, "vocab_size", name=model.name) * hidden * (1 if tied else 2)
    total = embedded * model.item / tp
    for layer in model.layers:
        total += _mixer(model, layer, hidden, tp) * dense
    for whole, routed in _feed_forward(text, hidden, model.name):
        total += (whole * dense + routed * experts) / tp
    return round(total)


def _item(model: Model, config: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bytes of a dense weight and of a weight of an expert."""
    quantization = config.get("quantization_config") or model.text.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return model.item, model.item
    method = str(quantization.get("quant_method", ""))
    bits = quantization.get("bits")
    if method == "bitsandbytes":
        bits = 4.25 if quantization.get("load_in_4bit") else 8
    elif method == "compressed-tensors":
        bits = min(_group_bits(quantization.get("config_groups")), default=None)
    if not isinstance(bits, (int, float)) or not 1 <= bits <= 32:
        bits = _BITS.get(method, 8.0 * model.item)
    size = bits / 8
    return (model.item, size) if method == "mxfp4" else (size, size)


def _group_bits(groups: object) -> Iterator[int]:
    """Yield the bits of each kind of weight in llm-compressor's format."""
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and isinstance(weights.get("num_bits"), int):
            yield weights["num_bits"]


def _mixer(model: Model, layer: Attention | Latent | State, hidden: int, tp: int) -> float:
    """Return the number of weights of an attention or state layer on one rank."""
    text, heads = model.text, model.heads
    if isinstance(layer, Latent):
        rope, nope, value = (number(text, key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        rank, low = number(text, "kv_lora_rank"), number(text, "q_lora_rank", default=0)
        query = low * heads * (nope + rope) if low else hidden * heads * (nope + rope)
        split = query + rank * heads * (nope + value) + heads * value * hidden
        whole = hidden * (low + rank + rope)
        if layer.indexer:
            indexers, size = number(text, "index_n_heads"), number(text, "index_head_dim")
            whole += low * indexers * size + hidden * (indexers + size)
        return split / tp + whole
    if isinstance(layer, Attention):
        gate = 2 if "linear_num_value_heads" in text else 1
        kept = max(1, layer.heads // tp) * (layer.key + layer.value)
        return hidden * (heads * (gate * layer.key + layer.value) / tp + kept)
    if "linear_num_value_heads" in text:
        values = number(text, "linear_num_value_heads") * number(text, "linear_value_head_dim")
        return hidden * (layer.channels + 2 * values + 2 * number(text, "linear_num_value_heads")) / tp
    if layer.groups:
        return hidden * (3 * layer.channels + layer.groups * layer.group_channels) / tp
    size = layer.recurrent // layer.channels
    rank = number(text, "mamba_dt_rank", default=hidden // 16)
    return layer.channels * (3 * hidden + 2 * (rank + size)) / tp


def _feed_forward(text: Mapping[str, Any], hidden: int, name: str) -> Iterator[tuple[int, int]]:
    """Yield (dense weights, weights of experts) of each feed-forward layer."""
    parts = 2 if str(text.get("model_type")) in _UNGATED else 3
    inner = number(text, "intermediate_size", "n_inner", "ffn_hidden_size", name=name, default=4 * hidden)
    if pattern := text.get("hybrid_override_pattern"):
        for letter in str(pattern):
            if letter == "-":
                yield parts * hidden * inner, 0
        return
    count = layer_count(text, name)
    keys = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
    experts = number(text, *keys, name=name, default=0)
    routed = number(text, "moe_intermediate_size", name=name, default=inner)
    shared = number(text, "shared_expert_intermediate_size", "shared_intermediate_size", name=name, default=0)
    shared = shared or number(text, "n_shared_experts", name=name, default=0) * routed
    for layer in range(count):
        if experts > 1 and _has_experts(text, layer):
            yield hidden * (3 * shared + experts), experts * 3 * hidden * routed
        else:
            yield parts * hidden * (inner if not shared or experts > 1 else shared), 0


def _has_experts(text: Mapping[str, Any], layer: int) -> bool:
    if period := number(text, "expert_layer_period", default=0):
        return layer % period == number(text, "expert_layer_offset", default=0)
    dense = text.get("mlp_only_layers")
    if layer < number(text, "first_k_dense_replace", default=0) or (isinstance(dense, list) and layer in dense):
        return False
    if step := number(text, "decoder_sparse_step", default=0):
        return (layer + 1) % step == 0
    return layer % (number(text, "moe_layer_freq", default=1) or 1) == 0

"""Reads from a model's `config.json` the data that each layer keeps per token. Pure.

The keys are Hugging Face's. A missing key has the default of transformers, if that is the same for all models; if it
depends on the model, the file is refused, with instructions to get a complete one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvcache_proto.errors import ConfigError

DTYPES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}
# For these, vLLM keeps one latent vector per token for all heads; for other models with `kv_lora_rank`, it unfolds the
# vector.
LATENT = {
    *("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "pangu_ultra_moe", "longcat_flash", "axk1"),
}
SPARSE = {"deepseek_v32", "glm_moe_dsa"}  # the same, with sparse attention: their indexers keep a vector, too
SCALED = 128  # values in fp8 that share a scale of four bytes, in vLLM's `Indexer` and in its `fp8_ds_mla` caches
MOST = 1 << 32  # the largest number accepted
MOST_LAYERS = 4096
# Keys of features that change the size of the cache in ways that are not supported here.
UNKNOWN = {
    "compress_ratios": "compressed KV",
    "num_kv_shared_layers": "layers that share their KV",
    "global_head_dim": "heads of several sizes",
    "block_configs": "layers of several shapes",
    "cross_attention_layers": "layers that attend to an encoder",
    "kda_num_heads": "Kimi's linear attention",
    "linear_attn_config": "Kimi's linear attention",
}
COMPLETE = (
    "a complete file: python -c \"from transformers import AutoConfig; AutoConfig.from_pretrained('MODEL')"
    ".to_json_file('config.json', use_diff=False)\""
)


class Attention(NamedTuple):
    """A layer that keeps keys and values of all tokens, of the last `window`, or of the current chunk of `chunk`."""

    heads: int
    key: int
    value: int
    window: int = 0
    chunk: int = 0


class Latent(NamedTuple):
    """A layer that keeps one vector per token for all heads (MLA); every rank has all of it.

    With sparse attention, `fp8` is the size of the vector in an `fp8_ds_mla` cache, where its rotary part stays in 16
    bits, and `indexer` that of its indexer's vector, 0 without one, both in bytes.
    """

    width: int
    fp8: int = 0
    indexer: int = 0


class State(NamedTuple):
    """A layer that keeps a state per sequence: `rows` of a convolution over `channels`, and `recurrent` values.

    `groups` of `group_channels` are convolved, too; every rank has at least one complete group.
    """

    rows: int
    channels: int
    recurrent: int
    groups: int = 0
    group_channels: int = 0


Layer = Attention | Latent | State


class Model(NamedTuple):
    """The facts about a model that sizing needs.

    Attributes:
        layers: the layers that keep data, in order.
        heads: attention heads; the tensor-parallel size divides them.
        dtype: of weights and activations, as vLLM chooses it; `item` is its size in bytes.
        kv_dtype: the meaning of `auto` for the cache.
        state_item: bytes of a recurrent value.
        longest: the model's maximum number of positions, 0 if it does not state it.
        text: the part of the file that describes the language model.
    """

    name: str
    layers: tuple[Layer, ...]
    heads: int
    dtype: str
    kv_dtype: str
    state_item: int
    longest: int
    text: Mapping[str, Any]

    @property
    def item(self) -> int:
        return DTYPES[self.dtype]


def read_model(config: object, name: str = "model") -> Model:
    """Return the model that `config`, a parsed config.json, describes. Raises ConfigError, which names the field."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"{name}: a JSON object expected, as in a Hugging Face config.json")
    text = next((config[key] for key in ("text_config", "llm_config", "language_config") if key in config), config)
    if not isinstance(text, Mapping) or not (config.get("architectures") or config.get("model_type")):
        raise ConfigError(f"{name} is not a Hugging Face config.json: neither `model_type` nor `architectures`")
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"{name}: encoder-decoder models are not supported")
    for key, why in UNKNOWN.items():
        if text.get(key):
            raise ConfigError(f"{name}: {key} ({why}) is not supported")
    kind = str(text.get("model_type", config.get("model_type", "")))
    dtype = _dtype(text, config, name)
    layers = _layers(text, kind, name)
    if not layers:
        raise ConfigError(f"{name}: no layer keeps KV")
    state = text.get("mamba_ssm_cache_dtype" if kind == "nemotron_h" else "mamba_ssm_dtype")
    state = state or ("float32" if kind == "nemotron_h" else dtype)
    if str(state) not in (*DTYPES, "auto"):
        raise ConfigError(f"{name}: dtype of states {state!r}: one of {', '.join(DTYPES)}")
    return Model(
        name,
        tuple(layers),
        number(text, "num_attention_heads", "n_head", "num_heads", name=name),
        dtype,
        _kv_dtype(config, dtype),
        DTYPES.get(str(state), DTYPES[dtype]),
        number(
            *(text, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
            name=name,
            default=0,
            least=1,
        ),
        text,
    )


def number(
    text: Mapping[str, Any], *keys: str, name: str = "config", default: int | None = None, least: int | None = None
) -> int:
    """Return the value of the first of `keys` that is present, else `default`.

    Raises ConfigError if there is neither, or if the value is not an integer of at least `least`, which is by default
    1, or 0 if there is a default.
    """
    least = (1 if default is None else 0) if least is None else least
    for key in keys:
        value = text.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise ConfigError(f"{name}: {key} {value!r}: an integer from {least} to {MOST} expected")
        return int(value)
    if default is None:
        raise ConfigError(f"{name}: no {keys[0]}; transformers may have a default for it. {COMPLETE}")
    return default


def layer_count(text: Mapping[str, Any], name: str) -> int:
    """Return the number of layers. Raises ConfigError."""
    count = number(text, "num_hidden_layers", "n_layer", "num_layers", "n_layers", name=name)
    if count > MOST_LAYERS:
        raise ConfigError(f"{name}: {count:,} layers: at most {MOST_LAYERS:,}")
    return count


def _dtype(text: Mapping[str, Any], config: Mapping[str, Any], name: str) -> str:
    """Return the choice of `--dtype auto`: float32 weights run in half precision."""
    found = [(key, each[key]) for each in (text, config) for key in ("dtype", "torch_dtype") if each.get(key)]
    if not found:
        return "bfloat16"
    key, given = found[0]
    if str(given).removeprefix("torch.") not in (*DTYPES, "auto"):
        raise ConfigError(f"{name}: {key} {given!r}: one of {', '.join(DTYPES)}")
    return "float16" if str(given).removeprefix("torch.") in ("float16", "half") else "bfloat16"


def _kv_dtype(config: Mapping[str, Any], dtype: str) -> str:
    """Return the meaning of `auto`: the model's dtype, except for checkpoints that specify a quantised cache."""
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping) and str(quantization.get("quant_method", "")).startswith("modelopt"):
        scheme = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
        eight = isinstance(scheme, Mapping) and scheme.get("num_bits") == 8
        if eight or str(scheme).lower().startswith("fp8"):
            return "fp8"
    return dtype


def _layers(text: Mapping[str, Any], kind: str, name: str) -> list[Layer]:
    if kind in SPARSE:
        return _sparse(text, name)
    if text.get("index_topk"):
        raise ConfigError(f"{name}: index_topk (sparse attention of a {kind}) is not supported")
    kinds = _kinds(text, kind, name)
    found: list[Layer] = []
    for each in kinds:
        if each == "state":
            found.append(_state(text, name))
        elif each != "nothing":
            found.append(_attention(text, kind, each, name))
    return found


def _kinds(text: Mapping[str, Any], kind: str, name: str) -> Sequence[str]:
    """Return "full", "sliding", "chunked", "state" or "nothing" for each layer."""
    if pattern := text.get("hybrid_override_pattern"):
        return [{"M": "state", "*": "full"}.get(letter, "nothing") for letter in str(pattern)]
    count = layer_count(text, name)
    given = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(given, list):
        if len(given) != count:
            raise ConfigError(f"{name}: {len(given)} layer_types for {count} layers")
        return [_named(str(each), name) for each in given]
    if period := number(text, "attn_layer_period", name=name, default=0):
        offset = number(text, "attn_layer_offset", name=name, default=0)
        return ["full" if layer % period == offset else "state" for layer in range(count)]
    if "linear_num_value_heads" in text:
        every = number(text, "full_attention_interval", name=name, default=4) or 1
        return ["state" if (layer + 1) % every else "full" for layer in range(count)]
    if any(key in text for key in ("mamba_d_state", "state_size", "ssm_state_size", "conv_L_cache")):
        raise ConfigError(f"{name}: a {kind} with states, without a key that says in which layers, is not supported")
    if text.get("attention_chunk_size"):  # Llama 4: every fourth layer has full attention
        return ["chunked" if (layer + 1) % 4 else "full" for layer in range(count)]
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return ["full"] * count
    every = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}.get(kind, 0)
    every = number(text, "sliding_window_pattern", "_sliding_window_pattern", name=name, default=every)
    if every:
        return ["sliding" if (layer + 1) % every else "full" for layer in range(count)]
    if "use_sliding_window" in text:
        first = number(text, "max_window_layers", name=name, default=0)
        return ["sliding" if layer >= first else "full" for layer in range(count)]
    return ["sliding"] * count


def _named(given: str, name: str) -> str:
    kinds = {
        "full_attention": "full",
        "attention": "full",
        "sliding_attention": "sliding",
        "chunked_attention": "chunked",
        "linear_attention": "state",
        "mamba": "state",
    }
    if given not in kinds:
        raise ConfigError(f"{name}: layers of type {given!r} are not supported")
    return kinds[given]


def _attention(text: Mapping[str, Any], kind: str, each: str, name: str) -> Layer:
    if kind in LATENT and text.get("kv_lora_rank"):
        return Latent(number(text, "kv_lora_rank", name=name) + number(text, "qk_rope_head_dim", name=name))
    heads = number(text, "num_attention_heads", "n_head", "num_heads", name=name)
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        kept = 1
    else:
        keys = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
        kept = number(text, *keys, name=name, default=heads, least=1)
        if heads % kept:
            key = next(each for each in keys if text.get(each) is not None)
            raise ConfigError(f"{name}: {key} {kept}: {heads} attention heads are no multiple of it")
    size = number(text, "head_dim", name=name, default=0, least=1)
    size = size or number(text, "hidden_size", "n_embd", "d_model", name=name) // heads
    if not size:
        raise ConfigError(f"{name}: hidden_size {text.get('hidden_size')}: less than {heads} heads need")
    value = size
    if text.get("qk_rope_head_dim") and text.get("v_head_dim"):  # MLA that vLLM unfolds: values padded to keys
        size = value = number(text, "qk_nope_head_dim", name=name) + number(text, "qk_rope_head_dim", name=name)
    window = number(text, "sliding_window", name=name) if each == "sliding" else 0
    chunk = number(text, "attention_chunk_size", name=name) if each == "chunked" else 0
    return Attention(kept, size, value, window, chunk)


def _sparse(text: Mapping[str, Any], name: str) -> list[Layer]:
    """Return the layers of sparse MLA. In some models, those without an indexer use what one before them has chosen."""
    rank, rope = number(text, "kv_lora_rank", name=name), number(text, "qk_rope_head_dim", name=name)
    size = number(text, "index_head_dim", name=name)
    every = number(text, "index_topk_freq", name=name, default=1, least=1)
    first = number(text, "index_skip_topk_offset", name=name, default=2)
    pattern = text.get("index_topk_pattern")
    if not isinstance(pattern, str | list | None):
        raise ConfigError(f"{name}: index_topk_pattern {pattern!r}: a letter per layer expected")

    def indexes(layer: int) -> bool:
        if pattern is None:
            return max(layer - first + 1, 0) % every == 0
        return layer >= len(pattern) or pattern[layer] != "S"

    full = Latent(rank + rope, rank + 4 * (rank // SCALED) + 2 * rope, size + 4 * (size // SCALED))
    return [full if indexes(layer) else full._replace(indexer=0) for layer in range(layer_count(text, name))]


def _state(text: Mapping[str, Any], name: str) -> State:
    def need(*keys: str) -> int:
        return number(text, *keys, name=name)

    if "linear_num_value_heads" in text:  # a gated delta net
        keys = need("linear_num_key_heads") * need("linear_key_head_dim")
        values = need("linear_num_value_heads") * need("linear_value_head_dim")
        rows = need("linear_conv_kernel_dim") - 1
        return State(rows, 2 * keys + values, values * need("linear_key_head_dim"))
    rows, size = need("mamba_d_conv", "conv_kernel") - 1, need("mamba_d_state", "ssm_state_size")
    if "mamba_n_heads" in text or "mamba_num_heads" in text:  # Mamba 2
        channels = need("mamba_n_heads", "mamba_num_heads") * need("mamba_d_head", "mamba_head_dim")
        return State(rows, channels, channels * size, need("mamba_n_groups", "n_groups"), 2 * size)
    channels = need("mamba_expand") * need("hidden_size")
    return State(rows, channels, channels * size)

"""Images, audio and video in prompts: which of them vLLM's block hashes name by their content. Pure.

A hash has the identifiers of the items in its block. vLLM's front end makes them: a digest of an item's content and of
the request's processor options, or a text that a user has chosen (`uuid`), which is replaced with a digest if there are
processor options. Options of the engine are not in the identifier, but in the namespace: see `processor_digest`.

vLLM's own prefix cache trusts more: its blocks do not outlive the engine, and no other engine reads them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

_PROCESSOR_FILES = (
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("tekken.json", "params.json"),  # Mistral's
)
# Of vLLM's MultiModalConfig; all other options, also those of later versions, may change an embedding.
_NOT_EMBEDDING = {
    *("limit_per_prompt", "language_model_only", "enable_mm_embeds", "interleave_mm_strings", "skip_mm_profiling"),
    *("mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb", "mm_hasher_algorithm"),
    *("mm_encoder_only", "mm_encoder_tp_mode", "mm_tensor_ipc", "mm_ipc_gpu_memory_gb", "allow_missing_mm_embeddings"),
}
_BY_NUMBER = {"DeepseekVLV2ForCausalLM", "H2OVLChatModel", "UnlimitedOCRForCausalLM"}
_DIGEST = re.compile(r"(.*:)?([0-9a-f]{64}|[0-9a-f]{128})")  # after the name of an adapter of the encoder


def unnamed_items(vllm_config: Any) -> str:
    """Return the reason that an engine's block hashes do not name its items by their content, "" if they do."""
    model, options = vllm_config.model_config, getattr(vllm_config.model_config, "multimodal_config", None)
    if options is None:
        return ""
    if not (options.mm_processor_cache_gb or vllm_config.cache_config.enable_prefix_caching):
        return "without its prefix cache and its processor's cache, vLLM numbers them"
    if getattr(model, "is_mm_prefix_lm", False):
        # A step may end in the middle of an item if one before it, or a hit, did: then its first part lacks the rest.
        return "the model's attention reads an image in both directions, and vLLM may compute it in parts"
    if found := _BY_NUMBER & {*(getattr(model, "architectures", None) or ())}:
        return f"what {found.pop()} makes of an image depends on the number of images"
    return ""


def are_named(items: Sequence[Any], texts: bool) -> bool:
    """Return True if block hashes name these items of a request. `texts`: users choose the same text only for the same
    item.

    In a video with sound, both have the same placeholders, and hashes have only the video.
    """
    ends = (each.mm_position.offset + each.mm_position.length for each in items)
    if any(item.mm_position.offset < end for end, (_, item) in zip(ends, pairwise(items), strict=False)):
        return False
    return texts or all(_DIGEST.fullmatch(each.identifier) for each in items)


def processor_digest(vllm_config: Any, transformers: str) -> str:
    """Return a digest of how this engine turns items into embeddings; "" if its model takes none.

    `transformers` is the version of the package that has the processors.
    """
    options = getattr(vllm_config.model_config, "multimodal_config", None)
    if options is None:
        return ""
    fields = {name: value for name, value in vars(options).items() if name not in _NOT_EMBEDDING}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode())
    digest.update(f"\0transformers {transformers}".encode())
    folder = Path(vllm_config.model_config.model)  # of a model from the hub, the commit is in the checkpoint's id
    for file in sorted(folder / name for name in _PROCESSOR_FILES):
        if file.is_file():
            digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:32]

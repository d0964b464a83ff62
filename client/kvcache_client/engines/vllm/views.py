"""vLLM's requests and steps as plain values: the only place that reads them for the scheduler's side. Pure.

A request's KV depends on more than its tokens. vLLM's hashes name it, but not always by its content:

- A cache salt is content.
- A LoRA adapter is named, from 0.32 on also with its path. A digest of its files is mixed in: see `lora`.
- Embeddings have a digest of the bytes of each block, without their dtype, which is mixed in. An engine that was given
  two dtypes of one size (float16, bfloat16) may find blocks of either under one hash in its own prefix cache, and
  excludes all embeddings of that size from then on. If there are tokens among the embeddings, the hashes do not have
  their positions. Such requests are not cached.
- Images, audio and video have identifiers: see `multimodal`.
- A prompt that grows while its request runs (streaming input) replaces the last sampled token. Before 0.32, the hash of
  a block that this token has filled stays. Such requests are not cached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from kvcache_client.engines.vllm.kv_hints import read_kv_hints
from kvcache_client.engines.vllm.multimodal import are_named
from kvcache_client.scheduler.views import (
    IDLE,
    BadHint,
    ContentHashes,
    Hint,
    NewTable,
    RequestView,
    StepView,
    parse_hint,
)
from kvcache_proto.errors import BadArgument

HINT = "kvcache"  # the key of our hints in a request's `kv_transfer_params`


class Contents:
    def __init__(self, digest: Callable[[Any], tuple[bytes, str]] | None = None, multimodal: str = "on") -> None:
        """`digest` is that of `lora.Adapters`; without it, requests with LoRA are not cached.

        `multimodal` is the setting.
        """
        self._digest, self._multimodal = digest, multimodal
        self._dtypes: dict[int, set[str]] = {}  # of embeddings, by size
        # Kept as long as the scheduler's side knows the request: no hash is mixed twice.
        self._mixed: WeakValueDictionary[str, ContentHashes] = WeakValueDictionary()

    def of(self, request: Any) -> tuple[bytes, str]:
        """Return the bytes to mix into the hashes of a request, or b"" and the reason that its blocks are not
        cached."""
        items = getattr(request, "mm_features", None)
        if items and not (self._multimodal != "off" and are_named(items, self._multimodal == "uuids")):
            return b"", "multimodal"
        if getattr(request, "resumable", False):
            return b"", "streaming"
        content, why = b"", ""
        if (lora := getattr(request, "lora_request", None)) is not None:
            content, why = self._digest(lora) if self._digest else (b"", "lora")
        if (embeddings := getattr(request, "prompt_embeds", None)) is not None:
            if getattr(request, "prompt_is_token_ids", None) is not None:
                return b"", "prompt_embeds"
            dtype = str(embeddings.dtype)
            self._dtypes.setdefault(embeddings.itemsize, set()).add(dtype)
            if len(self._dtypes[embeddings.itemsize]) > 1:
                return b"", "prompt_embeds"
            content = b"" if why else hashlib.blake2s(content + dtype.encode()).digest()
        return content, why

    def hashes(self, request: Any, content: bytes) -> Sequence[bytes]:
        """Return the hashes of a request's blocks with `content` mixed in."""
        plain: list[bytes] = request.block_hashes
        if not content:
            return plain
        known = self._mixed.get(request.request_id)
        if known is None or known.plain is not plain or known.content != content:
            known = self._mixed[request.request_id] = ContentHashes(plain, content)
        return known


_WITHOUT_ADAPTERS = Contents()


def request_view(request: Any, contents: Contents = _WITHOUT_ADAPTERS) -> RequestView:
    content, uncacheable = contents.of(request)
    lora = getattr(request, "lora_request", None)
    hint, bad_hints = _hint(request)
    return RequestView(
        request.request_id,
        request.num_tokens,
        request.num_prompt_tokens,
        contents.hashes(request, content),
        request.all_token_ids,
        bool(getattr(request, "cache_salt", None)),
        uncacheable,
        bool(getattr(request, "skip_reading_prefix_cache", False)),
        hint,
        bad_hints,
        key=request,
        adapter=lora.lora_int_id if lora is not None and not uncacheable else None,
        set_aside=bool(getattr(request, "use_structured_output", False)),
    )


def _hint(request: Any) -> tuple[Hint | None, Sequence[BadHint]]:
    """Return the hint of a request, and what is ignored. Our own, which clients choose, replaces vLLM's `kv_hints`."""
    params = getattr(request, "kv_transfer_params", None)
    if not isinstance(params, dict) or HINT not in params:
        envelope = getattr(request, "kv_hints", None)
        return read_kv_hints(envelope) if envelope is not None else (None, ())
    try:
        return parse_hint(params[HINT]), ()
    except BadArgument as error:
        return None, [BadHint("hints_invalid", f"kv_transfer_params, {HINT}: {error}")]


def step_view(output: Any) -> StepView:
    """Return the step in a SchedulerOutput. Called in every step: it copies nothing of running requests."""
    tokens, preempted = output.total_num_scheduled_tokens, output.preempted_req_ids or ()
    if not tokens:
        return StepView(preempted=preempted) if preempted else IDLE
    cached, fresh = output.scheduled_cached_reqs, output.scheduled_new_reqs
    running, computed, added = cached.req_ids, cached.num_computed_tokens, cached.new_block_ids
    started = [NewTable(new.req_id, new.block_ids, new.num_computed_tokens) for new in fresh] if fresh else []
    if resumed := cached.resumed_req_ids:  # preempted, and scheduled again: `added` is the whole table
        rows = [(row, row[0] in resumed and row[2]) for row in zip(running, computed, added, strict=True)]
        started += [NewTable(request, blocks, before) for (request, before, blocks), whole in rows if whole]
        running, computed, added = ([row[column] for row, whole in rows if not whole] for column in range(3))
    return StepView(tokens, output.num_scheduled_tokens, started, running, computed, added, preempted)

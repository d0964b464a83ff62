"""Pure: what a request's KV depends on besides its tokens. vLLM's hashes name it, but not always by its content.

- A cache salt is content.
- A LoRA adapter is named, from 0.32 on also with its path. A digest of its files is mixed in: see `adapters`.
- Embeddings have a digest of the bytes of each block, without their dtype, which is mixed in. An engine that was given
  two dtypes of one size (float16, bfloat16) may find blocks of either under one hash in its own prefix cache, and
  excludes all embeddings of that size from then on. If there are tokens among the embeddings, the hashes do not have
  their positions. Such requests are not cached.
- Images, audio and video have identifiers: a digest of the content by vLLM's front end, or any text that a user has
  chosen. The scheduler cannot distinguish them: if the processor has options, a digest of these and of such a text
  replaces the text. Such requests are not cached.
- A prompt that grows while its request runs (streaming input) replaces the last sampled token. Before 0.32, the hash of
  a block that this token has filled stays. Such requests are not cached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

from kvcache_client.scheduler.views import ContentHashes


class Digests(Protocol):
    """See `adapters.Adapters`."""

    def digest(self, lora: Any) -> tuple[bytes, str]: ...


class Contents:
    """The contents of one engine's requests."""

    def __init__(self, adapters: Digests | None = None) -> None:
        """Without `adapters`, requests with LoRA are not cached."""
        self._adapters = adapters
        self._dtypes: dict[int, set[str]] = {}  # of embeddings, by size
        # Kept as long as the scheduler's side knows the request: no hash is mixed twice.
        self._mixed: WeakValueDictionary[str, ContentHashes] = WeakValueDictionary()

    def of(self, request: Any) -> tuple[bytes, str]:
        """Return the bytes to mix into the hashes of a request, or b"" and the reason that its blocks are not
        cached."""
        if getattr(request, "mm_features", None):
            return b"", "multimodal"
        if getattr(request, "resumable", False):
            return b"", "streaming"
        content, why = b"", ""
        if (lora := getattr(request, "lora_request", None)) is not None:
            content, why = self._adapters.digest(lora) if self._adapters else (b"", "lora")
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

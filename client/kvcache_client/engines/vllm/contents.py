"""Pure: what a request's KV depends on beside its tokens. vLLM's hashes name it, which is not always by its content.

- A cache salt is content.
- Of a LoRA adapter they have the name, from 0.32 on also the path. A digest of its files is mixed in: see `adapters`.
- Of embeddings they have a digest of the bytes of each block, without their dtype, which is mixed in. An engine that
  was given two dtypes of one size (float16, bfloat16) may find blocks of either under one hash in its own prefix cache,
  and leaves all of that size alone from then on. Where there are tokens among the embeddings, the hashes do not say at
  which positions. Such requests are left alone.
- Images, audio and video have identifiers: a digest of the content by vLLM's front end, or whatever text a user has
  chosen. The scheduler is not told which: where the processor has options, a digest of these and of such a text takes
  the text's place. Such requests are left alone.
- A prompt that grows while its request runs (streaming input) takes the place of the last token that was sampled.
  Before 0.32, the hash of a block that this token has filled stays. Such requests are left alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

from kvcache_client.scheduler.content import ContentHashes


class Digests(Protocol):
    """See `adapters.Adapters`."""

    def digest(self, lora: Any) -> tuple[bytes, str]: ...


class Contents:
    """Of one engine."""

    def __init__(self, adapters: Digests | None = None) -> None:
        """Without `adapters`, requests with LoRA are left alone."""
        self._adapters = adapters
        self._dtypes: dict[int, set[str]] = {}  # of embeddings, by size
        # As long as the scheduler's side knows the request: what was mixed once is not mixed again.
        self._mixed: WeakValueDictionary[str, ContentHashes] = WeakValueDictionary()

    def of(self, request: Any) -> tuple[bytes, str]:
        """Return what is to be mixed into the hashes of a request, or b"" and why its blocks are left alone."""
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

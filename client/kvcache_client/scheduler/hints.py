"""Acts on requests' hints that their own blocks are to stay, or are not needed again. Pure.

A request that is used once is not saved. But other requests may have the same beginning: a block that a second such
request asks for is saved anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache_client.scheduler.cache import CacheNamespace, Counts
from kvcache_client.scheduler.groups import FullAttention
from kvcache_client.scheduler.requests import RequestState
from kvcache_client.scheduler.views import Hint, RequestView, Rest, Retain
from kvcache_proto.types import MAX_HASHES

SEEN = 1 << 14  # cached blocks of dropped requests that are remembered
_REASONS = ("quota", "count")  # reasons of the daemon not to retain blocks


class Hints:
    """The hints in one engine. It acts on each request's hint once."""

    def __init__(self, group: FullAttention, counters: Counts) -> None:
        self._group, self._counters = group, counters
        self._seen: dict[bytes, None] = {}  # blocks of dropped requests, in the order in which the requests ended

    def begin(self, state: RequestState) -> None:
        request = state.request
        for counter, error in request.bad_hints:
            self._counters.warn(counter, f"the hint of a request is ignored: {error}")
        hint = request.hint
        if hint is None or (rest := hint.unwanted) is None:
            return
        state.progress.limit = self._kept(request, hint, rest)
        if not hint.done:
            keys = self._group.prompt_keys(request)
            shared = next((at for at, key in enumerate(keys) if key not in self._seen), len(keys))
            state.progress.limit = max(state.progress.limit, shared)

    def retain(self, state: RequestState, namespace: CacheNamespace) -> None:
        """Ask the daemon to keep the blocks that the request wants kept; they may be saved later."""
        request, hint = state.request, state.request.hint
        if hint is None or not hint.retained or state.retained:
            return
        state.retained = True
        if request.uncacheable or state.barred:
            self._counters.add("hints_uncacheable")
            return
        for each in hint.retained:
            self._retain(request, each, self._group.prompt_keys(request), namespace)

    def _retain(self, request: RequestView, wanted: Retain, keys: Sequence[bytes], namespace: CacheNamespace) -> None:
        most = MAX_HASHES if wanted.tokens is None else min(wanted.tokens // self._group.slot_tokens, MAX_HASHES)
        if kept := list(keys[:most]):
            namespace.retain(kept, wanted.seconds, request=request.id, then=self._answered)

    def finished(self, state: RequestState, namespace: CacheNamespace) -> None:
        """Remember the blocks of a request that was used once; have answers retained; report the end of a conversation
        to the daemon."""
        request, hint = state.request, state.request.hint
        if hint is None or request.uncacheable or state.barred:
            return
        for each in hint.retained:
            if each.answer:
                self._retain(request, each, self._group.keys(request.hashes), namespace)
        if (rest := hint.unwanted) is None:
            return
        if not hint.done:
            # At its end: several answers to one prompt are computed at the same time.
            seen = self._seen
            for key in self._group.prompt_keys(request):
                seen.pop(key, None)
                seen[key] = None
            while len(seen) > SEEN:
                del seen[next(iter(seen))]
            return
        keys = list(self._group.keys(request.hashes))
        if len(keys) > MAX_HASHES:
            self._counters.add("hints_too_long")
        elif keys:
            namespace.drop(keys, self._kept(request, hint, rest), request=request.id)

    def _kept(self, request: RequestView, hint: Hint, rest: Rest) -> int:
        """Return the number of cached blocks at the beginning that are neither dropped nor left unsaved."""
        prompt = request.prompt_tokens
        tokens = [rest.after, *(prompt if each.tokens is None else each.tokens for each in hint.retained)]
        return max(tokens) // self._group.slot_tokens

    def _answered(self, blocks: int, refused: str) -> None:
        if refused:
            why = refused if refused in _REASONS else "other"
            self._counters.warn(
                f"retain_refused_{why}",
                f"prompts are not retained, or not all of them: {why} (see `kvcache-server status`)",
            )

"""vLLM's requests and steps as plain values: the only place that reads them for the scheduler's side. Pure."""

from __future__ import annotations

from typing import Any

from kvcache_client.engines.vllm.contents import Contents
from kvcache_client.scheduler.views import IDLE, Hint, NewTable, RequestView, StepView, parse_hint
from kvcache_proto.errors import BadArgument

HINT = "kvcache"  # the key of our hints in a request's `kv_transfer_params`
_WITHOUT_ADAPTERS = Contents()


def request_view(request: Any, contents: Contents = _WITHOUT_ADAPTERS) -> RequestView:
    """Return the present state of a request."""
    params = getattr(request, "kv_transfer_params", None)
    content, uncacheable = contents.of(request)
    lora = getattr(request, "lora_request", None)
    hint, bad_hint = _hint(params) if params else (None, "")
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
        bad_hint,
        key=request,
        adapter=lora.lora_int_id if lora is not None and not uncacheable else None,
        set_aside=bool(getattr(request, "use_structured_output", False)),
    )


def _hint(params: Any) -> tuple[Hint | None, str]:
    """Return the hint in the request's parameters, which clients choose, and its error."""
    if not isinstance(params, dict) or HINT not in params:
        return None, ""
    try:
        return parse_hint(params[HINT]), ""
    except BadArgument as error:
        return None, f"kv_transfer_params, {HINT}: {error}"


def step_view(output: Any) -> StepView:
    """Return the step in a SchedulerOutput. Called in every step: it copies nothing of running requests."""
    tokens = output.total_num_scheduled_tokens
    if not tokens:
        return IDLE
    cached, fresh = output.scheduled_cached_reqs, output.scheduled_new_reqs
    running, computed, added = cached.req_ids, cached.num_computed_tokens, cached.new_block_ids
    started = [NewTable(new.req_id, new.block_ids, new.num_computed_tokens) for new in fresh] if fresh else []
    if resumed := cached.resumed_req_ids:  # preempted, and scheduled again: `added` is the whole table
        rows = [(row, row[0] in resumed and row[2]) for row in zip(running, computed, added, strict=True)]
        started += [NewTable(request, blocks, before) for (request, before, blocks), whole in rows if whole]
        running, computed, added = ([row[column] for row, whole in rows if not whole] for column in range(3))
    return StepView(tokens, output.num_scheduled_tokens, started, running, computed, added)

"""The plain values that an engine's package passes to the scheduler's side. Pure.

Nothing that grows is copied: `hashes`, `token_ids` and a step's lists are the engine's own, to be read only. A step's
lists are not kept beyond the step. The `key` and `token_ids` of an ended request are kept only for events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvcache_client.scheduler.hint import Hint

BlockTables = Sequence[Sequence[int]]  # device blocks, one table per KV cache group


class RequestView(msgspec.Struct, frozen=True):
    """A request as it is now.

    Attributes:
        id: its name.
        tokens: its number of tokens, generated ones included.
        prompt_tokens: how many of them belong to the prompt.
        hashes: chained hashes of the engine's full blocks; the list grows while the request runs. If the engine's own
            hashes only name content that the blocks depend on, they are `ContentHashes`.
        token_ids: its tokens; the list grows, too.
        salted: whether the hashes have a salt in them.
        uncacheable: why the hashes do not identify the content of the blocks ("multimodal", ...); "" if they do.
        skips_cache: whether it opted out of the cache.
        hint: its hint on its own blocks.
        bad_hint: the error in its hint; then `hint` is None.
        key: the engine's own object, which distinguishes it from an earlier request of the same name; only the engine's
            package looks into it.
        adapter: the engine's number for its LoRA adapter; None for none.
        set_aside: whether the engine may have set it aside before its first lookup, as it does while it compiles the
            grammar of an answer.
    """

    id: str
    tokens: int
    prompt_tokens: int
    hashes: Sequence[bytes]
    token_ids: Sequence[int] = ()
    salted: bool = False
    uncacheable: str = ""
    skips_cache: bool = False
    hint: Hint | None = None
    bad_hint: str = ""
    key: object = None
    adapter: int | None = None
    set_aside: bool = False


class NewTable(msgspec.Struct, frozen=True):
    """The block tables of a request that a step schedules for the first time, or again after a preemption.

    `computed` of its tokens are computed before the step, or loaded.
    """

    request: str
    blocks: BlockTables
    computed: int


class StepView(msgspec.Struct, frozen=True):
    """What one step of the engine schedules.

    Attributes:
        tokens: scheduled tokens of all requests; 0 if the step computes nothing.
        scheduled: tokens by request.
        started: requests whose tables are new.
        running: the other requests, by name, with their tokens `computed` before the step and the blocks `added` to
            them, None for none; three lists of one length.
    """

    tokens: int = 0
    scheduled: Mapping[str, int] = {}
    started: Sequence[NewTable] = ()
    running: Sequence[str] = ()
    computed: Sequence[int] = ()
    added: Sequence[BlockTables | None] = ()


IDLE = StepView()

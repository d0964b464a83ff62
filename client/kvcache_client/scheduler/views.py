"""What an engine passes to its scheduler's side: plain values, made by the engine's package. Pure.

Nothing that grows is copied: `hashes`, `token_ids` and a step's lists are the engine's own, to be read only. A step's
lists are not kept beyond the step. Of a request that has ended, `key` and `token_ids` are kept only for events.
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
        tokens: how many it has, generated ones included.
        prompt_tokens: how many of them are its prompt's.
        hashes: chained hashes of the engine's full blocks; the list grows while the request runs. Where the engine's
            own hashes only name what the blocks depend on, they are `ContentHashes`.
        token_ids: its tokens; the list grows, too.
        salted: whether the hashes have a salt in them.
        uncacheable: why the hashes do not name the content of the blocks ("multimodal", ...); "" where they do.
        skips_cache: whether it asked not to be served from a cache.
        hint: what it says of its own blocks.
        bad_hint: what is wrong with what it says; then `hint` is None.
        key: the engine's own object, which distinguishes it from an earlier request of the same name; only the engine's
            package looks into it.
        adapter: number that the engine has for its LoRA adapter; None for none.
        set_aside: whether the engine may have set it aside before it asked for it first, as it does while it compiles
            the grammar of an answer.
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

    `computed` tokens of it are computed before the step, or loaded.
    """

    request: str
    blocks: BlockTables
    computed: int


class StepView(msgspec.Struct, frozen=True):
    """What one step of the engine schedules.

    Attributes:
        tokens: scheduled tokens of all requests; 0 where the step computes nothing.
        scheduled: tokens by request.
        started: requests whose tables are new.
        running: the others, by name, with `computed` tokens before the step and the blocks that they get `added`, None
            for none; three lists of one length.
    """

    tokens: int = 0
    scheduled: Mapping[str, int] = {}
    started: Sequence[NewTable] = ()
    running: Sequence[str] = ()
    computed: Sequence[int] = ()
    added: Sequence[BlockTables | None] = ()


IDLE = StepView()

"""The plain values that an engine's package passes to the scheduler's side: its facts, its requests, its steps. Pure.

Nothing that grows is copied: `hashes`, `token_ids` and a step's lists are the engine's own, to be read only. A step's
lists are not kept beyond the step. The `key` and `token_ids` of an ended request are kept only for events.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2s
from typing import Annotated, Any, NamedTuple, overload

import msgspec

from kvcache_proto.errors import BadArgument
from kvcache_proto.messages import MAX_SECONDS

BlockTables = Sequence[Sequence[int]]  # device blocks, one table per KV cache group
RETAIN_SECONDS = 3600.0  # unless the hint has a time


# Facts.


class Table(NamedTuple):
    """A KV cache group of the engine, in the slots of a cached group.

    Attributes:
        number: its position among the engine's groups.
        block_tokens: tokens per block of the group.
        blocks: how many of the group's blocks a slot contains: the last ones of the slot's tokens.
    """

    number: int
    block_tokens: int
    blocks: int


class Group(NamedTuple):
    """A cached group: the engine's groups whose blocks are in its slots, one after another.

    Attributes:
        reach, period: as in GroupSpec; 0 for full attention.
        kept: how many tokens before the next one the engine keeps, for a window; otherwise 0.
        chunk: tokens per chunk, for chunked attention; otherwise 0.
        is_state: whether a slot contains a state.
    """

    tables: tuple[Table, ...]
    reach: int = 0
    period: int = 0
    kept: int = 0
    chunk: int = 0
    is_state: bool = False

    @property
    def columns(self) -> int:
        """The number of the engine's blocks in a slot."""
        return sum(table.blocks for table in self.tables)

    def first_kept(self, computed: int) -> int:
        """Return the first token whose blocks the engine has kept when it has computed `computed` tokens."""
        if self.chunk:
            return computed // self.chunk * self.chunk
        return max(0, computed - self.kept) if self.reach else 0


# Returns an event's fields for a request, and its fields for the request's blocks between two tokens, in order.
Describe = Callable[["RequestView", int, int], tuple[Any, list[Any]]]


@dataclass(frozen=True)
class EngineFacts:
    """Facts about an engine that its decisions depend on, and callbacks into it.

    Attributes:
        block_tokens: tokens per block of the engine; if it has `groups`, tokens per block hash.
        blocks_per_slot: how many of these make one cached block.
        saves, loads: whether the engine saves to the cache, and loads from it.
        volatile: cached blocks at the end of a hit that are computed anyway.
        groups: the groups of the namespace, unless the engine has only one group, of full attention.
        table_tokens: tokens per block of each of the engine's groups; by default, one group of `block_tokens`.
        joining: ranks that do not know the namespace before they get a plan.
        step_tokens: the most tokens that a step schedules.
        ranks: number of ranks that copy.
        device_blocks: for an engine that could wait forever for requests that load (see `admission`), else 0.
        lookahead, in_order: for such an engine, as in `Admission`.
        describe: see `Describe`. Without it, there are no events.
        checkpoint: returns the present id of the checkpoint, "" if it is unknown.
        evicted_next: returns the given number of device blocks that the engine gives away next, in order. Without it,
            saves are eager.
        hash_of: returns the hash of a device block in the engine's own prefix cache, b"" if it is not there.
    """

    block_tokens: int
    blocks_per_slot: int = 1
    saves: bool = True
    loads: bool = True
    volatile: int = 0
    groups: Sequence[Group] = ()
    table_tokens: Sequence[int] = ()
    joining: Collection[int] = ()
    step_tokens: int = 0
    ranks: int = 1
    device_blocks: int = 0
    lookahead: int = 0
    in_order: bool = True
    describe: Describe | None = None
    checkpoint: Callable[[], str] = lambda: ""
    evicted_next: Callable[[int], Iterable[int]] | None = None
    hash_of: Callable[[int], bytes] = lambda block: b""

    @property
    def tables(self) -> Sequence[int]:
        """Tokens per block of each of the engine's groups."""
        return self.table_tokens or (self.block_tokens,)


# Requests.


class Retain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keep the whole blocks of the first `tokens` of the prompt, or of all of it."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] = RETAIN_SECONDS
    tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    priority: int | None = None  # ignored


class Rest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All tokens `after` the first ones."""

    after: Annotated[int, msgspec.Meta(ge=0)] = 0


class Hint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A hint of a request on its own blocks: `retain` the prompt; `drop` blocks that are used once; the conversation is
    `done`. As in JSON: {"retain": {"seconds": 3600, "tokens": 1024}, "drop": {"after": 1024}, "done": true}
    """

    retain: Retain | bool = False
    drop: Rest | bool = False
    done: Rest | bool = False

    @property
    def retained(self) -> Retain | None:
        return Retain() if self.retain is True else self.retain or None

    @property
    def unwanted(self) -> Rest | None:
        """The tokens that are not to be saved."""
        given = self.done or self.drop
        return Rest() if given is True else given or None


def parse_hint(value: Any) -> Hint:
    """Return the hint in `value`, a mapping as in JSON. Raises BadArgument, which names the key."""
    try:
        return msgspec.convert(value, Hint)
    except msgspec.ValidationError as error:
        raise BadArgument(str(error).replace("`$.", "`").replace(" - at `$`", "")) from None


class ContentHashes(Sequence[bytes]):
    """The hashes `plain` with `content`, a digest, mixed in, at their length; each is computed when it is first read.

    For blocks that depend on content which the engine's own hashes only name. `plain` may grow, and be cut: a computed
    hash is found by its plain hash, not by its position.
    """

    __slots__ = ("__weakref__", "_mixed", "_start", "content", "plain")

    def __init__(self, plain: Sequence[bytes], content: bytes) -> None:
        self.plain, self.content = plain, content
        self._start = blake2s(content)
        self._mixed: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self.plain)

    @overload
    def __getitem__(self, at: int) -> bytes: ...

    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...

    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if isinstance(at, slice):
            known = self._mixed.get
            return [known(name) or self._mix(name) for name in self.plain[at]]
        name = self.plain[at]
        return self._mixed.get(name) or self._mix(name)

    def _mix(self, name: bytes) -> bytes:
        digest = self._start.copy()
        digest.update(name)
        mixed = self._mixed[name] = digest.digest()[: len(name)]  # blake2s has the 32 bytes of the longest hash
        return mixed


def plain(hashes: Sequence[bytes]) -> Sequence[bytes]:
    """Return the engine's own hashes."""
    return hashes.plain if isinstance(hashes, ContentHashes) else hashes


class RequestView(msgspec.Struct, frozen=True):
    """A request as it is now.

    Attributes:
        tokens: its number of tokens, generated ones included.
        prompt_tokens: how many of them belong to the prompt.
        hashes: chained hashes of the engine's full blocks; the list grows while the request runs. If the engine's own
            hashes only name content that the blocks depend on, they are `ContentHashes`.
        token_ids: its tokens; the list grows, too.
        salted: whether the hashes have a salt in them.
        uncacheable: why the hashes do not identify the content of the blocks ("multimodal", ...); "" if they do.
        skips_cache: whether it opted out of the cache.
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


# Steps.


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

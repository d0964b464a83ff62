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
    """A KV cache group of the engine, in the slots of a cached group."""

    number: int  # its position among the engine's groups
    block_tokens: int  # tokens per block of the group
    blocks: int  # of the group in a slot: the last ones of the slot's tokens


class Group(NamedTuple):
    """A cached group: the engine's groups whose blocks are in its slots, one after another."""

    tables: tuple[Table, ...]
    window_blocks: int = 0  # `window_blocks` and `chunk_blocks` are as in GroupSpec; 0 for full attention
    chunk_blocks: int = 0
    kept: int = 0  # tokens before the next one that the engine keeps, for a window; otherwise 0
    chunk: int = 0  # tokens per chunk, for chunked attention; otherwise 0
    is_state: bool = False  # whether a slot contains a state

    @property
    def columns(self) -> int:
        """The number of the engine's blocks in a slot."""
        return sum(table.blocks for table in self.tables)

    def first_kept(self, computed: int) -> int:
        """Return the first token whose blocks the engine has kept when it has computed `computed` tokens."""
        if self.chunk:
            return computed // self.chunk * self.chunk
        return max(0, computed - self.kept) if self.window_blocks else 0


# Returns an event's fields for a request, and its fields for its blocks between two tokens in a cached group, in order.
Describe = Callable[["RequestView", int, int, int], tuple[Any, list[Any]]]


@dataclass(frozen=True)
class EngineFacts:
    """Facts about an engine that its decisions depend on, and callbacks into it."""

    block_tokens: int  # tokens per block of the engine; if it has `groups`, tokens per block hash
    blocks_per_slot: int = 1  # how many of these make one cached block
    saves: bool = True  # whether the engine saves to the cache
    loads: bool = True  # whether it loads from the cache
    volatile: int = 0  # cached blocks at the end of a hit that are computed anyway
    groups: Sequence[Group] = ()  # those of the namespace, unless the engine has only one, of full attention
    tails: bool = False  # whether hits of the engine may end within a block: see HybridGroups
    table_tokens: Sequence[int] = ()  # per block of each of the engine's groups; by default, one of `block_tokens`
    joining: Collection[int] = ()  # ranks that do not know the namespace before they get a plan
    step_tokens: int = 0  # the most tokens that a step schedules
    ranks: int = 1  # number of ranks that copy
    # For an engine that could wait forever for requests that load, else 0; the next two are for it, too: see Admission.
    device_blocks: int = 0
    lookahead: int = 0
    in_order: bool = True
    describe: Describe | None = None  # without it, there are no events
    checkpoint: Callable[[], str] = lambda: ""  # returns the present id of the checkpoint, "" if it is unknown
    # Returns the given number of device blocks that the engine gives away next, in order. Without it, saves are eager.
    evicted_next: Callable[[int], Iterable[int]] | None = None
    # Returns the hash of a device block in the engine's own prefix cache, b"" if it is not there.
    hash_of: Callable[[int], bytes] = lambda block: b""

    @property
    def tables(self) -> Sequence[int]:
        """Tokens per block of each of the engine's groups."""
        return self.table_tokens or (self.block_tokens,)


# Requests.


class Retain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keep the whole blocks of the first `tokens` of the prompt, or of all of it, and once more with the `answer`, from
    its end on."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] = RETAIN_SECONDS
    tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    answer: bool = False


class Rest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All tokens `after` the first ones."""

    after: Annotated[int, msgspec.Meta(ge=0)] = 0


class Hint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A hint of a request on its own blocks: `retain` the prompt; `drop` blocks that are used once; the conversation is
    `done`; tiers `fetch` before they fetch for other requests that wait. As in JSON: {"retain": {"seconds": 3600,
    "tokens": 1024}, "drop": {"after": 1024}, "done": true, "fetch": true}
    """

    retain: Retain | bool | tuple[Retain, ...] = False
    drop: Rest | bool = False
    done: Rest | bool = False
    fetch: bool = False

    @property
    def retained(self) -> tuple[Retain, ...]:
        if isinstance(self.retain, bool):
            return (Retain(),) if self.retain else ()
        return self.retain if isinstance(self.retain, tuple) else (self.retain,)

    @property
    def unwanted(self) -> Rest | None:
        """The tokens that are not to be saved."""
        given = self.done or self.drop
        return Rest() if given is True else given or None


class BadHint(NamedTuple):
    """A hint, or a part of one, that is ignored."""

    counter: str
    error: str


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
    """A request as it is now."""

    id: str
    tokens: int  # their number, generated ones included
    prompt_tokens: int  # how many of them belong to the prompt
    hashes: Sequence[bytes]  # chained, of the engine's full blocks, or `ContentHashes`; it grows while the request runs
    token_ids: Sequence[int] = ()  # it grows, too
    salted: bool = False  # whether the hashes have a salt in them
    uncacheable: str = ""  # why the hashes do not identify the blocks' content ("multimodal", ...); "" if they do
    skips_cache: bool = False  # whether it opted out of the cache
    hint: Hint | None = None
    bad_hints: Sequence[BadHint] = ()
    key: object = None  # the engine's own object, unlike that of an earlier request of the same name
    adapter: int | None = None  # the engine's number for its LoRA adapter
    set_aside: bool = False  # whether it may have been passed over before, as while an answer's grammar is compiled


# Steps.


class NewTable(msgspec.Struct, frozen=True):
    """The block tables of a request that a step schedules for the first time, or again after a preemption."""

    request: str
    blocks: BlockTables
    computed: int  # tokens that are computed before the step, or loaded


class StepView(msgspec.Struct, frozen=True):
    """The schedule of one step. `running`, `computed` and `added` have one length."""

    tokens: int = 0  # scheduled, of all requests; 0 if the step computes nothing
    scheduled: Mapping[str, int] = {}  # tokens by request
    started: Sequence[NewTable] = ()  # requests whose tables are new
    running: Sequence[str] = ()  # the other requests
    computed: Sequence[int] = ()  # their tokens that are computed before the step
    added: Sequence[BlockTables | None] = ()  # the blocks that they get
    preempted: Collection[str] = ()  # requests that wait again, since the last step


IDLE = StepView()

"""Changes of the cache's content as vLLM's KV events, in numbered batches; the latest are kept. Pure.

A consumer of the stream knows which blocks lookups find. Each namespace is a topic with its own numbers. In a replay,
batches that are no longer kept are replaced by the current content: events only state that a block is present or
absent, so a repeated or outdated one does no harm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from kvcache_server.core.cache import Cache
from kvcache_server.core.effects import CLEARED, Change, Gone, NamespaceClosed, NamespaceEmptied, NamespaceOpened, Shown
from kvcache_server.core.index import Group
from kvcache_server.core.sessions import Namespace

STEP = 256  # blocks in one batch
TURN = 64 * STEP  # changes put into batches at one time: 10 ms
SKIM = 4096  # kept batches looked through at one time
MEDIUM = "CPU"  # as vLLM names host memory


class Topic:
    """A namespace's sequence of batches; `next` is the number of the next one."""

    __slots__ = ("name", "next")

    def __init__(self, name: bytes, number: int) -> None:
        self.name = name
        self.next = number


class Source(msgspec.Struct, gc=False, frozen=True, eq=False):
    """The group of a namespace whose blocks change."""

    topic: Topic
    group: int
    block_tokens: int


# A block was stored: its hash, and its parent's hash, empty for a root. A block was removed: its hash, and None. The
# source's namespace was cleared: an empty hash, and None.
BlockChange = tuple[Source, bytes, bytes | None]


class Batch(NamedTuple):
    """One message: frames are the topic, the number in 8 bytes, big-endian, and the payload."""

    topic: bytes
    number: int
    payload: bytes


class Batches:
    """Turns changes of a cache into batches. `changes` are those that are in no batch yet."""

    def __init__(
        self, cache: Cache, topic: str, keep: int, first: int, dialect: str = "0.26", hashes: str = "int"
    ) -> None:
        """Follow `cache` from now on.

        Args:
            topic: the topic of a namespace; `{namespace}` stands for its id, `{model}` for its model.
            keep: the number of batches kept for replays.
            first: the number of the first batch; greater than any that an earlier daemon has used.
            dialect: the vLLM version whose subscribers read the batches; 0.23 encodes events as arrays.
            hashes: `int` for the last 64 bits of a hash, which is vLLM's default; `bytes` for all of it.
        """
        self.changes: list[BlockChange] = []
        self._sources: dict[bytes, Source] = {}  # by the group's tag
        self._cache, self._pattern, self._hashes = cache, topic, hashes
        self._events = _EventEncoder(dialect, hashes)
        self._highest = first
        self._kept: deque[Batch] = deque(maxlen=keep)
        for namespace in cache.namespaces.values():
            self._watch(namespace)

    def follow(self, changes: Iterable[Change]) -> None:
        """Take up changes reported by the core."""
        noted, sources = self.changes, self._sources
        for change in changes:
            match change:
                case Shown():
                    for block in change.blocks:
                        if (above := block.parent) is not None and not block.account.group.is_suffix:
                            noted.append((sources[block.account.group.tag], block.hash, above.hash))
                case Gone() if change.cause != CLEARED:  # the clear itself is announced
                    noted += [
                        (sources[block.account.group.tag], block.hash, None)
                        for block in change.blocks
                        if not block.account.group.is_suffix
                    ]
                case NamespaceOpened():
                    self._watch(change.namespace)
                    self._empty(change.namespace)  # subscribers forget the content of its topic
                case NamespaceEmptied():
                    self._empty(change.namespace)
                case NamespaceClosed():
                    for group in _announced(change.namespace):
                        del sources[group.tag]
                case _:
                    pass  # a refused block was never visible

    def _empty(self, namespace: Namespace) -> None:
        """Add the event that clears the namespace."""
        self.changes.append((self._sources[namespace.groups[0].tag], b"", None))

    def _watch(self, namespace: Namespace) -> None:
        name = self._pattern.replace("{namespace}", namespace.id).replace("{model}", namespace.spec.model)
        topic = Topic(name.encode(), self._highest)
        for group in _announced(namespace):
            self._sources[group.tag] = Source(topic, group.number, group.spec.block_tokens)

    # Batches.

    def due(self, now: float) -> list[Batch]:
        """Return batches with the first changes, at most TURN of them. `now` is in seconds since the epoch."""
        taken = self.changes[:TURN]
        del self.changes[:TURN]
        emptied = {source.topic: at for at, (source, name, _) in enumerate(taken) if not name}
        if emptied:  # changes before a clear are superfluous
            taken = [each for at, each in enumerate(taken) if at >= emptied.get(each[0].topic, 0)]
        return [self._keep(topic, events, now) for topic, events in self._events.of(taken)]

    def announce(self, now: float) -> Iterator[Batch]:
        """Yield a clear of each namespace, then its current content; the cache may change between two batches.

        This is for the first subscriber: a restarted daemon has not announced the blocks that it has restored.
        """
        for namespace in list(self._cache.namespaces.values()):
            topic = self._sources[namespace.groups[0].tag].topic
            for events in self._snapshot(namespace):
                yield self._keep(topic, events, now)

    def replay(self, start: int, prefix: bytes, now: float) -> Iterator[Batch | None]:
        """Yield the batches from number `start` on of the topics that begin with `prefix`.

        The cache may change between two steps. If batches are no longer kept, or were an earlier daemon's, the current
        content comes first, under their numbers. Each step is short; a step without a batch yields None.
        """
        oldest: dict[bytes, int] = {}
        for batch in self._kept:
            oldest.setdefault(batch.topic, batch.number)
        for namespace in list(self._cache.namespaces.values()):
            topic = self._sources[namespace.groups[0].tag].topic
            missing = oldest.get(topic.name, topic.next) - start
            if missing > 0 and topic.name.startswith(prefix):
                yield from self._replay_missing(namespace, topic.name, range(start, start + missing), now)
        for at, batch in enumerate(list(self._kept)):
            if batch.number >= start and batch.topic.startswith(prefix):
                yield batch
            elif at % SKIM == 0:
                yield None

    def _replay_missing(self, namespace: Namespace, topic: bytes, numbers: range, now: float) -> Iterator[Batch | None]:
        """Yield the current content, spread evenly over the given numbers.

        A client ignores a number that it has seen, and every number from the live batch on that it has put off. So no
        other numbers can be used: if they are few, batches are large, but each step stays short.
        """
        pieces = sum(-(-len(group.visible) // STEP) for group in _announced(namespace))
        each = max(1, -(-pieces // len(numbers)))
        number, packed = numbers[0], 0
        payload = self._events.payload(now)
        for events in self._snapshot(namespace):
            if packed == each and number < numbers[-1]:
                yield Batch(topic, number, payload.whole())
                number, packed, payload = number + 1, 0, self._events.payload(now)
            elif packed:
                yield None
            payload.add(events)
            packed += 1
        yield Batch(topic, number, payload.whole())

    def _snapshot(self, namespace: Namespace) -> Iterator[list[Any]]:
        """Yield events, STEP blocks at a time, of the blocks that are present now and still are in their turn."""
        events: list[Any] = [self._events.cleared]
        for group in _announced(namespace):
            source, rest = self._sources[group.tag], deque(group.visible.values())
            while rest:
                some = [rest.popleft() for _ in range(min(STEP, len(rest)))]
                stored = [(source, block.hash, block.parent.hash) for block in some if block.parent and block.is_found]
                for _, more in self._events.of(stored):
                    events += more
                yield events
                events = []
        if events:
            yield events

    def _keep(self, topic: Topic, events: list[Any], now: float) -> Batch:
        batch = Batch(topic.name, topic.next, self._events.encode(events, now))
        topic.next += 1
        self._highest = max(self._highest, topic.next)
        self._kept.append(batch)
        return batch


class _EventEncoder:
    """Encodes events in the schema of `vllm.distributed.kv_events`: maps since vLLM 0.24, arrays before that."""

    def __init__(self, dialect: str, hashes: str) -> None:
        array, word = dialect == "0.23", Any
        options = {"tag": True, "array_like": array, "omit_defaults": True, "gc": False}
        stored = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
        default = [(name, word, None) for name in ("extra_keys", "group_idx")]
        self._stored = msgspec.defstruct("BlockStored", [*stored, *default], **options)  # type: ignore[arg-type]
        self._removed = msgspec.defstruct("BlockRemoved", ["block_hashes", "medium", default[1]], **options)  # type: ignore[arg-type]
        self.cleared = msgspec.defstruct("AllBlocksCleared", [], **options)()  # type: ignore[arg-type]
        self._ints = hashes == "int"
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, events: list[Any], now: float) -> bytes:
        return self._encoder.encode((now, events, None))  # None: the daemon has no data parallel rank

    def payload(self, now: float) -> _Payload:
        return _Payload(self._encoder, now)

    def of(self, changes: Iterable[BlockChange], step: int = STEP) -> Iterator[tuple[Topic, list[Any]]]:
        """Yield the events of batches of at most `step` blocks; consecutive changes share an event if they can."""
        batches: dict[Topic, tuple[list[Any], int]] = {}
        for source, parent, hashes in _runs(changes, step):
            topic = source.topic
            events, blocks = batches.get(topic, ([], 0))
            if events and blocks + len(hashes) > step:
                yield topic, events
                events, blocks = [], 0
            events.append(self._event(source, parent, hashes))
            batches[topic] = events, blocks + len(hashes)
        for topic, (events, _) in batches.items():
            yield topic, events

    def _event(self, source: Source, parent: bytes | None, hashes: list[bytes]) -> Any:
        if not hashes:
            return self.cleared
        names = [int.from_bytes(each[-8:], "big") for each in hashes] if self._ints else hashes
        if parent is None:
            return self._removed(names, MEDIUM, source.group)
        above: bytes | int | None = None
        if parent:
            above = int.from_bytes(parent[-8:], "big") if self._ints else parent
        return self._stored(names, above, [], source.block_tokens, None, MEDIUM, None, None, source.group)


class _Payload:
    """Builds the result of `_EventEncoder.encode` from events that are added a few at a time."""

    def __init__(self, encoder: msgspec.msgpack.Encoder, now: float) -> None:
        self._encoder, self._now = encoder, now
        self._count = 0
        self._events = bytearray()

    def add(self, events: list[Any]) -> None:
        self._count += len(events)
        for event in events:
            self._encoder.encode_into(event, self._events, -1)

    def whole(self) -> bytes:
        head = b"\x93" + self._encoder.encode(self._now)  # an array of three
        count = b"\xdd" + self._count.to_bytes(4, "big")  # an array with a 32-bit length
        return b"".join((head, count, self._events, b"\xc0"))  # and nil


def _runs(changes: Iterable[BlockChange], step: int) -> Iterator[tuple[Source, bytes | None, list[bytes]]]:
    """Yield (source, parent of the first, hashes) for stored chains, and with parent None for removed blocks.

    No hashes stand for a clear.
    """
    source: Source | None = None
    first: bytes | None = None
    hashes: list[bytes] = []
    for of, name, parent in changes:
        follows = parent is None if first is None else bool(hashes) and parent == hashes[-1]
        if of is source and hashes and name and follows and len(hashes) < step:
            hashes.append(name)
            continue
        if source is not None:
            yield source, first, hashes
        source, first, hashes = of, parent, [name] if name else []
    if source is not None:
        yield source, first, hashes


def _announced(namespace: Namespace) -> list[Group]:
    """Return the groups whose blocks are announced. Not suffix groups: many subscribers know a block only by its
    hash."""
    return [group for group in namespace.groups if not group.is_suffix]

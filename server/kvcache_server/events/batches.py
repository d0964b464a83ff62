"""What lookups find from now on, and what no more, as KV events of vLLM's: numbered batches, the last ones kept. Pure.

The core reports each change, so that who follows the stream holds what lookups find.
A namespace is a topic with numbers of its own. What is no longer kept is replaced, in a replay, by what there is now:
events tell of presence alone, so that the same one twice, or one that a later one has overtaken, does no harm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from kvcache_server.core.cache import Cache
from kvcache_server.core.effects import Change, Gone, NamespaceClosed, NamespaceEmptied, NamespaceOpened, Shown
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
    """Whose blocks change: a group of a namespace."""

    topic: Topic
    group: int
    block_tokens: int


# A block is seen: its hash, and its parent's, empty for a root. It is gone: its hash, and None. All of the source's
# namespace is gone: an empty hash, and None.
Told = tuple[Source, bytes, bytes | None]


class Batch(NamedTuple):
    """One message: frames are the topic, the number in 8 bytes, big-endian, and the payload."""

    topic: bytes
    number: int
    payload: bytes


class Batches:
    """Turns changes of a cache into batches. `changes` is what was noted and is in none yet."""

    def __init__(
        self, cache: Cache, topic: str, keep: int, first: int, dialect: str = "0.26", hashes: str = "int"
    ) -> None:
        """Follow `cache` from now on.

        Args:
            topic: of a namespace, where `{namespace}` stands for its id and `{model}` for its model.
            keep: batches kept for a replay.
            first: the number of the first batch; greater than any that a daemon before this one gave.
            dialect: the first version of vLLM whose subscribers read the batches: 0.23 had arrays for events.
            hashes: `int` is what vLLM publishes where it is not told otherwise, the last 64 bits; `bytes` all of them.
        """
        self.changes: list[Told] = []
        self._sources: dict[bytes, Source] = {}  # by the group's tag
        self._cache, self._pattern, self._hashes = cache, topic, hashes
        self._events = _Events(dialect, hashes)
        self._highest = first
        self._kept: deque[Batch] = deque(maxlen=keep)
        for namespace in cache.namespaces.values():
            self._watch(namespace)

    def follow(self, changes: Iterable[Change]) -> None:
        """Note what the core reports."""
        noted, sources = self.changes, self._sources
        for change in changes:
            match change:
                case Shown():
                    for block in change.blocks:
                        if (above := block.parent) is not None:
                            noted.append((sources[block.account.group.tag], block.hash, above.hash))
                case Gone():
                    noted.append((sources[change.block.account.group.tag], change.block.hash, None))
                case NamespaceOpened():
                    self._watch(change.namespace)
                    self._empty(change.namespace)  # whoever remembers blocks of its topic forgets them
                case NamespaceEmptied():
                    self._empty(change.namespace)
                case NamespaceClosed():
                    for group in change.namespace.groups:
                        del sources[group.tag]
                case _:
                    pass  # what was refused was never seen

    def _empty(self, namespace: Namespace) -> None:
        """Say in one event that nothing is left of it."""
        self.changes.append((self._source(namespace.groups[0]), b"", None))

    def _watch(self, namespace: Namespace) -> None:
        name = self._pattern.replace("{namespace}", namespace.id).replace("{model}", namespace.spec.model)
        topic = Topic(name.encode(), self._highest)
        for group in namespace.groups:
            self._sources[group.tag] = Source(topic, group.number, group.spec.block_tokens)

    def _source(self, group: Group) -> Source:
        return self._sources[group.tag]

    # Batches.

    def due(self, now: float) -> list[Batch]:
        """Return what was noted, at most TURN changes of it, in batches; `now` is seconds since the epoch."""
        taken = self.changes[:TURN]
        del self.changes[:TURN]
        emptied = {source.topic: at for at, (source, name, _) in enumerate(taken) if not name}
        if emptied:  # what was said before that need not be said
            taken = [each for at, each in enumerate(taken) if at >= emptied.get(each[0].topic, 0)]
        return [self._keep(topic, events, now) for topic, events in self._events.of(taken)]

    def announce(self, now: float) -> Iterator[Batch]:
        """Yield what there is, as if it all came now, after a word that nothing else is; the cache may go on between.

        For the first one who listens: a daemon that has found its last one's blocks has told nobody of them.
        """
        for namespace in list(self._cache.namespaces.values()):
            topic = self._source(namespace.groups[0]).topic
            for events in self._snapshot(namespace):
                yield self._keep(topic, events, now)

    def replay(self, start: int, prefix: bytes, now: float) -> Iterator[Batch | None]:
        """Yield the batches from number `start` on of the topics that begin with `prefix`; the cache may go on between.

        Where some of them are kept no longer, or were another daemon's, what there is now comes before those that are,
        under the numbers of the missing ones. Each step is short: None is one after which there is no batch yet.
        """
        oldest: dict[bytes, int] = {}
        for batch in self._kept:
            oldest.setdefault(batch.topic, batch.number)
        for namespace in list(self._cache.namespaces.values()):
            topic = self._source(namespace.groups[0]).topic
            missing = oldest.get(topic.name, topic.next) - start
            if missing > 0 and topic.name.startswith(prefix):
                yield from self._retell(namespace, topic.name, range(start, start + missing), now)
        for at, batch in enumerate(list(self._kept)):
            if batch.number >= start and batch.topic.startswith(prefix):
                yield batch
            elif at % SKIM == 0:
                yield None

    def _retell(self, namespace: Namespace, topic: bytes, numbers: range, now: float) -> Iterator[Batch | None]:
        """Yield what there is under no other numbers, evenly.

        A reader drops a number that it has had, and all from the live batch on that it waits with: so where numbers are
        few, a batch is large, but no step is.
        """
        pieces = sum(-(-len(group.visible) // STEP) for group in namespace.groups)
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
        """Yield events, STEP blocks at a time, of what there is now and still is when its turn comes."""
        events: list[Any] = [self._events.cleared]
        for group in namespace.groups:
            source, rest = self._source(group), deque(group.visible.values())
            while rest:
                some = [rest.popleft() for _ in range(min(STEP, len(rest)))]
                told = [
                    (source, block.hash, block.parent.hash) for block in some if block.parent and group.trusts(block)
                ]
                for _, more in self._events.of(told):
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


class _Events:
    """Events of vLLM's schema, as `vllm.distributed.kv_events` has them: maps since vLLM 0.24, before that arrays."""

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
        return self._encoder.encode((now, events, None))  # no data parallel rank: the daemon has none

    def payload(self, now: float) -> _Payload:
        return _Payload(self._encoder, now)

    def of(self, changes: Iterable[Told], step: int = STEP) -> Iterator[tuple[Topic, list[Any]]]:
        """Yield the events of batches of at most `step` blocks; neighbours that can share an event do."""
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
    """What `_Events.encode` makes, of events that come a few at a time."""

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
        count = b"\xdd" + self._count.to_bytes(4, "big")  # of them one that has a length of 32 bits
        return b"".join((head, count, self._events, b"\xc0"))  # and nil


def _runs(changes: Iterable[Told], step: int) -> Iterator[tuple[Source, bytes | None, list[bytes]]]:
    """Yield (source, parent of the first, hashes): chains that are seen, and blocks that are gone (parent None).

    Without a hash: all is gone.
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

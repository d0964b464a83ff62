"""The messages, in the order in which an engine meets them. PROTOCOL.md is the normative text.

Every request over ZeroMQ begins with `id`, chosen by the client and repeated by the reply, and `token`, from the door.
A field is never removed or reordered; a new one goes last and has a default.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvcache_proto.counts import MAX_NAMES
from kvcache_proto.text import escaped
from kvcache_proto.types import MAX_HASHES, MAX_NAME, MAX_SHARDS, NamespaceSpec, PoolGeometry

PROTOCOL_VERSION = 2
OLDEST_VERSION = 1

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]  # remembered by the daemon, and so bounded as it is read
Most = msgspec.Meta(max_length=MAX_HASHES)  # to read the millions that fit a frame would hold the daemon up
MAX_RUNS, MAX_NOTES = 16_384, 4096  # in one message: each takes as long to read as many hashes
Shards = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_SHARDS)]
# Twice as many as a request may have: who sends one too many is told so, by the request's id.
Hashes = Annotated[list[bytes], msgspec.Meta(max_length=2 * MAX_HASHES)]


# The door: one Hello, one Welcome or Error, then silence until one side ends.


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    version: int
    engine: str
    label: str = ""
    client: str = ""
    resume: int = 0
    secret: bytes = b""


class Welcome(msgspec.Struct, tag="welcome", array_like=True, frozen=True):
    version: int
    session: int
    token: bytes
    geometry: PoolGeometry
    daemon: str = ""
    resumed: bool = False

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "daemon", escaped(self.daemon))


# Requests.


class Attach(msgspec.Struct, tag="attach", array_like=True):
    """Join a namespace as the writer and reader of `shards`; a scheduler joins with none.

    `ceiling_bytes` bounds what this engine's saves may occupy; 0 is no bound.
    """

    id: int
    token: bytes
    spec: NamespaceSpec
    shards: Shards = ()
    ceiling_bytes: int = 0


class Detach(msgspec.Struct, tag="detach", array_like=True):
    """Leave a namespace. It has no reply. What is being read and written there goes on until it has ended."""

    id: int
    token: bytes
    namespace: int


class Acquire(msgspec.Struct, tag="acquire", array_like=True):
    """Ask for the longest cached prefix of `hashes`; with `pin`, under a lease; with `verify`, and their checksums.

    `request` is the engine's name for whom it asks, `tokens` the length of that one's prompt, `salted` whether its
    hashes have a salt in them: for who asks later why there was no hit. A lookup without a name is not remembered.
    """

    id: int
    token: bytes
    namespace: int
    hashes: Hashes
    group: int = 0
    pin: bool = True
    verify: bool = False
    request: Name = ""
    tokens: int = 0
    salted: bool = False


class Release(msgspec.Struct, tag="release", array_like=True):
    """End leases. It has no reply: an unknown lease is counted and ignored."""

    id: int
    token: bytes
    leases: Annotated[list[int], Most]


class Run(msgspec.Struct, array_like=True):
    """Blocks of one chain, each the child of the one before; the first one's parent is `parent`, None for a root."""

    hashes: Hashes
    parent: bytes | None = None


class Reserve(msgspec.Struct, tag="reserve", array_like=True):
    """Ask to write runs of blocks: one reservation for what all requests of an engine's step have filled."""

    id: int
    token: bytes
    namespace: int
    runs: Annotated[list[Run], msgspec.Meta(max_length=MAX_RUNS)]
    group: int = 0


class Settle(msgspec.Struct, tag="settle", array_like=True):
    """Say how `shards` of the granted blocks at `positions` of the run ended; no positions means all of them.

    `outcome` is an Outcome. A writer settles its own shards; who reserved may settle any as NEVER_STARTED,
    and must do so only while it has not handed the slots to the writers.

    `sums` are the checksums of what was committed, one a shard, SUM_BYTES each, position after position; empty where
    the writer made none.
    """

    id: int
    token: bytes
    region: bytes
    reservation: int
    shards: Shards
    outcome: int
    positions: Annotated[list[int], Most] = []
    sums: bytes = b""


class Distrust(msgspec.Struct, tag="distrust", array_like=True):
    """Say that the blocks in `slots`, references one after the other, hold other bytes than were stored.

    `finding` is a Finding. They are forgotten, with all below them.
    """

    id: int
    token: bytes
    region: bytes
    slots: bytes
    shard: int
    finding: int


class Note(msgspec.Struct, array_like=True):
    """What an engine alone knows: why it asked nothing for `request`, or did not save the blocks `hashes` of it.

    `cause` is a word of small letters and underscores, `age_ms` how long ago that was.
    """

    request: Name
    cause: Name
    age_ms: int = 0
    hashes: Hashes = []


class Remark(msgspec.Struct, tag="remark", array_like=True):
    """Notes on requests, for who asks later why there was no hit. It has no reply: what cannot be used is counted."""

    id: int
    token: bytes
    namespace: int
    notes: Annotated[list[Note], msgspec.Meta(max_length=MAX_NOTES)]
    group: int = 0


class Ping(msgspec.Struct, tag="ping", array_like=True):
    id: int
    token: bytes


class Stats(msgspec.Struct, tag="stats", array_like=True):
    """Ask for the daemon's figures. Answered in its turn: Unavailable where another question of the session waits."""

    id: int
    token: bytes


class Clear(msgspec.Struct, tag="clear", array_like=True):
    """Forget every READY, unleased block; of one namespace, or of all where `namespace` is empty."""

    id: int
    token: bytes
    namespace: str = ""


class Restate(msgspec.Struct, tag="restate", array_like=True):
    """Say what a resumed session still holds.

    `leases` are [lease, reference of its last block]; `heard` is the highest reservation that it was told of: what was
    granted to it beyond that is given back.
    """

    id: int
    token: bytes
    heard: int
    leases: Annotated[list[tuple[int, bytes]], Most] = []


class Fence(msgspec.Struct, tag="fence", array_like=True):
    """Give up a session of the daemon's last life that lives and does not come back: it writes no more."""

    id: int
    token: bytes
    session: int


class Tell(msgspec.Struct, tag="tell", array_like=True):
    """Say how the client does. It has no reply.

    `breaker` is a Breaker; `counts` what it has counted, by name, since it last told.
    """

    id: int
    token: bytes
    breaker: int
    counts: Annotated[dict[str, int], msgspec.Meta(max_length=2 * MAX_NAMES)] = {}


class Why(msgspec.Struct, tag="why", array_like=True):
    """Ask why an engine's request, named in full or in a part that no other one has, had no hit. In its turn, as
    Stats is."""

    id: int
    token: bytes
    request: Name


class Watch(msgspec.Struct, tag="watch", array_like=True):
    """Ask for the lookups from number `since` on; 0 is from now on. They are kept only for who goes on asking."""

    id: int
    token: bytes
    since: int = 0


# Replies.


class Attached(msgspec.Struct, tag="attached", array_like=True):
    id: int
    namespace: int


class Acquired(msgspec.Struct, tag="acquired", array_like=True):
    """`hits` blocks from the first hash on, `slots` their references; `lease` is 0 where nothing is pinned.

    `pending` blocks after them are being written by somebody now; `withheld` ones are cached, and the engine's quota
    pins no more until it has released others. `sums` has, where they were asked for, the checksum of each shard of each
    hit, SUM_BYTES each; 0 is none.
    """

    id: int
    lease: int
    hits: int
    pending: int
    slots: bytes
    withheld: int = 0
    sums: bytes = b""


class Reserved(msgspec.Struct, tag="reserved", array_like=True):
    """`answers` has a Refusal a hash, run after run; `slots` has the references of the granted ones, in order.

    `reservation` is 0 where nothing was granted.
    """

    id: int
    reservation: int
    answers: bytes
    slots: bytes


class Settled(msgspec.Struct, tag="settled", array_like=True):
    """A Verdict a settled block, in the order of the positions."""

    id: int
    verdicts: bytes


class Distrusted(msgspec.Struct, tag="distrusted", array_like=True):
    """How many `blocks` were forgotten, and a (engine, session) a slot: who stored that shard of it.

    ("", 0) where the slot was another block's by then.
    """

    id: int
    blocks: int
    writers: list[tuple[str, int]]


class Pong(msgspec.Struct, tag="pong", array_like=True):
    id: int
    draining: bool = False


class Report(msgspec.Struct, tag="report", array_like=True):
    id: int
    stats: dict[str, Any]


class Cleared(msgspec.Struct, tag="cleared", array_like=True):
    id: int
    blocks: int


class Restated(msgspec.Struct, tag="restated", array_like=True):
    """`lost` are the leases whose blocks are there no more."""

    id: int
    lost: list[int] = []


class Fenced(msgspec.Struct, tag="fenced", array_like=True):
    """`reservations` of that session were given up; their slots are in quarantine."""

    id: int
    reservations: int


class Explained(msgspec.Struct, tag="explained", array_like=True):
    """For people and programs; keys are added at will, and none is taken away."""

    id: int
    answer: dict[str, Any]


class Seen(msgspec.Struct, array_like=True):
    """One lookup: when, by a clock that only grows, for whom, and what it asked for and found."""

    at_ms: int
    engine: str
    request: str
    namespace: int
    group: int
    block_tokens: int
    tokens: int
    hits: int
    hashes: list[bytes]


class Watched(msgspec.Struct, tag="watched", array_like=True):
    """`next` is what to ask for next, `lost` lookups before these ones came too fast to be kept. `more` are here."""

    id: int
    next: int
    lost: int
    more: bool
    lookups: list[Seen]


class Error(msgspec.Struct, tag="error", array_like=True):
    """`code` names a class of errors.py; `id` is 0 where the request could not be read.

    Both sides log the message, and names that others chose are in it: it is made one line, when sent and when received.
    """

    id: int
    code: str
    message: str

    def __post_init__(self) -> None:
        self.code, self.message = escaped(self.code), escaped(self.message)


Request = (
    Attach
    | Detach
    | Acquire
    | Release
    | Reserve
    | Settle
    | Distrust
    | Ping
    | Stats
    | Clear
    | Restate
    | Fence
    | Tell
    | Remark
    | Why
    | Watch
)
Reply = (
    Attached
    | Acquired
    | Reserved
    | Settled
    | Distrusted
    | Pong
    | Report
    | Cleared
    | Restated
    | Fenced
    | Explained
    | Watched
    | Error
)
DoorMessage = Hello | Welcome | Error

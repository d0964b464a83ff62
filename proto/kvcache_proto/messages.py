"""The messages, in the order in which an engine uses them. PROTOCOL.md is the normative text.

Every request over ZeroMQ begins with `id`, which the client chooses and the reply repeats, and with `token`, from the
handshake. A field is never removed or moved; a new one goes last and has a default.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvcache_proto.counts import MAX_NAMES
from kvcache_proto.text import escaped
from kvcache_proto.types import (
    MAX_BLOCKS,
    MAX_HASH_BYTES,
    MAX_HASHES,
    MAX_NAME,
    MAX_SHARDS,
    NamespaceSpec,
    PoolGeometry,
)

PROTOCOL_VERSION = 3
OLDEST_VERSION = 3
SPOKEN = (
    f"protocol {PROTOCOL_VERSION}"
    if OLDEST_VERSION == PROTOCOL_VERSION
    else (f"protocol {OLDEST_VERSION} to {PROTOCOL_VERSION}")
)

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]  # the daemon remembers it, so it is bounded when it is read
Most = msgspec.Meta(max_length=MAX_HASHES)  # reading the millions that fit into a frame would block the daemon
MAX_NOTES = 4096  # per message: reading one takes as long as many hashes
MAX_SECONDS = 30 * 86_400.0  # of a retention
MAX_JOBS = 4096  # of each kind in a message
# When a block is written to a tier: requested a second time; stored; about to be evicted, if it was ever found.
SECOND, THROUGH, AHEAD = WRITE_POLICIES = ("second", "through", "ahead")
Outcomes = Annotated[list[tuple[int, bytes]], msgspec.Meta(max_length=MAX_JOBS)]  # a job's number, a byte per block
Shards = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_SHARDS)]
# Twice as many as a request may have, so that the error for one too many can contain the request's id.
Hashes = Annotated[list[bytes], msgspec.Meta(max_length=2 * MAX_HASHES)]


# The handshake: one Hello, one Welcome or Error, then silence until one side ends.


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

    `ceiling_bytes` limits what this engine's saves may occupy; 0 leaves the limit unchanged.
    """

    id: int
    token: bytes
    spec: NamespaceSpec
    shards: Shards = ()
    ceiling_bytes: int = 0


class Detach(msgspec.Struct, tag="detach", array_like=True):
    """Leave a namespace. It has no reply. Reads and writes in progress continue."""

    id: int
    token: bytes
    namespace: int


class Acquire(msgspec.Struct, tag="acquire", array_like=True):
    """Look up the longest cached prefix of `hashes`; with `pin`, take a lease; with `verify`, also return checksums.

    In a namespace with tails, a lookup of group 0 is for all groups: the longest prefix after which the engine can
    continue; it needs no blocks of tails before number `start`.

    For a later `Why`: `request` is the engine's name for the request, `tokens` the length of its prompt, `salted`
    whether its hashes contain a salt. A lookup without a name is not remembered.
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
    start: int = 0


class Release(msgspec.Struct, tag="release", array_like=True):
    """End leases. It has no reply; an unknown lease is counted and ignored."""

    id: int
    token: bytes
    leases: Annotated[list[int], Most]


class Run(msgspec.Struct, array_like=True):
    """Blocks of one chain, each the child of the one before; `parent` is the parent of the first, None for a root.

    In a tail, each is the child of the block of group 0 that has the same hash, and `parent` is None. `group` is the
    number of the blocks' group; if it is 0, `Reserve.group` is.
    """

    hashes: Hashes
    parent: bytes | None = None
    group: int = 0


class Reserve(msgspec.Struct, tag="reserve", array_like=True):
    """Reserve space to write runs of blocks: one reservation for all requests of an engine's step."""

    id: int
    token: bytes
    namespace: int
    runs: Annotated[list[Run], msgspec.Meta(max_length=MAX_BLOCKS)]
    group: int = 0


class Settle(msgspec.Struct, tag="settle", array_like=True):
    """Report the outcome of `shards` of the granted blocks at `positions`; no positions means all of them.

    `outcome` is an Outcome. A writer settles its own shards. The session that reserved may settle any shard as
    NEVER_STARTED, but only while it has not passed the slots to the writers.

    `sums` are the checksums of the committed shards, SUM_BYTES per shard, position after position; empty if the writer
    computed none.
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
    """Report that the blocks in `slots` (concatenated references) do not contain the stored bytes.

    `finding` is a Finding. The blocks and all their descendants are forgotten.
    """

    id: int
    token: bytes
    region: bytes
    slots: bytes
    shard: int
    finding: int


class Note(msgspec.Struct, array_like=True):
    """A note of the engine: the cause for which it made no lookup for `request`, or did not save its blocks `hashes`.

    `cause` is a word of lower-case letters and underscores, `age_ms` the time since then.
    """

    request: Name
    cause: Name
    age_ms: int = 0
    hashes: Hashes = []


class Remark(msgspec.Struct, tag="remark", array_like=True):
    """Notes on requests, for a later `Why`. It has no reply; invalid notes are counted."""

    id: int
    token: bytes
    namespace: int
    notes: Annotated[list[Note], msgspec.Meta(max_length=MAX_NOTES)]
    group: int = 0


class Retain(msgspec.Struct, tag="retain", array_like=True):
    """Keep `hashes`, a chain from its root on, from being evicted for `seconds`, within the engine's quota.

    Blocks that are not cached yet are kept once they are. Blocks that do not fit are refused. `request` is the engine's
    name for the request, for a later `Why`.
    """

    id: int
    token: bytes
    namespace: int
    hashes: Hashes
    seconds: float
    group: int = 0
    request: Name = ""


class Drop(msgspec.Struct, tag="drop", array_like=True):
    """Report that the end of the chain `hashes` is not needed again: its blocks that are not shared are evicted first.

    The first `after` blocks stay as they are.
    """

    id: int
    token: bytes
    namespace: int
    hashes: Hashes
    after: int = 0
    group: int = 0
    request: Name = ""


class Pin(msgspec.Struct, tag="pin", array_like=True):
    """For operators: keep `hashes`, a chain from its root on, until `Unpin`. `namespace` is an id."""

    id: int
    token: bytes
    namespace: str
    hashes: Hashes
    group: int = 0
    label: Name = ""


class Unpin(msgspec.Struct, tag="unpin", array_like=True):
    """For operators: end the pin with that number, or all pins if it is 0."""

    id: int
    token: bytes
    pin: int = 0


class Chain(msgspec.Struct, tag="chain", array_like=True):
    """For operators: ask for the hashes of a request's prompt, or of the cached chain that ends in a block.

    Either `request` is the name of a request, or a part that no other name contains; or `hash` is a block's hash, or
    its last bytes, at least 8. `namespace` is an id, "" for any. It has lower priority, as Stats has.
    """

    id: int
    token: bytes
    request: Name = ""
    hash: Annotated[bytes, msgspec.Meta(max_length=MAX_HASH_BYTES)] = b""
    namespace: str = ""


class Ping(msgspec.Struct, tag="ping", array_like=True):
    id: int
    token: bytes


class Stats(msgspec.Struct, tag="stats", array_like=True):
    """Ask for the daemon's figures. It has lower priority: Unavailable if another such request of the session waits."""

    id: int
    token: bytes


class Clear(msgspec.Struct, tag="clear", array_like=True):
    """Forget every visible block of the namespace with that id, or of all if `namespace` is empty."""

    id: int
    token: bytes
    namespace: str = ""


class Restate(msgspec.Struct, tag="restate", array_like=True):
    """Report the leases that a resumed session still holds, and the reservations that it received.

    `leases` are [lease, reference of its last block, followed by those of its tails' blocks]; `heard` is the highest
    reservation that the session received. Later ones are given back.
    """

    id: int
    token: bytes
    heard: int
    leases: Annotated[list[tuple[int, bytes]], Most] = []


class Fence(msgspec.Struct, tag="fence", array_like=True):
    """End a session whose process is alive but does not reconnect. The operator asserts that it never writes again."""

    id: int
    token: bytes
    session: int


class Tell(msgspec.Struct, tag="tell", array_like=True):
    """Report the state of the client. It has no reply.

    `breaker` is a Breaker; `counts` has the client's counts, by name, since its last report.
    """

    id: int
    token: bytes
    breaker: int
    counts: Annotated[dict[str, int], msgspec.Meta(max_length=2 * MAX_NAMES)] = {}


class Why(msgspec.Struct, tag="why", array_like=True):
    """Ask why a request had no hit. `request` is its name, or a part that no other name contains.

    It has lower priority, as Stats has.
    """

    id: int
    token: bytes
    request: Name


class Watch(msgspec.Struct, tag="watch", array_like=True):
    """Ask for the lookups from number `since` on; 0 means from now on. They are kept only while a client asks."""

    id: int
    token: bytes
    since: int = 0


class Work(msgspec.Struct, tag="work", array_like=True):
    """Ask for work as the tier `tier`: answered by Jobs once there is some, or after half a second.

    Only sessions of the daemon's own user may be tiers. `batch_bytes` is the tier's preferred size of a write; `writes`
    is the policy by which it wants blocks, one of WRITE_POLICIES. If `writes_off` is not empty, it is the reason that
    the tier gets nothing to write until it asks for work without it; `removals_off` is the reason that wrong values
    stay there.
    """

    id: int
    token: bytes
    tier: Name
    batch_bytes: int
    writes: Name = "second"
    writes_off: Name = ""
    removals_off: Name = ""


class Worked(msgspec.Struct, tag="worked", array_like=True):
    """Report the outcomes of jobs, by their numbers. It has no reply; unknown numbers are counted.

    Each answer has a byte per block of its job: in `found` it is 1 if the tier has the block of a Look, in `brought` if
    the block of a Bring is cached or being written, in `written` if the tier has the block of a WriteOut. If `off` is
    not empty, it is the reason that the tier gets no further jobs until it asks for some, and `writes_off` is that of
    the next Work, which may be late.
    """

    id: int
    token: bytes
    found: Outcomes = []
    brought: Outcomes = []
    written: Outcomes = []
    off: Name = ""
    writes_off: Name = ""


# Replies.


class Attached(msgspec.Struct, tag="attached", array_like=True):
    id: int
    namespace: int


class Acquired(msgspec.Struct, tag="acquired", array_like=True):
    """`hits` is the number of blocks found from the first hash on, `slots` has their references.

    In a namespace with tails, `slots` has the references of group 0, if that is no tail itself, and then, tail after
    tail, those of the last `min(needed(hits), hits - start)` blocks of the hits; none if `hits` is not above `start`.

    `lease` is 0 if nothing is pinned. After the hits, `pending` blocks are being written; `withheld` blocks are cached,
    but the engine's quota does not allow it to pin them until it has released others. `sums` has the checksum of each
    shard of each reference, SUM_BYTES each, if it was requested; 0 means none.

    A tier is bringing the `coming` blocks after the hits, some of which may be pending, in about `eta_ms`. If only
    `eta_ms` is not 0, tiers are being asked, and will have answered by then.

    In a namespace with tails, the engine could continue after `junction` blocks, more than are cached, if the tails had
    the blocks for that; 0 if there is no such number.
    """

    id: int
    lease: int
    hits: int
    pending: int
    slots: bytes
    withheld: int = 0
    sums: bytes = b""
    coming: int = 0
    eta_ms: int = 0
    junction: int = 0


class Reserved(msgspec.Struct, tag="reserved", array_like=True):
    """`answers` has one Refusal per hash, run after run; `slots` has the references of the granted blocks, in order.

    `reservation` is 0 if nothing was granted.
    """

    id: int
    reservation: int
    answers: bytes
    slots: bytes


class Settled(msgspec.Struct, tag="settled", array_like=True):
    """One Verdict per settled block, in the order of the positions."""

    id: int
    verdicts: bytes


class Distrusted(msgspec.Struct, tag="distrusted", array_like=True):
    """`blocks` is the number of forgotten blocks; `writers` has the (engine, session) per slot that stored the shard.

    It is ("", 0) if the slot held another block by then.
    """

    id: int
    blocks: int
    writers: list[tuple[str, int]]


class Retained(msgspec.Struct, tag="retained", array_like=True):
    """`blocks` of the chain are kept from now on; `refused` is the reason that no more of the cached ones are, "" if
    all are."""

    id: int
    blocks: int
    refused: str = ""


class Dropped(msgspec.Struct, tag="dropped", array_like=True):
    """`blocks` are evicted before all others."""

    id: int
    blocks: int


class Pinned(msgspec.Struct, tag="pinned", array_like=True):
    """`pin` is the number of the pin; `blocks` of its chain are cached, and kept from now on."""

    id: int
    pin: int
    blocks: int


class Unpinned(msgspec.Struct, tag="unpinned", array_like=True):
    """`pins` is the number of ended pins."""

    id: int
    pins: int


class Chained(msgspec.Struct, tag="chained", array_like=True):
    """`matches` are the names of the requests, or the namespaces of the blocks, that were meant, at most ten.

    If there is exactly one, the other fields describe it: `cached` of its `hashes` are cached.
    """

    id: int
    matches: list[str]
    namespace: str = ""
    model: str = ""
    group: int = 0
    block_tokens: int = 0
    cached: int = 0
    hashes: list[bytes] = []


class Pong(msgspec.Struct, tag="pong", array_like=True):
    id: int


class Report(msgspec.Struct, tag="report", array_like=True):
    """`stats` is a map of the figures in `status`; keys may be added."""

    id: int
    stats: msgspec.Raw


class Cleared(msgspec.Struct, tag="cleared", array_like=True):
    id: int
    blocks: int


class Restated(msgspec.Struct, tag="restated", array_like=True):
    """`lost` are the leases that could not be restored."""

    id: int
    lost: list[int] = []


class Fenced(msgspec.Struct, tag="fenced", array_like=True):
    """`reservations` is the number of the session's reservations given up; their slots are in quarantine."""

    id: int
    reservations: int


class Explained(msgspec.Struct, tag="explained", array_like=True):
    """`answer` is a map. Keys may be added, and are never removed."""

    id: int
    answer: msgspec.Raw


class Seen(msgspec.Struct, array_like=True):
    """One lookup: its time (by a monotonic clock), engine and request, and the blocks requested and found."""

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
    """`next` is the next value for `since`; `lost` lookups before these could not be kept; `more` are available."""

    id: int
    next: int
    lost: int
    more: bool
    lookups: list[Seen]


class Look(msgspec.Struct, array_like=True):
    """Report which blocks of a chain the tier has. `namespace` is an id."""

    number: int
    namespace: str
    group: int
    hashes: list[bytes]


class Bring(msgspec.Struct, array_like=True):
    """Bring blocks of a chain into the region, below `parent`, None for a root, by a reservation."""

    number: int
    namespace: str
    group: int
    parent: bytes | None
    hashes: list[bytes]


class WriteOut(msgspec.Struct, array_like=True):
    """Store blocks in the tier. They are leased until the job is reported.

    `slots` has their references, `sums` the checksum of each shard, SUM_BYTES each, 0 for none.
    """

    number: int
    namespace: str
    group: int
    hashes: list[bytes]
    slots: bytes
    sums: bytes


class Jobs(msgspec.Struct, tag="jobs", array_like=True):
    """Work for a tier; `specs` are those of the jobs' namespaces that it has not attached."""

    id: int
    specs: list[NamespaceSpec] = []
    looks: list[Look] = []
    brings: list[Bring] = []
    writes: list[WriteOut] = []


class Error(msgspec.Struct, tag="error", array_like=True):
    """`code` names a class of errors.py; `id` is 0 if the request could not be read.

    Both sides log the message, which may contain names chosen by other clients. So it is turned into one line of
    printable text, both when it is sent and when it is received.
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
    | Retain
    | Drop
    | Pin
    | Unpin
    | Chain
    | Work
    | Worked
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
    | Retained
    | Dropped
    | Pinned
    | Unpinned
    | Chained
    | Jobs
    | Error
)
DoorMessage = Hello | Welcome | Error

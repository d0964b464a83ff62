"""The messages, in the order in which an engine uses them. PROTOCOL.md is the normative text.

The tag of a message is its class's name in snake case. A field is never removed or moved; a new one goes last and has
a default.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Annotated, Any

import msgspec

from kvcache_proto.counts import MAX_NAMES
from kvcache_proto.text import escaped, snake_case
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
SPOKEN = f"protocol {OLDEST_VERSION}" + (f" to {PROTOCOL_VERSION}" if PROTOCOL_VERSION > OLDEST_VERSION else "")

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


class Hello(msgspec.Struct, tag=snake_case, array_like=True, frozen=True):
    version: int
    engine: str
    label: str = ""
    client: str = ""
    resume: int = 0
    secret: bytes = b""


class Welcome(msgspec.Struct, tag=snake_case, array_like=True, frozen=True):
    version: int
    session: int
    token: bytes
    geometry: PoolGeometry
    daemon: str = ""
    resumed: bool = False

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "daemon", escaped(self.daemon))


# Requests.


class Request(msgspec.Struct, tag=snake_case, array_like=True):
    """The client chooses `id`, which the reply repeats; `token` is from the handshake."""

    id: int
    token: bytes


class Attach(Request):
    """Join a namespace as the writer and reader of `shards`; a scheduler joins with none."""

    spec: NamespaceSpec
    shards: Shards = ()
    ceiling_bytes: int = 0  # limit of what this engine's saves may occupy; 0 leaves it unchanged
    reports_leaving: bool = False  # it reports blocks that its device is about to evict: see Run


class Detach(Request):
    """Leave a namespace. It has no reply. Reads and writes in progress continue."""

    namespace: int


class Acquire(Request):
    """Look up the longest cached prefix of `hashes`; with `pin`, take a lease; with `verify`, also return checksums.

    Without a lease, `request` waits in the engine's queue: its blocks are evicted last until it is looked up with one.
    Without `hashes`, it waits no more.

    In a namespace with suffix groups, a lookup of group 0 is for all groups: the longest prefix after which the engine
    can continue. The engine has the first `start` blocks itself: it needs no blocks of suffix groups before them.

    It may also end with a tail: a block that contains only the first tokens of the next one. `tails` are the names of
    those that would do, `tails_per_block` for each number of blocks before them from 0 on, shortest first. The daemon
    knows a tail as one more block of the chain.
    """

    namespace: int
    hashes: Hashes
    group: int = 0
    pin: bool = True
    verify: bool = False
    request: Name = ""  # the engine's name, for a later `Why`: a lookup without one is not remembered
    tokens: int = 0  # of the request's prompt
    salted: bool = False  # the hashes contain a salt
    start: int = 0
    tails: Hashes = []
    tails_per_block: int = 0


class Release(Request):
    """End leases. It has no reply; an unknown lease is counted and ignored."""

    leases: Annotated[list[int], Most]


class Run(msgspec.Struct, array_like=True):
    """Blocks of one chain, each the child of the one before.

    In a suffix group, each is the child of the block of group 0 that has the same hash, and `parent` is None.
    """

    hashes: Hashes
    parent: bytes | None = None  # of the first; None for a root
    group: int = 0  # 0: that of the Reserve
    leaving: int = 0  # number of blocks at the end that the engine's device is about to evict
    idle_ms: int = 0  # since the last of these was used there
    found: int = 0  # number of requests that have found it there


class Reserve(Request):
    """Reserve space to write runs of blocks: one reservation for all requests of an engine's step."""

    namespace: int
    runs: Annotated[list[Run], msgspec.Meta(max_length=MAX_BLOCKS)]
    group: int = 0


class ReportDevice(Request):
    """Report what is on the engine's device while no request uses it. It has no reply.

    `kept` are the last blocks of chains that are there as a whole; `evicted` were such blocks, and are no longer there
    although no `Reserve` has said that they leave.
    """

    namespace: int
    kept: Hashes = []
    evicted: Hashes = []
    group: int = 0


class Settle(Request):
    """Report the outcome of `shards` of the granted blocks at `positions`; no positions means all of them.

    A writer settles its own shards. The session that reserved may settle any shard as NEVER_STARTED, but only while it
    has not passed the slots to the writers.
    """

    region: bytes
    reservation: int
    shards: Shards
    outcome: int  # an Outcome
    positions: Annotated[list[int], Most] = []
    sums: bytes = b""  # SUM_BYTES per committed shard, position after position; empty if the writer computed none


class Invalidate(Request):
    """Report that blocks do not contain the stored bytes: they and all their descendants are forgotten."""

    region: bytes
    slots: bytes  # concatenated references
    shard: int
    finding: int  # a Finding


class MissNote(msgspec.Struct, array_like=True):
    """The reason that the engine made no lookup for `request`, or did not save its blocks `hashes`."""

    request: Name
    cause: Name  # a word of lower-case letters and underscores
    age_ms: int = 0  # since then
    hashes: Hashes = []


class ReportMisses(Request):
    """Notes on requests, for a later `Why`. It has no reply; invalid notes are counted."""

    namespace: int
    notes: Annotated[list[MissNote], msgspec.Meta(max_length=MAX_NOTES)]
    group: int = 0


class Retain(Request):
    """Keep `hashes`, a chain from its root on, from being evicted for `seconds`, within the engine's quota.

    Blocks that are not cached yet are kept once they are. Blocks that do not fit are refused.
    """

    namespace: int
    hashes: Hashes
    seconds: float
    group: int = 0
    request: Name = ""


class Drop(Request):
    """Report that the chain `hashes` is not needed again after its first `after` blocks: those that no other chain
    shares are evicted first."""

    namespace: int
    hashes: Hashes
    after: int = 0
    group: int = 0
    request: Name = ""


class Pin(Request):
    """For operators: keep `hashes`, a chain from its root on, until `Unpin`."""

    namespace: str  # its id
    hashes: Hashes
    group: int = 0
    label: Name = ""


class Unpin(Request):
    """For operators: end a pin, or all if `pin` is 0."""

    pin: int = 0


class Chain(Request):
    """For operators: ask for the hashes of a request's prompt, or of the cached chain that ends in a block.

    It has lower priority, as Stats has.
    """

    request: Name = ""  # a name, or a part that no other name contains
    hash: Annotated[bytes, msgspec.Meta(max_length=MAX_HASH_BYTES)] = b""  # or its last bytes, at least 8
    namespace: str = ""  # an id; "" for any


class Ping(Request):
    """Ask for a Pong."""


class Stats(Request):
    """Ask for the daemon's figures. It has lower priority: Unavailable if another such request of the session waits."""


class Clear(Request):
    """Forget every visible block of the namespace with that id, or of all if `namespace` is empty."""

    namespace: str = ""


class Reclaim(Request):
    """Report what a resumed session still holds."""

    heard: int  # the highest reservation that it received: later ones are given back
    # [lease, reference of its last block, followed by those of its suffix groups' blocks]
    leases: Annotated[list[tuple[int, bytes]], Most] = []


class Fence(Request):
    """End a session whose process is alive but does not reconnect. The operator asserts that it never writes again."""

    session: int


class ReportClient(Request):
    """Report the state of the client. It has no reply."""

    breaker: int  # a Breaker
    counts: Annotated[dict[str, int], msgspec.Meta(max_length=2 * MAX_NAMES)] = {}  # by name, since the last report


class Why(Request):
    """Ask why a request had no hit. It has lower priority, as Stats has."""

    request: Name  # as in Chain


class TraceLookups(Request):
    """Ask for the lookups from number `since` on; 0 means from now on. They are kept only while a client asks."""

    since: int = 0


class PollJobs(Request):
    """Ask for work as the tier `tier`: answered by Jobs once there is some, or after half a second.

    Only sessions of the daemon's own user may be tiers.
    """

    tier: Name
    batch_bytes: int  # the preferred size of a write
    writes: Name = "second"  # one of WRITE_POLICIES
    writes_off: Name = ""  # why the tier gets nothing to write until it asks for work without a reason
    removals_off: Name = ""  # why wrong values stay in the tier


class JobResults(Request):
    """Report the outcomes of jobs, by their numbers, a byte per block. It has no reply; unknown numbers are counted."""

    exists: Outcomes = []  # of an Exists: 1 if the tier has the block
    fetched: Outcomes = []  # of a Fetch: 1 if the block is cached or being written
    stored: Outcomes = []  # of a Store: 1 if the tier has the block
    off: Name = ""  # why the tier gets no further jobs until it asks for some
    writes_off: Name = ""  # that of the next PollJobs, which may be late


# Replies.


class Reply(msgspec.Struct, tag=snake_case, array_like=True):
    """The answer to the request with the same `id`."""

    id: int


class Attached(Reply):
    namespace: int


class Acquired(Reply):
    """The blocks of the longest cached prefix.

    In a namespace with suffix groups, `slots` has the references of group 0, if that is no suffix group itself, and
    then, suffix group after suffix group, those of the last `min(needed(hits), hits - start)` blocks of the hits; none
    if `hits` is not above `start`.

    A tier is bringing the `coming` blocks after the hits, some of which may be pending, in about `eta_ms`. If only
    `eta_ms` is not 0, tiers are being asked, and will have answered by then.
    """

    lease: int  # 0 if nothing is pinned
    hits: int  # blocks found, from the first hash on
    pending: int  # blocks after the hits that are being written
    slots: bytes  # references of the hits
    withheld: int = 0  # cached blocks after the hits that its quota keeps the engine from pinning
    sums: bytes = b""  # if requested, SUM_BYTES per shard of each reference, 0 for none
    coming: int = 0
    eta_ms: int = 0
    divergence: int = 0  # blocks, more than `hits`, after which it could continue if suffix groups had theirs; or 0
    tail: int = 0  # the number of the tail that is the last of the hits, 1 for the first; 0 for none


class Reserved(Reply):
    reservation: int  # 0 if nothing was granted
    answers: bytes  # one Refusal per hash, run after run
    slots: bytes  # references of the granted blocks, in order


class Settled(Reply):
    """One Verdict per settled block, in the order of the positions."""

    verdicts: bytes


class Invalidated(Reply):
    blocks: int  # that were forgotten
    writers: list[tuple[str, int]]  # (engine, session) per slot that stored the shard; ("", 0) if it held another block


class Retained(Reply):
    """`blocks` of the chain are kept from now on."""

    blocks: int
    refused: str = ""  # why no more of the cached ones are kept; "" if all are


class Dropped(Reply):
    """`blocks` are evicted before all others."""

    blocks: int


class Pinned(Reply):
    """`blocks` of the chain are cached, and kept from now on by the pin with the number `pin`."""

    pin: int
    blocks: int


class Unpinned(Reply):
    """`pins` is the number of ended pins."""

    pins: int


class Chained(Reply):
    """If there is exactly one match, the other fields describe it."""

    matches: list[str]  # names of the requests, or namespaces of the blocks, that were meant, at most ten
    namespace: str = ""
    model: str = ""
    group: int = 0
    block_tokens: int = 0
    cached: int = 0  # of the hashes
    hashes: list[bytes] = []


class Pong(Reply):
    """The answer to Ping."""


class Report(Reply):
    """`stats` is a map of the figures in `status`; keys may be added."""

    stats: msgspec.Raw


class Cleared(Reply):
    blocks: int


class Reclaimed(Reply):
    lost: list[int] = []  # leases that could not be restored


class Fenced(Reply):
    reservations: int  # that were given up: their slots are in quarantine


class Explained(Reply):
    """`answer` is a map. Keys may be added, and are never removed."""

    answer: msgspec.Raw


class LookupRecord(msgspec.Struct, array_like=True):
    """One lookup: the blocks requested and found."""

    at_ms: int  # by a monotonic clock
    engine: str
    request: str
    namespace: int
    group: int
    block_tokens: int
    tokens: int
    hits: int
    hashes: list[bytes]


class TracedLookups(Reply):
    next: int  # the next value for `since`
    lost: int  # lookups before these that could not be kept
    more: bool  # whether more are available
    lookups: list[LookupRecord]


class Exists(msgspec.Struct, array_like=True):
    """Report which blocks of a chain the tier has. `namespace` is an id."""

    number: int
    namespace: str
    group: int
    hashes: list[bytes]


class Fetch(msgspec.Struct, array_like=True):
    """Bring blocks of a chain into the region, below `parent`, None for a root, by a reservation."""

    number: int
    namespace: str
    group: int
    parent: bytes | None
    hashes: list[bytes]


class Store(msgspec.Struct, array_like=True):
    """Store blocks in the tier. They are leased until the job is reported."""

    number: int
    namespace: str
    group: int
    hashes: list[bytes]
    slots: bytes  # references
    sums: bytes  # SUM_BYTES per shard, 0 for none


class Jobs(Reply):
    """Work for a tier."""

    specs: list[NamespaceSpec] = []  # of the jobs' namespaces that it has not attached
    exists: list[Exists] = []
    fetches: list[Fetch] = []
    stores: list[Store] = []


class Error(Reply):
    """`code` names a class of errors.py; `id` is 0 if the request could not be read.

    Both sides log the message, which may contain names chosen by other clients. So it is turned into one line of
    printable text, both when it is sent and when it is received.
    """

    code: str
    message: str

    def __post_init__(self) -> None:
        self.code, self.message = escaped(self.code), escaped(self.message)


HandshakeMessage = Hello | Welcome | Error
REQUESTS: Any = reduce(or_, Request.__subclasses__())  # for decoders: a message's tag selects its class
REPLIES: Any = reduce(or_, Reply.__subclasses__())

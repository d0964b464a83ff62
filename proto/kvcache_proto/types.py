"""The types that client and daemon share. Sizes are in bytes unless a name says otherwise."""

from __future__ import annotations

import enum
import hashlib
import secrets
import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvcache_proto.errors import BadArgument, GeometryMismatch

BlockHash = bytes

FULL, SUFFIX = "full", "suffix"  # kinds of groups
MAX_SHARDS = 64
MAX_GROUPS = 16
MAX_WINDOW_BLOCKS = 8192  # blocks of all suffix groups together: a lookup pins up to this many
MAX_BLOCK_TOKENS = 1 << 20
MAX_SHARD_BYTES = 1 << 40
MAX_HASHES = 16_384  # of a prompt in one lookup
MAX_BLOCKS = 256  # of one reservation
MIN_HASH_BYTES, MAX_HASH_BYTES = 8, 32
MAX_NAME = 256
UNNAMED = "unnamed-"  # prefix of the name of weights that only one engine has; such a name is used once
MAX_IDENTITY = 4096  # characters; `status` contains all of them, in one frame

_REF = struct.Struct("<QQ")
REF_BYTES = _REF.size
pack_ref = _REF.pack  # the fields of a BlockRef: creating the BlockRef would take longer than packing
SUM_BYTES = 8  # of a shard's checksum: XXH3, 64 bits, little-endian; 0 means none


class BlockRef(NamedTuple):
    """The offset of a block's first page in the region, and the generation by which a reader checks that the block is
    still there. If it has several runs of pages, its row has the rest."""

    offset: int
    generation: int

    def pack(self) -> bytes:
        return pack_ref(*self)

    @classmethod
    def unpack(cls, packed: bytes) -> BlockRef:
        return cls(*_REF.unpack(packed))


def unpack_refs(packed: bytes) -> list[BlockRef]:
    """Return the references in `packed`, `REF_BYTES` per reference."""
    return [BlockRef(*fields) for fields in _REF.iter_unpack(packed)]


class Resume(NamedTuple):
    """What an engine needs to continue after hits, in a namespace with suffix groups: see `Acquire`."""

    start: int = 0
    tails: Sequence[bytes] = ()
    tails_per_block: int = 0


FROM_ROOT = Resume()


class Refusal(enum.IntEnum):
    """The answer of `Reserve` for one hash. All but GRANTED are counted by name."""

    GRANTED = 0
    PRESENT = 1
    IN_FLIGHT = 2
    NO_PARENT = 3
    NO_SPACE = 4
    QUOTA = 5


class Outcome(enum.IntEnum):
    """The outcome of writing one shard of a slot."""

    COMMITTED = 0  # the bytes are in the region
    FAILED = 1  # they are not, and no copy is still writing them
    NEVER_STARTED = 2  # no copy has begun to write them, and none will


class Verdict(enum.IntEnum):
    """The answer of `Settle` for one block."""

    VISIBLE = 0  # complete, and found by lookups from now on
    PARTIAL = 1  # other shards are not settled yet
    HIDDEN = 2  # complete, and becomes visible with its parent
    FAILED = 3  # one of its shards failed, was never started, or is dead
    SUPERSEDED = 4  # it took too long, and another writer now has the hash
    ORPHANED = 5  # an ancestor failed, so no lookup could reach it


class Finding(enum.IntEnum):
    """The fault of a block."""

    CORRUPT = 0  # its bytes do not match the checksum of its writer
    DIFFERENT = 1  # its bytes differ from those computed again from its tokens


class Breaker(enum.IntEnum):
    """Whether a client sends requests to the daemon."""

    CLOSED = 0
    OPEN = 1  # a deadline was missed, and no ping has been answered in time since


class GroupSpec(msgspec.Struct, frozen=True, array_like=True, omit_defaults=False):
    """One KV cache group: the tokens of a block, and the size of each of its shards.

    `shard_bytes` is an int for one shard, or one int per shard. To continue after a prefix, an engine needs all its
    blocks of a group of the kind FULL, and the last ones of a SUFFIX group: see `needed`. If a FULL group
    `needs_next_block`, the block after the prefix must be cached, too: only that shows that the last block of the
    prefix is right.
    Raises BadArgument.
    """

    block_tokens: int
    shard_bytes: int | Sequence[int]
    kind: str = FULL
    window_blocks: int = 0
    chunk_blocks: int = 0
    needs_next_block: bool = False

    def __post_init__(self) -> None:
        shards = self.shard_bytes
        if not isinstance(shards, int):
            msgspec.structs.force_setattr(self, "shard_bytes", tuple(shards))
        if self.kind not in (FULL, SUFFIX):
            raise BadArgument(f"group kind {self.kind!r}: this version knows {FULL!r} and {SUFFIX!r}")
        most = MAX_WINDOW_BLOCKS if self.kind == SUFFIX else 0
        if not _is_int(self.window_blocks) or not (self.kind == SUFFIX) <= self.window_blocks <= most:
            raise BadArgument(
                f"window_blocks {self.window_blocks!r}: 1 to {MAX_WINDOW_BLOCKS} for {SUFFIX!r}, 0 for {FULL!r}"
            )
        most = MAX_BLOCK_TOKENS if self.kind == SUFFIX else 0
        if not _is_int(self.chunk_blocks) or not 0 <= self.chunk_blocks <= most:
            raise BadArgument(
                f"chunk_blocks {self.chunk_blocks!r}: 0 to {MAX_BLOCK_TOKENS} for {SUFFIX!r}, 0 for {FULL!r}"
            )
        if self.needs_next_block and self.kind != FULL:
            raise BadArgument(f"a group of the kind {self.kind!r} has no needs_next_block, only a {FULL!r} one")
        if not _is_int(self.block_tokens) or not 1 <= self.block_tokens <= MAX_BLOCK_TOKENS:
            raise BadArgument(f"block_tokens {self.block_tokens!r}: 1 to {MAX_BLOCK_TOKENS} tokens")
        if not 1 <= len(self.shards) <= MAX_SHARDS:
            raise BadArgument(f"{len(self.shards)} shards: 1 to {MAX_SHARDS}")
        for size in self.shards:
            if not _is_int(size) or not 1 <= size <= MAX_SHARD_BYTES:
                raise BadArgument(f"shard_bytes {size!r}: 1 to {MAX_SHARD_BYTES} bytes")

    def needed(self, end: int) -> int:
        """Return the number of blocks at the end of the first `end` blocks of a chain that an engine needs to continue.

        For a suffix group: `window_blocks`, which covers a window or a state. With `chunk_blocks`, none before the
        last multiple of it.
        """
        if self.kind == FULL:
            return end
        return min(end % self.chunk_blocks if self.chunk_blocks else end, self.window_blocks)

    @property
    def shards(self) -> tuple[int, ...]:
        return (self.shard_bytes,) if isinstance(self.shard_bytes, int) else tuple(self.shard_bytes)

    @property
    def block_bytes(self) -> int:
        return sum(self.shards)

    def shard_offset(self, shard: int) -> int:
        """Return the offset of `shard` in its slot."""
        return sum(self.shards[:shard])


class NamespaceSpec(msgspec.Struct, frozen=True, array_like=True):
    """The domain in which a block hash is meaningful.

    `model` and `identity` (every fact that makes the bytes of equal hashes differ: dtype, layout, weights, hash seed)
    determine its id. Groups and hash length are its geometry, which must be the same for all sessions that attach.
    Raises BadArgument.
    """

    model: str
    groups: Sequence[GroupSpec]
    identity: dict[str, str] = {}
    hash_bytes: int = 32

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "groups", tuple(self.groups))
        if not self.model or len(self.model) > MAX_NAME:
            raise BadArgument(f"model name of {len(self.model)} characters: 1 to {MAX_NAME}")
        said = sum(len(key) + len(value) for key, value in self.identity.items())
        if said > MAX_IDENTITY:
            raise BadArgument(f"identity of {said} characters: at most {MAX_IDENTITY}; a digest says as much")
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise BadArgument(f"{len(self.groups)} groups: 1 to {MAX_GROUPS}")
        if len({len(group.shards) for group in self.groups}) != 1:
            raise BadArgument("the groups of a namespace have the same number of shards")
        if (blocks := sum(group.window_blocks for group in self.groups)) > MAX_WINDOW_BLOCKS:
            raise BadArgument(f"suffix groups of {blocks} blocks: at most {MAX_WINDOW_BLOCKS}")
        if self.suffixes and len({group.block_tokens for group in self.groups}) != 1:
            raise BadArgument(f"with groups of the kind {SUFFIX!r}, all groups have the same block_tokens")
        if self.suffixes and any(group.kind == FULL for group in self.groups[1:]):
            raise BadArgument(f"beside groups of the kind {SUFFIX!r}, there is at most one {FULL!r}, the first")
        if not self.suffixes and any(group.needs_next_block for group in self.groups):
            raise BadArgument(f"needs_next_block only beside groups of the kind {SUFFIX!r}")
        if not MIN_HASH_BYTES <= self.hash_bytes <= MAX_HASH_BYTES:
            raise BadArgument(f"hash_bytes {self.hash_bytes}: {MIN_HASH_BYTES} to {MAX_HASH_BYTES}")

    @property
    def id(self) -> str:
        """The first 16 hex digits of a digest of model and identity."""
        named = [self.model, *(part for item in sorted(self.identity.items()) for part in item)]
        return hashlib.sha256(msgspec.msgpack.encode(named)).hexdigest()[:16]

    @property
    def shards(self) -> int:
        return len(self.groups[0].shards)

    @property
    def suffixes(self) -> bool:
        """Whether it has groups of the kind SUFFIX: then one lookup, of group 0, is for all groups."""
        return any(group.kind == SUFFIX for group in self.groups)

    def with_weights(self, weights: str) -> NamespaceSpec:
        """Return the same namespace for the weights named `weights`; "" means those of the checkpoint."""
        return NamespaceSpec(self.model, self.groups, {**self.identity, "weights": weights}, self.hash_bytes)

    def with_unnamed_weights(self) -> NamespaceSpec:
        """Return the same namespace for weights that only this engine has, for as long as it is attached."""
        return self.with_weights(UNNAMED + secrets.token_hex(16))

    @property
    def ephemeral(self) -> bool:
        """Whether no client can attach it again once its members have left: its weights have a random name."""
        return self.identity.get("weights", "").startswith(UNNAMED)

    def check_same_geometry(self, other: NamespaceSpec) -> None:
        """Raise GeometryMismatch, which names the first difference, unless `other` has the same geometry."""
        if self.hash_bytes != other.hash_bytes:
            raise GeometryMismatch(f"hashes of {other.hash_bytes} bytes; registered with {self.hash_bytes}")
        if len(self.groups) != len(other.groups):
            raise GeometryMismatch(f"{len(other.groups)} groups; registered with {len(self.groups)}")
        for number, (mine, theirs) in enumerate(zip(self.groups, other.groups, strict=True)):
            for field in ("block_tokens", "shards", "kind", "window_blocks", "chunk_blocks", "needs_next_block"):
                if getattr(mine, field) != getattr(theirs, field):
                    raise GeometryMismatch(
                        f"group {number}: {field} {getattr(theirs, field)}; registered with {getattr(mine, field)}: "
                        f"give it another identity, or clear namespace {self.id} once no session is attached"
                    )


class PoolGeometry(msgspec.Struct, frozen=True, array_like=True):
    """How the region is divided; see region.py."""

    region_id: bytes
    region_bytes: int
    page_bytes: int
    pages: int
    data_offset: int


def check_hashes(hashes: Sequence[bytes], hash_bytes: int) -> None:
    """Raise BadArgument if there are more than MAX_HASHES hashes, or one does not have `hash_bytes` bytes. O(n), in
    C."""
    if len(hashes) > MAX_HASHES:
        raise BadArgument(f"{len(hashes)} hashes in one message: at most {MAX_HASHES}")
    lengths = set(map(len, hashes))
    if lengths and lengths != {hash_bytes}:
        odd = sorted(lengths - {hash_bytes})
        raise BadArgument(f"hash of {odd[0]} bytes: this namespace has hashes of {hash_bytes}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

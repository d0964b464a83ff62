"""The records of the state file, which allow the next daemon to read the region's rows. Pure.

A row refers to its namespace, engine, session and writers by number. A record says what a number means, or that it is
no longer used. The manifest is the result of all records. Neither the region nor its manifest is of use without the
other.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Annotated

import msgspec

from kvcache_proto.errors import KVCacheError, RegionError
from kvcache_proto.types import MAX_GROUPS, MAX_HASH_BYTES, MAX_HASHES, MAX_NAME, NamespaceSpec

MAGIC = b"KVCSTAT1"
_HEAD = struct.Struct("<II")  # bytes of the record, their CRC-32
MAX_RECORD = 1 << 20

# What a record may contain, checked when it is read. Numbers leave room for later ones.
Epoch = Annotated[int, msgspec.Meta(ge=1, lt=1 << 22)]  # numbers of leases begin with it
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]  # of namespaces, engines and tuples of writers
SessionNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Hash = Annotated[bytes, msgspec.Meta(max_length=MAX_HASH_BYTES)]
Secret = Annotated[bytes, msgspec.Meta(max_length=64)]
SESSION_FILE = r"[0-9]{1,20}-[0-9a-f]{8}"
File = Annotated[str, msgspec.Meta(pattern=rf"\A(?:{SESSION_FILE})?\Z")]


class Began(msgspec.Struct, tag="began", array_like=True, frozen=True):
    """A daemon has started. `last` has the last numbers of namespaces, engines, sessions and tuples of writers."""

    region: Secret
    epoch: Epoch
    last: tuple[Number, Number, SessionNumber, Number] = (0, 0, 0, 0)
    daemon: str = ""


class NamespaceMade(msgspec.Struct, tag="namespace", array_like=True, frozen=True):
    number: Number
    spec: NamespaceSpec


class NamespaceForgotten(msgspec.Struct, tag="namespace-gone", array_like=True, frozen=True):
    number: Number


class NamespaceCleared(msgspec.Struct, tag="cleared", array_like=True, frozen=True):
    """READY blocks of the namespace with generations up to that one are no longer cached; 0: no row has one."""

    number: Number
    generation: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class EngineMade(msgspec.Struct, tag="engine", array_like=True, frozen=True):
    number: Number
    name: Name


class EngineForgotten(msgspec.Struct, tag="engine-gone", array_like=True, frozen=True):
    number: Number


class SessionOpened(msgspec.Struct, tag="session", array_like=True, frozen=True):
    """`file` is the name of the session file, which the client keeps locked. A later record of a session replaces this
    one.

    The client of a resumed session may not have received its new token and file yet: then it still holds the `former`
    file and uses the `former` token.
    """

    number: SessionNumber
    engine: Name
    label: Name
    token: Secret
    file: File
    former_token: Secret = b""
    former_file: File = ""
    user: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 32)] = -1  # unknown in records of 0.1

    @property
    def files(self) -> list[str]:
        """The files, one of which is locked while the client lives."""
        return [name for name in (self.file, self.former_file) if name]


class SessionEnded(msgspec.Struct, tag="session-gone", array_like=True, frozen=True):
    number: SessionNumber


class WritersNumbered(msgspec.Struct, tag="crew", array_like=True, frozen=True):
    """`writers[shard]` is the session that writes that shard. It is forgotten when the last of these sessions has
    ended."""

    number: Number
    writers: tuple[SessionNumber, ...]


class PinMade(msgspec.Struct, tag="pin", array_like=True, frozen=True):
    """An operator has pinned a chain of blocks of a namespace, both by number."""

    number: SessionNumber
    namespace: Number
    group: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUPS)]
    hashes: Annotated[list[Hash], msgspec.Meta(max_length=MAX_HASHES)]
    label: Name = ""


class PinEnded(msgspec.Struct, tag="pin-gone", array_like=True, frozen=True):
    number: SessionNumber


Record = (
    Began
    | NamespaceMade
    | NamespaceForgotten
    | NamespaceCleared
    | EngineMade
    | EngineForgotten
    | SessionOpened
    | SessionEnded
    | WritersNumbered
    | PinMade
    | PinEnded
)
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
_encoder = msgspec.msgpack.Encoder()


class Manifest(msgspec.Struct):
    """The result of all records."""

    region: bytes
    epoch: int = 1
    namespaces: dict[int, NamespaceSpec] = {}
    cleared: dict[int, int] = {}  # generations, by namespace
    engines: dict[int, str] = {}
    sessions: dict[int, SessionOpened] = {}
    writers: dict[int, tuple[int, ...]] = {}
    pins: dict[int, PinMade] = {}
    last_namespace: int = 0
    last_engine: int = 0
    last_session: int = 0
    last_writers: int = 0

    def apply(self, record: Record) -> None:
        match record:
            case Began():
                self.region, self.epoch = record.region, record.epoch
                self.last_namespace, self.last_engine, self.last_session, self.last_writers = record.last
            case NamespaceMade():
                self.namespaces[record.number] = record.spec
                self.last_namespace = max(self.last_namespace, record.number)
            case NamespaceForgotten():
                self.namespaces.pop(record.number, None)
                self.cleared.pop(record.number, None)
            case NamespaceCleared():
                self.cleared.pop(record.number, None)
                if record.generation and record.number in self.namespaces:
                    self.cleared[record.number] = record.generation
            case EngineMade():
                self.engines[record.number] = record.name
                self.last_engine = max(self.last_engine, record.number)
            case EngineForgotten():
                self.engines.pop(record.number, None)
            case SessionOpened():
                self.sessions[record.number] = record
                self.last_session = max(self.last_session, record.number)
            case SessionEnded():
                self.sessions.pop(record.number, None)
                self.writers = {
                    number: writers
                    for number, writers in self.writers.items()
                    if any(writer in self.sessions for writer in writers)
                }
            case WritersNumbered():
                self.writers[record.number] = record.writers
                self.last_writers = max(self.last_writers, record.number)
            case PinMade():
                self.pins[record.number] = record
            case PinEnded():
                self.pins.pop(record.number, None)

    def records(self, daemon: str = "") -> Iterator[Record]:
        """Yield the fewest records that result in this manifest."""
        last = (self.last_namespace, self.last_engine, self.last_session, self.last_writers)
        yield Began(self.region, self.epoch, last, daemon)
        for number, spec in self.namespaces.items():
            yield NamespaceMade(number, spec)
        for number, generation in self.cleared.items():
            yield NamespaceCleared(number, generation)
        for number, name in self.engines.items():
            yield EngineMade(number, name)
        yield from self.sessions.values()
        for number, writers in self.writers.items():
            yield WritersNumbered(number, writers)
        yield from self.pins.values()


def pack(record: Record) -> bytes:
    """Return the record's bytes in the file."""
    packed = _encoder.encode(record)
    return _HEAD.pack(len(packed), zlib.crc32(packed)) + packed


def read(data: bytes) -> Manifest:
    """Return the manifest in `data`, the content of a state file.

    An incomplete record at the end, left by a killed daemon, is ignored: no client has seen its effect. Raises
    RegionError if it is not a state file, or is damaged before its end.
    """
    if not data.startswith(MAGIC):
        raise RegionError("not a state file: the magic number is missing")
    manifest, at = Manifest(b"", 0), len(MAGIC)
    while len(data) - at >= _HEAD.size:
        length, checksum = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + length
        packed = data[at + _HEAD.size : end]
        if length > MAX_RECORD or (zlib.crc32(packed) != checksum and end < len(data)):
            raise RegionError(f"torn state file: the record at byte {at} of {len(data)}")
        if end > len(data) or zlib.crc32(packed) != checksum:
            break
        try:
            manifest.apply(_decoder.decode(packed))
        except (msgspec.MsgspecError, KVCacheError) as error:
            raise RegionError(f"state file of another version: the record at byte {at}: {error}") from None
        at = end
    if not manifest.epoch:
        raise RegionError("torn state file: it does not name its region")
    for named in (list(manifest.engines.values()), [spec.id for spec in manifest.namespaces.values()]):
        if len({*named}) < len(named):
            raise RegionError("torn state file: one name has two numbers")
    return manifest

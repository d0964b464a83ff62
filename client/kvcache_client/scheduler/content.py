"""Hashes of blocks, with the digest of further content mixed in if the engine's own hashes only name it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2s
from typing import overload


class ContentHashes(Sequence[bytes]):
    """The hashes `plain` with `content` mixed in, at their length; each is computed once, when it is first read.

    `plain` may grow, and be cut: a computed hash is found by its plain hash, not by its position.
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

"""The interface of a store that is a tier. Other packages ship one as an entry point of `kvcache_server.tiers`.

The entry point's name is the scheme of its URLs, and its object is an `Open`. conformance.py tests a backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple, Protocol

from kvcache_proto.errors import ConfigError
from kvcache_proto.text import escaped

GROUP = "kvcache_server.tiers"
MAX_KEY, MAX_HEADER = 255, 16 << 10  # bytes
MOST_TEXT = 500  # characters of an error that are shown
EXTRAS = ("objects", "redis")  # extras of this package, each named like the module that needs it


class Failed(Exception):
    """The store did not serve the request, and may not for a while: it is full, unreachable or broken.

    As text it is one short line, whatever the store's message: it is logged, and shown to operators.
    """

    def __str__(self) -> str:
        return escaped(super().__str__()[:MOST_TEXT])


class Value(NamedTuple):
    """A `header` of at most 16 KiB, and the bytes of a slot, in the region itself."""

    header: bytes
    data: memoryview


class Backend(Protocol):
    """A store of values by key. A value is never changed: the same key always has the same bytes.

    All methods are called from several threads at once, and may block for some seconds. They raise Failed, and no other
    error, if the store failed; their partial work need not be undone. A value that is not whole counts as missing.
    Bytes that changed in the store need not be noticed: the caller compares checksums.

    Attributes:
        batch_bytes: bytes of data that one call of `put` or `get` should have for the store to be fast.
        counts: failures and losses, by the backend's own names; the tier logs them.
    """

    batch_bytes: int
    counts: Counter[str]

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return, for each value, whether it is there. It may be gone when it is read."""
        ...

    def put(self, keys: Sequence[bytes], values: Sequence[Value]) -> list[bool]:
        """Store values; return, for each, whether it is there now. A value without room is left out."""
        ...

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bytes | None]:
        """Read the data of each value into its buffer; return their headers, None for one that is not there.

        Data of another size than its buffer counts as not there. The buffer of a value that is not there may have been
        written to.
        """
        ...

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove the values that are there."""
        ...

    def lost(self) -> str:
        """Return the reason that the store must be opened again, because its values were removed; "" if it need not be.

        This is called every few seconds. Raises Failed if it could not be opened again, either.
        """
        return ""

    def close(self) -> None:
        """End all work of the backend. No other call follows, and none is running."""
        ...


Open = Callable[[str, memoryview], Backend]  # takes the URL, and the region that all buffers will be parts of
"""Raises ConfigError, or Failed if the store cannot be reached."""


def find_opener(url: str) -> Open:
    """Return the opener of the tier that a URL names. Raises ConfigError."""
    scheme = url.partition(":")[0]
    known = entry_points(group=GROUP)
    if scheme not in known.names:
        kinds = ", ".join(sorted(known.names)) or "none: install the package again, without its metadata there are none"
        raise ConfigError(f"there is no tier {scheme[:32]!r}; the kinds are {kinds}")
    try:
        opener: Open = known[scheme].load()
    except ImportError as error:
        raise ConfigError(f"a tier of {scheme}: {error}{_remedy(known[scheme])}") from error
    return opener


def _remedy(entry: EntryPoint) -> str:
    package, _, module = entry.module.rpartition(".")
    return f"; pip install 'kvcache-server[{module}]'" if package == __package__ and module in EXTRAS else ""

"""The interface to the tiers below the cache. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvcache_proto import messages as m
from kvcache_server.core.index import Account, Block, Group

if TYPE_CHECKING:
    from kvcache_server.core.sessions import Session


class Tiers(Protocol):
    """The tiers below the cache, as it sees them."""

    def looked_up(
        self, session: Session, group: Group, hashes: Sequence[bytes], chain: Sequence[Block], pending: int, now: float
    ) -> tuple[int, int]:
        """Note a lookup that found the blocks `chain`, which `pending` ones follow.

        Returns `coming` and `eta_ms` for its answer.
        """
        ...

    def looked_up_with_suffixes(
        self,
        session: Session,
        group: Group,
        request: m.Acquire,
        hits: int,
        chain: Sequence[Block],
        suffixes: Sequence[Block],
        now: float,
    ) -> tuple[int, int]:
        """The same in a namespace with suffix groups; an engine also needs their blocks `suffixes` to continue after
        `hits` blocks."""
        ...

    def will_store(self, account: Account, cls: int) -> bool:
        """Whether a tier gets a block of class `cls` that an account stores, even if it is not requested again."""
        ...

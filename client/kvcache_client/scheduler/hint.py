"""A hint of a request on its own blocks, as in JSON. Pure; hints.py acts on it.

{"retain": {"seconds": 3600, "tokens": 1024}, "drop": {"after": 1024}, "done": true}
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvcache_proto.errors import BadArgument
from kvcache_proto.messages import MAX_SECONDS

SECONDS = 3600.0  # unless the request has a time


class Retain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keep the whole blocks of the first `tokens` of the prompt, or of all of it."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] = SECONDS
    tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    priority: int | None = None  # ignored


class Rest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All tokens `after` the first ones."""

    after: Annotated[int, msgspec.Meta(ge=0)] = 0


class Hint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`retain` the prompt; `drop` blocks that are used once; the conversation is `done`."""

    retain: Retain | bool = False
    drop: Rest | bool = False
    done: Rest | bool = False

    @property
    def retained(self) -> Retain | None:
        return Retain() if self.retain is True else self.retain or None

    @property
    def unwanted(self) -> Rest | None:
        """The tokens that are not to be saved."""
        given = self.done or self.drop
        return Rest() if given is True else given or None


def parse_hint(value: Any) -> Hint:
    """Return the hint in `value`, a mapping as in JSON. Raises BadArgument, which names the key."""
    try:
        return msgspec.convert(value, Hint)
    except msgspec.ValidationError as error:
        raise BadArgument(str(error).replace("`$.", "`").replace(" - at `$`", "")) from None

"""Almost valid messages, generated from their types: new messages are covered automatically.

A message is drawn as the list that MessagePack has of it, sound or nearly so, then spoilt: its tree, or its bytes.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
from msgspec import inspect

from kvcache_proto.codec import encode

INTS = (0, 1, -1, 2, 7, 63, 64, 255, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63))
TEXTS = ("", "a", "full", "rank 0", "e" * 256, "e" * 257, "\0", "\ud7ff\U0010ffff", "../../etc/passwd", "%s%n")
ODD = (None, True, 1.5, float("nan"), float("inf"), {}, {"a": 1}, (), ((),), "", b"", msgspec.msgpack.Ext(5, b"x"))
# Headers of MessagePack that promise more than follows, and its one unused byte.
PROMISES = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdc\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
)
BYTES = (*PROMISES, b"\xc1", b"\xc0", b"\xcb", b"\x90" * 40, b"\x91" * 2000, b"\x81" * 600, b"\xd4\xff\0", b"\xff" * 9)
MOST = 5 << 20  # longer than what may be sent, shorter than what cuts the sender off


class Maker:
    """Draws messages of one union. `known` gives good values by the name of a field; the rest are made up."""

    def __init__(self, union: Any, draw: random.Random, known: dict[str, list[Any]]) -> None:
        info = inspect.type_info(union)
        self._types = list(info.types) if isinstance(info, inspect.UnionType) else [info]
        self._draw = draw
        self.known = known

    def message(self) -> list[Any]:
        """Return a message that is well formed, and sound as far as `known` goes."""
        made: list[Any] = self._make(self._draw.choice(self._types))
        return made

    def frame(self) -> bytes:
        """Return the bytes of a message: two of five sound, the others spoilt once or a few times."""
        tree, draw = self.message(), self._draw
        way = draw.random()
        if way < 0.4:
            return encode(tree)
        if way < 0.8:
            tree = msgspec.msgpack.decode(encode(tree))  # a copy: what is known stays sound
            for _ in range(draw.choice((1, 1, 1, 2, 5))):
                self._spoil(tree)
            return encode(tree)[:MOST]
        return self.spoil_bytes(encode(tree))

    def _make(self, kind: Any, name: str = "") -> Any:
        draw = self._draw
        if name in self.known and self.known[name] and draw.random() < 0.9:
            return draw.choice(self.known[name])
        if isinstance(kind, inspect.UnionType):
            return self._make(draw.choice(kind.types), name)
        if isinstance(kind, inspect.StructType):
            fields = [self._make(field.type, field.encode_name) for field in kind.fields]
            needed = sum(field.required for field in kind.fields)
            fields = fields[: draw.randint(needed, len(fields))] if draw.random() < 0.2 else fields
            return fields if kind.tag is None else [kind.tag, *fields]
        if isinstance(kind, (inspect.ListType, inspect.VarTupleType, inspect.CollectionType)):
            return [self._make(kind.item_type) for _ in range(draw.choice((0, 1, 1, 2, 3, 20)))]
        if isinstance(kind, inspect.TupleType):
            return [self._make(each) for each in kind.item_types]
        if isinstance(kind, inspect.DictType):
            return {self._make(kind.key_type): self._make(kind.value_type) for _ in range(draw.randrange(3))}
        if isinstance(kind, inspect.IntType):
            return draw.choice(INTS) if draw.random() < 0.2 else draw.randrange(4)
        if isinstance(kind, inspect.FloatType):
            return draw.choice((0.0, -1.0, 1e300, float("nan"), float("inf"))) if draw.random() < 0.3 else draw.random()
        if isinstance(kind, inspect.BytesType):
            return draw.randbytes(draw.choice((0, 8, 16, 16, 32, 32, 33)))[: kind.max_length]
        if isinstance(kind, inspect.StrType):
            return draw.choice(TEXTS)[: kind.max_length]
        if isinstance(kind, inspect.BoolType):
            return draw.random() < 0.5
        return None

    def _spoil(self, tree: list[Any]) -> None:
        """Change one node of `tree`."""
        draw, nodes = self._draw, []
        stack = [tree]
        while stack:
            holder = stack.pop()
            nodes.extend((holder, at) for at in range(len(holder)))
            stack.extend(each for each in holder if isinstance(each, list))
        if not nodes:
            return
        holder, at = draw.choice(nodes)
        way, old = draw.randrange(9), holder[at]
        if way == 0:
            holder[at] = draw.choice(ODD)
        elif way == 1:
            holder[at] = draw.choice(INTS)
        elif way == 2:
            del holder[at]
        elif way == 3:
            holder.insert(at, draw.choice(holder))
        elif way == 4:
            holder.extend(draw.choices([*ODD, *INTS], k=draw.choice((1, 3, 100))))
        elif way == 5:
            for _ in range(draw.choice((1, 10, 100))):
                old = [old]
            holder[at] = old
        elif way == 6 and isinstance(old, list) and len(holder) + len(old) < 50:
            holder[at] = old * draw.choice((2, 10, 2000 if draw.random() < 0.1 else 3))
        elif way == 7 and isinstance(old, (bytes, str)):
            holder[at] = old[: draw.randrange(len(old) + 1)] if draw.random() < 0.5 else old * draw.choice((2, 50))
        else:
            other = draw.randrange(len(holder))
            holder[at], holder[other] = holder[other], holder[at]

    def spoil_bytes(self, data: bytes) -> bytes:
        draw, spoilt = self._draw, bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 8))):
            at = draw.randrange(len(spoilt) + 1)
            way = draw.randrange(5)
            if way == 0:
                del spoilt[at:]
            elif way == 1:
                del spoilt[at : at + draw.choice((1, 4, 17))]
            elif way == 2:
                spoilt[at:at] = draw.choice(BYTES) if draw.random() < 0.7 else draw.randbytes(draw.randrange(1, 40))
            elif way == 3 and at < len(spoilt):
                spoilt[at] ^= 1 << draw.randrange(8)
            else:
                spoilt += spoilt[at : at + 200]
        return bytes(spoilt[:MOST])

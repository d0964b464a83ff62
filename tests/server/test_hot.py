"""Which prefixes are hot, and how a list of them is kept."""

from __future__ import annotations

from kvcache_proto.messages import MAX_HOT
from kvcache_proto.types import GroupSpec
from kvcache_server.core.index import GONE, UNQUEUED, Account, Block, Group, Share
from kvcache_server.tiering import hot
from kvcache_server.tiering.hot import HotPrefixes

GROUP = Group(1, 0, GroupSpec(16, (64,)), 32, None)
ACCOUNT = Account(Share("e", 1), GROUP)


def name(text: str) -> bytes:
    return text.encode().ljust(32, b".")


def chain(*names: str, below: Block | None = None) -> list[Block]:
    found = []
    for each in names:
        block = Block(UNQUEUED, 0, name(each), b"", ACCOUNT)
        block.link(below or GROUP.root)
        found.append(block)
        below = block
    return found


def test_the_latest_chain_comes_first_and_shared_blocks_come_once() -> None:
    prefixes = HotPrefixes()
    system = chain("system", "prompt")
    one, other = chain("a1", "a2", below=system[-1]), chain("b1", below=system[-1])
    for end in (one[-1], other[-1], one[0]):
        prefixes.found(end)
    assert prefixes.runs() == [
        (b"", [name("system"), name("prompt"), name("a1")]),
        (name("prompt"), [name("b1")]),
        (name("a1"), [name("a2")]),
    ]
    assert prefixes.changes == 3


def test_evicted_ends_are_left_out() -> None:
    prefixes = HotPrefixes()
    first, last = chain("first"), chain("last")
    prefixes.found(first[-1])
    prefixes.found(last[-1])
    last[-1].pins = GONE
    assert prefixes.runs() == [(b"", [name("first")])]


def test_chains_that_were_found_long_ago_are_forgotten() -> None:
    prefixes = HotPrefixes()
    for number in range(hot.MOST_ENDS + 10):
        prefixes.found(chain(f"{number}")[-1])
    runs = prefixes.runs()
    assert len(runs) == hot.MOST_ENDS
    assert runs[0][1] == [name(f"{hot.MOST_ENDS + 9}")] and runs[-1][1] == [name("10")]


def test_a_list_is_bounded() -> None:
    prefixes = HotPrefixes()
    long, short = chain(*map(str, range(MAX_HOT))), chain("short")
    prefixes.found(short[-1])
    prefixes.found(long[-1])
    assert [len(hashes) for _, hashes in prefixes.runs()] == [MAX_HOT]

"""Windows, states and chunks beside full attention: what one lookup finds, what is kept, and what goes. On the real
state machine."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from insights import answer, begin, explained, figures, insight
from small_cache import KIB, audit, make_cache, pass_time

from kvcache_proto import messages as m
from kvcache_proto.errors import BadArgument
from kvcache_proto.types import FULL, REF_BYTES, SUFFIX, GroupSpec, NamespaceSpec, Outcome, Refusal
from kvcache_server.commands.why import describe as explain
from kvcache_server.core.cache import Cache
from kvcache_server.core.integrity import check_integrity
from kvcache_server.core.lookups import last_end

BYTES = 100 * KIB
WINDOW, STATE, CHUNK = (GroupSpec(16, BYTES, SUFFIX, *blocks) for blocks in ((2,), (1,), (4, 4)))
HYBRID = (GroupSpec(16, BYTES), WINDOW, STATE)
FOLLOWED = (
    GroupSpec(16, BYTES, needs_next_block=True),
    WINDOW,
    STATE,
)  # a drafter reads the next token


def digest(path: str) -> bytes:
    return path.encode().ljust(16, b".")


def digests(path: str) -> list[bytes]:
    """Return the hashes of the blocks of a prompt, one per letter."""
    return [digest(path[:end]) for end in range(1, len(path) + 1)]


class Engine:
    """One session that writes every shard. A prompt is a word: each letter is a block."""

    def __init__(self, cache: Cache, groups: tuple[GroupSpec, ...] = HYBRID, ceiling: int = 0) -> None:
        self.cache, self.groups = cache, groups
        self.session = cache.open_session("one", "", 0.0)
        spec = NamespaceSpec("hybrid", groups, hash_bytes=16)
        self.namespace = self.ask(m.Attach(1, b"", spec, (0,), ceiling)).namespace

    def ask(self, request):
        return answer(self.cache, self.session, request, 0.0)

    def runs(self, path: str, suffixes: bool | list[int] = True, end: int | None = None) -> list[m.Run]:
        """Return the runs of a prompt, with what each suffix group needs at its end, or after `end` blocks."""
        names = digests(path)
        runs = [m.Run(names)] if self.groups[0].kind == FULL else []
        end = len(path) if end is None else end
        for number, group in enumerate(self.groups):
            needed = group.needed(end)
            if group.kind == SUFFIX and needed and (suffixes is True or (suffixes and number in suffixes)):
                runs.append(m.Run(names[end - needed : end], None, number))
        return runs

    def reserve(self, runs: list[m.Run]) -> m.Reserved:
        return self.ask(m.Reserve(1, b"", self.namespace, runs))

    def settle(self, reserved: m.Reserved, outcome: Outcome = Outcome.COMMITTED, at: tuple[int, ...] = ()) -> bytes:
        region = self.cache.geometry.region_id
        request = m.Settle(1, b"", region, reserved.reservation, (0,), outcome, list(at))
        return self.ask(request).verdicts if reserved.reservation else b""

    def store(self, path: str, suffixes: bool | list[int] = True, end: int | None = None) -> list[Refusal]:
        reserved = self.reserve(self.runs(path, suffixes, end))
        self.settle(reserved)
        return [Refusal(each) for each in reserved.answers]

    def acquire(self, path: str, start: int = 0, pin: bool = True) -> m.Acquired:
        return self.ask(m.Acquire(1, b"", self.namespace, digests(path), pin=pin, start=start))

    def hits(self, path: str, start: int = 0) -> int:
        return self.acquire(path, start, pin=False).hits

    def cached(self, group: int) -> set[bytes]:
        return set(self.cache.namespaces[self.namespace].groups[group].visible)


# Where an engine may continue.


def test_the_boundary_is_the_largest_that_a_naive_search_finds() -> None:
    draw = random.Random(5)
    for _ in range(20_000):
        count = draw.randrange(14)
        start = draw.randrange(count + 1)
        most = draw.randrange(start, count + 1)
        hashes = digests("x" * count)
        suffixes = []
        for _ in range(draw.randrange(1, 4)):
            spec, density = (
                GroupSpec(16, 1, SUFFIX, draw.randrange(1, 6), draw.choice([0, 0, 1, 2, 3, 5])),
                draw.random(),
            )
            suffixes.append((spec, {each for each in hashes if draw.random() < density}))
        possible = [start]
        for end in range(start + 1, most + 1):
            needed = [(have, hashes[max(start, end - spec.needed(end)) : end]) for spec, have in suffixes]
            if all(have.issuperset(names) for have, names in needed):
                possible.append(end)
        found = last_end([(spec, have.__contains__) for spec, have in suffixes], hashes, most, start)
        assert found == max(possible)


def test_a_hit_ends_where_every_group_has_what_the_engine_needs() -> None:
    engine = Engine(make_cache())
    engine.store("abcd")
    engine.store("abcdefgh", suffixes=[1])  # without the state
    assert engine.hits("abcdefgh") == engine.hits("abcdx") == 4
    assert engine.hits("abc") == 0, "no window and no state there"
    engine.store("abcdefgh")
    assert engine.hits("abcdefgh") == 8
    check_integrity(engine.cache)


def test_a_lookup_says_where_a_prompt_parts_from_what_is_cached() -> None:
    engine = Engine(make_cache())
    engine.store("abcdefgh")
    found = engine.acquire("abcdex", pin=False)
    assert (found.hits, found.divergence) == (0, 5)
    engine.store("abcd")
    found = engine.acquire("abcdex")
    assert (found.hits, found.divergence) == (4, 5), "also beyond a hit"
    engine.store("abcdexyz", end=5)
    found = engine.acquire("abcdexyw")
    assert (found.hits, found.divergence) == (5, 7)
    assert engine.acquire("abcdefgh").divergence == 0, "a hit ends there"
    assert engine.acquire("abcdexw", start=6).divergence == 6, "where the engine continues by itself"


def test_where_a_prompt_parts_the_next_block_is_cached_too() -> None:
    engine = Engine(make_cache(), FOLLOWED)
    engine.store("abcdefgh")
    assert engine.acquire("abcdex").divergence == 4
    assert engine.acquire("ax").divergence == 0
    alone = Engine(make_cache(), (WINDOW,))
    alone.store("abcd")
    assert alone.acquire("abx").divergence == 0, "there is no full group"


def tails(path: str, per_block: int = 3) -> list[bytes]:
    """Return the names of tails after each number of blocks of a prompt, e.g. `ab+1` after two."""
    return [digest(f"{path[:end]}+{at}") for end in range(len(path) + 1) for at in range(per_block)]


def store_tail(engine: Engine, path: str, tail: str, groups: tuple[int, ...] = (0, 1)) -> None:
    """Store the tail of a prompt, and states at its end."""
    name, parent = digest(path + tail), digest(path) if path else None
    engine.settle(engine.reserve([m.Run([name], None if number else parent, number) for number in groups]))


@pytest.fixture
def with_states() -> Engine:
    return Engine(make_cache(), (GroupSpec(16, BYTES), STATE))


def test_a_tail_is_the_last_hit(with_states: Engine) -> None:
    engine = with_states
    engine.store("abcd", end=3)
    for path, tail in (("ab", "+1"), ("ab", "+2"), ("", "+1")):
        store_tail(engine, path, tail)

    def hits(path: str, start: int = 0) -> tuple[int, int]:
        asked = m.Acquire(1, b"", engine.namespace, digests(path), start=start, tails=tails(path), tails_per_block=3)
        found = engine.ask(asked)
        assert len(found.slots) // REF_BYTES == found.hits + bool(found.hits)
        return found.hits, found.tail

    assert hits("abcd") == (3, 0), "more than with a tail"
    assert hits("abx") == (3, 9) and tails("abx")[8] == digest("ab+2")
    assert hits("abx", start=2) == (3, 9) and hits("ab", start=2) == (3, 9)
    assert hits("ax") == hits("x") == hits("") == (1, 2), "before the first block"
    assert hits("abcdx", start=3) == (0, 0), "nothing beyond what the engine has"


def test_a_tail_needs_its_states_and_the_blocks_before_it(with_states: Engine) -> None:
    engine = with_states
    store_tail(engine, "", "+1", groups=(0,))
    assert engine.ask(m.Acquire(1, b"", engine.namespace, [], tails=tails(""), tails_per_block=3)).hits == 0
    store_tail(engine, "ab", "+1")
    engine.store("ab", suffixes=False)
    asked = m.Acquire(1, b"", engine.namespace, digests("abc"), tails=tails("abc"), tails_per_block=3)
    assert engine.ask(asked).hits == 0, "it was refused: its parent was not cached"
    store_tail(engine, "ab", "+1")
    assert (engine.ask(asked).hits, engine.ask(asked).tail) == (3, 8)


def test_tails_have_a_number_per_block(with_states: Engine) -> None:
    with pytest.raises(BadArgument, match="tails_per_block 0"):
        with_states.ask(m.Acquire(1, b"", with_states.namespace, [], tails=tails("")))
    with pytest.raises(BadArgument, match="hash of 3 bytes"):
        with_states.ask(m.Acquire(1, b"", with_states.namespace, [], tails=[b"odd"], tails_per_block=1))


def test_one_reply_has_the_references_of_all_groups() -> None:
    engine = Engine(make_cache())
    engine.store("abcd")
    found = engine.acquire("abcdef")
    groups = engine.cache.namespaces[engine.namespace].groups
    refs = [groups[0].visible[each].ref for each in digests("abcd")]
    refs += [groups[1].visible[each].ref for each in digests("abcd")[2:]]
    refs += [groups[2].visible[digest("abcd")].ref]
    assert (found.hits, found.slots) == (4, b"".join(refs))


def test_an_engine_needs_nothing_of_a_suffix_that_it_has_itself() -> None:
    engine = Engine(make_cache(), (GroupSpec(16, BYTES), WINDOW))
    engine.store("abcdef", suffixes=False)
    reserved = engine.reserve([m.Run([digest("abcdef")], None, 1)])  # the last block of the window, not the one before
    engine.settle(reserved)
    assert engine.hits("abcdef") == 0
    found = engine.acquire("abcdef", start=5)
    assert (found.hits, len(found.slots) // REF_BYTES) == (6, 6 + 1)
    assert engine.hits("abcdef", start=6) == 0, "nothing beyond what it has"


def test_a_chunk_needs_nothing_from_before_its_beginning() -> None:
    engine = Engine(make_cache(), (GroupSpec(16, BYTES), CHUNK))
    engine.store("abcdefgh", suffixes=False)
    assert engine.hits("abcdefgh") == 8 and engine.hits("abcdefgx") == 4
    engine.store("abcdef")
    found = engine.acquire("abcdefx")
    assert (found.hits, len(found.slots) // REF_BYTES) == (6, 6 + 2)


@pytest.mark.parametrize("group", [WINDOW, STATE])
def test_models_without_full_attention_have_suffixes_only(group: GroupSpec) -> None:
    engine = Engine(make_cache(), (group,))
    engine.store("abcd")
    found = engine.acquire("abcde")
    assert (found.hits, len(found.slots) // REF_BYTES) == (4, group.window_blocks)
    assert engine.hits("abc") == 0
    check_integrity(engine.cache)
    engine.ask(m.Release(1, b"", [found.lease]))
    engine.ask(m.Clear(1, b""))
    assert engine.hits("abcd") == 0 and not engine.cache.eviction.fair_share.used
    check_integrity(engine.cache)


def test_pending_is_what_a_wait_would_add() -> None:
    engine = Engine(make_cache())
    engine.store("ab")
    reserved = engine.reserve(engine.runs("abcd"))
    engine.reserve([m.Run(digests("abcde")[4:], digest("abcd"))])
    assert engine.acquire("abcdef").pending == 2, "nothing can continue after the fifth"
    engine.settle(reserved)
    assert (engine.acquire("abcdef").hits, engine.acquire("abcdef").pending) == (4, 0)


def test_a_hit_ends_where_the_next_block_is_cached_too() -> None:
    engine = Engine(make_cache(), FOLLOWED)
    engine.store("abcd")
    assert engine.hits("abcdef") == engine.hits("abcd") == 0, "no block follows the fourth"
    reserved = engine.reserve([m.Run(digests("abcde")[4:], digest("abcd"))])
    assert (engine.acquire("abcdef").hits, engine.acquire("abcdef").pending) == (0, 4)
    engine.settle(reserved)
    found = engine.acquire("abcdef")
    assert (found.hits, found.pending, len(found.slots) // REF_BYTES) == (4, 0, 4 + 2 + 1)
    assert engine.hits("abcdx") == engine.hits("abcd") == 0, "not the block that follows in this prompt"
    assert engine.hits("abcde", start=4) == 0
    (space,) = figures(engine.cache, 0.0)["namespaces"]
    assert (space["requested_blocks"], space["hit_blocks"]) == (5 + 3 + 5 * 3 + 4 + 3 + 4, 4)


def test_the_block_that_follows_a_hit_is_used_with_it() -> None:
    """It stays as long as the others, and the state before it is of use."""
    engine = Engine(make_cache(32, policy="lru"), (FOLLOWED[0], STATE))
    engine.store("abcd", end=3)
    for number in range(40):
        engine.store(f"{number:02}")
        assert engine.hits("abcd") == 3
    check_integrity(engine.cache)


def test_what_follows_a_hit_goes_no_earlier_because_it_has_become_a_leaf() -> None:
    engine = Engine(make_cache(32, policy="lru"), (FOLLOWED[0], STATE))
    engine.store("abcdefgh", end=3)
    engine.ask(m.Drop(1, b"", engine.namespace, digests("abcdefgh"), 4))
    for letter in "ABCDEFGHIJKLMNO":
        engine.store(letter, suffixes=False)
    assert engine.cached(0) & set(digests("abcdefgh")) == set(digests("abcd"))
    assert engine.hits("abcd") == 3
    check_integrity(engine.cache)


def test_without_the_block_that_follows_a_state_is_of_no_use() -> None:
    engine = Engine(make_cache(32, policy="lru"), (FOLLOWED[0], STATE))
    engine.store("ab", end=1)
    engine.store("abcdef", end=5)
    assert engine.hits("ab") == 1
    free = engine.cache.pool.blocks_of(BYTES) - 8
    for at in range(free):
        engine.store(chr(1000 + at), suffixes=False)
    engine.store("xy", suffixes=False)  # in place of the last block: the state before it goes, and three blocks above
    assert engine.cached(0) & set(digests("abcdef")) == set(digests("ab"))
    assert engine.cached(1) == {digest("a")} and engine.hits("ab") == 1
    check_integrity(engine.cache)


def test_a_retained_prompt_keeps_the_block_that_follows() -> None:
    cache = make_cache(32, policy="lru", retain_quota=0.5)
    engine = Engine(cache, FOLLOWED)
    engine.store("abc", end=3)
    retain = m.Retain(1, b"", engine.namespace, digests("abcd"), 60.0)
    assert engine.ask(retain).blocks == 0
    engine.store("abcd", suffixes=False)
    assert engine.ask(retain).blocks == 4
    for number in range(40):
        engine.store(f"{number:02}")
    assert engine.hits("abcd") == 3
    check_integrity(cache)


def test_a_retention_takes_up_the_block_that_follows_as_the_end_of_a_longer_prefix() -> None:
    cache = make_cache(32, policy="lru", retain_quota=0.5)
    engine = Engine(cache, (FOLLOWED[0], STATE))
    engine.store("abc", end=2)
    assert engine.ask(m.Retain(1, b"", engine.namespace, digests("abcde"), 60.0)).blocks == 3
    engine.store("abcd", end=3)
    pass_time(cache, 1.0)
    for number in range(40):
        engine.store(f"{number:02}")
    assert engine.hits("abcd") == 3
    check_integrity(cache)


# How suffix groups are stored.


def test_a_block_of_a_suffix_needs_that_of_the_full_group() -> None:
    engine = Engine(make_cache())
    assert engine.store("ab", suffixes=[1])[:2] == [Refusal.GRANTED] * 2
    names = digests("abxy")
    reserved = engine.reserve([m.Run(names[1:], None, 1), m.Run(names[3:], None, 2)])
    assert list(reserved.answers) == [Refusal.PRESENT, *[Refusal.NO_PARENT] * 3]
    for group in (1, 2):
        with pytest.raises(BadArgument, match="a suffix group with a parent"):
            engine.reserve([m.Run([digest("ab")], digest("a"), group)])
    with pytest.raises(BadArgument, match="group 3"):
        engine.reserve([m.Run([digest("ab")], None, 3)])
    with pytest.raises(BadArgument, match="group 1 is a suffix group"):
        engine.ask(m.Acquire(1, b"", engine.namespace, digests("ab"), 1))


def test_a_failed_block_takes_its_suffixes_with_it() -> None:
    engine = Engine(make_cache())
    reserved = engine.reserve(engine.runs("abc"))
    engine.settle(reserved, at=(3, 4, 5))
    assert engine.cached(1) == engine.cached(2) == set(), "complete, but what they hang on is not"
    engine.settle(reserved, Outcome.FAILED, at=(1,))
    engine.settle(reserved, at=(0, 2))
    assert [engine.cached(number) for number in range(3)] == [{digest("a")}, set(), set()]
    check_integrity(engine.cache)


def test_a_invalidated_block_takes_its_suffixes_with_it() -> None:
    engine = Engine(make_cache())
    engine.store("abcd")
    found = engine.acquire("abcd", pin=False)
    region = engine.cache.geometry.region_id
    state = found.slots[-REF_BYTES:]
    engine.ask(m.Invalidate(1, b"", region, state, 0, 0))
    assert engine.hits("abcd") == 0 and len(engine.cached(0)) == 4
    engine.ask(m.Invalidate(1, b"", region, found.slots[3 * REF_BYTES : 4 * REF_BYTES], 0, 0))
    assert [len(engine.cached(number)) for number in range(3)] == [3, 1, 0]
    check_integrity(engine.cache)
    audit(engine.cache)


# What holds them, and what lets them go.


def test_a_lease_holds_the_suffixes() -> None:
    engine = Engine(make_cache(32))
    engine.store("abcd")
    lease = engine.acquire("abcd").lease
    for number in range(40):
        engine.store(f"{number:02}")
    assert engine.hits("abcd") == 4
    check_integrity(engine.cache)
    engine.ask(m.Release(1, b"", [lease]))
    for number in range(40):
        engine.store(f"-{number:02}")
    assert [engine.cached(number) & set(digests("abcd")) for number in range(3)] == [set(), set(), set()]
    check_integrity(engine.cache)


def test_the_quota_of_leases_counts_suffixes() -> None:
    cache = make_cache(pin_quota=8.5 * BYTES / (8 << 20))
    engine = Engine(cache)
    engine.store("abc")  # three, two of the window, one state
    engine.store("abcdef")
    found = engine.acquire("abcdef")
    assert (found.hits, found.withheld, len(found.slots) // REF_BYTES) == (3, 3, 6)
    assert found.divergence == 0, "what is withheld has its suffix groups"
    assert cache.engines["one"].pins.bytes == 6 * cache.namespaces[1].groups[0].allocated_bytes
    check_integrity(cache)


def test_blocks_after_which_nobody_can_continue_go_with_the_state() -> None:
    engine = Engine(make_cache(32, policy="lru"), (GroupSpec(16, BYTES), STATE))
    engine.store("xyz")
    engine.store("ab")
    engine.store("xyz", suffixes=False)  # its blocks were used after those of ab, its state was not
    for letter in "ABCDEFGHIJKLM":
        engine.store(letter, suffixes=False)
    assert len(engine.cached(0)) + len(engine.cached(1)) == engine.cache.pool.blocks_of(BYTES) == 20
    engine.store("N", suffixes=False)
    assert [engine.cached(number) & set(digests("xyz")) for number in (0, 1)] == [set(), set()]
    assert engine.cache.pool.blocks_of(BYTES) - len(engine.cached(0)) - len(engine.cached(1)) == 3
    assert engine.hits("ab") == 2
    check_integrity(engine.cache)


def test_all_blocks_of_a_prompt_go_with_the_first_block_of_its_window() -> None:
    engine = Engine(make_cache(32, policy="lru"), (GroupSpec(16, BYTES), WINDOW))
    engine.store("vwxyz")
    for letter in "ABCDEFGHIJKLM":
        engine.store(letter, suffixes=False)
    assert len(engine.cached(0)) + len(engine.cached(1)) == engine.cache.pool.blocks_of(BYTES) == 20
    engine.store("N", suffixes=False)
    assert [engine.cached(number) & set(digests("vwxyz")) for number in (0, 1)] == [set(), set()]
    check_integrity(engine.cache)


def test_a_long_prompt_that_nobody_can_use_goes_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache_server.core.eviction.policy.STEP", 4)
    cache = make_cache(32, policy="lru")
    engine, prompt = Engine(cache, (GroupSpec(16, BYTES), STATE)), "abcdefghijklmno"
    engine.store(prompt)
    for letter in "ABCD":
        engine.store(letter, suffixes=False)
    begin(cache, engine.session, m.Reserve(1, b"", engine.namespace, engine.runs("E", suffixes=False)), 0.0)
    left = engine.cached(0) & set(digests(prompt))
    assert len(left) == 15 - 2 * 4, "no more than two slices at once"
    while cache.sweeper.go_on():
        check_integrity(cache)
    assert not engine.cached(0) & set(digests(prompt))
    check_integrity(cache)


def test_groups_of_two_sizes_share_the_pool() -> None:
    state = GroupSpec(16, 3 * BYTES, SUFFIX, 1)
    cache = make_cache(248, policy="lru")
    engine = Engine(cache, (GroupSpec(16, BYTES), state))
    for number in range(300):
        engine.store(f"{chr(1000 + number)}abcd")
        assert engine.hits(f"{chr(1000 + number)}abcd") == 5
    assert cache.eviction.evictions["room"] > 1000
    states = len(engine.cached(1))
    assert states > 15 and len(engine.cached(0)) == 5 * states, "a state each, and no block without one"
    check_integrity(cache)


def test_pages_that_long_prompts_leave_are_given_to_states() -> None:
    cache = make_cache(1488, policy="lru")
    engine = Engine(cache, (GroupSpec(16, BYTES), GroupSpec(16, 3 * BYTES, SUFFIX, 1)))
    engine.store("abcdefghijklmno")
    engine.store("ABCDEFGHIJK")
    short = map(chr, range(1000, 2000))
    while not cache.eviction.evictions:
        engine.store(next(short))
    evicted = cache.eviction.evictions.total()
    for _ in range(6):  # a block and a state each: what the first prompt has left is enough
        engine.store(next(short))
    assert not engine.cached(0) & set(digests("abcdefghijklmno"))
    assert cache.eviction.evictions.total() <= evicted + 16
    assert len(engine.cached(0) & set(digests("ABCDEFGHIJK"))) in (0, 11)
    check_integrity(cache)


def test_the_block_that_a_state_is_to_hang_on_does_not_go_for_it() -> None:
    """It would hang on a block that is gone: never found, never evicted."""
    for others, expected in ((0, Refusal.NO_SPACE), (3, Refusal.GRANTED)):
        cache = make_cache(25, policy="lru")
        engine = Engine(cache, (GroupSpec(16, 2 * BYTES), GroupSpec(16, 3 * BYTES, SUFFIX, 1)))
        assert cache.pool.blocks_of(2 * BYTES) == 8 and not cache.pool.capacity % (2 * BYTES)
        if others:
            engine.store("o" * others, suffixes=False)
        path = "p" * (8 - others)
        engine.store(path, suffixes=False)
        assert not cache.pool.free.pages
        assert engine.store(path) == [Refusal.PRESENT] * len(path) + [expected]
        check_integrity(cache)
        audit(cache)
        assert engine.hits(path) == (len(path) if expected is Refusal.GRANTED else 0)


def test_nothing_is_lost_while_blocks_of_other_sizes_take_each_others_place() -> None:
    for seed in range(40):
        draw = random.Random(seed)
        cache = make_cache(31 * draw.choice([1, 2, 3]), policy=draw.choice(["lru", "worth"]), namespace_floor=0.0)
        sizes = [BYTES * draw.randrange(1, 5) for _ in range(3)]
        suffixes = [GroupSpec(16, size, SUFFIX, draw.choice([1, 2])) for size in sizes[1:]]
        engine = Engine(cache, (GroupSpec(16, sizes[0]), *suffixes))
        for _ in range(60):
            path = draw.choice("abc") * draw.randrange(1, 6) + draw.choice("xyz")
            engine.store(path, suffixes=[number for number in (1, 2) if draw.random() < 0.7])
            assert not any(group.pending for group in cache.namespaces[1].groups), "what waits for ever"
            check_integrity(cache)
            while cache.sweeper.go_on():
                pass


def test_an_engine_s_ceiling_is_for_all_groups_together() -> None:
    cache = make_cache()
    engine = Engine(cache, ceiling=10 * BYTES)
    for path in ("abc", "xyz", "uvw"):
        engine.store(path)
        assert cache.eviction.fair_share.used <= 10 * BYTES
    assert engine.hits("uvw") == 3
    check_integrity(cache)


def test_what_a_prompt_needed_two_boundaries_ago_goes_first() -> None:
    """What follows a prompt continues at its last boundary; what replaces its last part, at the one before."""
    cache = make_cache(32, policy="lru")
    engine = Engine(cache)
    engine.store("xy")
    for prompt in ("ab", "abcd", "abcdef"):
        engine.store(prompt)
    others = iter(range(10, 100))
    while cache.eviction.evictions.total() < 3:
        engine.store(chr(1000 + next(others)), suffixes=False)
    assert cache.eviction.evictions == {"passed": 3}, "two blocks of a window, and a state"
    assert [engine.hits(prompt) for prompt in ("ab", "abcd", "abcdef", "xy")] == [0, 4, 6, 2]
    check_integrity(cache)


def test_a_boundary_behind_which_prompts_part_stays() -> None:
    cache = make_cache(48, policy="lru")
    engine = Engine(cache)
    for prompt in ("ab", "abc1", "abc2", "abc1ef", "abc1efgh"):
        engine.store(prompt)
    others = iter(range(1000, 2000))
    while cache.eviction.evictions.total() < 2:
        engine.store(chr(next(others)), suffixes=False)
    assert cache.eviction.evictions == {"passed": 2}, "the last block of a window, and a state"
    assert [engine.hits(prompt) for prompt in ("ab", "abc1", "abc2", "abc1ef", "abc1efgh")] == [2, 2, 4, 6, 8]


def test_a_dropped_prompt_s_suffixes_go() -> None:
    engine = Engine(make_cache())
    engine.store("abc")
    engine.store("abcdef")
    assert engine.ask(m.Drop(1, b"", engine.namespace, digests("abcdef"), 3)).blocks == 3
    assert engine.hits("abcdef") == 3
    check_integrity(engine.cache)


def test_a_retained_prompt_keeps_its_suffixes() -> None:
    cache = make_cache(32, policy="lru", retain_quota=0.5)
    engine = Engine(cache)
    engine.store("abcd", suffixes=False)
    assert engine.ask(m.Retain(1, b"", engine.namespace, digests("abcd"), 60.0)).blocks == 0, (
        "nothing can continue there"
    )
    engine.store("abcd")
    pass_time(cache, 1.0)
    for number in range(40):
        engine.store(f"{number:02}")
    assert engine.hits("abcd") == 4
    check_integrity(cache)
    pass_time(cache, 100.0)
    for number in range(40):
        engine.store(f"-{number:02}")
    assert engine.hits("abcd") == 0
    check_integrity(cache)


def test_a_retention_without_a_full_group_is_sound() -> None:
    """Also one that holds no block: a chunk begins where it ends."""
    for group, stored in ((WINDOW, 2), (STATE, 1), (CHUNK, 0)):
        engine = Engine(make_cache(), (group,))
        engine.store("abcd")
        assert engine.ask(m.Retain(1, b"", engine.namespace, digests("abcd"), 60.0)).blocks == 4
        assert len(engine.cached(0)) == stored
        check_integrity(engine.cache)
        audit(engine.cache)


# What people are told.


def test_a_hit_counts_its_blocks_once_and_the_bytes_of_all_groups() -> None:
    engine = Engine(make_cache())
    engine.store("abcd")
    engine.acquire("abcdef")
    (space,) = figures(engine.cache, 0.0)["namespaces"]
    assert (space["requested_blocks"], space["hit_blocks"], space["hit_bytes"]) == (6, 4, (4 + 2 + 1) * BYTES)


def test_why_says_that_a_state_is_missing() -> None:
    engine = Engine(make_cache())
    insight(engine.cache)
    engine.store("abc")
    engine.store("abcde", suffixes=[1])
    engine.ask(m.Acquire(1, b"", engine.namespace, digests("abcdef"), request="r"))
    told = explain(explained(engine.ask(m.Why(1, b"", "r"))))
    assert "blocks 3-4  cached, but of no use: what layers with a window or a state need to continue there" in told


def test_why_says_that_no_block_follows() -> None:
    engine = Engine(make_cache(), FOLLOWED)
    insight(engine.cache)
    engine.store("abc", end=2)
    engine.ask(m.Acquire(1, b"", engine.namespace, digests("abcd"), request="r"))
    told = explain(explained(engine.ask(m.Why(1, b"", "r"))))
    assert "block 2     cached, but computed again: what a drafter has of its last token" in told
    engine.ask(m.Acquire(1, b"", engine.namespace, digests("abc"), request="s"))
    assert not explained(engine.ask(m.Why(1, b"", "s"))).explained, "all that it could hit"


# Against a naive model.

ROOM = 14
FIRST = 0


@dataclass
class Node:
    tick: int
    pins: int = 0
    visible: bool = False


@dataclass
class Model:
    """Blocks by group and prompt. Everything is looked for in all of them."""

    groups: tuple[GroupSpec, ...]
    nodes: dict[tuple[int, str], Node] = field(default_factory=dict)
    leases: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    tick: int = 0
    kept: tuple[int, str] = (0, "")  # what a block is about to be stored below
    dropped: list[tuple[tuple[int, str], Node]] = field(default_factory=list)  # what goes first, from the end on

    def next_tick(self) -> int:
        self.tick += 1
        return self.tick

    def has(self, group: int, path: str) -> bool:
        return (group, path) in self.nodes and self.nodes[group, path].visible

    @property
    def needs_next_block(self) -> bool:
        return self.groups[0].needs_next_block

    def is_proof(self, path: str) -> bool:
        """Whether an engine could continue before the last block of `path`, which follows there."""
        needed = self.used(path[:-1], len(path) - 1, 0)[1:]
        return self.needs_next_block and len(path) > 1 and all(each in self.nodes for each in needed)

    def children(self, path: str) -> list[tuple[int, str]]:
        return [key for key in self.nodes if (key[1] == path if key[0] else key[1][:-1] == path and key[1])]

    def boundary(self, path: str, start: int) -> int:
        def would_do(end: int) -> bool:
            full = all(self.has(0, path[:at]) for at in range(1, end + 1 + self.needs_next_block))
            return full and all(
                self.has(group, path[: at + 1])
                for group, spec in enumerate(self.groups)
                if group
                for at in range(max(start, end - spec.needed(end)), end)
            )

        ends = range(start + 1, len(path) + 1 - self.needs_next_block)
        return max((end for end in ends if would_do(end)), default=0)

    def used(self, path: str, end: int, start: int) -> list[tuple[int, str]]:
        """Return what a hit uses, in the order of its use."""
        return [(0, path[: end + self.needs_next_block])] + [
            (group, path[: at + 1])
            for group, spec in enumerate(self.groups)
            if group
            for at in range(max(start, end - spec.needed(end)), end)
        ]

    def is_evictable(self, key: tuple[int, str]) -> bool:
        node = self.nodes.get(key)
        return bool(node and node.visible and not node.pins and not (key[0] == 0 and self.children(key[1])))

    def evict(self, key: tuple[int, str]) -> None:
        """Let a block go, with all that is of no use without it."""
        group, path = key
        self.remove(key)
        above = path if group else path[:-1]
        if group and self.groups[group].window_blocks > 1:
            self.evict_useless(self.evict_rest(group, above))
        self.evict_useless(above)

    def evict_useless(self, above: str) -> None:
        while above and (0, above) in self.nodes:
            below = self.children(above)
            inner = any(not each for each, _ in below)
            needed = self.used(above, len(above), 0)[1:]
            if not all(each in self.nodes for each in needed) or (self.needs_next_block and not inner):
                for each in below:
                    if each[0] and self.is_evictable(each) and not (inner and self.groups[each[0]].window_blocks > 1):
                        self.remove(each)
            if not self.is_evictable((0, above)) or (0, above) == self.kept or self.is_proof(above):
                return
            self.remove((0, above))
            above = above[:-1]

    def evict_rest(self, group: int, path: str) -> str:
        """Without the first block of a window, the others are of no use, unless they are part of a longer run."""
        rest = [path]
        for _ in range(self.groups[group].window_blocks):
            below = [each for number, each in self.children(rest[-1]) if not number]
            if len(below) != 1 or not self.has(group, below[0]):
                for each in rest[1:]:
                    for other in range(1, len(self.groups)):
                        if self.is_evictable((other, each)):
                            self.remove((other, each))
                return rest[-1]
            rest.append(below[0])
        return path

    def remove(self, key: tuple[int, str]) -> None:
        group, path = key
        node = self.nodes.pop(key)
        above = (0, path if group else path[:-1])
        if above[1]:
            useful = self.children(above[1]) or self.is_proof(above[1])
            self.nodes[above].tick = max(self.nodes[above].tick, node.tick) if useful else FIRST

    def make_room(self, keep: tuple[int, str]) -> bool:
        if len(self.nodes) < ROOM:
            return True
        self.kept = keep
        while self.dropped:
            key, node = self.dropped.pop()
            if self.nodes.get(key) is node and node.tick == FIRST and self.is_evictable(key):
                above = (0, key[1] if key[0] else key[1][:-1])
                parent = self.nodes.get(above)
                self.evict(key)
                if parent is not None and parent.tick == FIRST:
                    self.drop(above, parent)
                return True
        going = [key for key in self.nodes if self.is_evictable(key) and key != keep]
        if not going:
            return False
        self.evict(min(going, key=lambda key: (self.nodes[key].tick, digest(key[1]))))
        return True

    def store(self, runs: list[list[tuple[int, str]]]) -> list[Refusal]:
        answers, granted = [], []
        for run in runs:
            ended = False
            for group, path in run:
                above = (0, path if group else path[:-1])
                if ended or (above[1] and above not in self.nodes):
                    answers.append(Refusal.NO_PARENT)
                    ended = True
                elif (group, path) in self.nodes:
                    self.nodes[group, path].tick = self.next_tick()
                    answers.append(Refusal.PRESENT)
                elif not self.make_room(above):
                    answers.append(Refusal.NO_SPACE)
                    ended = True
                else:
                    self.nodes[group, path] = Node(self.next_tick())
                    granted.append((group, path))
                    answers.append(Refusal.GRANTED)
        for key in granted:
            self.nodes[key].visible = True
            if key[0]:
                self.pass_boundaries(*key)
        return answers

    def drop(self, key: tuple[int, str], node: Node) -> None:
        self.dropped = [each for each in self.dropped if each[1] is not node] + [(key, node)]

    def pass_boundaries(self, group: int, path: str) -> None:
        """What a suffix group has for the last boundary but two of a prompt goes first, unless prompts part behind
        it."""
        window_blocks = self.groups[group].window_blocks
        if any(not self.nodes[each].visible for each in self.nodes if each[0] == group and each[1][:-1] == path):
            return
        ends = [len(path)]
        for end in range(len(path), 0, -1):
            if end <= ends[-1] - window_blocks and self.has(group, path[:end]):
                ends.append(end)
        if len(ends) > 2:
            _, latest, passed, *_ = ends
            parts = [len([each for each in self.children(path[:end]) if not each[0]]) > 1 for end in range(latest)]
            if not any(parts[passed:latest]):
                for end in range(passed, max(passed - window_blocks, 0), -1):
                    if parts[end]:
                        break
                    if self.is_evictable(key := (group, path[:end])):
                        self.nodes[key].tick = FIRST
                        self.drop(key, self.nodes[key])


paths = st.text(alphabet="ab", min_size=1, max_size=6)


class SuffixesMachine(RuleBasedStateMachine):
    groups = HYBRID

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(32, policy="lru", pin_quota=1.0)
        spec = GroupSpec(16, 144 * KIB)
        groups = tuple(
            GroupSpec(16, 144 * KIB, each.kind, each.window_blocks, 0, each.needs_next_block) for each in self.groups
        )
        self.engine = Engine(self.cache, groups)
        self.model = Model(groups)
        assert self.cache.pool.blocks_of(spec.block_bytes) == ROOM

    @rule(path=paths, suffixes=st.sampled_from([[], [1], [2], [1, 2], [1, 2]]), before=st.integers(0, 1))
    def store(self, path: str, suffixes: list[int], before: int = 0) -> None:
        end = len(path) - before * self.model.needs_next_block
        runs = self.engine.runs(path, suffixes, end)
        named = [[(run.group, each.decode().rstrip(".")) for each in run.hashes] for run in runs]
        assert self.engine.store(path, suffixes, end) == self.model.store(named)

    @rule(stored=st.lists(paths, min_size=3, max_size=6))
    def store_many(self, stored: list[str]) -> None:
        for path in stored:
            self.store(path, [1, 2], 1)

    @rule(path=paths, start=st.integers(0, 3), pin=st.booleans())
    def acquire(self, path: str, start: int, pin: bool) -> None:
        # Within the quota, of which blocks of several leases may take more than once.
        pin = pin and sum(map(len, self.model.leases.values())) + 3 * len(path) < ROOM
        found = self.engine.acquire(path, start, pin)
        assert found.hits == self.model.boundary(path, start)
        assert bool(found.lease) == (pin and found.hits > 0)
        if found.hits:
            used = self.model.used(path, found.hits, start)
            assert len(found.slots) // REF_BYTES == found.hits + len(used) - 1
            for key in used:
                self.model.nodes[key].tick = self.model.next_tick()
            if found.lease:
                self.model.leases[found.lease] = used = [(0, path[: found.hits]), *used[1:]]
                for key in used:
                    self.model.nodes[key].pins += 1

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.model.leases)))
        self.engine.ask(m.Release(0, b"", [lease]))
        for key in self.model.leases.pop(lease):
            self.model.nodes[key].pins -= 1

    @invariant()
    def holds(self) -> None:
        check_integrity(self.cache)
        for number in range(3):
            assert self.engine.cached(number) == {digest(path) for group, path in self.model.nodes if group == number}
        pinned = {key for held in self.model.leases.values() for key in held}
        size = self.cache.namespaces[1].groups[0].allocated_bytes
        assert self.cache.engines["one"].pins.bytes >= len(pinned) * size


SuffixesMachine.TestCase.settings = settings(stateful_step_count=50, deadline=None)
TestSuffixesAgainstModel = SuffixesMachine.TestCase


class FollowedMachine(SuffixesMachine):
    groups = FOLLOWED


FollowedMachine.TestCase.settings = settings(stateful_step_count=50, deadline=None)
TestFollowedAgainstModel = FollowedMachine.TestCase


def test_a_block_that_nobody_needs_goes_first_although_a_colder_one_became_busy() -> None:
    """The end of one prompt is announced as the coldest leaf, and continued before the next eviction."""
    machine = SuffixesMachine()
    for path, suffixes in (("aaaa", [1]), ("aaa", [1, 2]), ("a", [1]), ("abaa", []), ("baaa", []), ("aab", [1, 2])):
        machine.store(path, suffixes)
        machine.holds()

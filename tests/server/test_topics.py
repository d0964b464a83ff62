"""Subscriptions compared with the simplest implementation: a set per subscriber."""

from __future__ import annotations

import random

import pytest

from kvcache_server.events.topics import IN_ALL, Topics


@pytest.mark.parametrize("seed", range(20))
def test_subscribers_receive_topics_by_prefix(seed: int) -> None:
    draw = random.Random(seed)
    topics: Topics[str] = Topics(1000)
    plain: dict[str, set[bytes]] = {name: set() for name in "abc"}
    some = [b"", b"k", b"kv", b"kv@", b"kv@1", b"kv@2", b"kv@12", b"x"]
    for _ in range(300):
        name, topic = draw.choice("abc"), draw.choice(some)
        what = draw.random()
        if what < 0.6:
            assert topics.add(name, topic) is None
            plain[name].add(topic)
        elif what < 0.95:
            topics.discard(name, topic)
            plain[name].discard(topic)
        else:
            assert topics.leave(name) == len(plain[name])
            plain[name].clear()
        assert len(topics) == len(set().union(*plain.values()))
        for said in some:
            heard = topics.subscribers_of(said)
            assert sorted(heard) == [each for each in "abc" if any(said.startswith(t) for t in plain[each])]
    for name in "abc":
        topics.leave(name)
    assert vars(topics) == vars(Topics(1000)), "something is left"


def test_a_subscriber_with_too_many_topics_must_leave() -> None:
    topics: Topics[str] = Topics(3)
    topics.add("other", b"0")
    assert [topics.add("a", b"%d" % number) for number in (0, 1, 2, 2, 3)] == [None, None, None, None, "a"]
    assert topics.leave("a") == 4
    assert topics.subscribers_of(b"0") == ["other"]


def test_if_all_have_too_many_topics_the_one_with_most_must_leave() -> None:
    topics: Topics[int] = Topics(4)
    leaves = [
        topics.add(subscriber, b"%d" % number)
        for subscriber in range(IN_ALL * 2)
        for number in range(1 + (not subscriber))
    ]
    assert not any(each is not None for each in leaves)
    more = [topics.add(subscriber, b"more") for subscriber in range(1, IN_ALL * 2)]
    assert not any(each is not None for each in more)
    assert topics.add(100, b"last") == 0

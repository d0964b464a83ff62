"""Calls of several threads over one channel: each is sent at once, and answered by whoever receives."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvcache_client.session.channel import Channel
from kvcache_client.session.counters import Counters
from kvcache_proto.codec import decode_request, encode
from kvcache_proto.messages import Clear, Cleared, Ping, Reply

PATIENCE = 30.0
Until = Callable[[Callable[[], Any], str], Any]


class Peer:
    """The daemon's end: a ROUTER that answers when, and in the order, that a test says."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.rcvtimeo = int(PATIENCE * 1000)
        self._socket.bind(endpoint)
        self._who = b""

    def hear(self) -> Any:
        """Return the next request. Raises zmq.Again where none comes."""
        self._who, frame = self._socket.recv_multipart()
        return decode_request(frame)

    def say(self, request: Any) -> None:
        self._socket.send_multipart([self._who, encode(Cleared(request.id, int(request.namespace)))])

    def close(self) -> None:
        self._socket.close()


class Ends:
    """A channel whose keeper is a thread that pumps when it is woken, and the peer at its other end."""

    def __init__(self, folder: Path) -> None:
        endpoint = f"ipc://{folder}/kv.sock"
        self.context: zmq.Context[Any] = zmq.Context()
        self.peer = Peer(self.context, endpoint)
        self._woken = threading.Semaphore(0)
        self.counters = Counters()
        self.channel = Channel(self.context, endpoint, b"t" * 16, self.counters, self._woken.release)
        self.late: list[tuple[str, Reply | None]] = []
        self._pool = ThreadPoolExecutor(16)
        self._ended = False
        self._keeper = threading.Thread(target=self._keep)
        self._keeper.start()

    def _keep(self) -> None:
        while self._woken.acquire() and not self._ended:
            self.channel.pump()

    def call(self, name: str, deadline: float = PATIENCE) -> Future[Reply | None]:
        """Ask in a thread of its own; the answer to a request is the number that it has for a name."""
        return self._pool.submit(
            self.channel.call, Clear(0, b"", name), deadline, lambda reply: self.late.append((name, reply))
        )

    def close(self) -> None:
        self.channel.close()
        self._ended = True
        self._woken.release()
        self._keeper.join()
        self._pool.shutdown()
        self.peer.close()
        self.context.term()


@pytest.fixture
def ends(short_folder: Path) -> Iterator[Ends]:
    before = len(os.listdir("/proc/self/fd"))
    made = Ends(short_folder)
    yield made
    made.close()
    assert not made.counters.snapshot()
    assert len(os.listdir("/proc/self/fd")) <= before


def answer(future: Future[Reply | None]) -> int:
    reply = future.result(PATIENCE)
    assert isinstance(reply, Cleared)
    return reply.blocks


def test_a_request_is_sent_and_answered_while_another_one_waits(ends: Ends) -> None:
    first = ends.call("1")
    asked = [ends.peer.hear()]
    second = ends.call("2")
    asked.append(ends.peer.hear())
    third = ends.call("3")
    asked.append(ends.peer.hear())
    ends.peer.say(asked[1])
    assert answer(second) == 2
    assert not first.done() and not third.done()
    ends.peer.say(asked[0])
    assert answer(first) == 1  # and the third one leads
    fourth = ends.call("4")
    ends.peer.say(ends.peer.hear())
    assert answer(fourth) == 4
    ends.peer.say(asked[2])
    assert answer(third) == 3


def test_what_is_posted_beside_a_call_is_sent_and_handled_at_once(ends: Ends) -> None:
    first = ends.call("1")
    asked = ends.peer.hear()
    heard: Future[Reply | None] = Future()
    assert ends.channel.post(Clear(0, b"", "2"), heard.set_result)
    ends.peer.say(ends.peer.hear())
    assert answer(heard) == 2
    assert not first.done()
    ends.peer.say(asked)
    assert answer(first) == 1


def test_who_waits_no_longer_has_the_answer_handled_later_and_once(ends: Ends, until: Until) -> None:
    first = ends.call("1")
    asked = [ends.peer.hear()]
    second = ends.call("2", deadline=0.05)
    asked.append(ends.peer.hear())
    assert second.result(PATIENCE) is None
    assert not first.done() and not ends.late
    ends.peer.say(asked[1])
    until(lambda: ends.late, "the late answer")
    ends.peer.say(asked[0])
    assert answer(first) == 1
    assert [(name, type(reply)) for name, reply in ends.late] == [("2", Cleared)]


def test_the_end_of_the_channel_ends_every_call(ends: Ends, until: Until) -> None:
    calls = [ends.call(str(number)) for number in range(5)]
    for _ in calls:
        ends.peer.hear()
    ends.channel.close()
    assert [call.result(PATIENCE) for call in calls] == [None] * 5
    until(lambda: len(ends.late) == 5, "the handlers of the answers that never come")
    assert sorted(ends.late) == [(str(number), None) for number in range(5)]
    request = Ping(0, b"")
    assert ends.channel.call(request, PATIENCE, print) is None
    assert request.id == 0, "what was never sent can be told from what was"


def test_many_threads_each_get_their_own_answers_in_any_order(ends: Ends) -> None:
    threads, rounds, draw = 8, 400, random.Random(7)

    def ask(thread: int) -> list[int]:
        numbers = [1000 * thread + number for number in range(rounds)]
        return [
            getattr(ends.channel.call(Clear(0, b"", str(number)), PATIENCE, print), "blocks", -1) - number
            for number in numbers
        ]

    with ThreadPoolExecutor(threads) as pool:
        asking = [pool.submit(ask, thread) for thread in range(threads)]
        left, kept = [rounds] * threads, []
        while any(left):
            kept.append(ends.peer.hear())
            # Each thread has one question: where all that are left have asked, one is answered.
            while kept and (len(kept) == sum(map(bool, left)) or draw.random() < 0.6):
                asked = kept.pop(draw.randrange(len(kept)))
                left[int(asked.namespace) // 1000] -= 1
                ends.peer.say(asked)
        assert [set(each.result(PATIENCE)) for each in asking] == [{0}] * threads
    assert not ends.channel.busy

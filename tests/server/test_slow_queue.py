"""The fraction of the loop's time that operators' requests may take, with slow reports."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from insights import finish, process
from small_cache import make_cache

from kvcache_proto import messages as m
from kvcache_proto.codec import decode_reply
from kvcache_proto.errors import Unavailable
from kvcache_server.admin_client import AdminClient
from kvcache_server.config import Config
from kvcache_server.daemon.background import SHARE, SlowQueue
from kvcache_server.http.admin_ops import AdminOps
from kvcache_server.http.app import HttpApp
from kvcache_server.http.connection_limiter import SECONDS
from kvcache_server.insight.insight import Insight
from kvcache_server.slices import Steps, begin
from kvcache_server.status import Daemon

SLOW, QUICK = "/api/v1/namespaces", "/healthz"


async def finish_soon(steps: Steps[Any]) -> Any:
    return finish(steps)


class Slow:
    """The API in a loop of its own, with reports that take `seconds` of that loop."""

    def __init__(self, folder: Path) -> None:
        self.seconds = 0.0
        self.made = 0
        self.error: Exception | None = None
        self.failures: list[Exception] = []
        self.loop = asyncio.new_event_loop()
        cache = make_cache()
        admin_ops = AdminOps(cache, Insight(cache, self._figures), lambda session: None, finish_soon, lambda: None)
        config = Config(endpoint=f"ipc://{folder}/kv.sock", http="127.0.0.1:0")
        self.http = HttpApp(self.loop, config, admin_ops, lambda number, error: self.failures.append(error))
        host, _, port = self.http.address.removeprefix("http://").rpartition(":")
        self._address = host, int(port)

    def _figures(self) -> Daemon:
        self.made += 1
        time.sleep(self.seconds)
        if self.error:
            raise self.error
        return process()

    async def ask(self, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self._address)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return reader, writer

    async def status(self, path: str) -> bytes:
        reader, writer = await self.ask(path)
        try:
            return (await reader.read())[9:12]
        finally:
            writer.close()

    async def ask_and_leave(self) -> None:
        """Leave once the request has been read: a later client asks after it was answered."""
        _, writer = await self.ask(SLOW)
        assert await self.status(QUICK) == b"200"
        writer.close()


@pytest.fixture
def slow(short_folder: Path) -> Iterator[Slow]:
    slow = Slow(short_folder)
    yield slow
    slow.http.close()
    slow.loop.close()


def test_slow_reports_are_answered(slow: Slow) -> None:
    slow.seconds = SECONDS / 15  # what is then due to the engines is longer than a connection lasts
    assert slow.loop.run_until_complete(slow.status(SLOW)) == b"200"


def test_a_cancelled_request_does_not_shorten_the_next_one_s_wait(slow: Slow) -> None:
    slow.seconds = 0.25

    async def leave_again_and_again() -> None:
        for _ in range(16):
            await slow.ask_and_leave()

    slow.loop.run_until_complete(leave_again_and_again())
    assert 1 <= slow.made < 4  # each has the next one wait for 4.75 s


def test_a_failed_report_counts_too(slow: Slow) -> None:
    slow.seconds, slow.error = 0.25, ValueError("figures that cannot be had")

    async def fail_again_and_again() -> None:
        assert await slow.status(SLOW) == b"500"
        for _ in range(16):
            await slow.ask_and_leave()

    slow.loop.run_until_complete(fail_again_and_again())
    assert 1 <= slow.made < 4
    assert slow.failures == [slow.error] * slow.made


def test_slow_requests_are_answered_in_turn_and_leave_the_loop_to_engines() -> None:
    loop = asyncio.new_event_loop()
    answered: list[tuple[float, bytes, float]] = []

    def answer(identity: bytes, frame: bytes) -> None:
        began = time.monotonic()
        time.sleep(0.002)
        answered.append((began, identity + frame, time.monotonic()))
        if len(answered) == 3:
            raise RuntimeError("no answer")
        if len(answered) == 4:
            questions.add(0, b"0", b" again")  # in its turn, too
        if len(answered) == 6:
            questions.add(1, b"1", b" again")  # nobody else waits
        if len(answered) == 7:
            loop.call_later(0.1, loop.stop)  # it has no more turns than questions

    questions = SlowQueue(loop, answer)
    failures: list[Any] = []
    loop.set_exception_handler(lambda loop, context: failures.append(context["exception"]))
    for session in range(5):
        questions.add(session, b"%d" % session, b" asks")
    with pytest.raises(Unavailable, match="still waiting"):
        questions.add(3, b"3", b" asks more")
    loop.run_forever()
    loop.close()
    assert [each for _, each, _ in answered] == [b"%d asks" % session for session in range(5)] + [
        b"0 again",
        b"1 again",
    ]
    for (began, _, ended), (following, _, _) in pairwise(answered):
        assert following - ended >= (ended - began) * (1 / SHARE - 1) * 0.99
    assert [str(each) for each in failures] == ["no answer"]


def test_each_slice_of_a_slow_request_is_accounted_for() -> None:
    loop = asyncio.new_event_loop()
    turns: list[tuple[float, float]] = []
    done: list[Any] = []

    def steps(error: Exception | None) -> Steps[str]:
        for _ in range(3):
            turns.append((began := time.monotonic(), began + 0.003))
            time.sleep(0.003)
            yield
        if error is not None:
            raise error
        return "an answer"

    def answer(sender: str, frame: bytes) -> None:
        questions.go_on(begin(steps(ValueError(frame) if frame else None)), lambda *came: done.append((sender, *came)))

    async def both() -> None:
        while len(done) < 2:
            await asyncio.sleep(0.01)

    questions = SlowQueue(loop, answer)
    questions.add(1, "one", b"")
    questions.add(2, "two", b"broken")
    loop.run_until_complete(asyncio.wait_for(both(), 20))
    questions.add(1, "one", b"")  # both have had their answers
    loop.close()
    assert [each[:2] for each in done] == [("one", "an answer"), ("two", None)] and "broken" in str(done[1][2])
    assert len(turns) == 6
    for (began, ended), (following, _) in pairwise(turns):
        assert following - ended >= (ended - began) * (1 / SHARE - 1) * 0.99


@pytest.mark.parametrize(("question", "answer"), [(m.Why(0, b"", "request"), m.Explained), (m.Stats(0, b""), m.Report)])
def test_a_slow_request_delays_only_its_own_session(daemon: Any, question: m.Request, answer: type) -> None:
    with AdminClient(daemon.endpoint) as asker, AdminClient(daemon.endpoint) as other:
        for _ in range(10):  # all must have arrived before it looks: again if ZeroMQ's thread sends them late
            os.kill(daemon.process.pid, signal.SIGSTOP)
            first, second = asker.tell(question), asker.tell(question)
            ping, others = asker.tell(m.Ping(0, b"")), other.tell(question)
            os.kill(daemon.process.pid, signal.SIGCONT)
            heard = [decode_reply(asker._socket.recv()) for _ in range(3)]
            assert decode_reply(other._socket.recv()).id == others
            if [reply.id for reply in heard] == [second, ping, first]:
                break
        assert [reply.id for reply in heard] == [second, ping, first]
        assert [type(reply) for reply in heard] == [m.Error, m.Pong, answer]
        assert heard[0].code == Unavailable.code
    daemon.wait_status(lambda status: not status["sessions"])
    with AdminClient(daemon.endpoint) as gone:
        os.kill(daemon.process.pid, signal.SIGSTOP)
        gone.tell(question)
    os.kill(daemon.process.pid, signal.SIGCONT)
    assert daemon.wait_status(lambda status: not status["sessions"])["daemon"]["errors"].get("internal", 0) == 0

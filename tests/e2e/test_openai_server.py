"""vLLM's OpenAI server with the connector: clients that come together, stream and hang up; a daemon that is killed, and
a server that stops. The tests go on from each other.
"""

from __future__ import annotations

import http.client
import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from cache_state import BLOCK, figure, wait_attached, wait_idle
from openai_server import Refused

TOKENS = 24
LONGEST = 4096
OPTIONS = ("--max-model-len", str(LONGEST), "--max-num-batched-tokens", "64", "--max-num-seqs", "8")
CLIENTS = 12
pytestmark = pytest.mark.timeout(900)  # several starts of vLLM in one test, on a busy machine
GONE = (OSError, http.client.HTTPException, Refused)  # what a client meets whose server goes


@pytest.fixture(scope="module")
def start(start_module_daemon: Any) -> Callable[..., Any]:
    """`start()` starts a daemon; the next one goes on with the region of the last one."""
    return lambda: start_module_daemon(size="128MiB", quarantine=1, keep="true")


@pytest.fixture(scope="module")
def daemons(start: Callable[..., Any]) -> list[Any]:
    """The daemons so far, the present one last."""
    return [start()]


@pytest.fixture(scope="module")
def first(openai_servers: Any, daemons: list[Any]) -> Any:
    """A server whose prefills take many steps; every block that it loads is verified."""
    return openai_servers("first", daemons[-1].endpoint, {"verify": "all"}, *OPTIONS)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Two system prompts that many share, with questions of their own behind them."""
    draw = random.Random("prompts")
    system = [[draw.randrange(3, 512) for _ in range(6 * BLOCK + 5)] for _ in range(2)]
    return [[*system[n % 2], *(draw.randrange(3, 512) for _ in range(3 * BLOCK + 17 * n))] for n in range(CLIENTS)]


def blocks_of(prompts: list[list[int]]) -> set[tuple[int, ...]]:
    """The distinct blocks that a request for each prompt may hit, by the tokens up to their end."""
    return {tuple(p[: n * BLOCK]) for p in prompts for n in range(1, (len(p) - 1) // BLOCK + 1)}


def all_at_once(server: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The answers to clients that come together; every other one streams."""
    with ThreadPoolExecutor(len(prompts)) as clients:
        futures = [clients.submit(server.complete, p, TOKENS, n % 2 == 0) for n, p in enumerate(prompts)]
        return [future.result() for future in futures]


def test_clients_that_come_together(first: Any, daemons: list[Any], prompts: list[Any], reference: Any) -> None:
    expected = reference(prompts, TOKENS)
    for _ in range(2):
        assert all_at_once(first, prompts) == expected
    status = wait_idle(daemons[-1])
    assert status["pool"]["blocks"] >= len(blocks_of(prompts))


def test_clients_that_hang_up(first: Any, daemons: list[Any], prompts: list[Any], prompt: Any, reference: Any) -> None:
    daemon, expected = daemons[-1], reference(prompts, TOKENS)
    with ThreadPoolExecutor(CLIENTS) as clients:
        beside = [clients.submit(first.complete, p, TOKENS, n % 2 == 0) for n, p in enumerate(prompts)]
        doomed = [clients.submit(first.hang_up_in_mid_stream, prompt(5 * BLOCK + n), 400, n) for n in (1, 2, 5, 9)]
        assert [future.result() for future in doomed] == [None] * 4
        assert [future.result() for future in beside] == expected
    long: list[list[int]] = []
    early = 0
    while early < 2 and len(long) < 24:  # on a busy machine a prefill may be over before we have heard that it began
        # One at a time: whose lookup the daemon has counted is the one that is being prefilled.
        before = figure(daemon, "lookups")
        long.append(prompt(LONGEST - 200 - len(long)))
        early += first.hang_up_before_an_answer(long[-1], lambda at=before: figure(daemon, "lookups") > at)
    assert early, "no client has left in the middle of its prefill"
    wait_idle(daemon)
    assert first.metric("vllm:num_requests_running") == 0
    # Two of them come back: what was cut short has harmed nothing.
    assert all_at_once(first, [*prompts, *long[-2:]]) == [*expected, *reference(long[-2:], TOKENS)]
    wait_idle(daemon)


def test_a_daemon_that_is_killed_in_mid_stream(
    first: Any, daemons: list[Any], start: Callable[..., Any], prompts: list[Any], prompt: Any, reference: Any
) -> None:
    batch = [*prompts, *(prompt(20 * BLOCK + n) for n in range(4))]
    expected = reference(batch, TOKENS)
    before = figure(daemons[-1], "lookups")
    with ThreadPoolExecutor(len(batch)) as clients:
        answers = [clients.submit(first.complete, p, TOKENS, True) for p in batch]
        daemons[-1].wait_status(lambda s: sum(n["lookups"] for n in s["namespaces"]) >= before + 4, "the batch")
        daemons[-1].kill()
        assert [answer.result() for answer in answers] == expected
    daemons.append(start())
    wait_attached(daemons[-1], "first")
    assert all_at_once(first, batch) == expected
    wait_idle(daemons[-1])


def test_a_server_that_stops_while_clients_stream(first: Any, daemons: list[Any], prompt: Any) -> None:
    daemon, before = daemons[-1], figure(daemons[-1], "lookups")
    with ThreadPoolExecutor(4) as clients:
        answers = [clients.submit(first.complete, prompt(9 * BLOCK + n), 600, True) for n in range(4)]
        daemon.wait_status(lambda s: sum(n["lookups"] for n in s["namespaces"]) >= before + 4, "the last batch")
        first.stop()
        assert all(ended(answer) for answer in answers)
    daemon.wait_status(lambda s: not s["sessions"] and not s["away"], "the end of its sessions")
    wait_idle(daemon)
    daemon.check_integrity()
    assert "/kvcache_client/" not in first.log, "a traceback of ours"


@pytest.mark.long  # an engine that is killed and the next one are in test_chaos.py, too
def test_a_server_that_is_killed_and_the_next_one(
    openai_servers: Any, daemons: list[Any], prompts: list[Any], prompt: Any, reference: Any
) -> None:
    daemon, expected = daemons[-1], reference(prompts, TOKENS)
    killed = openai_servers("killed", daemon.endpoint, {"verify": "all"}, *OPTIONS)
    wait_attached(daemon, "killed")
    assert all_at_once(killed, prompts) == expected
    wait_idle(daemon)
    lost = [prompt(40 * BLOCK + n) for n in range(CLIENTS)]
    before = figure(daemon, "lookups")
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = [clients.submit(killed.complete, p, 2000, True) for p in lost]
        daemon.wait_status(lambda s: sum(n["lookups"] for n in s["namespaces"]) >= before + 6, "the batch")
        killed.kill()
        assert all(ended(answer) for answer in answers)
        assert any(answer.exception() for answer in answers), "the server was killed after the last answer"
    daemon.wait_status(lambda s: not s["sessions"] and not s["away"], "the end of its sessions")
    daemon.check_integrity()

    second = openai_servers("second", daemon.endpoint, {"verify": "all"}, *OPTIONS)
    wait_attached(daemon, "second")
    wait_idle(daemon)
    saved, hit = figure(daemon, "saved_blocks"), figure(daemon, "hit_blocks")
    assert [second.complete(p, TOKENS) for p in prompts] == expected
    wait_idle(daemon)
    assert figure(daemon, "hit_blocks") - hit >= len(blocks_of(prompts))
    assert figure(daemon, "saved_blocks") == saved  # all were there
    # Those whose server was killed ask again, and find what it had finished: every block of it is sound.
    assert all_at_once(second, lost) == reference(lost, TOKENS)
    assert "blocks_corrupt" not in wait_idle(daemon)["counters"]
    for server in (killed, second):
        assert "/kvcache_client/" not in server.log, "a traceback of ours"


def ended(answer: Future[list[int]]) -> bool:
    """Whether the client was answered, or saw that its server went."""
    error = answer.exception()
    return error is None or isinstance(error, GONE)

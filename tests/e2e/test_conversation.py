"""A conversation with a real language model, in bfloat16 and text: another server goes on with it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cache_state import BLOCK, hits, wait_idle

from kvcache_tools import demo_model

pytestmark = pytest.mark.timeout(600)
OPTIONS = ("--dtype", "bfloat16", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(128 << 20))
TEXT_LENGTH = 3000  # characters
TURNS = (
    "What is a Contribution? Answer in one sentence.",
    "And what is a Contributor?",
    "Who grants the patent license?",
    "Summarize that in a few words.",
)
ANSWER_TOKENS = 48


class Conversation:
    """`server` answers each turn; `answers` are token ids."""

    def __init__(self, server: Any, text: str) -> None:
        self.server, self._text = server, text
        self.answers: list[list[int]] = []
        self.cached: list[int] = []
        self._messages: list[dict[str, Any]] = []

    def turn(self, question: str) -> None:
        content = question if self._messages else f"{self._text}\n\n{question}"
        self._messages.append({"role": "user", "content": content})
        choice, cached = self.server.converse(self._messages, ANSWER_TOKENS)
        self._messages.append(choice["message"])
        self.answers.append(choice["token_ids"])
        self.cached.append(cached)


def test_another_server_goes_on_with_a_conversation(
    start_module_daemon: Any, openai_servers: Any, smollm2: str
) -> None:
    """In bfloat16, too: its hits end where those of a server end that has held the whole conversation itself."""
    text = demo_model.document()
    assert text is not None
    daemon = start_module_daemon(size="256MiB")

    def start(name: str) -> Any:
        endpoint = "" if name == "alone" else daemon.endpoint
        return openai_servers(name, endpoint, {}, *OPTIONS, "--enable-prompt-tokens-details", served=smollm2)

    with ThreadPoolExecutor(3) as starting:
        first, second, alone = starting.map(start, ("first", "second", "alone"))
    begun, expected = Conversation(first, text[:TEXT_LENGTH]), Conversation(alone, text[:TEXT_LENGTH])
    for question in TURNS[:2]:
        begun.turn(question)
    for question in TURNS:
        expected.turn(question)
    wait_idle(daemon)
    assert first.stop() == 0
    before = hits(daemon)

    begun.server = second
    for question in TURNS[2:]:
        begun.turn(question)
    assert begun.cached == expected.cached and begun.cached[2] > 600, "all earlier turns were loaded"
    assert (hits(daemon) - before) * BLOCK >= begun.cached[2]
    assert begun.answers == expected.answers
    assert len({tuple(answer) for answer in begun.answers}) == len(TURNS)

"""A real engine computes requests while it loads: each layer waits for its part, and no token differs."""

from __future__ import annotations

from typing import Any

import pytest
from cache_state import BLOCK, wait_idle


@pytest.fixture(scope="module")
def daemon(start_module_daemon: Any) -> Any:
    return start_module_daemon(size="64MiB")


def test_no_token_differs(reopened: Any, daemon: Any, prompt: Any, reference: Any) -> None:
    prompts = [prompt(12 * BLOCK + 40 * n + 1) for n in range(3)]
    expected = reference(prompts)
    first = reopened("first", daemon.endpoint)
    first.generate(*(each[: 10 * BLOCK + 1] for each in prompts))
    wait_idle(daemon, first)
    first.ask("close")
    engine = reopened("second", daemon.endpoint, {"overlap": "auto"}, module="overlapping_connector")
    engine.generate(prompt(3 * BLOCK))  # in which its layers are announced
    for each, answer in zip(prompts, expected, strict=True):
        assert engine.generate(each) == [answer]
    engine.ask("close")
    daemon.wait_status(
        lambda s: s["client_counts"].get("loads_layered") == len(prompts), "the count of overlapping loads"
    )

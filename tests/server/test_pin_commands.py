"""`pin`, `pins` and `unpin` with a real daemon, and over its restarts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvcache_proto import messages as m
from kvcache_proto.types import GroupSpec, NamespaceSpec
from kvcache_server.admin_client import AdminClient
from kvcache_server.cli import commands

SPEC = NamespaceSpec("llama", (GroupSpec(16, 1 << 20),))


def chain(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(first, first + count)]


class Engine(AdminClient):
    def __init__(self, daemon: Any) -> None:
        super().__init__(daemon.endpoint, "rank 0", engine="qwen")
        self.namespace = self.ask(m.Attach(0, b"", SPEC, (0,))).namespace

    def store(self, run: list[bytes]) -> None:
        reserved = self.ask(m.Reserve(0, b"", self.namespace, [m.Run(run)]))
        if reserved.reservation:
            self.ask(m.Settle(0, b"", self.geometry.region_id, reserved.reservation, (0,), 0))

    def hits(self, run: list[bytes], request: str = "") -> int:
        found = self.ask(m.Acquire(0, b"", self.namespace, run, pin=False, request=request))
        self.ask(m.Acquire(0, b"", self.namespace, [], pin=False, request=request))  # it does not wait
        return int(found.hits)

    def flood(self, first: int) -> None:
        for number in range(40):
            self.store(chain(first + 100 * number, 16))


def run(command: str, *arguments: str, endpoint: str) -> Result:
    return CliRunner().invoke(commands, [command, "--endpoint", endpoint, *arguments])


def test_a_pinned_prompt_outlives_floods_and_daemons(start_daemon: Any) -> None:
    daemon = start_daemon(size="64MiB", keep="true")
    prompt = chain(1000, 10)
    with Engine(daemon) as engine:
        engine.store(prompt)
        engine.hits([*prompt, *chain(1, 2)], "cmpl-7-0")
        made = run("pin", "cmpl-7", "--tokens", "150", "--label", "system prompt", endpoint=daemon.endpoint)
        assert made.exit_code == 0, made.output
        assert f"pin 1: 9 blocks of 16 tokens in namespace {SPEC.id} (llama), 9 of them cached now" in made.output
        engine.flood(1 << 20)
        assert engine.hits(prompt) == 9
        (shown,) = json.loads(run("pins", "--json", endpoint=daemon.endpoint).output)
        assert (shown["blocks"], shown["label"], shown["bytes"]) == (9, "system prompt", 9 << 20)
        assert "system prompt" in run("pins", endpoint=daemon.endpoint).output
        assert "pins of operators: 1, 9.0 MiB" in run("status", endpoint=daemon.endpoint).output
    for end in ("kill", "stop"):
        getattr(daemon, end)()
        daemon = start_daemon(size="64MiB", keep="true")
        with Engine(daemon) as engine:
            engine.flood(2 << 20)
            assert engine.hits(prompt) == 9
            assert json.loads(run("pins", "--json", endpoint=daemon.endpoint).output)[0]["pin"] == 1
    assert run("unpin", "1", endpoint=daemon.endpoint).output == "pins ended: 1\n"
    daemon.stop()
    daemon = start_daemon(size="64MiB", keep="true")
    assert run("pins", endpoint=daemon.endpoint).output == "no pins\n"
    with Engine(daemon) as engine:
        for number in range(3, 1000):  # on a fast host, many: a prompt requested twice in a second stays for a while
            engine.flood(number << 20)
            gone = engine.status().eviction.evicted_blocks_by_class
            if gone.twice + gone.more == 9:
                break
        assert engine.hits(prompt) == 0


def test_blocks_are_named_by_hash(daemon: Any) -> None:
    prompt = chain(1000, 10)
    with Engine(daemon) as engine:
        engine.store(prompt)
        for name in (prompt[7].hex(), "0x" + prompt[7].hex(), prompt[7].hex()[-16:], "1007"):
            made = run("pin", "--hash", name, endpoint=daemon.endpoint)
            assert "8 blocks of 16 tokens" in made.output, made.output
        assert run("unpin", "--all", endpoint=daemon.endpoint).output == "pins ended: 1\n"  # they were all the same


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "give either REQUEST or --hash"),
        (("cmpl", "--hash", "12"), "give either REQUEST or --hash"),
        (("cmpl-unknown",), "no request 'cmpl-unknown' is remembered"),
        (("--hash", "ab" * 32), "no cached block has the hash"),
        (("--hash", "abcd"), "16 to 64 hexadecimal digits, or a number below 2^64"),
        (("cmpl", "--tokens", "3"), "is part of the ids of several requests: cmpl-1, cmpl-2"),
        (("cmpl-1", "--tokens", "3"), "no whole block: a block has 16 tokens"),
        (("cmpl-1",), "operator_quota allows"),
    ],
)
def test_what_cannot_be_pinned_is_named(daemon: Any, arguments: tuple[str, ...], told: str) -> None:
    with Engine(daemon) as engine:
        for number in (1, 2):
            engine.hits(chain(1000, 40), f"cmpl-{number}")
        failed = run("pin", *arguments, endpoint=daemon.endpoint)
        assert failed.exit_code
        assert told in failed.output + str(failed.exception)


def test_unpin_needs_a_number(short_folder: Path) -> None:
    for arguments in ((), ("3", "--all")):
        failed = run("unpin", *arguments, endpoint=f"ipc://{short_folder}/kv.sock")
        assert "give either NUMBER or --all" in failed.output

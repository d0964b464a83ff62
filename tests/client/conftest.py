"""What the client's tests share."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_proto.counts import CLIENT_COUNTS

PATIENCE = 30.0


@pytest.fixture
def spec() -> NamespaceSpec:
    return NamespaceSpec(model="llama", groups=[GroupSpec(block_tokens=16, shard_bytes=4096)])


@pytest.fixture
def hashes() -> Callable[[int], list[bytes]]:
    """`hashes(n)` returns n hashes that nobody has used."""
    return lambda count: [secrets.token_bytes(32) for _ in range(count)]


@pytest.fixture
def until() -> Callable[[Callable[[], Any], str], Any]:
    """`until(found, what)` returns the first truth of `found()`, or fails naming `what` did not come."""

    def wait(found: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + PATIENCE
        while not (value := found()):
            assert time.monotonic() < end, f"{what} did not come"
            time.sleep(0.005)
        return value

    return wait


@pytest.fixture
def connect(daemon: Any) -> Iterator[Callable[..., Session]]:
    """`connect(**options)` returns a session with the daemon, with a deadline that a busy machine does not miss."""
    sessions: list[Session] = []

    def make(**options: Any) -> Session:
        sessions.append(Session.connect(daemon.endpoint, **{"engine": "e1", "deadline": 10.0, **options}))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()
        assert session.counters.keys() <= CLIENT_COUNTS, "a count that the daemon does not know by name"


@pytest.fixture
def session(connect: Callable[..., Session]) -> Session:
    return connect()


@pytest.fixture
def rigs(daemon: Any) -> Iterator[Callable[..., Any]]:
    """`rigs(name, **settings)` returns an engine's scheduler with its rank, a steps.Rig."""
    from steps import Rig  # which wants torch: not all tests here do

    made: list[Rig] = []

    def make(name: str, **settings: Any) -> Rig:
        made.append(Rig(daemon.endpoint, name, **settings))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def chain(rigs: Any, daemon: Any) -> Iterator[Callable[[int], Any]]:
    """`chain(length)` returns a chains.Chain of one rank that verifies."""
    import torch
    from chains import Chain
    from steps import SPEC

    rig = rigs("one", dtype=torch.float32, verify="all")
    with Session.connect(daemon.endpoint, engine="one", deadline=10.0) as session:
        namespace = session.attach(SPEC)
        yield lambda length: Chain(rig, session, namespace, length)

"""A daemon with almost valid messages, for seconds; `run.py` does the same for any time."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import Daemon
from nearly import Maker
from run import FLAGS, Knocker, Session, describe, fuzz

from kvcache_proto import messages as m
from kvcache_proto.codec import decode_request
from kvcache_proto.errors import BadArgument

CORPUS = Path(__file__).parent / "corpus"
TOKEN = b"T" * 16  # what stands for a living session's token in the corpus


@pytest.fixture(scope="module")
def fuzzed(start_module_daemon: Any) -> Iterator[Daemon]:
    daemon: Daemon = start_module_daemon(**FLAGS)
    yield daemon
    assert daemon.process.poll() is None, daemon.log
    assert "internal" not in daemon.status()["daemon"]["errors"], daemon.log


def named(folder: str) -> list[Any]:
    return [pytest.param(file, id=file.stem) for file in sorted((CORPUS / folder).iterdir())]


@pytest.mark.parametrize("file", named("frames"))
def test_frames_of_the_corpus(fuzzed: Daemon, file: Path) -> None:
    session = Session(fuzzed.endpoint, random.Random(1))
    session.batch(0)
    session.send([file.read_bytes().replace(TOKEN, session.known["token"][0])])
    session.close()


@pytest.mark.parametrize("file", named("handshakes"))
def test_handshakes_of_the_corpus(fuzzed: Daemon, file: Path) -> None:
    knocker, said = Knocker(fuzzed.endpoint, random.Random(1)), file.read_bytes()
    for writes in ([said], [said[:3], said[3:]], [said[at : at + 1] for at in range(min(len(said), 300))]):
        knocker.shake_hands(writes)
    knocker.tidy()


def test_a_short_run(start_daemon: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = fuzz(start_daemon(**FLAGS), frames=24_000, handshakes=800, seed=int(os.environ.get("FUZZ_SEED", "1")))
    with capsys.disabled():
        print("\n" + describe(result))
    # What `why` remembers fills yet, and is bounded by 20 MiB; on a busy host, less of it is there at the beginning.
    assert result.growth < 28 << 20
    # It goes deep: what is sound is answered, what is not is refused for many reasons.
    assert {"Acquired", "Reserved", "Settled", "Attached", "Report", "bad_frame", "bad_argument"} <= set(result.answers)
    assert {"Welcome", "bad_frame", "version_mismatch"} <= set(result.knocks)


def test_every_kind_of_message_is_generated() -> None:
    """What the union of requests gains, the maker makes: well formed, by the decoder's word."""
    maker, made = Maker(m.REQUESTS, random.Random(7), {"token": [TOKEN]}), set()
    for _ in range(3000):
        message = maker.message()
        made.add(message[0])
        with contextlib.suppress(BadArgument):
            decode_request(msgspec.msgpack.encode(message))
    assert made == {kind.__struct_config__.tag for kind in m.REQUESTS.__args__}


def test_equal_seeds_make_equal_frames() -> None:
    one, two = (Maker(m.REQUESTS, random.Random(3), {"token": [TOKEN]}) for _ in range(2))
    assert [one.frame() for _ in range(300)] == [two.frame() for _ in range(300)]

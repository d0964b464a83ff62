"""What an engine alone knows of a miss reaches who asks the daemon for it; and the lookups, who writes them down."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from steps import BLOCK, PATIENCE, SPEC, Request, idle

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_client.scheduler.notes import HASHES, NOTES, Notes
from kvcache_client.session.counters import Counters
from kvcache_client.step_plan import Report
from kvcache_proto import messages as m
from kvcache_proto.region import pages_of
from kvcache_server.admin_client import AdminClient
from kvcache_server.insight.miss_log import REPEATED_AFTER
from kvcache_tools.replay.trace import read_trace


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "kvcache_server", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)


def why(daemon: Any, request: str) -> dict[str, Any]:
    with AdminClient(daemon.endpoint, "test") as admin:
        answer = msgspec.msgpack.decode(admin.ask(m.Why(0, b"", request)).answer)
    (told,) = answer["explained"]
    return told


def causes(told: dict[str, Any]) -> list[tuple[int, int, str]]:
    return [(run["first"], run["last"], run["cause"]) for run in told["runs"]]


def noted(told: dict[str, Any]) -> list[str]:
    return [note["cause"] for note in told["notes"]]


def follow_up(name: str, request: Request, tokens: int = 1) -> Request:
    return Request(name, len(request.block_hashes) * BLOCK + tokens, request.block_hashes)


def test_two_engines_and_an_operator(daemon: Any) -> None:
    """One command tells who needed the room, which field keeps two engines apart, and what it does not know."""
    size = 1 << 20
    spec = NamespaceSpec("llama", [GroupSpec(128, size)], {"dtype": "bfloat16"})
    half = NamespaceSpec("llama", [GroupSpec(128, size)], {"dtype": "float16"})
    with (
        Session.connect(daemon.endpoint, engine="one", deadline=5.0) as first,
        Session.connect(daemon.endpoint, engine="two", deadline=5.0) as second,
    ):
        one, two = first.attach(spec, (0,)), second.attach(half, (0,))
        prompt = [number.to_bytes(32, "little") for number in range(1, 5)]
        one.reserve(prompt).commit()
        pool = daemon.status()["pool"]
        room = pool["pages"] // pages_of(size, pool["page_bytes"])
        for number in range(len(prompt), room):
            one.reserve([number.to_bytes(32, "big")]).commit()
        two.acquire(prompt, request="chatcmpl-apart-0", tokens=4 * 128 + 7)
        second.ping()
        shown = command("why", "chatcmpl-apart", "--endpoint", daemon.endpoint)
        assert shown.returncode == 0, shown.stderr
        assert "blocks 0-3  cached in another namespace" in shown.stdout
        assert "dtype is 'float16' here and 'bfloat16' there" in shown.stdout
        assert "0 hits of 4 blocks of 128 tokens for 519 tokens" in shown.stdout
        for number in range(len(prompt)):
            two.reserve([bytes([number]) * 32]).commit()
        found = one.acquire(prompt, pin=False, request="cmpl-gone")
        assert not found.hits
        second.ping()
        told = json.loads(command("why", "cmpl-gone", "--json", "--endpoint", daemon.endpoint).stdout)
        (run,) = told["explained"][0]["runs"]
        assert (run["first"], run["last"], run["cause"], run["engine"]) == (0, 3, "room", "two")
        assert (run["namespace"], len(run["ages_s"])) == (half.id, 2)
        unknown = command("why", "cmpl-none", "--endpoint", daemon.endpoint)
        assert (unknown.returncode, "cmpl-gone" in unknown.stdout) == (1, True)
        assert "nothing is known about 'cmpl-none'" in unknown.stdout


def test_generated_tokens_that_are_not_saved(rigs: Any, daemon: Any) -> None:
    one, two = rigs("one", save="prompt"), rigs("two")
    request = Request("first", 2 * BLOCK)
    one.admit(request, [0, 1, 2, 3])
    one.step({request: 2 * BLOCK})
    request.block_hashes += Request("", 2 * BLOCK).block_hashes
    request.num_tokens += 2 * BLOCK
    one.step({request: 2 * BLOCK})
    one.scheduler.finished(request)
    one.step()
    idle(daemon, 2)
    one.session.ping()
    assert two.scheduler.matched_tokens(follow_up("second", request), 0) == (2 * BLOCK, True)
    two.session.ping()
    told = why(daemon, "second")
    assert causes(told) == [(0, 1, "hit"), (2, 3, "save_prompt")]
    assert told["runs"][1]["engine"] == "one"
    assert (told["tokens"], told["block_tokens"]) == (4 * BLOCK + 1, BLOCK)


def test_a_save_that_had_not_begun_when_its_blocks_were_given_away(rigs: Any, daemon: Any) -> None:
    one, two = rigs("one"), rigs("two")
    device = one.worker._device
    device.save = lambda job: (job.cancel(), job.ended(job))  # as one whose thread has come to nothing yet
    request = Request("first", 4 * BLOCK)
    one.run(request, [0, 1, 2, 3])
    until = time.monotonic() + PATIENCE
    while not (given_away := one.worker.take_report().given_away):
        assert time.monotonic() < until, "no save was cancelled"
        time.sleep(0.001)
    idle(daemon, 0)  # what the rank says of it comes first, as a step earlier
    one.scheduler.reported(Report(given_away=[*given_away, *given_away]))  # two ranks report
    one.step()
    one.session.ping()
    two.scheduler.matched_tokens(follow_up("second", request), 0)
    two.session.ping()
    assert causes(why(daemon, "second")) == [(0, 3, "given_away")]
    assert noted(why(daemon, "first")) == ["given_away"]
    assert one.worker.counters["saves_given_away"] == 4


def test_a_block_that_was_given_away_too_soon(rigs: Any, daemon: Any) -> None:
    one, two = rigs("one"), rigs("two")
    request = Request("first", 4 * BLOCK)
    one.admit(request, [0, 1, 2, 3])
    daemon.process.send_signal(signal.SIGSTOP)
    one.step({request: 4 * BLOCK})
    one.scheduler.finished(request)
    one.step(given=[2])  # the answer is not there yet, and the block somebody else's
    daemon.process.send_signal(signal.SIGCONT)
    one.session.ping()
    one.step(given=[30])
    one.session.ping()
    one.step()
    idle(daemon, 2)
    one.session.ping()
    two.scheduler.matched_tokens(follow_up("second", request), 0)
    two.session.ping()
    assert causes(why(daemon, "second"))[1][2] in ("given_away", "not_started")
    assert noted(why(daemon, "first")) == ["given_away"]


def test_what_was_computed_while_the_daemon_was_away(rigs: Any, start_daemon: Any, daemon: Any) -> None:
    """Told once it is back: the lookup that was not made, and the blocks that were not saved."""
    rig = rigs("one")
    daemon.stop()
    daemon.tidy()
    request = Request("away", 2 * BLOCK)
    while rig.session.up:
        rig.session.daemon.pump()
    assert rig.scheduler.matched_tokens(request, 0) == (0, False)
    assert rig.scheduler.matched_tokens(request, 0) == (0, False)
    rig.run(request, [0, 1])
    again = start_daemon(endpoint=daemon.endpoint)
    again.wait_status(lambda s: len([n for each in s["sessions"] for n in each["namespaces"]]) >= 2, "both attached")
    while not (rig.session.up and rig.scheduler._membership.namespace.attached):
        rig.session.daemon.pump()
    rig.step()
    rig.session.ping()
    told = why(again, "away")
    assert noted(told) == ["down", "down"]
    assert [note["blocks"] for note in told["notes"]] == [0, 2]
    rig.scheduler.matched_tokens(follow_up("later", request), 0)
    rig.session.ping()
    assert causes(why(again, "later")) == [(0, 1, "down")]


def test_lookups_that_are_not_made(rigs: Any, daemon: Any) -> None:
    rig = rigs("one", canary_every=1)
    rig.run(Request("first", 3 * BLOCK), [0, 1, 2])
    idle(daemon, 3)
    lora = Request("lora", 3 * BLOCK, lora_request=object())
    private = Request("private", 3 * BLOCK, skip_reading_prefix_cache=True)
    for request in (lora, private):
        for _ in range(3):
            assert rig.scheduler.matched_tokens(request, 0) == (0, False)
    odd = Request("odd", 3 * BLOCK)
    assert rig.scheduler.matched_tokens(odd, 5) == (0, False)
    rig.step()
    rig.session.ping()
    assert [noted(why(daemon, name)) for name in ("lora", "private", "odd")] == [
        ["lora"],
        ["by_request"],
        ["unaligned"],
    ]


def test_a_canary_and_a_failed_load_are_told(rigs: Any, daemon: Any) -> None:
    request = Request("first", 3 * BLOCK)
    rigs("writer").run(request, [0, 1, 2])
    idle(daemon, 3)
    canary, loader = rigs("canary", canary_every=1), rigs("loader")
    assert canary.scheduler.matched_tokens(follow_up("bird", request), 0) == (0, False)
    canary.step()
    canary.session.ping()
    assert noted(why(daemon, "bird")) == ["canary"]
    load = follow_up("broken", request)
    assert loader.scheduler.matched_tokens(load, 0) == (3 * BLOCK, True)
    loader.admit(load, [10, 11, 12, 13], 0, 3 * BLOCK)
    loader.scheduler.ended(["broken"], {11})
    loader.step()
    loader.session.ping()
    assert noted(why(daemon, "broken")) == ["load_failed"]


def test_a_daemon_that_answers_too_late(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    rig.session.daemon.deadline = 0.05
    daemon.process.send_signal(signal.SIGSTOP)
    request = Request("late", 2 * BLOCK)
    assert rig.scheduler.matched_tokens(request, 0) == (0, False)
    daemon.process.send_signal(signal.SIGCONT)
    rig.session.daemon.deadline = 5.0
    while not rig.session.up:
        rig.session.daemon.pump()
    rig.step()
    rig.session.ping()
    told = why(daemon, "late")
    assert (noted(told), causes(told)) == (["deadline"], [(0, 1, "began_empty")])


def test_blocks_that_come_after_a_wait(rigs: Any, daemon: Any) -> None:
    request = Request("first", 3 * BLOCK)
    with Session.connect(daemon.endpoint, engine="writer", deadline=5.0) as writer:
        reservation = writer.attach(SPEC, (0,)).reserve(request.block_hashes)
        rig = rigs("one")
        waiting = follow_up("waiting", request)
        assert rig.scheduler.matched_tokens(waiting, 0) == (None, False)
        reservation.commit()
        assert rig.scheduler.matched_tokens(waiting, 0) == (3 * BLOCK, True)
        rig.step()
        rig.session.ping()
        told = why(daemon, "waiting")
        assert (noted(told), causes(told)) == (["came"], [(0, 2, "pending")])
        assert told["runs"][0]["engine"] == "writer"
        salted = Request("salted", 3 * BLOCK, cache_salt="pepper")
        rig.scheduler.matched_tokens(salted, 0)
        rig.session.ping()
        assert causes(why(daemon, "salted")) == [(0, 2, "salted")]


def test_a_request_that_is_asked_for_again_and_again_is_remembered_now_and_then(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    request = Request("again", 3 * BLOCK)

    def ask_again() -> None:
        rig.scheduler.matched_tokens(request, 0)
        rig.scheduler._requests.get("again").lookup.at -= 1.0  # it is old by now

    begin = time.monotonic()
    for _ in range(20):
        ask_again()
    rig.session.ping()
    first, seconds = why(daemon, "again")["lookups"], time.monotonic() - begin
    assert 1 <= first <= 1 + seconds
    time.sleep(REPEATED_AFTER)  # the daemon's clock is the one that counts
    ask_again()
    rig.session.ping()
    assert why(daemon, "again")["lookups"] == first + 1


def test_a_notebook_is_bounded_and_says_what_it_dropped() -> None:
    counts = Counters()
    notes = Notes(counts)
    for number in range(NOTES + 5):
        notes.add(str(number), "down", float(number))
    assert counts.snapshot() == {"notes_dropped": 5}
    assert [note.request for note in notes.take(300.0)] == [str(number) for number in range(5, NOTES + 5)]
    notes.add("long", "down", 0.0, [b"h" * 32] * (HASHES + 5))
    assert counts.snapshot() == {"notes_dropped": 5}
    notes.add("short", "down", 1.0, [b"h" * 32])
    assert counts.snapshot() == {"notes_dropped": 6}
    (left,) = notes.take(2.0)
    assert (left.request, left.age_ms, len(left.hashes)) == ("short", 1000, 1)
    assert notes.take(3.0) == []


# The trace.


def test_a_trace_of_live_lookups(daemon: Any, tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    line = [sys.executable, "-m", "kvcache_server", "record", str(out), "--endpoint", daemon.endpoint]
    spec = NamespaceSpec("llama", [GroupSpec(128, 4096)])
    prompt = [bytes([number]) * 32 for number in range(1, 6)]
    with Session.connect(daemon.endpoint, engine="one", deadline=5.0) as session:
        namespace = session.attach(spec, (0,))
        namespace.acquire(prompt, request="before")
        recorder = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
        daemon.wait_status(lambda s: any(each["label"] == "record" for each in s["sessions"]), "the recorder")
        while not out.exists() or not out.read_text():  # it watches from its first question on
            namespace.acquire(prompt[:1], request="first")
            session.ping()
        namespace.acquire(prompt[:3], request="second", tokens=3 * 128 + 5)
        namespace.acquire(prompt[:3], request="second", tokens=3 * 128 + 5)
        namespace.reserve(prompt).commit()
        namespace.acquire([*prompt, b"x" * 32], pin=False, request="third", tokens=900)
        namespace.acquire(prompt[:4], pin=False)
        namespace.acquire(prompt[:4], pin=False)
        session.ping()
        recorder.send_signal(signal.SIGINT)
        _, said = recorder.communicate(timeout=30)
    assert recorder.returncode == 0, said
    lines = [json.loads(each) for each in out.read_text().splitlines()]
    assert [each["hash_ids"] for each in lines] == [[0], [0, 1, 2], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert [each["input_length"] for each in lines] == [128, 389, 900, 512, 512]
    assert all(each.keys() == {"timestamp", "input_length", "output_length", "hash_ids", "engine"} for each in lines)
    times = [each["timestamp"] for each in lines]
    assert times[0] == 0 and times == sorted(times)
    read = read_trace(str(out), 128)
    assert [(each.blocks, each.engine) for each in read[1:3]] == [((0, 1, 2), "0"), ((0, 1, 2, 3, 4, 5), "0")]
    assert "recorded 5 requests, 18 blocks, 72.2% of them hit; 0 lookups lost" in said

"""`kvcache-server replay`: the real index with a trace, and bounds that are checked by brute force."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import click.testing
import pytest
from insights import figures

from kvcache_proto.errors import ConfigError
from kvcache_proto.types import SUFFIX, GroupSpec
from kvcache_server.cli import commands
from kvcache_server.core.integrity import check_integrity
from kvcache_server.core.limits import Limits
from kvcache_tools.plan.room import room
from kvcache_tools.replay.device_cache import DeviceCache
from kvcache_tools.replay.simulated_daemon import SimulatedDaemon, block_hash
from kvcache_tools.replay.simulation import Setup, distinct, make_rooms, optimum, play, replay, routes, size_for
from kvcache_tools.replay.trace import TraceRequest, read_trace

MODEL = Path(__file__).parent.parent / "models" / "llama-3-8b.json"
MIB = 1 << 20


def conversations(seed: int, turns: int) -> list[TraceRequest]:
    """Conversations that continue a few system prompts; each turn repeats all turns before it."""
    draw, names = random.Random(seed), itertools.count()
    systems = [[next(names) for _ in range(draw.randrange(2, 10))] for _ in range(6)]
    talks: list[list[int]] = []
    found = []
    for number in range(turns):
        goes_on = talks and draw.random() < 0.7
        talk = talks.pop(draw.randrange(len(talks))) if goes_on else draw.choice(systems)
        talk = [*talk, *(next(names) for _ in range(draw.randrange(1, 8)))]
        talks.append(talk)
        found.append(TraceRequest(number / 10, tuple(talk)))
    return found


def write(requests: list[TraceRequest], path: Path) -> Path:
    lines = (
        json.dumps(
            {
                "timestamp": round(request.at * 1000),
                "input_length": 512 * len(request.blocks) - 5,
                "output_length": 9,
                "hash_ids": request.blocks,
            }
        )
        for request in requests
    )
    text = "\n".join(lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def run(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(commands, ["replay", *arguments], catch_exceptions=False)


def best_by_trying_all(requests: list[TraceRequest], blocks: int) -> int:
    """Return the most hits of any cache that keeps only complete prefixes, by trying every choice."""
    parent: dict[int | str, int | str | None] = {}
    for request in requests:
        parent.update(zip(request.blocks, (None, *request.blocks), strict=False))

    def whole(kept: frozenset[int | str]) -> bool:
        return all(parent[block] is None or parent[block] in kept for block in kept)

    reached: dict[frozenset[int | str], int] = {frozenset(): 0}
    for request in requests:
        following: dict[frozenset[int | str], int] = {}
        for kept, hits in reached.items():
            hits += sum(block in kept for block in request.blocks)
            there = sorted(kept | set(request.blocks), key=str)
            for size in range(min(blocks, len(there)) + 1):
                for choice in map(frozenset, itertools.combinations(there, size)):
                    if whole(choice) and hits > following.get(choice, -1):
                        following[choice] = hits
        reached = following
    return max(reached.values())


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_equals_a_brute_force_search(seed: int) -> None:
    draw = random.Random(seed)
    names: dict[tuple[int, ...], int] = {}
    requests = []
    for at in range(7):
        path = tuple(draw.randrange(2) for _ in range(draw.randrange(1, 4)))
        requests.append(
            TraceRequest(at, tuple(names.setdefault(path[: end + 1], len(names)) for end in range(len(path))))
        )
    for blocks in (1, 2, 3, 4):
        assert optimum(requests, blocks) == best_by_trying_all(requests, blocks)


def test_with_enough_memory_every_repeated_block_hits() -> None:
    requests = conversations(1, 300)
    asked, different = sum(len(each.blocks) for each in requests), distinct(requests)
    assert optimum(requests, different) == asked - different
    setup = Setup(engines=4)
    found = replay(requests, [size_for(8 * different, setup)], setup, time.perf_counter, lambda line: None)
    (row,) = found["rows"]
    assert row["shared"] == row["optimum"] == found["unlimited"] == (asked - different) / asked
    assert row["evicted"] == 0 and row["blocks"] >= 8 * different


def test_the_index_lies_between_private_caches_and_the_optimum() -> None:
    requests = conversations(2, 1200)
    setup = Setup(engines=4, block_bytes=MIB)
    sizes = [size_for(round(part * distinct(requests)), setup) for part in (0.05, 0.2, 0.5)]
    found = replay(requests, sizes, setup, time.perf_counter, lambda line: None)
    for row in found["rows"]:
        assert 0 < row["private"] < row["shared"] < row["optimum"] <= found["unlimited"]
        assert row["evicted"] > 0 and 0 < row["lookup_p50_us"] <= row["lookup_p99_us"]
    shared = [row["shared"] for row in found["rows"]]
    assert shared == sorted(shared)


def test_private_caches_are_smaller_daemons_with_part_of_the_trace() -> None:
    requests, setup = conversations(9, 600), Setup(engines=3, block_bytes=MIB)
    (row,) = replay(requests, [size := 120 * MIB], setup, time.perf_counter, lambda line: None)["rows"]
    hits = 0
    for engine in range(3):
        mine = requests[engine::3]
        alone = SimulatedDaemon(room(size // 3, MIB), 512, 1)
        hits += play([alone], mine, [list(map(block_hash, each.blocks)) for each in mine], [0] * len(mine), int)[0]
    assert row["private"] == hits / sum(len(each.blocks) for each in requests)
    assert 3 * row["private_blocks"] == pytest.approx(row["blocks"], rel=0.1)


def test_the_simulated_daemon_uses_the_real_index_and_stays_sound() -> None:
    requests = conversations(3, 400)
    place = room(256 * MIB, MIB)
    shadow = SimulatedDaemon(place, 512, 2)
    ((group,),) = [namespace.groups for namespace in shadow.cache.namespaces.values()]
    for begin in range(0, len(requests), 10):
        some = requests[begin : begin + 10]
        play([shadow, shadow], some, [list(map(block_hash, each.blocks)) for each in some], [0, 1] * 5, int)
        check_integrity(shadow.cache)
        for request in requests[: begin + 10]:  # of each prompt a beginning is there, or nothing
            there = [block_hash(block) in group.visible for block in request.blocks]
            assert there == sorted(there, reverse=True)
    assert figures(shadow.cache, 0.0)["pool"]["pinned_bytes"] == 0
    assert figures(shadow.cache, 0.0)["pool"]["blocks"] == place.blocks
    assert figures(shadow.cache, 0.0)["counters"]["blocks_evicted"] > 0


def test_a_step_may_save_more_than_one_reservation_can_hold() -> None:
    shadow = SimulatedDaemon(room(64 * MIB, 4096), 16, 1)
    prompt = [block_hash(at) for at in range(1_000)]  # of 16 tokens: 512 per step
    assert [shadow.ask(0, prompt, 0.0, time.perf_counter)[0] for _ in range(2)] == [0, 1_000]
    check_integrity(shadow.cache)


@pytest.mark.parametrize(("divergences", "hits"), [(False, [0, 0, 0, 39]), (True, [0, 0, 20, 39])])
def test_simulated_engines_save_windows_where_prompts_part(divergences: bool, hits: list[int]) -> None:
    """Those of the second prompt that begins alike, although its whole first step is cached."""
    window = GroupSpec(512, MIB, SUFFIX, 2)
    shadow = SimulatedDaemon(room(512 * MIB, MIB), 512, 1, suffixes=[window], divergences=divergences)
    prompts = [[block_hash(at if at < 20 else f"{name} {at}") for at in range(39)] for name in "abcb"]
    assert [shadow.ask(0, prompt, 0.0, time.perf_counter)[0] for prompt in prompts] == hits


def names(*blocks: int) -> list[bytes]:
    return [block_hash(block) for block in blocks]


def test_a_device_evicts_the_ends_of_the_prompts_that_were_used_least_recently() -> None:
    device = DeviceCache(4, reports=True)
    assert device.ask(names(1, 2, 3), 0.0) == (0, [])
    assert device.ask(names(1, 4), 1.0) == (1, [])
    hits, gone = device.ask(names(1, 5, 6), 2.5)
    assert hits == 1 and [(run.hashes, run.leaving, run.idle_ms) for run in gone] == [(names(1, 2, 3), 2, 2500)]
    hits, gone = device.ask(names(7, 8), 3.0)
    assert hits == 0 and [(run.hashes, run.leaving, run.idle_ms) for run in gone] == [
        (names(1, 4), 1, 2000),
        (names(1, 5, 6), 1, 500),
    ]
    assert device.ask(names(1, 5, 6), 4.0)[0] == 2
    assert device.ask(names(1, 5, 6, 9, 10), 5.0)[0] == 3
    assert device.ask(names(1, 5, 6, 9, 10), 6.0)[0] == 4, "of a prompt that does not fit, the first blocks stay"
    assert device.hits == 1 + 1 + 2 + 3 + 4


@pytest.mark.parametrize(("aware", "host"), [(True, 2), (False, 0)])
def test_what_a_device_keeps_makes_room_on_the_host(aware: bool, host: int) -> None:
    """The host has room for 6 blocks, and each of the two devices for 3. It evicts what only one of them needs."""
    mine, others, new = names(1, 2, 3), names(4, 5, 6), names(8, 9)
    prompts, engines = [others, mine, mine, new, others, mine], [1, 0, 0, 1, 1, 0]
    limits = Limits(write_quota=1.0, pin_quota=1.0)
    shadow = SimulatedDaemon(room(13 * MIB // 2, MIB), 512, 2, limits, "lru")
    if aware:
        shadow.report_devices()
    devices, requests = [DeviceCache(3, aware) for _ in range(2)], [TraceRequest(at, ("x",)) for at in range(6)]
    hits, _ = play([shadow, shadow], requests, prompts, engines, int, devices)
    assert [device.hits for device in devices] == [6, 1]
    assert hits == 7 + host


def test_hits_are_divided_between_devices_and_host(tmp_path: Path) -> None:
    requests = [TraceRequest(at, blocks) for at, blocks in enumerate([(1, 2, 3), (4, 5), (1, 2, 3, 6), (4, 7)])]
    path = write(requests, tmp_path / "trace.jsonl")
    for engines, device in ((1, 1), (2, 3 + 1)):  # one device keeps only 1 of the first prompt; two keep all
        capacity = ["--capacity", "50x", "--engines", str(engines), "--device-blocks", "3"]
        (row,) = json.loads(run(str(path), *capacity, "--json").stdout)["rows"]
        assert [row[part] for part in ("device", "host", "misses")] == [device / 11, (4 - device) / 11, 7 / 11]
        assert row["private"] == row["shared"] == row["optimum"] == 4 / 11
        text = run(str(path), *capacity).stdout
        assert re.search(rf"device +host +misses\n.*{device / 11:.1%} +{(4 - device) / 11:.1%} +{7 / 11:.1%}", text)
        assert "one cache with the blocks of the host and of all devices" in text


def test_a_long_chain_leaves_in_several_reservations() -> None:
    first, other, more = names(*range(300)), names(*range(1000, 1300)), names(*range(2000, 2350))
    shadow = SimulatedDaemon(room(700 * MIB, MIB), 512, 2, policy="lru")
    shadow.report_devices()
    devices = [DeviceCache(300, reports=True), DeviceCache(300, reports=True)]

    def ask(engine: int, prompt: list[bytes], now: float) -> int:
        return shadow.ask(engine, prompt, now, time.perf_counter, devices[engine])[0]

    assert ask(0, first, 0.0) == ask(1, other, 1.0) == 0
    assert ask(0, first, 2.0) == 300  # now it is known that requests return to their engine
    assert ask(1, more, 3.0) == 0  # in place of the first prompt, which a device keeps
    assert shadow.cache.evictions["room"] >= 250
    assert ask(0, names(5000), 4.0) == 0  # so that the first prompt leaves the device, and is saved again
    assert ask(1, first, 5.0) == 300
    check_integrity(shadow.cache)


def test_a_region_of_terabytes_takes_only_the_memory_of_its_rows() -> None:
    place = room(4 << 40, 64 * MIB)
    shadow = SimulatedDaemon(place, 512, 1)
    before = own_memory()
    prompts = [[block_hash(f"{number} {at}") for at in range(32)] for number in range(200)]
    play([shadow], [TraceRequest(0, ("x",))] * 200, prompts, [0] * 200, int)
    assert figures(shadow.cache, 0.0)["pool"]["used_bytes"] == 400 << 30
    assert own_memory() - before < 64 * MIB


def own_memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_routing() -> None:
    requests = [
        TraceRequest(0, (1,)),
        TraceRequest(1, (2,)),
        TraceRequest(2, (1, 3)),
        TraceRequest(3, (2, 4)),
        TraceRequest(4, (1,)),
    ]
    assert routes(requests, Setup(engines=2)) == [0, 1, 0, 1, 0]
    assert routes(requests, Setup(engines=3)) == [0, 1, 2, 0, 1]
    assert routes(requests, Setup(engines=3, routing="prefix")) == [0, 1, 0, 1, 0]
    named = [each._replace(engine=name) for each, name in zip(requests, "bbaab", strict=True)]
    assert routes(named, Setup(engines=3)) == [0, 0, 1, 1, 0]


def test_prefix_routing_helps_private_caches() -> None:
    requests = conversations(4, 800)
    sizes = [size_for(distinct(requests) // 2, Setup())]

    def private(routing: str) -> float:
        setup = Setup(engines=4, routing=routing)
        return float(replay(requests, sizes, setup, time.perf_counter, lambda line: None)["rows"][0]["private"])

    assert private("prefix") > private("round-robin")


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_the_command_prints_and_draws(tmp_path: Path, suffix: str) -> None:
    path, png = write(conversations(5, 200), tmp_path / f"trace.{suffix}"), tmp_path / "out.png"
    result = run(str(path), "--model", str(MODEL), "--capacity", "8GiB,32GiB,0.5x", "--engines", "2", "--png", str(png))
    assert result.exit_code == 0, result.output
    assert "200 requests of 2 engines" in result.stdout and "unlimited memory:" in result.stdout
    assert "32.0 GiB" in result.stdout and "▓" in result.stdout
    from matplotlib.image import imread

    picture = imread(png)
    assert picture.shape[:2] == (750, 1200)
    for colour in ((0x0B, 0x72, 0x85), (0xE8, 0x59, 0x0C), (0x86, 0x8E, 0x96)):
        drawn = (abs(picture[..., :3] * 255 - colour) < 1).all(axis=2)
        assert drawn.sum() > 100


def test_json_and_table_agree(tmp_path: Path) -> None:
    path = write(conversations(6, 100), tmp_path / "trace.jsonl")
    found: dict[str, Any] = json.loads(run(str(path), "--capacity", "0.1x,0.5x", "--engines", "3", "--json").stdout)
    assert found["requests"] == 100 and [row["blocks"] for row in found["rows"]] == sorted(
        row["blocks"] for row in found["rows"]
    )
    model = json.loads(run(str(path), "--model", str(MODEL), "--capacity", "4GiB", "--engines", "2", "--json").stdout)
    assert model["block_bytes"] == 512 * 128 * 1024
    assert model["rows"][0]["blocks"] == make_rooms(4 << 30, Setup(block_bytes=model["block_bytes"]))[0].blocks


GOOD = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}'


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ('{"timestamp": 0}', "missing required field `hash_ids`"),
        ('{"hash_ids": [1]}', "missing required field `timestamp`"),
        ('{"timestamp": -1, "hash_ids": [1]}', ">= 0.0 - at `$.timestamp`"),
        ('{"timestamp": NaN, "hash_ids": [1]}', "malformed"),
        ('{"timestamp": 0, "hash_ids": 3}', "at `$.hash_ids`"),
        ('{"timestamp": 0, "hash_ids": [1, [2]]}', "at `$.hash_ids[1]`"),
        ('{"timestamp": 0, "hash_ids": [1, 2, 1]}', "occurs twice"),
        ('{"timestamp": 0, "hash_ids": [1], "input_length": "x"}', "at `$.input_length`"),
        ('{"timestamp": 0, "hash_ids": [1, 2, 3], "input_length": 1024}', "--block-tokens"),
        ("[" * 100_000, "not a request"),
    ],
)
def test_an_invalid_line_is_reported_with_its_number(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(ConfigError, match=rf"{path}:3: .*{re.escape(says)}"):
        read_trace(str(path))


@pytest.mark.parametrize(
    "content", [b"", b'{"timestamp": 0, "hash_ids": []}\n', b"\x1f\x8bgarbage", gzip.compress(b"x", mtime=0)[:9]]
)
def test_a_file_without_requests_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)):
        read_trace(str(path))
    with pytest.raises(ConfigError, match="no such"):
        read_trace(str(tmp_path / "no such"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--capacity", "10GiB"], "give the size of a block"),
        (["--capacity", "0x"], "a factor above 0"),
        (["--capacity", "ax"], "a factor above 0"),
        (["--capacity", ","], "sizes or factors"),
        (["--capacity", "64MiB", "--block-bytes", "16MiB"], "not enough for 8 private caches"),
    ],
)
def test_invalid_capacities_are_refused(tmp_path: Path, arguments: list[str], says: str) -> None:
    path = write(conversations(7, 20), tmp_path / "trace.jsonl")
    with pytest.raises(ConfigError, match=says):
        run(str(path), *arguments)


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(conversations(8, 20), tmp_path / "trace.jsonl")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "kvcache_tools.replay.plot", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'kvcache-server\[replay\]'"):
        run(str(path), "--png", str(tmp_path / "out.png"))

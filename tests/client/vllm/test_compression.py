"""Engines that store KV compressed."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvcache_client import compression
from kvcache_server.commands.describe import describe

BLOCK = 32
LENGTH = 6 * BLOCK + 7


@pytest.fixture
def compressing(engines: Any, sim: Any, monkeypatch: Any) -> Any:
    """`compressing(name, **options)` makes an engine whose KV is of bfloat16. Engines with the same layers share it."""
    monkeypatch.setenv("KVCACHE_COPY_COMPRESS_ON_CPU", "1")

    def make(name: str, **options: Any) -> Any:
        specs = options.pop("specs", None) or sim.full(dtype=sim.torch.bfloat16)
        extra = {"compress": "auto", "weights_version": f"of {len(specs)} layers"} | options.pop("extra", {})
        return engines(name, specs=specs, extra=extra, **options)

    return make


def test_blocks_take_fewer_bytes_and_come_back(compressing: Any, sim: Any, prompt: Any, idle: Any, daemon: Any) -> None:
    tokens = prompt(LENGTH)
    one, two = compressing("one"), compressing("two", extra={"verify": "all"})
    one.generate(tokens)
    idle()
    assert two.generate(tokens, 3) == sim.expected(tokens, 3)
    assert two.prefills["r0"] == (7, 0, 6 * BLOCK)
    found = daemon.status()["namespaces"][-1]
    raw = 3 * sim.PAGE // 2
    assert found["block_bytes"] == [compression.stored_bytes(raw)] and found["block_bytes"][0] < 0.8 * raw
    assert found["identity"]["compression"] == f"{compression.CODEC}: 77.3% of the bytes"
    assert "is compressed, bfloat16 in 12 bits" in describe(daemon.figures())


@pytest.mark.parametrize(("compress", "kept"), [("auto", True), ("off", False)])
def test_memory_holds_three_tenths_more(
    compressing: Any, sim: Any, prompt: Any, idle: Any, start_daemon: Any, compress: str, kept: bool
) -> None:
    """Prompts of 1.3 times the region's bytes, in blocks of 512 KiB, asked for twice."""
    region = start_daemon(size="64MiB")
    specs = sim.full(256, dtype=sim.torch.bfloat16)
    fits = int(1.3 * (64 << 20) / (256 * sim.PAGE // 2 * 8))
    one = compressing("one", specs=specs, endpoint=region.endpoint, extra={"compress": compress})
    prompts = [prompt(8 * BLOCK + 3) for _ in range(fits)]
    for tokens in prompts:
        one.generate(tokens)
        region.wait_status(lambda status: not status["pool"]["reservations"], "the end of saves")
    for number, tokens in enumerate(prompts):
        assert one.generate(tokens, name=f"again {number}") == sim.expected(tokens, 1)
    loaded = sum(one.prefills[f"again {number}"][2] for number in range(fits))
    assert (loaded == fits * 8 * BLOCK) == kept


def test_engines_that_do_not_compress_never_load_what_is_compressed(
    compressing: Any, sim: Any, prompt: Any, idle: Any
) -> None:
    tokens = prompt(LENGTH)
    for name, compress, loaded in (("one", "auto", 0), ("two", "off", 0), ("three", "auto", 6), ("four", "off", 6)):
        engine = compressing(name, extra={"compress": compress})
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"][2] == loaded * BLOCK
        idle()


def test_a_block_that_cannot_be_compressed_is_computed_again(
    compressing: Any, sim: Any, prompt: Any, idle: Any, monkeypatch: Any
) -> None:
    """Its chain ends before it; what is saved beside it is kept."""
    said: list[str] = []
    logger = logging.getLogger("vllm.kvcache.worker")  # by a filter: see `lines`
    monkeypatch.setattr(logger, "filters", [lambda record: said.append(record.getMessage()) or True])
    tokens = prompt(LENGTH)
    digests = sim.chain(tokens)
    monkeypatch.setattr(sim, "NOISY", digests[3 * BLOCK + 5])  # and hardly another token
    # A row of noise in each of so many layers is more than the list of escapes takes.
    specs = sim.full(6, dtype=sim.torch.bfloat16)
    one, two = (compressing(name, specs=specs) for name in ("one", "two"))
    one.generate(tokens)
    idle()
    assert one.counters["blocks_not_compressed"] == 1
    assert sum("cannot be compressed" in line for line in said) == 1
    assert two.generate(tokens, 3) == sim.expected(tokens, 3)
    assert two.prefills["r0"] == (3 * BLOCK + 7, 0, 3 * BLOCK)
    one.reset()
    before = one.counters["saved_bytes"]
    one.generate(prompt(8 * BLOCK, tokens))
    idle()
    assert one.counters["saved_bytes"] == before, "nothing behind it is saved again"


def test_canaries_compare_what_is_stored_compressed(compressing: Any, prompt: Any, idle: Any, until: Any) -> None:
    tokens = prompt(LENGTH)
    one, two = (compressing(name, extra={"canary_every": 1}) for name in ("one", "two"))
    one.generate(tokens)
    idle()
    two.generate(tokens)
    until(lambda: two.counters.get("canary_checked"), "the comparison")
    assert not two.counters.get("canary_mismatches")


def test_a_canary_skips_what_it_cannot_compress(
    compressing: Any, sim: Any, prompt: Any, idle: Any, until: Any, monkeypatch: Any
) -> None:
    tokens = prompt(4 * BLOCK + 7)  # a canary compares four blocks
    specs = sim.full(6, dtype=sim.torch.bfloat16)
    one, two = (compressing(name, specs=specs, extra={"canary_every": 1}) for name in ("one", "two"))
    one.generate(tokens)
    idle()
    monkeypatch.setattr(sim, "NOISY", sim.chain(tokens)[3 * BLOCK + 5])
    two.generate(tokens)
    until(lambda: two.counters.get("canary_checked"), "the comparison")
    assert two.counters["canary_skipped"] == 1 and not two.counters.get("canary_mismatches")


def test_corrupt_bytes_are_detected(compressing: Any, sim: Any, prompt: Any, idle: Any) -> None:
    tokens = prompt(LENGTH)
    one, two = (compressing(name, extra={"verify": "all"}) for name in ("one", "two"))
    one.generate(tokens)
    idle()
    layer, digest = list(one.runners[0].layers.values())[-1], sim.chain(tokens)[4 * BLOCK]
    values = layer.content(sim.np.array([digest], sim.np.uint64))[0, -1].view(sim.np.uint16)
    region = one.workers[0]._session.region.buffer
    at = bytes(region).find((values >> 8 & 0x80 | values & 0x7F).astype(sim.np.uint8).tobytes())
    assert at >= 0
    region[at] ^= 1
    assert two.generate(tokens, 3) == sim.expected(tokens, 3)
    assert two.counters["loads_failed"] == 1


def test_heads_and_stripes_are_compressed_by_themselves(compressing: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """Engines with other numbers of ranks share them."""
    tokens = prompt(LENGTH)
    for ranks, loaded in ((1, 0), (2, 6), (1, 6)):
        heads = sim.full(8, heads=4 // ranks, total=4, dtype=sim.torch.bfloat16)
        extra = {"share_tp": True}
        engine = compressing(f"h{ranks}{loaded}", specs=heads, heads=4, tensor_parallel_size=ranks, extra=extra)
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"][2] == loaded * BLOCK
        idle()
    for ranks, loaded in ((1, 0), (2, 6)):
        latent = sim.latent(8, sim.torch.bfloat16, 64)
        engine = compressing(f"l{ranks}{loaded}", specs=latent, tensor_parallel_size=ranks)
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"][2] == loaded * BLOCK
        idle()


def test_windows_are_compressed_too(compressing: Any, sim: Any, prompt: Any, idle: Any, daemon: Any) -> None:
    if not sim.HAS_GROUPS:
        pytest.skip("they are not cached before 0.32")
    half, tokens = sim.torch.bfloat16, prompt(LENGTH)
    specs = sim.full(4, dtype=half) | sim.windows(4, 2 * BLOCK, 4, dtype=half)
    extra = {"verify": "all", "weights_version": "windows"}
    one, two = (compressing(name, specs=specs, extra=extra, blocks=200) for name in ("one", "two"))
    one.generate(tokens)
    idle()
    assert two.generate(tokens, 3) == sim.expected(tokens, 3)
    assert two.prefills["r0"][2] == 6 * BLOCK
    assert daemon.status()["namespaces"][-1]["block_bytes"] == 2 * [compression.stored_bytes(4 * sim.PAGE // 2)]


@pytest.mark.parametrize("reason", ["KV of float32", "NVIDIA GPU", "at least 4096"])
def test_where_nothing_can_be_compressed_a_log_line_says_why(
    compressing: Any, sim: Any, prompt: Any, monkeypatch: Any, lines: list[str], reason: str
) -> None:
    specs = {"KV of float32": sim.full(), "at least 4096": sim.full(1, dtype=sim.torch.bfloat16)}.get(reason)
    if reason == "NVIDIA GPU":
        monkeypatch.delenv("KVCACHE_COPY_COMPRESS_ON_CPU")
    engine = compressing("one", specs=specs)
    tokens = prompt(LENGTH)
    assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
    (line,) = [line for line in lines if "blocks are not compressed" in line]
    assert reason in line


def test_kv_of_several_precisions_is_stored_as_it_is(
    compressing: Any, sim: Any, prompt: Any, idle: Any, daemon: Any
) -> None:
    """As DeepSeek V3.2's in bfloat16, with an indexer's bytes beside the latent vectors."""
    if not sim.HAS_PRECISIONS:
        pytest.skip("this version gives both kinds of layers pages of one size")
    specs, tokens = sim.sparse_latent(12), prompt(LENGTH)
    one, two = compressing("one", specs=specs), compressing("two", specs=specs)
    one.generate(tokens)
    idle()
    assert two.generate(tokens, 3) == sim.expected(tokens, 3)
    assert two.prefills["r0"] == (7, 0, 6 * BLOCK)
    assert "compression" not in daemon.status()["namespaces"][-1]["identity"]

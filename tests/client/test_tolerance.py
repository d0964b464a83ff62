"""What the canary takes for noise, and what not: for each dtype, at random places."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcache_client.worker.tolerance import FORMATS, WINDOW, Format, difference, find_format

torch = pytest.importorskip("torch")

VALUES = 16 * 1024
EACH = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
BITS = {"float32": (23, 8), "float16": (10, 5), "bfloat16": (7, 8), "float8_e4m3fn": (3, 4), "float8_e5m2": (2, 5)}


def kv(seed: int, values: int = VALUES) -> torch.Tensor:
    """Return KV as models have it: some channels are large everywhere, some tokens are small."""
    draw = torch.Generator().manual_seed(seed)
    channels = 1 + 20 * (torch.rand(64, generator=draw) > 0.95)
    tokens = torch.rand(values // 64, 1, generator=draw) + 0.2
    bias = 2 * torch.randn(64, generator=draw)  # the same for all tokens, as in keys
    return ((torch.randn(values // 64, 64, generator=draw) + bias) * channels * tokens).reshape(-1)


def packed(values: torch.Tensor, form: Format) -> memoryview:
    return memoryview(values.to(getattr(torch, form.name)).view(torch.uint8).numpy().copy())


def noisy(values: torch.Tensor, form: Format, seed: int, much: float) -> torch.Tensor:
    """Return the values with `much` of the limit as noise, each in proportion to itself and to its token."""
    draw = torch.Generator().manual_seed(seed)
    rows = values.reshape(-1, 64)
    around = rows.abs() + rows.square().mean(1, keepdim=True).sqrt()
    error = torch.randn(rows.shape, generator=draw) * around
    return (rows + error * (much * form.limit * rows.norm() / error.norm())).reshape(-1)


@EACH
def test_the_same_is_the_same(form: Format) -> None:
    assert difference(packed(kv(1), form), packed(kv(1), form), form) == ""


@EACH
def test_noise_is_noise(form: Format) -> None:
    for seed in range(200):
        values = kv(seed, 4096)
        assert difference(packed(values, form), packed(noisy(values, form, seed, 0.5), form), form) == ""


@EACH
def test_more_than_noise_everywhere_is_found(form: Format) -> None:
    """Old weights, a wrong adapter: it fits nowhere quite."""
    for seed in range(20):
        values = kv(seed)
        assert difference(packed(values, form), packed(noisy(values, form, seed, 1.5), form), form)


@EACH
def test_a_token_that_another_expert_computed_is_noise(form: Format) -> None:
    """Strong, in one token of a hundred, and everywhere in it."""
    draw = torch.Generator().manual_seed(3)
    values = noisy(kv(3), form, 3, 0.3).reshape(-1, 512)
    other = values.clone()
    share = min(0.3, form.limit * 3)
    error = torch.randn(other[7].shape, generator=draw) * other[7].reshape(-1, 64).square().mean(
        1
    ).sqrt().repeat_interleave(64)
    other[7] += share * error
    assert difference(packed(values.reshape(-1), form), packed(other.reshape(-1), form), form) == ""


@EACH
def test_a_foreign_block_is_found_whole_or_in_part(form: Format) -> None:
    for seed in range(50):
        mine, foreign = packed(kv(seed), form), packed(kv(seed + 1000), form)
        assert difference(foreign, mine, form)
        for size in (len(mine) // 2, 8 * 4096 * form.bytes // 4):
            torn = bytearray(mine)
            at = random.Random(seed).randrange(0, len(mine) - size + 1, 64)
            torn[at : at + size] = foreign[at : at + size]
            assert difference(memoryview(bytes(torn)), mine, form), (seed, size, at)


@EACH
def test_with_experts_strong_noise_in_many_tokens_is_noise_and_a_foreign_block_is_found(form: Format) -> None:
    found = find_format({form.name}, "auto", experts=True)
    assert found is not None
    form = found
    for seed in range(20):
        values = kv(seed)
        rerouted = noisy(values, form, seed, 0.5)
        assert difference(packed(values, form), packed(rerouted, form), form) == ""
        assert difference(packed(kv(seed + 1000), form), packed(values, form), form)
        flipped = bytearray(packed(rerouted, form))
        usual = rerouted.reshape(-1, WINDOW).square().mean(1).sqrt().repeat_interleave(WINDOW)
        place = int(((rerouted.abs() > 0.6) & (rerouted.abs() < 0.9) & (usual < 5)).nonzero()[seed])
        flipped[(place + 1) * form.bytes - 1] ^= 0x40  # the highest bit of an exponent: 256 times as much, or more
        assert difference(memoryview(flipped), packed(values, form), form)


def test_a_small_foreign_piece_of_a_large_block_is_found() -> None:
    """A page of 2 MiB: beside all the rest it is less than noise."""
    form = FORMATS["bfloat16"]
    mine, foreign = bytearray(packed(kv(1, 1 << 20), form)), packed(kv(2, 1 << 20), form)
    torn = bytearray(mine)
    torn[40 * 8192 : 41 * 8192] = foreign[40 * 8192 : 41 * 8192]
    assert "a piece" in difference(memoryview(torn), memoryview(mine), form)


@EACH
def test_a_flipped_bit_is_found_where_it_moves_a_value_far(form: Format) -> None:
    """By more than half of the value, and of what is usual beside it; less than that is as noise is."""
    draw = random.Random(form.name)
    mantissa, exponent = BITS[form.name]
    found = missed = 0
    for seed in range(400):
        values = kv(seed, 4096)
        stored = bytearray(packed(noisy(values, form, seed, 0.1), form))
        computed = packed(values, form)
        place, bit = draw.randrange(4096), draw.randrange(mantissa - 2, mantissa + exponent + 1)
        stored[place * form.bytes + bit // 8] ^= 1 << bit % 8
        flipped, truth = (
            torch.frombuffer(bytearray(data), dtype=getattr(torch, form.name)).double().numpy()
            for data in (stored, computed)
        )
        begin = place // WINDOW * WINDOW
        usual = float(np.sqrt(np.square(truth[begin : begin + WINDOW]).mean()))
        moved = abs(flipped[place] - truth[place])
        far = form.spike * max(abs(truth[place]), usual)
        if not moved <= 1.1 * far:  # no number is far, too
            assert difference(memoryview(bytes(stored)), computed, form), (seed, place, bit, moved, usual)
            found += 1
        elif moved < 0.9 * far and moved < form.limit / 2 * np.linalg.norm(truth):
            assert not difference(memoryview(bytes(stored)), computed, form), (seed, place, bit)
            missed += 1
    assert found > 60
    assert missed > 20


@EACH
def test_what_is_no_number_is_found_unless_it_always_was(form: Format) -> None:
    values = kv(5)
    odd = values.clone()
    odd[77] = float("nan")
    assert difference(packed(odd, form), packed(odd.clone(), form), form) == ""
    assert "not finite" in difference(packed(odd, form), packed(values, form), form)
    assert "not finite" in difference(packed(values, form), packed(odd, form), form)


def test_nothing_beside_something() -> None:
    form = FORMATS["bfloat16"]
    empty = memoryview(bytes(2 * VALUES))
    assert difference(empty, packed(kv(1), form), form)
    assert difference(packed(kv(1), form), empty, form)


def test_formats_are_found_by_dtype_and_by_vllms_name_for_bytes() -> None:
    assert find_format({"bfloat16"}, "auto") is FORMATS["bfloat16"]
    assert find_format({"uint8"}, "fp8_e5m2") is FORMATS["float8_e5m2"]
    assert find_format({"uint8"}, "fp8") is FORMATS["float8_e4m3fn"]
    for unknown in (({"uint8"}, "fp8_ds_mla"), ({"uint8"}, ""), ({"float32", "uint8"}, "fp8"), ({"int4"}, "auto")):
        assert find_format(*unknown) is None

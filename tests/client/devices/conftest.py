"""A bench of each kind of device: `bench` for one layout, `each_bench` for all."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if importlib.util.find_spec("torch") is None:
    collect_ignore = ["test_conformance.py", "test_cuda.py", "test_npu.py"]
    RIGS = LAYOUTS = {}
else:
    from rigs import LAYOUTS, RIGS, Bench
if TYPE_CHECKING:
    from rigs import Npu, Rig


@pytest.fixture(autouse=True)
def simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Npu | None]:
    """The simulated NPU, where this is one: no test may make it do what a real one would stumble over."""
    npu = RIGS.get("npu")
    if npu is None or npu.unsupported_reason() or npu.simulation is None:
        yield None
        return
    npu.simulation.fake_acl_reset()
    monkeypatch.setenv("KVCACHE_NPU_REGISTER", "1")  # whatever the kernel of this host
    yield npu
    npu.simulation.fake_acl_finish()  # or what a device that is gone has left would run in the next test
    for wrong in ("unpinned_async", "inflight_violation"):
        assert npu.count(wrong) == 0, f"{npu.count(wrong)} times {wrong}"
    npu.simulation.fake_acl_reset()


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Sizes are small, so that a few blocks fill stages and rings several times and lie across chunks."""
    found = RIGS[request.param]
    reason = found.unsupported_reason()
    if reason:
        pytest.skip(reason)
    monkeypatch.setenv("KVCACHE_COPY_STAGE_MIB", "1")
    monkeypatch.setenv("KVCACHE_COPY_STAGED_BELOW_KIB", "1024")
    monkeypatch.setenv("KVCACHE_REGISTER_CHUNK_MIB", "1")
    return found


@pytest.fixture(params=LAYOUTS)
def each_bench(rig: Rig, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(rig, LAYOUTS[request.param])
    yield made
    made.close()


@pytest.fixture
def bench(rig: Rig) -> Iterator[Bench]:
    made = Bench(rig, LAYOUTS["keys and values apart"])
    yield made
    made.close()

"""Real engines when something is scarce, odd, broken or missing: every token stays what it was."""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from cache_state import BLOCK, hits, of_engine, wait_idle
from model_configs import COMMON, MODELS

from kvcache_client.engines.vllm.compat import ends_copies
from kvcache_client.engines.vllm.wrapped import before_sleep, before_step

LONGEST = 2304  # tokens
pytestmark = pytest.mark.timeout(900)  # several starts of vLLM in one test, on a busy machine


@pytest.fixture(scope="module")
def daemon(start_module_daemon: Any) -> Any:
    return start_module_daemon(size="64MiB")


def test_without_the_engines_own_prefix_cache(reopened: Any, daemon: Any, prompt: Any, reference: Any) -> None:
    engine = reopened("no-prefix", daemon.endpoint, enable_prefix_caching=False, async_scheduling=False)
    prompts = [prompt(n) for n in (BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK + 3)]
    assert engine.generate(*prompts) == reference(prompts)
    wait_idle(daemon, engine)
    before = hits(daemon, "no-prefix")
    assert engine.generate(*prompts) == reference(prompts)
    assert hits(daemon, "no-prefix") - before == 11


@pytest.mark.long  # an engine more
def test_larger_blocks_and_prompts_only(reopened: Any, daemon: Any, prompt: Any, reference: Any) -> None:
    extra = {"block_size": 0, "save": "prompt"}  # 4 * BLOCK
    engine = reopened("larger", daemon.endpoint, extra)
    prompts = [prompt(n) for n in (4 * BLOCK, 4 * BLOCK + 1, 11 * BLOCK, 12 * BLOCK + 5)]
    assert engine.generate(*prompts, max_tokens=5 * BLOCK) == reference(prompts, 5 * BLOCK)
    wait_idle(daemon, engine)
    (mine,) = [n for n in daemon.status()["namespaces"] if of_engine(n, "larger")]
    assert (mine["block_tokens"], mine["blocks"]) == ([128], 1 + 1 + 2 + 3)
    engine.ask("reset")
    # The engine itself has five blocks of the third prompt, so that the load begins inside of a cached block.
    assert engine.generate(prompts[2][: 5 * BLOCK + 1]) == reference([prompts[2][: 5 * BLOCK + 1]])
    assert engine.generate(*prompts) == reference(prompts)
    assert hits(daemon, "larger") >= 1 + 2 + 3


def test_every_load_fails(engines: Any, daemon: Any, prompt: Any, reference: Any) -> None:
    """Each request is answered, after one failed load each; then no more hits are offered for a while."""
    engine = engines("broken", daemon.endpoint, module="broken_connector", env={"VLLM_LOGGING_LEVEL": "DEBUG"})
    prompts = [prompt(6 * BLOCK + n) for n in range(1, 6)]
    assert engine.generate(*prompts) == reference(prompts)
    wait_idle(daemon, engine)
    engine.ask("reset")
    assert engine.generate(*prompts) == reference(prompts)
    assert engine.log.count("Recovered from KV load failure") >= 1
    assert engine.log.count("6 hit") == 0
    loads = engine.log.count("192 to load")
    assert 3 <= loads <= 5  # one a request, if it was looked up before three had failed
    engine.ask("reset")
    assert engine.generate(*prompts) == reference(prompts)
    assert engine.log.count("192 to load") == loads
    assert "3 loads in a row failed" in engine.log
    wait_idle(daemon, engine)
    engine.close()


def test_two_ranks_and_what_a_killed_one_leaves(engines: Any, daemon: Any, prompt: Any, reference: Any) -> None:
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    prompts = [prompt(n) for n in (BLOCK, BLOCK + 1, 9 * BLOCK + 5, 2100)]
    long = {"tensor_parallel_size": 2, "max_model_len": LONGEST}
    first = engines("pair-a", daemon.endpoint, env=env, **long)
    answers = first.generate(*prompts)
    wait_idle(daemon, first)
    first.kill_rank(1)
    daemon.wait_status(
        lambda s: not any(e["engine"].startswith("pair-a-") for e in s["sessions"]), "the end of the first pair"
    )
    first.close()

    second = engines("pair-b", daemon.endpoint, env=env, **long)
    before = hits(daemon, "pair-b")
    assert [answers, second.generate(*prompts)] == [reference(prompts)] * 2
    assert hits(daemon, "pair-b") - before == 0 + 1 + 9 + 65
    assert "shard 1 of 2" in second.log
    wait_idle(daemon, second)
    second.close()


def test_no_daemon_then_one_then_none(
    engines: Any, start_daemon: Any, short_folder: Any, prompt: Any, reference: Any
) -> None:
    engine = engines("alone", f"ipc://{short_folder}/kv.sock")
    prompts = [prompt(7 * BLOCK + n) for n in range(1, 5)]
    assert engine.generate(*prompts) == reference(prompts)
    assert engine.log.count("no daemon at") == 1  # one line

    daemon = start_daemon(size="64MiB")
    daemon.wait_status(
        lambda s: len([e for e in s["sessions"] if e["engine"].startswith("alone-")]) == 2, "both sessions"
    )
    daemon.wait_status(lambda s: s["namespaces"], "the namespace")
    engine.ask("reset")
    assert engine.generate(*prompts) == reference(prompts)
    wait_idle(daemon, engine)
    engine.ask("reset")
    assert engine.generate(*prompts) == reference(prompts)
    assert hits(daemon, "alone") == 4 * 7

    names = engine.ask("add", prompts=[prompt(9 * BLOCK + n) for n in range(4)] + prompts, max_tokens=40)["names"]
    engine.ask("finish", steps=5)
    daemon.kill()  # half-way
    assert set(engine.ask("finish")["tokens"]) == set(names)
    engine.ask("reset")
    assert engine.generate(*prompts) == reference(prompts)
    engine.close()


def test_what_cannot_be_cached_is_said_and_served(reopened: Any, daemon: Any, write_model: Any, prompt: Any) -> None:
    folder = write_model("mla", {**COMMON, **MODELS["mla"]})
    more = {"cpu_bytes_to_use": 1 << 30}
    options = {"model": folder, "kv_cache_memory_bytes": 64 << 20, "attention_backend": "CPU_MLA"}
    engine = reopened("mla", daemon.endpoint, more, **options)
    (answer,) = engine.generate(prompt(5 * BLOCK))
    assert len(answer) == 8
    assert engine.log.count("this engine runs without the KV cache server: vLLM computes a prompt") == 1
    assert engine.log.count("cpu_bytes_to_use is a setting of another connector") == 1
    assert engine.ask("reset", connector=True)["reset"]


def test_a_reset_that_keeps_the_weights_keeps_what_is_cached(
    reopened: Any, daemon: Any, model: str, tmp_path: Path, prompt: Any, reference: Any
) -> None:
    folder = tmp_path / "kept"
    shutil.copytree(model, folder)
    engine = reopened("kept", daemon.endpoint, {"on_reset": "keep"}, model=str(folder))
    prompts = [prompt(8 * BLOCK + 3)]
    assert engine.generate(*prompts) == reference(prompts)
    wait_idle(daemon, engine)
    assert engine.ask("reset", running=True, connector=True)["reset"]
    before = hits(daemon, "kept")
    assert engine.generate(*prompts) == reference(prompts)
    assert hits(daemon, "kept") - before == 8
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")  # other files
    assert engine.ask("reset", running=True, connector=True)["reset"]
    assert engine.generate(*prompts) == reference(prompts)
    assert hits(daemon, "kept") - before == 8
    assert engine.log.count("the checkpoint is unchanged") == 1


@pytest.mark.long  # an engine would fail
def test_vllms_workers_have_the_methods_that_are_wrapped() -> None:
    class Rank:
        def drain(self) -> None: ...

    rank = Rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM's own imports
        for name in ("vllm.v1.worker.gpu_worker.Worker", "vllm.v1.worker.cpu_worker.CPUWorker"):
            before_sleep(name, rank.drain)
            module, _, cls = name.rpartition(".")
            found = getattr(sys.modules[module], cls)
            before_step(name)
            assert hasattr(found.sleep, "_kvcache_first") or ends_copies(found.sleep)
            assert hasattr(found.execute_model, "_kvcache_first")

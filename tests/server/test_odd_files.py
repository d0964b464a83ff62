"""Commands that read or write odd files end with one line and an exit code."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MODEL = str(Path(__file__).parent.parent / "models" / "qwen3-8b.json")
TRACE = '{"timestamp": 0, "hash_ids": [1, 2]}\n'
NESTED = "[" * 10_000 + "]" * 10_000
LONG = "x" * 5000


def run(*arguments: str, stdout: Any = subprocess.PIPE) -> tuple[int, str]:
    """Return exit code and output of a process that is limited to 4 GiB."""
    done = subprocess.run(
        [sys.executable, "-m", "kvcache_server", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env={key: value for key, value in os.environ.items() if not key.startswith("KVCACHE_")},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)),
        check=False,
    )
    return done.returncode, done.stderr


def refused(code: int, said: str) -> bool:
    return code == 2 and len(said.splitlines()) == 1 and said.startswith("kvcache-server: ")


@pytest.fixture
def odd(tmp_path: Path) -> dict[str, str]:
    """Odd files, named after what is odd about them."""
    (tmp_path / "nested.json").write_text('{"model_type": ' + NESTED + "}")
    (tmp_path / "nested.toml").write_text("size = " + NESTED)
    (tmp_path / "nested.jsonl").write_text('{"timestamp": 0, "hash_ids": ' + NESTED + "}\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01" * 100)
    (tmp_path / "gz").write_bytes(b"\x1f\x8b\x08\x00broken")
    names = {"nested": "nested.json", "toml": "nested.toml", "lines": "nested.jsonl", "binary": "binary", "gz": "gz"}
    found = {name: str(tmp_path / file) for name, file in names.items()}
    return found | {"folder": str(tmp_path), "endless": "/dev/zero", "long": LONG, "none": str(tmp_path / "none")}


ODD = ["nested", "toml", "lines", "binary", "gz", "folder", "endless", "long", "none"]


@pytest.mark.parametrize("kind", ODD)
def test_odd_input_files(tmp_path: Path, odd: dict[str, str], kind: str) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(TRACE)
    file = odd[kind]
    for command in (
        ["plan", file],
        ["replay", file],
        ["replay", str(trace), "--model", file],
        ["serve", "--config", file],
    ):
        code, said = run(*command)
        assert refused(code, said), (command[:2], code, said[-2000:])


@pytest.mark.parametrize(
    "name", ["folder/", "/dev/full/x.png", "/nowhere/x.png", "x.weird", LONG + ".png", "/dev/full"]
)
def test_a_failed_picture_does_not_lose_the_result(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib", reason="draws")
    trace, found = tmp_path / "t.jsonl", tmp_path / "found"
    trace.write_text(TRACE)
    (tmp_path / "folder").mkdir()
    with found.open("w") as out:
        code, said = run("replay", str(trace), "--png", str(tmp_path / name), stdout=out)
    assert code == 2 and "Traceback" not in said and "--png" in said.splitlines()[-1], said
    assert "8 private caches" in found.read_text(), "what was found is told all the same"


@pytest.mark.parametrize("name", ["/dev/null", "/proc/x", LONG])
def test_a_folder_that_cannot_be_created(name: str) -> None:
    code, said = run("demo", "--write-model", name)
    assert code != 0 and "Traceback" not in said and len(said.splitlines()) == 1, said


def test_a_trace_that_cannot_be_written(daemon: Any) -> None:
    record = ["record", "--endpoint", daemon.endpoint, "--seconds", "0.1"]
    for name in ("/nowhere/x", LONG, str(daemon.folder)):
        code, said = run(*record, name)
        assert code in (1, 2) and len(said.splitlines()) == 1 and "Traceback" not in said, said
    from kvcache_proto import messages as m
    from kvcache_proto.types import GroupSpec, NamespaceSpec
    from kvcache_server.admin_client import AdminClient

    with AdminClient(daemon.endpoint, engine="one") as engine:
        number = engine.ask(m.Attach(0, b"", NamespaceSpec("m", (GroupSpec(16, 1024),)), (0,))).namespace
        recorder = subprocess.Popen(
            [sys.executable, "-m", "kvcache_server", *record[:3], "/dev/full"], stderr=subprocess.PIPE, text=True
        )
        while recorder.poll() is None:
            engine.ask(m.Acquire(0, b"", number, [os.urandom(32)], pin=False))
        assert recorder.stderr is not None
        said = recorder.stderr.read()
        recorder.stderr.close()
    assert recorder.returncode == 1
    assert "Traceback" not in said and "No space left on device" in said and len(said.splitlines()) == 1, said


def test_a_full_output(daemon: Any) -> None:
    with open("/dev/full", "w") as full:
        for command in (["status"], ["status", "--json"], ["why", "r"], ["top", "--once", "--interval", "0.1"]):
            code, said = run(*command, "--endpoint", daemon.endpoint, stdout=full)
            assert code == 1 and len(said.splitlines()) == 1 and "No space left on device" in said, said
        code, said = run("plan", MODEL, stdout=full)
        assert code == 1 and len(said.splitlines()) == 1, said

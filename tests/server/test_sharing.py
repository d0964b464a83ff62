"""Why engines and hosts share no blocks: what `status` says of namespaces, with real daemons."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvcache_proto import messages as m
from kvcache_proto.types import SUFFIX, GroupSpec, NamespaceSpec
from kvcache_server.admin_client import AdminClient
from kvcache_server.commands import sharing

IDENTITY = {"vllm": "0.32", "dtype": "bfloat16", "kv_dtype": "auto", "seed": "0"}


def spec(model: str = "llama", size: int = 4096, tokens: int = 16, **identity: str) -> NamespaceSpec:
    return NamespaceSpec(model, (GroupSpec(tokens, size),), IDENTITY | identity)


def status(daemon: Any, *arguments: str, content: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "kvcache_server", "status", "--endpoint", daemon.endpoint, *arguments]
    return subprocess.run(command, input=content, capture_output=True, timeout=60, check=False)


@pytest.fixture
def engines() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def there(start_daemon: Any, short_folder: Path) -> Any:
    """The daemon of another host."""
    return start_daemon(endpoint=f"ipc://{short_folder}/there.sock")


def attach(engines: ExitStack, daemon: Any, *specs: NamespaceSpec) -> None:
    admin = engines.enter_context(AdminClient(daemon.endpoint, engine="e"))
    for each in specs:
        admin.ask(m.Attach(0, b"", each, (0,)))


def compared(here: Any, there: Any) -> list[str]:
    """Return the lines of `status --compare` with the report of another daemon."""
    done = status(here, "--compare", "-", content=status(there, "--json").stdout)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode().splitlines()


# Within a daemon.


def test_status_says_how_namespaces_of_one_model_differ(daemon: Any, engines: ExitStack) -> None:
    one, other = spec(), spec(seed="1", extra="\x1b[2J")
    attach(engines, daemon, one, other, spec("qwen", seed="2"))
    lines = status(daemon).stdout.decode().splitlines()
    (said,) = [line for line in lines if "differ" in line]
    assert said == (
        f"namespaces {one.id} and {other.id} of llama differ first in: seed: '0' != '1' (also in: extra)"
    ), "and namespaces of other models are not compared"
    table = [at for at, line in enumerate(lines) if line.startswith(("namespace ", one.id, other.id))]
    assert lines.index(said) > max(table), "it is below the table"


def test_status_names_a_few_pairs(daemon: Any, engines: ExitStack) -> None:
    attach(engines, daemon, *(spec(seed=f"engine {number}") for number in range(5)))
    lines = status(daemon).stdout.decode().splitlines()
    assert sum("of llama differ first in: seed: 'engine " in line for line in lines) == sharing.MOST_PAIRS == 5
    assert "and 5 more pairs of namespaces that have one model" in lines


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (spec(tokens=32, kv_dtype="fp8"), "groups[0].block_tokens: 16 != 32 (also in: kv_dtype)"),
        (spec(size=2048, kv_dtype="fp8"), "groups[0].shard_bytes: [4096] != [2048] (also in: kv_dtype)"),
        (
            NamespaceSpec("llama", (GroupSpec(16, 4096), GroupSpec(16, 64, SUFFIX, 2)), IDENTITY | {"draft": "mtp"}),
            "groups: 1 != 2 (also in: draft)",
        ),
        (
            NamespaceSpec("llama", (GroupSpec(16, 4096),), {**IDENTITY, "seed": "1"}, 16),
            "seed: '0' != '1' (also in: hash_bytes)",
        ),
        (
            NamespaceSpec("llama", (GroupSpec(16, 4096),), {"vllm": "0.32"}),
            "dtype: 'bfloat16' != nothing (also in: kv_dtype, seed)",
        ),
    ],
)
def test_the_first_difference_is_in_the_order_of_the_fields(
    daemon: Any, engines: ExitStack, other: NamespaceSpec, said: str
) -> None:
    attach(engines, daemon, spec(), other)
    assert f"of llama differ first in: {said}\n" in status(daemon).stdout.decode()


# Between hosts.


def test_hosts_that_share_and_hosts_that_do_not(daemon: Any, there: Any, engines: ExitStack, tmp_path: Path) -> None:
    one, mine, theirs = spec(), spec("qwen"), spec("qwen", dtype="float16", seed="7")
    attach(engines, daemon, one, mine, spec("here\n"))
    attach(engines, there, one, theirs, spec("there"))
    assert compared(daemon, there) == [
        f"llama: shared: namespace {one.id}",
        f"qwen: not shared: namespaces {mine.id} here and {theirs.id} there differ first in: "
        "dtype: 'bfloat16' != 'float16' (also in: seed)",
        "only here: here\\n",
        "only there: there",
    ]
    file = tmp_path / "there.json"
    file.write_bytes(status(there, "--json").stdout)
    assert there.stop() == 0
    done = status(daemon, "--compare", str(file))
    assert done.stdout.decode().splitlines()[0] == f"llama: shared: namespace {one.id}", "no other daemon is needed"


def test_one_of_several_namespaces_is_shared(daemon: Any, there: Any, engines: ExitStack) -> None:
    shared, more = spec(), [spec(seed=f"engine {number}") for number in range(7)]
    attach(engines, daemon, shared, *more)
    attach(engines, there, shared)
    said = compared(daemon, there)
    assert said[0] == f"llama: shared: namespace {shared.id}"
    assert said[1] == (
        f"llama: not shared: namespaces {more[0].id} here and {shared.id} there differ first in: "
        "seed: 'engine 0' != '0'"
    )
    assert said[-1] == "llama: not shared: 2 more pairs of namespaces" and len(said) == 7


def test_one_namespace_with_two_geometries(daemon: Any, there: Any, engines: ExitStack) -> None:
    attach(engines, daemon, spec(size=4096))
    attach(engines, there, spec(size=8192))
    assert compared(daemon, there) == [
        f"llama: not shared: namespace {spec().id}, whose blocks differ first in: "
        "groups[0].shard_bytes: [4096] != [8192]"
    ]


def test_hosts_without_a_common_model(daemon: Any, there: Any, engines: ExitStack) -> None:
    attach(engines, daemon, spec("/data/llama"))
    assert compared(daemon, there) == ["no model is on both hosts: nothing is shared", "only here: /data/llama"]


def test_reports_that_leave_facts_out() -> None:
    """0.1.0 has no groups, and a report with very many namespaces has no identities."""
    whole = sharing.Space("a", "llama", dict(IDENTITY), [{"block_tokens": 16}], 32)
    old = sharing.Space("b", "llama", IDENTITY | {"seed": "1"})
    bare = sharing.Space("c", "llama", hash_bytes=32)
    assert sharing.between([whole], [old]) == [
        "llama: not shared: namespaces a here and b there differ first in: seed: '0' != '1'"
    ]
    assert sharing.between([bare], [whole]) == [
        "llama: not shared: namespaces c here and a there differ in something that these reports leave out"
    ]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "standard input: not JSON: "),
        (b"namespace  model\n", "standard input: not JSON: "),
        (b'{"namespaces": [{"id": "\xff"}]}', "standard input: not JSON: "),
        (b'{"all": ' + b"[" * 100_000, "standard input: not JSON: "),
        (b"[]", "standard input: not the output of `kvcache-server status --json`: Expected `object`, got `array`"),
        (b"{}", "standard input: not the output of `kvcache-server status --json`: "),
        (b'{"namespaces": [{"id": 1, "model": "m"}]}', "Expected `str`, got `int`"),
    ],
)
def test_what_is_no_report_is_refused_in_one_line(daemon: Any, content: bytes, told: str) -> None:
    done = status(daemon, "--compare", "-", content=content)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode().startswith("kvcache-server: ") and told in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


def test_wrong_use_of_compare(daemon: Any, tmp_path: Path) -> None:
    missing = status(daemon, "--compare", f"{tmp_path}/nothing.json")
    assert missing.returncode == 2
    assert (
        missing.stderr.decode()
        == f"kvcache-server: {tmp_path}/nothing.json: cannot be read: No such file or directory\n"
    )
    both = status(daemon, "--json", "--compare", "-", content=json.dumps(daemon.status()).encode())
    assert both.returncode == 2 and both.stderr.startswith(b"kvcache-server: status: --compare has no output in JSON")

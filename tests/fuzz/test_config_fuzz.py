"""Almost valid settings: the result is a Config within its bounds or a ConfigError, and nothing else."""

from __future__ import annotations

import contextlib
import string
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import settings as limits
from hypothesis import strategies as st

from kvcache_proto.errors import ConfigError
from kvcache_server.config import Config, load, settings

NAMES = [row.name for row in settings()]
ENDPOINT = "ipc:///tmp/x/kv.sock"
TEXT = (
    st.text(max_size=30)
    | st.text(string.digits + ".-+eE_ KMGTiB", max_size=30)
    | st.sampled_from(["inf", "nan", "1_0"])
)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.sampled_from(["9" * 5000, "1" * 400 + ".5"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def check(config: Config) -> None:
    assert config.endpoint.startswith("ipc:///")
    assert 1 <= config.size <= 1 << 50
    assert all(0 <= each < 1 << 32 for each in (*config.allow_uids, *config.allow_gids))
    assert config.attach_rate > 0
    msgspec.convert(msgspec.to_builtins(config), Config)  # each value is of its type, too


@limits(deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUE, max_size=4))
@example({"size": "9" * 5000})
@example({"size": "1" * 400 + ".5"})
@example({"allow_uids": "9" * 5000})
@example({"max_sessions": "9" * 5000})
def test_flags(flags: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        check(load(None, {"KVCACHE_ENDPOINT": ENDPOINT}, flags))


@limits(deadline=None)
@given(st.dictionaries(st.sampled_from([f"KVCACHE_{name.upper()}" for name in NAMES]) | TEXT, TEXT, max_size=4))
def test_environment(environ: dict[str, str]) -> None:
    environ.pop("KVCACHE_CONFIG", None)
    with contextlib.suppress(ConfigError):
        check(load(None, {"KVCACHE_ENDPOINT": ENDPOINT} | environ))


LINE = st.one_of(
    st.tuples(
        st.sampled_from(NAMES),
        st.sampled_from(['"4GiB"', "1", "-1", "1.5", "[1, 2]", "true", "nan", "1979-05-27", '"']),
    ),
    st.tuples(st.sampled_from(NAMES), st.integers().map(str) | st.floats().map(str)),
    st.tuples(st.text(max_size=9), st.text(max_size=9)),
).map(" = ".join)


@limits(deadline=None)
@given(st.lists(LINE, max_size=5).map(lambda lines: "\n".join(lines).encode(errors="replace")) | st.binary(max_size=60))
@example(b"size = " + b"9" * 5000)
@example(b"size = " + b"[" * 5000)
def test_files(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    file: Path = tmp_path_factory.getbasetemp() / "fuzz.toml"
    file.write_bytes(text)
    with contextlib.suppress(ConfigError):
        check(load(str(file), {"KVCACHE_ENDPOINT": ENDPOINT}))

"""The sources of settings, their valid values, and the errors for invalid ones."""

from __future__ import annotations

import grp
import re
from pathlib import Path

import msgspec
import pytest

from kvcache_proto.errors import ConfigError
from kvcache_proto.sizes import format_size, parse_size
from kvcache_server.config import Config, load, reference, settings

ENDPOINT = {"KVCACHE_ENDPOINT": "ipc:///tmp/x/kv.sock"}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("30GiB", 30 << 30),
        ("512MiB", 512 << 20),
        ("512 mib", 512 << 20),
        ("1.5G", 3 << 29),
        ("2T", 2 << 40),
        ("10GB", 10**10),
        ("64KB", 64_000),
        ("100B", 100),
        ("4096", 4096),
        (4096, 4096),
        (" 7 ", 7),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "-1", "-5GiB", "GiB", "1XiB", "1e9", "ten", "1 2", "nan", "inf", True, "9999999TiB"]
)
def test_invalid_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1.0 MiB"), (30 << 30, "30.0 GiB"), (3 << 40, "3.0 TiB")]
)
def test_sizes_are_formatted_readably(size: int, text: str) -> None:
    assert format_size(size) == text


def test_flags_override_environment_overrides_file(tmp_path: Path) -> None:
    file = tmp_path / "kv.toml"
    file.write_text('size = "1GiB"\npin_quota = 0.1\nmax_sessions = 7\nallow_uids = [1000, 1001]\n')
    environ = {**ENDPOINT, "KVCACHE_SIZE": "2GiB", "KVCACHE_PIN_QUOTA": "0.2", "KVCACHE_ALLOW_GIDS": "5, 6"}
    config = load(str(file), environ, {"size": "3GiB", "pin_quota": None})
    assert (config.size, config.pin_quota, config.max_sessions) == (3 << 30, 0.2, 7)
    assert (config.allow_uids, config.allow_gids) == ((1000, 1001), (5, 6))
    assert config.endpoint == ENDPOINT["KVCACHE_ENDPOINT"]


def test_users_and_groups_may_be_names(tmp_path: Path) -> None:
    file = tmp_path / "kv.toml"
    file.write_text('allow_uids = ["root", 1000, "1001"]\nallow_gids = "daemon, 7,"\n')
    config = load(str(file), ENDPOINT)
    assert (config.allow_uids, config.allow_gids) == ((0, 1000, 1001), (grp.getgrnam("daemon").gr_gid, 7))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("0,bob the builder", "allow_uids: no user 'bob the builder' on this host"),
        ("\u00b2", "no user '\u00b2'"),
        ("9" * 5000, "no user '999"),
        ("a\0b", "no user 'a"),
        ("-1", "user -1: 0 to"),
        (str(2**32 - 1), "user 4294967295: 0 to 4294967294"),
        ([True], "True: a user's name or number"),
        ([1.5], "1.5: a user's name or number"),
        (7, "7: a list of users"),
    ],
)
def test_unknown_users_are_refused(value: object, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        load(None, ENDPOINT, {"allow_uids": value})


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kv.toml"
    file.write_text("max_sessions = 3\n")
    assert load(None, {**ENDPOINT, "KVCACHE_CONFIG": str(file)}).max_sessions == 3


def test_configuration_is_frozen() -> None:
    with pytest.raises(AttributeError):
        load(None, ENDPOINT).size = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("siez = 1", "unknown setting 'siez'; did you mean 'size'?"),
        ("pin-quota = 1", "did you mean 'pin_quota'?"),
        ("zzz = 1", "unknown setting 'zzz'; there are: endpoint, size,"),
        ("size = -1", "size: size -1"),
        ("size = 0", "size 0: 1 to"),
        ("size = true", "size"),
        ('pin_quota = "much"', "pin_quota: Expected `float`"),
        ("pin_quota = 1.5", "pin_quota 1.5: 0 to 1"),
        ("pin_quota = nan", "pin_quota nan: 0 to 1"),
        ("max_sessions = 0", "max_sessions 0: 1 to"),
        ("quarantine = -1", "quarantine -1.0: 0 to 3600"),
        ('lock = "maybe"', "lock: Invalid enum value 'maybe'"),
        ('log_format = "xml"', "log_format"),
        ('page_size = "3MiB"', "page_size 3.0 MiB: 0, or a power of two from 4.0 KiB to 2.0 MiB"),
        ('page_size = "2KiB"', "page_size 2.0 KiB: 0, or a power of two"),
        ('page_size = "4MiB"', "page_size 4.0 MiB: 0, or a power of two"),
        ('region_dir = "shm"', "region_dir 'shm': an absolute path"),
        ('endpoint = "tcp://127.0.0.1:5555"', "only ipc://"),
        ("namespace_floor = 0.6\nnamespace_ceiling = 0.5", "namespace_floor 0.6: at most namespace_ceiling"),
        ("[table]\nx = 1", "unknown setting 'table'"),
    ],
)
def test_invalid_settings_in_a_file(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "kv.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(told)):
        load(str(file), {})


def test_an_invalid_file_is_reported_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "kv.toml"
    file.write_text('size = "1GiB"\nlock = \n')
    with pytest.raises(ConfigError, match=r"kv\.toml:2: not TOML"):
        load(str(file), ENDPOINT)
    file.write_text('size = "1GiB"\nlog_level = "in')
    with pytest.raises(ConfigError, match=r"kv\.toml:\d+: not TOML"):
        load(str(file), ENDPOINT)
    file.write_bytes(b'size = "1GiB"\n\nlock = "\xff"\n')
    with pytest.raises(ConfigError, match=r"kv\.toml:3: not UTF-8"):
        load(str(file), ENDPOINT)


@pytest.mark.parametrize("name", ["absent.toml", "."])
def test_an_unreadable_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(str(tmp_path / name), ENDPOINT)


def test_unknown_variables() -> None:
    with pytest.raises(ConfigError, match="'KVCACHE_SIZ'; did you mean 'KVCACHE_SIZE'"):
        load(None, {**ENDPOINT, "KVCACHE_SIZ": "1"})
    injected = {
        "KVCACHE_SERVICE_HOST": "10.0.0.1",
        "KVCACHE_PORT": "tcp://10.0.0.1:80",
        "KVCACHE_PORT_80_TCP_ADDR": "x",
        "KVCACHE_COPY_STAGE_MIB": "16",
        "KVCACHE_REGISTER_CHUNK_MIB": "64",
        "KVCACHE_NPU_REGISTER": "1",
    }
    assert load(None, {**ENDPOINT, **injected}) == load(None, ENDPOINT)


def test_each_setting_is_documented_once() -> None:
    rows = settings()
    assert [row.name for row in rows] == [field.name for field in msgspec.structs.fields(Config)]
    assert all(row.doc.endswith(".") and row.type and row.default for row in rows)
    assert reference().count("\n") == len(rows) + 2


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:5557", "tcp://[::1]:5557", "tcp://127.1.2.3:*", "ipc:///run/kvcache/events", ""]
)
def test_events_are_published_on_loopback_only(endpoint: str) -> None:
    assert load(environ=ENDPOINT, flags={"events": endpoint}).events == endpoint


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "tcp://10.0.0.7:5557"])
def test_events_go_to_other_hosts_only_if_configured(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="events_anywhere = true"):
        load(environ=ENDPOINT, flags={"events": endpoint})
    with pytest.raises(ConfigError, match="events_anywhere = true"):
        load(environ=ENDPOINT, flags={"events": "tcp://127.0.0.1:1", "events_replay": endpoint})
    assert load(environ=ENDPOINT, flags={"events": endpoint, "events_anywhere": "true"}).events == endpoint


@pytest.mark.parametrize(
    "flags",
    [
        {"events": "127.0.0.1:5557"},
        {"events": "tcp://localhost:5557"},  # a name may mean several addresses; ZeroMQ binds none by it
        {"events": "tcp://127.0.0.1"},
        {"events": "tcp://127.0.0.1:65536"},
        {"events": "udp://127.0.0.1:5557"},
        {"events": "ipc://relative"},
        {"events": ENDPOINT["KVCACHE_ENDPOINT"]},
        {"events": "tcp://127.0.0.1:1", "events_replay": "tcp://127.0.0.1:1"},
        {"events_replay": "tcp://127.0.0.1:1"},
        {"events": "tcp://127.0.0.1:1", "events_topic": "all"},
        {"events": "tcp://127.0.0.1:1", "events_buffer": "0"},
        {"events": "tcp://127.0.0.1:1", "events_dialect": "0.22"},
    ],
)
def test_invalid_event_settings(flags: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"event|endpoint"):
        load(environ=ENDPOINT, flags=flags)

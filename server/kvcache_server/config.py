"""The daemon's configuration: one struct, filled from a TOML file, the environment and flags; the last one wins."""

from __future__ import annotations

import difflib
import functools
import ipaddress
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from kvcache_proto.endpoint import SCHEME, check_endpoint, default_endpoint
from kvcache_proto.errors import ConfigError
from kvcache_proto.messages import SECOND, WRITE_POLICIES
from kvcache_proto.region import LEAST_PAGE, MOST_PAGE
from kvcache_proto.sizes import MAX_SIZE, format_size, parse_size
from kvcache_proto.users import group, parse_ids, user
from kvcache_server.core.limits import Limits

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "KVCACHE_"
# The first ones are set by Kubernetes in every container next to a Service named `kvcache`, not by an operator.
# The others belong to an engine or to a command, which may share its environment with the daemon.
_FOREIGN_ENV = re.compile(r"KVCACHE_(SERVICE_.*|TIER_URL|PORT(_\d+_.*)?|SERVER_UIDS|(COPY|REGISTER|NPU)_.*)$")

MAX_FILE = 16 << 20  # bytes of a configuration file, the daemon's or a model's

# Settings that are lists of ids, and how to look a name up.
_ID_LISTS: dict[str, tuple[str, Callable[[str], int]]] = {"allow_uids": ("user", user), "allow_gids": ("group", group)}


def parse_address(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """Return address and port of "127.0.0.1:9464", "[::1]:9464" or "localhost:9464". Raises ConfigError."""
    host, _, port = text.rpartition(":")
    try:
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise ValueError
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
        if not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError
    except ValueError:
        raise ConfigError(f"http {text!r}: an address and a port, as in 127.0.0.1:9464 or [::1]:9464") from None
    return address, int(port)


class _Bounds(NamedTuple):
    """The smallest and the largest value of a setting."""

    least: float
    most: float


# Annotations of settings, beside their descriptions.
LIVE = "live"  # it changes on SIGHUP; the others need a restart
SIZE = "size"  # bytes, which may be given as in 4GiB

Bytes = Annotated[int, SIZE]
Share = Annotated[float, LIVE, _Bounds(0, 1)]
Seconds = Annotated[float, LIVE, _Bounds(0, 3600)]
Count = Annotated[int, LIVE, _Bounds(1, 1 << 20)]
CountOrDefault = Annotated[int, LIVE, _Bounds(0, 1 << 20)]


class TierSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tier that the daemon runs. Its `repr` is its name: a URL may have a password."""

    url: str
    name: str = ""
    writes: str = SECOND

    def __post_init__(self) -> None:
        scheme, colon, _ = self.url.partition(":")
        if not colon or not scheme:
            raise ConfigError("a URL, as in disk:/var/cache/kvcache?size=500GiB")
        if not self.name:
            msgspec.structs.force_setattr(self, "name", scheme)
        if self.writes not in WRITE_POLICIES:
            raise ConfigError(f"writes {self.writes!r}: one of {', '.join(WRITE_POLICIES)}")

    def __repr__(self) -> str:
        return self.name


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of the daemon; sizes are bytes, times are seconds."""

    endpoint: Annotated[str, "Address that clients connect to: `ipc://` followed by an absolute path."] = ""
    size: Annotated[Bytes, _Bounds(1, MAX_SIZE), "Host memory for blocks. Its header takes up to 2 MiB more."] = 4 << 30
    region_dir: Annotated[str, "Folder on tmpfs or hugetlbfs that holds the region file."] = "/dev/shm"
    page_size: Annotated[
        Bytes,
        "Unit in which memory is allocated: a power of two, 4 KiB to 2 MiB. 0 selects 4 KiB for a region of less than "
        "256 MiB, 16 KiB up to 64 GiB, and beyond that at most 4,194,304 pages.",
    ] = 0
    lock: Annotated[
        Literal["auto", "always", "never"],
        "Lock the region into memory. If that fails, `auto` logs the reason, and `always` refuses to start.",
    ] = "auto"
    huge_pages: Annotated[
        Literal["auto", "always", "never"],
        "Use huge pages for the region. `auto` uses those that the kernel provides; `always` refuses to start without "
        "them.",
    ] = "auto"
    keep: Annotated[bool, "Keep the region in memory at exit, so that the next daemon finds its blocks."] = True
    strict: Annotated[
        bool, "Refuse to start if the previous daemon's region cannot be trusted, instead of starting empty."
    ] = False
    allow_uids: Annotated[
        tuple[int, ...],
        LIVE,
        "Users, by name or number, whose processes may attach, in addition to the daemon's own user.",
    ] = ()
    allow_gids: Annotated[
        tuple[int, ...],
        LIVE,
        "Groups, by name or number, whose processes may attach, in addition to the sockets' own group.",
    ] = ()
    attach_rate: Annotated[
        float,
        LIVE,
        _Bounds(0.01, 1e6),
        "Handshakes per second allowed to each user; after a pause, a burst of up to `max_sessions`.",
    ] = 100.0
    pin_quota: Annotated[
        Share, "Share of the region that the leases of one engine may hold; a block counts once, however many hold it."
    ] = 0.5
    write_quota: Annotated[
        Share, "Share of the region that the unsettled saves of one engine may hold. One block is always allowed."
    ] = 0.5
    retain_quota: Annotated[
        Share,
        "Share of the region that one engine may keep from eviction by hints of its requests; all engines together, "
        "half of the region. 0 refuses these hints.",
    ] = 0.1
    operator_quota: Annotated[Share, "Share of the region that `kvcache-server pin` may keep from eviction."] = 0.25
    namespace_floor: Annotated[
        Share, "Share of the region that each namespace keeps when other namespaces need room."
    ] = 0.0
    namespace_ceiling: Annotated[Share, "Share of the region that one namespace may fill."] = 1.0
    supersede_after: Annotated[
        Seconds, "Seconds after which another writer may supersede an unsettled reservation."
    ] = 2.0
    quarantine: Annotated[
        Seconds, "Seconds for which the slots of a dead writer are held back, because its device may still be copying."
    ] = 10.0
    grace: Annotated[
        Seconds,
        "Maximum number of seconds after a restart during which nothing is evicted, while engines reconnect, and for "
        "which an engine without a connection keeps its leases.",
    ] = 10.0
    max_sessions: Annotated[Count, "Maximum number of sessions at one time."] = 1024
    max_user_sessions: Annotated[
        CountOrDefault, "Maximum number of sessions of one user at one time; 0 means seven eighths of `max_sessions`."
    ] = 0
    max_namespaces: Annotated[Count, "Maximum number of namespaces at one time."] = 1024
    max_user_namespaces: Annotated[
        CountOrDefault,
        "Maximum number of namespaces created by one user at one time; 0 means seven eighths of `max_namespaces`.",
    ] = 0
    max_leases: Annotated[Count, "Maximum number of leases of one session; beyond it, lookups are misses."] = 4096
    http: Annotated[
        str,
        "Address and port for health checks, metrics and the API, such as `127.0.0.1:9464` or `[::1]:9464`. Empty: "
        "off.",
    ] = ""
    http_anywhere: Annotated[
        bool,
        "Allow an `http` address that other hosts can reach. They can read all statistics; changes need the token.",
    ] = False
    events: Annotated[
        str,
        "Address at which KV events are published in vLLM's format, such as `tcp://127.0.0.1:5557` or `ipc:///path`. "
        "Empty: off.",
    ] = ""
    events_replay: Annotated[str, "Address at which subscribers can request missed KV events again. Empty: off."] = ""
    events_topic: Annotated[
        str, "Topic of a namespace's events. `{namespace}` stands for the namespace's id, `{model}` for its model."
    ] = "kvcache@{namespace}"
    events_buffer: Annotated[
        int, _Bounds(1, 1 << 20), "Number of event batches kept for replays and for slow subscribers."
    ] = 10_000
    events_dialect: Annotated[
        Literal["0.26", "0.24", "0.23"],
        "Format of the events: the vLLM version of the subscribers, or the latest listed version before it.",
    ] = "0.26"
    events_hashes: Annotated[
        Literal["int", "bytes"],
        "Format of block hashes. `int` is the last 64 bits, vLLM's default; `bytes` is the whole hash.",
    ] = "int"
    events_anywhere: Annotated[
        bool, "Allow `events` and `events_replay` addresses that other hosts can reach. They can read all hashes."
    ] = False
    tier: Annotated[
        tuple[TierSettings, ...],
        LIVE,
        "Stores below the region: URLs, separated by spaces in the environment. In a file, each is a table `[[tier]]` "
        "with `url`, and perhaps `name` and `writes`.",
    ] = ()
    log_level: Annotated[Literal["debug", "info", "warning", "error"], LIVE, "Lowest severity that is logged."] = "info"
    log_format: Annotated[Literal["text", "json"], LIVE, "Format of log lines."] = "text"

    def __post_init__(self) -> None:
        if not self.endpoint:
            msgspec.structs.force_setattr(self, "endpoint", default_endpoint())
        check_endpoint(self.endpoint)
        if not os.path.isabs(self.region_dir):
            raise ConfigError(f"region_dir {self.region_dir!r}: an absolute path")
        for row in settings():
            if row.bounds and not row.bounds.least <= getattr(self, row.name) <= row.bounds.most:
                raise ConfigError(f"{row.name} {getattr(self, row.name)}: {row.bounds.least} to {row.bounds.most}")
        page = self.page_size
        if page and (not LEAST_PAGE <= page <= MOST_PAGE or page & (page - 1)):
            least, most = format_size(LEAST_PAGE), format_size(MOST_PAGE)
            raise ConfigError(f"page_size {format_size(page)}: 0, or a power of two from {least} to {most}")
        if self.namespace_floor > self.namespace_ceiling:
            raise ConfigError(f"namespace_floor {self.namespace_floor}: at most namespace_ceiling")
        if self.http and not parse_address(self.http)[0].is_loopback and not self.http_anywhere:
            raise ConfigError(f"http {self.http!r}: other hosts can reach it; to allow that, set http_anywhere = true")
        for name in ("events", "events_replay"):
            _check_publisher(name, getattr(self, name), self.events_anywhere)
        taken = [each for each in (self.endpoint, self.events, self.events_replay) if each and not each.endswith(":*")]
        if len(set(taken)) < len(taken):
            raise ConfigError(
                f"events {self.events!r}, events_replay {self.events_replay!r}: each needs an endpoint of its own"
            )
        if self.events_replay and not self.events:
            raise ConfigError(f"events_replay {self.events_replay!r}: needs `events`, which is empty")
        if "{namespace}" not in self.events_topic:
            raise ConfigError(
                f"events_topic {self.events_topic!r}: needs {{namespace}}, which keeps equal hashes apart"
            )
        names = [each.name for each in self.tier]
        if len(set(names)) < len(names):
            raise ConfigError(f"tier: two are called {max(names, key=names.count)!r}; give each a name")

    def limits(self) -> Limits:
        return Limits(**{name: getattr(self, name) for name in Limits.__struct_fields__})


_PUBLISHER = re.compile(r"tcp://(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]/]+)):(\d{1,5}|\*)")


def _check_publisher(name: str, endpoint: str, anywhere: bool) -> None:
    """Raise ConfigError unless `endpoint` is empty or can be bound; only on loopback, unless `anywhere`."""
    if not endpoint:
        return
    if endpoint.startswith(SCHEME):
        check_endpoint(endpoint)
        return
    match = _PUBLISHER.fullmatch(endpoint)
    host = match and (match[1] or match[2])
    try:
        if not match or not host or (match[3] != "*" and int(match[3]) > 65535):
            raise ValueError
        address = None if host == "*" else ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"{name} {endpoint!r}: tcp://127.0.0.1:5557, another address, or ipc:///path") from None
    if not anywhere and (address is None or not address.is_loopback):
        raise ConfigError(f"{name} {endpoint!r}: other hosts can reach it; to allow that, set events_anywhere = true")


class Setting(NamedTuple):
    """One row of the reference table."""

    name: str
    type: str
    default: str
    doc: str
    choices: tuple[str, ...]
    is_size: bool
    is_live: bool
    bounds: _Bounds | None


@functools.cache
def settings() -> list[Setting]:
    """Return all settings, in the order of the struct."""
    hints = typing.get_type_hints(Config, include_extras=True)
    rows = []
    for field in msgspec.structs.fields(Config):
        kind, *marks, doc = typing.get_args(hints[field.name])
        is_size = SIZE in marks
        choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
        if choices:
            label = " \\| ".join(choices)
        elif is_size:
            label = "size"
        else:
            label = "list" if typing.get_origin(kind) is tuple else kind.__name__
        if field.name == "endpoint":
            default = "`ipc:///run/kvcache/kvcache.sock` for root; otherwise a path below `$XDG_RUNTIME_DIR`"
        elif is_size and field.default:
            default = f"`{field.default >> 30}GiB`"
        else:
            shown = list(field.default) if isinstance(field.default, tuple) else field.default
            default = f"`{str(shown).lower() if kind is bool else shown}`" if shown != "" else "none"
        bounds = next((mark for mark in marks if isinstance(mark, _Bounds)), None)
        rows.append(Setting(field.name, label, default, doc, choices, is_size, LIVE in marks, bounds))
    return rows


def reference() -> str:
    """Return the reference table in Markdown, generated from the struct. An asterisk marks the live settings."""
    lines = ["| setting | default | what it does |", "| --- | --- | --- |"]
    for row in settings():
        others = [f"`{choice}`" for choice in row.choices if f"`{choice}`" != row.default]
        default = f"{row.default}; or {', '.join(others)}" if others else row.default
        name = f"`{row.name}`" + (r"\*" if row.is_live else "")
        lines.append(f"| {name} | {default} | {row.doc} |")
    return "\n".join(lines) + "\n"


def load(
    path: str | None = None, environ: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> Config:
    """Return the configuration from the file at `path`, then `environ`, then `flags`; a flag that is None is not given.

    Raises ConfigError, which names the source, the key and, for an unknown key, a similar one.
    """
    environ = os.environ if environ is None else environ
    path = path or environ.get(ENV_PREFIX + "CONFIG") or None
    values: dict[str, Any] = {}
    if path:
        values |= _checked(_read_toml(path), path)
    values |= _checked(_from_environ(environ), "environment")
    values |= _checked({key: value for key, value in (flags or {}).items() if value is not None}, "flags")
    # Each source's values are converted already; only the checks in __post_init__ can still fail.
    return Config(**values)


def _checked(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return `values` converted to the struct's types. Raises ConfigError naming `source` and the key."""
    hints = typing.get_type_hints(Config)
    known = {row.name: row for row in settings()}
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            similar = _similar(key.lower().replace("-", "_"), known) or f"; there are: {', '.join(known)}"
            raise ConfigError(f"{source}: unknown setting {key!r}{similar}")
        try:
            if known[key].is_size:
                checked[key] = parse_size(value)
            elif key in _ID_LISTS:
                checked[key] = parse_ids(value, *_ID_LISTS[key])
            elif key == "tier":
                checked[key] = _tiers(value)
            else:
                checked[key] = msgspec.convert(value, hints[key], strict=False)
        except (msgspec.ValidationError, ConfigError) as error:
            raise ConfigError(f"{source}: {key}: {error}") from None
    return checked


def _tiers(value: Any) -> tuple[TierSettings, ...]:
    """Return the tiers in a list of tables or URLs, or in a text of URLs. Raises ConfigError or ValidationError."""
    if isinstance(value, str):
        value = value.split()
    tables = [{"url": each} if isinstance(each, str) else each for each in msgspec.convert(value, list[Any])]
    return msgspec.convert(tables, tuple[TierSettings, ...])


def _similar(key: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(key, list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def read_file(path: str) -> bytes:
    """Return the contents of the file at `path`. Raises ConfigError if it cannot be read or exceeds MAX_FILE bytes."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE + 1)
    except (OSError, ValueError) as error:  # ValueError: not a possible path
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_FILE:
        raise ConfigError(f"{path}: cannot be read: more than {format_size(MAX_FILE)}")
    return data


def _read_toml(path: str) -> dict[str, Any]:
    data = read_file(path)
    try:
        text = data.decode()
        return tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1
        raise ConfigError(f"{path}:{line}: not TOML: {error}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets nested without end
        raise ConfigError(f"{path}: not TOML that can be read: {error}") from None


def _from_environ(environ: Mapping[str, str]) -> dict[str, str]:
    names = {ENV_PREFIX + row.name.upper(): row.name for row in settings()}
    values: dict[str, str] = {}
    for key, value in environ.items():
        if not key.startswith(ENV_PREFIX) or key == ENV_PREFIX + "CONFIG" or _FOREIGN_ENV.match(key):
            continue
        if not value:  # compose files pass unset variables as empty ones
            continue
        if key not in names:
            raise ConfigError(f"environment: unknown setting {key!r}{_similar(key, names)}")
        values[names[key]] = value
    return values

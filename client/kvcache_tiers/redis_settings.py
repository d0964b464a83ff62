"""The URL of a Redis or Valkey tier. No message has a password."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, unquote

from kvcache_proto.errors import ConfigError
from kvcache_proto.sizes import format_size, parse_size
from kvcache_tiers.urls import options, seconds, shown, split_url

PASSWORD = "KVCACHE_REDIS_PASSWORD"  # environment variables, for values that should not be in a process list
SENTINEL_PASSWORD = "KVCACHE_REDIS_SENTINEL_PASSWORD"

FORMS = "redis://[user[:password]@]host[:port][,host...][/database], rediss:// for TLS, unix:///path/to/socket"
LEAST_VALUE, MOST_VALUE = 1 << 10, 256 << 20  # bytes; by default, servers refuse more than 512 MiB
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_FILES = ("ca", "cert", "key")  # for TLS


@dataclass(frozen=True)
class Settings:
    """The places of the servers, and how values are stored there.

    Attributes:
        hosts: the server, some nodes of the cluster, or the sentinels, with their ports; none if `path` is set.
        path: path of the server's unix socket.
        ttl: seconds that a value stays after it was last written or read; 0 for no limit.
        max_value: the bytes of data above which a value is stored in several parts.
        timeout: seconds that a server may take to connect, to accept a value or a part of one, or to send some bytes.
    """

    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    database: int = 0
    user: str = ""
    password: str = field(default="", repr=False)
    sentinel_password: str = field(default="", repr=False)
    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    cluster: bool = False
    sentinel: str = ""
    ttl: int = 7 * 24 * 3600
    max_value: int = 8 << 20
    timeout: float = 2.0
    prefix: str = "kvcache:"

    @property
    def name(self) -> str:
        """The URL without password and options."""
        where = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"unix://{self.path}" if self.path else f"redis{'s' * self.tls}://{where}"

    def without_passwords(self, text: str) -> str:
        """Return `text` without the passwords: a server may quote the arguments of a command that it does not know."""
        for secret in (self.password, self.sentinel_password):
            text = text.replace(secret, "***") if secret else text
        return text


def read_url(url: str) -> Settings:
    """Return the settings in a URL. Raises ConfigError."""
    split = split_url(url)
    credentials, _, where = split.netloc.rpartition("@")
    if split.fragment or "@" in split.path + split.query:
        raise ConfigError(f"the URL of a {split.scheme} tier: write @ # / ? in a user, password, path or option as %XX")
    user, _, password = credentials.partition(":")
    on_socket = split.scheme == "unix"
    if on_socket and (where or not split.path.strip("/")):
        raise ConfigError(f"the URL of a unix tier names no socket; the forms are {FORMS}")
    hosts = () if on_socket else tuple(_host(each, split) for each in where.split(","))
    given = options(split, "db", "cluster", "sentinel", *_FILES, "ttl", "max_value", "timeout", "prefix")
    tls, cluster, sentinel = split.scheme == "rediss", given.get("cluster", "off"), given.get("sentinel", "")
    database = (given.get("db") if on_socket else split.path.strip("/")) or "0"
    files = {each: given.get(each, "") for each in _FILES}
    lacking = [each for each in files.values() if each and not Path(each).is_file()]
    max_value = parse_size(given["max_value"]) if "max_value" in given else Settings.max_value
    for is_wrong, why in (
        (cluster not in ("on", "off"), "cluster is on or off"),
        (on_socket and (sentinel or cluster == "on"), "sentinels and clusters are reached by hosts, not by a socket"),
        (sentinel and cluster == "on", "a cluster has no sentinels"),
        (len(hosts) > 1 and not sentinel and cluster != "on", "several hosts need ?cluster=on or ?sentinel=NAME"),
        ("db" in given and not on_socket, "the database stands after the host, as in redis://host/1"),
        (not re.fullmatch("[0-9]{1,9}", database), "the database is a number"),
        (database.strip("0") and cluster == "on", "a cluster has no databases"),
        (any(files.values()) and not tls, "ca, cert and key are for rediss://"),
        (lacking, f"there is no file {', '.join(lacking)}"),
        (
            not LEAST_VALUE <= max_value <= MOST_VALUE,
            f"max_value is {format_size(LEAST_VALUE)} to {format_size(MOST_VALUE)}",
        ),
    ):
        if is_wrong:
            raise ConfigError(f"{shown(split)}: {why}")
    return Settings(
        hosts=hosts,
        path=unquote(split.path) if on_socket else "",
        database=int(database),
        user=unquote(user),
        password=unquote(password) or os.environ.get(PASSWORD, ""),
        sentinel_password=os.environ.get(SENTINEL_PASSWORD, ""),
        tls=tls,
        **files,
        cluster=cluster == "on",
        sentinel=sentinel,
        ttl=seconds(split, "ttl", given.get("ttl") or str(Settings.ttl), int, 0, 10**9),
        max_value=max_value,
        timeout=seconds(split, "timeout", given.get("timeout") or str(Settings.timeout), float, 0.01, 1e9),
        prefix=given.get("prefix", Settings.prefix),
    )


def _host(text: str, split: SplitResult) -> tuple[str, int]:
    match = _HOST.fullmatch(text)
    port = int(match[2] or (26379 if "sentinel=" in split.query else 6379)) if match else 0
    if match is None or not 0 < port < 65536:  # it may be a part of a password
        raise ConfigError(f"the URL of a {split.scheme} tier names no host; the forms are {FORMS}")
    return match[1].strip("[]"), port

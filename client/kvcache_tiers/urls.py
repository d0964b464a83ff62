"""The URLs that name tiers. Errors never repeat a whole one: it may have a password."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvcache_proto.errors import ConfigError

N = TypeVar("N", int, float)


def split_url(url: str) -> SplitResult:
    """Return the parts of a tier's URL. Raises ConfigError."""
    if "\0" in unquote(url):  # allowed neither in a path nor in a host's name
        raise ConfigError(f"a tier of {url.partition(':')[0][:32]!r}: there is a NUL in the URL")
    try:
        return urlsplit(url)
    except ValueError:  # an invalid address in brackets; its text repeats the URL
        raise ConfigError(f"a tier of {url.partition(':')[0]}: this is not a URL") from None


def shown(url: SplitResult) -> str:
    """Return the URL without user, password and options."""
    host = url.netloc.rpartition("@")[2]
    return f"{url.scheme}:{'//' + host if host else ''}{url.path}"


def options(url: SplitResult, *known: str) -> dict[str, str]:
    """Return the options after the `?`. Raises ConfigError for a name that is not `known`."""
    given = dict(parse_qsl(url.query, keep_blank_values=True))
    for name in given:
        if name not in known:
            raise ConfigError(f"{shown(url)}: unknown option {name}; there are {', '.join(known)}")
    return given


def seconds(url: SplitResult, name: str, text: str, kind: Callable[[str], N], least: N, most: N) -> N:
    """Return `text`, the value of option `name`, as an int or a float. Raises ConfigError if it is out of bounds."""
    with contextlib.suppress(ValueError):
        if least <= (value := kind(text)) <= most:
            return value
    raise ConfigError(f"{shown(url)}: {name} is a number of seconds from {least:g} to {most:g}")

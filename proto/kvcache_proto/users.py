"""Users and groups in settings: numbers, or names that this host knows."""

from __future__ import annotations

import grp
import pwd
import re
from collections.abc import Callable

from kvcache_proto.errors import ConfigError

MAX_ID = (1 << 32) - 2  # the next number means no user


def user(name: str) -> int:
    return pwd.getpwnam(name).pw_uid


def group(name: str) -> int:
    return grp.getgrnam(name).gr_gid


def parse_ids(value: object, kind: str, number_of: Callable[[str], int]) -> tuple[int, ...]:
    """Return the ids in `value`: a list, or a text with commas, of numbers and of names that this host knows.

    Raises ConfigError, which names the unknown user or group.
    """
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)):
        raise ConfigError(f"{value!r}: a list of {kind}s, by name or number")
    return tuple(_parse_id(each, kind, number_of) for each in listed if str(each).strip())


def _parse_id(value: object, kind: str, number_of: Callable[[str], int]) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"{value!r}: a {kind}'s name or number")
    text = str(value).strip()
    if re.fullmatch("-?[0-9]{1,20}", text):
        number = int(text)
    else:
        try:
            number = number_of(text)
        except (KeyError, ValueError):  # ValueError: not a possible name
            raise ConfigError(f"no {kind} {text!r} on this host: a {kind}'s name or number") from None
    if not 0 <= number <= MAX_ID:
        raise ConfigError(f"{kind} {number}: 0 to {MAX_ID}")
    return number

"""Names by which HTTP may be asked. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection


def is_ours(host: str, names: Collection[str]) -> bool:
    """Whether a request's `Host` is an address, or one of `names`, in small letters.

    A page of anybody's could have a name of its own point here, and read what we answer; with an address it cannot.
    """
    name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

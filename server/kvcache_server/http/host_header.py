"""The check of a request's `Host` header. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection


def is_ours(host: str, names: Collection[str]) -> bool:
    """Return whether `host` is an address or one of `names`, which are in lower case.

    Against DNS rebinding: another site can make its own host name resolve to this host and let its page read our
    answers, but it cannot do that with an address.
    """
    name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

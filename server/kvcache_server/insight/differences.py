"""The facts in which two namespaces differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcache_server.explanation import Difference


def differences(here: Mapping[str, Any], there: Mapping[str, Any], absent: Any = "") -> list[Difference]:
    """Return (field, here, there) for each fact in which two namespaces differ, in the order of the facts.

    `absent` stands for a fact that only the other namespace has.
    """
    keys = [*here, *(key for key in there if key not in here)]
    return [(key, here.get(key, absent), there.get(key, absent)) for key in keys if here.get(key) != there.get(key)]

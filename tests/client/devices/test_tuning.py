"""Sizes from the environment."""

from __future__ import annotations

import pytest

from kvcache_client.devices.tuning import Tuning, read_tuning
from kvcache_proto.errors import ConfigError


def test_nothing_set_is_what_was_measured() -> None:
    assert read_tuning({}) == Tuning()


def test_every_name_is_read_in_its_unit() -> None:
    names = ("COPY_STAGE_MIB", "COPY_STAGED_BELOW_KIB", "COPY_BURST", "REGISTER_CHUNK_MIB")
    found = read_tuning({f"KVCACHE_{name}": "3" for name in names})
    assert found == Tuning(3 << 20, 3 << 10, 3, 3 << 20)


@pytest.mark.parametrize("value", ["", "0", "-1", "32MiB", "4096"])
def test_what_makes_no_sense_is_named_with_its_bounds(value: str) -> None:
    with pytest.raises(ConfigError, match=r"KVCACHE_COPY_STAGE_MIB=.*1 to 1024"):
        read_tuning({"KVCACHE_COPY_STAGE_MIB": value})

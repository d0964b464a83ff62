"""A systemd of our own for the tests that want one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from nest import Nest, nest


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nest]:
    """A clean machine, as far as the service is concerned: real systemd, no unit, no user, no configuration."""
    folder: Path = tmp_path_factory.mktemp("nest")
    boot = nest(folder)
    try:
        booted = boot.__enter__()
    except (OSError, StopIteration, RuntimeError) as error:
        pytest.skip(f"no systemd of our own here: {error!r}")
    try:
        yield booted
    finally:
        boot.__exit__(None, None, None)

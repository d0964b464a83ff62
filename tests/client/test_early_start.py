"""What ranks make ready while they start is taken over by the connector, or let go."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache_client.engines.vllm import early_start
from kvcache_client.settings import ConnectorSettings


@pytest.mark.parametrize("taken", [True, False])
def test_what_nobody_claims_is_let_go(daemon: Any, taken: bool) -> None:
    """Else an engine that is declined keeps a session, and the region page-locked."""
    settings = ConnectorSettings(daemon.endpoint)
    early_start._begun[("one", "rank 0")] = early_start.Preparation(settings, "one", "rank 0")
    daemon.wait_status(lambda s: any(e["engine"] == "one" for e in s["sessions"]), "its session")
    if taken:
        session, registration = early_start.claim("one", "rank 0")
        assert session is not None and registration is None  # there is no device here
        session.close()
    early_start.discard()
    assert not early_start._begun
    daemon.wait_status(lambda s: all(e["engine"] != "one" for e in s["sessions"]), "its end")

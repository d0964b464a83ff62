"""Checks whether an engine of this host, user and container gets the daemon's region."""

from __future__ import annotations

from collections.abc import Iterator

from kvcache_client.session.session import Session
from kvcache_proto.errors import KVCacheError
from kvcache_tools.doctor.check_result import CheckResult


def of_region(endpoint: str) -> Iterator[CheckResult]:
    """Attach as an engine does. Leaves nothing in the cache."""
    try:
        # Named like an operator's commands: it gets a session even if engines have taken all the others.
        with Session.connect(endpoint, engine="kvcache-server", label="mapping") as session:
            region = session.region
            assert region is not None  # a connected session has one
            figure = f"{region.bytes:,} bytes, format and geometry as this client knows them"
            yield CheckResult("mapping", "ok", figure, how="measured", values={"region_bytes": region.bytes})
    except KVCacheError as error:
        yield CheckResult("mapping", "failed", str(error), "an engine here would run uncached until this is mended")

"""What daemons that live no more have left in a folder of regions."""

from __future__ import annotations

import contextlib

from kvcache_proto.errors import EndpointTaken
from kvcache_server.storage.region_names import RegionFolder


def remove_regions(directory: str, socket_path: str) -> int:
    """Remove what daemons of this endpoint that live no more have left in `directory`; return how many files."""
    with RegionFolder(directory, socket_path) as regions:
        claims = []
        for name in regions.found():
            with contextlib.suppress(EndpointTaken):
                claims.append(regions.claim(name))
        return regions.remove_all(claims)

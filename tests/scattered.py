"""A pool whose free pages lie apart, so that blocks of more than one page get several runs of them."""

from __future__ import annotations

from kvcache_client import GroupSpec, NamespaceSpec, Session, Slot


def scatter(endpoint: str) -> None:
    """Fill the pool with blocks of one page, of which every other one is to be evicted first."""
    with Session.connect(endpoint, engine="crumbs", deadline=10.0) as session:
        assert session.region is not None
        geometry = session.region.geometry
        spec = NamespaceSpec("crumbs", (GroupSpec(16, geometry.page_bytes),))
        namespace = session.attach(spec, (0,))
        names = [number.to_bytes(32, "big") for number in range(1, geometry.pages + 1)]
        for name in names:
            assert len(namespace.reserve([name]).commit()) == 1
        for name in names[::2]:
            namespace.acquire([name]).release()


def write(slot: Slot, data: bytes, shard: int = 0) -> None:
    """Write a shard, which may lie in several pieces."""
    at = 0
    for view in slot.views(shard):
        view[:] = data[at : at + len(view)]
        at += len(view)
    assert at == len(data)

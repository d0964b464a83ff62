"""What the daemon of a test has, and when nothing moves there any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BLOCK = 32  # tokens
BLOCK_BYTES = 4 * 2 * 2 * 32 * BLOCK * 4  # of conftest.py's model
HELD = ("leases", "reservations", "pinned_bytes", "blocks_writing", "blocks_hidden", "blocks_quarantined")


def full(prompts: Sequence[Sequence[int]], left: int = 0) -> int:
    """Return how many blocks the prompts may hit, except `left` tokens of each, and prompts of a single block."""
    return sum((len(prompt) - left) // BLOCK for prompt in prompts if len(prompt) > BLOCK)


def wait_idle(daemon: Any, engine: Any = None) -> dict[str, Any]:
    """Wait until nothing is leased, reserved or being written; return the status.

    `engine` takes steps meanwhile: saves that were granted after its last step begin with the next one.
    """

    def idle(status: dict[str, Any]) -> bool:
        if not any(status["pool"][name] for name in HELD):
            return True
        if engine is not None:
            engine.generate([3, 4, 5])
        return False

    return dict(daemon.wait_status(idle, "an idle cache"))


def wait_attached(daemon: Any, engine: str) -> None:
    daemon.wait_status(
        lambda s: len([e for e in s["sessions"] if e["engine"].startswith(f"{engine}-") and e["namespaces"]]) == 2,
        f"scheduler and rank of {engine}",
    )


def figure(daemon: Any, name: str, engine: str = "") -> int:
    """Return the sum of a figure over the namespaces, or over those of one engine."""
    spaces = daemon.status()["namespaces"]
    return sum(int(space[name]) for space in spaces if not engine or of_engine(space, engine))


def of_engine(space: dict[str, Any], engine: str) -> bool:
    return any(name.startswith(f"{engine}-") for name in space["engines"])


def hits(daemon: Any, engine: str = "") -> int:
    return figure(daemon, "hit_blocks", engine)

"""One line in the engine's log on the benefit of the cache, at most once a minute."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from kvcache_client.session.counters import Gains

EVERY = 60.0  # seconds
COPIES = ("loaded_bytes", "load_us", "saved_bytes", "save_us")  # the ranks' counts
UNDONE = (
    "saves_given_away",
    "saves_failed",
    "blocks_not_compressed",
    "load_blocks_failed",
)  # more of the ranks' counts
_REFUSED = (
    "saves_",
    "lookups_declined_",
    "lookups_refused",
    "lookups_over_budget",
    "loads_fail",
    "hints_",
    "retain_refused_",
)


class Summary:
    """Adds up requests and copies, and logs a line EVERY seconds after the first one; then it waits for the next one.

    It logs on a thread of its own: an engine that has gone idle takes no more steps. One thread calls its methods.
    """

    def __init__(self, log: Callable[[str], None], refusals: Callable[[], Mapping[str, int]]) -> None:
        """`refusals` returns counts by name; the line shows their increases."""
        self._log, self._refusals = log, Gains(refusals)
        self._counts: Counter[str] = Counter()  # since the last line
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._since = 0.0

    def request(self, tokens: int, hit: int, load: int) -> None:
        """Note a scheduled request of `tokens` tokens; `hit` of them are cached, and `load` are to be loaded."""
        self._add({"requests": 1, "tokens": tokens, "hit_tokens": hit, "load_tokens": load})

    def copied(self, counts: Mapping[str, int]) -> None:
        """Note the ranks' counts since the last call."""
        self._add({name: counts[name] for name in (*COPIES, *UNDONE) if counts.get(name)})

    def close(self) -> None:
        """Log the rest, and stop."""
        if (timer := self._timer) is not None:
            timer.cancel()
            self._end(timer)

    def _add(self, counts: Mapping[str, int]) -> None:
        if not counts:
            return
        with self._lock:
            self._counts.update(counts)
            if self._timer is None:
                self._since = time.monotonic()
                self._timer = timer = threading.Timer(EVERY, lambda: self._end(timer))
                timer.name, timer.daemon = "kvcache-summary", True
                timer.start()

    def _end(self, timer: threading.Timer) -> None:
        with self._lock:
            if self._timer is not timer:  # closed
                return
            counts, self._counts, self._timer = self._counts, Counter(), None
        if line := summarize(counts, self._refusals.take(), time.monotonic() - self._since):
            self._log(line)


def summarize(counts: Mapping[str, int], refusals: Mapping[str, int], seconds: float) -> str:
    """Return the line, "" if nothing happened. Pure."""
    parts = []
    if counts.get("requests"):
        tokens, hit, load = (counts.get(name, 0) for name in ("tokens", "hit_tokens", "load_tokens"))
        parts.append(f"{counts['requests']:,} requests of {tokens:,} tokens, {hit:,} hit, {load:,} to load")
    for what, size, duration in (("loaded", *COPIES[:2]), ("saved", *COPIES[2:])):
        if done := counts.get(size, 0):
            rate = done / max(counts.get(duration, 0), 1) / 1e3
            parts.append(f"{what} {done / (1 << 20):,.1f} MiB at {rate:.1f} GB/s")
    refused = sorted((name, count) for name, count in refusals.items() if name.startswith(_REFUSED))
    refused += [(name, counts[name]) for name in UNDONE if counts.get(name)]
    if refused:
        parts.append("refused: " + ", ".join(f"{name} {count:,}" for name, count in refused))
    return f"in {seconds:.0f} s: " + "; ".join(parts) if parts else ""

"""The process that observes the region for kill_instant.py, and the slots on which it agrees with the victim.

For each order, a line of JSON, it fills the slots with a pattern, reads one word per fragment again and again until it
is told to stop, and reports what it saw.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import sys
import time
from typing import Any

import numpy as np

LAYERS, FRAGMENT = 64, 64 << 10  # keys and values apart
SLOT = 2 * LAYERS * FRAGMENT
PATTERN, SAVED = 0x11, 0x81  # every byte of the slots before; of the first job's blocks, the next job's is one more

clock = time.monotonic_ns  # CLOCK_MONOTONIC, the same in every process


def keep_stdout() -> Any:
    """Return what to say JSON lines with; whatever else is printed goes to stderr."""
    voice = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda **what: print(json.dumps(what), file=voice, flush=True)


def main() -> None:
    say = keep_stdout()
    words: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        if words is None:
            with open(order["region"], "r+b") as file:
                words = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint64)
        slots = [words[at // 8 : (at + SLOT) // 8].view(np.uint8) for at in order["offsets"]]
        for slot in slots:
            slot[:] = PATTERN
        seen = watch(words, order, say)
        say(**seen, **count_bytes(slots, order["jobs"]))


def watch(words: Any, order: dict[str, Any], say: Any) -> dict[str, Any]:
    """Return the first and the last change, each as (a look that did not see it, the end of the look that did).

    With `kill`, a process, in the order it is killed as soon as anything has changed.
    """
    begins = (np.array(order["offsets"])[:, None] + np.arange(0, SLOT, FRAGMENT)).ravel() // 8
    # Anywhere in a fragment is as good, and words at one place in each would fall on few sets of the CPU's caches.
    index = begins + np.random.default_rng(0).integers(0, FRAGMENT // 8, len(begins))
    before, after = np.empty(len(index), np.uint64), np.empty(len(index), np.uint64)
    told = select.poll()
    told.register(sys.stdin.fileno(), select.POLLIN)
    first = last = killed = None
    passes = longest = spent = 0
    for _ in range(2):  # the first one meets the pages
        low = clock()
        words.take(index, out=before, mode="clip")
    pristine = before.copy()
    say(watching=len(index))
    while passes % 16 or not told.poll(0):
        start = clock()
        words.take(index, out=after, mode="clip")
        end = clock()
        if not np.array_equal(after, before):
            last = (low, end)
            if first is None:
                first = last
                if order["kill"]:
                    killed = clock()
                    os.kill(order["kill"], signal.SIGKILL)
            before, after = after, before
        if passes:
            longest = max(longest, end - low)
        spent += end - start
        low = start
        passes += 1
    sys.stdin.readline()
    return {
        "first": first,
        "last": last,
        "killed": killed,
        "pass_ns": spent // passes,
        "longest_ns": longest,
        "changed": float(np.mean(before != pristine)),
    }


def count_bytes(slots: list[Any], jobs: int) -> dict[str, Any]:
    """Return the bytes that each job wrote and no later one overwrote, and those that none of them can have written."""
    written, alien = [0] * jobs, 0
    for slot in slots:
        left = SLOT - int(np.count_nonzero(slot == PATTERN))
        for job in range(jobs):
            if left:
                found = int(np.count_nonzero(slot == SAVED + job))
                written[job] += found
                left -= found
        alien += left
    return {"written": written, "alien": alien}


if __name__ == "__main__":
    main()

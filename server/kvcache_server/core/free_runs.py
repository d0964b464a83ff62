"""The free pages of the region, as runs. Pure.

A block gets one run if one is long enough: a short one of these, so that long ones stay. Otherwise it gets several, the
longest first: short pieces are slow to copy. Runs that touch are merged at once.
"""

from __future__ import annotations

from itertools import islice

from kvcache_proto.region import Run

_LOOKS = 16  # runs of a class that may be too short by less than half

Runs = tuple[Run, ...]


class FreeRuns:
    """Attributes: `pages` is the number of free pages."""

    def __init__(self) -> None:
        self.pages = 0
        self._lengths: dict[int, int] = {}  # by the first page
        self._begins: dict[int, int] = {}  # by the page after the last one
        self._classes: list[dict[int, None]] = []  # by the bit length of the runs' lengths: their first pages

    def add(self, page: int, count: int) -> None:
        """Free the `count` pages from `page` on."""
        self.pages += count
        end = page + count
        if (before := self._begins.get(page)) is not None:
            self._remove(before)
            page = before
        if end in self._lengths:
            end += self._remove(end)
        self._insert(page, end - page)

    def take(self, count: int) -> Runs | None:
        """Take `count` pages; None if fewer are free."""
        if count > self.pages:
            return None
        if (page := self._find(count)) is not None:
            return (self._take_from(page, count),)
        runs: list[Run] = []
        for found in reversed(self._classes):
            while found and count:
                page = next(iter(found))
                runs.append(self._take_from(page, min(count, self._lengths[page])))
                count -= runs[-1][1]
        return tuple(runs)

    def take_run(self, count: int) -> Run | None:
        """Take one run of `count` pages; None if there is none."""
        page = self._find(count)
        return self._take_from(page, count) if page is not None else None

    def runs(self) -> list[Run]:
        """Return all runs, in no order."""
        return list(self._lengths.items())

    def _find(self, count: int) -> int | None:
        """Return the first page of a run of at least `count` pages."""
        size = count.bit_length()
        if size < len(self._classes) and self._classes[size]:
            for page in islice(self._classes[size], _LOOKS):
                if self._lengths[page] >= count:
                    return page
        for found in islice(self._classes, size + 1, None):
            if found:
                return next(iter(found))
        return None

    def _take_from(self, page: int, count: int) -> Run:
        length = self._lengths.pop(page)
        left, begin, end = length - count, page + count, page + length
        found, size = self._classes[length.bit_length()], left.bit_length()
        del found[page]
        if left:
            self._lengths[begin], self._begins[end] = left, begin
            (found if size == length.bit_length() else self._classes[size])[begin] = None
        else:
            del self._begins[end]
        self.pages -= count
        return page, count

    def _insert(self, page: int, count: int) -> None:
        size = count.bit_length()
        while size >= len(self._classes):
            self._classes.append({})
        self._classes[size][page] = None
        self._lengths[page] = count
        self._begins[page + count] = page

    def _remove(self, page: int) -> int:
        count = self._lengths.pop(page)
        del self._begins[page + count], self._classes[count.bit_length()][page]
        return count

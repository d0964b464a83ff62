"""What the suites of hostile stores share: values by generation, the work of a tier, and what each case has cost."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import re
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
sys.path[:0] = [each for each in (str(TESTS),) if each not in sys.path]

from conftest import Daemon  # noqa: E402

from kvcache_client import GroupSpec, NamespaceSpec, Session  # noqa: E402
from kvcache_proto.errors import ConfigError, NotPermitted  # noqa: E402
from kvcache_proto.types import unpack_refs  # noqa: E402
from kvcache_tiers.backend import Backend, Failed  # noqa: E402
from kvcache_tiers.moves import Moves, Pause  # noqa: E402
from kvcache_tiers.records import key_prefix  # noqa: E402

SPECS = [NamespaceSpec(f"of {shards}", [GroupSpec(16, shards)]) for shards in ((12 << 10, 4 << 10), (5000,))]
BLOCKS = 4  # of each namespace
ALL, HALF = slice(0, BLOCKS), slice(0, BLOCKS // 2)
_FIELD = re.compile(r"(\d*)([sBHIQ])")
_BITS = {"B": 8, "H": 16, "I": 32, "Q": 64}
_NUMERALS = ("{}",) * 6 + ("-{}", "+{}", "0x{:x}", "{}.5", "{}e9", "0{}", " {} ", "")
_WORDS = ("a", "0", "ä", "/", "../", "%2e", "%00", "<", "&lt;", "\t", "\n", " ", "a-", "\u2028")

Open = Callable[[], Backend]


class Draw(random.Random):
    """Values for what a store can name: edges more often than others."""

    def number(self, bits: int, honest: int = 0) -> int:
        """Return a number for an unsigned field."""
        near = self.choice((honest, 1 << self.randrange(bits), 1 << (bits - 1), 1 << bits))
        edges = (0, 1, near - 1, near, near + 1, 2 * honest, -honest, self.getrandbits(self.randint(1, bits)))
        return self.choice(edges) & ((1 << bits) - 1)

    def numeral(self, honest: int) -> str:
        """Return a number as text, which may have any sign and size, or be none."""
        return self.choice(_NUMERALS).format(self.number(self.choice((8, 16, 31, 32, 63, 64, 65)), honest))

    def words(self, honest: str) -> str:
        """Return a text in place of an honest one: with another number in it, or any other of up to 1 MiB."""
        numbers = list(re.finditer(r"\d+", honest))
        if numbers and self.random() < 0.6:
            at = self.choice(numbers)
            return honest[: at.start()] + self.numeral(int(at[0])) + honest[at.end() :]
        length = self.choice((0, 1, 2, 16, 255, 1024, 1 << 20))
        return (self.choice(_WORDS) * length)[:length]

    def data(self, most: int) -> bytes:
        return self.randbytes(min(self.number(24), self.randint(0, most)))

    def damaged(self, data: bytes) -> bytes:
        """Return other bytes in place of some, or fewer or more of them."""
        begin = self.randrange(len(data) + 1)
        end = min(len(data), begin + self.choice((1, 1, 8, 512, 4096, len(data))))
        size = end - begin
        flipped = bytes(each ^ 1 << self.randrange(8) for each in data[begin : begin + 1])
        new = self.choice((flipped + data[begin + 1 : end], bytes(size), self.randbytes(size), b"", self.data(1 << 20)))
        return data[:begin] + new + self.choice((data[end:], data[end:], b""))

    def lie(self, layout: struct.Struct, data: bytes) -> tuple[bytes, str]:
        """Return `data`, which has this layout, with another value in one of its fields; and which one."""
        kinds = _FIELD.findall(layout.format)
        facts = list(layout.unpack(data))
        at = self.randrange(len(facts))
        size, kind = kinds[at]
        facts[at] = self.randbytes(int(size)) if kind == "s" else self.number(_BITS[kind], facts[at])
        return layout.pack(*facts), f"field {at} = {facts[at]!r}"


class Tier:
    """Does what a tier's process does with a backend, by the same code, in the region of a real daemon.

    Attributes:
        served: blocks that a backend had and that were let into the region, since the beginning.
        found: their number in each reading since the last backend was opened.
    """

    def __init__(self, session: Session) -> None:
        assert session.region is not None
        self.region = session.region
        self.served, self.found = 0, list[int]()
        self._hashes: list[list[bytes]] = []
        self._slots: list[bytes] = []
        self._views: list[list[memoryview]] = []
        for number, spec in enumerate(SPECS):
            hashes = [bytes([number, block]) * 16 for block in range(BLOCKS)]
            reservation = session.attach(spec, range(spec.shards)).reserve(hashes)
            assert len(reservation.granted) == BLOCKS
            self._hashes.append(hashes)
            self._slots.append(reservation.packed)
            size = spec.groups[0].block_bytes
            self._views.append([view for (view,) in self.region.views(reservation.packed, size, 0, size)])

    def keys(self, number: int) -> list[bytes]:
        return [key_prefix(SPECS[number], 0) + each for each in self._hashes[number]]

    def fill(self, backend: Backend) -> None:
        """Store what a case finds: half of the blocks."""
        with contextlib.closing(backend):
            moves = Moves(backend, Counter())
            self._store(moves, HALF)
            assert self._bring(moves) == 0 and self.found[-1] == len(SPECS) * BLOCKS // 2

    def work(self, open_backend: Open, amid: Callable[[], object] = lambda: None) -> int:
        """Read, write, and read again, whatever fails; return how many wrong bytes were let into the region.

        `amid` is called when the backend is open.
        """
        wrong, self.found = 0, []
        reading = Pause("the tier is off")
        try:
            backend = open_backend()
        except Failed as error:
            reading.begin(error)
            return 0
        except (ConfigError, NotPermitted) as error:
            logging.error("%s", error)
            return 0
        with contextlib.closing(backend):
            moves = Moves(backend, Counter())
            amid()

            def bring() -> None:
                nonlocal wrong
                wrong += self._bring(moves)

            for step in (bring, lambda: self._store(moves, ALL), bring, backend.lost, bring):
                try:
                    step()
                except Failed as error:
                    reading.begin(error)
        return wrong

    def _store(self, moves: Moves, blocks: slice) -> None:
        for number, spec in enumerate(SPECS):
            hashes, packed = self._hashes[number][blocks], self._slots[number]
            for block, view in enumerate(self._views[number]):
                view[:] = _content(number, block)
            packed = packed[: len(packed) * len(hashes) // BLOCKS]
            moves.write_out(spec, 0, hashes, packed, bytes(8 * spec.shards * len(hashes)), self.region)

    def _bring(self, moves: Moves) -> int:
        """Return how many wrong bytes there are in blocks that were let in."""
        wrong = found = 0
        for number, spec in enumerate(SPECS):
            hashes, views = self._hashes[number], self._views[number]
            moves.look(spec, 0, hashes)
            for view in views:
                view[:] = bytes(len(view))
            refs = unpack_refs(self._slots[number])
            for block, sums in enumerate(moves.bring(spec, 0, hashes, refs, self.region)):
                if sums is not None:
                    found += 1
                    wrong += sum(a != b for a, b in zip(views[block], _content(number, block), strict=True))
        self.served += found
        self.found.append(found)
        return wrong


def _content(number: int, block: int) -> bytes:
    return random.Random(1000 * number + block).randbytes(SPECS[number].groups[0].block_bytes)


class Meter(logging.Handler):
    """Adds up what cases cost, and says which was the worst."""

    def __init__(self) -> None:
        super().__init__()
        self.figures: dict[str, Any] = {"tried": 0, "wrong_bytes": 0, "raised": 0}
        self._logged = 0
        self._began, self._before = time.monotonic(), _peak_mib()
        self.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        logging.getLogger().addHandler(self)
        logging.getLogger().setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self._logged += len(self.format(record).encode(errors="replace")) + 1

    def case(self, describe: Callable[[], str], work: Callable[[], int]) -> None:
        """Run a case, which returns how many wrong bytes it was served; `describe` is called at its end."""
        self._logged, began, wrong, raised = 0, time.monotonic(), 0, ""
        try:
            wrong = work()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # noqa: BLE001 - also the panics of a library
            raised = traceback.format_exc()[-3000:]
        name = describe()[:400]
        figures = self.figures
        figures["tried"] += 1
        figures["wrong_bytes"] += wrong
        figures["raised"] += bool(raised)
        for what, said in (
            ("first_raised", f"{name}: {raised}" if raised else ""),
            ("first_wrong", name if wrong else ""),
        ):
            if said:
                figures.setdefault(what, said)
        costs = {
            "seconds_of_a_case": round(time.monotonic() - began, 2),
            "log_bytes_of_a_case": self._logged,
            "peak_mib": _peak_mib() - self._before,
        }
        for what, cost in costs.items():
            if cost > figures.get(what, -1):
                figures |= {what: cost, f"{what}_in": name}

    def report(self, **more: float) -> str:
        """Return all figures, and more, as JSON."""
        return json.dumps({**self.figures, **more, "seconds": round(time.monotonic() - self._began, 1)})


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


@contextlib.contextmanager
def a_tier() -> Iterator[tuple[Tier, Path]]:
    """A tier in the region of a daemon, and a folder that is removed afterwards."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the daemon ends, too
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        daemon = Daemon(Path(folder), size="16MiB")
        try:
            daemon.wait_ready()
            with Session.connect(daemon.endpoint, engine="tier hostile", deadline=10.0) as session:
                yield Tier(session), Path(folder)
        finally:
            daemon.kill()
            daemon.tidy()


def limit_memory(most: int = 2 << 30) -> None:
    """Let what takes too much memory fail, and not the host."""
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def arguments(cases: int) -> tuple[int, range]:
    """Return the seed, and the numbers of the cases to run, from the command line."""
    parser = ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=cases)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run one case")
    given = parser.parse_args()
    return given.seed, range(given.cases) if given.only is None else range(given.only, given.only + 1)

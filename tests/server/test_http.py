"""The daemon's HTTP API, with a real process over real sockets: access, actions, and the cost of hostile clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import pytest

from kvcache_proto import __version__
from kvcache_proto import messages as m
from kvcache_proto.types import GroupSpec, NamespaceSpec
from kvcache_server.admin_client import AdminClient
from kvcache_server.http.connection_limiter import BYTES, OPEN
from kvcache_server.http.schema import ROUTES

SPEC = NamespaceSpec("llama", (GroupSpec(16, 4096),))
SERVE = [sys.executable, "-m", "kvcache_server", "serve", "--size", "16MiB", "--lock", "never"]


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: Any


class Http:
    """A client of the daemon's API."""

    def __init__(self, daemon: Any) -> None:
        self.address = urlsplit(daemon.status()["daemon"]["http"]["address"])
        self.token_path = daemon.folder / "kv.token"
        self.token = self.token_path.read_text().strip()

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection(self.address.hostname or "", self.address.port, timeout=20)
        with contextlib.closing(connection):
            connection.request(method, path, json.dumps(body) if body is not None else None, headers or {})
            response = connection.getresponse()
            text = response.read()
        kind = response.headers["Content-Type"]
        return Answer(response.status, response.headers, json.loads(text) if kind == "application/json" else text)

    def get(self, path: str) -> Any:
        answer = self.ask("GET", path)
        assert answer.status == 200, answer
        return answer.body

    def post(self, path: str, body: Any = None) -> Answer:
        return self.ask("POST", path, body, {"Authorization": f"Bearer {self.token}"})

    def connect(self) -> socket.socket:
        return socket.create_connection((self.address.hostname, self.address.port), timeout=20)

    def cuts(self) -> dict[str, int]:
        found: dict[str, int] = self.get("/api/v1/status")["daemon"]["http"]["cuts"]
        return found


@pytest.fixture
def daemon(start_daemon: Any) -> Any:
    return start_daemon(http="127.0.0.1:0")


@pytest.fixture
def web(daemon: Any) -> Http:
    return Http(daemon)


@pytest.fixture
def engine(daemon: Any) -> Iterator[AdminClient]:
    """An engine that has stored 12 blocks and found them again."""
    with AdminClient(daemon.endpoint, "rank 0", engine="qwen") as engine:
        store(engine)
        yield engine


RUN = [number.to_bytes(32, "little") for number in range(12)]


def store(engine: AdminClient) -> None:
    namespace = engine.ask(m.Attach(0, b"", SPEC, (0,))).namespace
    reserved = engine.ask(m.Reserve(0, b"", namespace, [m.Run(RUN)]))
    engine.ask(m.Settle(0, b"", engine.geometry.region_id, reserved.reservation, (0,), 0))
    assert found(engine) == 12


def found(engine: AdminClient) -> int:
    """Look up the 12 blocks and one more, and return the number of hits."""
    namespace = engine.ask(m.Attach(0, b"", SPEC, (0,))).namespace
    acquired = engine.ask(m.Acquire(0, b"", namespace, [*RUN, bytes(31) + b"x"]))
    engine.tell(m.Release(0, b"", [acquired.lease]))
    engine.ping()
    hits: int = acquired.hits
    return hits


# Reading.


def test_figures_are_the_same_as_in_status(daemon: Any, web: Http, engine: AdminClient) -> None:
    told, figures = web.get("/api/v1/status"), daemon.status()
    assert told["sessions"][0].pop("age_s") >= 0
    for name in ("pool", "namespaces", "sessions", "away", "grace", "refusals", "counters", "daemon"):
        assert told[name] is not None
    (space,), (session,) = told["namespaces"], told["sessions"]
    assert (space["id"], space["hit_blocks"], space["requested_blocks"]) == (SPEC.id, 12, 13)
    assert (session["engine"], session["label"], session["namespaces"]) == ("qwen", "rank 0", {SPEC.id: [0]})
    assert space.items() <= figures["namespaces"][0].items()
    assert told["pool"].items() <= figures["pool"].items()
    assert told["counters"] == figures["counters"]
    assert (told["daemon"]["version"], told["daemon"]["pid"]) == (__version__, daemon.process.pid)
    assert web.get("/api/v1/namespaces") == {"namespaces": told["namespaces"]}
    assert [each["engine"] for each in web.get("/api/v1/sessions")["sessions"]] == ["qwen"]


def test_health(web: Http) -> None:
    assert web.get("/healthz") == {"alive": True}
    assert web.get("/readyz") == {"ready": True}


def test_errors_are_json(web: Http) -> None:
    nowhere = web.ask("GET", "/api/v1/nothing")
    assert (nowhere.status, nowhere.body["code"]) == (404, "not_found")
    wrong = web.ask("DELETE", "/api/v1/clear")
    assert (wrong.status, wrong.body["code"], wrong.headers["Allow"]) == (405, "method_not_allowed", "POST")


def test_http_is_off_by_default(start_daemon: Any, short_folder: Path) -> None:
    daemon = start_daemon()
    assert daemon.status()["daemon"]["http"] is None
    assert not list(short_folder.glob("*.token"))
    assert not [line for line in Path(f"/proc/{daemon.process.pid}/maps").read_text().splitlines() if "aiohttp" in line]


def test_ipv6(start_daemon: Any) -> None:
    web = Http(start_daemon(http="[::1]:0"))
    assert web.address.hostname == "::1"
    assert web.get("/healthz") == {"alive": True}


# Who may.


def test_a_foreign_host_name_is_refused(web: Http) -> None:
    """DNS rebinding: a site could resolve its name to this host and make its visitors' browsers ask."""
    for host in (
        "evil.example",
        "evil.example:9464",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "",
        "a" * 900,
    ):
        answer = web.ask("GET", "/api/v1/status", headers={"Host": host})
        assert (answer.status, answer.body["code"]) == (421, "misdirected_request"), host
        assert "namespaces" not in answer.body
    for host in ("localhost", "LocalHost:9464", "127.0.0.1:80", "[::1]:9464", "10.0.0.7"):
        assert web.ask("GET", "/healthz", headers={"Host": host}).status == 200, host


def test_changes_need_the_token(daemon: Any, web: Http, engine: AdminClient) -> None:
    wrong = ["Bearer " + "x" * len(web.token), f"Basic {web.token}", web.token, "Bearer", f"Bearer {web.token}x"]
    for route in (route for route in ROUTES if route.changes):
        path, body = route.path.replace("{id}", "7"), {"namespace": "", "level": "debug"}
        none = web.ask("POST", path, body)
        assert (none.status, none.headers["WWW-Authenticate"]) == (401, "Bearer")
        for other in (*wrong, "Bearer \xff"):
            answer = web.ask("POST", path, body, {"Authorization": other})
            assert (answer.status, answer.body["code"]) == (403, "forbidden"), other
    assert found(engine) == 12
    assert web.get("/api/v1/status")["daemon"]["log_level"] == "info"
    assert daemon.status()["daemon"]["integrity"]["checks"] == 0


def test_the_token_file(web: Http, start_daemon: Any, daemon: Any) -> None:
    assert stat.S_IMODE(web.token_path.stat().st_mode) == 0o600
    assert len(web.token) >= 40
    daemon.stop()
    again = start_daemon(endpoint=daemon.endpoint, http="127.0.0.1:0")
    assert Http(again).token == web.token, "who was given it would have to be given another at each start"


def spoil_mode(path: Path) -> None:
    path.write_text("a-token-that-others-may-read\n")
    path.chmod(0o640)


def spoil_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    target.touch(mode=0o600)
    target.write_text("a-token-of-somebody-else\n")
    path.symlink_to(target)


def spoil_short(path: Path) -> None:
    path.touch(mode=0o600)
    path.write_text("secret\n")


def spoil_empty(path: Path) -> None:
    path.touch(mode=0o600)


def spoil_folder(path: Path) -> None:
    path.mkdir(mode=0o700)


def spoil_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("spoil", [spoil_mode, spoil_link, spoil_short, spoil_empty, spoil_folder, spoil_pipe])
def test_an_untrusted_token_file_is_refused(short_folder: Path, spoil: Any) -> None:
    path = short_folder / "kv.token"
    spoil(path)
    failed = serve(short_folder, "127.0.0.1:0")
    assert failed.returncode == 2, failed.stderr
    assert str(path) in failed.stderr
    assert "Traceback" not in failed.stderr
    assert {each.name for each in short_folder.iterdir()} <= {"kv.token", "elsewhere"}, "it leaves nothing behind"


def serve(folder: Path, address: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [*SERVE, "--keep", "false", "--endpoint", f"ipc://{folder}/kv.sock", "--http", address, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("0.0.0.0:9464", "http_anywhere = true"),
        ("[::]:9464", "http_anywhere = true"),
        ("192.0.2.1:9464", "http_anywhere = true"),
        ("9464", "an address and a port"),
        ("127.0.0.1", "an address and a port"),
        ("::1:9464", "an address and a port"),
        ("127.0.0.1:65536", "an address and a port"),
        ("127.0.0.1:-1", "an address and a port"),
        ("example.com:80", "an address and a port"),
    ],
)
def test_an_invalid_address(short_folder: Path, address: str, told: str) -> None:
    failed = serve(short_folder, address)
    assert failed.returncode == 2, failed.stderr
    assert told in failed.stderr


def test_an_address_in_use(short_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        failed = serve(short_folder, f"127.0.0.1:{other.getsockname()[1]}")
    assert failed.returncode == 2
    assert "Address already in use" in failed.stderr
    assert not list(short_folder.iterdir())


def test_other_hosts_need_http_anywhere_and_may_use_the_host_s_name(start_daemon: Any) -> None:
    daemon = start_daemon(http="0.0.0.0:0", http_anywhere="true")
    web = Http(daemon)
    assert web.ask("GET", "/healthz", headers={"Host": f"{socket.gethostname()}:9464"}).status == 200
    assert web.ask("GET", "/healthz", headers={"Host": "evil.example"}).status == 421
    assert web.ask("POST", "/api/v1/clear", {"namespace": ""}).status == 401


# What is done.


def test_clear(daemon: Any, web: Http, engine: AdminClient) -> None:
    unknown = web.post("/api/v1/clear", {"namespace": "0123456789abcdef"})
    assert (unknown.status, unknown.body["code"]) == (404, "client_error")
    assert "0123456789abcdef" in unknown.body["message"]
    for body in (None, {}, [], {"namespace": 7}, {"namespaces": ""}, {"namespace": "", "force": True}):
        assert web.post("/api/v1/clear", body).status == 400, body
    assert web.post("/api/v1/clear", {"namespace": SPEC.id})[::2] == (200, {"blocks": 12})
    assert web.post("/api/v1/clear", {"namespace": ""})[::2] == (200, {"blocks": 0})
    assert web.get("/api/v1/status")["pool"]["blocks"] == 0
    assert f"cleared 12 blocks of {SPEC.id}, asked by the token's bearer at 127.0.0.1" in daemon.log


def test_log_level(daemon: Any, web: Http) -> None:
    assert web.post("/api/v1/log-level", {"level": "debug"}).body == {"level": "debug", "before": "info"}
    daemon.status()
    assert "DEBUG session" in daemon.log  # monitors come and go without a word otherwise
    assert web.post("/api/v1/log-level", {"level": "error"}).body == {"level": "error", "before": "debug"}
    assert web.get("/api/v1/status")["daemon"]["log_level"] == "error"
    assert web.post("/api/v1/log-level", {"level": "loud"}).status == 400


def test_check(daemon: Any, web: Http, engine: AdminClient) -> None:
    checked = web.post("/api/v1/check").body
    assert (checked["sound"], checked["finding"]) == (True, "")
    assert daemon.status()["daemon"]["integrity"] == {"checks": 1, "failures": 0}


def test_fence_off_refuses_attached_and_unknown_sessions(daemon: Any, web: Http, engine: AdminClient) -> None:
    attached = web.post(f"/api/v1/sessions/{engine.session}/fence-off")
    assert attached.status == 404
    assert "it is attached" in attached.body["message"]
    assert web.post("/api/v1/sessions/999/fence-off").status == 404
    for odd in ("x", "0", "-1", "1.5", "٣", "9" * 19 + "0", "9" * 5000):
        assert web.post(f"/api/v1/sessions/{quote(odd)}/fence-off").status in (400, 404), odd
    assert found(engine) == 12


# Who means ill.


def anonymous_bytes(daemon: Any) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def descriptors(daemon: Any) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def wait(met: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 20
    while not met():
        assert time.monotonic() < until, f"{what} did not come"
        time.sleep(0.01)


def ended(connection: socket.socket) -> bool:
    """Wait for the daemon to close the connection; return whether it did."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


SLOW = {
    "silence": "",
    "half a head": "GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
    "half a body": "POST /api/v1/clear HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer TOKEN\r\n"
    "Content-Length: 1000\r\n\r\n{",
}


@pytest.mark.parametrize("said", SLOW.values(), ids=SLOW)
def test_slow_clients_make_room_for_active_ones(daemon: Any, web: Http, engine: AdminClient, said: str) -> None:
    web.get("/healthz")
    before = descriptors(daemon)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(web.connect()) for _ in range(3 * OPEN)]
        for each in slow:
            with contextlib.suppress(ConnectionError):
                each.sendall(said.replace("TOKEN", web.token).encode())
        assert web.get("/healthz") == {"alive": True}
        assert found(engine) == 12
        assert all(map(ended, slow[:OPEN])), "those that came first go first"
        assert web.cuts()["crowded_out"] >= 2 * OPEN
        assert descriptors(daemon) <= before + OPEN + 2
    wait(lambda: descriptors(daemon) <= before + 1, "the end of the slow ones")


def test_a_single_slow_client_is_cut_off_eventually(daemon: Any, web: Http) -> None:
    with web.connect() as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\nHost: loc")
        assert ended(slow)
    assert web.cuts() == {"too_slow": 1}


def test_requests_that_are_too_large(web: Http) -> None:
    large = web.post("/api/v1/clear", {"namespace": "x" * 20_000})
    assert (large.status, large.body["code"]) == (413, "request_entity_too_large")
    for head in (b"Content-Length: 1000000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n10000\r\n"):
        with web.connect() as endless:
            endless.sendall(b"POST /api/v1/clear HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\n" + head)
            with contextlib.suppress(ConnectionError):
                for _ in range(1000):
                    endless.sendall(bytes(BYTES))
            assert ended(endless)
    with web.connect() as wordy:
        with contextlib.suppress(ConnectionError):
            wordy.sendall(
                b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"X-Word: %s\r\n" % (b"x" * 8000) * 20 + b"\r\n"
            )
        assert ended(wordy)
    assert web.cuts()["too_long"] >= 1
    with web.connect() as many:  # all of them at once: one is answered
        with contextlib.suppress(ConnectionError):
            many.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        heard = b""
        with contextlib.suppress(ConnectionError):
            while data := many.recv(1 << 16):
                heard += data
        assert heard.count(b"HTTP/1.1 200") <= 1
    assert web.get("/healthz") == {"alive": True}


def test_requests_that_are_not_http_are_refused_with_few_log_lines(daemon: Any, web: Http) -> None:
    for number in range(120):
        with web.connect() as odd:
            odd.sendall(
                b"\x16\x03\x01" + bytes([number]) * 40 + b"\r\n\r\n"
                if number % 2
                else b"GET / HTTP/1.1\r\n~~\x01\r\n\r\n"
            )
            assert ended(odd)
    assert web.get("/api/v1/status")["daemon"]["http"]["answers"]["malformed"] >= 120
    assert len(daemon.log.splitlines()) < 40
    assert "Traceback" not in daemon.log


def test_a_flood_leaves_no_garbage(daemon: Any, web: Http, engine: AdminClient) -> None:
    def flood() -> None:
        for number in range(120):
            assert web.get("/api/v1/status" if number % 2 else "/healthz")
            assert web.ask("POST", "/api/v1/check").status == 401
            assert web.ask("GET", "/nowhere").status == 404

    flood()
    settled, open_then = anonymous_bytes(daemon), descriptors(daemon)
    for _ in range(4):
        flood()
        assert found(engine) == 12
    assert anonymous_bytes(daemon) - settled < 4 << 20
    wait(lambda: descriptors(daemon) <= open_then + 1, "the end of the connections")


def test_shutdown_does_not_wait_for_open_connections(daemon: Any, web: Http) -> None:
    with contextlib.ExitStack() as stack:
        for said in SLOW.values():
            stack.enter_context(web.connect()).sendall(said.replace("TOKEN", web.token).encode())
        web.get("/healthz")
        assert daemon.stop(timeout=8) == 0  # they would be cut off after 10 s
    assert "ERROR" not in daemon.log
    assert not [name for name in os.listdir(daemon.folder) if not name.endswith((".log", ".token"))]


def test_prometheus_reads_the_figures(web: Http, engine: AdminClient) -> None:
    answer = web.ask("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    assert '\nkvcache_pool_bytes{state="ready"} ' in answer.body.decode()

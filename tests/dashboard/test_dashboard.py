"""The dashboard without a browser: access, edits of engines' files, and the history."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import http.server
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from dashboard_rig import PATIENCE, wait
from hypothesis import given
from hypothesis import strategies as st
from insights import process

from kvcache_client.settings import parse_settings
from kvcache_proto.errors import BadArgument
from kvcache_server.status import ByClass, Eviction, Hints, Histogram, Namespace, Pool, Status
from kvcache_tools.dashboard import engine_fields, envfile
from kvcache_tools.dashboard.app import Dashboard as Serving
from kvcache_tools.dashboard.env_folder import Changed, EnvFolder
from kvcache_tools.dashboard.history import History
from kvcache_tools.dashboard.host_figures import HostFigures
from kvcache_tools.dashboard.relay import Relay

OURS = {"X-KVCache-Dashboard": "1"}
CROWD = 200  # connections, of which 32 may be open at one time
PARTS = st.text(alphabet="ab'\"\\ $`#;{}=:,", max_size=12)


def ask(url: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    address = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)) as connection:
        connection.request(method, path, json.dumps(body) if body is not None else None, headers or {})
        response = connection.getresponse()
        text = response.read()
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert "unsafe" not in response.headers["Content-Security-Policy"]
        assert response.headers["X-Frame-Options"] == "DENY"
    return response.status, json.loads(text) if response.headers["Content-Type"] == "application/json" else text


def test_many_silent_connections_lock_nobody_out(start_dashboard: Any) -> None:
    dashboard = start_dashboard("--api", "http://127.0.0.1:9")
    address = urlsplit(dashboard.url)
    open_files = lambda: len(os.listdir(f"/proc/{dashboard.process.pid}/fd"))  # noqa: E731
    before = open_files()
    with contextlib.ExitStack() as stack:
        for _ in range(CROWD):
            stack.enter_context(socket.create_connection((address.hostname, address.port)))
        assert ask(dashboard.url, "GET", "/data")[0] == 200
        assert open_files() < before + CROWD / 2
    wait(lambda: open_files() <= before + 2, "the end of them")


def test_it_stops_in_the_middle_of_a_poll(tmp_path: Path) -> None:
    async def begin_and_end(trial: int) -> None:
        serving = Serving(Relay("http://127.0.0.1:9"), HostFigures(), "", None, EnvFolder(str(tmp_path)))
        app = serving.app()
        app.freeze()
        await app.startup()
        await asyncio.sleep(0.01 * (trial % 3))
        serving._done.set()
        for _ in range(trial % 10):
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE):
            await app.cleanup()

    for trial in range(100):
        asyncio.run(begin_and_end(trial))


def test_who_may_request_what(start_daemon: Any, start_dashboard: Any) -> None:
    daemon = start_daemon(http="127.0.0.1:0")
    url = start_dashboard("--api", daemon.status()["daemon"]["http"]["address"]).url
    token = {"Authorization": f"Bearer {(daemon.folder / 'kv.token').read_text().strip()}"}
    clear = ("POST", "/api/v1/clear", {"namespace": ""})
    assert ask(url, *clear, token)[0] == 403, "another site's page cannot send our header"
    assert ask(url, *clear, OURS)[0] == 401
    assert ask(url, *clear, OURS | {"Authorization": "Bearer wrong-wrong-wrong-wrong"})[0] == 403
    assert ask(url, *clear, OURS | token) == (200, {"blocks": 0})
    assert ask(url, "POST", "/api/v1/clear", {"namespace": "none"}, OURS | token)[0] == 404
    assert ask(url, "GET", "/data", headers={"Host": "evil.example"})[0] == 421
    assert ask(url, "GET", "/data", headers={"Host": "localhost:1"})[0] == 200
    for path in ("/api/v1/check", "/api/v1/sessions/../clear", "/api/v1/sessions/1x/fence-off", "/../pyproject.toml"):
        assert ask(url, "POST", path, None, OURS | token)[0] in (404, 405), path
    assert ask(url, "GET", "/engines", None, OURS | token)[0] == 404, "no --manage"
    page = ask(url, "GET", "/")[1].decode()
    assert "http" not in page.replace("https://", "http") and "style=" not in page and "<script>" not in page


def test_the_token_file_is_enough_while_the_daemon_is_away(
    start_dashboard: Any, tmp_path: Path, systemctl: Path
) -> None:
    (systemctl / "units.json").write_text(json.dumps({"vllm@a.service": {}, "sshd.service": {}}))
    for odd in ("a b", "$(x)", "é"):
        (tmp_path / f"{odd}.env").touch()
    file = tmp_path / "token"
    file.write_text("a-token-of-some-length\n")
    nobody = socket.socket()  # it holds the port, and does not listen
    nobody.bind(("127.0.0.1", 0))
    flags = (
        "--api",
        f"http://127.0.0.1:{nobody.getsockname()[1]}",
        "--manage",
        "vllm@*",
        "--env-folder",
        str(tmp_path),
    )
    path = f"{systemctl}:/usr/bin:/bin"
    right, wrong = (OURS | {"Authorization": f"Bearer {each}-token-of-some-length"} for each in ("a", "no"))
    without = start_dashboard(*flags, path=path).url
    assert ask(without, "GET", "/engines", None, right)[0] == 503
    url = start_dashboard(*flags, "--token-file", str(file), path=path).url
    assert ask(url, "GET", "/engines", None, OURS)[0] == 401
    assert ask(url, "GET", "/engines", None, wrong)[0] == 403
    status, found = ask(url, "GET", "/engines", None, right)
    assert (status, [unit["name"] for unit in found["units"]]) == (200, ["vllm@a.service"])
    for name in ("sshd.service", "vllm@b.service", "vllm@a.service%20sshd.service", "--force", "vllm@..%2Fa.service"):
        assert ask(url, "POST", f"/engines/{name}/stop", None, right)[0] == 404, name
    assert ask(url, "POST", "/engines/vllm@a.service/kill", None, right)[0] == 404
    assert ask(url, "POST", "/engines/vllm@a.service/start", None, wrong)[0] == 403
    calls = [json.loads(line) for line in (systemctl / "calls.jsonl").read_text().splitlines()]
    assert {call[2] for call in calls} == {"list-units", "show"}
    assert ask(url, "POST", "/engines/vllm@a.service/start", None, right)[0] == 200
    assert ask(url, "POST", "/api/v1/clear", {"namespace": ""}, right)[0] == 503, "actions on the daemon want it there"
    nobody.close()


def test_headers_that_are_too_long_are_refused_without_a_traceback(start_dashboard: Any, capfd: Any) -> None:
    dashboard = start_dashboard("--api", "http://127.0.0.1:9")
    address = urlsplit(dashboard.url)
    heads = (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 20_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
        b"\x16\x03\x01" + bytes(40) + b"\r\n\r\n",
    )
    for head in heads * 20:
        where = (address.hostname or "", address.port or 0)
        with socket.create_connection(where, timeout=PATIENCE) as odd, contextlib.suppress(ConnectionError):
            odd.sendall(head)
            while odd.recv(1 << 16):
                pass
    assert ask(dashboard.url, "GET", "/data")[0] == 200
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert 1 <= len(said.splitlines()) < 40, said


def test_deeply_nested_brackets_in_a_body(start_dashboard: Any, start_daemon: Any, capfd: Any) -> None:
    """In the dashboard's own requests, and in those that it forwards to the daemon."""
    daemon = start_daemon(http="127.0.0.1:0")
    api = daemon.status()["daemon"]["http"]["address"]
    token = Path(daemon.endpoint.removeprefix("ipc://")).with_suffix(".token").read_text().strip()
    dashboard = start_dashboard("--api", api, "--manage", "vllm@*")
    address = urlsplit(dashboard.url)
    for method, path in (("PUT", "/engines/vllm@a"), ("POST", "/api/v1/clear")):
        with contextlib.closing(http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)) as asks:
            asks.request(method, path, b"[" * 7_000, OURS | {"Authorization": f"Bearer {token}"})
            answer = asks.getresponse()
            text = json.loads(answer.read())
        assert (answer.status, text["code"]) == (400, "bad_argument"), text
    assert "Traceback" not in capfd.readouterr().err + daemon.log


@pytest.mark.parametrize(
    "odd", [{}, [], {"daemon": {"region": 7}}, {"daemon": {"region": "/x", "pid": 1}, "counters": 3, "pool": None}]
)
def test_it_keeps_polling_when_another_program_answers(start_dashboard: Any, odd: Any) -> None:
    asked = []

    class Another(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(odd).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Another) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = start_dashboard("--api", f"http://127.0.0.1:{server.server_port}").url
        wait(lambda: len(asked) > 2, "another look")
        found = ask(url, "GET", "/data")[1]
        server.shutdown()
    assert found["status"] is None and "not the answer of a kvcache-server" in found["away"]["why"]
    assert found["host"]["memory"]["total"] > 0


@pytest.mark.parametrize(
    "flags",
    [
        ("--listen", "0.0.0.0:0"),
        ("--api", "http://10.0.0.1:9464"),
        ("--api", "file:///etc/passwd"),
        ("--token-file", "/nowhere"),
        ("--manage", "*"),
        ("--manage", "--force"),
        ("--manage", "vllm@*", "--env-folder", "here"),
    ],
)
def test_options_with_which_it_does_not_start(flags: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "kvcache_server", "dashboard", *flags]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 2, ran.stderr
    assert flags[-2] in ran.stderr and "Traceback" not in ran.stderr


# Environment files. What systemd makes of each was seen in systemd 252's own parser.


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("A=1\n# B=2\n;C=3\n\n  D = 4 \n", {"A": "1", "D": "4"}),
        ('A="x y" z\nB=\'"\'\n', {"A": "x yz", "B": '"'}),
        ('A={"a": "b"}\n', {"A": '{"a": "b"}'}),
        ("A=x\\\ny\nB=\\\\\\ \n", {"A": "xy", "B": "\\ "}),
        ('A="\\$\\n\\"x\ny"\n', {"A": '$\\n"x\ny'}),
        ("A=1\nA=2", {"A": "2"}),
        ("nothing\nA=b=c", {"A": "b=c"}),
        ("A=x \\", {"A": "x "}),
    ],
)
def test_a_file_is_parsed_as_by_systemd(text: str, values: dict[str, str]) -> None:
    assert {each.key: each.value for each in envfile.parse(text)} == values


@given(value=PARTS, before=PARTS, after=PARTS)
def test_an_edit_changes_one_value_and_nothing_else(value: str, before: str, after: str) -> None:
    head, tail = f"# {before}.\nA={envfile.write(before)}\n", f"\n;{after}.\nZ={envfile.write(after)}\n"
    edited = envfile.edit(f"{head}K=old{tail}", {"K": value})
    assert edited.startswith(head + "K=") and edited.endswith(tail)
    assert {each.key: each.value for each in envfile.parse(edited)} == {"A": before, "K": value, "Z": after}


def test_values_that_may_not_be_written() -> None:
    for text, key, value in (("A=1", "A", "x\ny"), ("A=1", "B", "2"), ("# trap \\\nA=1", "A", "2")):
        with pytest.raises(BadArgument):
            envfile.edit(text, {key: value})


ENV = """MODEL=a/b
MAX_MODEL_LEN=10
KV_TRANSFER_CONFIG={"kv_connector": "KVCacheServerConnector", "kv_role": "kv_both"}
X=1
"""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("MODEL", each) for each in ("", "--trust-remote-code", "a b", "../x", "/a/../b", "a\nb", "$(x)", "a//b")),
        *(("MAX_MODEL_LEN", each) for each in ("0", "-1", "1.5", "9" * 12, "٣", "")),
        *(
            ("save", "some"),
            ("verify", "yes"),
            ("block_size", "0"),
            ("deadline_ms", "10001"),
            ("ARGS", "x"),
            ("X", "2"),
        ),
    ],
)
def test_invalid_values_are_refused(field: str, value: str) -> None:
    with pytest.raises(BadArgument):
        engine_fields.change(ENV, {field: value})


def test_settings_of_the_connector_are_edited_and_removed() -> None:
    values = {
        field.name: str(field.least or 7) if field.kind == "int" else field.choices[-1] for field in engine_fields.CACHE
    }
    written = {each.key: each.value for each in envfile.parse(engine_fields.change(ENV, values))}
    config = json.loads(written["KV_TRANSFER_CONFIG"])
    assert config["kv_role"] == "kv_both" and written["X"] == "1"
    parsed, notes = parse_settings(config["kv_connector_extra_config"])
    assert notes == []
    assert {name: str(getattr(parsed, name)).removesuffix(".0") for name in values} == values
    emptied = engine_fields.change(engine_fields.change(ENV, values), dict.fromkeys(values, ""))
    assert {field["name"]: field["value"] for field in engine_fields.read(emptied)}["save"] == ""
    defaults, _ = parse_settings({})
    told = {field.name: field.default for field in engine_fields.CACHE if field.name != "block_size"}
    assert {name: str(getattr(defaults, name)).removesuffix(".0") for name in told} == told


def test_settings_of_another_connector_are_unchanged() -> None:
    other = ENV.replace("KVCacheServerConnector", "LMCacheConnector")
    assert [field["name"] for field in engine_fields.read(other)] == ["MODEL", "MAX_MODEL_LEN"]
    with pytest.raises(BadArgument):
        engine_fields.change(other, {"save": "all"})


def test_a_file_is_replaced_atomically_with_its_mode_and_a_backup(tmp_path: Path) -> None:
    (tmp_path / "a.env").write_text(ENV)
    (tmp_path / "a.env").chmod(0o640)
    (tmp_path / "link.env").symlink_to(tmp_path / "a.env")
    folder = EnvFolder(str(tmp_path))
    text, version = folder.read("a.env")
    assert text == ENV
    before = os.stat(tmp_path / "a.env").st_ino
    folder.change("a.env", version, {"MODEL": "c/d"})
    found = os.stat(tmp_path / "a.env")
    assert found.st_ino != before and stat.S_IMODE(found.st_mode) == 0o640
    assert (tmp_path / "a.env").read_text() == ENV.replace("a/b", "c/d")
    assert (tmp_path / "a.env.before").read_text() == ENV
    with pytest.raises(Changed):
        folder.change("a.env", version, {"MODEL": "e/f"})
    for name in ("link.env", "none.env", ".."):
        with pytest.raises(BadArgument):
            folder.read(name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.env", "a.env.before", "link.env"]


# The history.


def report(asked: int, saved: dict[str, int], pid: int = 1) -> Status:
    """Return figures of a daemon, of which only those count that points are made from."""
    nothing = ByClass(0, 0, 0)
    found = Status(
        pool=Pool("r", 9, 5, *[0] * 14, residence=Histogram.of(())),
        namespaces=[namespace(name, size) for name, size in saved.items()],
        sessions=[],
        away=[],
        grace=False,
        life=1,
        evictions={},
        evicted_unread=0,
        eviction=Eviction(False, 0, 0, nothing, nothing),
        hints=Hints(*[0] * 7, {}, {}, [], []),
        refusals={},
        counters={"blocks_requested": asked},
        client_counts={"loaded_bytes": 2 * asked},
        daemon=process(),
    )
    found.daemon.pid = pid
    return found


def namespace(name: str, saved_bytes: int) -> Namespace:
    counts = dict.fromkeys(Namespace.__struct_fields__, 0)
    lists: dict[str, Any] = {field: [] for field in ("groups", "block_tokens", "block_bytes")}
    return Namespace(
        **counts | lists | {"id": name, "model": "m", "identity": {}, "engines": {}, "saved_bytes": saved_bytes}
    )


def test_a_point_is_the_difference_of_two_reports_of_one_daemon() -> None:
    history = History()
    history.add(10.0, report(100, {"a": 50}))
    history.add(12.0, report(130, {"a": 60, "b": 5}))
    history.add(14.0, report(130, {"b": 5}))  # a has gone
    history.add(16.0, report(7, {"b": 5}, pid=2))  # another process, which counts anew
    history.add(18.0, report(9, {"b": 6}, pid=2))
    found = history.since(0)
    named = [dict(zip(found.fields, point, strict=True)) for point in found.points]
    names = ("at", "requested_blocks", "loaded_bytes", "saved_bytes")
    assert [tuple(each[name] for name in names) for each in named] == [
        *((12.0, 30, 60, 15), (14.0, 0, 0, 0), (18.0, 2, 4, 1))
    ]
    assert found.next == 3
    assert history.since(2).points == found.points[2:]
    assert history.since(99).points == found.points, "of another dashboard, which had more"


def test_the_history_is_bounded() -> None:
    history = History(most=5)
    for number in range(20):
        history.add(float(number + 1), report(number, {}))
    assert [point.at for point in history.since(0).points] == [16.0, 17.0, 18.0, 19.0, 20.0]
    assert len(history.since(17).points) == 2

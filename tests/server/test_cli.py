"""The command line as operators see it: output, exit codes, and helpful messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvcache_proto import __version__
from kvcache_proto import messages as m
from kvcache_proto.types import MAX_BLOCKS, GroupSpec, NamespaceSpec
from kvcache_server.admin_client import AdminClient
from kvcache_server.cli import EXIT_CODES, commands
from kvcache_server.config import settings

SPEC = NamespaceSpec("llama", (GroupSpec(16, 4096),))


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVCACHE_")}
    command = [sys.executable, "-m", "kvcache_server", *arguments]
    return subprocess.run(
        command,
        env=inherited | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def store(admin: AdminClient, count: int, first: int = 0) -> None:
    namespace = admin.ask(m.Attach(0, b"", SPEC, (0,))).namespace
    run = [number.to_bytes(32, "little") for number in range(first, first + count)]
    for at in range(0, count, MAX_BLOCKS):
        part = m.Run(run[at : at + MAX_BLOCKS], run[at - 1] if at else None)
        reserved = admin.ask(m.Reserve(0, b"", namespace, [part]))
        admin.ask(m.Settle(0, b"", admin.geometry.region_id, reserved.reservation, (0,), 0))
    acquired = admin.ask(m.Acquire(0, b"", namespace, [*run, bytes(31) + b"x"]))
    admin.tell(m.Release(0, b"", [acquired.lease]))
    admin.ping()


def test_status_and_clear(daemon: Any) -> None:
    with AdminClient(daemon.endpoint, "rank 0", engine="qwen") as engine:
        store(engine, 12)
        stats = json.loads(run("status", "--json", "--endpoint", daemon.endpoint).stdout)
        (space,) = stats["namespaces"]
        assert (space["id"], space["lookups"], space["requested_blocks"]) == (SPEC.id, 1, 13)
        assert (space["hit_blocks"], space["blocks"], space["bytes"]) == (12, 12, 12 * 4096)
        assert [(session["engine"], session["label"]) for session in stats["sessions"]] == [("qwen", "rank 0")]
        assert {"pool", "refusals", "counters", "daemon"} <= stats.keys()

        shown = run("status", KVCACHE_ENDPOINT=daemon.endpoint)
        assert shown.returncode == 0
        for text in (SPEC.id, "llama", "12 blocks", "92.3%", "qwen", "rank 0", f"kvcache-server {__version__}"):
            assert text in shown.stdout

        unknown = run("clear", "--namespace", "0123456789abcdef", "--endpoint", daemon.endpoint)
        assert unknown.returncode == 1
        assert "0123456789abcdef" in unknown.stderr
        assert run("clear", "--namespace", SPEC.id, "--endpoint", daemon.endpoint).stdout == "cleared 12 blocks\n"
        assert run("clear", "--endpoint", daemon.endpoint).stdout == "cleared 0 blocks\n"


def test_an_engine_that_clears_in_a_loop_does_not_fill_the_log(daemon: Any) -> None:
    with AdminClient(daemon.endpoint, "rank 0", engine="qwen") as engine:
        for _ in range(50):
            store(engine, 2)
            assert engine.clear() == 2
    lines = [line for line in daemon.log.splitlines() if "cleared" in line and "qwen" in line]
    assert 1 <= len(lines) < 10, "50 clears took less than 10 s"


def test_engines_that_leave_before_their_clear_is_done(daemon: Any) -> None:
    for number in range(40):
        with AdminClient(daemon.endpoint, "rank 0", engine=f"engine {number}") as engine:
            store(engine, 400, first=400 * number)
            engine.tell(m.Clear(0, b"", ""))
    daemon.status()  # it waits in the same queue
    assert "failed inside the daemon" not in daemon.log


@pytest.mark.parametrize("command", ["status", "clear"])
def test_no_daemon_there(short_folder: Path, command: str) -> None:
    endpoint = f"ipc://{short_folder}/kv.sock"
    failed = run(command, "--endpoint", endpoint)
    assert failed.returncode == 4
    assert failed.stderr == (
        f"kvcache-server: no daemon at {endpoint} (No such file or directory): start one with "
        f"`kvcache-server serve --endpoint {endpoint}`, or choose another endpoint\n"
    )


def test_a_dead_daemon_counts_as_no_daemon(daemon: Any) -> None:
    daemon.kill()
    failed = run("status", "--endpoint", daemon.endpoint)
    assert failed.returncode == 4
    assert "Connection refused" in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--siez", "1GiB"], 2, "No such option '--siez'"),
        (["--size", "lots"], 2, "flags: size: size 'lots': a number of bytes"),
        (["--size", "-1"], 2, "size '-1'"),
        (["--size", "1MiB"], 2, "at least"),
        (["--strict", "--size", "1MiB"], 2, "at least"),
        (["--strict", "perhaps"], 2, "flags: strict: "),
        (["--size", "64MiB", "--page-size", "3MiB"], 2, "page_size"),
        (["--lock", "maybe"], 2, "maybe"),
        (["--region-dir", "/nowhere"], 2, "no such folder"),
        (["--endpoint", "tcp://127.0.0.1:5555"], 2, "only ipc://"),
        (["--endpoint", "ipc:///tmp/" + "long" * 30 + "/kv.sock"], 2, "at most 100 bytes"),
        (["--config", "/nowhere/kv.toml"], 2, "/nowhere/kv.toml: cannot be read"),
        (["--allow-uids", "0,no-such-user"], 2, "flags: allow_uids: no user 'no-such-user' on this host"),
        (["--allow-gids", "no-such-group"], 2, "flags: allow_gids: no group 'no-such-group' on this host"),
        (["--size", "900TiB"], 2, "choose a smaller size"),
        (["--size", "7TiB"], 5, "choose a smaller size"),
    ],
)
def test_a_daemon_that_cannot_start_reports_why(short_folder: Path, arguments: list[str], code: int, told: str) -> None:
    endpoint = [] if "--endpoint" in arguments else ["--endpoint", f"ipc://{short_folder}/kv.sock"]
    failed = run("serve", *endpoint, *arguments)
    assert failed.returncode == code, failed.stderr
    assert told in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not list(short_folder.iterdir())


def test_unknown_settings_in_file_and_environment(short_folder: Path) -> None:
    file = short_folder / "kv.toml"
    file.write_text('size = "64MiB"\npage_szie = "4KiB"\n')
    failed = run("serve", "--config", str(file))
    assert failed.returncode == 2
    assert failed.stderr == f"kvcache-server: {file}: unknown setting 'page_szie'; did you mean 'page_size'?\n"
    failed = run("serve", KVCACHE_LOG_FROMAT="json")
    assert failed.returncode == 2
    assert "did you mean 'KVCACHE_LOG_FORMAT'?" in failed.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_no_permission(short_folder: Path) -> None:
    become = "import os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534);"
    start = become + "from kvcache_server.cli import main; main()"

    def as_nobody(*arguments: str) -> subprocess.CompletedProcess[str]:
        # Imported before it becomes nobody: the package may lie where only root can read.
        command = [
            sys.executable,
            "-c",
            "import kvcache_server.cli, kvcache_server.admin_client, kvcache_server.daemon.service;" + start,
        ]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, check=False)

    short_folder.chmod(0o755)
    endpoint = ["--endpoint", f"ipc://{short_folder}/kv.sock", "--size", "64MiB"]
    failed = as_nobody("serve", *endpoint)
    assert failed.returncode == 6, failed.stderr
    assert "uid 65534 may not write" in failed.stderr
    short_folder.chmod(0o1777)
    failed = as_nobody("serve", *endpoint, "--region-dir", "/sys")
    assert failed.returncode in (5, 6), failed.stderr
    assert "Traceback" not in failed.stderr
    failed = as_nobody("serve", *endpoint, "--lock", "always")
    assert failed.returncode == 6, failed.stderr
    assert "limit on locked memory" in failed.stderr
    assert not list(short_folder.iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_no_permission_for_the_endpoint(daemon: Any) -> None:
    daemon.folder.chmod(0o755)
    load = "import os, kvcache_server.cli, kvcache_server.admin_client;"
    become = "os.setgroups([]); os.setgid(65534); os.setuid(65534);"
    main = load + become + "kvcache_server.cli.main()"
    command = [sys.executable, "-c", main, "status", "--endpoint", daemon.endpoint]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert failed.returncode == 6, failed.stderr
    assert "--allow-uids 65534" in failed.stderr


def test_a_configured_daemon(start_daemon: Any, short_folder: Path) -> None:
    file = short_folder / "kv.toml"
    file.write_text('size = "900TiB"\npage_size = "2MiB"\nlog_format = "json"\nlog_level = "debug"\n')
    daemon = start_daemon(config=file, env={"KVCACHE_SIZE": "800TiB"}, size="32MiB")
    status = daemon.status()
    assert status["pool"]["page_bytes"] == 2 << 20
    assert status["pool"]["bytes"] == 30 << 20  # rows take some of the size
    assert daemon.stop() == 0
    lines = [json.loads(line) for line in daemon.log.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    ready = next(line for line in lines if line.get("event") == "ready")
    assert daemon.endpoint in ready["message"]
    assert [line["event"] for line in lines if "session" in line][:2] == ["attach", "detach"]


def test_help_documents_every_setting_and_exit_code() -> None:
    runner = CliRunner()
    shown = " ".join(runner.invoke(commands, ["serve", "--help"]).output.split())
    for row in settings():
        assert "--" + row.name.replace("_", "-") in shown
        assert row.doc.replace("`", "").split()[0] in shown
    shown = " ".join(runner.invoke(commands, ["--help"]).output.split())
    for name in (
        "bench",
        "clear",
        "demo",
        "doctor",
        "serve",
        "status",
        *(f"{code} {why}" for _, code, why in EXIT_CODES),
    ):
        assert name in shown


def test_unknown_commands_and_options() -> None:
    failed = run("sevre")
    assert failed.returncode == 2
    assert run("--version").stdout == f"kvcache-server, version {__version__}\n"

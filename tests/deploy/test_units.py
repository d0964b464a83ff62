"""The units under a real systemd: installed on a clean machine, started, reloaded, killed, hung, stopped."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from nest import PROGRAM, Nest

UNIT = "kvcache-server.service"
CONFIG = "/etc/kvcache/kvcache.toml"
INSTALL = (PROGRAM, "install-service", "--program", PROGRAM)
AS = ("setpriv", "--clear-groups", "--reuid")  # a user, and "--regid", a group


@pytest.fixture(scope="module")
def machine(host: Nest) -> Nest:
    """A host with the service installed by the documented commands, and running."""
    host.run(*INSTALL, "--size", "64MiB")
    host.run("systemctl", "start", UNIT)
    return host


@pytest.fixture
def service(machine: Nest) -> Iterator[Nest]:
    """The service, running, as it was installed; a test may do to it what it likes."""
    yield machine
    config = machine.run("cat", CONFIG)
    assert "64MiB" in config
    machine.run("systemctl", "reset-failed", UNIT, check=False)  # nor is it known where it was stopped
    machine.run("systemctl", "start", UNIT)


def stats(host: Nest) -> Any:
    return json.loads(host.run(PROGRAM, "status", "--json"))


def write(host: Nest, path: str, text: str) -> None:
    host.run("sh", "-c", 'mkdir -p "$(dirname "$0")" && printf "%s" "$1" > "$0"', path, text)


class EngineUnit:
    """An engine as vllm@NAME.service, with a drop-in: what it reads is a FIFO, what it says a file."""

    def __init__(self, host: Nest, name: str, drop_in: str) -> None:
        self.host, self.unit, self._at, self._lines = host, f"vllm@{name}.service", f"/run/nest/{name}", 0
        program = f"/run/nest/bin/python /run/nest/tree/tests/deploy/engine.py ${{KVCACHE_ENDPOINT}} {name}"
        write(host, f"/etc/vllm/{name}.env", "KVCACHE_ENDPOINT=ipc:///run/kvcache/kvcache.sock\n")
        write(
            host,
            f"/etc/systemd/system/{self.unit}.d/zz-engine.conf",  # after log.conf, which is for all
            f"[Service]\n{drop_in}Restart=no\nExecStart=\nExecStart={program}\n"
            f"StandardInput=file:{self._at}.in\nStandardOutput=append:{self._at}.out\n",
        )
        host.run("sh", "-c", f"mkfifo {self._at}.in && touch {self._at}.out && systemctl daemon-reload")
        host.run("systemctl", "start", "--no-block", self.unit)
        feed = host.command("sh", "-c", f"exec cat > {self._at}.in")
        self._feed = subprocess.Popen(feed, stdin=subprocess.PIPE, text=True, bufsize=1)

    def said(self) -> str:
        self._lines += 1
        until = time.monotonic() + 60
        while len(lines := self.host.run("cat", f"{self._at}.out").splitlines()) < self._lines:
            assert time.monotonic() < until, f"{self.unit} says no more than {lines}:\n{self.host.log}"
            time.sleep(0.05)
        return lines[self._lines - 1]

    def ask(self, line: object) -> str:
        assert self._feed.stdin is not None
        print(line, file=self._feed.stdin)
        return self.said()

    def close(self) -> None:
        assert self._feed.stdin is not None
        self._feed.stdin.close()
        self._feed.wait(30)
        self.host.wait(self.unit, "ActiveState", "inactive")


MakeEngine = Callable[[str, str], EngineUnit]


@pytest.fixture
def engine_unit(service: Nest) -> Iterator[MakeEngine]:
    """Makes engines as units: a name, and the settings of a drop-in for the shipped example."""
    service.run("sh", "-c", "cp /run/nest/tree/deploy/systemd/vllm@.service /etc/systemd/system/")
    service.run("sh", "-c", "id -u vllm > /dev/null 2>&1 || useradd --system --user-group vllm")
    service.run("sh", "-c", "sed 's/-m kvcache_server/-u/' /run/nest/bin/kvcache-server > /run/nest/bin/python")
    service.run("chmod", "755", "/run/nest/bin/python")
    engines: list[EngineUnit] = []

    def make(name: str, drop_in: str) -> EngineUnit:
        engines.append(EngineUnit(service, name, drop_in))
        return engines[-1]

    yield make
    for each in engines:
        each.close()


def test_the_daemon_is_ready_when_systemd_reports_it(machine: Nest) -> None:
    assert machine.show(UNIT, "ActiveState") == "active"
    assert machine.show(UNIT, "StatusText") == "0 B of 62.0 MiB used, 0 sessions"
    assert machine.show(UNIT, "UnitFileState") == "enabled"
    assert machine.show(UNIT, "NeedDaemonReload") == "no"
    daemon = stats(machine)["daemon"]  # root may ask
    assert str(daemon["pid"]) == machine.show(UNIT, "MainPID")
    assert daemon["region"].startswith("/run/kvregion/")
    assert machine.run("stat", "-f", "-c", "%T", "/run/kvregion").strip() == "tmpfs"
    assert machine.run("stat", "-c", "%a %U", "/run/kvregion").strip() == "700 kvcache"
    assert machine.run("stat", "-c", "%a %U %G", "/run/kvcache").strip() == "2755 kvcache kvcache"
    status = dict(line.split(":\t") for line in machine.run("cat", f"/proc/{daemon['pid']}/status").splitlines())
    assert (status["NoNewPrivs"], status["Seccomp"], status["CapBnd"].strip("0")) == ("1", "2", "")


def test_http_answers_this_host(machine: Nest) -> None:
    ask = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9464/metrics').read().decode())"
    python = machine.run("sed", "s/-m kvcache_server/-c/", PROGRAM)
    write(machine, "/run/nest/bin/ask", python)
    assert "kvcache_" in machine.run("sh", "/run/nest/bin/ask", ask)


def test_installing_again_changes_nothing(machine: Nest) -> None:
    said = machine.run(*INSTALL)
    done = dict(line.split()[1::-1] for line in said.splitlines() if line.split()[1].startswith("/"))
    assert {path for path, what in done.items() if what != "unchanged"} == {CONFIG}
    assert done[CONFIG] == "kept"  # the size in it is the operator's
    assert machine.show(UNIT, "NeedDaemonReload") == "no"


@pytest.mark.parametrize(("group", "code"), [("kvcache", 0), ("nogroup", 6)])
def test_only_the_group_may_attach(machine: Nest, group: str, code: int) -> None:
    who = (*AS, "games", "--regid", group)
    done = subprocess.run(
        machine.command("env", "KVCACHE_ENDPOINT=ipc:///run/kvcache/kvcache.sock", *who, PROGRAM, "status"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr


def test_reload(service: Nest) -> None:
    config = service.run("cat", CONFIG)
    try:
        write(service, CONFIG, config + "max_sessions = 7\nallow_gids = []\n")  # the last one twice
        service.run("systemctl", "reload", UNIT)
        service.wait_log("not read again, and nothing has changed")  # systemd 252 does not wait for the daemon
        write(service, CONFIG, config.replace('["root"]', '["root", "games"]') + "max_sessions = 7\n")
        service.run("systemctl", "reload", UNIT)
        service.wait_log("max_sessions 1024 -> 7")
        test_only_the_group_may_attach(service, "nogroup", 0)  # an access control list, in the sandbox
    finally:
        write(service, CONFIG, config)
        service.run("systemctl", "reload", UNIT)
    service.wait_log("max_sessions 7 -> 1024")
    service.wait(UNIT, "ActiveState", "active")


def test_a_killed_daemon_comes_back(service: Nest, engine_unit: MakeEngine) -> None:
    engine = engine_unit("beside-killed", "")
    assert engine.said() == "saved 8"
    restarts = int(service.show(UNIT, "NRestarts"))
    service.run("systemctl", "kill", "--signal=KILL", UNIT)
    assert engine.ask(8) == "found 8"
    service.wait(UNIT, "NRestarts", str(restarts + 1))
    service.wait(UNIT, "ActiveState", "active")


def test_a_daemon_that_hangs_is_restarted(service: Nest, engine_unit: MakeEngine) -> None:
    engine = engine_unit("beside-hung", "")
    assert engine.said() == "saved 8"
    drop_in = f"/etc/systemd/system/{UNIT}.d/watchdog.conf"
    write(service, drop_in, "[Service]\nWatchdogSec=2\n")
    try:
        service.run("systemctl", "daemon-reload")
        service.run("systemctl", "restart", UNIT)
        assert engine.ask(8) == "found 8"
        hung = service.show(UNIT, "MainPID")
        service.run("kill", "-STOP", hung)
        service.wait(UNIT, "NRestarts", "1")
        service.wait(UNIT, "ActiveState", "active")
        assert service.show(UNIT, "MainPID") != hung
        assert "Fatal Python error: Aborted" in service.log  # where it hung
        assert engine.ask(8) == "found 8"
    finally:
        service.run("rm", drop_in)
        service.run("systemctl", "daemon-reload")


def test_an_invalid_configuration_is_not_retried(service: Nest) -> None:
    config = service.run("cat", CONFIG)
    try:
        write(service, CONFIG, config + "max_sesions = 7\n")
        service.run("systemctl", "restart", UNIT, check=False)
        assert service.show(UNIT, "ActiveState") == "failed"
        assert service.show(UNIT, "ExecMainStatus") == "2"
        assert service.show(UNIT, "NRestarts") == "0"
        assert "did you mean 'max_sessions'?" in service.log
    finally:
        write(service, CONFIG, config)


def wait_tier(host: Nest, name: str) -> None:
    until = time.monotonic() + 30
    while [(each["name"], each["off"]) for each in stats(host)["daemon"]["tiers"]] != [(name, "")]:
        assert time.monotonic() < until, f"no tier {name}:\n{stats(host)['daemon']}\n{host.log}"
        time.sleep(0.1)


def test_the_daemon_s_unit_has_room_for_a_tier_on_disk(service: Nest) -> None:
    config = service.run("cat", CONFIG)
    try:
        write(service, CONFIG, config + '\n[[tier]]\nurl = "disk:/var/cache/kvcache?size=64MiB"\n')
        service.run("systemctl", "reload", UNIT)
        wait_tier(service, "disk")
    finally:
        write(service, CONFIG, config)
        service.run("systemctl", "restart", UNIT)
    assert stats(service)["daemon"]["tiers"] == []


def test_a_tier_has_a_unit_of_its_own(service: Nest) -> None:
    unit = "kvcache-tier@ssd.service"
    write(service, "/etc/kvcache/tier-ssd.env", "KVCACHE_TIER_URL=disk:/var/cache/kvcache?size=64MiB\n")
    try:
        service.run("systemctl", "start", unit)
        wait_tier(service, "ssd")
        service.run("systemctl", "restart", UNIT)
        wait_tier(service, "ssd")
        assert service.show(unit, "NRestarts") == "0"
        service.run("systemctl", "stop", unit)
        assert service.show(unit, "Result") == "success"
        write(service, "/etc/kvcache/tier-ssd.env", "KVCACHE_TIER_URL=disk:/var/cache/kvcache\n")
        service.run("systemctl", "start", unit)
        service.wait(unit, "ActiveState", "failed")
        assert (service.show(unit, "ExecMainStatus"), service.show(unit, "NRestarts")) == ("2", "0")
    finally:
        service.run("systemctl", "stop", unit)
        service.run("systemctl", "reset-failed", unit, check=False)


def test_a_second_daemon_is_an_instance(service: Nest) -> None:
    service.run(*INSTALL, "--instance", "red", "--size", "32MiB")
    service.run("systemctl", "start", "kvcache-server@red.service")
    red = service.run(PROGRAM, "status", "--endpoint", "ipc:///run/kvcache-red/kvcache.sock")
    assert "30.0 MiB" in red
    assert stats(service)["pool"]["bytes"] == 62 << 20
    service.run("systemctl", "stop", "kvcache-server@red.service")


@pytest.mark.long
def test_with_a_dynamic_user_the_folder_is_closed_to_engines(service: Nest) -> None:
    """As deploy/README.md says: systemd has it below /run/private. Whoever tries reads which folder it is."""
    unit, endpoint = "kvcache-server@dynamic.service", "ipc:///run/kvcache-dynamic/kvcache.sock"
    service.run(*INSTALL, "--instance", "dynamic", "--size", "32MiB", "--no-enable")
    write(service, f"/etc/systemd/system/{unit}.d/dynamic.conf", "[Service]\nDynamicUser=yes\n")
    service.run("systemctl", "daemon-reload")
    service.run("systemctl", "start", unit)
    said = service.run(*AS, "games", "--regid", "kvcache", PROGRAM, "status", "--endpoint", endpoint, check=False)
    assert "may not enter /run/private" in said
    service.run("systemctl", "stop", unit)


def test_the_daemon_s_memory_is_freed_by_its_user(service: Nest) -> None:
    region = stats(service)["daemon"]["region"]
    service.run("systemctl", "stop", UNIT)
    service.run("test", "-f", region)
    asked = ("setpriv", "--init-groups", "--reuid", "kvcache", "--regid", "kvcache", PROGRAM, "discard")
    assert service.run(*asked, "--config", CONFIG).strip() == "discarded"
    service.run("test", "!", "-e", region)


# What an operator may put into a drop-in of an engine's unit.
HARDENED = """
PrivateTmp=yes
PrivateDevices=yes
PrivateIPC=yes
PrivateMounts=yes
ProtectSystem=strict
ProtectHome=yes
ProtectProc=invisible
ProtectKernelTunables=yes
ProtectControlGroups=yes
ReadOnlyPaths=/run/kvcache
InaccessiblePaths=/run/kvregion
NoNewPrivileges=yes
CapabilityBoundingSet=
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictSUIDSGID=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
UMask=0077
"""
USERS = "PrivateUsers=yes\n"
NAMED = "Environment=KVCACHE_SERVER_UIDS=65534\n"


def test_hardened_engines_continue_after_restarts(service: Nest, engine_unit: MakeEngine) -> None:
    engines = [engine_unit("hardened", HARDENED), engine_unit("users", HARDENED + USERS + NAMED)]
    unnamed = engine_unit("unnamed", HARDENED + USERS)
    assert [engine.said() for engine in engines] == ["saved 8"] * 2
    refused = unnamed.said()
    assert "uid 65534 serves there" in refused and "KVCACHE_SERVER_UIDS=65534" in refused
    mounts = service.run("cat", f"/proc/{service.show(engines[0].unit, 'MainPID')}/mountinfo")
    assert " /tmp rw" in mounts and " /run/kvcache ro" in mounts  # systemd has not left out what it cannot do here
    folder = service.run("stat", "-c", "%i", "/run/kvcache")
    sessions = {each["id"] for each in stats(service)["sessions"]}
    before = service.show(UNIT, "MainPID")
    service.run("systemctl", "restart", UNIT)
    assert service.show(UNIT, "MainPID") != before
    assert [engine.ask(8) for engine in engines] == ["found 8"] * 2
    assert {each["id"] for each in stats(service)["sessions"]} == sessions  # re-attached, not anew
    service.wait_log("resumed: engine hardened")
    service.run("systemctl", "stop", UNIT)
    assert [engine.ask(0) for engine in engines] == ["found 0"] * 2  # they run on, without hits
    assert service.run("stat", "-c", "%i", "/run/kvcache") == folder  # which containers have mounted
    service.run("systemctl", "start", UNIT)
    assert [engine.ask(8) for engine in engines] == ["found 8"] * 2
    assert [engine.ask("held") for engine in engines] == ["held 2, reclaimed, lost 0"] * 2
    assert [service.show(engine.unit, "ExecMainStatus") for engine in engines] == ["0"] * 2


@pytest.fixture
def ann(machine: Nest) -> Iterator[tuple[str, ...]]:
    """The beginning of a command line of a user's, whose own systemd runs."""
    machine.run("useradd", "--create-home", "--home-dir", "/run/nest/ann", "--uid", "4321", "ann")
    machine.run("install", "-d", "-m", "700", "-o", "ann", "/run/user/4321")
    who = ("setpriv", "--init-groups", "--reuid", "ann", "--regid", "ann")
    who += ("env", "-i", "PATH=/run/nest/bin:/usr/bin:/bin", "HOME=/run/nest/ann", "XDG_RUNTIME_DIR=/run/user/4321")
    # What logind does when it is asked for lingering; there is none here.
    write(
        machine,
        "/run/nest/bin/loginctl",
        '#!/bin/sh\ntest "$*" = enable-linger && touch "/var/lib/systemd/linger/ann"\n',
    )
    machine.run("chmod", "755", "/run/nest/bin/loginctl")
    machine.run("install", "-d", "-m", "777", "/var/lib/systemd/linger")
    unit = """
        [Service]
        Type=notify
        User=ann
        Environment=HOME=/run/nest/ann XDG_RUNTIME_DIR=/run/user/4321
        Environment=SYSTEMD_UNIT_PATH=/run/nest/ann/.config/systemd/user:/run/nest/units
        ExecStart=/lib/systemd/systemd --user --unit=basic.target --log-target=console
        Delegate=yes
        KillSignal=SIGKILL
    """
    write(machine, "/run/nest/units/ann.service", "\n".join(line.strip() for line in unit.splitlines()))
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", "ann.service")
    yield who
    machine.run("systemctl", "stop", "ann.service")


def test_a_service_of_one_user(machine: Nest, ann: tuple[str, ...]) -> None:
    machine.run(*ann, *INSTALL, "--user", "--size", "64MiB")
    machine.run("rm", "/var/lib/systemd/linger/ann")
    machine.run(*ann, "systemctl", "--user", "start", UNIT, check=False)
    show = (*ann, "systemctl", "--user", "show", "--value", UNIT, "--property")
    assert machine.run(*show, "AssertResult").strip() == "no"  # its region would go with the last logout
    assert machine.run(*show, "ActiveState").strip() == "inactive"

    assert "enable-linger" in machine.run(*ann, *INSTALL, "--user")
    machine.run(*ann, "systemctl", "--user", "start", UNIT)
    assert machine.run(*show, "StatusText").strip() == "0 B of 62.0 MiB used, 0 sessions"
    assert machine.run(*show, "UnitFileState").strip() == "enabled"
    assert "62.0 MiB" in machine.run(*ann, PROGRAM, "status")  # by the endpoint that is the default
    machine.run(*ann, "systemctl", "--user", "reload", UNIT)
    machine.run(*ann, "systemctl", "--user", "stop", UNIT)
    machine.run("test", "-d", "/run/user/4321/kvcache")
    assert machine.run(*ann, PROGRAM, "discard").strip() == "discarded"

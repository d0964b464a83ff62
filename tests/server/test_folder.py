"""The daemon's files are safe from other users of the host, and from admitted clients: with real daemons."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import resource
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Daemon
from immutable import immutable

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_client.session import forks
from kvcache_client.session.handshake import shake_hands
from kvcache_proto.errors import ConfigError, EndpointTaken
from kvcache_proto.types import Verdict
from kvcache_server.admin_client import AdminClient
from kvcache_server.core.journal import Manifest, SessionEnded, SessionOpened
from kvcache_server.storage.folder import EndpointLock, Folder
from kvcache_server.storage.state_file import StateFile, read_state

STRANGER = 65534
SPEC = NamespaceSpec(model="m", groups=[GroupSpec(16, 64 << 10)])
PATIENCE = 30.0

only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")


def as_stranger(act: Callable[[], None]) -> None:
    """Run `act` as another user, in a forked child. Raises AssertionError where it raises."""
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            act()
            code = 0
        except BaseException as error:  # noqa: BLE001 - the child must never come back into pytest
            os.write(2, f"as uid {STRANGER}: {error!r}\n".encode())
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def ended(daemon: Daemon) -> int:
    """The exit code of a daemon that must not start; it says why in one line."""
    code = daemon.process.wait(PATIENCE)
    assert "Traceback" not in daemon.log
    assert "ready at" not in daemon.log
    assert sum(line.startswith("kvcache-server: ") for line in daemon.log.splitlines()) == (code != 0)
    return code


def discard(daemon: Daemon) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvcache_server", "discard", "--endpoint", daemon.endpoint]
    return subprocess.run([*command, "--region-dir", daemon.region_dir], capture_output=True, text=True, check=False)


def store(endpoint: str, hashes: list[bytes], model: str = "m") -> None:
    spec = NamespaceSpec(model=model, groups=SPEC.groups)
    with Session.connect(endpoint, engine="e1", deadline=10.0) as session:
        reservation = session.attach(spec, (0,)).reserve(hashes)
        for at, slot in zip(reservation.granted, reservation.slots, strict=True):
            session.view(slot)[:] = hashes[at] * (SPEC.groups[0].block_bytes // 32)
        assert set(reservation.commit()) == {Verdict.VISIBLE}


def some(count: int, name: str = "h") -> list[bytes]:
    return [f"{name}{number}".encode().ljust(32, b".") for number in range(count)]


def regions_in(folder: Path) -> list[str]:
    """What lies in a region folder of a daemon's: the names with what is random in them left out."""
    return sorted(re.sub("-[0-9a-f]{16}(?=[-.])", "-*", each.name) for each in folder.iterdir())


@pytest.fixture
def region_dir(short_folder: Path) -> Path:
    """A world-writable folder for regions, like /dev/shm, on the same file system as the test's folder."""
    folder = Path(f"/dev/shm/{short_folder.name}")
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture(autouse=True)
def tidy(short_folder: Path) -> Iterator[None]:
    yield
    subprocess.run(["rm", "-rf", f"/dev/shm/{short_folder.name}"], check=True)


# The folder itself.


def test_the_lock_is_taken_once(short_folder: Path) -> None:
    endpoint = f"ipc://{short_folder}/deeper/still/kv.sock"
    lock = EndpointLock(endpoint)
    with pytest.raises(EndpointTaken, match="another daemon serves"):
        EndpointLock(endpoint)
    lock.release()
    assert not list((short_folder / "deeper" / "still").iterdir())
    EndpointLock(endpoint).release()


def test_an_endpoint_below_a_file_is_refused(short_folder: Path) -> None:
    (short_folder / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a folder"):
        EndpointLock(f"ipc://{short_folder}/file/kv.sock")


@only_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1755, 0o1777], ids=oct)
def test_a_folder_of_another_user_is_refused_sticky_or_not(start_daemon: Any, short_folder: Path, mode: int) -> None:
    theirs = short_folder / "theirs"
    theirs.mkdir()
    theirs.chmod(mode)
    os.chown(theirs, STRANGER, STRANGER)
    refused = start_daemon(endpoint=f"ipc://{theirs}/kv.sock", wait=False)
    assert ended(refused) == 6
    assert f"{theirs} belongs to uid {STRANGER}" in refused.log
    assert not list(theirs.iterdir())


@only_root
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757], ids=oct)
def test_a_folder_that_others_may_write_without_the_sticky_bit_is_refused(
    start_daemon: Any, short_folder: Path, mode: int
) -> None:
    folder = short_folder / "open"
    folder.mkdir()
    folder.chmod(mode)
    refused = start_daemon(endpoint=f"ipc://{folder}/kv.sock", wait=False)
    assert ended(refused) == 6
    assert f"{folder} may be written by others" in refused.log


@only_root
def test_a_link_of_another_user_in_place_of_the_folder_is_refused(start_daemon: Any, short_folder: Path) -> None:
    open_to_all = short_folder / "tmp"
    open_to_all.mkdir()
    open_to_all.chmod(0o1777)
    home = short_folder / "home"
    home.mkdir()
    short_folder.chmod(0o755)
    as_stranger(lambda: os.symlink(home, open_to_all / "kvcache"))
    refused = start_daemon(endpoint=f"ipc://{open_to_all}/kvcache/kv.sock", wait=False)
    assert ended(refused) == 6
    assert "a link" in refused.log
    assert not list(home.iterdir())


@only_root
@pytest.mark.parametrize("made_by", [0, STRANGER])
def test_a_planted_link_in_place_of_the_session_folder_costs_no_file(
    start_daemon: Any, short_folder: Path, made_by: int
) -> None:
    precious = short_folder / "precious"
    precious.mkdir()
    names = ["thesis", "1-0123abcd"]  # one of them by a name as session files have it
    for name in names:
        (precious / name).write_text("precious")
    folder = short_folder / "open"
    folder.mkdir()
    folder.chmod(0o1777)
    short_folder.chmod(0o755)
    if made_by:
        as_stranger(lambda: os.symlink(precious, folder / "kv.sessions"))
    else:
        (folder / "kv.sessions").symlink_to(precious)
    refused = start_daemon(endpoint=f"ipc://{folder}/kv.sock", wait=False)
    assert ended(refused) in (2, 6)
    assert f"{folder}/kv.sessions is " in refused.log
    assert discard(refused).returncode in (2, 6)
    assert sorted(os.listdir(precious)) == sorted(names)


@only_root
def test_a_session_folder_of_another_user_is_refused(start_daemon: Any, short_folder: Path) -> None:
    short_folder.chmod(0o1777)
    as_stranger(lambda: os.mkdir(short_folder / "kv.sessions"))
    refused = start_daemon(wait=False)
    assert ended(refused) == 6
    assert f"{short_folder}/kv.sessions belongs to uid {STRANGER}" in refused.log


def test_only_files_named_like_session_files_are_deleted(start_daemon: Any, short_folder: Path) -> None:
    daemon = start_daemon()
    with AdminClient(daemon.endpoint):
        pass
    notes = short_folder / "kv.sessions" / "notes"
    notes.write_text("notes")
    (short_folder / "kv.sessions" / "7-0123abcd").write_text("of a session")
    assert daemon.stop() == 0
    assert [each.name for each in (short_folder / "kv.sessions").iterdir()] == ["notes"]
    start_daemon().stop()
    assert notes.read_text() == "notes"


# What is in the way.


KINDS = ["folder", "fifo", "socket", "device", "link", "theirs"]


def every_pair(names: list[str], kinds: list[str], kept: int) -> list[Any]:
    """Each name with each kind; all but `kept` of each name are long, chosen such that every kind is tried."""
    return [
        pytest.param(name, kind, marks=() if (at + of) % len(kinds) < kept else pytest.mark.long)
        for at, name in enumerate(names)
        for of, kind in enumerate(kinds)
    ]


def put(path: Path, kind: str) -> None:
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    elif kind == "device":
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    elif kind == "link":
        path.symlink_to(path.with_name("elsewhere"))
    else:
        path.touch(0o600)
        os.chown(path, STRANGER, STRANGER)


@only_root
@pytest.mark.parametrize(
    ("name", "kind"), every_pair(["kv.lock", "kv.state", "kv.sums", "kv.sessions", "kv.token"], KINDS, 2)
)
def test_a_conflicting_file_is_named_in_one_line(
    start_daemon: Any, short_folder: Path, region_dir: Path, name: str, kind: str
) -> None:
    first = start_daemon(keep="true", region_dir=region_dir, lock="never")
    store(first.endpoint, some(3))
    first.kill()
    path = short_folder / name
    if path.is_dir():
        for each in path.iterdir():
            each.unlink()
        path.rmdir()
    path.unlink(missing_ok=True)
    if (name, kind) == ("kv.sessions", "folder"):
        path.mkdir(0o755)
        path.chmod(0o777)
    else:
        put(path, kind)
    refused = start_daemon(keep="true", region_dir=region_dir, http="127.0.0.1:0", wait=False)
    assert ended(refused) in (2, 6)
    assert str(path) in refused.log.splitlines()[-1]
    assert os.path.lexists(path)
    assert not (short_folder / "elsewhere").exists()


@only_root
@pytest.mark.parametrize("name", ["kv.sock", "kv.door"])
@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind != "socket"), "another program's"])
def test_no_socket_replaces_another_user_s_file(start_daemon: Any, short_folder: Path, name: str, kind: str) -> None:
    path = short_folder / name
    with contextlib.ExitStack() as stack:
        if kind == "another program's":
            program = stack.enter_context(socket.socket(socket.AF_UNIX))
            program.bind(str(path))
            program.listen()
            os.chown(path, STRANGER, STRANGER)
        else:
            put(path, kind)
        before = path.lstat()
        refused = start_daemon(wait=False)
        assert ended(refused) == (3 if kind == "another program's" else 2)
        assert name in refused.log or refused.endpoint in refused.log
        after = path.lstat()
        assert (after.st_ino, after.st_mode, after.st_uid) == (before.st_ino, before.st_mode, before.st_uid)
        assert not (short_folder / "elsewhere").exists()


@only_root
@pytest.mark.parametrize("kind", KINDS)
def test_a_stale_file_on_the_way_to_a_new_state_file_is_replaced(
    start_daemon: Any, short_folder: Path, kind: str
) -> None:
    path = short_folder / "kv.state.new"
    put(path, kind)
    if kind == "folder":
        refused = start_daemon(wait=False)
        assert ended(refused) == 2
        assert f"{path} is a folder" in refused.log
    else:
        start_daemon()
        assert not os.path.lexists(path)
        assert not (short_folder / "elsewhere").exists()


def test_a_fifo_in_place_of_the_state_file_blocks_nothing(start_daemon: Any, short_folder: Path) -> None:
    daemon = start_daemon(keep="true")
    daemon.kill()
    (short_folder / "kv.state").unlink()
    os.mkfifo(short_folder / "kv.state")
    refused = start_daemon(keep="true", wait=False)
    assert ended(refused) == 2
    assert f"{short_folder}/kv.state is a FIFO" in refused.log


@pytest.mark.parametrize("command", ["serve", "discard"])
def test_a_region_folder_that_is_a_file_is_named(short_folder: Path, command: str) -> None:
    (short_folder / "file").write_text("")
    arguments = ["--endpoint", f"ipc://{short_folder}/kv.sock", "--region-dir", f"{short_folder}/file"]
    done = subprocess.run(
        [sys.executable, "-m", "kvcache_server", command, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == f"kvcache-server: region_dir {short_folder}/file: no such folder\n"


@pytest.mark.parametrize("shared", [True, False])
def test_a_file_of_the_daemon_s_user_that_others_gave_a_second_name_is_not_written_to(
    start_daemon: Any, short_folder: Path, shared: bool
) -> None:
    """If the kernel lets all users link all files; harmless in a folder to which no other user may write."""
    precious = short_folder / "precious"
    precious.write_text("precious")
    precious.chmod(0o600)
    folder = short_folder / "run"
    folder.mkdir()
    folder.chmod(0o1777 if shared else 0o755)
    os.link(precious, (folder if shared else short_folder) / "kv.sums")
    daemon = start_daemon(endpoint=f"ipc://{folder}/kv.sock", keep="true", wait=not shared)
    if shared:
        assert ended(daemon) == 6
        assert f"{folder}/kv.sums is a file with 2 names" in daemon.log
    else:
        daemon.stop()
        os.link(folder / "kv.state", short_folder / "another name")
        start_daemon(endpoint=f"ipc://{folder}/kv.sock", keep="true")
    assert precious.read_text() == "precious"


BECOME = "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534); kvcache_server.cli.main()"


@only_root
@pytest.mark.parametrize(
    ("name", "kind"),
    every_pair(
        ["kv.sock", "kv.door", "kv.lock", "kv.state", "kv.sums", "kv.sessions"], ["socket", "file", "folder"], 1
    ),
)
def test_a_daemon_without_root_names_files_of_other_users(short_folder: Path, name: str, kind: str) -> None:
    short_folder.chmod(0o1777)
    path = short_folder / name
    put(path, kind if kind != "file" else "theirs")
    os.chown(path, 0, 0)
    code = "import kvcache_server.cli, kvcache_server.daemon.lifecycle, kvcache_server.admin_client;" + BECOME
    serve = ["serve", "--endpoint", f"ipc://{short_folder}/kv.sock", "--size", "64MiB", "--keep", "false"]
    refused = subprocess.run([sys.executable, "-c", code, *serve], capture_output=True, text=True, timeout=PATIENCE)
    assert refused.returncode in (2, 6), refused.stderr
    assert "Traceback" not in refused.stderr
    assert str(path) in refused.stderr.splitlines()[-1]
    assert [each.name for each in short_folder.iterdir()] == [name]


@pytest.mark.parametrize("name", ["kv.sock", "kv.door"])
def test_a_socket_that_never_accepts_does_not_block_a_daemon(start_daemon: Any, short_folder: Path, name: str) -> None:
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.socket(socket.AF_UNIX))
        silent.bind(str(short_folder / name))
        silent.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            waiting.connect_ex(str(short_folder / name))
        assert ended(start_daemon(wait=False)) == 3


# The region's file.


def legacy_name(daemon: Daemon) -> str:
    digest = hashlib.sha256(os.fsencode(daemon.endpoint.removeprefix("ipc://"))).hexdigest()[:16]
    return f"kvcache-{os.geteuid()}-{digest}.region"


@only_root
@pytest.mark.parametrize("what", ["file", "folder", "link"])
def test_a_region_s_name_cannot_be_taken_before_it(
    start_daemon: Any, short_folder: Path, region_dir: Path, what: str
) -> None:
    """It is not predictable, and files of another user are ignored."""
    precious = short_folder / "precious"
    precious.write_text("precious")
    first = start_daemon(region_dir=region_dir)
    name = legacy_name(first)
    assert first.stop() == 0
    theirs = region_dir / name

    def take() -> None:
        if what == "file":
            theirs.write_text("theirs")
        elif what == "folder":
            theirs.mkdir()
        else:
            theirs.symlink_to(precious)

    as_stranger(take)
    daemon = start_daemon(region_dir=region_dir, keep="true")
    assert Path(daemon.status()["daemon"]["region"]).name != name
    daemon.stop()
    assert discard(daemon).returncode == 0
    assert regions_in(region_dir) == [re.sub("-[0-9a-f]{16}(?=[-.])", "-*", name)]
    assert os.path.lexists(theirs) and precious.read_text() == "precious"


@only_root
@pytest.mark.parametrize("room", ["120m", "200m"])
def test_a_region_that_was_put_aside_is_removed_to_make_room(start_daemon: Any, region_dir: Path, room: str) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(region_dir)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        daemon = start_daemon(region_dir=region_dir, keep="true")
        daemon.stop()
        for _ in range(2):
            (region,) = region_dir.glob("*.region")
            with region.open("r+b") as file:
                file.write(b"spoilt")
            again = start_daemon(region_dir=region_dir, keep="true")
            assert again.status()["counters"]["regions_put_aside"] == 1
            assert ("to make room for a new one" in again.log) == (room == "120m")
            again.stop()
            assert len(list(region_dir.glob("*.aside"))) == (room != "120m")
    finally:
        subprocess.run(["umount", "-l", str(region_dir)], check=True)


def test_what_a_daemon_killed_while_it_creates_its_region_leaves_is_removed(
    start_daemon: Any, region_dir: Path
) -> None:
    for _ in range(3):
        killed = start_daemon(region_dir=region_dir, size="1GiB", keep="true", wait=False)
        until = time.monotonic() + PATIENCE
        while not list(region_dir.glob("*.region")):
            assert time.monotonic() < until and killed.process.poll() is None, killed.log
        killed.kill()
    daemon = start_daemon(region_dir=region_dir, keep="true")
    assert len(list(region_dir.glob("*.region"))) == 1
    assert discard(daemon).returncode == 3
    daemon.stop()
    assert discard(daemon).returncode == 0
    assert not list(region_dir.iterdir())


def test_locks_of_a_client_do_not_keep_a_daemon_out(start_daemon: Any, region_dir: Path) -> None:
    daemon = start_daemon(keep="true", region_dir=region_dir)
    door = shake_hands(daemon.endpoint, "e1", "", 10.0)
    again = os.open(f"/proc/self/fd/{door.region}", os.O_RDWR)
    try:
        for descriptor in (again, door.region):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                assert descriptor == door.region  # the other one has it
        daemon.stop()
        start_daemon(keep="true", region_dir=region_dir).stop()
        start_daemon(keep="true", region_dir=region_dir, fresh=True).stop()
        done = discard(daemon)
        assert (done.returncode, done.stdout) == (0, "discarded\n"), done.stderr
    finally:
        os.close(again)
        for descriptor in (door.region, door.lock, door.descriptor):
            forks.close(descriptor)  # forked children would close what has their numbers next
    assert not list(region_dir.iterdir())


@only_root
def test_two_daemons_with_one_region_folder_ignore_each_other_s_region(
    start_daemon: Any, short_folder: Path, region_dir: Path
) -> None:
    """As two containers do that have one path for their endpoints, and one /dev/shm."""
    one = start_daemon(keep="true", region_dir=region_dir)
    store(one.endpoint, some(5))
    elsewhere = region_dir / "elsewhere"
    elsewhere.mkdir()
    inside = ["unshare", "-m", "sh", "-c", f'mount --bind {elsewhere} {short_folder} && exec "$@"', "sh"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace may be had here")
    with subprocess.Popen([*inside, *one.command], stderr=subprocess.PIPE, text=True) as two:
        assert two.stderr is not None
        lines = iter(two.stderr)
        assert any("ready at" in line for line in lines)
        assert len(list(region_dir.glob("*.region"))) == 2
        two.terminate()
        list(lines)
    tool = [sys.executable, "-m", "kvcache_server", "discard", "--endpoint", one.endpoint]
    subprocess.run([*inside, *tool, "--region-dir", str(region_dir)], check=True)
    assert [str(path) for path in region_dir.glob("*.region")] == [one.status()["daemon"]["region"]]
    one.kill()
    assert start_daemon(keep="true", region_dir=region_dir).status()["counters"]["blocks_recovered"] == 5


# What a client is handed.


@only_root
def test_a_session_file_cannot_be_written_by_its_client(start_daemon: Any, short_folder: Path) -> None:
    daemon = start_daemon(allow_uids=STRANGER)
    short_folder.chmod(0o755)

    def fill() -> None:
        door = shake_hands(daemon.endpoint, "e1", "", 10.0)
        descriptor = door.lock
        for flags in (os.O_RDWR, os.O_WRONLY):
            for act in (
                lambda: os.write(descriptor, b"x"),
                lambda: os.ftruncate(descriptor, 1 << 20),
                lambda: os.posix_fallocate(descriptor, 0, 1 << 20),
            ):
                with pytest.raises(OSError, match=r"Bad file descriptor|Invalid argument"):
                    act()
            with pytest.raises(PermissionError):
                os.open(f"/proc/self/fd/{descriptor}", flags)
            with pytest.raises(PermissionError):
                os.fchmod(descriptor, 0o666)

    as_stranger(fill)


# The state file.


@only_root
def test_a_state_file_that_can_be_neither_written_nor_removed_is_not_trusted_again(
    start_daemon: Any, short_folder: Path
) -> None:
    daemon = start_daemon(keep="true")
    store(daemon.endpoint, some(10, "a"), "first")
    state = short_folder / "kv.state"
    immutable(state, True)
    try:
        before = daemon.status()["daemon"]["errors"]
        store(daemon.endpoint, some(10, "b"), "second")  # no handshake hangs for it
        assert daemon.status()["daemon"]["errors"] == before
        assert daemon.log.count("the next daemon will start with an empty cache") == 1
        daemon.kill()
    finally:
        immutable(state, False)
    again = start_daemon(keep="true")
    assert again.status()["counters"].get("blocks_recovered", 0) == 0
    for model in ("first", "second"):
        with Session.connect(again.endpoint, engine="e2", deadline=10.0) as session:
            namespace = session.attach(NamespaceSpec(model=model, groups=SPEC.groups), (0,))
            for name in ("a", "b"):
                with namespace.acquire(some(10, name)) as lease:
                    assert lease.hits == 0


def a_state_file(folder: Path, lost: list[str]) -> StateFile:
    return StateFile(Folder(str(folder)), "kv.state", Manifest(b"r" * 16), lambda: lost.append("lost"))


@only_root
def test_a_state_file_in_a_read_only_folder_continues_to_grow(short_folder: Path) -> None:
    os.chown(short_folder, STRANGER, STRANGER)

    def act() -> None:
        lost: list[str] = []
        state = a_state_file(short_folder, lost)
        short_folder.chmod(0o500)
        for number in range(5000):  # its book is soon longer than it need be
            state.note(SessionOpened(number, "engine" * 40, "label", bytes(16), f"{number}-0123abcd"))
            state.note(SessionEnded(number))
        assert (lost, state.counters) == ([], {})
        assert os.stat(state.path).st_size > 1 << 20
        book = read_state(Folder(str(short_folder)), "kv.state")
        assert book is not None and (book.sessions, book.last_session) == ({}, 4999)

    as_stranger(act)


@only_root
def test_a_state_file_that_can_be_neither_written_nor_removed_gives_the_region_up_once(short_folder: Path) -> None:
    os.chown(short_folder, STRANGER, STRANGER)

    def act() -> None:
        lost: list[str] = []
        state = a_state_file(short_folder, lost)
        short_folder.chmod(0o500)
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.stat(state.path).st_size, resource.RLIM_INFINITY))
        for number in range(3):
            state.note(SessionOpened(number, "engine", "label", bytes(16), f"{number}-0123abcd"))
        assert (lost, state.counters) == (["lost"], {"state_files_lost": 1})
        assert os.path.exists(state.path)

    as_stranger(act)

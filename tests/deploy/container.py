"""A container without a container engine: a root, namespaces and users of its own, and of the host what is mounted.

`Container` starts one from a test, as root. Its root is a tmpfs, read-only, with /usr, this Python and this tree;
/proc, /dev/shm and /tmp are its own. Run as a program, this file makes the container and waits for its command.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import signal
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path

TREE = Path(__file__).parents[2]
ENGINE = "/tree/tests/deploy/engine.py"
NAMESPACES = {  # linux/sched.h
    "mount": 0x00020000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
NEWUSER = 0x10000000
RDONLY, REMOUNT, BIND, REC, PRIVATE, DETACH = 0x1, 0x20, 0x1000, 0x4000, 0x40000, 2  # linux/mount.h
PIVOT_ROOT = 155 if platform.machine() == "x86_64" else 41
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
NO_IDMAP = "no idmapped mounts"  # what it says where the kernel, or the file system, has none


class Container:
    """A running one. `said` is its next line, `tell` writes one to it."""

    def __init__(
        self,
        folder: Path,
        *command: str,
        mounts: tuple[tuple[Path, str, str], ...],
        namespaces: tuple[str, ...] = tuple(NAMESPACES),
        uid: int = 0,
        gid: int = 0,
        groups: tuple[int, ...] = (),
        creator: int = 0,
        maps: tuple[tuple[int, int, int], ...] = (),
        env: dict[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        """Start `command`, which is Python's arguments; `folder` is empty, and the launcher's own.

        Args:
            mounts: the host's path, the container's, and how: "rw", "ro", or "idmap", by `maps`.
            uid, gid: who it runs as, in numbers of the container.
            groups: more groups, in numbers of the host.
            creator: the host's user that makes the user namespace.
            maps: (number inside, number of the host, count); none is no user namespace.
            log: takes what it says; else `said` has it.
        """
        folder.chmod(0o755)
        spec = {
            "root": str(folder),
            "command": ["/python/bin/" + Path(os.path.realpath(sys.executable)).name, *command],
            "mounts": [(str(source), target, how) for source, target, how in mounts],
            "namespaces": namespaces,
            "ids": (uid, gid),
            "groups": groups,
            "creator": creator,
            "maps": maps,
            "python": sys.base_prefix,
            "site": sysconfig.get_path("purelib"),
            "env": {
                "PYTHONHOME": "/python",
                "PYTHONPATH": "/tree/proto:/tree/server:/tree/client:/site",
                "PYTHONDONTWRITEBYTECODE": "1",
                "LD_LIBRARY_PATH": "/python/lib",
                **(env or {}),
            },
        }
        out = log.open("ab") if log else subprocess.PIPE
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", __file__, json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        finally:
            if log:
                out.close()  # type: ignore[union-attr]

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def tell(self, line: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def ask(self, line: object) -> str:
        self.tell(line)
        return self.said()

    def kill(self) -> None:
        """Kill its process, as kill -9 does, and wait for its end."""
        pid = self.process.pid
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pid = int(children[0])
        os.kill(pid, signal.SIGKILL)
        self.end()

    def end(self, signum: int = 0) -> int:
        """End it by closing its input, or by a signal; returns its exit code."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if signum and self.process.poll() is None:
            self.process.send_signal(signum)
        try:
            code = self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return code


# The launcher.


def main(spec: dict[str, object]) -> int:
    maps = [tuple(each) for each in spec["maps"]]  # type: ignore[attr-defined]
    _call("unshare", NAMESPACES["mount"])
    _mount("none", "/", PRIVATE | REC)
    _make_root(spec, maps)
    created, mapped = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        _enter(spec, created[1], mapped[0] if maps else None)
    signal.signal(signal.SIGTERM, lambda signum, _: os.kill(child, signum))
    if maps:
        os.read(created[0], 1)
        _write_maps(child, maps)
        os.write(mapped[1], b"!")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _make_root(spec: dict[str, object], maps: list[tuple[int, int, int]]) -> None:
    root = str(spec["root"])
    owner = next((host for inside, host, _ in maps if inside == 0), 0)
    own = f"mode=755,uid={owner},gid={owner}"
    _mount("tmpfs", root, 0, "tmpfs", own)
    for name in ("bin", "sbin", "lib", "lib64"):
        if os.path.islink("/" + name):
            os.symlink(os.readlink("/" + name), f"{root}/{name}")
    libraries = [(f"/{name}", f"/{name}") for name in ("usr", "bin", "lib", "lib64") if os.path.isdir(f"/{name}")]
    ours = [(spec["python"], "/python"), (spec["site"], "/site"), (str(TREE), "/tree")]
    read_only = [(str(path), at, "ro") for path, at in (*libraries, *ours) if not os.path.islink(root + at)]
    for name in ("etc", "proc", "dev", "dev/shm", "tmp"):
        _make_folder(root, name, owner)
    for source, target, how in (*read_only, *spec["mounts"]):  # type: ignore[misc]
        _make_folder(root, target.lstrip("/"), owner)
        if how == "idmap":
            _mount_idmapped(source, root + target, maps)
            continue
        _mount(source, root + target, BIND)
        if how == "ro":
            _mount("none", root + target, BIND | REMOUNT | RDONLY)
    for at in ("/dev/shm", "/tmp"):
        _mount("tmpfs", root + at, 0, "tmpfs", "mode=1777")
    if "pid" not in spec["namespaces"]:  # type: ignore[operator]
        _mount("/proc", root + "/proc", BIND | REC)
    _mount("none", root, BIND | REMOUNT | RDONLY)


def _make_folder(root: str, path: str, owner: int) -> None:
    at = root
    for part in path.split("/"):
        at += "/" + part
        if not os.path.lexists(at):
            os.mkdir(at, 0o755)
            os.chown(at, owner, owner)


def _enter(spec: dict[str, object], created: int, mapped: int | None) -> None:
    """Become the container's process. Does not return."""
    root, (uid, gid) = str(spec["root"]), spec["ids"]  # type: ignore[misc]
    flags = 0
    for name in spec["namespaces"]:  # type: ignore[attr-defined]
        flags |= NAMESPACES[name]
    os.setgroups(spec["groups"])  # type: ignore[arg-type]
    if mapped is not None:
        creator = int(str(spec["creator"]))
        os.setresgid(creator, creator, creator)
        os.setresuid(creator, creator, creator)
        _call("prctl", 4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: else /proc/PID is root's
        _call("unshare", flags | NEWUSER)
        os.write(created, b"!")
        os.read(mapped, 1)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    else:
        _call("unshare", flags)
    if "pid" in spec["namespaces"]:  # type: ignore[operator]
        child = os.fork()
        if child:
            _die_with_parent()
            signal.signal(signal.SIGTERM, lambda signum, _: os.kill(child, signum))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os._exit(code if code >= 0 else 128 - code)
        _mount("proc", root + "/proc", 0, "proc")
    # Over itself: what was mounted outside of the user namespace cannot be moved inside of it.
    _mount(root, root, BIND | REC)
    os.chdir(root)
    if _libc.syscall(PIVOT_ROOT, b".", b"."):
        raise OSError(ctypes.get_errno(), "pivot_root")
    _call("umount2", b".", DETACH)
    os.chdir("/")
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    _call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    _die_with_parent()  # last: the kernel forgets it where a process changes its user
    command = [str(each) for each in spec["command"]]  # type: ignore[attr-defined]
    os.execve(command[0], command, spec["env"])  # type: ignore[arg-type]


def _write_maps(pid: int, maps: list[tuple[int, int, int]]) -> None:
    for kind in ("uid", "gid"):
        Path(f"/proc/{pid}/{kind}_map").write_text("\n".join(" ".join(map(str, each)) for each in maps))


def _mount_idmapped(source: str, target: str, maps: list[tuple[int, int, int]]) -> None:
    """Mount it such that the host's user N is the container's user N there. Ends the process where that cannot be."""
    ready, done = os.pipe(), os.pipe()
    holder = os.fork()
    if not holder:
        _call("unshare", NEWUSER)
        os.write(ready[1], b"!")
        os.close(done[1])
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    _write_maps(holder, maps)
    users = os.open(f"/proc/{holder}/ns/user", os.O_RDONLY)
    tree = _libc.syscall(OPEN_TREE, -100, source.encode(), 1 | os.O_CLOEXEC)
    attributes = struct.pack("QQQQ", 0x00100000, 0, 0, users)  # MOUNT_ATTR_IDMAP
    if tree < 0 or _libc.syscall(MOUNT_SETATTR, tree, b"", 0x1000, attributes, len(attributes)):
        print(NO_IDMAP, flush=True)
        sys.exit()
    if _libc.syscall(MOVE_MOUNT, tree, b"", -100, target.encode(), 4):
        raise OSError(ctypes.get_errno(), "move_mount")
    os.close(done[1])
    os.waitpid(holder, 0)


def _die_with_parent() -> None:
    _call("prctl", 1, signal.SIGKILL, 0, 0, 0)


def _mount(source: str, target: str, flags: int, kind: str = "none", options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}{arguments}: {os.strerror(ctypes.get_errno())}")


_libc = ctypes.CDLL(None, use_errno=True)

if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))

"""A systemd of our own: the real one, as process 1 of namespaces that end with it. The host sees none of it.

It has its own mounts (/run, /etc, the units' folder), processes, IPC, host name and control groups; the rest of the
file system is the host's. Only root can have it, where control groups of version 2 can be mounted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = "/run/nest/bin/kvcache-server"
SYSTEMD = "/lib/systemd/systemd"
# Targets that the units lean on, and nothing of what a host does to reach them.
TARGETS = ("sysinit", "basic", "local-fs", "local-fs-pre", "shutdown", "umount", "multi-user", "swap", "network-online")

# The shell is process 1 until it becomes systemd. What cannot be had here ends it: the fixture says why.
BOOT = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock /run/nest && cd /run/nest && mkdir bin units etc work python site tree && cd /
mount --bind "$NEST_PYTHON" /run/nest/python
mount --bind "$NEST_SITE" /run/nest/site
mount --bind "$NEST_TREE" /run/nest/tree
mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/nest/etc,workdir=/run/nest/work /etc
mount -t tmpfs -o mode=755 tmpfs /etc/systemd/system
mount -t tmpfs -o mode=755 tmpfs /var/lib/systemd
mount -t tmpfs -o mode=755 tmpfs /var/cache
while mountpoint -q /sys/fs/cgroup; do umount -R /sys/fs/cgroup; done
mount -t cgroup2 cgroup2 /sys/fs/cgroup
for target in $NEST_TARGETS; do printf '[Unit]\\nDefaultDependencies=no\\n' > /run/nest/units/$target.target; done
mkdir /etc/systemd/system/service.d  # there is no journal
printf '[Service]\\nStandardOutput=append:/run/nest/log\\nStandardError=append:/run/nest/log\\n' \\
  > /etc/systemd/system/service.d/log.conf
cat > /run/nest/bin/kvcache-server <<'WRAPPER'
#!/bin/sh
export PYTHONHOME=/run/nest/python PYTHONDONTWRITEBYTECODE=1 LD_LIBRARY_PATH=/run/nest/python/lib
export PYTHONPATH=/run/nest/tree/proto:/run/nest/tree/server:/run/nest/tree/client:/run/nest/site
exec /run/nest/python/bin/NEST_INTERPRETER -m kvcache_server "$@"
WRAPPER
sed -i "s/NEST_INTERPRETER/$NEST_INTERPRETER/" /run/nest/bin/kvcache-server
chmod 755 /run/nest/bin/kvcache-server
export container=nest SYSTEMD_UNIT_PATH=/etc/systemd/system:/run/nest/units
exec "$NEST_SYSTEMD" --system --unit=basic.target --log-target=console --log-level=info --show-status=no
"""


class Nest:
    """A running one; `run` runs a command inside of it."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    @property
    def log(self) -> str:
        """What the services have said, and systemd before there were any."""
        return self._log.read_text(errors="replace") + _quietly(self, "cat", "/run/nest/log")

    def command(self, *command: str) -> list[str]:
        inside = f"/proc/{self._process.pid}/task/{self._process.pid}/children"
        first = Path(inside).read_text().split()[0]  # of `unshare --fork`
        return ["nsenter", "--target", first, *("--mount", "--pid", "--ipc", "--uts", "--cgroup"), "--", *command]

    def run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(self.command(*command), capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, (
            f"{command}: {done.returncode}\n{done.stdout}{done.stderr}\n{self.log}"
        )
        return done.stdout + done.stderr

    def show(self, unit: str, name: str) -> str:
        """A property of a unit, as `systemctl show` has it."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit).strip()

    def wait_log(self, text: str) -> None:
        until = time.monotonic() + 30
        while text not in (log := self.log):
            assert time.monotonic() < until, f"nobody says {text!r}:\n{log}"
            time.sleep(0.05)

    def wait(self, unit: str, name: str, wanted: str) -> None:
        until = time.monotonic() + 30
        while (found := self.show(unit, name)) != wanted:
            assert time.monotonic() < until, f"{unit} {name} is {found!r}, not {wanted!r}:\n{self.log}"
            time.sleep(0.05)


def _control_group() -> Path:
    """Make a group of our own below this process's, in the hierarchy of version 2. Raises OSError."""
    mount = next(
        Path(line.split()[1])
        for line in Path("/proc/self/mounts").read_text().splitlines()
        if line.split()[2] == "cgroup2"
    )
    mine = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    group = mount / mine[3:].lstrip("/") / f"kvcache-nest-{os.getpid()}"
    group.mkdir()
    return group


@contextlib.contextmanager
def nest(folder: Path) -> Iterator[Nest]:
    """Boot one. Raises OSError, StopIteration or RuntimeError, which says why, where that cannot be done here."""
    if os.geteuid() != 0 or not os.access(SYSTEMD, os.X_OK) or not shutil.which("nsenter"):
        raise RuntimeError("it takes root, systemd and nsenter")
    group = _control_group()
    log = folder / "systemd.log"
    environ = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "NEST_PYTHON": sys.base_prefix,
        "NEST_INTERPRETER": f"python{sys.version_info.major}.{sys.version_info.minor}",
        "NEST_SITE": sysconfig.get_path("purelib"),
        "NEST_TREE": str(ROOT),
        "NEST_TARGETS": " ".join(TARGETS),
        "NEST_SYSTEMD": SYSTEMD,
    }
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--cgroup", "--uts", "--ipc", "--mount-proc"]
    try:
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec {" ".join(unshare)} sh -c "$0"', BOOT],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        try:
            booted = Nest(process, log)
            until = time.monotonic() + 30
            while "active" not in _quietly(booted, "systemctl", "is-active", "basic.target").split():
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"no systemd can be had here: {booted.log[-500:]}")
                time.sleep(0.05)
            yield booted
        finally:
            process.kill()  # and with it the namespaces' process 1, and all in them
            process.wait()
    finally:
        until = time.monotonic() + 10
        while (group / "cgroup.events").exists() and time.monotonic() < until:
            _remove(group)
            time.sleep(0.02)


def _quietly(booted: Nest, *command: str) -> str:
    try:
        return booted.run(*command, check=False)
    except (OSError, IndexError):  # it is not that far
        return ""


def _remove(group: Path) -> None:
    for folder, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):  # something in it is still ending
            os.rmdir(folder)

"""Engines as systemd units: `systemctl` lists, starts and stops those that match one pattern, and no others."""

from __future__ import annotations

import asyncio
import fnmatch
import re
import shutil
import time
from typing import NamedTuple

from kvcache_proto.errors import ClientError, ConfigError, ServerError
from kvcache_tools.dashboard.env_folder import EnvFolder

VERBS = ("start", "stop", "restart")
SUFFIX = ".service"
SECONDS = 10.0  # for systemctl to answer: it queues jobs and does not wait for them
MOST = 200  # units
# Characters of a unit's name, with a literal beginning, so that no pattern matches everything.
_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_.@-]*[A-Za-z0-9:_.@*?-]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_.@\\-]{0,200}\.service")
_SHOWN = (
    *("Id", "Description", "LoadState", "ActiveState", "SubState", "Result", "NRestarts", "MainPID", "MemoryCurrent"),
    *("ActiveEnterTimestampMonotonic", "InactiveEnterTimestampMonotonic", "EnvironmentFiles"),
)


class NoSystemd(ServerError):
    """systemctl is missing or does not answer."""


class Unit(NamedTuple):
    """An engine. `since` is in seconds since 1970, 0 if it never ran; `file` is its environment file in the folder."""

    name: str
    description: str
    load: str
    active: str
    sub: str
    result: str
    restarts: int
    pid: int
    memory_bytes: int
    since: float
    file: str


class Units:
    """The units whose names match one pattern."""

    def __init__(self, pattern: str, folder: EnvFolder, of_user: bool) -> None:
        """Raises ConfigError for a pattern that is not a pattern of unit names, or matches every unit."""
        if not _PATTERN.fullmatch(pattern):
            raise ConfigError(f"--manage {pattern!r}: a pattern with a literal beginning expected, as in 'vllm@*'")
        self.pattern = pattern if pattern.endswith(SUFFIX) else pattern + SUFFIX
        self._folder = folder
        self._command = ["systemctl", *(["--user"] if of_user else []), "--no-pager", "--no-ask-password"]

    def matches(self, name: str) -> bool:
        return bool(_NAME.fullmatch(name)) and fnmatch.fnmatchcase(name, self.pattern)

    async def all(self) -> list[Unit]:
        """Return the units that systemd has loaded, and instances of a template that have a file in the folder.

        Raises NoSystemd if systemd does not answer.
        """
        listed = await self._ask("list-units", "--all", "--full", "--plain", "--no-legend", "--", self.pattern)
        names = {line.split(maxsplit=1)[0] for line in listed.splitlines() if line.strip()}
        template, at, _ = self.pattern.partition("@")
        if at:
            names |= {f"{template}@{name}{SUFFIX}" for name in self._folder.names()}
        wanted = sorted(filter(self.matches, names))[:MOST]
        if not wanted:
            return []
        shown = await self._ask("show", f"--property={','.join(_SHOWN)}", "--", *wanted)
        units = [self._unit(block) for block in shown.split("\n\n") if block.strip()]
        return [unit for unit in units if self.matches(unit.name)]

    async def get(self, name: str) -> Unit:
        """Return the unit `name`. Raises ClientError if it does not match the pattern or does not exist."""
        found = [unit for unit in await self.all() if unit.name == name] if self.matches(name) else []
        if not found:
            raise ClientError(f"{name!r}: no unit of that name matches {self.pattern}")
        return found[0]

    async def order(self, name: str, verb: str) -> None:
        """Queue a job; `verb` is one of VERBS. Raises ClientError as `get` does, NoSystemd if systemd refuses."""
        if verb not in VERBS:
            raise ClientError(f"{verb!r}: one of {', '.join(VERBS)}")
        unit = await self.get(name)
        await self._ask(verb, "--no-block", "--", unit.name)

    async def _ask(self, *arguments: str) -> str:
        """Return the output of systemctl. No shell is involved, and every argument is a constant or a checked name."""
        command = shutil.which(self._command[0])
        if command is None:
            raise NoSystemd("systemctl not found: engines can only be managed on a host with systemd")
        process = await asyncio.create_subprocess_exec(
            *(command, *self._command[1:], *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, said = await asyncio.wait_for(process.communicate(), SECONDS)
        except asyncio.TimeoutError:
            raise NoSystemd(f"systemctl {arguments[0]} did not answer within {SECONDS:.0f} s") from None
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            why = " ".join(said.decode(errors="replace").split()) or f"exit code {process.returncode}"
            raise NoSystemd(f"systemctl {arguments[0]}: {why[:500]}")
        return out.decode(errors="replace")

    def _unit(self, block: str) -> Unit:
        found: dict[str, str] = {}
        files = []
        for line in block.splitlines():
            key, _, value = line.partition("=")
            found[key] = value
            if key == "EnvironmentFiles":  # one line per file: "/etc/vllm/a.env (ignore_errors=no)"
                files += [self._folder.name_of(part.split(" (", 1)[0].strip()) for part in value.split(") ")]
        active = found.get("ActiveState", "")
        stamp = "ActiveEnter" if active == "active" else "InactiveEnter"
        return Unit(
            name=found.get("Id", ""),
            description=found.get("Description", ""),
            load=found.get("LoadState", ""),
            active=active,
            sub=found.get("SubState", ""),
            result=found.get("Result", ""),
            restarts=_number(found.get("NRestarts", "")),
            pid=_number(found.get("MainPID", "")),
            memory_bytes=_number(found.get("MemoryCurrent", "")),
            since=_since(_number(found.get(stamp + "TimestampMonotonic", ""))),
            file=next((name for name in reversed(files) if name), ""),
        )


def _number(text: str) -> int:
    """Return the number in systemctl's output; 0 for "[not set]" and for the largest number, which means the same."""
    return int(text) if text.isascii() and text.isdigit() and int(text) < 1 << 63 else 0


def _since(monotonic_us: int) -> float:
    return time.time() - time.clock_gettime(time.CLOCK_MONOTONIC) + monotonic_us / 1e6 if monotonic_us else 0.0

"""`kvcache-server install-service`: installs and enables the systemd units in deploy/systemd.

The units are written unchanged except for the path of this program, the instance and the size. An existing
configuration is kept. Running it again is safe.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import tomllib

from kvcache_proto.errors import ConfigError, NotPermitted
from kvcache_proto.mapping import HUGE_PAGE
from kvcache_proto.region import plan_geometry
from kvcache_proto.sizes import parse_size
from kvcache_server.config import load

_HERE = Path(__file__).resolve()
# In an installed package, else in the source tree.
FOLDERS = (_HERE.parent / "systemd", _HERE.parents[2] / "deploy" / "systemd")
PROGRAM = "/usr/local/bin/kvcache-server"  # as the units name it
HOMES = ("/home", "/root", "/run/user")  # folders hidden by ProtectHome=yes
_PLAIN = re.compile(r"/[A-Za-z0-9/._+@-]+")  # paths that systemd does not interpret
_INSTANCE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}")


class File(NamedTuple):
    """A file to write; one that is `kept` is not overwritten if it exists."""

    path: Path
    text: str
    kept: bool = False


class Installation(NamedTuple):
    """The steps to take; `unit` is the file name of the unit to install."""

    unit: str
    pieces: list[File]
    commands: list[list[str]]
    notes: list[str]


@click.command()
@click.option("--user", is_flag=True, help="Install a service of this user instead of the host's.")
@click.option(
    "--instance", default="", metavar="NAME", help="Install another daemon, kvcache-server@NAME, with its own sockets."
)
@click.option("--size", metavar="SIZE", help="Host memory for blocks, in a new configuration.  [default: 4GiB]")
@click.option("--huge-pages", is_flag=True, help="Put the region on huge pages of 2 MiB, and reserve them.")
@click.option("--program", metavar="PATH", help="Path of kvcache-server in the units.  [default: this one]")
@click.option("--root", default="/", metavar="DIR", help="Install below DIR, such as an image.")
@click.option("--enable/--no-enable", default=True, help="Start it with the host, or with the user's manager.")
@click.option("--dry-run", is_flag=True, help="Print what would be written and run; change nothing.")
def command(
    user: bool,
    instance: str,
    size: str | None,
    huge_pages: bool,
    program: str | None,
    root: str,
    enable: bool,
    dry_run: bool,
) -> None:
    """Install and enable the daemon's systemd units. An existing configuration is kept."""
    if instance and (not _INSTANCE.fullmatch(instance) or instance == "kvcache"):
        raise ConfigError(f"instance {instance!r}: at most 32 letters, digits, _ . -, and not `kvcache`")
    if user and (instance or huge_pages):
        raise ConfigError("--user excludes --instance and --huge-pages: they need the host's mount")
    if size is not None and parse_size(size) < 1:
        raise ConfigError(f"size {size}: at least 1 byte")
    base = Path(os.path.abspath(root))
    installation = (
        _for_user(base, program, size, enable) if user else _for_host(base, program, instance, size, huge_pages, enable)
    )
    for unit in (piece.path for piece in installation.pieces if piece.path.name == installation.unit):
        if _is_masked(unit):
            whose = "systemctl --user" if user else "systemctl"
            raise ConfigError(f"{unit} is masked: to use it, run `{whose} unmask {unit.name}` first")
    for piece in installation.pieces:
        click.echo(f"{_put(piece, dry_run):<12} {piece.path}")
        if dry_run:
            click.echo("".join(f"    {line}\n" for line in piece.text.splitlines()), nl=False)
    for line in installation.commands:
        click.echo(f"{'would run' if dry_run else 'running':<12} {' '.join(line)}")
        if not dry_run:
            _run(line)
    for note in installation.notes:
        click.echo(note)


def _for_host(
    root: Path, program: str | None, instance: str, size: str | None, huge_pages: bool, enable: bool
) -> Installation:
    name = instance or "kvcache"
    unit = f"kvcache-server@{instance}.service" if instance else "kvcache-server.service"
    units, config = root / "etc/systemd/system", root / f"etc/kvcache/{name}.toml"
    program, parts = _program(program)
    if parts:
        _check_open(parts)
    mount = _text("run-kvregion.mount")
    if huge_pages:
        mount = _replaced(
            mount, "What=tmpfs", "What=hugetlbfs", "Type=tmpfs", "Type=hugetlbfs", "size=90%", "pagesize=2M"
        )
    pieces = [File(units / "run-kvregion.mount", mount, kept=not huge_pages)]
    for each in ("kvcache-server.service", "kvcache-server@.service", "kvcache-tier@.service"):
        text = _replaced(_text(each), PROGRAM, program)
        if any(part.startswith(tuple(f"{home}/" for home in HOMES)) for part in (program, *parts)):
            text = _replaced(text, "ProtectHome=yes", "ProtectHome=read-only")
        pieces.append(File(units / each, text))
    folder = f"kvcache-{instance}" if instance else "kvcache"
    pieces += [
        File(root / "etc/sysusers.d/kvcache.conf", _text("sysusers.conf")),
        File(
            root / f"etc/tmpfiles.d/{folder}.conf", _replaced(_text("tmpfiles.conf"), "/run/kvcache", f"/run/{folder}")
        ),
        File(config, _sized(_replaced(_text("kvcache.toml"), "/run/kvcache/", f"/run/{folder}/"), size), kept=True),
    ]
    if instance:  # it needs a port of its own, which the operator chooses
        pieces[-1] = pieces[-1]._replace(text=_replaced(pieces[-1].text, '\nhttp = "', '\n# http = "'))
    commands = [
        ["systemd-sysusers", f"--root={root}", "kvcache.conf"],
        ["systemd-tmpfiles", "--create", f"--root={root}", f"{folder}.conf"],
    ]
    commands += _systemctl(root, [], unit, enable)
    notes = [*_notes(config, size), f"A unit for engines, as a starting point: {_folder() / 'vllm@.service'}"]
    if huge_pages:
        pieces.append(_reserved(root, pieces[-1]))
        if _runs(root):
            commands.insert(0, ["sysctl", "--load", str(pieces[-1].path)])
            notes.append("After a start that finds too few huge pages, because memory is fragmented: reboot")
    if _runs(root):
        notes.append(f"systemctl start {unit}  # and then: systemctl status {unit}, kvcache-server status")
    return Installation("kvcache-server@.service" if instance else unit, pieces, commands, notes)


def _reserved(root: Path, config: File) -> File:
    """Return the kernel's setting that reserves huge pages at boot, for the regions of all daemons of this host.

    It never reserves fewer pages than the running host has: other programs may use them.
    """
    settings = [load(str(file), {}) for file in config.path.parent.glob("*.toml")]
    if not config.path.exists():
        settings.append(load(None, {}, tomllib.loads(config.text)))
    regions = [plan_geometry(bytes(16), each.size, each.page_size).region_bytes for each in settings]
    pages = sum(-(-region // HUGE_PAGE) for region in regions)
    if _runs(root):
        pages = max(pages, int(Path("/proc/sys/vm/nr_hugepages").read_text()))
    return File(root / "etc/sysctl.d/kvcache.conf", f"vm.nr_hugepages = {pages}\n")


def _for_user(root: Path, program: str | None, size: str | None, enable: bool) -> Installation:
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    folder = root / home.lstrip("/")
    unit = "kvcache-server.service"
    config = folder / "kvcache/kvcache.toml"
    pieces = [
        File(folder / "systemd/user" / unit, _replaced(_text(f"user/{unit}"), PROGRAM, _program(program)[0])),
        File(config, _sized(_text("user/kvcache.toml"), size), kept=True),
    ]
    if _runs(root):
        commands = [["loginctl", "enable-linger"], *_systemctl(root, ["--user"], unit, enable)]
    else:  # no manager is running, and `systemctl --user` has no --root
        wants = folder / "systemd/user/default.target.wants"
        commands = [["mkdir", "-p", str(wants)], ["ln", "-sfn", f"../{unit}", str(wants / unit)]] if enable else []
    notes = _notes(config, size)
    if _runs(root):
        notes.append(
            f"systemctl --user start {unit}  # and then: systemctl --user status {unit}, kvcache-server status"
        )
    else:
        notes.append("Without lingering, the service does not start: loginctl enable-linger")
    return Installation(unit, pieces, commands, notes)


def _runs(root: Path) -> bool:
    """Return True if `root` is the running system, under systemd."""
    return root == Path("/") and os.path.isdir("/run/systemd/system")


def _systemctl(root: Path, whose: list[str], unit: str, enable: bool) -> list[list[str]]:
    running = _runs(root)
    lines = [["systemctl", *whose, "daemon-reload"]] if running else []
    if enable:
        lines.append(["systemctl", *whose, *([] if running else [f"--root={root}"]), "enable", unit])
    return lines


def _folder() -> Path:
    for folder in FOLDERS:
        if (folder / "kvcache-server.service").exists():
            return folder
    raise ConfigError(f"the units are missing from this installation: none of {', '.join(map(str, FOLDERS))}")


def _text(name: str) -> str:
    return (_folder() / name).read_text()


def _replaced(text: str, *pairs: str) -> str:
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old in text, f"the unit has no {old!r}"
        text = text.replace(old, new)
    return text


def _sized(text: str, size: str | None) -> str:
    return _replaced(text, 'size = "4GiB"', f'size = "{size}"') if size else text


def _notes(config: Path, size: str | None) -> list[str]:
    there = _read(config) if size else None
    if there is not None and f'size = "{size}"'.encode() not in there:
        return [f"{config} exists and is kept: set its size by hand"]
    return []


def _program(given: str | None) -> tuple[str, list[str]]:
    """Return the program's path for the units, and the files that the daemon's user must reach; none if it is `given`.

    Raises ConfigError if this program is not installed, and for a path that systemd would interpret.
    """
    beside = Path(sys.executable).parent / "kvcache-server"
    found = given or (str(beside) if beside.exists() else shutil.which("kvcache-server"))
    if found is None:
        raise ConfigError(f"no kvcache-server beside {sys.executable} or on the PATH: specify it with --program")
    if not _PLAIN.fullmatch(found):
        raise ConfigError(f"program {found}: an absolute path with only letters, digits and / . _ + @ - expected")
    return found, [] if given else [found, os.path.realpath(found), os.path.realpath(sys.executable)]


def _check_open(paths: list[str]) -> None:
    """Raise ConfigError if the daemon's user could not reach one of the paths."""
    for path in paths:
        for folder in Path(path).parents:
            if not folder.stat().st_mode & stat.S_IXOTH:
                raise ConfigError(
                    f"the user kvcache cannot reach {path}, because {folder} is closed to others: install the package "
                    "elsewhere, for example in /opt/kvcache, or specify another program with --program"
                )


def _is_masked(path: Path) -> bool:
    with _plainly(path):
        return path.is_symlink() and os.readlink(path) == "/dev/null"


def _read(path: Path) -> bytes | None:
    """Return the file's contents, None if it does not exist."""
    with _plainly(path):
        return path.read_bytes() if path.exists() else None


def _put(piece: File, dry_run: bool) -> str:
    """Write the file, atomically, and return a text on the outcome."""
    if _is_masked(piece.path):
        return "masked"
    there = _read(piece.path)
    if there == piece.text.encode():
        return "unchanged"
    if there is not None and piece.kept:
        return "kept"
    if dry_run:
        return "would write"
    with _plainly(piece.path):
        piece.path.parent.mkdir(parents=True, exist_ok=True)
        new = piece.path.with_name(f".{piece.path.name}.new")
        new.write_text(piece.text)
        new.chmod(0o644)
        new.replace(piece.path)
    return "wrote"


@contextlib.contextmanager
def _plainly(path: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError:
        raise NotPermitted(f"no permission for {path}: run this as root, or with --user") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _run(line: list[str]) -> None:
    try:
        subprocess.run(line, check=True)
    except FileNotFoundError:
        raise ConfigError(f"{line[0]} not found: does this host run systemd?") from None
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"`{' '.join(line)}` failed with exit status {error.returncode}") from None

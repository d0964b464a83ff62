"""What the pages say of the code is what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcache_client import settings as connector
from kvcache_client.settings import ConnectorSettings
from kvcache_proto import __version__
from kvcache_server.cli import EXIT_CODES, commands
from kvcache_server.config import reference
from kvcache_tools.doctor import SECTIONS
from kvcache_tools.plan.figures import CHECKPOINT_TOKENS, CHECKPOINT_TOKENS_ALONE, DEFAULT_BLOCK_TOKENS
from kvcache_tools.prove.verdict import UNPROVEN

ROOT = Path(__file__).parent.parent
NAMES = [f"{folder}README.md" for folder in ("", "server/", "client/", "deploy/", "tests/", "tests/bench/")]
NAMES += ["deploy/MIGRATION.md", "deploy/SECURITY.md", "proto/PROTOCOL.md", "tests/npu_rig/README.md"]
NAMES += ["CONTRIBUTING.md"]
PAGES = {name: (ROOT / name).read_text() for name in NAMES}
SERVER = PAGES["server/README.md"]


def section(page: str, heading: str) -> str:
    return PAGES[page].split(f"\n## {heading}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a page's tables, without heads and rules."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_the_settings_of_the_daemon() -> None:
    table = re.search(r"<!-- settings:[^\n]*\n(.*?)<!-- end of settings -->", SERVER, re.DOTALL)
    assert table is not None
    assert table[1] == reference()


def test_the_commands_of_the_daemon() -> None:
    listed = {re.match(r"`([\w-]+)", row[0])[1] for row in rows(section("server/README.md", "Commands"))[1:]}  # type: ignore[index]
    asked = [sys.executable, "-m", "kvcache_server", "--help"]
    shown = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout
    there = re.findall(r"^  ([a-z][\w-]*)  ", shown.split("Commands:\n")[1].split("\n\n")[0], re.MULTILINE)
    assert listed == set(there)


def test_the_sections_of_doctor() -> None:
    assert [row[0].strip("`") for row in rows(section("server/README.md", "Doctor"))[1:]] == list(SECTIONS)


def test_each_feature_has_its_tests() -> None:
    page = (ROOT / "tests/client/vllm/README.md").read_text()
    files = (ROOT / "tests").rglob("*.py")
    there = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    table = rows(page)[1:]
    assert len(table) > 60 and all(set(re.findall(r"`(test_\w+)`", row[-1])) & there for row in table)
    assert set(re.findall(r"`(test_\w+)`", page)) <= there


def test_the_exit_codes_of_the_daemon() -> None:
    listed = {int(row[0]): row[1] for row in rows(section("server/README.md", "Exit codes"))[1:]}
    assert set(listed) == {0, 1, UNPROVEN} | {code for _, code, _ in EXIT_CODES}
    assert all(listed[code].startswith(why) for _, code, why in EXIT_CODES)


def test_the_files_of_the_daemon(start_daemon: Any) -> None:
    """A daemon's folder holds what the page lists, and keeps what the page says outlives it."""
    listed = rows(section("server/README.md", "Files"))[1:]
    names = {row[0].strip("`").rstrip("/"): row[3] for row in listed}
    daemon = start_daemon(http="127.0.0.1:0", keep="true")
    folder = Path(daemon.endpoint.removeprefix("ipc://")).parent

    def found() -> set[str]:
        return {path.name.replace("kv.", "kvcache.") for path in folder.iterdir() if path.name.startswith("kv.")}

    assert found() == set(names)
    daemon.stop()
    assert found() == {name for name, outlives in names.items() if outlives == "yes"}


@pytest.mark.parametrize("key", ConnectorSettings.__struct_fields__)
def test_the_settings_of_the_connector(key: str) -> None:
    table = {row[0].strip("`"): row[1:] for row in rows(section("client/README.md", "Settings of the connector"))[1:]}
    assert list(table) == list(ConnectorSettings.__struct_fields__)
    default, what = table[key]
    value = getattr(ConnectorSettings(), key)
    if key == "block_size":
        value = connector.BLOCK_TOKENS  # what 0 stands for
    if key == "checkpoint_tokens":  # what None stands for
        value = connector.CHECKPOINT_TOKENS
        assert default.endswith(f"; {connector.CHECKPOINT_TOKENS_ALONE} for models with only windows")
    if value != "":
        said = str(value).lower() if isinstance(value, bool | str) else f"{value:g}"
        assert default.replace("`", "").split(" ")[0].rstrip(":;") == said
    assert all(f"`{choice}`" in what for choice in connector.CHOICES.get(key, ()))


def test_a_plan_counts_with_the_defaults_of_the_connector() -> None:
    server = (CHECKPOINT_TOKENS, CHECKPOINT_TOKENS_ALONE, DEFAULT_BLOCK_TOKENS)
    assert server == (connector.CHECKPOINT_TOKENS, connector.CHECKPOINT_TOKENS_ALONE, connector.BLOCK_TOKENS)


def test_every_command_that_is_named_exists() -> None:
    known = set(commands.list_commands(None))  # type: ignore[arg-type]
    for page in PAGES.values():
        assert set(re.findall(r"(?:[`$/] ?|^  )kvcache-server ([a-z][\w-]*)", page, re.MULTILINE)) <= known


@pytest.mark.parametrize("name", PAGES)
def test_every_file_that_is_named_exists(name: str) -> None:
    folder, page = (ROOT / name).parent, PAGES[name]
    for target, heading in re.findall(r"\]\(([\w/.]*)(?:#([\w-]+))?\)", page):
        file = folder / target if target else ROOT / name
        assert file.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, heading
    scripts = set(re.findall(r"python (tests/[\w/]+\.py)", page))
    assert all((ROOT / script).exists() for script in scripts), scripts


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"`((?:tests/[a-z_/]+)?test_[a-z_]+\.py)`", PAGES["deploy/SECURITY.md"])))
)
def test_every_test_that_the_threat_model_names_exists(name: str) -> None:
    assert (ROOT / (name if "/" in name else f"tests/server/{name}")).exists()


def test_the_figures_of_readme_are_in_the_list_of_measurements() -> None:
    measured = rows(PAGES["tests/bench/README.md"])
    shown = rows(section("README.md", "Figures"))
    assert shown and all(row in measured for row in shown)


def test_the_changes_begin_with_this_version() -> None:
    assert re.search(r"^## \[(\S+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == __version__  # type: ignore[index]

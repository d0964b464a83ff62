"""What the README says of the code is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from kvcache_client.settings import Settings
from kvcache_proto import __version__
from kvcache_server.cli import commands
from kvcache_server.config import reference

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_daemon_s_settings() -> None:
    table = re.search(r"<!-- settings:[^\n]*\n(.*?)<!-- end of settings -->", README, re.DOTALL)
    assert table is not None
    assert table[1] == reference()


def test_the_connector_s_settings() -> None:
    table = README.split("## Configuration of the connector")[1].split("##")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(Settings.__struct_fields__)


def test_every_command_is_one() -> None:
    known = set(commands.list_commands(None))  # type: ignore[arg-type]
    for page in (README, (ROOT / "tests" / "README.md").read_text()):
        assert set(re.findall(r"kvcache-server (\w+)", page)) <= known


def test_every_file_that_is_named_is_there() -> None:
    for folder, page in ((ROOT, README), (ROOT / "tests", (ROOT / "tests" / "README.md").read_text())):
        named = set(re.findall(r"\]\(([\w/.]+)\)", page))
        assert all((folder / name).exists() for name in named), named
        scripts = set(re.findall(r"python (tests/[\w/]+\.py)", page))
        assert all((ROOT / name).exists() for name in scripts), scripts


def test_the_changes_begin_with_this_version() -> None:
    assert re.search(r"^## (\S+?),", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == __version__  # type: ignore[index]

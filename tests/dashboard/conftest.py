"""A dashboard process, a browser, and a systemctl."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard_rig import PATIENCE, Dashboard


@pytest.fixture
def start_dashboard() -> Iterator[Callable[..., Dashboard]]:
    """`start_dashboard(*flags)` starts one that listens anywhere on loopback; it must end well."""
    started: list[Dashboard] = []

    def start(*flags: str, path: str | None = None) -> Dashboard:
        started.append(Dashboard(*flags, path=path))
        return started[-1]

    yield start
    assert [dashboard.stop() for dashboard in started] == [0] * len(started)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, once a module; `make test` installs it."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium here: apt-get install chromium")
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=flags)
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """`open_page(url, width)` opens it. What a page says on its console or breaks fails the test, but for answers of
    the dashboard that the test wants: `expected` are parts of such lines."""
    said: list[str] = []
    contexts = []
    expected: list[str] = []

    def open_one(url: str, width: int = 1280, **options: Any) -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, locale="en-GB", **options))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE * 1000)
        page.on("console", lambda line: said.append(f"{line.type}: {line.text}") if line.type != "debug" else None)
        page.on("pageerror", lambda error: said.append(f"pageerror: {error}"))
        page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        page.goto(url)
        return page

    open_one.expected = expected  # type: ignore[attr-defined]
    yield open_one
    for context in contexts:
        context.close()
    assert [line for line in said if not any(each in line for each in expected)] == []


@pytest.fixture
def systemctl(tmp_path: Path) -> Path:
    """A folder for the PATH with a systemctl in it that keeps its units in a file, and notes what it is told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "systemctl"
    script.write_text(f"#!{sys.executable}\n" + (Path(__file__).parent / "systemctl.py").read_text())
    script.chmod(0o755)
    return folder

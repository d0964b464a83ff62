"""The dashboard in a real browser, over a real daemon with real traffic."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from conftest import a_stuck_engine
from dashboard_rig import ODD, status_of, traffic, wait

from kvcache_client import GroupSpec, NamespaceSpec, Session


class Scene(NamedTuple):
    """A daemon with content, which only the test itself changes."""

    daemon: Any
    api: str
    token: str

    def status(self) -> dict[str, Any]:
        return status_of(self.api)


@pytest.fixture
def scene(start_daemon: Any) -> Iterator[Scene]:
    daemon = start_daemon(http="127.0.0.1:0", size="16MiB", pin_quota=1, write_quota=1)
    with (
        Session.connect(daemon.endpoint, engine="first", deadline=5.0) as session,
        Session.connect(daemon.endpoint, engine="second", deadline=5.0) as other,
    ):
        traffic(session, "Qwen/Qwen3-8B", 150)
        traffic(session, "Qwen/Qwen3-8B", 150, first=150)
        traffic(session, "Qwen/Qwen3-8B", 150)  # lost blocks: more memory would have hit them
        traffic(other, ODD, 40)
        api = daemon.status()["daemon"]["http"]["address"]
        yield Scene(daemon, api, (daemon.folder / "kv.token").read_text().strip())


def loaded(page: Any) -> Any:
    page.wait_for_selector("main:not(.loading)")
    return page


@pytest.fixture
def show(start_dashboard: Any, open_page: Any) -> Callable[..., Any]:
    """`show(api, *flags)` starts a dashboard for that daemon, and opens its page."""

    def start(api: str, *flags: str, path: str | None = None, **options: Any) -> Any:
        return loaded(open_page(start_dashboard("--api", api, *flags, path=path).url, **options))

    return start


def tell_token(page: Any, token: str) -> None:
    page.get_by_label("Token", exact=True).fill(token)
    page.get_by_role("button", name="Use it").click()


def give_token(page: Any, token: str) -> None:
    page.locator("#token").click()
    tell_token(page, token)
    page.get_by_role("button", name="Forget token").wait_for()


def texts(page: Any, selector: str) -> list[str]:
    return [" ".join(each.split()) for each in page.locator(selector).all_inner_texts()]


def size(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def ratio(part: int, whole: int) -> str:
    return f"{math.floor(1000 * part / whole + 0.5) / 10:.1f} %" if whole else "–"


def test_the_page_shows_what_the_api_returns(scene: Scene, show: Any) -> None:
    page = show(scene.api)
    status = scene.status()
    pool, spaces = status["pool"], sorted(status["namespaces"], key=lambda space: -space["bytes"])
    hit, asked, lost = (
        sum(space[key] for space in spaces) for key in ("hit_blocks", "requested_blocks", "lost_blocks")
    )
    assert hit and lost and status["evictions"], "nothing to see"
    assert texts(page, ".tile .number")[1:] == [
        *(ratio(hit, asked), ratio(min(hit + lost, asked), asked), ratio(pool["used_bytes"], pool["bytes"]), "2")
    ]
    assert texts(page, "#tile-all-more") == [f"{hit:,} of {asked:,}"]
    states = ("ready", "writing", "quarantined", "free")
    assert texts(page, "#pool-states-legend li") == [
        f"{name} {size(pool[name + '_bytes'])} {ratio(pool[name + '_bytes'], pool['bytes'])}" for name in states
    ]
    assert texts(page, "#pool-spaces-legend li") == [
        f"{space['model']} {size(space['bytes'])} {ratio(space['bytes'], pool['bytes'])}" for space in spaces
    ]
    assert texts(page, "#namespaces tr") == [
        " ".join(
            [
                *(
                    space["model"],
                    space["id"],
                    f"{space['blocks']:,}",
                    size(space["bytes"]),
                    f"{space['saved_blocks']:,}",
                ),
                *(f"{space['requested_blocks']:,}", ratio(space["hit_blocks"], space["requested_blocks"])),
                ratio(
                    min(space["hit_blocks"] + space["lost_blocks"], space["requested_blocks"]),
                    space["requested_blocks"],
                ),
                "Clear…",
            ]
        )
        for space in spaces
    ]
    assert [row.split()[0] for row in texts(page, "#sessions tr")] == ["first", "second"]
    (more,) = texts(page, "#eviction")
    way = "least recently used blocks" if status["eviction"]["by_age"] else "blocks that are worth least"
    assert f"The {way} are evicted" in more
    assert f"worth less than each cached one: {status['eviction']['declined_blocks']:,}." in more
    evicted, early, sample = sum(status["evictions"].values()), status["evicted_early"], status["hindsight"]
    assert early and f"within a minute: {early:,} ({ratio(early, evicted)} of the evicted)." in more
    ours, best = (ratio(sample[key], sample["requested_blocks"]) for key in ("hit_blocks", "optimum_blocks"))
    assert more.endswith(f": {ours}; a policy that knows the future: {best}.")
    for cause, blocks in status["evictions"].items():
        assert f"{cause.replace('_', ' ')} {blocks:,}" in " ".join(texts(page, "#evictions span")).replace("  ", " ")
    assert size(pool["pinned_bytes"]) in texts(page, "#pool-facts")[0]
    assert "memory" in texts(page, "#host")[0] and " of " in texts(page, "#host")[0]
    assert page.locator("#namespaces").is_visible() and not page.locator("#tiers-section").is_visible()
    assert "NVIDIA" in texts(page, "#host-more")[0] or "device" in texts(page, "#host")[0]


def test_tiers(start_daemon: Any, show: Any, tmp_path: Path) -> None:
    config = tmp_path / "kv.toml"
    tiers = {"disk": f"disk:{tmp_path}/tier?size=64MiB", "wrong": f"disk:{tmp_path}/other"}
    config.write_text("".join(f'[[tier]]\nname = "{name}"\nurl = "{url}"\n' for name, url in tiers.items()))
    daemon = start_daemon(http="127.0.0.1:0", config=config)

    def tier() -> dict[str, Any]:
        return next(iter(daemon.status()["daemon"]["tiers"]), {"off": "it is not there"})

    def row(page: Any, of: str) -> str:
        return " ".join(texts(page, f"#tiers tr[data-key={of}]"))

    wait(lambda: not tier()["off"], "the tier")
    page = show(daemon.status()["daemon"]["http"]["address"])
    assert row(page, "disk") == "disk on 0 – 0 B 0 B/s 0 B 0 B/s"
    wait(lambda: row(page, "wrong") == "wrong its URL or settings are wrong – – – – – –", "why the other one is off")
    with Session.connect(daemon.endpoint, engine="first", deadline=5.0) as session:
        traffic(session, "llama", 32)
        wait(lambda: tier().get("blocks_written") == 32, "what is written")
        wait(lambda: "2.0 MiB" in row(page, "disk"), "what is written on the page")
        session.clear()
        namespace = session.attach(NamespaceSpec(model="llama", groups=[GroupSpec(16, 64 << 10)]), (0,))
        hashes = [f"llama{number}".encode().ljust(32, b".") for number in range(32)]
        namespace.acquire([*hashes, bytes(32)]).release()
        # 32 blocks were asked for when they were stored, and 33 now, of which it has 32.
        wait(lambda: row(page, "disk") == "disk on 65 49.2 % 2.0 MiB 0 B/s 2.0 MiB 0 B/s", "what is read on the page")
        assert texts(page, "#tile-engines") == ["1"], "a tier is no engine"
        assert texts(page, "#tile-engines-more") == ["1 session, 0 away"]


def test_a_reload_keeps_the_history(scene: Scene, start_dashboard: Any, open_page: Any) -> None:
    dashboard = start_dashboard("--api", scene.api)
    page = loaded(open_page(dashboard.url))
    with Session.connect(scene.daemon.endpoint, engine="third", deadline=5.0) as session:
        traffic(session, ODD, 30)
    wait(lambda: page.locator("#tile-now").inner_text() not in ("–", "0.0 %"), "the traffic")
    shown = page.locator("#tile-now").inner_text()
    for _ in range(2):
        page.wait_for_event("response", lambda response: "/data" in response.url)
    asked = page.locator("#tile-now-more").inner_text()
    assert asked == "of 60 blocks", "each point is counted once, however often it was asked for"
    page.reload()
    loaded(page)
    assert page.locator("#tile-now-more").inner_text() == asked
    assert page.locator("#tile-now").inner_text() == shown == "100.0 %"
    assert page.locator("#chart-ratio path").count() == 2
    assert page.locator("#chart-ratio desc").text_content().startswith("Now: hit ")
    assert {each.get_attribute("role") for each in page.locator(".chart svg").all()} == {"img"}
    assert page.locator("#chart-ratio text").all_text_contents()[:3] == ["0 %", "50 %", "100 %"]


def test_actions_need_the_right_token_and_a_confirmation(scene: Scene, show: Any, open_page: Any) -> None:
    open_page.expected.append("status of 403")
    page = show(scene.api)
    before = scene.status()
    page.get_by_role("button", name="Clear all…").click()
    tell_token(page, "not-the-token-at-all")
    page.get_by_text("The token is wrong.").wait_for()
    tell_token(page, scene.token)
    page.get_by_role("heading", name="Clear every namespace?").wait_for()  # goes on to what was wanted
    page.get_by_role("button", name="Cancel").click()
    assert scene.status()["pool"]["blocks"] == before["pool"]["blocks"] > 0

    # One namespace, whose name is no markup.
    page.locator("#namespaces tr", has_text=ODD).get_by_role("button").click()
    page.get_by_role("heading", name=f"Clear {ODD}?").wait_for()
    page.get_by_role("button", name="Clear", exact=True).click()
    page.get_by_text("40 blocks were cleared.").wait_for()
    cleared = {space["model"]: space["blocks"] for space in scene.status()["namespaces"]}
    assert cleared[ODD] == 0 < cleared["Qwen/Qwen3-8B"]

    page.locator("#level").select_option("debug")
    page.get_by_role("button", name="Change", exact=True).click()
    page.get_by_text("The log level is now debug, was info.").wait_for()
    assert scene.status()["daemon"]["log_level"] == "debug"
    wait(lambda: page.locator("#level").input_value() == "debug", "the level on the page")

    page.get_by_role("button", name="Clear all…").click()
    page.get_by_role("button", name="Clear", exact=True).click()
    wait(lambda: scene.status()["pool"]["blocks"] == 0, "the clearing")
    page.get_by_role("button", name="Forget token").click()
    page.get_by_role("button", name="Enter token").wait_for()
    assert "localStorage" not in "".join(
        page.evaluate("[...Object.keys(localStorage), ...Object.keys(sessionStorage)]")
    )
    assert page.context.cookies() == []


def test_a_restarted_daemon_with_a_session_to_fence_off(start_daemon: Any, show: Any) -> None:
    flags = {"keep": "true", "quarantine": 0.5, "grace": 3600}
    daemon = start_daemon(**flags, http="127.0.0.1:0")
    api = daemon.status()["daemon"]["http"]["address"]
    page = show(api)
    with a_stuck_engine(daemon.endpoint) as stuck:
        page.locator("#sessions tr", has_text="stuck").wait_for()
        stuck.send_signal(signal.SIGSTOP)
        daemon.kill()
        page.get_by_text("daemon away").wait_for()
        banner = page.locator("#banner").inner_text()
        assert banner.startswith("The daemon has not answered since") and "The page shows data from" in banner
        assert "Connection refused" in banner
        assert "stuck" in page.locator("#sessions").inner_text(), "the last values stay"
        assert page.get_by_role("button", name="Clear all…").is_disabled()

        start_daemon(endpoint=daemon.endpoint, **flags, http=urlsplit(api).netloc)
        page.get_by_text("in grace").wait_for()
        give_token(page, (daemon.folder / "kv.token").read_text().strip())
        page.get_by_role("button", name="Fence off…").click()
        page.get_by_text("other", exact=False).first.wait_for()
        page.get_by_role("button", name="Fence off", exact=True).click()
        page.get_by_text("is fenced off: 1 save ended.").wait_for()
        assert status_of(api)["away"] == []
        page.get_by_text("answering").wait_for()
        assert page.locator("#banner").is_hidden()


def test_a_dashboard_that_stops(scene: Scene, start_dashboard: Any, open_page: Any) -> None:
    open_page.expected.append("ERR_CONNECTION_REFUSED")
    dashboard = start_dashboard("--api", scene.api)
    page = loaded(open_page(dashboard.url))
    dashboard.process.terminate()
    page.get_by_text("no dashboard").wait_for()
    assert "Qwen/Qwen3-8B" in page.locator("#namespaces").inner_text()


UNITS = {
    "vllm@qwen.service": {
        "Description": "vLLM engine qwen",
        "ActiveState": "active",
        "SubState": "running",
        "MainPID": "4242",
        "MemoryCurrent": str(3 << 30),
    },
    "vllm@llama.service": {"Description": "vLLM engine llama", "asleep": True},
    "vllm@locked.service": {"Description": "vLLM engine locked", "refused": True},
    "sshd.service": {"Description": "not ours", "ActiveState": "active", "SubState": "running"},
}
ENV = """# kept: a comment
MODEL=Qwen/Qwen3-8B
MAX_MODEL_LEN=32768

KV_TRANSFER_CONFIG={"kv_connector": "KVCacheServerConnector", "kv_connector_extra_config": {"save": "prompt"}}
HF_TOKEN='keep me'
ARGS=--tensor-parallel-size 2
"""


@pytest.fixture
def engines(tmp_path: Path, systemctl: Path) -> Callable[[], list[list[str]]]:
    """Units and their environment files; call it for the changes that systemctl was asked for."""
    folder = tmp_path / "vllm"
    folder.mkdir()
    units = {name: dict(unit) for name, unit in UNITS.items()}
    for name in ("qwen", "llama"):
        (folder / f"{name}.env").write_text(ENV)
        units[f"vllm@{name}.service"]["EnvironmentFiles"] = f"{folder}/{name}.env (ignore_errors=no)"
    (systemctl / "units.json").write_text(json.dumps(units))

    def orders() -> list[list[str]]:
        calls = [json.loads(line) for line in (systemctl / "calls.jsonl").read_text().splitlines()]
        return [
            [each for each in call if not each.startswith("--no-")]
            for call in calls
            if "start" in str(call) or "stop" in call
        ]

    return lambda: [call for call in orders() if "show" not in call and "list-units" not in call]


def test_engines_are_listed_controlled_and_edited(
    scene: Scene, show: Any, open_page: Any, engines: Any, systemctl: Path, tmp_path: Path
) -> None:
    open_page.expected += ["status of 400", "status of 409", "status of 503"]
    flags = ("--manage", "vllm@*", "--env-folder", str(tmp_path / "vllm"))
    page = show(scene.api, *flags, path=f"{systemctl}:/usr/bin:/bin")
    page.get_by_text("Engines are shown once you have entered the token.").wait_for()
    give_token(page, scene.token)
    page.locator(".engine").first.wait_for()
    assert texts(page, ".engine .name") == ["vllm@llama.service", "vllm@locked.service", "vllm@qwen.service"]
    qwen, llama, locked = (page.locator(".engine", has_text=f"engine {name}") for name in ("qwen", "llama", "locked"))
    assert "pid 4242" in qwen.inner_text() and "3.0 GiB" in qwen.inner_text()
    assert "no environment file" in locked.inner_text()

    llama.get_by_role("button", name="Start", exact=True).click()
    page.get_by_text("it loads its model, and takes device memory").wait_for()
    assert engines() == []
    page.locator("#dialog-yes").click()
    llama.get_by_text("active, running").wait_for()
    for verb in ("Restart", "Stop"):
        qwen.get_by_role("button", name=verb, exact=True).click()
        page.locator("#dialog-yes").click()
        page.get_by_text(f"{verb.lower()} was ordered").wait_for()
    qwen.get_by_text("inactive, dead").wait_for()
    assert engines() == [
        ["start", "--", "vllm@llama.service"],
        ["restart", "--", "vllm@qwen.service"],
        ["stop", "--", "vllm@qwen.service"],
    ]
    locked.get_by_role("button", name="Start", exact=True).click()
    page.locator("#dialog-yes").click()
    page.get_by_text("Failed to start vllm@locked.service: Access denied").wait_for()
    page.get_by_role("button", name="Cancel").click()

    file = tmp_path / "vllm" / "qwen.env"
    assert qwen.get_by_label("Save").input_value() == "prompt"
    qwen.get_by_label("Context length").fill("a lot")
    qwen.get_by_role("button", name="Save…").click()
    page.locator("#dialog-yes").click()
    page.get_by_text("Context length 'a lot': 1 to 100,000,000").wait_for()
    assert file.read_text() == ENV
    page.get_by_role("button", name="Cancel").click()
    qwen.get_by_label("Context length").fill("16384")
    qwen.get_by_label("Model").fill("Qwen/Qwen3-32B")
    qwen.get_by_label("Save").select_option("all")
    qwen.get_by_label("Most cached blocks").fill("5000")
    qwen.get_by_role("button", name="Save…").click()
    page.get_by_text("Context length: 32768 → 16384").wait_for()
    page.locator("#dialog-yes").click()
    page.get_by_text("qwen.env is changed.").wait_for()
    extra = '"kv_connector_extra_config": {"save": "all", "num_cpu_blocks": 5000}'
    assert file.read_text() == ENV.replace("Qwen3-8B", "Qwen3-32B").replace("32768", "16384").replace(
        '"kv_connector_extra_config": {"save": "prompt"}', extra
    )
    assert (tmp_path / "vllm" / "qwen.env.before").read_text() == ENV

    # Somebody else's edit is not written over, and takes nothing from who is typing.
    wait(lambda: page.locator(".changed").count() == 0, "the new file")
    length = qwen.get_by_label("Context length")
    length.fill("1024")
    file.write_text(file.read_text().replace("Qwen3-32B", "Qwen3-4B"))
    wait(lambda: qwen.get_by_label("Model").input_value() == "Qwen/Qwen3-4B", "the newer file")
    assert length.input_value() == "1024"
    assert length.evaluate("input => input === document.activeElement")
    assert page.locator(".changed").count() == 1
    qwen.get_by_role("button", name="Save…").click()
    file.write_text(ENV)
    page.locator("#dialog-yes").click()
    page.get_by_text("has changed in the meantime").wait_for()
    assert file.read_text() == ENV


def test_without_systemd(scene: Scene, show: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    page = show(scene.api, "--manage", "vllm@*", path=str(tmp_path / "empty"))
    give_token(page, scene.token)
    page.get_by_text("systemctl not found").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_horizontal_scrolling_on_a_small_phone(
    scene: Scene, show: Any, engines: Any, systemctl: Path, tmp_path: Path, scheme: str
) -> None:
    flags = ("--manage", "vllm@*", "--env-folder", str(tmp_path / "vllm"))
    phone = {"width": 360, "has_touch": True, "is_mobile": True, "color_scheme": scheme}
    page = show(scene.api, *flags, path=f"{systemctl}:/usr/bin:/bin", **phone)
    give_token(page, scene.token)
    page.locator(".engine").first.wait_for()
    wide = """() => [document.documentElement.scrollWidth, ...[...document.querySelectorAll("body *")]
        .filter((each) => each.getBoundingClientRect().right > 360.5 && each.offsetParent !== null)
        .map((each) => each.id || each.className || each.tagName)]"""
    assert page.evaluate(wide) == [360]
    page.get_by_role("button", name="Clear all…").tap()
    page.get_by_role("heading", name="Clear every namespace?").wait_for()
    assert page.evaluate(wide) == [360]
    backs = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert backs == {"light": "rgb(246, 247, 248)", "dark": "rgb(20, 24, 27)"}[scheme]


def test_a_refresh_does_not_move_the_layout(scene: Scene, show: Any) -> None:
    page = show(scene.api)
    where = """() => JSON.stringify([...document.querySelectorAll("section, h2, table, .chart")]
        .map((each) => each.getBoundingClientRect()))"""
    page.locator("#chart-used path").wait_for(state="attached")
    page.evaluate("document.querySelector('#namespaces button').focus()")
    before = page.evaluate(where)
    with Session.connect(scene.daemon.endpoint, engine="first", deadline=5.0) as session:
        shown = page.locator("#tile-all-more").inner_text()
        traffic(session, ODD, 25)
    wait(lambda: page.locator("#tile-all-more").inner_text() != shown, "the traffic")
    wait(lambda: page.locator("#sessions tr").count() == 2, "the end of the third session")
    assert page.evaluate(where) == before
    assert page.evaluate("document.activeElement.textContent") == "Clear…"

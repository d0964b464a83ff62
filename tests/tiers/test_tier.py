"""A tier's process beside a real daemon and a toy engine that compares every byte."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from conftest import Daemon, StartDaemon
from scattered import scatter
from tiered import (
    Connect,
    a_tier,
    all_is_free,
    hashes,
    leave_below,
    patched,
    save_below,
    tier_of,
    wait_for,
    wait_open,
    wait_tier,
    wait_why,
    why,
)

from kvcache_proto.messages import Chain
from kvcache_server.admin_client import AdminClient
from kvcache_server.commands.describe import describe
from kvcache_server.commands.top import Sample, frame
from kvcache_server.http.metrics import render


def pid_of_the_tier(daemon: Daemon) -> int:
    """Return the process that the daemon has started."""
    children = Path(f"/proc/{daemon.process.pid}/task").glob("*/children")
    (pid,) = [int(each) for path in children for each in path.read_text().split()]
    return pid


def test_blocks_come_back_from_a_tier(daemon: Daemon, connect: Connect, url: str, tmp_path: Path) -> None:
    names = hashes(1, 40)
    engine = connect(daemon)
    with a_tier(tmp_path, url, daemon.endpoint):
        wait_open(daemon)
        save_below(daemon, engine, names)
        assert engine.load(names) == 0
        engine.load_all(names)
        wait_tier(daemon, "blocks_brought", 40)
        assert tier_of(daemon)["blocks_found"] == 40
    wait_for(lambda: not tier_of(daemon), "the tier's end")


def test_scattered_blocks_go_out_and_come_back(
    start_daemon: StartDaemon, connect: Connect, url: str, tmp_path: Path
) -> None:
    """They lie in several runs of pages, both those that are written and those that are brought."""
    daemon = start_daemon(size="8MiB", quarantine=0.5)
    engine, names = connect(daemon), hashes(1, 12)

    def check_that_they_are_scattered() -> None:
        with engine.namespace.acquire(names) as lease:
            assert lease.hits == len(names)
            pieces = [sum(len(slot.views(shard)) for shard in range(2)) for slot in lease.slots]
        assert sum(each > 2 for each in pieces) > len(names) // 2, "one piece for each shard would be two"

    scatter(daemon.endpoint)
    with a_tier(tmp_path, url, daemon.endpoint):
        wait_open(daemon)
        assert engine.save(names) == len(names)
        check_that_they_are_scattered()
        wait_tier(daemon, "blocks_written", len(names))
    engine.session.clear()
    scatter(daemon.endpoint)
    with a_tier(tmp_path, url, daemon.endpoint):
        wait_open(daemon)
        engine.load_all(names)
        wait_tier(daemon, "blocks_brought", len(names))
        check_that_they_are_scattered()


def test_through_writes_blocks_that_nobody_has_found_yet(
    daemon: Daemon, connect: Connect, url: str, tmp_path: Path
) -> None:
    engine = connect(daemon)
    with a_tier(tmp_path, url, daemon.endpoint, "--writes", "through"):
        wait_open(daemon)
        assert engine.save(hashes(1, 20)) == 20
        wait_tier(daemon, "blocks_written", 20)


def test_second_does_not(daemon: Daemon, connect: Connect, url: str, tmp_path: Path) -> None:
    engine = connect(daemon)
    with a_tier(tmp_path, url, daemon.endpoint):
        wait_open(daemon)
        assert engine.save(hashes(1, 20)) == 20
        assert engine.save(hashes(2, 5)) == engine.load(hashes(2, 5)) == 5
        wait_tier(daemon, "blocks_written", 5)
        assert tier_of(daemon)["blocks_written"] == 5


def test_second_writes_what_is_computed_again_after_its_eviction(
    start_daemon: StartDaemon, connect: Connect, url: str, tmp_path: Path
) -> None:
    daemon = start_daemon(size="16MiB")
    engine, chains = connect(daemon), [hashes(number, 16) for number in range(30)]
    with a_tier(tmp_path, url, daemon.endpoint):
        wait_open(daemon)
        stored = [names for names in chains if not engine.load(names) and engine.save(names) == 16]
        with AdminClient(daemon.endpoint, "test") as admin:
            gone = next(each for each in stored if not admin.ask(Chain(0, b"", "", each[0])).matches)
        # It remembers 12 bits of a hash: of 480 blocks, it may take one for an evicted one, with those above it.
        before = tier_of(daemon).get("blocks_written", 0)
        assert before <= 16 and not engine.load(gone) and engine.save(gone)
        # The daemon remembers most of what it has evicted. Of a chain, it may forget the last blocks.
        wait_tier(daemon, "blocks_written", before + 4)


def test_the_daemon_starts_a_tier_again_that_was_killed(start_daemon: StartDaemon, connect: Connect, url: str) -> None:
    daemon = start_daemon(tier=url)
    engine = connect(daemon)
    names = hashes(1, 30)
    wait_open(daemon)
    save_below(daemon, engine, names)
    killed = pid_of_the_tier(daemon)
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: "started again in" in daemon.log, "a line about the restart")
    wait_open(daemon)
    assert pid_of_the_tier(daemon) != killed
    engine.load_all(names)
    assert daemon.status()["daemon"]["tier_processes"][0]["starts"] == 2


def test_a_tier_ends_with_its_daemon(start_daemon: StartDaemon, url: str) -> None:
    for end in (signal.SIGTERM, signal.SIGKILL):
        daemon = start_daemon(tier=url)
        wait_open(daemon)
        pid = pid_of_the_tier(daemon)
        daemon.process.send_signal(end)
        daemon.process.wait(20)
        wait_for(lambda pid=pid: not Path(f"/proc/{pid}/cmdline").exists(), "the tier's end")  # type: ignore[misc]


def test_blocks_outlive_the_region(start_daemon: StartDaemon, connect: Connect, url: str) -> None:
    daemon = start_daemon(tier=url)
    names = hashes(1, 30)
    wait_open(daemon)
    save_below(daemon, connect(daemon), names)
    assert daemon.stop() == 0
    daemon = start_daemon(tier=url, fresh=True)
    wait_open(daemon)
    connect(daemon).load_all(names)


def test_a_tier_of_its_own_follows_to_the_next_region(
    start_daemon: StartDaemon, connect: Connect, url: str, tmp_path: Path
) -> None:
    daemon = start_daemon()
    names = hashes(1, 30)
    with a_tier(tmp_path, url, daemon.endpoint) as tier:
        wait_open(daemon)
        save_below(daemon, connect(daemon), names)
        daemon.kill()
        daemon = start_daemon(fresh=True, size="96MiB")
        wait_open(daemon)
        connect(daemon).load_all(names)
        assert "starting again" in tier.log


def test_wrong_bytes_in_the_store_are_a_miss(daemon: Daemon, connect: Connect, url: str, tmp_path: Path) -> None:
    engine = connect(daemon)
    names = hashes(1, 20)
    with a_tier(tmp_path, url, daemon.endpoint, "--writes", "through"):
        wait_open(daemon)
        leave_below(daemon, engine, names)
    wait_for(lambda: not tier_of(daemon), "the tier's end")
    (data,) = (tmp_path / "tier").glob("*.data")
    content = bytearray(data.read_bytes())
    for at in range(0, len(content), 4096):  # in every shard of every block
        content[at] ^= 1
    data.write_bytes(content)
    with a_tier(tmp_path, url, daemon.endpoint):
        wait_open(daemon)
        assert engine.load(names) == 0
        wait_tier(daemon, "blocks_not_brought", 20)
        assert engine.load(names) == 0
        wait_for(lambda: daemon.status()["client_counts"].get("tier_checksums_wrong", 0) == 20, "their count")


def test_a_tier_that_fails_is_off_and_comes_back(daemon: Daemon, connect: Connect, url: str, tmp_path: Path) -> None:
    engine = connect(daemon)
    names = hashes(1, 20)
    folder = tmp_path / "tier"
    with a_tier(tmp_path, url, daemon.endpoint, env={"KVCACHE_TIER_URL": ""}) as tier:
        wait_open(daemon)
        save_below(daemon, engine, names)
        # Reads and writes beyond the end of its files fail from now on.
        (data,) = folder.glob("*.data")
        size = data.stat().st_size
        os.truncate(data, 0)
        assert engine.load(names) == 0
        wait_for(lambda: "is off for" in tier.log or tier_of(daemon).get("blocks_not_brought", 0) > 0, "a failure")
        os.truncate(data, size)
        assert engine.save(names) + engine.load(names) >= 20
        wait_open(daemon)
        more = hashes(2, 20)
        save_below(daemon, engine, more)
        engine.load_all(more)


def test_the_configuration_adds_and_removes_tiers(
    start_daemon: StartDaemon, connect: Connect, url: str, tmp_path: Path
) -> None:
    config = tmp_path / "kv.toml"
    config.write_text("")
    daemon = start_daemon(config=config)
    config.write_text(f'[[tier]]\nurl = "{url}"\nname = "ssd"\nwrites = "through"\n')
    daemon.process.send_signal(signal.SIGHUP)
    wait_open(daemon)
    assert (tier_of(daemon)["name"], tier_of(daemon)["writes"]) == ("ssd", "through")
    assert str(tmp_path / "tier") not in daemon.log, "a URL may have a password"
    config.write_text("")
    daemon.process.send_signal(signal.SIGHUP)
    wait_for(lambda: not tier_of(daemon), "the tier's end")


def test_a_wrong_url_is_told_once(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = start_daemon(tier=f"disk:{tmp_path}/tier")
    wait_for(lambda: "not started again" in daemon.log, "the verdict")
    assert "a folder and its size, as in disk:/var/cache/kvcache?size=500GiB" in daemon.log
    (process,) = daemon.status()["daemon"]["tier_processes"]
    assert process == {"name": "disk", "starts": 1, "ended": "its URL or settings are wrong"}


def test_a_tier_that_hangs_is_killed(start_daemon: StartDaemon, url: str, tmp_path: Path) -> None:
    hurry = tmp_path / "sitecustomize.py"
    hurry.write_text("import kvcache_server.tiering.tiering as tiering\ntiering.HANGING = 1.0\n")
    daemon = start_daemon(tier=url, env={"PYTHONPATH": str(tmp_path)})
    wait_open(daemon)
    stopped = pid_of_the_tier(daemon)
    os.kill(stopped, signal.SIGSTOP)
    wait_for(lambda: "killed, because it has not requested jobs" in daemon.log, "the end of the process that hangs")
    wait_open(daemon)
    assert pid_of_the_tier(daemon) != stopped


def test_a_tier_whose_store_hangs_is_killed(start_daemon: StartDaemon, connect: Connect, tmp_path: Path) -> None:
    """Though it asks for more work. The slots that it should have filled are free then."""
    hang = tmp_path / "hang"
    code = f"""\
import os, sys, time

if "serve" in sys.orig_argv:
    import kvcache_server.tiering.tiering as tiering

    tiering.HANGING = 1.0
else:
    from kvcache_tiers import disk

    move_all = disk._move_all

    def hanging(*args):
        while os.path.exists({str(hang)!r}):
            time.sleep(0.05)
        move_all(*args)

    disk._move_all = hanging
"""
    daemon = start_daemon(tier=f"disk:{tmp_path}/tier?size=64MiB", quarantine=0.5, env=patched(tmp_path, code))
    engine, names = connect(daemon), hashes(1, 20)
    wait_open(daemon)
    save_below(daemon, engine, names)
    hang.touch()
    assert engine.load(names) == 0
    wait_for(lambda: "killed, because it has not requested jobs, or finished none" in daemon.log, "its end")
    hang.unlink()
    wait_for(lambda: all_is_free(daemon), "free slots")
    engine.load_all(names)


def test_a_second_tier_of_one_name_waits(daemon: Daemon, tmp_path: Path, url: str) -> None:
    with a_tier(tmp_path, url, daemon.endpoint) as first:
        wait_open(daemon)
        with a_tier(tmp_path, f"disk:{tmp_path}/other?size=64MiB", daemon.endpoint) as second:
            wait_for(lambda: "another tier is called 'disk'" in second.log, "a line about it")
            first.stop()
            wait_for(lambda: tier_of(daemon).get("off") == "", "the second one's turn")


def test_promotion_does_not_hold_up_a_full_region(start_daemon: StartDaemon, connect: Connect, url: str) -> None:
    """Blocks of three times the region's size all come back, though each needs another one's place."""
    daemon = start_daemon(tier=url.replace("256MiB", "512MiB"), size="16MiB")
    engine = connect(daemon)
    wait_open(daemon)
    chains = [hashes(chain, 16) for chain in range(24)]
    for number, names in enumerate(chains, 1):
        assert engine.save(names) == engine.load(names) == 16
        wait_tier(daemon, "blocks_written", 16 * number)  # before they are evicted
    for names in chains:
        engine.load_all(names)


def test_ahead_writes_what_was_found_before_it_is_evicted(
    start_daemon: StartDaemon, connect: Connect, url: str, tmp_path: Path
) -> None:
    daemon = start_daemon(size="16MiB")
    engine = connect(daemon)
    with a_tier(tmp_path, url, daemon.endpoint, "--writes", "ahead"):
        wait_open(daemon)
        found, once = hashes(1, 20), hashes(2, 20)
        assert engine.save(found) == engine.load(found) == engine.save(once) == 20
        time.sleep(0.5)
        assert not tier_of(daemon).get("blocks_written"), "there is room"
        for chain in range(3, 40):  # evicts all others in the end
            engine.save(hashes(chain, 16))
            time.sleep(0.1)
        wait_tier(daemon, "blocks_written", 20)
        assert tier_of(daemon)["blocks_written"] == 20, "the others were never found"
        engine.session.clear()
        assert engine.load(once) == 0
        engine.load_all(found)


def test_an_operator_sees_what_a_tier_does(start_daemon: StartDaemon, connect: Connect, url: str) -> None:
    daemon = start_daemon(tier=url)
    engine = connect(daemon)
    names = hashes(1, 30)
    wait_open(daemon)
    save_below(daemon, engine, names)
    engine.load_all(names)
    wait_tier(daemon, "blocks_brought", 30)
    status = daemon.figures()
    text = describe(status)
    assert "tier        disk: on; asked for" in text and "brought 30 (3.8 MiB)" in text
    assert "30 blocks written (3.8 MiB), 0 to write" in text
    lines = render(status).decode().splitlines()
    assert 'kvcache_tier_up{tier="disk"} 1.0' in lines
    assert 'kvcache_tier_blocks_total{event="brought",tier="disk"} 30.0' in lines
    assert 'kvcache_tier_written_bytes_total{tier="disk"} 3.93216e+06' in lines
    assert "kvcache_engines 1.0" in lines, "a tier is none"
    os.kill(pid_of_the_tier(daemon), signal.SIGKILL)
    wait_for(lambda: not tier_of(daemon), "the tier's end")
    ended = daemon.figures()
    assert "tier        disk: it ended with status -9" in describe(ended)
    assert 'kvcache_tier_up{tier="disk"} 0.0' in render(ended).decode().splitlines(), "as an alert needs it"
    wait_open(daemon)
    assert tier_of(daemon)["blocks_brought"] == 30, "counters never fall"


def test_why_says_what_tiers_said(daemon: Daemon, connect: Connect, url: str, tmp_path: Path) -> None:
    names = hashes(1, 20)
    engine = connect(daemon)
    assert engine.load(hashes(9, 3), "nobody asked") == 0
    with a_tier(tmp_path, url, daemon.endpoint):
        wait_open(daemon)
        assert engine.save(names) == 20
        assert engine.load([*names, *hashes(2, 5)], "beyond") == 20
        said = wait_why(daemon, "beyond", "absent")
        assert "\n  tier disk, blocks 20-24: it does not have them\n" in said
        wait_tier(daemon, "blocks_written", 20)
        engine.session.clear()
        assert engine.load(names, "late") == 0
        engine.load_all(names)
        said = wait_why(daemon, "late", "late")
        assert "\n  tier disk, blocks 0-19: it had them, but they came too late for this lookup: the last one " in said
        assert "  blocks 0-19  cleared" in said, "what else is known of them"
        (late,) = why(daemon, "late")[0]
        assert late["found"] == late["brought"] == 20 and late["after_s"] > 0
    facts, said = why(daemon, "nobody asked")
    assert facts == [] and "  tier " not in said


def test_why_says_which_tier_of_two_had_blocks(daemon: Daemon, connect: Connect, url: str, tmp_path: Path) -> None:
    engine = connect(daemon)
    names = hashes(1, 20)
    with a_tier(tmp_path, url, daemon.endpoint, "--name", "other", "--writes", "through"):
        wait_open(daemon)
        leave_below(daemon, engine, names)
    wait_for(lambda: not tier_of(daemon), "the tier's end")
    with a_tier(tmp_path, f"disk:{tmp_path}/first?size=64MiB", daemon.endpoint):
        wait_open(daemon)
        with a_tier(tmp_path, url, daemon.endpoint, "--name", "other"):
            wait_for(lambda: [each["off"] for each in daemon.status()["daemon"]["tiers"]] == ["", ""], "both")
            assert engine.load(names, "two") == 0
            engine.load_all(names)
            said = wait_why(daemon, "two", "absent", "late")
            assert "\n  tier disk, blocks 0-19: it does not have them\n" in said
            assert "\n  tier other, blocks 0-19: it had them, but they came too late" in said


def test_why_says_that_a_tier_is_off(start_daemon: StartDaemon, connect: Connect, url: str, tmp_path: Path) -> None:
    hurry = tmp_path / "sitecustomize.py"
    hurry.write_text("import kvcache_server.tiering.tiering as tiering\ntiering.HANGING = 1.0\n")
    daemon = start_daemon(env={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"})
    engine = connect(daemon)
    with a_tier(tmp_path, url, daemon.endpoint) as tier:
        wait_open(daemon)
        tier.process.send_signal(signal.SIGSTOP)
        assert engine.load(hashes(1, 4), "unanswered") == 0
        wait_why(daemon, "unanswered", "off")
        assert engine.load(hashes(1, 4), "off") == 0
        assert "\n  tier disk, blocks 0-3: it was off: hanging\n" in wait_why(daemon, "off", "off")
        tier.process.send_signal(signal.SIGCONT)


def test_why_says_that_blocks_were_wrong(daemon: Daemon, connect: Connect, url: str, tmp_path: Path) -> None:
    engine = connect(daemon)
    names = hashes(1, 20)
    with a_tier(tmp_path, url, daemon.endpoint, "--writes", "through"):
        wait_open(daemon)
        leave_below(daemon, engine, names)
    wait_for(lambda: not tier_of(daemon), "the tier's end")
    (data,) = (tmp_path / "tier").glob("*.data")
    content = bytearray(data.read_bytes())
    for at in range(0, len(content), 4096):
        content[at] ^= 1
    data.write_bytes(content)
    with a_tier(tmp_path, url, daemon.endpoint):
        wait_open(daemon)
        assert engine.load(names, "wrong") == 0
        said = wait_why(daemon, "wrong", "lost")
        assert "tier disk, blocks 0-19: it had 20 blocks, but brought only 0: it could not read the others" in said


def table_of_tiers(before: Sample, after: Sample) -> list[list[str]]:
    """Return the cells of the table of tiers that `top` shows."""
    lines = [line.text for line in frame(before, after)]
    at = next((at for at, line in enumerate(lines) if line.startswith("tier ")), None)
    if at is None:
        return []
    return [re.split("  +", line) for line in lines[at : lines.index("", at)]]


def test_top_shows_rates_of_tiers(start_daemon: StartDaemon, connect: Connect, url: str) -> None:
    daemon = start_daemon(tier=url)
    engine = connect(daemon)
    names = hashes(1, 32)
    wait_open(daemon)
    before = Sample(daemon.figures(), 100.0)
    save_below(daemon, engine, names)
    assert engine.load([*names, *hashes(2, 32)]) == 0
    engine.load_all(names)
    wait_tier(daemon, "blocks_brought", 32)
    after = Sample(daemon.figures(), 102.0)
    head, row = table_of_tiers(before, after)
    assert head == ["tier", "had now", "overall", "read", "written", "to read", "blocks to write"]
    assert row == ["disk", "50.0%", "50.0%", "2.0 MiB/s", "4.0 MiB", "2.0 MiB/s", "4.0 MiB", "0 B", "0", "on"]
    (_, row) = table_of_tiers(after, Sample(after.figures, 103.0))
    assert row == ["disk", "-", "50.0%", "0 B/s", "4.0 MiB", "0 B/s", "4.0 MiB", "0 B", "0", "on"]
    os.kill(pid_of_the_tier(daemon), signal.SIGKILL)
    seen: list[Sample] = []

    def is_away() -> bool:
        seen.append(Sample(daemon.figures(), 104.0))
        return table_of_tiers(after, seen[-1])[1] == ["disk", "it ended with status -9"]

    wait_for(is_away, "the tier's end")
    away = seen[-1]
    wait_open(daemon)
    (_, row) = table_of_tiers(away, Sample(daemon.figures(), 105.0))
    assert row[1:5] == ["-", "50.0%", "0 B/s", "4.0 MiB"], "what it did before it went is no rate"


def test_top_shows_why_a_tier_is_off_and_nothing_without_tiers(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = start_daemon(tier=f"disk:{tmp_path}/tier")
    wait_for(lambda: "not started again" in daemon.log, "the verdict")
    command = [sys.executable, "-m", "kvcache_server", "top", "--once", "--interval", "0.1", "--endpoint"]
    shown = subprocess.run([*command, daemon.endpoint], capture_output=True, text=True, check=True).stdout
    assert re.search(r"^disk .* its URL or settings are wrong$", shown, re.MULTILINE)
    assert daemon.stop() == 0
    shown = subprocess.run([*command, start_daemon().endpoint], capture_output=True, text=True, check=True).stdout
    assert "tier" not in shown and "hits  now" in shown

"""`kvcache-server doctor` as operators see it: on this host, and on hosts that lack something."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from kvcache_server.config import Config
from kvcache_server.storage.region_file import Mount
from kvcache_tools import doctor
from kvcache_tools.doctor.check_result import CheckResult, describe, summary
from kvcache_tools.doctor.child import ask
from kvcache_tools.doctor.host import tmpfs_page
from kvcache_tools.doctor.software import OURS, within

NOBODY = (
    "import os, resource, sys, kvcache_server.cli, kvcache_tools.doctor;"
    "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536));"
    "os.getuid() or (os.setgroups([]), os.setgid(65534), os.setuid(65534));"
    "kvcache_server.cli.main()"
)


class Report(NamedTuple):
    code: int
    findings: dict[str, dict[str, Any]]
    errors: str

    def verdict(self, name: str) -> str:
        return str(self.findings[name]["verdict"])


def run(*arguments: str, nobody: bool = False, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("KVCACHE_", "VLLM_"))}
    start = ["-c", NOBODY] if nobody else ["-m", "kvcache_server"]
    return subprocess.run(
        [sys.executable, *start, "doctor", *arguments],
        env=inherited | environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def report(*arguments: str, nobody: bool = False, **environ: str) -> Report:
    done = run("--json", *arguments, nobody=nobody, **environ)
    assert done.stdout, done.stderr
    answer = json.loads(done.stdout)
    every = [finding for section in answer["sections"].values() for finding in section]
    assert sum(answer["verdicts"].values()) == len(every)
    return Report(done.returncode, {finding["name"]: finding for finding in every}, done.stderr)


@pytest.fixture
def path_with(tmp_path: Path) -> Any:
    """`path_with(torch="text")` returns a PYTHONPATH on which those modules come before what is installed."""

    def make(**modules: str) -> str:
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        return os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])

    return make


# The host.


def test_host_and_software_are_reported_with_figures() -> None:
    found = report("host", "software")
    assert found.code == 0, found
    for name in ("system", "cores", "memory", "page size", "huge pages", "region's pages", "locked memory"):
        assert found.verdict(name) in ("ok", "slow")
    assert found.findings["page size"]["values"]["bytes"] == resource.getpagesize()
    assert found.findings["memory"]["values"]["bytes"] >= found.findings["memory"]["values"]["available_bytes"]
    for name in OURS:
        assert found.verdict(name) == "ok"


def test_a_low_limit_on_locked_memory_and_no_daemon_yet(short_folder: Path) -> None:
    """Neither is a failure: the region stays unlocked, and no daemon is expected yet."""
    short_folder.chmod(0o755)
    found = report("host", "endpoint", nobody=True, XDG_RUNTIME_DIR=str(short_folder), KVCACHE_SIZE="64MiB")
    assert found.code == 0, found
    assert found.verdict("locked memory") == "slow"
    assert "limit 64.0 KiB: a region of 64.0 MiB stays unlocked" in found.findings["locked memory"]["figure"]
    assert "ulimit -l" in found.findings["locked memory"]["cure"]
    assert found.verdict("daemon") == "untested"
    assert "kvcache-server serve --endpoint" in found.findings["daemon"]["cure"]
    assert found.verdict("endpoint's folder") == ("untested" if os.getuid() == 0 else "ok")
    strict = report("host", nobody=True, XDG_RUNTIME_DIR=str(short_folder), KVCACHE_LOCK="always")
    assert (strict.code, strict.verdict("locked memory")) == (1, "failed")
    roomy = report("host", nobody=True, XDG_RUNTIME_DIR=str(short_folder), KVCACHE_SIZE="32KiB")
    assert roomy.verdict("locked memory") == "ok"


MOUNTED = ["unshare", "--mount", "sh", "-ec", 'mount -t "$1" -o "$2" kv "$3"; shift 3; exec "$@"', "sh"]
only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount, or be somebody else")


def mounted(kind: str, options: str, folder: Path, *command: str) -> str:
    """Return what `command` prints with such a mount at `folder`, in a mount namespace of its own."""
    done = subprocess.run(
        [*MOUNTED, kind, options, str(folder), *command], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout, done.stderr
    return done.stdout


def host_finding(
    name: str, kind: str, options: str, folder: Path, size: str, huge_pages: str = "never"
) -> dict[str, Any]:
    """Return the result of `doctor host` for `name` with such a mount as region_dir."""
    doctor = [sys.executable, "-m", "kvcache_server", "doctor", "--json", "host"]
    environ = ["env", f"KVCACHE_REGION_DIR={folder}", f"KVCACHE_SIZE={size}", f"KVCACHE_HUGE_PAGES={huge_pages}"]
    findings = json.loads(mounted(kind, options, folder, *environ, *doctor))["sections"]["host"]
    return next(finding for finding in findings if finding["name"] == name)


@only_root
def test_pages_of_a_region_on_a_tmpfs(short_folder: Path) -> None:
    """A large region on small pages costs page tables in each process; the suggested remedy works."""
    small = host_finding("region's pages", "tmpfs", "size=64M,huge=never", short_folder, "512GiB")
    assert (small["verdict"], small["values"]["bytes"]) == ("slow", resource.getpagesize())
    assert "1.0 GiB of page tables" in small["figure"]
    assert small["cure"].startswith("leave huge_pages at auto")
    assert host_finding("region's pages", "tmpfs", "size=64M,huge=never", short_folder, "4GiB")["verdict"] == "ok"
    advised = host_finding("region's pages", "tmpfs", "size=64M,huge=advise", short_folder, "512GiB")
    assert advised["verdict"] == "slow"
    huge = host_finding("region's pages", "tmpfs", "size=64M,huge=always", short_folder, "512GiB")
    assert (huge["verdict"], huge["values"]["bytes"]) == ("ok", 2 << 20)


@only_root
def test_huge_pages_are_used_if_the_kernel_provides_them(short_folder: Path) -> None:
    """`doctor` reports the pages that a region on a mount really gets, whatever the mount's options are."""
    found = host_finding("region's pages", "tmpfs", "size=64M,huge=never", short_folder, "512GiB", "auto")
    command = [sys.executable, "-c", _MAPPED, str(short_folder), "auto"]
    shown = mounted("tmpfs", "size=64M,huge=never", short_folder, *command)
    assert (int(shown) > 0) is (found["values"]["bytes"] == 2 << 20), found
    if int(shown) == 0:
        assert found["verdict"] == "slow" and "mount -o remount,huge=always" in found["cure"]


_MAPPED = """
import re, sys
from kvcache_server.storage.region_file import create_region
folder, huge_pages = sys.argv[1:]
region = create_region(folder, 32 << 20, socket_path=folder + "/kv.sock", lock="never", huge_pages=huge_pages)
mapping = open("/proc/self/smaps").read().split(region.path)[1]
print(re.search(r"ShmemPmdMapped: +([0-9]+) kB", mapping)[1])
region.close()
"""


@only_root
@pytest.mark.parametrize("option", ["huge=always", "huge=within_size", "huge=advise", "huge=never"])
def test_a_region_gets_the_predicted_pages(short_folder: Path, option: str) -> None:
    command = [sys.executable, "-c", _MAPPED, str(short_folder), "never"]
    shown = mounted("tmpfs", f"size=64M,{option}", short_folder, *command)
    shmem_enabled = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    page, _ = tmpfs_page(Mount("", "tmpfs", (option,)), shmem_enabled)
    assert (int(shown) > 0) is (page == 2 << 20)


@pytest.mark.parametrize(
    ("options", "shmem_enabled", "page"),
    [
        (("rw",), "always within_size advise [never] deny force", 4096),
        (("rw", "huge=always"), "always within_size advise [never] deny force", 2 << 20),
        (("rw", "huge=within_size"), "[always] within_size advise never deny force", 2 << 20),
        (("rw", "huge=always"), "always within_size advise never [deny] force", 4096),
        (("rw",), "always within_size advise never deny [force]", 2 << 20),
        (("rw", "huge=always"), "", 4096),  # a kernel without
    ],
)
def test_what_determines_the_page_size_of_a_tmpfs(options: tuple[str, ...], shmem_enabled: str, page: int) -> None:
    small = resource.getpagesize()
    assert tmpfs_page(Mount("/dev/shm", "tmpfs", options), shmem_enabled)[0] == (small if page == 4096 else page)


@only_root
@pytest.mark.skipif(not Path("/sys/kernel/mm/hugepages/hugepages-2048kB").exists(), reason="no pages of 2 MiB")
def test_the_space_of_a_hugetlbfs_is_the_host_s_free_pages(short_folder: Path) -> None:
    """A mount reports only its own limit, if it has one."""
    found = host_finding(str(short_folder), "hugetlbfs", "pagesize=2M", short_folder, "512GiB")
    free = int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text())
    assert found["values"]["free_bytes"] == free * (2 << 20)
    assert found["figure"].startswith("hugetlbfs, ") and " of " not in found["figure"]
    limited = host_finding(str(short_folder), "hugetlbfs", "pagesize=2M,size=8M", short_folder, "512GiB")
    assert limited["values"]["free_bytes"] == min(free * (2 << 20), 8 << 20)
    pages = host_finding("region's pages", "hugetlbfs", "pagesize=2M", short_folder, "512GiB")
    assert (pages["verdict"], pages["values"]["bytes"]) == ("ok", 2 << 20)


@only_root
@pytest.mark.skipif(not Path("/sys/kernel/mm/hugepages/hugepages-1048576kB").exists(), reason="no pages of 1 GiB")
def test_a_hugetlbfs_with_pages_that_are_too_large(short_folder: Path) -> None:
    found = host_finding("region's pages", "hugetlbfs", "pagesize=1G", short_folder, "4GiB")
    assert (found["verdict"], found["cure"]) == ("failed", "mount it with pagesize=2M")


# Software.


def test_every_dependency_is_checked() -> None:
    wanted = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.split("[><=;]", row)[0] for row in wanted if ";" not in row} == set(OURS)


@pytest.mark.parametrize(
    ("version", "seed", "verdict", "told"),
    [
        ("0.23.0", None, "slow", "vLLM 0.23.0 picks a random one"),
        ("0.31.2", None, "slow", "vLLM 0.31.2 picks a random one"),
        ("0.31.2", "0", "ok", "PYTHONHASHSEED=0: shares with engines that have the same"),
        ("0.32.0", None, "ok", "shares with engines that have none either"),
        ("0.33.1", "7", "ok", "PYTHONHASHSEED=7: shares with engines that have the same"),
    ],
)
def test_the_hash_seed(tmp_path: Path, path_with: Any, version: str, seed: str | None, verdict: str, told: str) -> None:
    package = tmp_path / f"vllm-{version}.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    found = report("software", PYTHONPATH=path_with(), **({"PYTHONHASHSEED": seed} if seed else {}))
    assert found.verdict("hash seed") == verdict
    assert told in found.findings["hash seed"]["figure"]
    assert ("PYTHONHASHSEED=0" in found.findings["hash seed"].get("cure", "")) is (verdict == "slow")


@pytest.mark.parametrize(
    ("version", "bounds", "meets"),
    [
        ("0.23.0+cu130", ">=0.23,<0.34", True),
        ("0.33.1rc2", "<0.34,>=0.23", True),
        ("0.34.0", "<0.34,>=0.23", False),
        ("0.9", ">=0.23", False),
        ("25.1", ">=25.1", True),
        ("25", ">=25.1", False),
        ("2.13.0+cpu", "", True),
        ("0.32.0", "==0.32.0", True),
    ],
)
def test_versions(version: str, bounds: str, meets: bool) -> None:
    assert within(version, bounds) is meets


def test_a_package_that_cannot_be_imported(path_with: Any) -> None:
    found = report("software", PYTHONPATH=path_with(numpy="raise ImportError('GLIBC_2.99 not found')"))
    assert (found.code, found.verdict("numpy")) == (1, "failed")
    assert "GLIBC_2.99" in found.findings["numpy"]["figure"]
    assert "pip install 'numpy" in found.findings["numpy"]["cure"]


def test_a_version_that_is_not_supported(tmp_path: Path, path_with: Any) -> None:
    (tmp_path / "vllm-0.9.2.dist-info").mkdir()
    (tmp_path / "vllm-0.9.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.9.2\n")
    found = report("software", PYTHONPATH=path_with())
    assert (found.code, found.verdict("vllm")) == (1, "failed")
    assert found.findings["vllm"]["figure"].startswith("0.9.2, supported is ")


def test_a_plugin_that_vllm_plugins_excludes() -> None:
    found = report("software", VLLM_PLUGINS="lora_filesystem_resolver")
    assert found.verdict("vLLM plugin") == "slow"
    assert "kv_connector_module_path" in found.findings["vLLM plugin"]["cure"]
    assert report("software", VLLM_PLUGINS="kvcache_server").verdict("vLLM plugin") == "ok"


# The endpoint.


def test_a_running_daemon(daemon: Any) -> None:
    before = daemon.status()
    found = report("endpoint", KVCACHE_ENDPOINT=daemon.endpoint, KVCACHE_COPY_STAGE_MIB="16")
    assert found.code == 0, found
    assert {name: finding["verdict"] for name, finding in found.findings.items() if name != "round trip"} == {
        "daemon": "ok",
        "attach": "ok",
        "region": "ok",
        "mapping": "ok",
    }
    assert f"pid {daemon.process.pid}" in found.findings["daemon"]["figure"]
    assert found.findings["mapping"]["values"]["region_bytes"] == found.findings["region"]["values"]["bytes"]
    assert found.findings["round trip"]["values"]["p50_seconds"] > 0
    daemon.wait_status(lambda status: not status["sessions"], "the end of the doctor's sessions")
    assert daemon.status()["namespaces"] == before["namespaces"]


@only_root
def test_a_daemon_without_permission(daemon: Any) -> None:
    daemon.folder.chmod(0o755)
    found = report("endpoint", "--endpoint", daemon.endpoint, nobody=True)
    assert (found.code, found.verdict("daemon")) == (1, "failed")
    assert "--allow-uids 65534" in found.findings["daemon"]["figure"]
    assert "broke" not in found.findings["daemon"]["figure"]


def test_a_daemon_that_is_gone_or_stopped(daemon: Any) -> None:
    daemon.process.send_signal(signal.SIGSTOP)
    found = report("endpoint", "--endpoint", daemon.endpoint)
    assert (found.code, found.verdict("daemon")) == (1, "failed")
    assert "does not complete the handshake" in found.findings["daemon"]["figure"]
    daemon.kill()
    found = report("endpoint", "--endpoint", daemon.endpoint)
    assert (found.code, found.verdict("daemon")) == (1, "failed")
    assert "Connection refused" in found.findings["daemon"]["figure"]


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"KVCACHE_SIZE": "7TiB"}, "choose a smaller size"),
        ({"KVCACHE_SIZE": "1KiB"}, "at least"),
        ({"KVCACHE_REGION_DIR": "/nowhere"}, "no such folder; choose another --region-dir"),
    ],
)
def test_without_a_daemon_its_region_must_fit(short_folder: Path, environ: dict[str, str], told: str) -> None:
    found = report("endpoint", "--endpoint", f"ipc://{short_folder}/kv.sock", **environ)
    assert (found.code, found.verdict("room for a region")) == (1, "failed")
    assert told in found.findings["room for a region"]["figure"]
    assert not list(short_folder.iterdir())


def test_the_folder_of_a_future_endpoint(short_folder: Path) -> None:
    """`doctor` predicts what `serve` does."""
    short_folder.chmod(0o755)
    locked = short_folder / "locked"
    locked.mkdir(mode=0o755)
    own = report("endpoint", "--endpoint", f"ipc://{short_folder}/new/kv.sock")
    assert own.verdict("endpoint's folder") == "ok" and not (short_folder / "new").exists()
    assert (
        "mode 0755"
        in report("endpoint", "--endpoint", f"ipc://{locked}/kv.sock").findings["endpoint's folder"]["figure"]
    )
    (short_folder / "file").touch()
    file = report("endpoint", "--endpoint", f"ipc://{short_folder}/file/kv.sock")
    assert (file.code, file.verdict("endpoint's folder")) == (1, "failed")


@only_root
def test_the_folder_of_an_endpoint_without_permission(short_folder: Path) -> None:
    short_folder.chmod(0o755)
    for endpoint in (f"ipc://{short_folder}/kv.sock", f"ipc://{short_folder}/new/kv.sock"):
        found = report("endpoint", "--endpoint", endpoint, nobody=True)
        assert (found.code, found.verdict("endpoint's folder")) == (1, "failed")
        assert f"uid 65534 may not write to {short_folder}" in found.findings["endpoint's folder"]["figure"]
        assert "install -d -o USER" in found.findings["endpoint's folder"]["cure"]
    foreign = short_folder / "foreign"
    foreign.mkdir()
    os.chown(foreign, 12345, -1)
    foreign.chmod(0o777)
    found = report("endpoint", "--endpoint", f"ipc://{foreign}/kv.sock", nobody=True)
    assert found.verdict("endpoint's folder") == "failed"
    assert "uid 12345, who could take the endpoint over" in found.findings["endpoint's folder"]["figure"]


# Devices: torch is where their runtimes are met; those here are broken, or for hardware that this host has not.

_TORCH = """
class version: hip = None
__version__ = "9.9"
class Runtime:
    def __init__(self, count=0, error=""): self.count, self.error = count, error
    def is_available(self): return bool(self.count)
    def device_count(self): return self.count
    def empty_cache(self): pass
    def set_device(self, index):
        if self.error: raise RuntimeError(self.error)
cuda = Runtime({cuda})
xpu = Runtime({xpu})
"""


def test_a_crashing_check_does_not_hide_other_results(path_with: Any) -> None:
    found = report("devices", PYTHONPATH=path_with(torch="import os; os.kill(os.getpid(), 9)"))
    assert found.code == 1
    assert found.verdict("device-copies") == "failed"
    assert found.findings["device-copies"]["figure"] == "ended by SIGKILL"
    assert found.verdict("cpu self-test") == "ok"
    copies = found.findings["cpu copies"]
    assert copies["verdict"] in ("ok", "slow")
    assert copies["how"] == "measured"
    assert all(copies["values"][f"{way}{of}_gbs"] > 0 for way in ("save", "load") for of in ("", "_plain"))


@pytest.mark.parametrize(
    ("torch", "name", "verdict", "told"),
    [
        (
            "import sys; print('hello', file=sys.stderr); sys.exit('no licence')",
            "device-copies",
            "failed",
            "exit status 1; its last line: no licence",
        ),
        ("raise OSError('libcudart.so.13: cannot open')", "torch", "failed", "import torch: OSError: libcudart.so.13"),
        (_TORCH.format(cuda="", xpu=""), "cuda", "untested", "torch 9.9 finds no device"),
        (_TORCH.format(cuda="2, 'CUDA error: no kernel image'", xpu=""), "cuda:1", "failed", "no kernel image"),
        (_TORCH.format(cuda="1, 'CUDA error: out of memory'", xpu=""), "cuda:0", "untested", "no memory of the device"),
        (_TORCH.format(cuda="", xpu="1"), "xpu", "untested", "KV cache on 'xpu'"),
    ],
)
def test_broken_or_missing_accelerators(
    path_with: Any, monkeypatch: pytest.MonkeyPatch, torch: str, name: str, verdict: str, told: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", path_with(torch=torch))
    found = {finding.name: finding for finding in ask("device-copies")}
    assert found[name].verdict == verdict
    assert told in found[name].figure


def test_an_npu_runtime_that_cannot_be_loaded(path_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch loads it automatically by default, and then cannot be imported either."""
    broken = "raise ImportError('libascend_hal.so: cannot open shared object file')"
    loads = "import os\nif os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD', '1') == '1': import torch_npu\n"
    monkeypatch.setenv("PYTHONPATH", path_with(torch=loads + _TORCH.format(cuda="", xpu=""), torch_npu=broken))
    (npu,) = [finding for finding in ask("device-copies") if finding.name == "npu"]
    assert npu.verdict == "untested"
    assert "libascend_hal.so" in npu.figure
    assert "set_env.sh" in npu.cure


def test_a_device_that_never_answers_times_out(path_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = "import sys, threading; print('stuck in a driver', file=sys.stderr); threading.Event().wait()"
    monkeypatch.setenv("PYTHONPATH", path_with(torch=stuck))
    (finding,) = ask("device-copies", seconds=2)
    assert finding.verdict == "failed"
    assert finding.figure == "not finished after 2 s; its last line: stuck in a driver"


# The report.


def test_unknown_sections_are_refused(short_folder: Path) -> None:
    assert run("hots").returncode == 2
    failed = run("--endpoint", "tcp://127.0.0.1:1")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert "only ipc://" in failed.stderr


def test_the_table_and_its_exit_code(short_folder: Path) -> None:
    shown = run("host", "endpoint", "--endpoint", f"ipc://{short_folder}/kv.sock")
    assert shown.returncode == 1
    lines = shown.stdout.splitlines()
    assert lines[0] == "host" and "endpoint" in lines
    (daemon,) = [number for number, line in enumerate(lines) if line.startswith("  failed    daemon  ")]
    assert lines[daemon + 1].strip().startswith("-> start one with `kvcache-server serve")
    assert lines[-1].endswith("1 failed (daemon), 0 untested")


def test_the_text_of_a_result() -> None:
    good = CheckResult("cpu copies", "ok", "6 GB/s", how="measured")
    bad = CheckResult("npu", "untested", "no NPU", "buy one")
    assert describe(good) == "  ok        cpu copies            measured: 6 GB/s"
    assert describe(bad) == "  untested  npu                   no NPU\n" + " " * 34 + "-> buy one"
    assert describe(CheckResult("npu", "failed", "two\nlines")).endswith("two lines")
    assert summary([good, good, bad]) == "2 ok, 0 slow, 0 failed, 1 untested (npu)"


def test_a_failing_check_does_not_stop_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def page_tables(config: Config) -> Iterator[CheckResult]:
        raise ValueError("a kernel of 2099")

    def cores(config: Config) -> Iterator[CheckResult]:
        yield CheckResult("cores", "ok", "2")

    monkeypatch.setitem(doctor.SECTIONS, "host", (page_tables, cores))
    broken, fine = doctor.examine("host", Config())
    assert (broken.name, broken.verdict) == ("page tables", "failed")
    assert "ValueError: a kernel of 2099" in broken.figure
    assert fine.verdict == "ok"

"""`install-service` into a test root, checked with systemd's own tools."""

from __future__ import annotations

import configparser
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from kvcache_proto.region import plan_geometry
from kvcache_tools.install_service import FOLDERS

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd's tools are not here")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make users in a root")

ETC = {
    "etc/systemd/system/kvcache-server.service",
    "etc/systemd/system/kvcache-server@.service",
    "etc/systemd/system/kvcache-tier@.service",
    "etc/systemd/system/run-kvregion.mount",
    "etc/sysusers.d/kvcache.conf",
    "etc/tmpfiles.d/kvcache.conf",
    "etc/kvcache/kvcache.toml",
}
EXPOSURE = 12  # of 100: what systemd-analyze calls OK ends at 50


@pytest.fixture
def program(short_folder: Path) -> Path:
    """A kvcache-server that everyone may run."""
    short_folder.chmod(0o755)
    program = short_folder / "kvcache-server"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvcache_server "$@"\n')
    program.chmod(0o755)
    return program


def install(root: Path, program: Path | str, *flags: str, code: int = 0, home: str = "/home/x") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvcache_server", "install-service", f"--root={root}", f"--program={program}", *flags],
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "XDG_CONFIG_HOME"} | {"HOME": home},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def files(root: Path) -> set[str]:
    return {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file() and not file.is_symlink()}


@needs_systemd
@needs_root
def test_installation_into_a_root(tmp_path: Path, program: Path) -> None:
    said = install(tmp_path, program, "--size", "30GiB")
    assert files(tmp_path) >= ETC
    unit = (tmp_path / "etc/systemd/system/kvcache-server.service").read_text()
    assert f"ExecStart={program} serve --config /etc/kvcache/kvcache.toml\n" in unit
    assert 'size = "30GiB"' in (tmp_path / "etc/kvcache/kvcache.toml").read_text()
    assert os.path.lexists(tmp_path / "etc/systemd/system/multi-user.target.wants/kvcache-server.service")
    _, _, uid, gid, *_ = (tmp_path / "etc/passwd").read_text().split(":")
    folder = (tmp_path / "run/kvcache").stat()
    assert (folder.st_uid, folder.st_gid, stat.S_IMODE(folder.st_mode)) == (int(uid), int(gid), 0o2755)
    assert all(f"wrote        {tmp_path}/{name}" in said for name in ETC)
    assert "systemctl daemon-reload" not in said  # of this host

    before = {name: (tmp_path / name).stat().st_mtime_ns for name in ETC}
    assert "wrote" not in install(tmp_path, program)
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in ETC} == before


@needs_systemd
@needs_root
def test_changes_by_an_operator_are_kept(tmp_path: Path, program: Path) -> None:
    install(tmp_path, program, "--no-enable")
    assert not os.path.lexists(tmp_path / "etc/systemd/system/multi-user.target.wants")
    changed = dict.fromkeys(
        (
            "etc/kvcache/kvcache.toml",
            "etc/systemd/system/run-kvregion.mount",
            "etc/systemd/system/kvcache-server.service",
        ),
        "# changed\n",
    )
    for name, text in changed.items():
        (tmp_path / name).write_text(text)
    said = install(tmp_path, program, "--size", "7GiB")
    now = {name: (tmp_path / name).read_text() for name in changed}
    assert [name for name in changed if now[name] == "# changed\n"] == list(changed)[
        :2
    ]  # a unit is ours: use a drop-in
    assert "is kept: set its size by hand" in said


def test_a_dry_run_changes_nothing(tmp_path: Path, program: Path) -> None:
    said = install(tmp_path, program, "--dry-run", "--size", "2GiB")
    assert files(tmp_path) == set()
    assert all(f"would write  {tmp_path}/{name}" in said for name in ETC)
    assert "    Type=notify\n" in said and '    size = "2GiB"\n' in said
    assert f"would run    systemctl --root={tmp_path} enable kvcache-server.service\n" in said


@needs_systemd
@needs_root
def test_an_instance_and_huge_pages(tmp_path: Path, program: Path) -> None:
    install(tmp_path, program)
    install(tmp_path, program, "--instance", "red", "--huge-pages", "--size", "1GiB")
    assert 'endpoint = "ipc:///run/kvcache-red/kvcache.sock"' in (tmp_path / "etc/kvcache/red.toml").read_text()
    assert '\n# http = "' in (tmp_path / "etc/kvcache/red.toml").read_text()
    assert (tmp_path / "run/kvcache-red").is_dir()
    assert os.path.lexists(tmp_path / "etc/systemd/system/multi-user.target.wants/kvcache-server@red.service")
    mount = (tmp_path / "etc/systemd/system/run-kvregion.mount").read_text()
    assert "Type=hugetlbfs" in mount and "pagesize=2M" in mount
    reserved = (tmp_path / "etc/sysctl.d/kvcache.conf").read_text()
    regions = sum(plan_geometry(bytes(16), size << 30).region_bytes for size in (4, 1))  # those of both daemons
    assert reserved == f"vm.nr_hugepages = {regions >> 21}\n" and not regions % (2 << 20)
    install(tmp_path, program)
    assert (tmp_path / "etc/systemd/system/run-kvregion.mount").read_text() == mount


def test_for_a_user(tmp_path: Path, program: Path) -> None:
    said = install(tmp_path, program, "--user", "--size", "1GiB")
    config = "home/x/.config/"
    assert files(tmp_path) == {config + "systemd/user/kvcache-server.service", config + "kvcache/kvcache.toml"}
    wants = tmp_path / config / "systemd/user/default.target.wants/kvcache-server.service"
    assert wants.resolve() == (tmp_path / config / "systemd/user/kvcache-server.service").resolve()
    assert "enable-linger" in said
    assert "wrote" not in install(tmp_path, program, "--user")


@pytest.mark.parametrize(
    ("flags", "code", "told"),
    [
        (["--instance", "a/b"], 2, "instance 'a/b': at most 32 letters"),
        (["--instance", "kvcache"], 2, "and not `kvcache`"),
        (["--user", "--instance", "a"], 2, "--user excludes"),
        (["--size", "many"], 2, "size 'many': a number of bytes"),
        (["--size", "0"], 2, "size 0: at least 1 byte"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, program: Path, flags: list[str], code: int, told: str) -> None:
    assert told in install(tmp_path, program, *flags, code=code)
    assert files(tmp_path) == set()


def test_a_masked_unit_stays_masked(tmp_path: Path, program: Path) -> None:
    unit = tmp_path / "etc/systemd/system/kvcache-server.service"
    unit.parent.mkdir(parents=True)
    unit.symlink_to("/dev/null")
    assert f"{unit} is masked: to use it, run `systemctl unmask {unit.name}`" in install(tmp_path, program, code=2)
    assert os.readlink(unit) == "/dev/null" and files(tmp_path) == set()


def test_other_masked_units_are_left_unchanged(tmp_path: Path, program: Path) -> None:
    masked = [tmp_path / "etc" / name for name in ("systemd/system/run-kvregion.mount", "tmpfiles.d/kvcache.conf")]
    for path in masked:
        path.parent.mkdir(parents=True)
        path.symlink_to("/dev/null")
    said = install(tmp_path, program, "--dry-run")
    assert all(f"masked       {path}\n" in said for path in masked)
    assert all(os.readlink(path) == "/dev/null" for path in masked)


def test_an_obstacle_is_named(tmp_path: Path, program: Path) -> None:
    (tmp_path / "etc").write_text("a file")
    said = install(tmp_path, program, code=2)
    assert f"{tmp_path}/etc/systemd/system/run-kvregion.mount: Not a directory" in said and "Traceback" not in said


@pytest.mark.parametrize("odd", ["/opt/a b/kvcache-server", "/opt/%n/kvcache-server", "kvcache-server", "/opt/$X"])
def test_a_path_that_systemd_would_misread(tmp_path: Path, odd: str) -> None:
    for flags in ([], ["--user"]):
        assert f"program {odd}: an absolute path" in install(tmp_path, odd, *flags, code=2)
    assert files(tmp_path) == set()


@needs_root
def test_an_interpreter_below_a_home_is_not_hidden_from_the_daemon(tmp_path: Path, program: Path) -> None:
    home = Path(tempfile.mkdtemp(prefix="kv", dir="/home"))
    try:
        home.chmod(0o755)
        shutil.copy(os.path.realpath(sys.executable), home / "python3")
        python = program.with_name("python")  # as in an environment that was made with that interpreter
        python.symlink_to(home / "python3")
        found = Path(sysconfig.get_path("stdlib")).parents[1]
        done = subprocess.run(
            [python, "-m", "kvcache_server", "install-service", f"--root={tmp_path}", "--dry-run"],
            capture_output=True,
            text=True,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONHOME": str(found)},
        )
        assert done.returncode == 0, done.stderr
        assert "ProtectHome=read-only" in done.stdout and "ProtectHome=yes" not in done.stdout
    finally:
        shutil.rmtree(home)


@needs_root
def test_a_program_that_the_user_of_the_daemon_cannot_reach(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(0o700)
    (closed / "kvcache-server").write_text("#!/bin/sh\n")
    (closed / "kvcache-server").chmod(0o755)
    (closed / "python").symlink_to(sys.executable)
    done = subprocess.run(
        [closed / "python", "-m", "kvcache_server", "install-service", f"--root={tmp_path}/root"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.returncode == 2
    assert f"{closed} is closed to others" in done.stderr
    assert not (tmp_path / "root").exists()


@needs_systemd
def test_systemd_accepts_the_units(tmp_path: Path, program: Path) -> None:
    units = Path(FOLDERS[1])
    for name in (
        "kvcache-server.service",
        "kvcache-server@.service",
        "kvcache-tier@.service",
        "run-kvregion.mount",
        "vllm@.service",
    ):
        text = (units / name).read_text().replace("/usr/local/bin/kvcache-server", str(program))
        (tmp_path / name).write_text(text.replace("/opt/vllm/bin/vllm", str(program)))
    (tmp_path / "user").mkdir()
    text = (units / "user/kvcache-server.service").read_text().replace("/usr/local/bin/kvcache-server", str(program))
    (tmp_path / "user/kvcache-server.service").write_text(text)
    host = ["kvcache-server.service", "kvcache-server@red.service", "run-kvregion.mount", "vllm@a.service"]
    for whose, folder, names in (([], tmp_path, host), (["--user"], tmp_path / "user", ["kvcache-server.service"])):
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", *whose, *names],
            capture_output=True,
            text=True,
            env=os.environ | {"SYSTEMD_UNIT_PATH": f"{folder}:", "XDG_RUNTIME_DIR": str(tmp_path)},
        )
        assert (done.returncode, done.stderr) == (0, "")
        analysed = ["systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE}", str(folder / names[0])]
        if not whose:
            done = subprocess.run(analysed, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout


def test_the_template_equals_the_unit() -> None:
    unit, template = ((Path(FOLDERS[1]) / f"kvcache-server{at}.service").read_text().splitlines() for at in ("", "@"))
    differing = [(ours, its) for ours, its in zip(unit, template, strict=True) if ours != its]
    changed = [line.split("=")[0] for line, _ in differing]
    assert changed == ["Description", "ExecStart", "RuntimeDirectory", "CacheDirectory"]
    assert all("%i" in its for _, its in differing)
    assert (
        "ipc:///run/kvcache/" in (Path(FOLDERS[1]) / "kvcache.toml").read_text()
    )  # of an instance: /run/kvcache-NAME/
    assert differing[2] == ("RuntimeDirectory=kvcache", "RuntimeDirectory=kvcache-%i")


def test_the_unit_of_an_engine_wants_but_does_not_require_the_daemon() -> None:
    text = (Path(FOLDERS[1]) / "vllm@.service").read_text()
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text)
    assert "Wants=kvcache-server.service\n" in text and "kvcache-server.service" in unit["Unit"]["After"]
    assert not {"Requires", "BindsTo", "PartOf", "Requisite"} & set(unit["Unit"])


def test_the_wheel_contains_the_units() -> None:
    assert (FOLDERS[1] / "kvcache-server.service").exists()
    project = (FOLDERS[1].parents[1] / "pyproject.toml").read_text()
    assert '"deploy/systemd" = "kvcache_tools/systemd"' in project
    assert FOLDERS[0].name == "systemd" and FOLDERS[0].parent.name == "kvcache_tools"

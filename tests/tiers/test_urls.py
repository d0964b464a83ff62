"""A wrong URL of a tier gets an error that helps, and that a log may have: no password is in it."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kvcache_proto.errors import ConfigError
from kvcache_tiers.backend import find_opener


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("tape://user:s3cret@host/", r"the kinds are az, disk, gs, mooncake, redis, "),
        ("disk://[s3cret/", "a tier of disk: this is not a URL"),
        ("disk:/folder?size=1GiB&password=s3cret", "unknown option password; there are size, direct"),
        ("disk://user:s3cret@host/folder?size=1GiB", "disk://host/folder: a folder and its size"),
        ("redis://user:s3cret@host/?colour=red", "redis://host/: unknown option colour"),
        ("mooncake://user:s3cret@host/", "mooncake://host/: a master"),
        ("s3://user:s3cret@bucket/", "credentials belong in the environment"),
    ],
)
def test_an_error_helps_and_has_no_password(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        find_opener(url)(url, memoryview(bytearray(4096)))
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(("scheme", "module"), [("redis", "redis"), ("s3", "obstore")])
def test_a_missing_package_is_named_with_the_extra_that_has_it(scheme: str, module: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from kvcache_tiers.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", code, f"{scheme}://bucket/", "--endpoint", "ipc:///nowhere.sock"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    extra = "objects" if scheme == "s3" else scheme
    assert ended.returncode == 2, ended.stderr
    assert f"pip install 'kvcache-server[{extra}]'" in ended.stderr


def test_bench_measures_a_store_and_leaves_nothing_there(tmp_path: Path) -> None:
    url = f"disk:{tmp_path}/tier?size=64MiB"
    command = [sys.executable, "-m", "kvcache_server", "bench", "--tier", url, "--block", "64KiB", "--total", "16MiB"]
    ended = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert all(value > 0 for value in json.loads(ended.stdout).values())
    with closing(find_opener(url)(url, memoryview(bytearray(4096)))) as tier:
        assert len(tier) == 0  # type: ignore[arg-type]
    small = [*command[:-1], "96MiB"]
    ended = subprocess.run(small, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and "is it too small?" in ended.stderr

"""Attacks of other users on the daemon's folders and sockets fail, on every file system.

The tests of that run in /tmp. Some of each kind run again here: on a file system with access control lists, and on one
without, each mounted where nobody else sees it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
FOLDERS, IMPOSTORS = "server/test_folder.py::test_", "integration/test_impostors.py::test_"
OF_OTHERS = [
    # Another user's folder, or links and folders of another user's in the daemon's.
    FOLDERS + "a_folder_of_another_user_is_refused_sticky_or_not[0o1777]",
    FOLDERS + "a_folder_that_others_may_write_without_the_sticky_bit_is_refused[0o777]",
    FOLDERS + "a_link_of_another_user_in_place_of_the_folder_is_refused",
    FOLDERS + "a_planted_link_in_place_of_the_session_folder_costs_no_file",
    FOLDERS + "a_session_folder_of_another_user_is_refused",
    # Who serves.
    IMPOSTORS + "a_daemon_of_another_user_is_refused_and_named",
    IMPOSTORS + "an_impostor_receives_nothing",
    IMPOSTORS + "a_genuine_door_beside_a_false_socket",
    # What lies where the sockets go.
    *(
        FOLDERS + f"no_socket_replaces_another_user_s_file[{kind}-kv.sock]"
        for kind in ("theirs", "fifo", "device", "another program's")
    ),
    FOLDERS + "a_daemon_without_root_names_files_of_other_users[kv.sock-socket]",
    FOLDERS + "a_daemon_without_root_names_files_of_other_users[kv.door-file]",
]

pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else, and mount"),
    pytest.mark.skipif(not shutil.which("unshare"), reason="no unshare here"),
]


@pytest.mark.parametrize("kind", ["tmpfs", pytest.param("ramfs", marks=pytest.mark.long)])
def test_other_users_on_another_file_system(short_folder: Path, kind: str) -> None:
    mount = f'mount -t {kind} -o mode=1777 {kind} "$0" && exec "$@"'
    mounted = ["unshare", "--mount", "sh", "-c", mount, str(short_folder)]
    probe = subprocess.run([*mounted, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no file system can be mounted here: {probe.stderr.strip()}")
    found = subprocess.run(
        [*mounted, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        + [str(TESTS / each) for each in OF_OTHERS],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TEST_FOLDERS": str(short_folder)},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    (passed,) = re.findall(r"^(\d+) passed in", found.stdout, re.MULTILINE)
    assert int(passed) == len(OF_OTHERS) + 1, found.stdout  # one of them has two kinds

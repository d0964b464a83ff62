"""Hosts of one network on this machine: network namespaces on a bridge, where the test itself is, too."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

NAMES = ("a", "b")


class Network:
    """`address` is the test's own; `within[name]` is a command that runs another one on a host, `addresses[name]` its
    address."""

    def __init__(self) -> None:
        number = os.getpid()
        self.bridge = f"kvbr{number % 10**9}"
        subnet = f"10.{64 + number % 64}.{number // 64 % 256}"
        self.address = f"{subnet}.1"
        self.addresses = {name: f"{subnet}.{at}" for at, name in enumerate(NAMES, 2)}
        self._spaces = {name: f"kvns{number}{name}" for name in NAMES}
        self.within = {name: ("ip", "netns", "exec", space) for name, space in self._spaces.items()}

    def build(self) -> None:
        """Raises OSError or subprocess.CalledProcessError where that cannot be done here."""
        _ip(f"link add {self.bridge} type bridge")
        _ip(f"addr add {self.address}/24 dev {self.bridge}")
        _ip(f"link set {self.bridge} up")
        for name, space in self._spaces.items():
            outside = f"{self.bridge}{name}"[-15:]
            _ip(f"netns add {space}")
            _ip(f"link add {outside} type veth peer name eth0 netns {space}")
            _ip(f"link set {outside} master {self.bridge} up")
            _ip(f"-n {space} addr add {self.addresses[name]}/24 dev eth0")
            _ip(f"-n {space} link set eth0 up")
            _ip(f"-n {space} link set lo up")

    def remove(self) -> None:
        for space in self._spaces.values():  # and with it its end of a link, and the other end
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _ip(f"netns del {space}")
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            _ip(f"link del {self.bridge}")


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Raises OSError, which says why, where it cannot be had: it takes root, and the program `ip`."""
    built = Network()
    try:
        try:
            built.build()
        except subprocess.CalledProcessError as error:
            raise OSError(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from None
        yield built
    finally:
        built.remove()


def _ip(line: str) -> None:
    subprocess.run(["ip", *line.split()], check=True, capture_output=True, text=True)

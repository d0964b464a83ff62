"""The service manager's side of sd_notify(3): a real datagram socket that receives a daemon's notifications."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

PATIENCE = 30.0


class Ear:
    """Hears what a daemon says at `address`, a path, or a name behind an `@`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.heard: list[dict[str, str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def environ(self, watchdog: float = 0.0) -> dict[str, str]:
        return {"NOTIFY_SOCKET": self.address} | ({"WATCHDOG_USEC": str(int(watchdog * 1e6))} if watchdog else {})

    def hear(self, patience: float = PATIENCE) -> dict[str, str]:
        """Return the next message. Raises TimeoutError where none comes."""
        self._socket.settimeout(patience)
        lines = self._socket.recv(4096).decode().splitlines()
        self.heard.append(dict(line.split("=", 1) for line in lines))
        return self.heard[-1]

    def wait(self, found: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        """Return the next message for which `found` holds, whatever comes before it."""
        while not found(message := self.hear()):
            pass
        return message

    def wait_ready(self) -> dict[str, str]:
        return self.wait(lambda message: "READY" in message)

    def forget(self) -> None:
        """Throw away what has come already."""
        self._socket.setblocking(False)
        try:
            while True:
                self._socket.recv(4096)
        except BlockingIOError:
            pass

    def starves(self, watchdog: float) -> bool:
        """Whether no keep-alive arrives for `watchdog` seconds: then the manager acts."""
        try:
            while "WATCHDOG" not in self.hear(watchdog):
                pass
        except TimeoutError:
            return True
        return False

    def close(self) -> None:
        self._socket.close()


def an_ear(folder: Path, kind: str = "path") -> Ear:
    return Ear(f"@kvcache-test-{os.getpid()}-{folder.name}" if kind == "abstract" else str(folder / "notify"))

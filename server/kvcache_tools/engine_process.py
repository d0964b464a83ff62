"""A vLLM engine in a process of its own, for commands that start one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcache_tools.daemon_process import Failed, finish, tail

CONNECTOR = "kvcache_client.connector"  # only a name: the engine imports it, the daemon never does
QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO", "TOKENIZERS_PARALLELISM": "false"}


def engine_environment(folder: Path, ranks: int) -> dict[str, str]:
    """Return what engines of `ranks` tensor-parallel ranks need, beside QUIET; their files go to `folder`."""
    environment = {
        "PYTHONHASHSEED": "0",  # older engines derive their block hashes from it
        "VLLM_RPC_BASE_PATH": str(folder),  # for vLLM's sockets
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # and torch's cache
    }
    if ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        bound = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": bound}
    return environment


def transfer_config(endpoint: str, **settings: Any) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config` for the daemon at `endpoint`, with these settings of the connector."""
    return {
        "kv_connector": "KVCacheServerConnector",
        "kv_connector_module_path": CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"endpoint": endpoint, **settings},
    }


class EngineProcess:
    """A `demo_engine` process, or one with the same interface; its log goes to a file."""

    def __init__(
        self,
        name: str,
        folder: Path,
        environment: dict[str, str],
        command: Sequence[str] = (sys.executable, "-m", "kvcache_tools.demo_engine"),
    ) -> None:
        self.name = name
        self.log = folder / f"engine-{name}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | QUIET | environment,
                text=True,
                bufsize=1,
            )

    def ask(self, call: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # answer() reports the reason
            self._process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")

    def answer(self) -> Any:
        """Wait for the answer to the last `ask`. Raises Failed, with the end of the log, if the engine has exited."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Failed(f"engine {self.name} exited with status {self._process.wait()}:\n{tail(self.log)}")
        return json.loads(line)

    def call(self, call: str, **arguments: Any) -> Any:
        self.ask(call, **arguments)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        finish(self._process, 20)
        self._process.stdout.close()

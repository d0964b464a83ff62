"""vLLM's OpenAI server as a process, and clients that stream from it and hang up on it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

_SHARED = re.compile(r" /dev/shm/(psm_|sem\.mp-|vllm_dist_)\S+$")


def shared_memory(pid: int) -> set[str]:
    """Return what the process and those below it share in memory: where they are killed, it stays."""
    first = psutil.Process(pid)
    found: set[str] = set()
    for process in (first, *first.children(recursive=True)):
        maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        found.update(line.split(maxsplit=5)[5] for line in maps if _SHARED.search(line))
    return found


def free_port() -> int:
    """Return a port that is free, also in half a minute, when the server binds it: the kernel gives it to nobody."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.randbelow(low // 2) + low // 2
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Refused(Exception):
    """The server's answer is an error."""


START_SECONDS = 240.0  # about 25 on two quiet cores


class OpenAIServer:
    """`python -m vllm.entrypoints.openai.api_server` on a free port of the loopback interface.

    `name` is the model's name in requests; `arguments` are those of the command line.
    """

    def __init__(self, log: Path, environment: dict[str, str], model: str, *arguments: str) -> None:
        self._log = log
        self._shared: set[str] = set()
        self._folder = tempfile.mkdtemp(prefix="kve")  # vLLM leaves its sockets there
        self.port = free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--model", model, "--served-model-name", "toy", *arguments]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={
                    **os.environ,
                    **environment,
                    "VLLM_RPC_BASE_PATH": self._folder,
                    "TORCHINDUCTOR_CACHE_DIR": f"{self._folder}/inductor",
                },
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_ready(self) -> OpenAIServer:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            assert self.process.poll() is None, f"the server ended:\n{self.log[-6000:]}"
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10).close()
                self._shared = shared_memory(self.process.pid)
                return self
            time.sleep(0.1)  # between two knocks
        raise AssertionError(f"the server is not ready after {START_SECONDS} s:\n{self.log[-6000:]}")

    def request(self, prompt: list[int], max_tokens: int, stream: bool, **fields: Any) -> http.client.HTTPConnection:
        """Send a completion request, greedy and for token ids; nothing has been read of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=200)
        body: dict[str, Any] = {"model": "toy", "prompt": prompt, "max_tokens": max_tokens, "stream": stream}
        body |= {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True, **fields}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def complete(self, prompt: list[int], max_tokens: int, stream: bool = False, **fields: Any) -> list[int]:
        """Return the tokens of a whole answer; `fields` go into the request's JSON.

        Raises Refused, and OSError or HTTPException where the server goes.
        """
        with contextlib.closing(self.request(prompt, max_tokens, stream, **fields)) as connection:
            response = connection.getresponse()
            if response.status != 200:
                raise Refused(response.read())
            if stream:
                return [token for tokens in events(response) for token in tokens]
            (choice,) = json.loads(response.read())["choices"]
            return list(choice["token_ids"])

    def chat(self, *parts: dict[str, Any], max_tokens: int = 8) -> tuple[list[int], int]:
        """Ask with one message of several parts; return the answer's tokens, and how many of the prompt were cached."""
        choice, cached = self.converse([{"role": "user", "content": parts}], max_tokens, ignore_eos=True)
        return list(choice["token_ids"]), cached

    def converse(self, messages: list[dict[str, Any]], max_tokens: int, **fields: Any) -> tuple[dict[str, Any], int]:
        """Return the greedy answer to the last message, and how many of the prompt's tokens were cached."""
        body = {"model": "toy", "messages": messages, "max_tokens": max_tokens, "temperature": 0.0, **fields}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body | {"return_token_ids": True}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=200) as response:
                answer = json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise Refused(error.read()) from None
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return answer["choices"][0], cached

    def hang_up_in_mid_stream(self, prompt: list[int], max_tokens: int, chunks: int) -> None:
        """Read `chunks` pieces of an answer that has more, then close the connection."""
        connection = self.request(prompt, max_tokens, stream=True)
        response = connection.getresponse()
        assert response.status == 200
        read = events(response)
        for _ in range(chunks):
            next(read)
        hang_up(connection)

    def hang_up_before_an_answer(self, prompt: list[int], begun: Callable[[], bool]) -> bool:
        """Close the connection once `begun()` holds. Returns whether that was before the first token."""
        connection = self.request(prompt, 4, stream=False)
        while not begun():
            time.sleep(0.001)
        early = not select.select([connection.sock], [], [], 0)[0]
        hang_up(connection)
        return early

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def kill(self) -> None:
        """kill -9 of the server and of all its processes."""
        if self.process.poll() is None:
            self._shared.update(shared_memory(self.process.pid))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; return the exit code."""
        self.process.terminate()
        return self.process.wait(START_SECONDS)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        for path in self._shared:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def events(response: http.client.HTTPResponse) -> Any:
    """Yield the token ids of each server-sent event until the answer is said to be whole. Raises as `complete`."""
    while (line := response.readline()).endswith(b"\n"):
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            return
        told = json.loads(line.removeprefix(b"data: "))
        if "error" in told:
            raise Refused(told)
        yield [token for choice in told["choices"] for token in choice["token_ids"] or []]
    raise http.client.IncompleteRead(b"")


def hang_up(connection: http.client.HTTPConnection) -> None:
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()

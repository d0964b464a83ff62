"""Real vLLM engines for the end-to-end tests: each a process, driven by JSON lines; and vLLM's OpenAI servers."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai_server import OpenAIServer, shared_memory

from kvcache_tools import demo_model, engine_process

# It is not imported: that takes seconds, in each process that collects tests. A folder of tests is called vllm, too.
if getattr(find_spec("vllm"), "origin", None) is None:
    pytest.skip("end to end: needs vLLM (`pip install -e .[cpu,test]`)", allow_module_level=True)

BLOCK = 32
LAYERS, KV_HEADS, HEAD = 4, 2, 32
BLOCK_BYTES = LAYERS * 2 * KV_HEADS * HEAD * BLOCK * 4  # float32
MAX_LEN = 1024
# A canary is a request that chance chooses to be computed although it is cached.
SETTINGS = {"deadline_ms": 5000, "block_size": BLOCK, "gate": "off", "canary_every": 0}
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep the run's other workers out."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Mother:
    """A connection to the process that forks the engines of all workers; mother.py says why. The first starts it."""

    def __init__(self, folder: Path) -> None:
        # An abstract name: it has no length limit that a folder's could exceed, and goes with the process.
        name = b"\0kvcache-mother-" + hashlib.sha256(os.fsencode(folder)).hexdigest().encode()
        lock, self._log = folder / "mother.lock", folder / "mother.log"
        self._orders = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with locked(lock):
            try:
                self._orders.connect(name)
            except ConnectionRefusedError:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, self._log.open("ab") as output:
                    listener.bind(name)
                    listener.listen(64)
                    subprocess.run(
                        [sys.executable, str(Path(__file__).parent / "mother.py"), str(listener.fileno()), str(lock)],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        pass_fds=[listener.fileno()],
                        env={**os.environ, **_ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
                        check=True,
                    )
                    self._orders.connect(name)

    def bear(self, environment: dict[str, str], *descriptors: int) -> int:
        """Return the process id of a new engine, which has these descriptors."""
        with contextlib.suppress(BrokenPipeError):
            socket.send_fds(self._orders, [json.dumps(environment).encode()], descriptors)
        answer = self._orders.recv(64)
        assert answer, f"no engine can be forked:\n{self._log.read_text(errors='replace')[-6000:]}"
        return int(json.loads(answer))

    def close(self) -> None:
        self._orders.close()


class EngineProcess:
    """One engine; `ask` sends a request of engine.py and returns its answer."""

    def __init__(self, mother: Mother, log: Path, env: dict[str, str] | None = None) -> None:
        self.log_path = log
        self._sockets = tempfile.mkdtemp(prefix="kve")  # vLLM leaves them there
        self._shared: set[str] = set()
        their_commands, commands = os.pipe()
        answers, their_answers = os.pipe()
        with log.open("ab") as output:
            theirs = (their_commands, their_answers, output.fileno())
            self.pid = mother.bear({"VLLM_RPC_BASE_PATH": self._sockets, **(env or {})}, *theirs)
        self._ended = os.pidfd_open(self.pid)  # the mother does not reap it before she is asked for another one
        os.close(their_commands)
        os.close(their_answers)
        self._commands, self._answers = os.fdopen(commands, "w"), os.fdopen(answers)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def ask(self, op: str, **arguments: Any) -> Any:
        self._commands.write(json.dumps({"op": op, **arguments}) + "\n")
        self._commands.flush()
        line = self._answers.readline()
        assert line, f"the engine ended:\n{self.log[-6000:]}"
        answer = json.loads(line)
        assert "ok" in answer, f"{answer}\n{self.log[-6000:]}"
        return answer["ok"]

    def open(self, **options: Any) -> None:
        """Load the model. What vLLM shares in memory is noted: an engine that is killed leaves it there."""
        self.ask("open", **options)
        self._shared.update(shared_memory(self.pid))

    def generate(self, *prompts: list[int], **options: Any) -> list[list[int]]:
        return self.ask("generate", prompts=list(prompts), **options)["tokens"]

    def kill_rank(self, rank: int) -> None:
        """kill -9 of one tensor-parallel rank."""
        children = psutil.Process(self.pid).children(recursive=True)
        (process,) = [child for child in children if f"Worker_TP{rank}" in " ".join(child.cmdline())]
        process.kill()

    def kill(self) -> None:
        """kill -9 of all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        assert self._has_ended(60)

    def _has_ended(self, seconds: float) -> bool:
        return bool(select.select([self._ended], [], [], seconds)[0])

    def let_go(self) -> None:
        """Have it end, without waiting for that."""
        with contextlib.suppress(BrokenPipeError):  # it was killed, with a request unread
            self._commands.close()

    def close(self) -> None:
        if self._answers.closed:
            return
        self.let_go()
        if not self._has_ended(60):
            self.kill()
        os.close(self._ended)
        self._answers.close()
        shutil.rmtree(self._sockets, ignore_errors=True)
        for path in self._shared:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])),
}


def engine_options(model: str, blocks: int = 256) -> dict[str, Any]:
    return {
        "model": model,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "block_size": BLOCK,
        "max_model_len": MAX_LEN,
        "max_num_seqs": 8,
        "max_num_batched_tokens": MAX_LEN,
        "kv_cache_memory_bytes": blocks * BLOCK_BYTES,
        "seed": 0,
        "disable_log_stats": False,
    }


def connector_options(
    name: str, endpoint: str, extra: dict[str, Any] | None = None, module: str = "kvcache_client.connector"
) -> dict[str, Any]:
    settings = {"endpoint": endpoint, **SETTINGS, **(extra or {})}
    return {"engine_id": name, "kv_connector_module_path": module, "kv_connector_extra_config": settings}


@pytest.fixture(scope="module")
def processes(mother: Mother, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`processes()` is a process in which engines run one after the other: with `start = processes()`,
    `start(name, endpoint, ...)` returns it with the next one, without our connector if there is no endpoint.

    Seconds each, where a process of its own takes half a minute.
    """
    made: list[EngineProcess] = []

    def make() -> Any:
        log = tmp_path_factory.mktemp("reopened") / "engines.log"
        process = EngineProcess(mother, log, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
        made.append(process)

        def start(name: str, endpoint: str | None, extra: dict[str, Any] | None = None, **more: Any) -> EngineProcess:
            module = more.pop("module", "kvcache_client.connector")
            process.ask("environ", **more.pop("env", {}))
            connector = connector_options(name, endpoint, extra, module) if endpoint is not None else None
            process.ask("close")
            process.open(connector=connector, **engine_options(model) | more)
            return process

        return start

    try:
        yield make
    finally:
        for process in made:
            process.close()


@pytest.fixture(scope="module")
def reopened(processes: Any) -> Any:
    return processes()


@pytest.fixture(scope="session")
def of_the_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run have."""
    mine = tmp_path_factory.getbasetemp()
    return mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine


@pytest.fixture(scope="session")
def mother(of_the_run: Path) -> Iterator[Mother]:
    mother = Mother(of_the_run)
    try:
        yield mother
    finally:
        mother.close()


@pytest.fixture(scope="session")
def write_model(mother: Mother, of_the_run: Path) -> Any:
    """`write_model(name, config)` writes a model with random weights, once, and returns its folder."""

    def write(name: str, config: dict[str, Any], op: str = "make_model") -> str:
        folder = of_the_run / name
        with locked(of_the_run / "model.lock"):
            if not folder.exists():
                maker = EngineProcess(mother, of_the_run / "make.log")
                try:
                    maker.ask(op, folder=str(folder) + ".new", config=config)
                finally:
                    maker.close()
                Path(str(folder) + ".new").rename(folder)
        return str(folder)

    return write


@pytest.fixture(scope="session")
def model(write_model: Any) -> str:
    return str(write_model("tiny-llama", MODEL))


@pytest.fixture(scope="session")
def image_model(write_model: Any) -> str:
    """A model that sees images, and has a tokenizer."""
    return str(write_model("tiny-idefics", MODEL, "make_image_model"))


@pytest.fixture(scope="session")
def smollm2(of_the_run: Path) -> str:
    """The demo's language model, in bfloat16, with its tokenizer and chat template."""
    gguf = demo_model.packaged()
    if gguf is None:
        pytest.skip(f"no model: {demo_model.INSTALL}")

    def convert(folder: Path) -> None:
        writer = engine_process.EngineProcess("writer", of_the_run, {})
        try:
            writer.call("convert", gguf=str(gguf), directory=str(folder))
        finally:
            writer.close()

    with locked(of_the_run / "model.lock"):
        return str(demo_model.converted(of_the_run, convert))


@pytest.fixture(scope="module")
def engines(mother: Mother, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`engines(name, endpoint=None, ...)` starts an engine, without our connector where there is no endpoint, and
    with what `connector` says."""
    logs = tmp_path_factory.mktemp("engines")
    started: list[EngineProcess] = []

    def start(
        name: str,
        endpoint: str | None = None,
        extra: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        module: str = "kvcache_client.connector",
        blocks: int = 256,
        connector: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> EngineProcess:
        process = EngineProcess(mother, logs / f"{name}.log", env)
        started.append(process)
        if endpoint is not None:
            connector = connector_options(name, endpoint, extra, module)
        options = engine_options(model, blocks) | arguments
        process.open(connector=connector, **options)
        return process

    try:
        yield start
    finally:
        for process in started:  # all at once: each waits some seconds for its ranks
            process.let_go()
        for process in started:
            process.close()


@pytest.fixture(scope="module")
def openai_servers(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`openai_servers(name, endpoint, extra, *arguments)` starts a server of vLLM, ready; without our connector, if
    there is no endpoint.

    `served` is the folder of another model, which has a tokenizer.
    """
    logs = tmp_path_factory.mktemp("servers")
    started: list[OpenAIServer] = []

    def start(name: str, endpoint: str, extra: dict[str, Any], *arguments: str, served: str = "") -> OpenAIServer:
        connector = {
            "kv_connector": "KVCacheServerConnector",
            "kv_role": "kv_both",
            "engine_id": name,
            "kv_connector_module_path": "kvcache_client.connector",
            "kv_connector_extra_config": {"endpoint": endpoint, **SETTINGS, **extra},
        }
        options = [
            *(() if served else ("--skip-tokenizer-init",)),
            *("--enforce-eager", "--dtype", "float32", "--block-size", str(BLOCK)),
            *("--kv-cache-memory-bytes", str(512 * BLOCK_BYTES), "--seed", "0"),
            *(("--kv-transfer-config", json.dumps(connector)) if endpoint else ()),
        ]
        server = OpenAIServer(logs / f"{name}.log", _ENVIRONMENT, served or model, *options, *arguments)
        started.append(server)  # at once: several may be started at a time
        return server.wait_ready()

    try:
        yield start
    finally:
        for server in started:
            server.close()


class Reference:
    """What an engine without the connector answers, asked once a prompt and one at a time."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._known: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, prompts: list[list[int]], max_tokens: int = 8) -> list[list[int]]:
        answers = []
        for prompt in prompts:
            key = (max_tokens, *prompt)
            if key not in self._known:
                (self._known[key],) = self._engine.generate(prompt, max_tokens=max_tokens)
            answers.append(self._known[key])
        return answers


@pytest.fixture(scope="session")
def reference(mother: Mother, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    process = EngineProcess(mother, tmp_path_factory.mktemp("reference") / "plain.log")
    try:
        process.open(connector=None, **engine_options(model) | {"max_model_len": 4096})
        yield Reference(process)
    finally:
        process.close()


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Any:
    """`prompt(n)` returns n random tokens; `prompt(n, after)` continues other ones. The same in every run of a test."""
    draw = random.Random(request.node.name)

    def make(length: int, after: list[int] | None = None) -> list[int]:
        begin = list(after or ())
        return begin + [draw.randrange(3, 512) for _ in range(length - len(begin))]

    return make

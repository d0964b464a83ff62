"""The weights of a LoRA adapter that an engine's ranks have loaded, as a digest of its files.

vLLM's hashes name an adapter, from 0.32 on with its path. The ranks load its files when they need them: with
`add_lora`, in the first step of a request, and again after other adapters took its place. No connector hook reports
this. So a digest of the files matches the ranks' weights only while the files are as they were before vLLM first loaded
them. `Adapters` looks at them (inodes, sizes, times) when vLLM first names an adapter, and again for each new request.

Once that is in doubt, an adapter is excluded for the rest of the engine's life:

- Its files have changed. The ranks may have the old ones or the new ones, and the engine's own prefix cache has blocks
  of both under the same hashes.
- It was to be loaded in place (`load_inplace`): from then on, ranks load it again and again.
- Its number in vLLM, or its name in the hashes, was another adapter's before.
- Its path is not a folder of this host, but, say, a repository's name: each load may bring another commit.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from kvcache_client.engines.vllm import compat
from kvcache_client.engines.vllm.wrapped import before_call

logger = logging.getLogger("vllm.kvcache")

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")  # vLLM loads the first one that exists
ADAPTERS = 1 << 16  # of one engine; with more, all are excluded
FIRST_LOOK = 1.0  # seconds that the engine waits for it; vLLM is about to read these files from the same place
PATIENCE = 0.05  # seconds that it waits for a later look, as for the daemon
LOOK_AGAIN = 0.002  # seconds between two looks: the engine asks for waiting requests in each step
READING = 0.05  # seconds that the first request waits for the digest; vLLM loads these files in the same step
_CHUNK = 1 << 20
_LEFT_ALONE = "requests with LoRA adapters are left alone"
# Other fields of vLLM's configuration that decide the effect of an adapter's weights.
_FACTS = ("lora_dtype", "target_modules", "enable_tower_connector_lora", "enable_moe_shared_loras")

_watched: weakref.WeakSet[Adapters] = weakref.WeakSet()  # those that are notified of `add_lora`


class Adapters:
    """The adapters of one engine. Called by its scheduler's thread, which waits for files within the above limits."""

    def __init__(self, config: Any, doubt: Callable[[set[int]], None]) -> None:
        """`config` is the engine's `lora_config`: the object itself, by which it is recognized.

        `doubt` is called with the numbers of an adapter when its digest may no longer match the ranks' weights: the
        blocks that its running requests compute from now on have unknown content.
        """
        self.config = config
        self._facts = repr([(name, str(getattr(config, name, None))) for name in _FACTS])
        self._doubt = doubt
        self._files: dict[tuple[str, bool], _Files] = {}
        self._claims: dict[object, _Files] = {}  # by each number or name of an adapter in vLLM
        self._looks, self._reads = _Reader("looks"), _Reader("reads")
        self._hears = before_call("vllm.v1.engine.core.EngineCore", ("add_lora",), _add_lora, _LEFT_ALONE)
        _watched.add(self)

    def digest(self, lora: Any) -> tuple[bytes, str]:
        """Return the digest of an adapter, or b"" and the reason that the blocks of its requests are not cached."""
        files = self._claim(lora)
        if files is None or files.doubtful:
            return b"", "lora"
        now = time.monotonic()
        if now - files.looked_at > LOOK_AGAIN:
            files.current, files.looked_at = self._look(files, PATIENCE), now
        if files.changed:
            self._exclude(files, "its files have changed, or are not in a folder of this host")
            return b"", "lora"
        if not files.awaited:
            files.awaited = True
            files.read.wait(READING)
        return (files.digest, "") if files.current and files.digest else (b"", "lora_unread")

    def _claim(self, lora: Any) -> _Files | None:
        """Return the files of an adapter. If vLLM has named other files likewise, both are in doubt from now on."""
        if not self._hears:
            return None
        source = (os.path.abspath(os.path.expanduser(lora.lora_path)), bool(getattr(lora, "is_3d_lora_weight", False)))
        files = self._files.get(source)
        if files is None:
            if len(self._files) >= ADAPTERS:
                self._hears = False
                return None
            files = self._files[source] = _Files(source[0], f"{self._facts}{source[1]}")
            if not self._look(files, FIRST_LOOK):
                files.changed = True  # possibly: it may be loaded before they are looked at
            self._reads.do(files.take_digest)
        files.numbers.add(lora.lora_int_id)
        for claim in (lora.lora_int_id, compat.lora_in_hashes(lora)):
            holder = self._claims.setdefault(claim, files)
            if holder is not files:
                for each in (holder, files):
                    self._exclude(each, "its number or name has stood for another one")
        if lora.load_inplace:
            self._exclude(files, "it was to be loaded in place")
        elif getattr(lora, "tensorizer_config_dict", None):
            self._exclude(files, "vLLM loads it with tensorizer")
        return files

    def _look(self, files: _Files, patience: float) -> bool:
        """Return True if the files were looked at within `patience` seconds."""
        done = threading.Event()

        def look() -> None:
            files.look()
            done.set()

        self._looks.do(look)
        return done.wait(patience)

    def _exclude(self, files: _Files, why: str) -> None:
        if not files.doubtful:
            files.doubtful = True
            logger.warning("blocks of the LoRA adapter %s are neither saved nor loaded: %s", files.folder, why)
            self._doubt(files.numbers)


class _Files:
    """The files of one adapter."""

    def __init__(self, folder: str, facts: str) -> None:
        self.folder, self._facts = folder, facts
        self._first: object = None  # their signature when they were first looked at
        self.numbers: set[int] = set()  # vLLM's numbers for the adapter
        self.digest = b""
        self.read = threading.Event()  # set once the digest is known, or never will be
        self.changed = False  # whether they have changed, or may have changed, since they were first looked at
        self.doubtful = False  # whether the ranks may have other files
        self.looked_at = 0.0  # when they were last looked at, for a request
        self.current = False  # whether that look came in time
        self.awaited = False  # whether a request has waited for the digest

    def look(self) -> None:
        """Compare the files with their first state."""
        try:
            now = _signature(self.folder)
        except OSError as error:
            logger.debug("the LoRA adapter in %s cannot be looked at: %s", self.folder, error)
            now = None
        if now is None or (self._first is not None and now != self._first):
            self.changed = True
        elif self._first is None:
            self._first = now

    def take_digest(self) -> None:
        """Read them."""
        if not self.changed:
            try:
                found = _digest(self.folder, self._facts)
                self.look()
                self.digest = b"" if self.changed else found
            except OSError as error:
                logger.debug("the LoRA adapter in %s cannot be read: %s", self.folder, error)
                self.changed = True
        self.read.set()


class _Reader:
    """Runs jobs that touch files, on a thread that may hang if their file system does."""

    def __init__(self, name: str) -> None:
        self._name = f"kvcache-adapters-{name}"
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._runs = False
        weakref.finalize(self, self._jobs.put, None)

    def do(self, job: Callable[[], None]) -> None:
        """Have `job` done after those before it. It must not raise."""
        self._jobs.put(job)
        if not self._runs:
            self._runs = True
            threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True).start()


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


def _signature(folder: str) -> tuple[Any, ...] | None:
    """Return a value that changes whenever the files that vLLM would load change; None if there is no adapter."""
    found: list[tuple[int, ...] | None] = []
    for name in (CONFIG, *WEIGHTS):
        try:
            facts = os.stat(os.path.join(folder, name))
        except (FileNotFoundError, NotADirectoryError):
            found.append(None)
            continue
        found.append((facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns))
    return tuple(found) if found[0] is not None and any(found[1:]) else None


def _digest(folder: str, facts: str) -> bytes:
    """Return a digest of the whole files. Fine-tuning may change only a few values, which samples would miss."""
    digest = hashlib.blake2b(facts.encode(), digest_size=32)
    weights = [path for name in WEIGHTS if (path := Path(folder, name)).is_file()]
    for path in (Path(folder, CONFIG), *weights[:1]):
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb", buffering=0) as data:
            while chunk := data.read(_CHUNK):
                digest.update(chunk)
    return digest.digest()


def _add_lora(*arguments: Any, **named: Any) -> None:
    """Claim the adapter that vLLM is about to load. After a failure, no adapter is trusted any more."""
    every = list(_watched)
    try:
        core, lora_request = arguments[0], named["lora_request"] if "lora_request" in named else arguments[1]
        # The instance's id does not identify the engine: it may change once the engine has started.
        for adapters in [each for each in every if each.config is core.vllm_config.lora_config] or every:
            adapters._claim(lora_request)
    except Exception:  # vLLM loads it in any case
        logger.exception(_LEFT_ALONE)
        for adapters in every:
            adapters._hears = False

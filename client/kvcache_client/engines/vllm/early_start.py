"""Maps and page-locks the region while a rank starts, before its first request.

vLLM makes a connector after it has loaded and profiled the model, shortly before it captures graphs and serves: too
late for work that occupies the device's driver for a second. So vLLM's plugin hook lets each rank begin as soon as its
process has a device: it connects to the daemon and maps the region's pages while the device is initialised, and locks
them while the weights are read. The connector takes over the finished parts, and later does the failed ones itself.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvcache_client.devices import Memory
from kvcache_client.devices.registration import Registration
from kvcache_client.devices.runtime import Runtime
from kvcache_client.devices.tuning import read_tuning
from kvcache_client.engines.vllm.running_engine import engine_name, join_logs
from kvcache_client.session.session import Session
from kvcache_client.settings import CONNECTOR, ConnectorSettings, parse_settings

logger = logging.getLogger("vllm.kvcache")

POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: fills this process's page tables; the pages exist
_PART = 64 << 20
_THREADS = 8
_CLAIM = 5.0  # seconds that a connector waits for a connection that was begun here
_LOCK = 10.0  # seconds that it waits for page-locking, which would slow down an engine that serves
_GROWS = 0.05  # seconds between two checks whether more of the region is in memory

_libc = ctypes.CDLL(None, use_errno=True)  # releases the GIL, unlike `mmap.madvise`
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_begun: dict[tuple[str, str], Preparation] = {}  # by engine and label


class Preparation:
    """One rank's preparation: a session, once the daemon has answered, and a registration, once there is a device."""

    def __init__(self, settings: ConnectorSettings, engine: str, label: str) -> None:
        self.session: Session | None = None
        self.registration: Registration | None = None
        self._settings, self._engine, self._label = settings, engine, label
        self._runtime: Runtime | None = None
        self._piece = 0
        self._attached, self._device = threading.Event(), threading.Event()
        self._given_up = False
        self._claimed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcache-early", daemon=True)
        self._thread.start()

    def found_device(self, runtime: Runtime | None, piece: int) -> None:
        """Begin to page-lock, by `runtime`; None if no runtime can."""
        self._runtime, self._piece = runtime, piece
        self._device.set()

    def claim(self) -> tuple[Session | None, Registration | None]:
        """Return the session and the registration, which the caller then closes; wait for any that are ready soon."""
        self._attached.wait(_CLAIM)
        if self.session is None or self._runtime is None or self.session.region is None:
            self._given_up = True
            self._device.set()
        self._claimed.set()
        self._thread.join(_LOCK)
        if self.registration is not None and not self.registration.wait(_LOCK):
            logger.info(
                "page-locking goes on while the device is idle: %d bytes are locked", self.registration.progress()[1]
            )
        return self.session, self.registration

    def _run(self) -> None:
        try:
            self.session = open_session(self._settings, self._engine, self._label)
            region = self.session.region
            self._attached.set()
            if region is None:  # no daemon; the session connects by itself when there is one
                return
            mapped = map_pages(region)
            self._device.wait()
            if self._runtime is not None and not self._given_up:
                self.registration = Registration(self._runtime, self._piece)
                self.registration.register(region)
                while mapped < region.bytes and not self._claimed.wait(_GROWS):
                    mapped = map_pages(region, mapped)
        except Exception as error:  # noqa: BLE001 - the connector does it all again, and logs the error
            logger.info("the region is not prepared while the engine starts: %s", error, exc_info=error)
        finally:
            self._attached.set()


def install() -> None:
    """Let every rank of this process begin when vLLM initialises its device. Touches no device and starts nothing."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    inner = WorkerWrapperBase.init_device
    if hasattr(inner, "kvcache_early"):
        return

    @functools.wraps(inner)
    def init_device(self: Any, *arguments: Any, **named: Any) -> Any:
        prepared = _begin(self)
        result = inner(self, *arguments, **named)
        if prepared is not None:
            _continue(prepared)
        return result

    init_device.kvcache_early = True  # type: ignore[attr-defined]
    WorkerWrapperBase.init_device = init_device


def claim(engine: str, label: str) -> tuple[Session | None, Registration | None]:
    """Return this rank's session and registration, None for each that is not ready."""
    prepared = _begun.pop((engine, label), None)
    return prepared.claim() if prepared is not None else (None, None)


def discard() -> None:
    """Close the preparation of a rank that takes no part, on a thread: the driver and the daemon take time."""
    left = list(_begun.values())
    _begun.clear()
    for prepared in left:
        threading.Thread(target=_close, args=(prepared,), name="kvcache-early-end", daemon=True).start()


def _close(prepared: Preparation) -> None:
    session, registration = prepared.claim()
    try:
        if registration is not None:
            registration.close()
    finally:
        if session is not None:
            session.close()


def open_session(settings: ConnectorSettings, engine: str, label: str) -> Session:
    """Return the session of one process of an engine, whether or not a daemon is there. Raises ConfigError."""
    return Session.open(
        settings.endpoint or None,
        engine=engine,
        label=label,
        deadline=settings.deadline_ms / 1000,
        server_uids=settings.server_uids,
    )


def map_pages(region: Memory, begin: int = 0) -> int:
    """Fill this process's page tables for the part of `region` from `begin` on that is in memory; return its end.

    The driver locks a mapped page in half the time.
    """
    end = region.present
    parts = [(region.address + at, min(_PART, end - at)) for at in range(begin, end, _PART)]
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "kvcache-map") as pool:
        failed = sum(bool(result) for result in pool.map(lambda part: _libc.madvise(*part, POPULATE_WRITE), parts))
    if failed:
        logger.debug("the pages of %d parts of the region are mapped when they are locked", failed)
    return end


def _ours(transfer: Any) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the settings of each of our connectors in a KV transfer configuration, and its own engine id, if any."""
    if transfer is None:
        return
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector == CONNECTOR:
        yield extra, ""
    for inner in extra.get("connectors", ()):
        if inner.get("kv_connector") == CONNECTOR:
            yield inner.get("kv_connector_extra_config", {}), inner.get("engine_id", "")


def _begin(wrapper: Any) -> Preparation | None:
    try:
        from vllm.platforms import current_platform

        config = wrapper.vllm_config
        found = list(_ours(config.kv_transfer_config))
        if not found or current_platform.device_type not in ("cuda", "npu"):
            return None
        join_logs(quiet=True)
        extra, engine_id = found[0]
        settings, _ = parse_settings(extra)
        engine = engine_name(config, engine_id)
        label = f"rank {int(wrapper.worker.rank) % config.parallel_config.world_size}"
        _begun[(engine, label)] = prepared = Preparation(settings, engine, label)
        return prepared
    except Exception as error:  # noqa: BLE001 - as in Preparation
        logger.info("the region is not prepared while the engine starts: %s", error, exc_info=error)
        return None


def _continue(prepared: Preparation) -> None:
    runtime: Runtime | None = None
    piece = 0
    try:
        from vllm.platforms import current_platform

        if current_platform.device_type == "cuda":
            from kvcache_client.devices.cuda_driver import Driver

            runtime, piece = Driver(), read_tuning().register_chunk
        else:
            from kvcache_client.devices.npu import early_runtime

            runtime, piece = early_runtime()
    except Exception as error:  # noqa: BLE001 - as above
        logger.info("nothing is page-locked before the engine has its KV cache: %s", error, exc_info=error)
    prepared.found_device(runtime, piece)

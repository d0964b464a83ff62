"""Lets copies end before vLLM's sleep unmaps the device's memory.

No hook of a connector announces it: `reset_cache` runs in the scheduler's process, and ranks learn what is planned
there with the next step, after the sleep. Some versions synchronize the device before they unmap its memory and others
do not, and none knows of copies that a thread of ours has yet to begin. So the methods of vLLM's worker that unmap
memory, `sleep` and from 0.32 on `discard`, are wrapped: copies end first.
"""

from __future__ import annotations

import functools
import importlib
import logging
import weakref
from collections.abc import Callable
from typing import Any

from kvcache_client.engines.vllm.compat import SLEEPS

logger = logging.getLogger("vllm.kvcache.worker")

_drains: list[weakref.WeakMethod[Callable[[], None]]] = []


def before_sleep(worker_class: str | type, drain: Callable[[], None]) -> None:
    """Call `drain`, a bound method, before a worker of that class unmaps memory, as long as the method's object lives.

    `worker_class` is a class or the qualified name of one. Never raises: where there is no such class, one log line
    says that sleep does not wait.
    """
    _drains[:] = [each for each in _drains if each() is not None]
    _drains.append(weakref.WeakMethod(drain))
    try:
        found = _resolve(worker_class) if isinstance(worker_class, str) else worker_class
        for name in SLEEPS:
            method = getattr(found, name, None)
            if method is not None and not hasattr(method, "_kvcache_drains"):
                setattr(found, name, _after_copies(method))
    except Exception as error:  # noqa: BLE001  # an unknown version is served all the same
        logger.warning("vLLM's sleep does not wait for copies of the KV cache server: %s", error)


def _resolve(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _after_copies(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        for reference in list(_drains):
            drain = reference()
            if drain is not None:
                try:
                    drain()
                except Exception:  # the engine sleeps in any case
                    logger.exception("copies were not waited for")
        return method(*arguments, **named)

    wrapped._kvcache_drains = True  # type: ignore[attr-defined]
    return wrapped

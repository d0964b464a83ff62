"""No exception of ours leaves a hook: the engine continues as if it had no connector, and logs one line.

vLLM calls hooks from its scheduler's and its ranks' step loops, where any exception ends the engine.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("vllm.kvcache")


def hook(side: str, method: Callable[..., Any], otherwise: Callable[..., Any] = lambda *_, **__: None) -> Any:
    """Return a hook of a connector that passes its call on to `method` of the connector's attribute `side`.

    If it raises, the connector's `give_up(where, error)` is called, which must not raise, and the hook returns
    `otherwise(the side, *its arguments)`.
    """

    @functools.wraps(method)
    def guarded(connector: Any, *arguments: Any, **named: Any) -> Any:
        ours = getattr(connector, side)
        try:
            return method(ours, *arguments, **named)
        except Exception as error:  # noqa: BLE001 - whatever it is: the cache must not end the engine
            connector.give_up(method.__name__, error)
            return otherwise(ours, *arguments, **named)

    return guarded


def report(where: str, error: Exception, in_scheduler: bool) -> str:
    """Log, once per engine, that it continues without the cache; return the reason. DEBUG has the traceback.

    A rank's fault reaches the scheduler's side with the next step, and is logged there.
    """
    why = f"{where} failed with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if in_scheduler:
        logger.error("this engine runs without the KV cache server from now on: %s", why)
    else:
        logger.info("this rank takes no part in the cache from now on: %s", why)
    logger.debug("in %s:", where, exc_info=error)
    return why

"""No exception of ours leaves a hook: the engine continues as if it had no connector, and logs one line.

vLLM calls hooks from its scheduler's and its ranks' step loops, where any exception ends the engine.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

logger = logging.getLogger("vllm.kvcache")

F = TypeVar("F", bound=Callable[..., Any])


class Guarded(Protocol):
    """Has hooks, and can continue without the code that they call."""

    def give_up(self, where: str, error: Exception) -> None:
        """Stop using the code that raised `error` in the hook `where`. Must not raise."""


def guard(otherwise: Callable[..., Any] = lambda *arguments: None) -> Callable[[F], F]:
    """Let a method of a `Guarded` return `otherwise(self, *its positional arguments)` instead of raising."""

    def decorate(hook: F) -> F:
        @functools.wraps(hook)
        def guarded(self: Guarded, *arguments: Any, **named: Any) -> Any:
            try:
                return hook(self, *arguments, **named)
            except Exception as error:  # noqa: BLE001 - whatever it is: the cache must not end the engine
                self.give_up(hook.__name__, error)
                return otherwise(self, *arguments)

        return cast(F, guarded)

    return decorate


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

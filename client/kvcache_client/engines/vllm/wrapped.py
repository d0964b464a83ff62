"""Methods of vLLM that are wrapped, because no hook of a connector comes early enough.

| method | wrapped | hook that replaces it |
| --- | --- | --- |
| `Worker.sleep`, `Worker.discard` | if it does not call the hook, as before 0.33 | `unregister_kv_caches` |
| `Worker.execute_model` | if steps write to blocks early | none: `handle_preemptions`, if V2 called it first |
| `EngineCore.add_lora` | with LoRA: see `lora` | none |

`sleep`, and from 0.32 on `discard`, unmap the device's memory. `reset_cache` runs in the scheduler's process, and ranks
get its plans with the next step, after the sleep. Some versions synchronize the device before they unmap its memory and
others do not, and none knows of copies that our own threads have yet to begin. So copies end first. `restore_kv_caches`
has nothing to do: the KV tensors keep their addresses, and only host memory is registered.

`execute_model` begins a step. Model Runner V1 calls `handle_preemptions` before it touches device memory. Model Runner
V2 first zeroes new blocks, copies hits within a block, and moves states, and only then calls any hook: blocks that are
being saved, and that the step gives to other requests, would be overwritten. So the connector gets the step first.
"""

from __future__ import annotations

import functools
import importlib
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from kvcache_client.engines.vllm.compat import SLEEPS, ends_copies

logger = logging.getLogger("vllm.kvcache.worker")

_drains: list[weakref.WeakMethod[Callable[[], None]]] = []


def before_sleep(worker_class: str | type, drain: Callable[[], None]) -> None:
    """Call `drain`, a bound method, before a worker of that class unmaps memory, as long as the method's object lives.

    `worker_class` is a class or the qualified name of one. Methods that call the connector themselves stay as they are.
    """
    _drains[:] = [each for each in _drains if each() is not None]
    _drains.append(weakref.WeakMethod(drain))
    lost = "vLLM's sleep does not wait for copies of the KV cache server"
    before_call(worker_class, SLEEPS, _drain, lost, unless=ends_copies)


def before_step(worker_class: str | type) -> None:
    """Have each step passed to `before_step` of a rank's connector, before the rank's runner begins with it.

    `worker_class` is as above. A rank cannot rely on it: an executor may call the runner by itself.
    """
    before_call(worker_class, ("execute_model",), _tell, "the KV cache server is not told of steps before they begin")


def before_call(
    owner: str | type,
    names: Iterable[str],
    first: Callable[..., None],
    otherwise: str,
    unless: Callable[[Any], bool] = lambda method: False,
) -> bool:
    """Have `first` called with the same arguments before each of these methods of a class, those that it has and for
    which `unless` returns False.

    Never raises. Return False, and log `otherwise`, if there is no such class or method.
    """
    try:
        if isinstance(owner, str):
            module, _, name = owner.rpartition(".")
            owner = getattr(importlib.import_module(module), name)
        methods = {name: getattr(owner, name) for name in names if hasattr(owner, name)}
        if not methods:
            raise AttributeError(f"{owner} has none of {', '.join(names)}")
        for name, method in methods.items():
            if not hasattr(method, "_kvcache_first") and not unless(method):
                setattr(owner, name, _preceded(first, method))
    except Exception as error:  # noqa: BLE001  # an unknown version is served anyway
        logger.warning("%s: %s", otherwise, error)
        return False
    return True


def _preceded(first: Callable[..., None], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        try:
            first(*arguments, **named)
        except Exception:  # the engine continues in any case
            logger.exception("before %s", method.__name__)
        return method(*arguments, **named)

    wrapped._kvcache_first = first  # type: ignore[attr-defined]
    return wrapped


def _drain(*arguments: Any, **named: Any) -> None:
    for reference in list(_drains):
        drain = reference()
        if drain is not None:
            try:
                drain()
            except Exception:  # other connectors have copies, too
                logger.exception("copies were not waited for")


def _tell(worker: Any, scheduler_output: Any, *arguments: Any, **named: Any) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        _tell_each(get_kv_transfer_group(), scheduler_output.kv_connector_metadata)


def _tell_each(connector: Any, metadata: Any) -> None:
    """Pass `metadata` to `connector`, or to ours among those that it consists of."""
    if hasattr(connector, "before_step"):
        connector.before_step(metadata)
        return
    for each, its in zip(getattr(connector, "_connectors", ()), getattr(metadata, "metadata", ()), strict=False):
        _tell_each(each, its)

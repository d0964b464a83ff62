"""The connector, in an engine where what KVCACHE_FAULT names (`Scheduler.plan`) raises whenever it is called."""

from __future__ import annotations

import functools
import os
from typing import Any

from kvcache_client.devices.cpu import CpuDevice
from kvcache_client.engines.vllm import rank_side, scheduler_side, setup
from kvcache_client.engines.vllm.connector import KVCacheServerConnector
from kvcache_client.scheduler.scheduler import Scheduler
from kvcache_client.session.channel import Channel
from kvcache_client.session.daemon import Daemon
from kvcache_client.session.supervisor import Supervisor
from kvcache_client.worker.loads import Loads
from kvcache_client.worker.saves import Saves
from kvcache_client.worker.worker import Worker

__all__ = ["KVCacheServerConnector"]

POINTS = {
    setup: ["namespace_spec", "parse_settings", "unsupported_reason"],
    scheduler_side: ["open_session"],
    rank_side: ["open_session", "rank_in_engine"],
    Scheduler: ["__init__", "matched_tokens", "allocated", "plan", "ended", "finished", "reset", "close"],
    Worker: ["__init__", "register", "begin", "load", "received", "take_errors", "take_report", "close"],
    Saves: ["_settle_end"],
    Loads: ["_not_filled"],
    Daemon: ["missed", "call", "post"],
    Channel: ["pump"],
    Supervisor: ["_watch"],
    CpuDevice: ["_copy", "poll", "fence"],
}


def _plant(owner: Any, name: str) -> None:
    inner, point = getattr(owner, name), f"{owner.__name__.rpartition('.')[2]}.{name}"

    @functools.wraps(inner)
    def planted(*arguments: Any, **named: Any) -> Any:
        if os.environ.get("KVCACHE_FAULT") == point:
            raise RuntimeError(f"a fault planted in {point}")
        return inner(*arguments, **named)

    setattr(owner, name, planted)


for _owner, _names in POINTS.items():
    for _name in _names:
        _plant(_owner, _name)

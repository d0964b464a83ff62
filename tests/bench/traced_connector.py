"""Our connector, which notes when a hit passes each of its stations, for `by_turns.py --trace`."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from kvcache_client.engines.vllm.connector import KVCacheServerConnector as Connector


def note(request: str, station: str) -> None:
    with open(os.environ["HITS_TRACE"], "a") as trace:
        print(json.dumps([request, station, round(time.monotonic() * 1e3, 2)]), file=trace)


class KVCacheServerConnector(Connector):
    """Scheduler and rank write to the same file, by the same clock."""

    def get_num_new_matched_tokens(self, request: Any, *rest: Any) -> Any:
        found = super().get_num_new_matched_tokens(request, *rest)
        note(request.request_id, f"asked: {found}")
        return found

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        loads = connector_metadata.plan.loads
        for each in loads:
            note(each.request, "begins, layered" if each.layered else "begins")
            self._watch()
        super().bind_connector_metadata(connector_metadata)
        for each in loads:
            note(each.request, "queued")

    def _watch(self) -> None:
        worker = self._worker
        if worker is None or hasattr(worker.loads, "traced"):
            return
        copied, worker.loads.traced = worker.loads._copied, True

        def wrapped(job: Any, region: Any, epoch: int, done: Any) -> None:
            note(job.request, f"copied in {done.seconds * 1e3:.2f} ms")
            copied(job, region, epoch, done)

        worker.loads._copied = wrapped

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        found = super().get_finished(finished_req_ids)
        for request in found[1] or ():
            note(request, "reported")
        return found

    def update_state_after_alloc(self, request: Any, *rest: Any) -> None:
        note(request.request_id, "allocated")
        super().update_state_after_alloc(request, *rest)

    def request_finished(self, request: Any, *rest: Any) -> Any:
        note(request.request_id, "finished")
        return super().request_finished(request, *rest)

    request_finished_all_groups = request_finished

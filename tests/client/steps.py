"""An engine around a scheduler and a rank, acted out step by step: real daemon, real tensors, real sessions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_client.engines.vllm.views import request_view, step_view
from kvcache_client.scheduler.scheduler import Scheduler
from kvcache_client.scheduler.views import EngineFacts
from kvcache_client.settings import ConnectorSettings
from kvcache_client.step_plan import StepPlan
from kvcache_client.worker.places import RankFacts, Shards
from kvcache_client.worker.worker import Worker

torch = pytest.importorskip("torch")

BLOCK, BLOCKS, LAYERS = 16, 32, 3
PAGE = 4096
SPEC = NamespaceSpec("tiny", (GroupSpec(BLOCK, LAYERS * PAGE),), {"weights": "", "checkpoint": "files 1"})
PATIENCE = 30.0


class Request(SimpleNamespace):
    """As much of vLLM's as anybody reads."""

    __hash__ = object.__hash__

    def __init__(self, name: str, tokens: int, hashes: list[bytes] | None = None, **facts: Any) -> None:
        facts.setdefault("all_token_ids", list(range(tokens)))
        super().__init__(
            request_id=name,
            num_tokens=tokens,
            num_prompt_tokens=tokens,
            num_computed_tokens=0,
            block_hashes=hashes or [secrets.token_bytes(32) for _ in range(tokens // BLOCK)],
            **facts,
        )


class VllmScheduler(Scheduler):
    """Called with vLLM's objects, as the connector has them."""

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        return super().matched_tokens(request_view(request), computed)

    def allocated(self, request: Any, blocks: list[int], external: int) -> None:
        super().allocated(request_view(request), [blocks], external)

    def plan(self, step: Any, written: Sequence[int] = ()) -> StepPlan:  # type: ignore[override]
        return super().plan(step_view(step), written=written)

    def finished(self, request: Any) -> None:
        super().finished(request.request_id, request.num_computed_tokens)


def new(name: str, blocks: list[int], computed: int) -> SimpleNamespace:
    return SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)


class Rig:
    """An engine of one rank, whose steps a test writes out."""

    def __init__(
        self, endpoint: str, name: str, dtype: Any = torch.uint8, events: bool = False, **settings: Any
    ) -> None:
        self.checkpoint = "files 1"  # what is found where one looks
        # By default, chance chooses a request that is computed although it is cached.
        options = ConnectorSettings(endpoint, **{"canary_every": 0, **settings})
        sessions = [Session.open(endpoint, engine=name, label=label, deadline=5.0) for label in ("rank", "scheduler")]
        if dtype is torch.uint8:
            self.tensors = [torch.randint(0, 255, (BLOCKS, PAGE), dtype=dtype) for _ in range(LAYERS)]
        else:
            self.tensors = [torch.randn(BLOCKS, PAGE // dtype.itemsize).to(dtype) for _ in range(LAYERS)]
        self.worker = Worker(sessions[0], SPEC, options, Shards(1, 1), 0, RankFacts(LAYERS * PAGE), events)
        self.worker.register({str(layer): tensor for layer, tensor in enumerate(self.tensors)}, BLOCKS)
        self.session = sessions[1]
        self.scheduler = VllmScheduler(
            self.session,
            SPEC,
            options,
            EngineFacts(
                BLOCK,
                describe=(lambda *_: (None, [])) if events else None,
                checkpoint=lambda: self.checkpoint,
            ),
        )
        self.seen: set[str] = set()

    def block(self, number: int) -> bytes:
        return b"".join(tensor[number].view(torch.uint8).numpy().tobytes() for tensor in self.tensors)

    def admit(self, request: Request, blocks: list[int], computed: int = 0, load: int = 0) -> None:
        self.scheduler.allocated(request, blocks, load)
        request.num_computed_tokens = computed + load
        request.table = blocks

    def step(
        self,
        scheduled: dict[Request, int] | None = None,
        given: list[int] | None = None,
        written: Sequence[int] = (),
    ) -> StepPlan:
        """One step; `given` are blocks that a request nobody follows gets, `written` those that the step zeroes."""
        fresh, cached = [], SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        for request in scheduled or {}:
            if request.request_id in self.seen:
                cached.req_ids.append(request.request_id)
                cached.new_block_ids.append(None)
                cached.num_computed_tokens.append(request.num_computed_tokens)
            else:
                self.seen.add(request.request_id)
                fresh.append(new(request.request_id, request.table, request.num_computed_tokens))
        if given:
            fresh.append(new("a stranger", given, 0))
        tokens = {request.request_id: count for request, count in (scheduled or {}).items()}
        plan = self.scheduler.plan(
            SimpleNamespace(
                scheduled_new_reqs=fresh,
                scheduled_cached_reqs=cached,
                num_scheduled_tokens=tokens,
                total_num_scheduled_tokens=sum(tokens.values()) + (1 if given else 0),
                preempted_req_ids=None,
            ),
            written,
        )
        self.worker.begin(plan)
        self.worker.load(plan)
        for request, count in (scheduled or {}).items():
            request.num_computed_tokens += count
        return plan

    def await_loads(self) -> set[str]:
        until = time.monotonic() + PATIENCE
        received: set[str] = set()
        while not received:
            assert time.monotonic() < until, "no load has ended"
            received = self.worker.received()
            time.sleep(0.001)
        self.scheduler.ended(sorted(received), self.worker.take_errors())
        return received

    def run(self, request: Request, blocks: list[int]) -> None:
        """Compute a prompt and end, as a request of one token does."""
        self.admit(request, blocks)
        self.step({request: request.num_tokens})
        self.scheduler.finished(request)
        self.step()

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


def idle(daemon: Any, blocks: int | None = None) -> None:
    daemon.wait_status(
        lambda s: not s["pool"]["blocks_writing"]
        and not s["pool"]["pinned_bytes"]
        and blocks in (None, s["pool"]["blocks"]),
        f"an idle cache of {blocks} blocks",
    )

"""Carries out the plans in one rank; it decides nothing.

It settles its own shard of every block that it copies, on the thread that saw the end of the copy: an idle engine runs
no further steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from kvcache_client import compression
from kvcache_client.devices import CopyError, Device, open_device
from kvcache_client.devices.hybrid import HybridDevice
from kvcache_client.devices.registration import Registration
from kvcache_client.devices.self_test import check_copies
from kvcache_client.session.namespace import Namespace
from kvcache_client.session.session import Session
from kvcache_client.settings import ConnectorSettings
from kvcache_client.step_plan import Report, StepPlan
from kvcache_client.worker.kv_layout import BlockLayout, KVLayout, dtype_of, flatten
from kvcache_client.worker.layered import LayeredLoads, section_ends
from kvcache_client.worker.loads import Loads
from kvcache_client.worker.meeting import Hello
from kvcache_client.worker.peers import Peers
from kvcache_client.worker.places import RankFacts, Shards
from kvcache_client.worker.rank import Rank
from kvcache_client.worker.saves import CanaryChecks, Saves
from kvcache_proto.errors import ConfigError, KVCacheError
from kvcache_proto.types import NamespaceSpec

logger = logging.getLogger("vllm.kvcache.worker")

DRAIN_SECONDS = 60.0  # between two log lines about copies that do not end
LINGER_SECONDS = 0.001  # for which a step without work waits for a load that is about to end
_JOINING = "it has not joined the namespace yet"
_LATE = "the executor bypasses Worker.execute_model, so that blocks may be overwritten before they are saved"


class Worker:
    """One rank. The rank's own thread calls `begin`, `load` and `received` in every step."""

    def __init__(
        self,
        session: Session,
        spec: NamespaceSpec,
        settings: ConnectorSettings,
        shards: Shards,
        rank: int,
        facts: RankFacts,
        events: bool = False,
        registration: Registration | None = None,
    ) -> None:
        """With `events`, report the daemon's verdicts. A `registration` has already page-locked the region."""
        self._session, self._settings = session, settings
        self._layout = KVLayout(spec, facts, shards, rank)
        self._rank = Rank(session, rank, self._layout)
        self._saves = Saves(self._rank, events)
        self.loads = Loads(self._rank)
        self._checks = CanaryChecks(self._rank)
        self._registration = registration
        self._declined = ""  # the reason that this rank takes no part, regardless of the daemon's answers
        self._joining = facts.joins_later
        self._reported = _JOINING if facts.joins_later else ""  # the last reported reason
        self._begun = self._loaded = 0  # numbers of the last plans carried out
        self._rank.verifier.follow(spec)
        session.add_counts(self._rank.counts.snapshot)

    @property
    def counters(self) -> dict[str, int]:
        """The numbers of skipped and failed jobs and blocks, by reason."""
        return self._rank.counts.snapshot()

    @property
    def _device(self) -> Device | None:
        return self._rank.device

    @property
    def _namespace(self) -> Namespace | None:
        return self._rank.namespace

    def register(self, kv_caches: dict[str, Any], num_blocks: int) -> None:
        """Take the KV tensors, one or several per layer, and join the namespace.

        Raises ConfigError if they do not match the KV cache specification, Unsupported for a device that this version
        cannot copy from, CopyError if copies do not work. The caller then calls `decline`.
        """
        layout, tensors = self._layout, list(flatten(kv_caches.values()))
        layouts = layout.read_caches(kv_caches, num_blocks)
        if odd := {*map(dtype_of, layout.compressed(kv_caches))} - {"bfloat16"}:
            raise ConfigError(f"KV of {', '.join(sorted(odd))} beside bfloat16 is not compressed: set `compress: off`")
        ends = layout.layer_ends(kv_caches, num_blocks) if self._settings.overlap != "off" else {}
        every = compression.PIECE_BYTES if layout.facts.compress else 1
        sections = section_ends(list(ends.values()), every) if ends else []
        self._rank.device = device = _open_devices(layouts, tensors, layout.parts.blocks(num_blocks), sections)
        if self._registration is not None:
            device.adopt(self._registration)
            self._registration = None
        others = [rank for rank in layout.facts.sharers if rank != self._rank.number]
        if others and (shared := device.share(len(others))):
            hello = Hello(self._rank.number, shared)
            self.loads.peers = Peers(self._session.engine, hello, others, device, self._rank.counts)
        if sections:
            self.loads.early.layered = LayeredLoads(device, ends, sections)
        if layout.facts.groups:  # the full group's values are compared
            tensors = list(flatten(kv_caches[name] for table in layout.facts.groups[0] for name in table.layers))
        dtypes = {*map(dtype_of, tensors)}
        if not self._checks.set_dtypes(dtypes) and self._settings.canary_every:
            logger.warning("no canaries: the numerical noise in KV of %s is not known", ", ".join(sorted(dtypes)))
        self._session.on_region(device.register)
        if not self._joining:
            self._attach(layout.spec, wait=True)
        logger.info(
            "rank %d: %d fragments per block, %s bytes, %s of %d, namespace %s; %s bytes are page-locked",
            *(
                self._rank.number,
                max(len(each.fragments) for each in layouts) * layout.parts.number,
                f"{layout.facts.block_bytes:,}",
            ),
            *(_named(layout.reads), layout.spec.shards, "not joined yet" if self._joining else layout.spec.id),
            f"{device.registered()[1]:,}",
        )

    def _attach(self, spec: NamespaceSpec, wait: bool) -> None:
        self._layout.follow(spec)
        self._rank.verifier.follow(spec)
        if self._namespace is not None:
            self._session.detach(self._namespace)
        try:
            self._rank.namespace = self._session.attach(spec, self._layout.writes, wait=wait, insist=True)
        except KVCacheError as error:
            self._rank.namespace = None
            self.decline(str(error))

    def decline(self, reason: str) -> None:
        """Take no part in the cache from now on. The next report has the reason, which the scheduler's side logs."""
        self._declined = reason
        logger.info("rank %d takes no part in the cache: %s", self._rank.number, reason)

    def abandon(self) -> None:
        """Fail all jobs that still read the engine's blocks, which are reassigned without a fence from now on."""
        self._rank.abandoned = True
        self.loads.early.wait_all()

    # One step.

    def begin(self, plan: StepPlan, late: bool = False, idle: bool = False) -> None:
        """Start the saves of `plan`, then fence their blocks, before the step touches device memory.

        If this call comes too `late`, so that the step may have overwritten blocks, the rank takes no part from now on.
        An `idle` step computes nothing.
        """
        device = self._device
        if device is None:
            return
        device.enter_step()
        self.loads.early.enter_step(plan, idle)
        if plan.number <= self._begun:
            return
        self._begun = plan.number
        if late:
            self.decline(_LATE)
        if late or plan.unguarded:
            self.abandon()
        if plan.namespace is not None and plan.namespace != self._layout.spec:
            self._rank.epoch += 1
            self._attach(plan.namespace, wait=False)  # a step must not wait for a daemon that is slow to answer
        for job in plan.saves:
            self._saves.begin(job)
        for check in plan.checks:
            self._checks.begin(check)
        self.loads.early.finish(plan.finished)
        for request in plan.finished:
            self._saves.finish(request)
        if plan.given:
            device.fence(self._layout.parts.all(plan.given))

    def load(self, plan: StepPlan) -> None:
        """Start the loads of `plan`."""
        if plan.number <= self._loaded:
            return
        self._loaded = plan.number
        for index, job in enumerate(plan.loads):
            self.loads.begin(job, (plan.number, index))

    def received(self, idle: bool = False) -> set[str]:
        """Return the requests whose loads have ended since the last call, successfully or not, each once.

        An `idle` engine has nothing to compute: wait at most LINGER_SECONDS for a load that is about to end.
        """
        device, loads = self._device, self.loads
        if device is not None:
            device.leave_step()
            device.poll()
            if idle and not loads.ended and not loads.early.is_running:
                device.linger(LINGER_SECONDS)
        invalid, reason = loads.early.leave_step(idle)
        loads.invalid |= invalid
        if reason:
            self.decline(reason)
        return loads.take_received()

    def take_failed(self) -> set[str]:
        """Return the requests whose loads have failed since the last call, in an engine with several groups."""
        failed, self.loads.failed = self.loads.failed, set()
        return failed

    def take_errors(self) -> set[int]:
        """Return the device blocks that loads have failed to fill since the last call."""
        errors, self.loads.invalid = self.loads.invalid, set()
        return errors

    def take_report(self) -> Report:
        """Return the report on the time since the last call."""
        saves, loads, early = self._saves, self.loads, self.loads.early
        return Report(
            verdicts=saves.take_verdicts(),
            declined=self._take_declined(),
            given_away=saves.take_given_away(),
            not_compressed=saves.take_not_compressed(),
            carried=loads.take_carried(),
            arrived=early.take_arrived(),
            ready=early.take_ready(),
        )

    def _take_declined(self) -> dict[int, str]:
        """Return the reason that this rank takes no part in the cache, if it has changed; "" if it takes part again."""
        namespace = self._namespace  # a new daemon may accept it again
        reason = self._declined or (namespace.refused if namespace is not None else "")
        if not reason and self._joining:
            if namespace is None or not namespace.attached:
                return {}
            self._joining = False
        if reason == self._reported:
            return {}
        self._reported = reason
        return {self._rank.number: reason}

    # The end.

    def drain(self) -> None:
        """Wait at most `drain_ms` for running copies, before device memory is unmapped or the process ends."""
        self.loads.early.start_all()
        limit = self._settings.drain_ms
        if not self._wait_copied(limit / 1000):
            self._rank.counts.add("drains_cut_short")
            logger.warning("rank %d: copies were still running after %.0f ms", self._rank.number, limit)

    def close(self) -> None:
        """Wait as `drain` does, settle the remaining saves as failed, and end the session."""
        if self._registration is not None:
            self._registration.close()
        self.drain()
        if self.loads.peers is not None:
            self.loads.peers.close()
        if self._device is not None:
            self._device.close()
        self._rank.verifier.close()
        self._session.close()

    def _wait_copied(self, seconds: float) -> bool:
        """Wait at most `seconds` for running copies; return True if all have ended."""
        until, device, peers = time.monotonic() + seconds, self._device, self.loads.peers
        if peers is not None and not peers.drain(seconds):
            return False
        return device is None or device.drain(max(0.0, until - time.monotonic()))

    def wait_quiet(self) -> bool:
        """Wait until no copy can touch the engine's blocks any more; return False if the device cannot report it."""
        number = self._rank.number
        try:
            while not self._wait_copied(DRAIN_SECONDS):
                logger.warning("rank %d: copies have not ended after %.0f s", number, DRAIN_SECONDS)
        except Exception as error:  # noqa: BLE001 - the device has failed, too
            logger.debug("rank %d: the device cannot report whether copies run", number, exc_info=error)
            return False
        return True


def _open_devices(
    layouts: Sequence[BlockLayout], tensors: Sequence[Any], count: int, sections: Sequence[int]
) -> Device:
    """Open the device of `tensors`, for `count` blocks in each layout, and check its copies. Raises CopyError."""
    devices: list[Device] = []
    try:
        kind = tensors[0].device.type
        for fragments, compress in layouts:
            devices.append(open_device(kind, fragments, count, keep=tensors, ends=sections, compress=compress))
        for each, (fragments, compress) in zip(devices, layouts, strict=True):
            check_copies(each, fragments, count, sections, compress)
    except CopyError:
        for each in reversed(devices):
            each.close()
        raise
    return devices[0] if len(devices) == 1 else HybridDevice(devices)


def _named(shards: Sequence[int]) -> str:
    return f"shard {shards[0]}" if len(shards) == 1 else f"shards {shards[0]} to {shards[-1]}"

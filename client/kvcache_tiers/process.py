"""A tier's process: a session with the daemon that requests work, and threads that do it.

The main thread requests work and reserves, so that the parts of a chain are reserved in their order. Reads and writes
have their own threads: no read waits for a write.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvcache_client.session.grants import Reservation
from kvcache_client.session.namespace import Namespace
from kvcache_client.session.region import Region
from kvcache_client.session.session import Session
from kvcache_proto import messages as m
from kvcache_proto.errors import BadArgument, ClientError, KVCacheError, NotPermitted, RegionError, Unavailable
from kvcache_proto.types import MAX_NAME, NamespaceSpec, Outcome, Refusal
from kvcache_tiers.backend import Backend, Failed, find_opener
from kvcache_tiers.moves import Moves, Pause

log = logging.getLogger("kvcache_tiers")

URL = "KVCACHE_TIER_URL"  # environment variable, where `ps` does not show a URL with a password
DEADLINE = 5.0  # seconds that a reservation may take; a request for work is held for half a second
READERS, WRITERS = 4, 2  # threads; lookups have another one, because they do not wait for reads
ABSENT = 0.1  # seconds between two looks for a daemon
CHECK_EVERY = 20.0  # seconds between two checks whether the stored values were removed
SAY_EVERY = 60.0  # seconds between two log lines on the backend's counts
IDLE = 60.0  # seconds without a job after which a namespace is left: else the daemon would never forget it
MOST_ATTACHED = 12  # namespaces; the daemon allows 16
OPENING = 300.0  # seconds; the parent of the process sees its end, and starts it again
STOP_SECONDS = 10.0  # after `stop`, for running reads and writes to end
RESTART = 75  # as an exit status: the backend must be opened again, by a process without the old region and files
_THERE = (Refusal.GRANTED, Refusal.PRESENT, Refusal.IN_FLIGHT)


class TierProcess:
    """One tier, from its URL. `run` returns after `stop`, which any thread or signal handler may call."""

    def __init__(self, url: str, endpoint: str | None, name: str, policy: str) -> None:
        """Raises ConfigError if no backend opens such a URL; `run` reads the rest of it."""
        self._url, self._name, self._policy = url, name, policy
        self._open_backend = find_opener(url)
        self._session = Session.open(endpoint, engine=f"tier {name}", label="tier", deadline=DEADLINE)
        self._stopping = threading.Event()
        self._looker = ThreadPoolExecutor(1, "tier-look")
        self._readers = ThreadPoolExecutor(READERS, "tier-read")
        self._writers = ThreadPoolExecutor(WRITERS, "tier-write")
        self._backend: Backend | None = None
        self._region: Region | None = None  # that the backend was opened with
        self._check_at = 0.0  # when to check next whether its values were removed
        self._namespaces: dict[str, tuple[Namespace, float]] = {}  # by id, with the time of the last job, oldest first
        self._counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._reading = Pause(f"tier {name} is off")
        self._said: Counter[str] = Counter()  # the logged counts of the backend
        self._say_at = 0.0
        self._refusal = ""  # the logged reason that there was no work
        self._session.add_counts(self._new_counts)

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> int:
        """Serve until `stop`, and return 0, or RESTART if the region was replaced or the stored values are lost.

        Raises ConfigError for the URL.
        """
        try:
            while not self._stopping.is_set():
                region = self._session.region
                if not self._session.up or region is None:
                    self._stopping.wait(ABSENT)
                elif self._backend is not None and region is not self._region:
                    log.info("the daemon has another region: starting again")
                    return RESTART
                elif self._open(region):
                    if self._is_lost():
                        return RESTART
                    if not self._reading.left:
                        self._work()
            return 0
        finally:
            for pool in (self._looker, self._readers, self._writers):
                pool.shutdown(cancel_futures=True)
            if self._backend is not None:
                self._backend.close()
            self._session.close()

    def _open(self, region: Region) -> bool:
        """Return True if the backend is open, and may be used."""
        if wait := self._reading.left:
            self._stopping.wait(min(wait, 0.5))
            return False
        if self._backend is None:
            late = threading.Timer(OPENING, self._give_up)
            late.daemon = True
            late.start()
            try:
                self._backend = self._open_backend(self._url, region.buffer)
            except Failed as error:
                self._failed(error)
                return False
            finally:
                late.cancel()
            self._region = region
            self._moves = Moves(self._backend, self._counts)
            log.info("tier %s is open", self._name)
        return True

    def _is_lost(self) -> bool:
        """Return True if the backend has lost its values; check every few seconds.

        Then the process starts again, so that the daemon, too, forgets the tier's values.
        """
        assert self._backend is not None
        now = time.monotonic()
        if now < self._check_at:
            return False
        try:
            why = self._backend.lost()
        except Failed as error:  # it is checked again after the pause
            self._failed(error)
            return False
        self._check_at = now + CHECK_EVERY
        if why:
            self._failed(Failed(why))
        return bool(why)

    def _give_up(self) -> None:
        log.error("tier %s ends: its store could not be opened within %g s", self._name, OPENING)
        os._exit(1)

    def _work(self) -> None:
        assert self._backend is not None
        try:
            refused = [pause.why[:MAX_NAME] for pause in (self._moves.writing, self._moves.removing)]
            jobs = self._session.poll_jobs(self._name, self._backend.batch_bytes, self._policy, *refused)
        except (NotPermitted, BadArgument):
            raise
        except KVCacheError as error:  # also if the daemon has forgotten the session, or has an internal error
            if str(error) != self._refusal:
                self._refusal = str(error)
                log.warning("no work: %s", error)
            self._session.report_jobs(off="the answer to a request for work was late")  # the jobs in it are void
            self._stopping.wait(ABSENT)
            return
        self._refusal = ""
        now = time.monotonic()
        try:
            self._join(jobs.specs, now)
        except KVCacheError as error:
            log.warning("a namespace cannot be attached: %s", error)
        for look in jobs.exists:
            self._looker.submit(self._guarded, self._look, look, self._namespace(look.namespace, now))
        for bring in jobs.fetches:
            self._reserve(bring, now)
        for write in jobs.stores:
            namespace = self._namespace(write.namespace, now)
            self._writers.submit(self._guarded, self._write_out, write, namespace, self._session.region)
        self._leave(now)
        if now >= self._say_at:
            self._say_at = now + SAY_EVERY
            new = Counter(self._backend.counts) - self._said
            if new:
                self._said += new
                log.info("the store: %s", ", ".join(f"{name} {count}" for name, count in sorted(new.items())))

    # Namespaces.

    def _join(self, specs: Sequence[NamespaceSpec], now: float) -> None:
        for spec in specs:
            if spec.id not in self._namespaces:
                self._leave(now, MOST_ATTACHED - 1)
                self._namespaces[spec.id] = self._session.attach(spec, range(spec.shards)), now

    def _leave(self, now: float, most: int = MOST_ATTACHED) -> None:
        """Leave namespaces without jobs for IDLE seconds; if more than `most` are left, also those idle longest."""
        while self._namespaces:
            number, (namespace, used) = next(iter(self._namespaces.items()))
            if now - used < IDLE and len(self._namespaces) <= most:
                return
            del self._namespaces[number]
            self._session.detach(namespace)

    def _namespace(self, number: str, now: float) -> Namespace | None:
        found = self._namespaces.pop(number, None)
        if found is not None:
            self._namespaces[number] = found[0], now
        return found[0] if found else None

    # Jobs.

    def _guarded(self, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except Exception:  # whatever a backend raises: only this job fails, and the thread continues
            log.exception("a job has failed inside the tier")
            self._counts["internal"] += 1

    def _look(self, look: m.Exists, namespace: Namespace | None) -> None:
        flags = b""
        try:
            if namespace is not None:
                flags = self._moves.look(namespace.spec, look.group, look.hashes)
        except Failed as error:
            self._failed(error)
        finally:
            self._session.report_jobs(exists=[(look.number, flags)])

    def _reserve(self, bring: m.Fetch, now: float) -> None:
        """Reserve slots for blocks, and have the blocks read."""
        namespace = self._namespace(bring.namespace, now)
        try:
            if namespace is None:
                raise Unavailable(f"namespace {bring.namespace} is not attached")
            reservation = namespace.reserve(bring.hashes, bring.parent, bring.group)
        except ClientError as error:
            log.warning("blocks cannot be reserved: %s", error)
            self._session.report_jobs(fetched=[(bring.number, b"")])
        except Unavailable:
            self._session.report_jobs(fetched=[(bring.number, b"")])
        else:
            self._readers.submit(self._guarded, self._bring, bring, namespace, reservation)

    def _bring(self, bring: m.Fetch, namespace: Namespace, reservation: Reservation) -> None:
        there = bytearray(answer in _THERE for answer in reservation.answers)
        found: list[bytes | None] = [None] * len(reservation.granted)
        refs = [slot.ref for slot in reservation.slots]
        hashes = [bring.hashes[at] for at in reservation.granted]
        try:
            if refs:
                found = self._moves.bring(namespace.spec, bring.group, hashes, refs, reservation.slots[0].region)
                self._reading.worked()
        except Failed as error:
            self._failed(error)
        except RegionError:
            self._counts["slots_lost"] += len(refs)
        finally:
            self._settle(namespace, reservation, found)
            for at, sums in zip(reservation.granted, found, strict=True):
                there[at] = sums is not None
            self._session.report_jobs(fetched=[(bring.number, bytes(there))])

    @staticmethod
    def _settle(namespace: Namespace, reservation: Reservation, found: Sequence[bytes | None]) -> None:
        came = [at for at, sums in enumerate(found) if sums is not None]
        lost = [at for at, sums in enumerate(found) if sums is None]
        region = reservation.region_id
        if came:
            sums = b"".join(filter(None, found))
            namespace.settle(reservation.id, Outcome.COMMITTED, came, region_id=region, sums=sums)
        if lost:
            namespace.settle(reservation.id, Outcome.FAILED, lost, region_id=region)

    def _write_out(self, write: m.Store, namespace: Namespace | None, region: Region) -> None:
        flags = b""
        try:
            if namespace is not None:
                flags = self._moves.write_out(
                    namespace.spec, write.group, write.hashes, write.slots, write.sums, region
                )
        except Failed as error:
            self._failed(error)
        except RegionError:
            self._counts["slots_lost"] += len(write.hashes)
        finally:
            self._session.report_jobs(stored=[(write.number, flags)], writes_off=self._moves.writing.why[:MAX_NAME])

    # The store.

    def _failed(self, error: Failed) -> None:
        """For a while, send no requests to the store, and request no work from the daemon."""
        self._counts["store_failed"] += 1
        if self._reading.begin(error):
            self._session.report_jobs(off=str(error)[:MAX_NAME])

    def _new_counts(self) -> dict[str, int]:
        new = self._counts - self._reported
        self._reported += new
        return {f"tier_{name}": count for name, count in new.items()}

"""Carries out what the residency machine says about the disk: fetches models from the store, pauses and cancels that, and removes them.

The counterpart of `agent.moves` for the edge below it, with the same verbs; one fetch at a time, as the machine has it. A fetch that finds
no slot (`agent.pulls`) pauses and says when it looks again, so that the link is free for another model meanwhile. What a fetch has when it
is paused, fails for a while or is killed stays on disk, in no book, and is gone on from; it goes when it is cancelled, when its disk is
needed, and when the model is no longer in the store. All methods but `why` are called from the agent's loop; `post` from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prefetcher.agent.fetch import STREAMS, Fetch, FetchPausedError
from prefetcher.agent.fetched import FetchedFolder
from prefetcher.agent.loader import LoadCancelledError, LoadControl
from prefetcher.agent.manifest import ModelSource
from prefetcher.agent.pulls import Pulls
from prefetcher.agent.store_catalog import StoreCatalog
from prefetcher.clock import Clock
from prefetcher.core import events as ev
from prefetcher.core.copies import Weights
from prefetcher.core.types import Cause, Tier, WeightsKey
from prefetcher.errors import (
    ChangedError,
    IntegrityError,
    ManifestError,
    NoRoomError,
    PrefetcherError,
    RateLimitedError,
    TemporaryError,
    UnsafeFormatError,
    UsageError,
)
from prefetcher.telemetry.logs import log
from prefetcher.telemetry.metrics import Metrics
from prefetcher.words import size

__all__ = ["Fetches", "StoreOptions"]

_PROGRESS_BYTES = 64 << 20
_PROGRESS_S = 5.0
#: Seconds until a model that was published anew, or a store that refuses, is tried again.
_CHANGED_S, _REFUSED_S = 2.0, 60.0
_BAD = "bad_in_store"


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a node fetches; names as in `config.StoreSettings`. `disk_bytes` None: all that the file system has, but `reserve_bytes`."""

    disk_bytes: int | None = None
    reserve_bytes: int = 1_000_000_000
    bytes_per_s: float = 1e9
    prefetch_bytes_per_s: float | None = None
    streams: int = STREAMS
    pulls_per_model: int = 2
    pulls: int = 16
    deadline_s: float = 60.0
    look_s: float = 30.0


@dataclass(slots=True)
class _Run:
    control: LoadControl
    cause: Cause
    started_s: float
    thread: threading.Thread | None = None
    done_bytes: int = 0
    told_bytes: int = 0
    told_s: float = 0.0


@dataclass(slots=True)
class Fetches:
    """The fetches of one node. `fetched(source)` is told, in the loop, before the machine is; `look_again` asks for a look at the store;
    `booked_bytes` is what the machine has on disk."""

    catalog: StoreCatalog
    folder: FetchedFolder
    pulls: Pulls
    options: StoreOptions
    clock: Clock
    post: Callable[[ev.Event | Callable[[], None]], None]
    fetched: Callable[[ModelSource], None]
    look_again: Callable[[], None]
    metrics: Metrics
    booked_bytes: Callable[[], int]
    _runs: dict[WeightsKey, _Run] = field(default_factory=dict)
    _leaving: set[WeightsKey] = field(default_factory=set)
    _verified: dict[WeightsKey, set[tuple[int, int]]] = field(default_factory=dict)
    #: By model that is wanted and not here: what it waits for, or why it failed, as a short name; and the same as a sentence.
    _why: dict[WeightsKey, tuple[str, str]] = field(default_factory=dict)
    _done: dict[WeightsKey, int] = field(default_factory=dict)

    def carry_out(self, told: ev.LoadWeights | ev.PauseLoad | ev.CancelLoad | ev.EvictWeights, *, demanded: bool) -> None:
        """Does what the machine says of the disk, or of the store. `demanded`: somebody waits for it."""
        match told:
            case ev.LoadWeights():
                self.start(told, demanded=demanded)
            case ev.PauseLoad():
                self.pause(told.key)
            case ev.CancelLoad():
                self.evict(told.key, told.tier)
            case ev.EvictWeights():
                log().info("evicting", model=told.key.model, tier=told.tier.name.lower(), reason=told.reason.value)
                self.evict(told.key, told.tier)

    def start(self, told: ev.LoadWeights, *, demanded: bool = False) -> None:
        """Starts a fetch, or goes on with one. Only what nobody waits for is capped."""
        capped = told.cause is not Cause.DEMAND and not demanded
        run = _Run(LoadControl(self.options.prefetch_bytes_per_s if capped else None), told.cause, self.clock.steady_s())
        run.done_bytes = told.resume_from_bytes
        if not told.resumed:
            log().info("fetch_started", model=told.key.model, cause=told.cause.value, bytes=told.bytes)
        self._runs[told.key] = run
        run.thread = threading.Thread(target=self._run, args=(run, told.key), name=f"fetch {told.key.model}")
        run.thread.start()

    def hurry(self, key: WeightsKey) -> None:
        """Demand waits for what is fetched: the cap on prefetches no longer holds for it."""
        run = self._runs.get(key)
        if run is not None:
            run.control.limit(None)

    def pause(self, key: WeightsKey) -> None:
        run = self._runs.get(key)
        if run is not None:
            run.control.pause()

    def evict(self, key: WeightsKey, tier: Tier) -> None:
        """Stops what is fetched, or removes what is there; what people put there stays. Answered by `WeightsEvicted`."""
        run = self._runs.get(key)
        if tier is Tier.REMOTE:
            self.post(ev.WeightsEvicted(key, tier))
        elif run is not None:
            run.control.cancel()
        elif key not in self._leaving:
            self._leaving.add(key)
            threading.Thread(target=self._remove, args=(key,), name=f"remove {key.model}").start()

    def why(self, key: WeightsKey) -> tuple[str, str]:
        """What a model that is not on disk waits for, or why its last fetch failed, as a short name and a sentence; '' where nothing."""
        return self._why.get(key, ("", ""))

    def is_bad(self, key: WeightsKey) -> bool:
        """Whether its last fetch brought bytes that are not those of its manifest."""
        return self.why(key)[0] == _BAD

    def why_refused(self, weights: Weights, reason: str) -> str:
        """Why nobody is given weights that are not on disk, as a sentence; '' where the disk has nothing to do with it."""
        code, text = self.why(weights.key)
        if weights.ready(Tier.DISK) or reason not in ("deadline", "no_copy", "load_failed", "stalled", "too_large", "does_not_fit"):
            return ""
        if reason in ("too_large", "does_not_fit"):
            limit = "PREFETCHER_STORE__DISK_BYTES" if self.options.disk_bytes is not None else "PREFETCHER_STORE__DISK_RESERVE_BYTES"
            where = f"the disk of {self.folder.place}"
            what = "what it may take there" if reason == "too_large" else "what is left there beside models that stay"
            return f"{weights.key.model} ({size(weights.bytes)}) is larger than {what}: make room on {where}, or change {limit}"
        return f"{text} ({code})" if text else ""

    def done_bytes(self, key: WeightsKey) -> int:
        run = self._runs.get(key)
        return self._done.get(key, 0) if run is None else run.done_bytes

    def close(self) -> None:
        """Stops what runs; its bytes stay for the next start."""
        runs = list(self._runs.values())
        for run in runs:
            run.control.pause()
        for run in runs:
            if run.thread is not None:
                run.thread.join()
        self.folder.close()

    # --- threads ---

    def _run(self, run: _Run, key: WeightsKey) -> None:
        try:
            event = self._in_turn(run, key)
        except Exception as exc:  # noqa: BLE001 - a fetch that ends without a word would stay on its way for ever
            log().error("fetch_failed", model=key.model, reason=str(exc), exc_info=not isinstance(exc, OSError))
            self._why[key] = ("fetch_failed", f"{key.model} can't be fetched: {exc}")
            event = ev.LoadFailed(key, Tier.DISK, "fetch_failed")
        self._done[key] = run.done_bytes
        if isinstance(event, ev.WeightsLoaded | ev.WeightsEvicted):
            self._forget(key)
        if isinstance(event, ev.WeightsLoaded | ev.LoadFailed):
            ok = isinstance(event, ev.WeightsLoaded)
            self.metrics.fetches.labels(cause=run.cause.value, result="ready" if ok else "failed").inc()
            if ok:
                self.metrics.fetch_time.observe(self.clock.steady_s() - run.started_s)
        self._runs.pop(key, None)
        self.post(event)

    def _in_turn(self, run: _Run, key: WeightsKey) -> ev.Event:
        slots = self.pulls.take(key)
        try:
            return self._waits(run, key, slots.missing) if slots.missing else self._fetch(run, key)
        finally:
            self.pulls.give_back(slots)

    def _waits(self, run: _Run, key: WeightsKey, missing: str) -> ev.Event:
        if run.control.cancelled:
            self.folder.remove(key)
            return ev.WeightsEvicted(key, Tier.DISK)
        if self.why(key)[0] != missing:
            where = "other nodes fetch it" if missing == "model_slot" else "the cluster fetches as many models as it may"
            self._why[key] = (missing, f"{key.model} waits for its turn: {where}")
            log().info("fetch_waits", model=key.model, reason=missing)
        self._count(missing)
        return ev.LoadPaused(key, Tier.DISK, run.done_bytes, self.pulls.retry_s())

    def _fetch(self, run: _Run, key: WeightsKey) -> ev.Event:
        taken_bytes = 0
        try:
            manifest, objects = self.catalog.plan(key)
            taken_bytes = manifest.bytes
            part = self.folder.part(key)
            self._make_room(key, manifest.bytes)
            verified = self._verified.setdefault(key, set())
            fetch = Fetch(
                manifest,
                objects,
                self.catalog.store,
                part,
                run.control,
                self.clock,
                on_progress=lambda done: self._progress(run, key, done),
                on_wait=self._count,
                streams=self.options.streams,
                deadline_s=self.options.deadline_s,
                verified=verified,
            )
            result = fetch.run()
            source = self.folder.publish(key, manifest)
        except FetchPausedError:
            return ev.LoadPaused(key, Tier.DISK, run.done_bytes)
        except LoadCancelledError:
            self.folder.remove(key)
            return ev.WeightsEvicted(key, Tier.DISK, taken_bytes)
        except PrefetcherError as exc:
            return self._failed(key, exc)
        log().info("fetched", model=key.model, bytes=result.fetched_bytes, kept_bytes=result.kept_bytes, failures=result.failures)
        self.post(lambda: self.fetched(source))
        return ev.WeightsLoaded(key, Tier.DISK)

    def _failed(self, key: WeightsKey, exc: PrefetcherError) -> ev.Event:
        bad = isinstance(exc, IntegrityError | ManifestError | UnsafeFormatError)
        retry_after_s = exc.retry_after_s if isinstance(exc, TemporaryError) else 0.0
        if bad:
            reason = _BAD
            self.catalog.quarantine(key, str(exc))
            self.folder.remove(key)
            self._verified.pop(key, None)
        elif isinstance(exc, ChangedError):
            reason, retry_after_s = "changed_in_store", _CHANGED_S
            self._verified.pop(key, None)
        elif isinstance(exc, NoRoomError):
            reason = "disk_full"
        elif isinstance(exc, UsageError):
            reason, retry_after_s = "store_refuses", _REFUSED_S
        else:
            reason = "store_busy" if isinstance(exc, RateLimitedError) else "store_away"
        self._why[key] = (reason, str(exc))
        log().warning("fetch_failed", model=key.model, code=reason, reason=str(exc), source_bad=bad)
        if bad or isinstance(exc, ChangedError):
            self.look_again()
        return ev.LoadFailed(key, Tier.DISK, reason, retry_after_s * self.clock.speed, source_bad=bad)

    def _make_room(self, key: WeightsKey, wanted_bytes: int) -> None:
        """What earlier fetches of other models left goes where its disk is needed; models themselves leave as the machine says."""
        missing = wanted_bytes + self.options.reserve_bytes - self.folder.free_bytes()
        if self.options.disk_bytes is not None:
            missing = max(missing, self.booked_bytes() + self.folder.parts_bytes([key]) - self.options.disk_bytes)
        if missing > 0:
            self.folder.drop_parts(key, missing)

    def _progress(self, run: _Run, key: WeightsKey, done: int) -> None:
        run.done_bytes = max(run.done_bytes, done)
        now_s = self.clock.steady_s()
        if done - run.told_bytes >= _PROGRESS_BYTES or now_s - run.told_s >= _PROGRESS_S * self.clock.speed:
            run.told_bytes, run.told_s = done, now_s
            self.post(ev.BytesVerified(key, Tier.DISK, done))

    def _remove(self, key: WeightsKey) -> None:
        self.folder.remove(key)
        self._forget(key)
        self._leaving.discard(key)
        self.post(ev.WeightsEvicted(key, Tier.DISK))

    def _count(self, reason: str) -> None:
        self.metrics.store_waits.labels(reason=reason).inc()

    def _forget(self, key: WeightsKey) -> None:
        self._why.pop(key, None)
        self._done.pop(key, None)
        self._verified.pop(key, None)

    def room(self, booked: Iterable[WeightsKey]) -> int:
        """Bytes on the disk beside those of `booked` models: what is free, and what is left of others."""
        return self.folder.free_bytes() + self.folder.parts_bytes(booked) - self.options.reserve_bytes

"""Carries out what the residency machine says about bytes: starts, pauses and cancels loads, evicts, and reports back as events.

Covers the threads of loads and copies that are on their way out. Decides nothing. All methods are called from the agent's loop; `post` is
called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from prefetcher.agent.disk import DiskTier
from prefetcher.agent.hostmem import HostArena, HostCopy
from prefetcher.agent.loader import LoadCancelledError, LoadControl, load
from prefetcher.agent.manifest import ModelSource
from prefetcher.agent.paths import ServedPaths
from prefetcher.clock import Clock
from prefetcher.core import events as ev
from prefetcher.core.types import Cause, Tier, WeightsKey
from prefetcher.errors import IntegrityError, ManifestError, PrefetcherError, TemporaryError, UnsafeFormatError
from prefetcher.telemetry.logs import log

__all__ = ["Moves"]

#: A load tells its progress after so many bytes, so that a fast disk does not flood the loop, or so many of the machine's seconds, so that
#: a slow one is not taken for one that hangs.
_PROGRESS_BYTES = 64 << 20
_PROGRESS_S = 5.0


@dataclass(slots=True)
class _Move:
    control: LoadControl
    thread: threading.Thread | None = None
    told_bytes: int = 0
    told_s: float = 0.0
    done_bytes: int = 0


@dataclass(slots=True)
class Moves:
    """The loads of one node into `arena`, and what leaves it.

    `prefetch_bytes_per_s` caps what prefetches read, so that a slow disk stays free for others; demand is never capped. `paths` lead
    to what is there.
    """

    arena: HostArena
    disk: DiskTier
    clock: Clock
    threads: int
    post: Callable[[ev.Event], None]
    source_of: Callable[[WeightsKey], ModelSource | None]
    prefetch_bytes_per_s: float | None = None
    paths: ServedPaths | None = None
    _moves: dict[WeightsKey, _Move] = field(default_factory=dict)
    _leaving: dict[WeightsKey, HostCopy] = field(default_factory=dict)

    def start(self, told: ev.LoadWeights) -> None:
        """Starts a load, or goes on with one that was paused."""
        move = self._moves.get(told.key)
        if move is not None:  # also one that was paused before its first byte
            move.control.resume()
            return
        source = self.source_of(told.key)
        if source is None:
            self.post(ev.LoadFailed(told.key, told.to_tier, "the files are no longer in the models folder"))
            return
        bad = self.disk.quarantined(source)
        if bad is not None:
            log().warning("load_refused", model=told.key.model, reason=bad, then="replace the file, or make its manifest again")
            self.post(ev.LoadFailed(told.key, told.to_tier, bad, source_bad=True))
            return
        move = _Move(LoadControl(None if told.cause is Cause.DEMAND else self.prefetch_bytes_per_s))
        self._moves[told.key] = move
        move.thread = threading.Thread(target=self._run, args=(move, source), name=f"load {told.key.model}")
        move.thread.start()

    def hurry(self, key: WeightsKey) -> None:
        """Demand waits for what moves: the cap on prefetches no longer holds for it."""
        move = self._moves.get(key)
        if move is not None:
            move.control.limit(None)

    def _run(self, move: _Move, source: ModelSource) -> None:
        key = source.key
        copy: HostCopy | None = None
        try:
            copy = self.arena.begin(source.manifest)
            load(
                source.manifest,
                source.folder,
                self.arena,
                copy,
                clock=self.clock,
                on_block=lambda file, block, done: self._progress(move, key, done),
                on_paused=lambda done: self.post(ev.LoadPaused(key, Tier.HOST, done)),
                control=move.control,
                threads=self.threads,
            )
            self.arena.publish(copy)
            if self.paths is not None:
                self.paths.in_host(source, self.arena.paths(copy))
        except LoadCancelledError:
            self._give_back(key, copy)
            self._end(key, ev.WeightsEvicted(key, Tier.HOST, source.manifest.bytes))
        except PrefetcherError as exc:
            self._give_back(key, copy)
            bad = isinstance(exc, IntegrityError | ManifestError | UnsafeFormatError)
            if bad:
                self.disk.quarantine(source, str(exc))
            retry_after_s = exc.retry_after_s if isinstance(exc, TemporaryError) else 0.0
            log().warning("load_failed", model=key.model, reason=str(exc), source_bad=bad)
            self._end(key, ev.LoadFailed(key, Tier.HOST, str(exc), retry_after_s, source_bad=bad))
        except Exception as exc:  # noqa: BLE001 - a load that ends without a word would stay on its way for ever
            self._give_back(key, copy)
            log().error("load_failed", model=key.model, reason=str(exc), source_bad=False, exc_info=not isinstance(exc, OSError))
            self._end(key, ev.LoadFailed(key, Tier.HOST, str(exc)))
        else:
            self._end(key, ev.WeightsLoaded(key, Tier.HOST))

    def _give_back(self, key: WeightsKey, copy: HostCopy | None) -> None:
        copy = copy or self.arena.part(key)
        if copy is not None:
            self.arena.evict(copy)

    def _end(self, key: WeightsKey, event: ev.Event) -> None:
        self._moves.pop(key, None)
        self.post(event)

    def _progress(self, move: _Move, key: WeightsKey, done: int) -> None:
        move.done_bytes = done
        now_s = self.clock.steady_s()
        if done - move.told_bytes >= _PROGRESS_BYTES or now_s - move.told_s >= _PROGRESS_S * self.clock.speed:
            move.told_bytes, move.told_s = done, now_s
            self.post(ev.BytesVerified(key, Tier.HOST, done))

    def done_bytes(self, key: WeightsKey) -> int:
        """Bytes of a running load that are verified."""
        move = self._moves.get(key)
        return 0 if move is None else move.done_bytes

    def pause(self, key: WeightsKey) -> None:
        move = self._moves.get(key)
        if move is not None:
            move.control.pause()

    def evict(self, key: WeightsKey, tier: Tier, keep_bytes: int = 0) -> None:
        """Stops what moves, or gives up what is there, but for about `keep_bytes` where that can be done; answered by `WeightsEvicted` once
        the kernel has the bytes back."""
        move = self._moves.get(key)
        if move is not None:
            move.control.cancel()
            return
        copy = (self.arena.copy(key) or self.arena.part(key)) if tier is Tier.HOST else None
        if copy is None:
            if key not in self._leaving:
                self.post(ev.WeightsEvicted(key, tier))
            return
        if self.paths is not None:
            self.paths.leaves_host(key)
        if keep_bytes:
            held = copy.bytes
            kept, why = self.arena.trim(copy, keep_bytes)
            if kept:
                self.post(ev.WeightsEvicted(key, tier, held - kept, kept))
                return
            log().info("not_kept", model=key.model, bytes=keep_bytes, reason=why, then="all of it is evicted")
        if self.arena.evict(copy):
            self._leaving[key] = copy
        else:
            self.post(ev.WeightsEvicted(key, tier, copy.bytes))

    def collect(self) -> None:
        """Looks after evicted copies that somebody still maps."""
        if self._leaving:
            self.arena.collect()
        for key, copy in list(self._leaving.items()):
            if not self.arena.evict(copy):
                del self._leaving[key]
                self.post(ev.WeightsEvicted(key, Tier.HOST, copy.bytes))

    def close(self) -> None:
        """Cancels what runs and waits for it."""
        moves = list(self._moves.values())
        for move in moves:
            move.control.cancel()
        for move in moves:
            if move.thread is not None:
                move.thread.join()

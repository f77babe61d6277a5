"""What programs ask an agent for at its socket: leases with descriptors of files, and acts by hand.

Answers in threads of the lease server (`agent.lease_server.LeasePort`); what is decided, and when, is the machine's, in the agent's loop.
Covers why somebody is refused, in words, and where each file of a grant is read.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec

from prefetcher.agent import protocol
from prefetcher.agent.disk import DiskTier
from prefetcher.agent.fetching import Fetches
from prefetcher.agent.hostmem import HostArena
from prefetcher.agent.lease_server import Grant, GrantedFile, Holder
from prefetcher.agent.manifest import ModelSource
from prefetcher.agent.model_sources import LOOKED_AT_AGAIN, ModelSources
from prefetcher.agent.paths import ServedPaths
from prefetcher.agent.waits import Waits
from prefetcher.clock import Clock
from prefetcher.core import events as ev
from prefetcher.core.copies import Holdings
from prefetcher.core.types import ModelName, ModelVersion, Tier, WeightsKey
from prefetcher.errors import IntegrityError, ModelNotFoundError, NoRoomError, PrefetcherError, UnavailableError, WeightsError
from prefetcher.ports import Acted
from prefetcher.telemetry.logs import log
from prefetcher.telemetry.metrics import Metrics

__all__ = ["LeaseDesk"]


@dataclass(frozen=True, slots=True)
class LeaseDesk:
    """`asked(holder, model, target)` has the machine hear of an open, and is called in the agent's loop, as all that is given to `post` is;
    `act` is an act by hand."""

    waits: Waits
    post: Callable[[ev.Event | Callable[[], None]], None]
    asked: Callable[[str, ModelName, ev.Target], None]
    act: Callable[[str, str], Acted]
    holdings: Holdings
    sources: ModelSources
    disk: DiskTier
    arena: HostArena
    paths: ServedPaths | None
    fetches: Fetches | None
    metrics: Metrics
    clock: Clock

    def acquire(self, holder: Holder, model: str, version: str, timeout_s: float, gone: threading.Event) -> Grant:
        started_s = self.clock.steady_s()
        name = ModelName(model)
        target = WeightsKey(name, ModelVersion(version)) if version else name
        wait = self.waits.ask(holder.name, lambda: self.post(partial(self.asked, holder.name, name, target)), timeout_s, gone)
        if wait.refusal is not None:
            raise self._refused(model, version, wait.refusal)
        if wait.grant is None:
            raise UnavailableError(f"{model} was not there within {timeout_s:g} s; try again", retry_after_s=1.0)
        source = self.sources.source(wait.grant.key)
        if source is None:
            raise ModelNotFoundError(f"the files of {model} left the models folder", model=model)
        fds, where = self._descriptors(wait.grant, source)
        if where == "disk":
            log().info("bypassed", model=model, reason=wait.grant.reason)
            self.metrics.skipped.labels(what="caching", reason=wait.grant.reason or "bypass").inc()
        entries = source.manifest.files
        files = [GrantedFile(fd, entry.path, entry.bytes) for fd, entry in zip(fds, entries, strict=True)]
        waited_s = self.clock.steady_s() - started_s
        path = "" if self.paths is None else self.paths.of(wait.grant.key)
        return Grant(wait.grant.key, where, files, wait.found, waited_s, path)

    def _descriptors(self, grant: ev.GrantLease, source: ModelSource) -> tuple[list[int], Literal["host", "disk"]]:
        """Of all files: from host memory, or from disk but for those that are whole in a part."""
        copy = self.arena.copy(grant.key) if grant.tier is Tier.HOST else None
        if copy is not None:
            return self.arena.descriptors(copy), "host"
        near: list[int] = []
        part = self.arena.part(grant.key)
        if part is not None:
            with contextlib.suppress(NoRoomError):  # it just left
                near = self.arena.descriptors(part)
            self.metrics.kept.inc(sum(entry.bytes for entry in source.manifest.files[: len(near)]))
        try:
            return near + self.disk.open_verified(source, len(near)), "disk"
        except BaseException:
            for fd in near:
                os.close(fd)
            raise

    def _refused(self, model: str, version: str, refusal: ev.RefuseLease) -> PrefetcherError:
        refused = self.sources.refused(model)
        if refused is not None:
            text = f"{refused}; {LOOKED_AT_AGAIN}"
            return type(refused)(text, model=model) if isinstance(refused, WeightsError) else type(refused)(text)
        if refusal.reason == "unknown_model":
            self.sources.named(model)
            return ModelNotFoundError(f"no version {version!r} of {model}; check the version", model=model)
        weights = self.holdings.resolve(refusal.target)
        source = None if weights is None else self.sources.source(weights.key)
        reason = self.disk.quarantined(source) if source is not None else None
        if reason:
            return IntegrityError(f"{reason}; {LOOKED_AT_AGAIN}", model=model)
        retry = refusal.retry_after_s
        why = ""
        if self.fetches is not None and weights is not None:
            why = self.fetches.why_refused(weights, refusal.reason)
            if why and self.fetches.is_bad(weights.key):
                return IntegrityError(why, model=model)
        return NoRoomError(why or f"{model}: {refusal.reason}", retry_after_s=1.0 if retry is None else retry)

    def release(self, holder: Holder) -> None:
        self.post(ev.HolderLost(holder.name))

    def control(self, verb: protocol.Verb, model: str, version: str) -> msgspec.Struct | None:
        if verb == "status":
            back = threading.Event()
            self.post(back.set)
            if not back.wait(2.0):
                raise UnavailableError("the agent's loop does not move", retry_after_s=1.0)
            return None
        acted = self.act(verb, model)
        if not acted.ok:
            raise NoRoomError(f"{verb} {model}: {acted.reason}")
        return None

"""What weights there are below host memory: the models folder, what was fetched into it, and the store, as the residency machine is told.

Covers looking at all three, which version of a model counts, and what is wrong with them as a whole. Looks are made by a thread and taken
in the agent's loop. A model that people put into the folder counts before the store's of the same name. Covers no bytes of files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

from prefetcher.agent.disk import DiskTier
from prefetcher.agent.fetching import Fetches
from prefetcher.agent.manifest import Catalog, ModelSource, scan_models_folder
from prefetcher.agent.store_catalog import StoreModels
from prefetcher.clock import Clock
from prefetcher.core import events as ev
from prefetcher.core.copies import Holdings
from prefetcher.core.types import ModelName, Tier, WeightsKey
from prefetcher.errors import PrefetcherError, WeightsError
from prefetcher.telemetry.logs import log
from prefetcher.words import size

__all__ = ["LOOKED_AT_AGAIN", "Look", "ModelSources"]

#: Real seconds between looks at the models folder.
_SCAN_S = 5.0
_SOON_S = 0.2
LOOKED_AT_AGAIN = f"the folder is looked at again within {_SCAN_S:.0f} s"
#: Models that one message names.
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Look:
    """What was there at one time: `changes` is how much had come and left of what was fetched before it began."""

    catalog: Catalog
    fetched: Mapping[WeightsKey, ModelSource] = field(default_factory=dict)
    store: StoreModels = field(default_factory=StoreModels)
    changes: int = 0

    def keys(self) -> set[WeightsKey]:
        """All weights that exist."""
        return {s.key for s in self.catalog.models.values()} | set(self.fetched) | {m.key for m in self.store.models.values()}

    def sources(self) -> dict[ModelName, ModelSource]:
        """Every model on disk; of those that were fetched in several versions, the store's."""
        found = {key.model: source for key, source in self.fetched.items() if key.model not in self.store.models}
        found |= {m.key.model: self.fetched[m.key] for m in self.store.models.values() if m.key in self.fetched}
        return found | self.catalog.models


class ModelSources:
    """The models of one node. `fetches` is None where there is no store."""

    def __init__(
        self, folder: Path, host_bytes: int, link_bytes_per_s: float, disk: DiskTier, clock: Clock, fetches: Fetches | None = None
    ) -> None:
        self._folder, self._host_bytes, self._link_bytes_per_s = folder, host_bytes, link_bytes_per_s
        self._disk, self._clock = disk, clock
        self.fetches = fetches
        self._now = Look(Catalog())
        self._by_key: dict[WeightsKey, ModelSource] = {}
        #: What is wrong with the models folder, or the store, as a whole, and what of them the log said that it is refused.
        self._folder_problem = self._store_problem = ""
        self._refused_logged: set[str] = set()
        self._look_at_store = threading.Event()

    # --- looking ---

    def look(self, *, at_store: bool) -> Look:
        """What is there now. Raises ModelNotFoundError where there is no folder of models; a store that is away is what it was before."""
        fetches = self.fetches
        changes = 0 if fetches is None else fetches.folder.changes
        if fetches is not None and at_store:
            try:
                fetches.catalog.look()
                self._say_of_store("")
            except PrefetcherError as exc:
                self._say_of_store(str(exc))
        catalog = scan_models_folder(self._folder)
        if fetches is None:
            return Look(catalog)
        fetched = fetches.folder.scan()
        for source in catalog.models.values():
            if source.key in fetched:
                fetches.folder.remove(source.key)  # people brought the same
        return Look(catalog, fetched, fetches.catalog.found, changes)

    def _say_of_store(self, problem: str) -> None:
        before, self._store_problem = self._store_problem, problem
        if problem and not before:
            log().warning("store_away", reason=problem, then="models on disk are served, others wait")
        elif before and not problem:
            log().info("store_back")

    def look_again(self) -> None:
        """The store changed: it is looked at soon."""
        self._look_at_store.set()

    def run(self, stop: threading.Event, post: Callable[[Callable[[], None]], None], take: Callable[[Look], None]) -> None:
        """Looks until `stop`, and has `take` called by `post` with what was found."""
        store_due_s = self._real_s() + self._look_s()
        every_s = min(_SCAN_S, self._look_s())
        while not stop.wait(min(every_s, _SOON_S) if self._look_at_store.is_set() else every_s):
            at_store = self._look_at_store.is_set() or self._real_s() >= store_due_s
            if at_store:
                self._look_at_store.clear()
                store_due_s = self._real_s() + self._look_s()
            try:
                found = self.look(at_store=at_store)
            except (WeightsError, OSError) as exc:
                log().warning("models_folder_unreadable", reason=str(exc))
                continue
            post(lambda found=found: take(found))  # type: ignore[misc]

    def _look_s(self) -> float:
        return float("inf") if self.fetches is None else self.fetches.options.look_s

    def _real_s(self) -> float:
        return self._clock.steady_s() / self._clock.speed

    # --- taking in ---

    def take(self, look: Look, adopted: Set[WeightsKey], holdings: Holdings, hear: Callable[[ev.Event], None]) -> None:
        """Has the machine hear what changed. A look that is older than the last fetch or removal says nothing."""
        if self.fetches is not None and look.changes != self.fetches.folder.changes:
            return
        before, self._now = self._now, look
        for model, source in look.catalog.models.items():
            known = before.catalog.models.get(model)
            if known is not None and known.key == source.key and not adopted and self._on_disk(source, holdings):
                continue
            self._by_key[source.key] = source
            self._see(source.key, source.manifest.bytes, {Tier.DISK}, adopted, holdings, hear)
        if self.fetches is not None:
            self._take_store(look, adopted, holdings, hear)
        self._say_what_is_wrong(look)

    def _take_store(self, look: Look, adopted: Set[WeightsKey], holdings: Holdings, hear: Callable[[ev.Event], None]) -> None:
        assert self.fetches is not None
        by_hand = {source.key for source in look.catalog.models.values()}
        remote = {m.key: m.bytes for m in look.store.models.values() if m.key.model not in look.catalog.models}
        for key, weights in list(holdings.weights.items()):
            if weights.ready(Tier.REMOTE) and key not in remote:
                hear(ev.WeightsEvicted(key, Tier.REMOTE))
            if weights.ready(Tier.DISK) and key not in look.fetched and key not in by_hand and not self._is_by_hand(key):
                hear(ev.WeightsEvicted(key, Tier.DISK))
        for key, total in remote.items():
            tiers = {Tier.REMOTE, Tier.DISK} if key in look.fetched else {Tier.REMOTE}
            self._see(key, total, tiers, adopted, holdings, hear)
        for key, source in look.fetched.items():
            self._by_key[key] = source
            if key not in remote and key.model not in look.catalog.models:
                self._see(key, source.manifest.bytes, {Tier.DISK}, adopted, holdings, hear, serves=key.model not in look.store.models)
        booked = list(holdings.in_tier[Tier.DISK])
        room = holdings.used_bytes[Tier.DISK] + max(0, self.fetches.room(booked))
        most = self.fetches.options.disk_bytes
        hear(ev.SpaceSeen(Tier.DISK, room if most is None else min(room, most)))

    def _is_by_hand(self, key: WeightsKey) -> bool:
        """Whether the weights came from the folder and not from the store: then nothing of them is looked after here."""
        source = self._by_key.get(key)
        return source is not None and self.fetches is not None and not self.fetches.folder.is_inside(source.folder)

    def _see(
        self,
        key: WeightsKey,
        total: int,
        tiers: Iterable[Tier],
        adopted: Set[WeightsKey],
        holdings: Holdings,
        hear: Callable[[ev.Event], None],
        *,
        serves: bool = True,
    ) -> None:
        """Weights are in these tiers, and serve from now on. What the machine knows already is not said again."""
        there = {*tiers, *({Tier.HOST} if key in adopted else ())}
        serving, weights = holdings.serving.get(key.model), holdings.weights.get(key)
        if weights is None or not all(tier in weights.copies for tier in there):
            link_s = {Tier.HOST: total / self._link_bytes_per_s}
            if self.fetches is not None:
                link_s[Tier.DISK] = total / self.fetches.options.bytes_per_s
            hear(ev.CatalogSeen(key, total, link_s, frozenset(there)))
        follows = weights is not None and weights.predecessor is not None
        if serves and serving is not None and serving != key and not follows:
            hear(ev.VersionPublished(serving, key))

    def was_fetched(self, source: ModelSource) -> None:
        """A model came from the store; its files may be opened from now on."""
        self._by_key[source.key] = source

    # --- asking ---

    def source(self, key: WeightsKey) -> ModelSource | None:
        """Where the files of weights are, or were last."""
        return self._by_key.get(key)

    def names(self) -> set[ModelName]:
        """All models, near or far."""
        return {*self._now.catalog.models, *self._now.store.models, *(key.model for key in self._now.fetched)}

    def refused(self, model: str) -> PrefetcherError | None:
        """Why a model is none, in the folder or in the store."""
        found = self._now.catalog.refused.get(model)
        if found is not None:
            return found
        of_store = (exc for exc in self._now.store.refused.values() if isinstance(exc, WeightsError) and exc.model == model)
        return None if ModelName(model) in self._now.store.models else next(of_store, None)

    def named(self, model: str) -> ModelSource:
        """The model on disk. Raises ModelNotFoundError, or its own error where its folder was refused."""
        return Catalog(self._now.sources(), self._now.catalog.refused).source(model)

    def problems(self) -> list[str]:
        """What is wrong: models that are refused or quarantined, larger than memory or disk, none at all, or the store."""
        found = [f"{name}: {error}; {LOOKED_AT_AGAIN}" for name, error in sorted(self._now.catalog.refused.items())]
        for name, source in sorted(self._now.sources().items()):
            reason = self._disk.quarantined(source)
            if reason is not None:
                found.append(f"{name}: quarantined: {reason}; {LOOKED_AT_AGAIN}")
        found += [f"{name}: {error}" for name, error in sorted(self._now.store.refused.items())]
        return [*found, *(problem for problem in (self._folder_problem, self._store_problem) if problem)]

    def _on_disk(self, source: ModelSource, holdings: Holdings) -> bool:
        """Whether the machine knows that the files are there, or they are known to be bad; false once bad ones were replaced."""
        weights = holdings.weights.get(source.key)
        return (weights is not None and weights.ready(Tier.DISK)) or self._disk.quarantined(source) is not None

    def _say_what_is_wrong(self, look: Look) -> None:
        """The log says each thing once, as long as it stays so."""
        refused = {name: f"{error}; {LOOKED_AT_AGAIN}" for name, error in look.catalog.refused.items()}
        refused |= {f"store/{name}": str(error) for name, error in look.store.refused.items()}
        for name, reason in sorted(refused.items()):
            if name not in self._refused_logged:
                log().warning("model_refused", folder=name, reason=reason)
        self._refused_logged = set(refused)
        before, self._folder_problem = self._folder_problem, self._problem_of(look)
        if self._folder_problem and self._folder_problem != before:
            log().warning("models_folder", reason=self._folder_problem)

    def _problem_of(self, look: Look) -> str:
        """Why the models can't be served from memory as it is, or ''."""
        sizes = {model: source.manifest.bytes for model, source in look.sources().items()}
        sizes |= {m.key.model: m.bytes for m in look.store.models.values() if m.key.model not in sizes}
        if not sizes:
            if self.fetches is not None:
                where = f"{self.fetches.catalog.store.place} and none in {self._folder}"
                return f"no model in {where}: publish some, `prefetcher publish FOLDER {self.fetches.catalog.store.place}`"
            folder = self._folder
            return f"no model in {folder}: put a folder of safetensors files for each there, then run `prefetcher manifest {folder}`"
        large = sorted((model for model, taken in sizes.items() if taken > self._host_bytes), key=lambda model: (-sizes[model], model))
        if not large:
            return ""
        named = ", ".join(f"{model} ({size(sizes[model])})" for model in large[:_NAMED]) + (", …" if len(large) > _NAMED else "")
        are = "is" if len(large) == 1 else "are"
        count = "every model is" if len(large) == len(sizes) else f"{len(large)} of {len(sizes)} models {are}"
        which = f"{count} larger than --host-bytes ({size(self._host_bytes)}) and always read from disk: {named}"
        return f"{which}; the largest needs --host-bytes {sizes[large[0]]}"

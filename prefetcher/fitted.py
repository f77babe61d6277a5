"""What an installation has fitted and goes by: new learners, and fits and seasons in its artifact store.

Which columns the hazard is given beside its own is the registry's word. Covers neither fitting (`prefetcher_models`) nor storing
(`prefetcher_connectors.artifact_store`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefetcher.clock import Clock
from prefetcher.config import Settings, artifacts_place
from prefetcher.controller import records
from prefetcher.controller.learner import Learner, ScheduledPredictor
from prefetcher.errors import ArtifactError, TemporaryError, UsageError
from prefetcher.ports import StateStore
from prefetcher.telemetry.logs import log
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.artifact_store import ArtifactStore
from prefetcher_models.registry import hazard_sources

if TYPE_CHECKING:
    from prefetcher_models.fitting import Backend
    from prefetcher_models.hazard import Fit, Hazard
    from prefetcher_models.seasonal import SeasonalSettings
    from prefetcher_models.seasonal_artifact import NamedSeasons

__all__ = ["Fitted", "backend_of", "seasonal_of"]


class Fitted:
    """By `settings`. What is imported for fits is imported when it is asked for."""

    def __init__(self, settings: Settings, clock: Clock, metrics: Metrics) -> None:
        self._settings = settings
        self._clock = clock
        self._metrics = metrics

    def new_learner(self, fit: Fit | None = None) -> Learner:
        """One that has learned nothing; until its first fit it forecasts by `fit`."""
        decision = self._settings.decision

        def predictor() -> ScheduledPredictor:
            from prefetcher_models.blend import WatchedHazard
            from prefetcher_models.hazard import HazardSettings

            return WatchedHazard(HazardSettings(seed=decision.seed), fit, _columns())

        return Learner(predictor, decision.tick_s, hazard_sources)

    def saved_fit(self, state: StateStore) -> Fit | None:
        """What a controller starts from that has learned nothing of its own: the last fit that was saved, None where there is none."""
        from prefetcher_models.artifacts import HAZARD, hazard_of

        names = _columns()
        try:
            # Written together with what was learned, and smaller.
            if state.read(records.HINTS) is not None:
                return None
            found = self._store().load(HAZARD, lambda parts, about: hazard_of(parts, about, names).fit)
        except ArtifactError as exc:
            log().info("no_fit_to_start_from", reason=str(exc), then="recent rates speak until there is one")
            return None
        except (TemporaryError, UsageError) as exc:
            log().warning("no_fit_to_start_from", reason=str(exc), then="recent rates speak until there is one")
            return None
        log().info("started_from_fit", version=found.version, until_s=found.value.until_s, rows=found.value.rows)
        return found.value

    def save_hazard(self, hazard: Hazard) -> str:
        """The version that it is saved as. Raises ArtifactError, UnavailableError, UsageError."""
        from prefetcher_models.artifacts import HAZARD, about_hazard, hazard_parts

        return self._store().publish(HAZARD, hazard_parts(hazard), about_hazard(hazard))

    def load_seasons(self) -> NamedSeasons | None:
        """The seasons in force. Raises UnavailableError, UsageError."""
        from prefetcher_models.seasonal_artifact import SEASONAL, seasons_of

        try:
            return self._store().load(SEASONAL, seasons_of).value
        except ArtifactError:
            return None

    def save_seasons(self, seasons: NamedSeasons) -> str:
        """The version that they are saved as. Raises ArtifactError, UnavailableError, UsageError."""
        from prefetcher_models.seasonal_artifact import SEASONAL, about_seasons, seasons_parts

        return self._store().publish(SEASONAL, seasons_parts(seasons), about_seasons(seasons, seasonal_of(self._settings)))

    def _store(self) -> ArtifactStore:
        def count(name: str, kind: str) -> None:
            self._metrics.fallbacks.labels(predictor=name, reason=f"artifact {kind}").inc()

        place, keep = artifacts_place(self._settings), self._settings.artifacts.keep
        return ArtifactStore(place, keep=keep, clock=self._clock, on_refused=count)


def _columns() -> tuple[str, ...]:
    return tuple(name for source in hazard_sources() for name in source.names)


def seasonal_of(settings: Settings) -> SeasonalSettings:
    """How seasons are fitted."""
    from prefetcher_models.seasonal import SeasonalSettings

    given = settings.seasonal
    return SeasonalSettings(tz=given.tz, country=given.country or "", head=given.models)


def backend_of(settings: Settings) -> Backend:
    """Where many fits run."""
    from prefetcher_models.fitting import Backend

    return Backend(settings.fit.backend, settings.fit.workers, settings.fit.dask_address or "")

"""The jobs that there are: what each does, when, by which rule, and how long it may take.

What they do is in the modules of this package; they are put together here from what a process has. Covers no running (`scheduler`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from redis.exceptions import RedisError

from prefetcher.batch import forecasting, gone_nodes, retention, seasonal, training, tuning
from prefetcher.batch.runs import JobAbout
from prefetcher.batch.scheduler import Did, Job, Run
from prefetcher.clock import Clock
from prefetcher.controller.learner import Learner
from prefetcher.core.tuner import TunerSettings
from prefetcher.errors import UnavailableError
from prefetcher.ingest.tables import TablesReader
from prefetcher.ports import StateStore
from prefetcher.report.gone import JOB
from prefetcher_models.fitting import Backend
from prefetcher_models.hazard import Hazard
from prefetcher_models.seasonal import SeasonalSettings
from prefetcher_models.seasonal_artifact import NamedSeasons

__all__ = ["Means", "make_jobs"]

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Means:
    """What jobs work with. `new_learner` makes one that has learned nothing; `save_hazard` and `save_seasons` keep what was fitted and name
    it, `load_seasons` gives those in force, None where there are none."""

    state: StateStore
    tables: TablesReader
    clock: Clock
    history: Path
    ledger: Path
    forecasts: Path
    new_learner: Callable[[], Learner]
    save_hazard: Callable[[Hazard], str]
    load_seasons: Callable[[], NamedSeasons | None]
    save_seasons: Callable[[NamedSeasons], str]
    seasonal: SeasonalSettings
    backend: Backend
    users_keep_s: float
    history_keep_s: float
    nodes_keep_s: float = 604_800.0
    tuner: TunerSettings = field(default_factory=TunerSettings)
    seed: int = 0


def make_jobs(means: Means) -> list[Job]:
    """All jobs over `means`."""
    clock, history = means.clock, means.history
    return [
        Job(
            JobAbout(
                "forecast-all", "how likely every model is used within each horizon, as one table", 300.0, missed="skip", most_s=240.0
            ),
            lambda run: forecasting.forecast_all(run, means.state, means.new_learner(), means.forecasts, clock.now_s()),
        ),
        Job(
            JobAbout("recalibrate", "how the forecasts of the last hours came true, and the table corrected by it", _HOUR_S, most_s=600.0),
            lambda run: _recalibrate(run, means),
        ),
        Job(
            JobAbout("hazard-retrain", "a fitted hazard as an artifact, for a controller that has none", _HOUR_S, most_s=1800.0),
            lambda run: training.hazard_retrain(run, means.state, means.new_learner, history, means.save_hazard, clock.now_s()),
        ),
        Job(
            JobAbout(
                "seasonal-refit",
                "daily and weekly cycles of the busiest models, fitted again where they are due",
                at_s=2 * 3600 + 2400,
                tz=means.seasonal.tz,
                most_s=7200.0,
            ),
            lambda run: _seasonal_refit(run, means),
        ),
        Job(
            JobAbout(
                tuning.TUNER,
                "how early, how far ahead and how long prefetches are, by segment of models",
                at_s=4 * 3600 + 1200,
                tz=means.seasonal.tz,
                most_s=7200.0,
            ),
            lambda run: tuning.tune_windows(run, means.state, history, means.tuner, clock.now_s(), means.seed),
        ),
        Job(
            JobAbout(tuning.WATCH, "the last change of windows looked at, and undone if it was a bad one", _HOUR_S, most_s=3600.0),
            lambda run: tuning.watch_windows(run, means.state, history, means.tuner, clock.now_s(), means.seed),
        ),
        Job(
            JobAbout("compact-history", "hours of history put together by day", at_s=3 * 3600 + 1200, most_s=1800.0),
            lambda run: retention.compact_history(run, history, clock),
        ),
        Job(
            JobAbout(
                "ledger-history", "hours of nodes' ledgers copied into the history, where they outlive the store", at_s=3 * 3600 + 2400
            ),
            lambda run: retention.copy_ledgers(run, means.state, means.ledger, clock),
        ),
        Job(
            JobAbout(JOB, "nodes forgotten that were silent for too long, or that somebody wants forgotten", _HOUR_S),
            lambda run: gone_nodes.forget_nodes(run, means.state, means.ledger, means.nodes_keep_s, clock.now_s()),
        ),
        Job(
            JobAbout("forget-idle-users", "users forgotten whose last request is too long ago", _HOUR_S, most_s=600.0),
            lambda run: retention.forget_idle_users(means.tables, clock, means.users_keep_s),
        ),
        Job(
            JobAbout("remove-old-history", "history removed that is too old", _HOUR_S, most_s=600.0),
            lambda run: _remove_old(means),
        ),
    ]


def _seasonal_refit(run: Run, means: Means) -> Did:
    try:
        return seasonal.seasonal_refit(
            run,
            means.history,
            means.tables.minutes,
            means.load_seasons(),
            means.seasonal,
            means.backend,
            means.save_seasons,
            means.clock.now_s(),
        )
    except RedisError as exc:
        raise UnavailableError(f"the state server does not answer: {exc}") from exc


def _remove_old(means: Means) -> Did:
    found = [retention.remove_old_history(folder, means.clock, means.history_keep_s) for folder in (means.history, means.ledger)]
    return Did(sum(did.rows for did in found), "; ".join(did.said for did in found if did.said))


def _recalibrate(run: Run, means: Means) -> Did:
    try:
        positions = means.tables.positions()
        counted_s = min((found["newest_s"] for found in positions.values()), default=0.0)
        now_s = means.clock.now_s()
        # Minutes stay with the ingest for three hours of its own time.
        return forecasting.recalibrate(run, means.tables.minutes, means.forecasts, counted_s - 3.0 * _HOUR_S, counted_s, now_s)
    except RedisError as exc:
        raise UnavailableError(f"the state server does not answer: {exc}") from exc

"""The jobs that there are: what each does, when, by which rule, and how long it may take.

What they do is in the modules of this package; they are put together here from what a process has. Covers no running (`scheduler`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from redis.exceptions import RedisError

from prefetcher.batch import forecasting, retention, training
from prefetcher.batch.runs import JobAbout
from prefetcher.batch.scheduler import Did, Job, Run
from prefetcher.clock import Clock
from prefetcher.controller.learner import Learner
from prefetcher.errors import UnavailableError
from prefetcher.ingest.tables import TablesReader
from prefetcher.ports import StateStore
from prefetcher_models.hazard import Hazard

__all__ = ["Means", "make_jobs"]

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Means:
    """What jobs work with. `new_learner` makes one that has learned nothing; `save_hazard` keeps a fit and names it."""

    state: StateStore
    tables: TablesReader
    clock: Clock
    history: Path
    forecasts: Path
    new_learner: Callable[[], Learner]
    save_hazard: Callable[[Hazard], str]
    users_keep_s: float
    history_keep_s: float


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
            JobAbout("compact-history", "hours of history put together by day", at_s=3 * 3600 + 1200, most_s=1800.0),
            lambda run: retention.compact_history(run, history, clock),
        ),
        Job(
            JobAbout("forget-idle-users", "users forgotten whose last request is too long ago", _HOUR_S, most_s=600.0),
            lambda run: retention.forget_idle_users(means.tables, clock, means.users_keep_s),
        ),
        Job(
            JobAbout("remove-old-history", "history removed that is too old", _HOUR_S, most_s=600.0),
            lambda run: retention.remove_old_history(history, clock, means.history_keep_s),
        ),
    ]


def _recalibrate(run: Run, means: Means) -> Did:
    try:
        positions = means.tables.positions()
        counted_s = min((found["newest_s"] for found in positions.values()), default=0.0)
        now_s = means.clock.now_s()
        # Minutes stay with the ingest for three hours of its own time.
        return forecasting.recalibrate(run, means.tables.minutes, means.forecasts, counted_s - 3.0 * _HOUR_S, counted_s, now_s)
    except RedisError as exc:
        raise UnavailableError(f"the state server does not answer: {exc}") from exc

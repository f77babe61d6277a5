"""Seasons of the busiest models fitted again from history, once a day, as an artifact.

Which models are due is the fit's own business (`prefetcher_models.seasonal.refit_seasons`): those without a season, with an old one, or
whose error grew. Covers neither fitting nor who forecasts by seasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prefetcher.batch.scheduler import Did, Run
from prefetcher.ingest.history import read_hours
from prefetcher_models.fitting import Backend
from prefetcher_models.seasonal import SeasonalSettings, refit_seasons
from prefetcher_models.seasonal_artifact import NamedSeasons

__all__ = ["hours_of_history", "seasonal_refit"]

_HOUR_S = 3600.0


def seasonal_refit(
    run: Run,
    history: Path,
    minutes: Callable[[int, int], Mapping[int, Counter[str]]],
    old: NamedSeasons | None,
    settings: SeasonalSettings,
    backend: Backend,
    save: Callable[[NamedSeasons], str],
    now_s: float,
) -> Did:
    """Fits what is due from the hours up to `now_s` and saves all seasons. `minutes(first, last)` has the rows that are no history yet.

    Raises:
        PredictorError: the backend is not there.
    """
    if settings.head == 0:
        return Did(said="no models are to have seasons")
    last = int(now_s // _HOUR_S)
    first = last - settings.history_days * 24
    run.at(0.0, 1.0, "reading history")
    names, counts = hours_of_history(history, minutes, first, last)
    busy = counts.any(axis=0)
    if not busy.any():
        return Did(said="there is no history yet")
    begin = int(np.argmax(busy))
    kept = old if old is not None and (old.tz, old.country) == (settings.tz, settings.country) else None
    before = {} if kept is None else {i: kept.by_name[name] for i, name in enumerate(names) if name in kept.by_name}
    done = refit_seasons(
        range(len(names)),
        counts[:, begin:],
        (first + begin) * _HOUR_S,
        before,
        settings,
        backend,
        lambda number, of: run.at(number, of, f"fit {number} of {of}"),
    )
    fitted = set(done.fitted) - set(done.failed)
    # Holds from when it was fitted on, not from the hour before.
    seasons = {names[key]: replace(s, valid_from_s=now_s) if key in fitted else s for key, s in done.seasons.items()}
    run.check()
    version = save(NamedSeasons(seasons, settings.tz, settings.country, now_s))
    used = sum(season.used for season in seasons.values())
    failed = f", {len(done.failed)} without one" if done.failed else ""
    return Did(len(fitted), f"{len(fitted)} fitted, {used} of {len(seasons)} seasons used{failed}; saved as {version}")


def hours_of_history(
    history: Path, minutes: Callable[[int, int], Mapping[int, Counter[str]]], first: int, last: int
) -> tuple[list[str], npt.NDArray[np.int32]]:
    """Names of models, and their rows int32[models, hours] in the hours [first, last) since 1970."""
    number: dict[str, int] = {}
    cells: Counter[tuple[int, int]] = Counter()

    def add(minute: int, rows: Mapping[str, int]) -> None:
        if first <= minute // 60 < last:
            for model, count in rows.items():
                cells[number.setdefault(model, len(number)), minute // 60 - first] += count

    for _, minute, models in read_hours(history):
        add(minute, models)
    for minute, recent in minutes(first * 60, last * 60 - 1).items():
        add(minute, recent)
    counts = np.zeros((len(number), last - first), np.int32)
    for (model, hour), count in cells.items():
        counts[model, hour] = count
    return list(number), counts

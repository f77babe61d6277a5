"""Seasons fitted again from history: the hours that count, what is kept, and what a run that is to stop does not save."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from prefetcher.batch.scheduler import Run, RunEnded
from prefetcher.batch.seasonal import hours_of_history, seasonal_refit
from prefetcher.ingest.history import write_hour
from prefetcher_models.fitting import Backend
from prefetcher_models.seasonal import SeasonalSettings
from prefetcher_models.seasonal_artifact import NamedSeasons

HOUR = 490_000


def a_run() -> Run:
    return Run(1, 0.0, lambda items: True)


def nothing(first: int, last: int) -> dict[int, Counter[str]]:
    return {}


def test_hours_of_history_and_of_what_is_not_history_yet_add_up(tmp_path: Path) -> None:
    write_hour(tmp_path, 0, HOUR, {HOUR * 60 + m: {"a": 2, "b": 1} for m in (0, 59)})
    write_hour(tmp_path, 1, HOUR, {HOUR * 60: {"a": 3}})
    write_hour(tmp_path, 0, HOUR - 5, {(HOUR - 5) * 60: {"a": 100}})

    def minutes(first: int, last: int) -> dict[int, Counter[str]]:
        assert (first, last) == ((HOUR - 1) * 60, (HOUR + 2) * 60 - 1)
        return {(HOUR + 1) * 60 + 5: Counter({"a": 4, "c": 1})}

    names, counts = hours_of_history(tmp_path, minutes, HOUR - 1, HOUR + 2)
    assert {name: counts[i].tolist() for i, name in enumerate(names)} == {"a": [0, 7, 4], "b": [0, 2, 0], "c": [0, 0, 1]}


def test_without_history_or_models_nothing_is_fitted(tmp_path: Path) -> None:
    saved: list[NamedSeasons] = []

    def save(found: NamedSeasons) -> str:
        saved.append(found)
        return "v"

    for settings, said in ((SeasonalSettings(), "there is no history yet"), (SeasonalSettings(head=0), "no models are to have seasons")):
        assert seasonal_refit(a_run(), tmp_path, nothing, None, settings, Backend(), save, HOUR * 3600.0).said == said
    assert saved == []


def test_what_is_due_is_fitted_from_history_and_the_rest_is_kept(tmp_path: Path) -> None:
    pytest.importorskip("prophet")
    rng = np.random.default_rng(3)
    for hour in range(HOUR - 12 * 24, HOUR):
        rate = 20.0 if 8 <= hour % 24 < 18 else 0.5
        write_hour(tmp_path, 0, hour, {hour * 60: {"daily": int(rng.poisson(rate)) + 1, "rare": 0}})
    saved: list[NamedSeasons] = []

    def save(found: NamedSeasons) -> str:
        saved.append(found)
        return f"v{len(saved)}"

    run, now_s = a_run(), HOUR * 3600.0 + 120.0
    did = seasonal_refit(run, tmp_path, nothing, None, SeasonalSettings(), Backend(), save, now_s)
    assert did.rows == 1
    assert did.said.startswith("1 fitted, ")
    assert did.said.endswith("saved as v1")
    assert run.step == "fit 1 of 1"
    assert set(saved[0].by_name) == {"daily"}
    assert saved[0].by_name["daily"].valid_from_s == now_s
    again = seasonal_refit(a_run(), tmp_path, nothing, saved[0], SeasonalSettings(), Backend(), save, now_s + 3600.0)
    assert again.rows == 0
    assert saved[1].by_name["daily"].valid_from_s == now_s
    # Another wall clock makes them all due.
    other = seasonal_refit(a_run(), tmp_path, nothing, saved[0], SeasonalSettings(tz="Asia/Tokyo"), Backend(), save, now_s)
    assert other.rows == 1
    stopped = a_run()
    stopped.stop.set()
    with pytest.raises(RunEnded):
        seasonal_refit(stopped, tmp_path, nothing, None, SeasonalSettings(), Backend(), save, now_s)
    assert len(saved) == 3

"""The table of forecasts, its calibration against what came, and a fit from history for a controller that has none."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from prefetcher.batch.forecasting import Calibration, ForecastTable, forecast_all, recalibrate, tables_between
from prefetcher.batch.scheduler import Run, RunEnded
from prefetcher.batch.training import hazard_retrain
from prefetcher.controller import records
from prefetcher.controller.learner import Learner
from prefetcher.core.types import HORIZONS_S, ModelName, RequestSeen
from prefetcher.ingest.history import write_hour
from prefetcher_connectors.memory import MemoryState
from prefetcher_models.hazard import Hazard, HazardSettings

T0 = 1_767_225_600.0
HOUR_S = 3600.0


def learner() -> Learner:
    return Learner(lambda: Hazard(HazardSettings(fewest_samples=200, trees=10)), 60.0)


def rows(hours: float, seed: int = 0) -> list[RequestSeen]:
    """Model m0 about every 100 s, each further one half as often."""
    rng = np.random.default_rng(seed)
    ts = np.sort(rng.uniform(T0, T0 + hours * HOUR_S, int(hours * 72)))
    model = np.minimum(rng.geometric(0.5, len(ts)) - 1, 5)
    return [RequestSeen(float(t), ModelName(f"m{m}")) for t, m in zip(ts, model, strict=True)]


def a_run(state: MemoryState) -> Run:
    def write(items: dict[str, bytes]) -> bool:
        state.write(items)
        return True

    return Run(1, T0, write)  # type: ignore[arg-type]


def learned(state: MemoryState, hours: float, fit: bool = True) -> Learner:
    made = learner()
    for row in rows(hours):
        made.take([row], {}, row.ts, caught_up=False)
        if fit:
            made.refit_now(row.ts)
    state.write({records.LEARNED: made.snapshot()})
    return made


def table_of(state: MemoryState) -> ForecastTable:
    raw = state.read(records.job_key("forecast-all", "made"))
    assert raw is not None
    return msgspec.json.decode(raw, type=ForecastTable)


def test_the_table_has_every_model_and_horizon_as_the_predictor_says_them(tmp_path: Path) -> None:
    state = MemoryState()
    assert forecast_all(a_run(state), state, learner(), tmp_path, T0).said == "nothing was learned yet"
    made = learned(state, 4.0)
    now_s = T0 + 4.2 * HOUR_S
    did = forecast_all(a_run(state), state, learner(), tmp_path, now_s)
    table = table_of(state)
    assert did.rows == len(table.models) == 6
    assert (table.at_s, table.horizons_s, table.predictor, table.fallback) == (now_s, HORIZONS_S, "hazard", "")
    assert table.learned_s == made.traffic.newest_s
    assert made.predictor is not None
    expected = made.predictor.forecast(made.traffic, now_s).p
    for name, chances in table.models.items():
        np.testing.assert_allclose(chances, expected[made.number(name)], atol=1e-4)
    # Kept for a day.
    for later_h in (12.0, 30.0):
        forecast_all(a_run(state), state, learner(), tmp_path, now_s + later_h * HOUR_S)
    assert [round((at_s - now_s) / HOUR_S) for at_s, _ in tables_between(tmp_path, 0.0, np.inf)] == [12, 30]


def test_a_run_that_lost_its_lease_writes_no_table(tmp_path: Path) -> None:
    state = MemoryState()
    learned(state, 2.0, fit=False)
    with pytest.raises(RunEnded):
        forecast_all(Run(1, T0, lambda items: False), state, learner(), tmp_path, T0 + 2 * HOUR_S)
    assert state.read(records.job_key("forecast-all", "made")) is None


def test_calibration_learns_from_what_came_and_corrects_the_next_table(tmp_path: Path) -> None:
    state = MemoryState()
    learned(state, 4.0)
    now_s = T0 + 4.0 * HOUR_S
    for k in range(60):
        forecast_all(a_run(state), state, learner(), tmp_path, now_s + k * 120.0)
    before = table_of(state)
    assert before.calibrated_s is None
    counted_s = now_s + 2.5 * HOUR_S

    def silent(first: int, last: int) -> dict[int, Counter[str]]:
        # Since then only the first model was used, and that all the time.
        return {minute: Counter({"m0": 1}) for minute in range(first, last + 1)}

    did = recalibrate(a_run(state), silent, tmp_path, now_s - 1.0, counted_s, counted_s)
    raw = state.read(records.job_key("recalibrate", "made"))
    assert raw is not None
    found = msgspec.json.decode(raw, type=Calibration)
    assert did.rows == sum(found.outcomes.values()) > 1000
    assert set(found.lines) == {f"{h:g}" for h in HORIZONS_S if h <= 3600.0}
    assert all(after <= first for first, after in found.brier.values())
    assert found.brier["3600"][1] < 0.8 * found.brier["3600"][0]
    forecast_all(a_run(state), state, learner(), tmp_path, now_s + 59 * 120.0)
    after = table_of(state)
    assert after.calibrated_s == counted_s
    assert after.models["m5"][6] < before.models["m5"][6]
    for chances in after.models.values():
        assert list(chances) == sorted(chances)


def test_without_outcomes_nothing_is_calibrated(tmp_path: Path) -> None:
    state = MemoryState()
    did = recalibrate(a_run(state), lambda first, last: {}, tmp_path, T0, T0 + HOUR_S, T0 + HOUR_S)
    assert (did.rows, did.said) == (0, "too few outcomes so far")
    assert state.read(records.job_key("recalibrate", "made")) is None


def test_the_controllers_own_fit_is_saved_and_none_is_made_beside_it(tmp_path: Path) -> None:
    state, saved = MemoryState(), []
    made = learned(state, 4.0)
    assert isinstance(made.predictor, Hazard)

    def save(hazard: Hazard) -> str:
        saved.append(hazard)
        return "v1"

    did = hazard_retrain(a_run(state), state, learner, tmp_path, save, T0 + 4 * HOUR_S)
    assert did.said == "the controller's fit saved as v1"
    assert saved[0].fit.trees == made.predictor.fit.trees
    assert saved[0].fits == made.predictor.fits


@pytest.mark.parametrize("learning", [False, True])
def test_where_no_controller_has_a_fit_one_is_made_from_history(tmp_path: Path, learning: bool) -> None:
    state, saved = MemoryState(), []
    if learning:
        learned(state, 0.2, fit=False)

    def save(hazard: Hazard) -> str:
        saved.append(hazard)
        return "v1"

    def run() -> str:
        return hazard_retrain(a_run(state), state, learner, tmp_path, save, T0 + 9 * HOUR_S).said

    assert run() == "no fit: 0 rows of history are too few"
    counts: dict[int, dict[int, Counter[str]]] = {}
    for row in rows(8.0):
        minute = int(row.ts // 60)
        counts.setdefault(minute // 60, {}).setdefault(minute, Counter())[row.model] += 1
    for hour, minutes in counts.items():
        write_hour(tmp_path, 0, hour, minutes)
    assert run() == "fitted from 8 hours of history, saved as v1"
    (hazard,) = saved
    assert any(hazard.fit.trees)
    assert hazard.fit.rows >= 300
    assert T0 <= hazard.fit.from_s < hazard.fit.until_s <= T0 + 8 * HOUR_S

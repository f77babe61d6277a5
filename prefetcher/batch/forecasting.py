"""The table of forecasts for all models and horizons, and its calibration against what came.

The leading controller says at every tick how likely models are used within 2, 10 and 60 minutes, for itself and for endpoints, and that
ends two ticks later. The table here has all eight horizons, from what the controller saved last, stands while no controller leads, and is
kept a day as parquet, so that what was forecast can be held against what came. Its calibration concerns the table alone: the controller's
own predictor is calibrated at each of its fits. Covers no learning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from prefetcher.batch.scheduler import Did, Run
from prefetcher.controller import records
from prefetcher.controller.learner import Learner
from prefetcher.core.types import HORIZONS_S
from prefetcher.errors import PredictorError
from prefetcher.ports import StateStore
from prefetcher_models.calibration import calibration_line
from prefetcher_models.predictor import monotone

__all__ = ["Calibration", "ForecastTable", "forecast_all", "recalibrate"]

FORECAST, RECALIBRATE = "forecast-all", "recalibrate"
#: How long tables are kept as files, and how long one of the state store is believed.
_KEPT_S = 86_400.0
_VALID_S = 900.0
#: Horizons that can be held against the minutes that the ingest still has.
_SCORED = tuple(i for i, horizon_s in enumerate(HORIZONS_S) if horizon_s <= 3600.0)
#: Fewer outcomes than this say nothing.
_FEWEST = 200
_EDGE = 1e-4


class ForecastTable(msgspec.Struct, frozen=True):
    """As of `at_s`, from rows up to `learned_s`, not to be used after `until_s`: by model P(used within each of `horizons_s`).

    `predictor` says whose; `fallback` why recent rates spoke for it; `calibrated_s` when the calibration was learned, None without one.
    """

    at_s: float
    until_s: float
    learned_s: float
    predictor: str
    horizons_s: tuple[float, ...]
    models: dict[str, tuple[float, ...]]
    fallback: str = ""
    calibrated_s: float | None = None


class Calibration(msgspec.Struct, frozen=True):
    """By horizon in seconds: the line (slope, offset) on log-odds, outcomes behind it, and the Brier score before and with it."""

    at_s: float
    lines: dict[str, tuple[float, float]]
    outcomes: dict[str, int]
    brier: dict[str, tuple[float, float]]


_calibrations = msgspec.json.Decoder(Calibration)


def forecast_all(run: Run, state: StateStore, learner: Learner, folder: Path, now_s: float) -> Did:
    """Writes the table of forecasts as of `now_s`, and keeps it in `folder`. `learner` is a new one; it takes over what was saved."""
    raw, calibrated = state.read_many([records.LEARNED, records.job_key(RECALIBRATE, "made")])
    if raw is None:
        return Did(said="nothing was learned yet")
    run.at(0.1, 1.0, "reading what was learned")
    learner.restore(raw)
    traffic, predictor = learner.traffic, learner.predictor
    if predictor is None or not traffic.n_models:
        return Did(said="nothing was learned yet")
    learned_s = float(traffic.newest_s)
    run.at(0.3, 1.0, "forecasting")
    # A row may be dated a little ahead.
    at_s = max(now_s, traffic.newest_s)
    # Scored as the controller scores a tick, with the columns of its sources.
    block = learner.sources.widened(traffic, traffic.advance((), (), ticks=(at_s,)))
    p = np.round(predictor.probabilities(block.tick_features, tuple(range(len(HORIZONS_S)))), 6)
    names = [learner.names[model] for model in block.tick_model]
    fallback = getattr(predictor, "why_not", "")
    run.at(0.7, 1.0, "keeping the table")
    _keep(folder, at_s, names, p)
    calibration = _calibration_of(calibrated)
    if calibration is not None:
        p = _corrected(p, calibration)
    table = ForecastTable(
        at_s,
        at_s + _VALID_S,
        learned_s,
        predictor.name,
        HORIZONS_S,
        {name: tuple(row) for name, row in zip(names, p.round(4).tolist(), strict=True)},
        fallback,
        None if calibration is None else calibration.at_s,
    )
    run.write({records.job_key(FORECAST, "made"): records.encode(table)})
    return Did(len(names), f"{len(names)} models forecast" + (f": {fallback}" if fallback else ""))


def _keep(folder: Path, at_s: float, names: list[str], p: npt.NDArray[np.float64]) -> None:
    """The table as a file; those that are older than a day go."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = {"model": pa.array(names, pa.string())} | {f"p_{h:g}s": pa.array(p[:, i], pa.float32()) for i, h in enumerate(HORIZONS_S)}
    path = folder / f"at={at_s:.0f}.parquet"
    part = path.with_suffix(".part")
    pq.write_table(pa.table(columns), part, compression="zstd")
    part.replace(path)
    for _, old in tables_between(folder, -np.inf, at_s - _KEPT_S):
        old.unlink(missing_ok=True)


def tables_between(folder: Path, from_s: float, until_s: float) -> list[tuple[float, Path]]:
    """(as of, file) of the tables that are kept from these times, oldest first."""
    found = []
    for path in folder.glob("at=*.parquet"):
        try:
            at_s = float(path.stem.removeprefix("at="))
        except ValueError:
            continue
        if from_s <= at_s < until_s:
            found.append((at_s, path))
    return sorted(found)


def _calibration_of(raw: bytes | None) -> Calibration | None:
    try:
        return None if raw is None else records.decode(raw, _calibrations)
    except ValueError:
        return None


def _log_odds(p: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    kept = np.clip(p, _EDGE, 1.0 - _EDGE)
    return np.asarray(np.log(kept) - np.log1p(-kept))


def _corrected(p: npt.NDArray[np.float64], calibration: Calibration) -> npt.NDArray[np.float64]:
    out = p.copy()
    for i, horizon_s in enumerate(HORIZONS_S):
        line = calibration.lines.get(f"{horizon_s:g}")
        if line is not None:
            out[:, i] = _along(p[:, i], line)
    return monotone(out)


def _along(p: npt.NDArray[np.float64], line: tuple[float, float]) -> npt.NDArray[np.float64]:
    """Forecasts of 0 stay 0: nothing is known of such a model."""
    return np.where(p <= 0.0, 0.0, 1.0 / (1.0 + np.exp(-(line[0] * _log_odds(p) + line[1]))))


def recalibrate(
    run: Run, minutes: Callable[[int, int], Mapping[int, Counter[str]]], folder: Path, covered_s: float, counted_s: float, now_s: float
) -> Did:
    """Learns, by horizon, how forecasts of the last tables came true, from rows by minute.

    `minutes(first, last)` has the rows from `covered_s` on; rows up to `counted_s` are counted.
    """
    pairs: dict[int, list[npt.NDArray[np.float64]]] = {horizon: [] for horizon in _SCORED}
    tables = tables_between(folder, covered_s, counted_s - HORIZONS_S[0])
    for number, (at_s, path) in enumerate(tables):
        run.at(number, len(tables), f"table {number + 1} of {len(tables)}")
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowException):
            continue
        names = table["model"].to_pylist()
        first_use = _first_uses(minutes, at_s, min(counted_s, at_s + HORIZONS_S[_SCORED[-1]]))
        after = np.array([first_use.get(name, np.inf) for name in names])
        for horizon in _SCORED:
            column = f"p_{HORIZONS_S[horizon]:g}s"
            if at_s + HORIZONS_S[horizon] <= counted_s and column in table.column_names:
                p = table[column].to_numpy().astype(np.float64)
                known = p > 0.0
                pairs[horizon].append(np.stack([p[known], (after[known] <= HORIZONS_S[horizon]).astype(np.float64)], axis=1))
    lines, outcomes, brier = {}, {}, {}
    for horizon, parts in pairs.items():
        found = np.concatenate(parts) if parts else np.zeros((0, 2))
        if len(found) < _FEWEST:
            continue
        name = f"{HORIZONS_S[horizon]:g}"
        p, used = found.T
        try:
            line = calibration_line(_log_odds(p), used)
        except np.linalg.LinAlgError as exc:
            raise PredictorError(f"no calibration for {name} s: {exc}", predictor=RECALIBRATE) from exc
        lines[name], outcomes[name] = line, len(found)
        brier[name] = (float(np.mean((p - used) ** 2)), float(np.mean((_along(p, line) - used) ** 2)))
    if not lines:
        return Did(said="too few outcomes so far")
    run.write({records.job_key(RECALIBRATE, "made"): records.encode(Calibration(now_s, lines, outcomes, brier))})
    return Did(sum(outcomes.values()), f"{len(lines)} horizons from {len(tables)} tables")


def _first_uses(minutes: Callable[[int, int], Mapping[int, Counter[str]]], at_s: float, until_s: float) -> dict[str, float]:
    """By model, seconds from `at_s` to its first row after it; to the middle of its minute, which is all that is kept."""
    found: dict[str, float] = {}
    first = int(at_s // 60.0) + 1
    for minute, rows in sorted(minutes(first, int(until_s // 60.0)).items()):
        for model in rows:
            found.setdefault(model, max(0.0, 60.0 * minute + 30.0 - at_s))
    return found

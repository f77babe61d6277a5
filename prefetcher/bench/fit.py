"""`bench fit`: how long it takes to score, to retrain and to fit seasons for ten thousand models over two weeks of a made-up log.

The log is seeded: rates fall by a power law, and each model has a daily cycle of its own, quieter weekends, days above and below its level,
and bursts. Peers run in the same process on the same rows. Covers no quality beyond the seasons' own scores.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.bench.machine import describe_machine
from prefetcher.clock import SystemClock
from prefetcher.compiling import compile_aloud
from prefetcher.core.traffic import Traffic
from prefetcher.errors import PrefetcherError
from prefetcher_models.fitting import Backend
from prefetcher_models.hazard import ALL_HORIZONS, Hazard
from prefetcher_models.seasonal import SeasonalSettings, refit_seasons
from prefetcher_models.seasonal_fit import held_out_s, seasonal_naive

__all__ = ["run"]

_FROM_S = 1_704_067_200.0  # a Monday
_HOUR_S, _DAY_S = 3600.0, 86400.0
_HALF_HOUR_S = 1800.0
#: Ticks at which all models are seen for training: what a sample store draws from, at a cost that a benchmark can pay.
_TICK_S = 7200.0
_SEED = 7
_SCORINGS = 5


def run(json_out: Path, *, quick: bool = False, say: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Times three things and writes `json_out`.

    Figures: `score_s` features and probabilities of all models for all horizons once (the median of some); `retrain_s` one hazard retrain;
    `prophet_s` seasons of the 300 busiest models by Prophet at an hour, in as many processes as there are cores, held-out scores included;
    `…_cpu_s` processor seconds of the same, which a busy machine changes less.
    Peers in the same run: LightGBM's own evaluation of the same trees, and seasonal-naive over the same held-out hours.
    """
    models, days, head = (400, 5, 6) if quick else (10_000, 14, 300)
    tell = say or (lambda text: print(text, flush=True))
    from joblib.externals.loky import get_reusable_executor

    compile_aloud()
    clock = SystemClock()
    counts = _counts(models, days)
    ts, model = _rows(counts)
    tell(f"{len(ts):,} rows of {models:,} models over {days} days")
    traffic, hazard = Traffic(models), Hazard()
    end_s = _FROM_S + days * _DAY_S
    # a fit is no first one where trees are averaged and forecasts of the last ones have come true
    _learn(traffic, hazard, ts, model, _FROM_S, end_s - 2.0 * _DAY_S, tell)
    hazard.refit(end_s - 2.0 * _DAY_S)
    _learn(traffic, hazard, ts, model, end_s - 2.0 * _DAY_S, end_s, tell)

    begin_s, cpu_s = clock.steady_s(), _cpu_s()
    if not hazard.refit(end_s):
        raise PrefetcherError("the hazard did not fit again: two days after the last fit one is due")
    retrain_s, retrain_cpu_s = clock.steady_s() - begin_s, _cpu_s() - cpu_s
    tell(f"hazard retrain: {retrain_s:.1f} s")

    taken_s = []
    cpu_s = _cpu_s()
    x = traffic.features(end_s)
    for _ in range(_SCORINGS):
        begin_s = clock.steady_s()
        x = traffic.features(end_s)
        seen = np.ascontiguousarray(x[np.isfinite(x[:, 0])])
        hazard.probabilities(seen, ALL_HORIZONS)
        taken_s.append(clock.steady_s() - begin_s)
    score_s, score_cpu_s = float(np.median(taken_s)), (_cpu_s() - cpu_s) / _SCORINGS
    trees_s, lightgbm_s = _both_evaluations(hazard, np.ascontiguousarray(x[np.isfinite(x[:, 0])]), clock)
    tell(f"all horizons once: {score_s:.2f} s; trees alone {trees_s:.2f} s, by LightGBM {lightgbm_s:.2f} s")

    busiest = np.argsort(-counts.sum(axis=1), kind="stable")[:head]
    settings = SeasonalSettings(head=head, fewest_rows=1)
    shown = max(1, head // 6)
    begin_s, cpu_s = clock.steady_s(), _cpu_s()
    done = refit_seasons(
        [int(i) for i in busiest],
        counts[busiest].astype(np.int32),
        _FROM_S,
        {},
        settings,
        Backend("loky"),
        lambda n, of: tell(f"seasons: {n} of {of}") if n % shown == 0 or n == of else None,
    )
    prophet_s = clock.steady_s() - begin_s
    # the processor time of others is known once they are gone
    get_reusable_executor().shutdown(wait=True)
    prophet_cpu_s = _cpu_s() - cpu_s
    begin_s = clock.steady_s()
    for i in busiest:
        seasonal_naive(counts[i].astype(np.float64), days * 24 - int(held_out_s(days * _DAY_S) / _HOUR_S))
    naive_s = clock.steady_s() - begin_s
    ratios = [season.own_error / max(season.naive_error, 1e-9) for season in done.seasons.values()]
    tell(f"seasons: {prophet_s:.1f} s for {len(done.fitted)} models, {len(done.failed)} without one")
    figures: dict[str, float] = {
        "score_s": score_s,
        "retrain_s": retrain_s,
        "prophet_s": prophet_s,
        "score_cpu_s": score_cpu_s,
        "retrain_cpu_s": retrain_cpu_s,
        "prophet_cpu_s": prophet_cpu_s,
        "prophet_failed": len(done.failed),
        "trees_over_lightgbm": trees_s / lightgbm_s,
        "prophet_time_over_naive": prophet_s / max(naive_s, 1e-9),
        "prophet_error_over_naive": float(np.exp(np.mean(np.log(np.maximum(ratios, 1e-3))))) if ratios else 1.0,
        "prophet_used_ratio": sum(season.used for season in done.seasons.values()) / max(1, len(done.seasons)),
    }
    peers = {"lightgbm_s": lightgbm_s, "seasonal_naive_s": naive_s}
    log = {"models": models, "days": days, "rows": len(ts), "head": head}
    machine = {**describe_machine(), "load_1min": os.getloadavg()[0]}
    result = {"figures": figures, "peers": peers, "log": log, "machine": machine}
    Path(json_out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _cpu_s() -> float:
    """Processor seconds of this process and of those that it started and that ended."""
    return float(sum(os.times()[:4]))


def _counts(models: int, days: int) -> npt.NDArray[np.int64]:
    """int64[models, days · 24]: rows by hour."""
    rng = np.random.default_rng(_SEED)
    hours = np.arange(days * 24)
    rate = 120.0 / (1.0 + np.arange(models)) ** 0.9
    peak, depth = rng.uniform(0, 24, models), rng.uniform(0.2, 1.0, models)
    weekend = rng.uniform(0.2, 1.0, models)
    cycle = 1.0 + depth[:, None] * np.cos(2.0 * np.pi * (hours - peak[:, None]) / 24.0)
    cycle *= np.where((hours // 24) % 7 >= 5, weekend[:, None], 1.0)
    daily = np.exp(rng.normal(0.0, 0.25, (models, days))).repeat(24, axis=1)
    bursts = rng.gamma(4.0, 0.25, (models, days * 24))
    return rng.poisson(rate[:, None] * cycle * daily * bursts)


def _rows(counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Times and models of single rows, anywhere in their hours."""
    rng = np.random.default_rng(_SEED + 1)
    model, hour = np.nonzero(counts)
    each = counts[model, hour]
    ts = _FROM_S + (np.repeat(hour, each) + rng.random(int(each.sum()))) * _HOUR_S
    order = np.argsort(ts, kind="stable")
    return ts[order], np.repeat(model, each)[order].astype(np.int64)


def _learn(
    traffic: Traffic,
    hazard: Hazard,
    ts: npt.NDArray[np.float64],
    model: npt.NDArray[np.int64],
    from_s: float,
    until_s: float,
    tell: Callable[[str], None],
) -> None:
    """Half hour by half hour, with the features that training draws from."""
    steps = int((until_s - from_s) / _HALF_HOUR_S)
    for step in range(steps):
        begin_s = from_s + step * _HALF_HOUR_S
        end_s = begin_s + _HALF_HOUR_S
        some = slice(*np.searchsorted(ts, [begin_s, end_s]))
        ticks = [begin_s] if begin_s % _TICK_S == 0.0 else []
        hazard.learn(traffic, traffic.advance(ts[some], model[some], ticks=ticks, from_s=begin_s, until_s=end_s))
        if step % 96 == 95:
            tell(f"learning: {(end_s - _FROM_S) / _DAY_S:.0f} days")


def _both_evaluations(hazard: Hazard, x: npt.NDArray[np.float32], clock: SystemClock) -> tuple[float, float]:
    """Seconds for all trees of all horizons over `x`: by our kernel, and by LightGBM's own with one thread."""
    import lightgbm

    boosters = [lightgbm.Booster(model_str=text) for texts in hazard.fit.trees for text in texts]
    hazard.probabilities(x, ALL_HORIZONS)
    begin_s = clock.steady_s()
    hazard.probabilities(x, ALL_HORIZONS)
    ours_s = clock.steady_s() - begin_s
    begin_s = clock.steady_s()
    for booster in boosters:
        booster.predict(x, raw_score=True, num_threads=1)
    return ours_s, clock.steady_s() - begin_s

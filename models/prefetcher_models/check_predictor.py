"""The contract that every predictor keeps, as checks that anyone can run on a predictor of their own.

A check drives a fresh predictor over a small log as a controller would (rows, ticks, `learn`, `refit`, `forecast`) and
raises `PredictorError` naming what is broken. Whether forecasts are good is not asked here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from prefetcher.core.traffic import Traffic
from prefetcher.core.types import HORIZONS_S
from prefetcher.errors import PredictorError
from prefetcher_models.predictor import FloatArray, Forecast, IntArray, Predictor, checked

__all__ = ["CHECKS", "check_predictor"]

Factory = Callable[[], Predictor]

_START_S = 1_700_000_000.0
_BLOCK_S, _TICK_S = 1800.0, 600.0
_BLOCKS, _HALF = 60, 30
_MODELS = 7


def check_predictor(factory: Factory) -> None:
    """Run all `CHECKS` on predictors that `factory` makes, each time a fresh one. Raises `PredictorError` at the first
    that fails.
    """
    for check in CHECKS:
        check(factory)


@dataclass(frozen=True, slots=True)
class _Log:
    ts: FloatArray
    model: IntArray


@dataclass(slots=True)
class _Run:
    """A predictor and its traffic, at `now_s`."""

    predictor: Predictor
    traffic: Traffic
    now_s: float = _START_S

    def over(self, log: _Log, blocks: int) -> list[FloatArray]:
        """Go `blocks` on, with the forecast at the end of each."""
        forecasts = []
        for _ in range(blocks):
            until_s = self.now_s + _BLOCK_S
            rows = slice(*np.searchsorted(log.ts, [self.now_s, until_s]))
            ticks = np.arange(self.now_s, until_s, _TICK_S)
            block = self.traffic.advance(log.ts[rows], log.model[rows], ticks=ticks, from_s=self.now_s, until_s=until_s)
            self.predictor.learn(self.traffic, block)
            self.predictor.refit(until_s)
            self.now_s = until_s
            forecasts.append(_asked(self.predictor, self.traffic, until_s).p)
        return forecasts


def _log(seed: int = 0, until_s: float = np.inf, after: int = 0) -> _Log:
    """Four models that beat and two at random over 30 hours; the seventh is never used. From `until_s` on, that of `after`."""
    if np.isfinite(until_s):
        one, other = _log(seed), _log(after)
        before, later = one.ts < until_s, other.ts >= until_s
        return _Log(np.concatenate([one.ts[before], other.ts[later]]), np.concatenate([one.model[before], other.model[later]]))
    rng = np.random.default_rng(seed)
    end_s = _BLOCKS * _BLOCK_S
    times = [np.arange(rng.uniform(0.0, gap_s), end_s, gap_s) for gap_s in (300.0, 900.0, 3600.0, 14400.0)]
    times += [np.sort(rng.uniform(0.0, end_s, 60)) for _ in range(2)]
    ts = np.concatenate(times)
    model = np.repeat(np.arange(len(times)), [len(t) for t in times])
    order = np.argsort(ts, kind="stable")
    return _Log(_START_S + ts[order], model[order])


def _require(kept: bool, predictor: Predictor, what: str) -> None:
    if not kept:
        raise PredictorError(f"{predictor.name}: {what}", predictor=predictor.name)


def _asked(predictor: Predictor, traffic: Traffic, now_s: float, models: IntArray | None = None) -> Forecast:
    """A forecast that is well formed and was made for `now_s`."""
    forecast = checked(predictor.forecast(traffic, now_s, models))
    _require(forecast.p.dtype == np.float64, predictor, f"probabilities are {forecast.p.dtype}, expected float64")
    _require(forecast.predictor == predictor.name, predictor, f"a forecast signed {forecast.predictor}")
    _require(
        forecast.issued_s == now_s and forecast.valid_from_s == now_s,
        predictor,
        f"asked at {now_s}, issued at {forecast.issued_s}, valid from {forecast.valid_from_s}",
    )
    which = np.arange(traffic.n_models) if models is None else models
    _require(np.array_equal(forecast.models, which), predictor, "the forecast is not of the models that were asked for")
    return forecast


def _same(a: list[FloatArray], b: list[FloatArray]) -> bool:
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def check_interface(factory: Factory) -> None:
    """It has what the protocol asks for; its name is one word."""
    predictor = factory()
    if not isinstance(predictor, Predictor):
        raise PredictorError(f"{type(predictor).__name__} lacks a member of Predictor")
    _require(bool(predictor.name) and not any(map(str.isspace, predictor.name)), predictor, "its name is not one word")
    _require(all(n == 0 for n in predictor.fallbacks.values()), predictor, "a new predictor has counted fallbacks")


def check_empty(factory: Factory) -> None:
    """Without any model, and with models that were never used, there is a forecast."""
    for n in (0, 5):
        traffic, predictor = Traffic(n), factory()
        predictor.learn(traffic, traffic.advance([], [], ticks=[_START_S]))
        predictor.refit(_START_S)
        _asked(predictor, traffic, _START_S + 1.0)


def check_one_row(factory: Factory) -> None:
    """After a single row, its model has a chance; a fallback is named and counted, not zero."""
    traffic, predictor = Traffic(2), factory()
    predictor.learn(traffic, traffic.advance([_START_S], [0], ticks=[_START_S + 1.0]))
    forecast = _asked(predictor, traffic, _START_S + 60.0)
    _require(forecast.p[0, -1] > 0.0, predictor, "a model just used is said never to be used again")
    if forecast.fallback:
        _require(sum(predictor.fallbacks.values()) > 0, predictor, f"fallback {forecast.fallback!r} is not counted")
        _require(forecast.fallback in predictor.fallbacks, predictor, f"fallback {forecast.fallback!r} has no count")


def check_subsets(factory: Factory) -> None:
    """A forecast of some models, in any order, is that of all; asking changes no answer."""
    run = _Run(factory(), Traffic(_MODELS))
    last = run.over(_log(), _BLOCKS)[-1]
    some = np.array([5, 0, 6])
    part = _asked(run.predictor, run.traffic, run.now_s, some)
    _require(np.array_equal(part.p, last[some]), run.predictor, "a forecast of some models differs from that of all")
    _require(len(_asked(run.predictor, run.traffic, run.now_s, some[:0]).p) == 0, run.predictor, "no model, some rows")
    again = _asked(run.predictor, run.traffic, run.now_s)
    _require(np.array_equal(again.p, last), run.predictor, "asked twice, it answers differently")
    later = _asked(run.predictor, run.traffic, run.now_s + 7 * 86400.0)
    _require(bool((later.p[:6, -1] >= 0.0).all()), run.predictor, "no forecast after a quiet week")


def check_determinism(factory: Factory) -> None:
    """Two fresh predictors over the same log forecast the same bytes."""
    one, other = (_Run(factory(), Traffic(_MODELS)) for _ in range(2))
    _require(_same(one.over(_log(), _BLOCKS), other.over(_log(), _BLOCKS)), one.predictor, "two runs differ")


def check_no_future(factory: Factory) -> None:
    """Changing the log from some time on changes nothing before, and something after."""
    one, other = (_Run(factory(), Traffic(_MODELS)) for _ in range(2))
    cut_s = _START_S + _HALF * _BLOCK_S
    whole, changed = one.over(_log(), _BLOCKS), other.over(_log(0, cut_s, 1), _BLOCKS)
    _require(_same(whole[:_HALF], changed[:_HALF]), one.predictor, "the future of the log changes its past forecasts")
    _require(not _same(whole[_HALF:], changed[_HALF:]), one.predictor, "it learns nothing from the log")


def check_snapshot(factory: Factory) -> None:
    """A predictor restored from a snapshot goes on as if nothing had happened; a foreign snapshot is refused."""
    log = _log()
    whole = _Run(factory(), Traffic(_MODELS))
    whole.over(log, _HALF)
    kept = {name: value.copy() for name, value in whole.predictor.snapshot().items()}
    given = {name: value.copy() for name, value in kept.items()}
    again = _Run(factory(), Traffic.restore(whole.traffic.snapshot()), whole.now_s)
    again.predictor.restore(given)
    _require(_equal(again.predictor.snapshot(), kept), whole.predictor, "its snapshot is not restored as it was")
    same = _same(whole.over(log, _BLOCKS - _HALF), again.over(log, _BLOCKS - _HALF))
    _require(same, whole.predictor, "restored from a snapshot, it forecasts differently")
    _require(_equal(whole.predictor.snapshot(), again.predictor.snapshot()), whole.predictor, "restored, it learns otherwise")
    _require(_equal(given, kept), whole.predictor, "it writes into a snapshot that it was restored from")
    try:
        factory().restore({"something": np.zeros(1)})
    except PredictorError:
        return
    _require(False, whole.predictor, "it takes a snapshot that it cannot understand")


def _equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return set(a) == set(b) and all(a[k].shape == b[k].shape and a[k].tobytes() == b[k].tobytes() for k in a)


def check_many(factory: Factory) -> None:
    """Thousands of models at once, most of them used once or never."""
    rng = np.random.default_rng(3)
    traffic, predictor = Traffic(5000), factory()
    ts = _START_S + np.sort(rng.uniform(0.0, 7200.0, 6000))
    block = traffic.advance(ts, rng.zipf(1.3, len(ts)) % 5000, ticks=[_START_S + 3600.0])
    predictor.learn(traffic, block)
    forecast = _asked(predictor, traffic, _START_S + 7200.0)
    _require(forecast.p.shape == (5000, len(HORIZONS_S)), predictor, f"a forecast of shape {forecast.p.shape}")
    _require(bool((forecast.p[traffic.total > 0, -1] > 0.0).all()), predictor, "a used model has no chance at all")


def check_unknown(factory: Factory) -> None:
    """Models that appear after it learned are forecast; numbers that traffic does not know are refused."""
    traffic, predictor = Traffic(1), factory()
    predictor.learn(traffic, traffic.advance([_START_S, _START_S + 60.0], [0, 0]))
    traffic.add([_START_S + 120.0], [3])
    forecast = _asked(predictor, traffic, _START_S + 180.0)
    _require(forecast.p[3, -1] > 0.0, predictor, "a model that it has not learned is said never to be used")
    for number in (-1, 4):
        try:
            predictor.forecast(traffic, _START_S + 180.0, np.array([number]))
        except (ValueError, PredictorError):
            continue
        _require(False, predictor, f"it forecasts model {number}, which does not exist")


def check_refuses_the_past(factory: Factory) -> None:
    """A forecast for a time before the newest row would be stale: refused."""
    traffic, predictor = Traffic(1), factory()
    predictor.learn(traffic, traffic.advance([_START_S, _START_S + 3600.0], [0, 0]))
    for now_s in (_START_S + 1800.0, np.nan):
        try:
            predictor.forecast(traffic, now_s)
        except (ValueError, PredictorError):
            continue
        _require(False, predictor, f"it forecasts for {now_s}, when rows until {traffic.newest_s} are known")


CHECKS: tuple[Callable[[Factory], None], ...] = (
    check_interface,
    check_empty,
    check_one_row,
    check_subsets,
    check_determinism,
    check_no_future,
    check_snapshot,
    check_many,
    check_unknown,
    check_refuses_the_past,
)

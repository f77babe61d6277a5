"""Which predictors there are: one list, by which backtests, jobs and the command line find them.

An entry says how a predictor is made, which feature sources it is given, and which packages it needs. What each does is in its own module;
nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from prefetcher.errors import UsageError
from prefetcher_models.feature_source import FeatureSource
from prefetcher_models.predictor import Predictor

__all__ = ["BASELINES", "PREDICTORS", "Entry", "entry", "hazard_sources", "missing_packages"]


def _no_sources() -> Sequence[FeatureSource]:
    return ()


@dataclass(frozen=True, slots=True)
class Entry:
    """One predictor. `make` is given the names of the columns that `sources` add behind the traffic features.

    `kind`: a baseline is what others are measured against, a learned one decides. `needs`: packages without which it can't be made.
    `costly`: its fits take minutes on a long log, so that it runs only where it is named.
    """

    name: str
    kind: Literal["baseline", "learned"]
    what: str
    make: Callable[[tuple[str, ...]], Predictor]
    sources: Callable[[], Sequence[FeatureSource]] = _no_sources
    needs: tuple[str, ...] = ()
    costly: bool = False


def _transitions() -> Sequence[FeatureSource]:
    from prefetcher_models.transitions import Transitions

    return (Transitions(),)


def _coactivation() -> Sequence[FeatureSource]:
    from prefetcher_models.coactivation import Coactivation

    return (Coactivation(),)


def _seasons() -> Sequence[FeatureSource]:
    from prefetcher_models.seasonal import SeasonalSource

    return (SeasonalSource(),)


def _seasonal(_names: tuple[str, ...]) -> Predictor:
    from prefetcher_models.seasonal import SeasonalPredictor

    return SeasonalPredictor()


def _hazard(names: tuple[str, ...]) -> Predictor:
    from prefetcher_models.hazard import Hazard

    return Hazard(names=names)


def _seasonal_naive(_names: tuple[str, ...]) -> Predictor:
    from prefetcher_models.seasonal_naive import SeasonalNaive

    return SeasonalNaive()


def _popularity(_names: tuple[str, ...]) -> Predictor:
    from prefetcher_models.popularity import Popularity

    return Popularity()


def _idle_time(_names: tuple[str, ...]) -> Predictor:
    from prefetcher_models.idle_time import IdleTime

    return IdleTime()


def _tsb(_names: tuple[str, ...]) -> Predictor:
    from prefetcher_models.tsb import Tsb

    return Tsb()


def _hit_density(_names: tuple[str, ...]) -> Predictor:
    from prefetcher_models.hit_density import HitDensity

    return HitDensity()


PREDICTORS: tuple[Entry, ...] = (
    Entry(
        "hazard", "learned", "boosted trees over traffic features, pooled over models, calibrated by horizon", _hazard, needs=("lightgbm",)
    ),
    Entry(
        "hazard-transitions",
        "learned",
        "the hazard with columns of what follows what, by arrivals and users",
        _hazard,
        _transitions,
        needs=("lightgbm",),
    ),
    Entry(
        "hazard-coactivation",
        "learned",
        "the hazard with columns of a sequence model of what users turn to next",
        _hazard,
        _coactivation,
        needs=("lightgbm", "torch"),
        costly=True,
    ),
    Entry(
        "hazard-seasonal",
        "learned",
        "the hazard with columns of the seasonal forecast",
        _hazard,
        _seasons,
        needs=("lightgbm", "prophet"),
        costly=True,
    ),
    Entry("seasonal", "learned", "daily and weekly seasons of the busiest models (Prophet)", _seasonal, needs=("prophet",), costly=True),
    Entry("seasonal-naive", "baseline", "what was used at this time yesterday and a week ago is used now", _seasonal_naive),
    Entry("popularity-24h", "baseline", "what was used in many ten-minute windows of the last day is used next", _popularity),
    Entry("idle-time", "baseline", "the model's own gaps, given how long it has been idle", _idle_time),
    Entry("tsb", "baseline", "smoothed chance and size of five-minute periods with rows (Teunter, Syntetos, Babai)", _tsb),
    Entry("hit-density", "baseline", "gaps pooled over models that come back at like distances", _hit_density),
)

#: What every predictor has to beat, in the order in which they are compared.
BASELINES: tuple[str, ...] = ("seasonal-naive", "popularity-24h")


def entry(name: str) -> Entry:
    """The predictor of that name. Raises `UsageError`."""
    for one in PREDICTORS:
        if one.name == name:
            return one
    raise UsageError(f"no predictor is called {name!r}; there are {', '.join(one.name for one in PREDICTORS)}")


def missing_packages(one: Entry) -> tuple[str, ...]:
    """Which of the packages that it needs are not installed."""
    return tuple(package for package in one.needs if importlib.util.find_spec(package) is None)


def hazard_sources() -> Sequence[FeatureSource]:
    """New sources of the columns that the deciding hazard is given beside its own, live and in replay."""
    return entry("hazard").sources()

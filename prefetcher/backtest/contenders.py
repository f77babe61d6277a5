"""Predictors that run side by side over one log, each strictly from the past; one that fails is counted and stays out of the scores.

A contender is asked at a moment for all models, then given what happened until the next one. What it says is kept as it is: nothing is
clipped, filled or guessed in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from prefetcher.core.traffic import Block, Traffic
from prefetcher.core.types import HORIZONS_S
from prefetcher.errors import shortened
from prefetcher_models.predictor import Forecast, Predictor, checked
from prefetcher_models.registry import Entry
from prefetcher_models.samples import EPOCH_S
from prefetcher_models.sources import Sources

__all__ = ["Contender"]

T = TypeVar("T")
_ALL = tuple(range(len(HORIZONS_S)))


class _Scoring(Protocol):
    """A predictor that forecasts from feature rows that were computed already."""

    def probabilities(self, x: npt.NDArray[np.float32], horizons: tuple[int, ...]) -> npt.NDArray[np.float64]: ...


class Contender:
    """One predictor of the registry, with its own feature sources, over the traffic that all share."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.name = entry.name
        #: Forecasts that were asked for, one a moment.
        self.asked = 0
        #: What it could not do, by what and why.
        self.failures: dict[str, int] = {}
        self._sources = Sources()
        self._predictor: Predictor | None = None
        self._tried("make", self._make)
        self._next_refit_s = -np.inf

    def _make(self) -> None:
        self._sources = Sources(self.entry.sources())
        self._predictor = self.entry.make(self._sources.names)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Forecasts of a model that its own method could not make, by reason."""
        own = {} if self._predictor is None else {reason: n for reason, n in self._predictor.fallbacks.items() if n}
        return own | {f"{column}: {reason}": n for (column, reason), n in self._sources.fallbacks.items()}

    def refit(self, now_s: float) -> None:
        """At whole half hours: fits that are due, from what was learned so far."""
        if self._predictor is None or now_s < self._next_refit_s:
            return
        self._next_refit_s = (now_s // EPOCH_S + 1.0) * EPOCH_S
        predictor = self._predictor
        self._sources.refit(now_s)
        self._tried("fit", lambda: predictor.refit(now_s))

    def before(self, traffic: Traffic, now_s: float) -> npt.NDArray[np.float32] | None:
        """float32[n_models, horizons] at `now_s`, `traffic` being the state then; None where it is asked by rows (in `at`), or failed."""
        predictor = self._predictor
        if predictor is None or hasattr(predictor, "probabilities"):
            return None
        self.asked += 1

        def ask() -> Forecast:
            return checked(predictor.forecast(traffic, now_s))

        said = self._tried("forecast", ask)
        return None if said is None else said.p.astype(np.float32)

    def at(self, traffic: Traffic, block: Block, asked: bool, said: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32]:
        """Takes the block in, which begins at the moment; what was `said` before it, or is said from the rows of its first tick.

        NaN for all models where it failed.
        """
        nothing = np.full((traffic.n_models, len(HORIZONS_S)), np.nan, np.float32)
        predictor = self._predictor
        if predictor is None:
            self.asked += asked
            return nothing
        widened = self._tried("learn", lambda: self._sources.widened(traffic, block))
        if widened is None:
            self.asked += asked
            return nothing
        if asked and hasattr(predictor, "probabilities"):
            self.asked += 1
            said = self._tried("forecast", lambda: _by_rows(predictor, widened, traffic.n_models))
        self._tried("learn", lambda: predictor.learn(traffic, widened))
        return nothing if said is None else said

    def _tried(self, what: str, do: Callable[[], T]) -> T | None:
        """What `do` gives, or None: whatever it raises is this predictor's failure, and no other's."""
        try:
            return do()
        except Exception as exc:  # noqa: BLE001  (a predictor of anyone's may raise anything)
            reason = f"{what}: {type(exc).__name__}: {shortened(' '.join(str(exc).split()))}"
            self.failures[reason] = self.failures.get(reason, 0) + 1
            return None


def _by_rows(predictor: Any, block: Block, models: int) -> npt.NDArray[np.float32]:
    """What it says for the block's first tick; 0 for models that were never used."""
    first = np.flatnonzero(block.tick_of == 0)
    scoring: _Scoring = predictor
    p = np.zeros((models, len(HORIZONS_S)))
    p[block.tick_model[first]] = scoring.probabilities(np.ascontiguousarray(block.tick_features[first]), _ALL)
    at_s = float(block.ticks[0]) if len(block.ticks) else block.from_s
    return checked(Forecast(predictor.name, at_s, at_s, np.arange(models), p)).p.astype(np.float32)

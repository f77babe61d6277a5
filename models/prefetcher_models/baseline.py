"""What the simple predictors share: the fallback on rates, its count, the refusal of past times, snapshots.

A subclass says for which models its own method has something to go by; the others get the probabilities of a Poisson
stream at their decayed rate, and are counted. What a method is, is the subclasses' business.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from prefetcher.core.traffic import TAUS_S, Block, Traffic
from prefetcher.core.types import HORIZONS_S
from prefetcher.errors import PredictorError
from prefetcher_models.predictor import FloatArray, Forecast, IntArray, checked, monotone, rate_probabilities

__all__ = ["Baseline", "BoolArray"]

BoolArray = npt.NDArray[np.bool_]
#: The time scales whose mean rate is the fallback: 10 min, 1 h, 6 h, 1 d.
_MIX = [TAUS_S.index(tau_s) for tau_s in (600.0, 3600.0, 21600.0, 86400.0)]


class Baseline:
    """A predictor, see `predictor.Predictor`, but for its method: `_own`, and `_take`, `_arrays`, `_put` if it keeps state.

    `reason` names why a model had to be forecast by its rates. Models that were never used get 0.
    """

    def __init__(self, name: str, reason: str) -> None:
        self._name = name
        self._reason = reason
        self._fallen = 0
        self._learned_s = -np.inf

    @property
    def name(self) -> str:
        return self._name

    @property
    def fallbacks(self) -> Mapping[str, int]:
        return {self._reason: self._fallen}

    def learn(self, traffic: Traffic, block: Block) -> None:
        self._take(traffic, block)
        if len(block.ts):
            self._learned_s = max(self._learned_s, float(block.ts.max()))

    def refit(self, now_s: float) -> bool:
        """Never fits: what is learned is learned row by row."""
        return False

    def forecast(self, traffic: Traffic, now_s: float, models: IntArray | None = None) -> Forecast:
        """See `Predictor.forecast`. Raises `PredictorError` for a time before the newest row, which would be stale, and
        for models that `traffic` does not know.
        """
        newest_s = max(self._learned_s, traffic.newest_s)
        if not np.isfinite(now_s) or now_s < newest_s:
            raise PredictorError(f"{self._name}: asked at {now_s} s, but rows until {newest_s} s are known", predictor=self._name)
        which = np.arange(traffic.n_models) if models is None else np.asarray(models, dtype=np.int64).reshape(-1)
        if len(which) and (which.min() < 0 or which.max() >= traffic.n_models):
            raise PredictorError(
                f"{self._name}: models are numbered from 0 to {traffic.n_models - 1}, got {which.min()} to {which.max()}",
                predictor=self._name,
            )
        p = np.zeros((len(which), len(HORIZONS_S)))
        seen = np.flatnonzero(traffic.total[which] > 0)
        fallback = ""
        if len(seen):
            own, able = self._own(traffic, now_s, which[seen])
            by_rates = rate_probabilities(traffic.rates(now_s, which[seen])[:, _MIX].mean(axis=1))
            p[seen] = monotone(np.where(able[:, None], own, by_rates))
            self._fallen += int((~able).sum())
            fallback = "" if able.any() else self._reason
        return checked(Forecast(self._name, now_s, now_s, which, p, fallback))

    def snapshot(self) -> dict[str, np.ndarray]:
        return {
            "predictor": np.frombuffer(self._name.encode(), dtype=np.uint8).copy(),
            "learned_s": np.array([self._learned_s]),
            "fallen": np.array([self._fallen], dtype=np.int64),
            **{name: value.copy() for name, value in self._arrays().items()},
        }

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        known = self.snapshot()
        if set(snapshot) != set(known) or bytes(snapshot["predictor"]) != self._name.encode():
            raise PredictorError(f"{self._name}: a snapshot of another predictor", predictor=self._name)
        own = {name: np.array(snapshot[name], dtype=value.dtype) for name, value in known.items()}
        if any(own[name].ndim != value.ndim for name, value in known.items()):
            raise PredictorError(f"{self._name}: a snapshot with arrays of other shapes", predictor=self._name)
        self._put({name: own[name] for name in self._arrays()})
        self._learned_s, self._fallen = float(own["learned_s"][0]), int(own["fallen"][0])

    def _own(self, traffic: Traffic, now_s: float, which: IntArray) -> tuple[FloatArray, BoolArray]:
        """float64[n, len(HORIZONS_S)] by the predictor's own method, for used models, and for which of them it holds."""
        raise NotImplementedError

    def _take(self, traffic: Traffic, block: Block) -> None:
        """Learn the rows of one block."""

    def _arrays(self) -> dict[str, np.ndarray]:
        """The state beyond what every baseline has."""
        return {}

    def _put(self, arrays: dict[str, np.ndarray]) -> None:
        """Take over what `_arrays` gave. Raises `PredictorError` for arrays that don't fit each other."""

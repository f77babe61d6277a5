"""The pooled hazard: gradient boosting over the traffic features, one calibrated probability of the next use for each
horizon.

One set of trees serves all models, so that a model seen twice profits from what the others showed. A sample counts
for a horizon only once that horizon is over, fits happen at times that the log alone decides, and the same rows in
any blocks give the same bytes. LightGBM is imported at the first fit; evaluation needs only `trees`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.core.traffic import FEATURE_NAMES, TAUS_S, Block, Traffic
from prefetcher.core.types import HORIZONS_S
from prefetcher.errors import PredictorError
from prefetcher_models.predictor import FloatArray, Forecast, IntArray, checked, monotone, rate_probabilities
from prefetcher_models.samples import EPOCH_S, SampleStore
from prefetcher_models.trees import DEPTH, Forest

__all__ = ["ALL_HORIZONS", "Hazard", "HazardSettings"]

ALL_HORIZONS: tuple[int, ...] = tuple(range(len(HORIZONS_S)))
#: Decayed rates whose mean stands in for a horizon without trees: over 10 min, 1 h, 6 h and 1 d.
_RATE_COLUMNS = [FEATURE_NAMES.index(f"log_rate_{tau}s") for tau in (600, 3600, 21600, 86400)]
_RATE_SCALES = [TAUS_S.index(float(tau)) for tau in (600, 3600, 21600, 86400)]


@dataclass(frozen=True, slots=True)
class HazardSettings:
    """How the hazard is fitted. Fits begin at `first_fit_s` of history and come again when it grew by `growth`, at
    least once a day.

    `horizons`: which of `HORIZONS_S` get trees (the others follow from their neighbours' rates). `samples`: the most
    that one fit sees. `averaged`: how many of the last fits of a horizon are averaged. The rest are LightGBM's words.
    """

    horizons: tuple[int, ...] = ALL_HORIZONS
    seed: int = 0
    first_fit_s: float = 3600.0
    growth: float = 0.3
    samples: int = 40_000
    fewest_samples: int = 1_000
    averaged: int = 2
    trees: int = 50
    learning_rate: float = 0.15
    min_data_in_leaf: int = 60
    feature_fraction: float = 0.7
    lambda_l2: float = 5.0
    max_bin: int = 63


class Hazard:
    """The pooled hazard as a predictor, see `predictor.Predictor`."""

    def __init__(self, settings: HazardSettings | None = None) -> None:
        self.settings = settings or HazardSettings()
        self._store = SampleStore(self.settings.seed, self.settings.samples)
        self._texts: list[list[str]] = [[] for _ in HORIZONS_S]
        self._forests: list[Forest | None] = [None] * len(HORIZONS_S)
        self._origin_s = np.inf
        self._next_fit_s = np.inf
        self._fits = 0
        self._fallbacks = {"no fit yet": 0, "horizon without a fit": 0}

    @property
    def name(self) -> str:
        return "hazard"

    @property
    def fallbacks(self) -> Mapping[str, int]:
        return self._fallbacks

    @property
    def fits(self) -> int:
        """How many times trees were fitted."""
        return self._fits

    @property
    def next_fit_s(self) -> float:
        """When the next fit is due; inf before the first row."""
        return self._next_fit_s

    def learn(self, traffic: Traffic, block: Block) -> None:
        """Take in one block; one without features teaches only when models were used."""
        if not np.isfinite(traffic.origin_s):
            return
        if not np.isfinite(self._origin_s):
            self._origin_s = traffic.origin_s
            self._next_fit_s = np.ceil((self._origin_s + self.settings.first_fit_s) / EPOCH_S) * EPOCH_S
        self._store.take(block, self._origin_s)

    def refit(self, now_s: float) -> bool:
        """Fit if a fit is due at `now_s`; whether any horizon got new trees."""
        if now_s < self._next_fit_s:
            return False
        age_s = now_s - self._origin_s
        step_s = min(max(3600.0, self.settings.growth * age_s), max(86400.0, 0.1 * age_s))
        self._next_fit_s = np.ceil((now_s + step_s) / EPOCH_S) * EPOCH_S
        return self._fit(now_s)

    def forecast(self, traffic: Traffic, now_s: float, models: IntArray | None = None) -> Forecast:
        which = np.arange(traffic.n_models) if models is None else np.asarray(models, dtype=np.int64)
        x = traffic.features(now_s, which)
        seen = np.isfinite(x[:, 0])
        p = np.zeros((len(which), len(HORIZONS_S)))
        p[seen] = self.probabilities(np.ascontiguousarray(x[seen]), ALL_HORIZONS)
        fallback = "" if any(self._forests) else "no fit yet"
        return checked(Forecast(self.name, now_s, now_s, which, p, fallback))

    def probabilities(self, x: npt.NDArray[np.float32], horizons: tuple[int, ...]) -> FloatArray:
        """float64[n, len(horizons)]: P(used within each of these horizons) for feature rows x float32[n, F] of models
        that were used.
        """
        out = np.empty((len(x), len(horizons)))
        rates: FloatArray | None = None
        for column, horizon in enumerate(horizons):
            forest = self._forests[horizon]
            if forest is not None:
                out[:, column] = forest.predict(x)
                continue
            self._fallbacks["horizon without a fit" if any(self._forests) else "no fit yet"] += len(x)
            if rates is None:
                rates = np.exp(x[:, _RATE_COLUMNS].astype(np.float64)).mean(axis=1)
            out[:, column] = rate_probabilities(rates, (HORIZONS_S[horizon],))[:, 0]
        return monotone(out)

    def snapshot(self) -> dict[str, np.ndarray]:
        texts = {f"trees_{h}_{i}": _bytes(text) for h, kept in enumerate(self._texts) for i, text in enumerate(kept)}
        times = np.array([self._origin_s, self._next_fit_s])
        counts = np.array([self._fits, *self._fallbacks.values()], dtype=np.int64)
        store = {f"store_{key}": value for key, value in self._store.snapshot().items()}
        return {"predictor": _bytes(self.name), "times": times, "counts": counts, **texts, **store}

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        try:
            if bytes(snapshot["predictor"]) != self.name.encode():
                raise PredictorError("a snapshot of another predictor", predictor=self.name)
            texts = [
                [bytes(snapshot[key]).decode() for i in range(len(snapshot)) if (key := f"trees_{h}_{i}") in snapshot]
                for h in range(len(HORIZONS_S))
            ]
            forests = [_forest(kept) for kept in texts]
            self._store.restore({key[6:]: value for key, value in snapshot.items() if key.startswith("store_")})
            self._origin_s, self._next_fit_s = (float(v) for v in snapshot["times"])
            self._fits, *fallbacks = (int(v) for v in snapshot["counts"])
        except (KeyError, ValueError) as error:
            raise PredictorError(
                f"a snapshot that the hazard does not understand: {error}", predictor=self.name
            ) from error
        self._texts, self._forests = texts, forests
        self._fallbacks = dict(zip(self._fallbacks, fallbacks, strict=True))

    def _fit(self, now_s: float) -> bool:
        s = self._store.samples(now_s)
        age_s = now_s - self._origin_s
        fitted = False
        rng = np.random.default_rng([self.settings.seed, self._fits])
        for horizon in self.settings.horizons:
            within_s = HORIZONS_S[horizon]
            known = np.flatnonzero(s.t + within_s <= now_s)
            if age_s < 1.5 * within_s or len(known) < self.settings.fewest_samples:
                continue
            if len(known) > self.settings.samples:
                weight = np.linspace(0.3, 1.0, len(known))
                known = np.sort(rng.choice(known, self.settings.samples, replace=False, p=weight / weight.sum()))
            used = (s.next_s[known] <= s.t[known] + within_s).astype(np.float32)
            if used.min() == used.max():
                continue
            text = self._train(s.x[known], used)
            self._texts[horizon] = [text, *self._texts[horizon]][: self.settings.averaged]
            self._forests[horizon] = _forest(self._texts[horizon])
            fitted = True
        self._fits += 1
        return fitted

    def _train(self, x: npt.NDArray[np.float32], used: npt.NDArray[np.float32]) -> str:
        import lightgbm

        s = self.settings
        words: dict[str, Any] = {
            "objective": "binary",
            "max_depth": DEPTH,
            "num_leaves": 2**DEPTH,
            "learning_rate": s.learning_rate,
            "min_data_in_leaf": s.min_data_in_leaf,
            "feature_fraction": s.feature_fraction,
            "lambda_l2": s.lambda_l2,
            "max_bin": s.max_bin,
            "seed": s.seed + 1,
            "num_threads": 1,
            "deterministic": True,
            "force_col_wise": True,
            "verbose": -1,
        }
        booster = lightgbm.train(words, lightgbm.Dataset(x, used), num_boost_round=s.trees)
        return str(booster.model_to_string())


def _forest(texts: list[str]) -> Forest | None:
    return Forest.average([Forest.parse(text, len(FEATURE_NAMES)) for text in texts]) if texts else None


def _bytes(text: str) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text.encode(), dtype=np.uint8).copy()

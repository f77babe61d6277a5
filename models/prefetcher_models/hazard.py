"""The pooled hazard: gradient boosting over the traffic features, one calibrated probability of the next use for each
horizon.

One set of trees serves all models, so that a model seen twice profits from what the others showed. A sample counts
for a horizon only once that horizon is over, fits happen at times that the log alone decides, and the same rows in
any blocks give the same bytes. Columns of other sources (`sources`) stand behind the traffic features; which ones is
part of a fit. LightGBM is imported at the first fit; evaluation needs only `trees`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.core.traffic import FEATURE_NAMES, Block, Traffic
from prefetcher.core.types import HORIZONS_S
from prefetcher.errors import PredictorError
from prefetcher_models.calibration import calibration_line
from prefetcher_models.predictor import FloatArray, Forecast, IntArray, checked, monotone, rate_probabilities, recent_rate
from prefetcher_models.samples import EPOCH_S, SampleStore
from prefetcher_models.sources import ABSENT
from prefetcher_models.trees import DEPTH, Forest

__all__ = ["ALL_HORIZONS", "Fit", "Hazard", "HazardSettings"]

ALL_HORIZONS: tuple[int, ...] = tuple(range(len(HORIZONS_S)))


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


@dataclass(frozen=True, slots=True)
class Fit:
    """What fits have learned, for each of `HORIZONS_S`: the last LightGBM texts, newest first, and the calibration
    line (slope, offset).

    `from_s`, `until_s`, `rows`: the log that it was learned from. `scores`: by horizon in seconds, how the forecasts
    before the last fit did on what came after them: samples, base rate, Brier score, log loss. `names`: the columns
    behind the traffic features that it was fitted with.
    """

    trees: tuple[tuple[str, ...], ...]
    lines: tuple[tuple[float, float], ...]
    from_s: float = np.inf
    until_s: float = -np.inf
    rows: int = 0
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    names: tuple[str, ...] = ()


_NO_FIT = Fit(trees=((),) * len(HORIZONS_S), lines=((1.0, 0.0),) * len(HORIZONS_S))
_SCORES = ("samples", "base_rate", "brier", "log_loss")
#: Forecasts with outcomes per horizon that calibration looks back on, and the fewest that it needs.
_MOST_EVIDENCE, _FEWEST_EVIDENCE = 8000, 500


class Hazard:
    """The pooled hazard as a predictor, see `predictor.Predictor`; from `fit`, it forecasts at once.

    `names` are the columns behind the traffic features in every block that it learns and in every row that it scores, F
    features in all (`sources.Sources.widened`). Raises `PredictorError` for a fit with other ones.
    """

    def __init__(self, settings: HazardSettings | None = None, fit: Fit | None = None, names: tuple[str, ...] = ()) -> None:
        self.settings = settings or HazardSettings()
        self.names = names
        self._store = SampleStore(self.settings.seed, self.settings.samples, len(FEATURE_NAMES) + len(names))
        self._origin_s = np.inf
        self._next_fit_s = np.inf
        self._fits = 0
        #: log-odds of the trees in force, and whether the model was then used: float64[k, 2] for each horizon
        self._evidence = [np.zeros((0, 2)) for _ in HORIZONS_S]
        self._fallbacks = {"no fit yet": 0, "horizon without a fit": 0}
        self._take_over(fit if fit is not None else replace(_NO_FIT, names=names))

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
    def fit(self) -> Fit:
        """What was learned last."""
        return self._fit

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
        return self._fit_all(now_s)

    def fit_now(self, now_s: float) -> bool:
        """Fit whether or not one is due, which moves no later one; whether any horizon got new trees."""
        return self._fit_all(now_s)

    def forecast(self, traffic: Traffic, now_s: float, models: IntArray | None = None) -> Forecast:
        """See `Predictor.forecast`. Sources speak with blocks only: here their columns say nothing."""
        if not np.isfinite(now_s) or now_s < traffic.newest_s:
            raise PredictorError(f"{self.name}: asked at {now_s} s, but rows until {traffic.newest_s} s are known", predictor=self.name)
        which = np.arange(traffic.n_models) if models is None else np.asarray(models, dtype=np.int64)
        x = traffic.features(now_s, which)
        seen = np.isfinite(x[:, 0])
        p = np.zeros((len(which), len(HORIZONS_S)))
        silent = np.full((np.count_nonzero(seen), len(self.names)), ABSENT)
        p[seen] = self.probabilities(np.concatenate([x[seen], silent], axis=1), ALL_HORIZONS)
        fallback = "" if any(self._forests) else "no fit yet"
        return checked(Forecast(self.name, now_s, now_s, which, p, fallback))

    def probabilities(self, x: npt.NDArray[np.float32], horizons: tuple[int, ...]) -> FloatArray:
        """float64[n, len(horizons)]: P(used within each of these horizons, rising) for feature rows x float32[n, F]
        of models that were used. Raises `PredictorError` for rows of another width.
        """
        width = len(FEATURE_NAMES) + len(self.names)
        if x.shape[1] != width:
            raise PredictorError(f"{self.name}: feature rows of {x.shape[1]} columns, expected {width}", predictor=self.name)
        out = np.empty((len(x), len(horizons)))
        rates: FloatArray | None = None
        for column, horizon in enumerate(horizons):
            forest = self._calibrated[horizon]
            if forest is not None:
                out[:, column] = forest.predict(x)
                continue
            self._fallbacks["horizon without a fit" if any(self._forests) else "no fit yet"] += len(x)
            if rates is None:
                rates = recent_rate(x)
            out[:, column] = rate_probabilities(rates, (HORIZONS_S[horizon],))[:, 0]
        return monotone(out)

    def snapshot(self) -> dict[str, np.ndarray]:
        fit = self._fit
        scores = [[float(h), *fit.scores[h].values()] for h in fit.scores]
        names = {"names": _bytes(" ".join(self.names))} if self.names else {}
        return {
            "predictor": _bytes(self.name),
            **names,
            "times": np.array([self._origin_s, self._next_fit_s, fit.from_s, fit.until_s]),
            "counts": np.array([fit.rows, self._fits, *self._fallbacks.values()], dtype=np.int64),
            "lines": np.array(fit.lines),
            "scores": np.array(scores).reshape(len(scores), 1 + len(_SCORES)),
            **{f"evidence_{h}": evidence for h, evidence in enumerate(self._evidence)},
            **{f"trees_{h}_{i}": _bytes(text) for h, kept in enumerate(fit.trees) for i, text in enumerate(kept)},
            **{f"store_{key}": value for key, value in self._store.snapshot().items()},
        }

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        try:
            if bytes(snapshot["predictor"]) != self.name.encode():
                raise PredictorError("a snapshot of another predictor", predictor=self.name)
            names = tuple(bytes(snapshot["names"]).decode().split()) if "names" in snapshot else ()
            trees = tuple(
                tuple(
                    bytes(snapshot[key]).decode() for i in range(len(snapshot)) if (key := f"trees_{h}_{i}") in snapshot
                )
                for h in range(len(HORIZONS_S))
            )
            origin_s, next_fit_s, from_s, until_s = (float(v) for v in snapshot["times"])
            rows, fits, *fallbacks = (int(v) for v in snapshot["counts"])
            lines = tuple((float(slope), float(offset)) for slope, offset in snapshot["lines"])
            scores = {f"{row[0]:g}": dict(zip(_SCORES, row[1:].tolist(), strict=True)) for row in snapshot["scores"]}
            evidence = [np.array(snapshot[f"evidence_{h}"]) for h in range(len(HORIZONS_S))]
            self._take_over(Fit(trees, lines, from_s, until_s, rows, scores, names))
            self._store.restore({key[6:]: value for key, value in snapshot.items() if key.startswith("store_")})
        except (KeyError, ValueError) as error:
            raise PredictorError(
                f"a snapshot that the hazard does not understand: {error}", predictor=self.name
            ) from error
        self._origin_s, self._next_fit_s, self._fits, self._evidence = origin_s, next_fit_s, fits, evidence
        self._fallbacks = dict(zip(self._fallbacks, fallbacks, strict=True))

    def _take_over(self, fit: Fit) -> None:
        if fit.names != self.names:
            raise PredictorError(
                f"a fit with the columns {list(fit.names)} beside traffic, expected {list(self.names)}; fit again", predictor=self.name
            )
        forests = [_forest(texts, len(FEATURE_NAMES) + len(self.names)) for texts in fit.trees]
        if not len(forests) == len(fit.lines) == len(HORIZONS_S):
            raise ValueError(f"a fit of {len(forests)} horizons, expected {len(HORIZONS_S)}")
        self._fit = fit
        self._forests = forests
        self._calibrated = [
            f.along(*line) if f is not None else None for f, line in zip(forests, fit.lines, strict=True)
        ]

    def _fit_all(self, now_s: float) -> bool:
        """New trees for every horizon that has enough samples whose outcome is known, and for all a new look at
        calibration.
        """
        s = self._store.samples(now_s)
        trees, lines, scores = list(self._fit.trees), list(self._fit.lines), {}
        rng = np.random.default_rng([self.settings.seed, self._fits])
        for horizon in self.settings.horizons:
            within_s = HORIZONS_S[horizon]
            known = np.flatnonzero(s.t + within_s <= now_s)
            used = (s.next_s[known] <= s.t[known] + within_s).astype(np.float64)
            forest = self._forests[horizon]
            if forest is not None and (fresh := s.t[known] >= self._fit.until_s).any():
                log_odds = forest.log_odds(s.x[known[fresh]])
                scores[f"{within_s:g}"] = _score(log_odds, used[fresh], lines[horizon])
                pairs = np.concatenate([self._evidence[horizon], np.stack([log_odds, used[fresh]], axis=1)])
                self._evidence[horizon] = pairs[-_MOST_EVIDENCE:]
                if len(pairs) >= _FEWEST_EVIDENCE:
                    lines[horizon] = calibration_line(*self._evidence[horizon].T)
            if now_s - self._origin_s < 1.5 * within_s or len(known) < self.settings.fewest_samples:
                continue
            if len(known) > self.settings.samples:
                weight = np.linspace(0.3, 1.0, len(known))
                some = np.sort(rng.choice(len(known), self.settings.samples, replace=False, p=weight / weight.sum()))
                known, used = known[some], used[some]
            if used.min() < used.max():
                trees[horizon] = (self._train(s.x[known], used), *trees[horizon])[: self.settings.averaged]
        fitted = trees != list(self._fit.trees)
        self._take_over(Fit(tuple(trees), tuple(lines), self._origin_s, now_s, self._store.rows, scores, self.names))
        self._fits += 1
        return fitted

    def _train(self, x: npt.NDArray[np.float32], used: FloatArray) -> str:
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


def _score(log_odds: FloatArray, used: FloatArray, line: tuple[float, float]) -> dict[str, float]:
    p = np.clip(1.0 / (1.0 + np.exp(-(line[0] * log_odds + line[1]))), 1e-12, 1.0 - 1e-12)
    loss = -np.where(used > 0.0, np.log(p), np.log1p(-p)).mean()
    values = (len(p), used.mean(), ((p - used) ** 2).mean(), loss)
    return dict(zip(_SCORES, (float(v) for v in values), strict=True))


def _forest(texts: tuple[str, ...], width: int) -> Forest | None:
    return Forest.average([Forest.parse(text, width) for text in texts]) if texts else None


def _bytes(text: str) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text.encode(), dtype=np.uint8).copy()

"""How likely a hint is kept: boosted trees over who says it, about which model, when and after what.

Learns from hints that were settled and from all rows, with forecasts beside them as one more column, and is used only while it beats its
source's own record on later hints (Brier score); else, and for what is new, that record, a Beta posterior, stands. Covers neither open
hints (`prefetcher.core.hints`) nor what is done about them.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.core.hints import Hint
from prefetcher.errors import PredictorError
from prefetcher_models.trees import DEPTH, Forest

__all__ = ["FEATURES", "HintClassifier", "HintFit"]

#: The columns, in their order. Ages and rates are logarithms; records are log odds, shrunk to what is wider.
FEATURES: tuple[str, ...] = (
    "source_record", "place_record", "session_record", "model_record",
    "model_age", "model_is_new", "rate_1h", "rate_1d", "rate_7d", "share_1h_over_7d",
    "session_rows", "session_uses", "session_age", "session_use_age", "session_is_known", "session_uses_it", "session_repeats",
    "hour_sin", "hour_cos", "in_s", "ttl_s", "beside", "forecast", "has_forecast",
)  # fmt: skip

_FORMAT = "prefetcher hint classifier"
_VERSION = 1
#: Time constants of the rates: an hour, a day, a week.
_TAUS_S = (3600.0, 86_400.0, 604_800.0)
_WEEK_S = 604_800.0
#: Pseudo-hints that shrink a record to the source's.
_PRIOR = 8.0
#: A settled hint counts for half in a record after this many later ones.
_FADE = 0.5 ** (1.0 / 200.0)
#: Settled hints: before the first fit, at most between fits, and kept for them; a fit is due when there are half as many more.
_LEAST_SAMPLES = 200
_MOST_BETWEEN = 2_000
_MOST_SAMPLES = 8_000
_TREES = 100
#: The last part of them is held out, and the classifier must be better there by this much.
_HELD_OUT = 0.25
_GAIN = 0.01
#: What is remembered; past that what was seen longest ago goes.
_MOST_MODELS = 20_000
_MOST_SESSIONS = 20_000
_MOST_MODELS_A_SESSION = 32
_MOST_RECORDS = 20_000
_MOST_PENDING = 10_000
#: Hints of one session within so many seconds are beside each other.
_BESIDE_S = 10.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HintFit:
    """A LightGBM model text, and how such a fit did on held-out hints beside the sources' records (Brier scores)."""

    text: str
    samples: int
    brier: float
    brier_of_record: float

    @property
    def pays(self) -> bool:
        """Whether it is better than the record."""
        return self.brier < (1.0 - _GAIN) * self.brier_of_record


@dataclass(slots=True)
class _Model:
    last_s: float
    decayed: list[float]


@dataclass(slots=True)
class _Session:
    rows: int
    last_s: float
    last_model: str
    #: model -> [rows, last row]
    models: OrderedDict[str, list[float]]


class HintClassifier:
    """Learns online; not for two threads at once. Times are seconds since the epoch, rows and hints come in about their order.

    `fallbacks` counts hints for which the source's record stands, by reason: `too_few` settled hints, or `no_gain` over it.
    """

    def __init__(self) -> None:
        self.fit: HintFit | None = None
        self._forest: Forest | None = None
        self.fallbacks: Counter[str] = Counter()
        self._models: OrderedDict[str, _Model] = OrderedDict()
        self._all = _Model(-math.inf, [0.0] * len(_TAUS_S))
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        #: Records by (source, surface, kind), by session and by (source, model), as [kept, settled], discounted.
        self._records: OrderedDict[str, list[float]] = OrderedDict()
        #: Open hints: columns and the record's probability when they came.
        self._pending: OrderedDict[str, tuple[list[float], float]] = OrderedDict()
        self._recent: OrderedDict[str, deque[float]] = OrderedDict()
        #: Settled hints: (until_s, columns, the record's probability, kept).
        self._samples: deque[tuple[float, list[float], float, bool]] = deque(maxlen=_MOST_SAMPLES)
        self._since_fit = 0

    @property
    def stands(self) -> str:
        """`in_force`, or why sources' records stand instead: `too_few` settled hints, or `no_gain`."""
        return "in_force" if self._forest is not None else "too_few" if self.fit is None else "no_gain"

    # --- what comes ---

    def saw(self, model: str, user: str | None, ts: float) -> None:
        """A row."""
        mine = self._models.get(model)
        if mine is None:
            mine = self._models[model] = _Model(ts, [0.0] * len(_TAUS_S))
            if len(self._models) > _MOST_MODELS:
                self._models.popitem(last=False)
        self._models.move_to_end(model)
        for each in (mine, self._all):
            age_s = max(ts - each.last_s, 0.0)
            each.decayed = [c * math.exp(-age_s / tau_s) + 1.0 for c, tau_s in zip(each.decayed, _TAUS_S, strict=True)]
            each.last_s = max(each.last_s, ts)
        if user is None:
            return
        session = self._sessions.get(user)
        if session is None:
            session = self._sessions[user] = _Session(0, ts, model, OrderedDict())
            if len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(user)
        session.rows, session.last_s, session.last_model = session.rows + 1, ts, model
        uses = session.models.setdefault(model, [0.0, ts])
        uses[0], uses[1] = uses[0] + 1.0, ts
        session.models.move_to_end(model)
        if len(session.models) > _MOST_MODELS_A_SESSION:
            session.models.popitem(last=False)

    def chance(self, hint: Hint, belief: float, forecast_per_s: float = math.nan) -> float | None:
        """The probability that `hint` is kept, where the classifier knows better than `belief`, its source's record; else None.

        `forecast_per_s` is the forecast rate of the model's next use without this hint, NaN where there is none.
        """
        x = self._columns(hint, belief, forecast_per_s)
        self._pending[hint.hint_id] = (x, belief)
        if len(self._pending) > _MOST_PENDING:
            self._pending.popitem(last=False)
        if self._forest is None:
            self.fallbacks[self.stands] += 1
            return None
        return float(self._forest.predict(np.array([x], np.float32))[0])

    def settled(self, hint: Hint, kept: bool, at_s: float) -> None:
        """An open hint was kept or is over at `at_s`; now and then fits again."""
        for key in _keys(hint):
            record = self._records.setdefault(key, [0.0, 0.0])
            self._records.move_to_end(key)
            record[0], record[1] = record[0] * _FADE + kept, record[1] * _FADE + 1.0
        while len(self._records) > _MOST_RECORDS:
            self._records.popitem(last=False)
        found = self._pending.pop(hint.hint_id, None)
        if found is None:
            return
        self._samples.append((hint.until_s, *found, kept))
        self._since_fit += 1
        fitted = 0 if self.fit is None else self.fit.samples
        if self._since_fit >= max(min(fitted // 2, _MOST_BETWEEN), _LEAST_SAMPLES):
            self.refit(at_s)

    # --- columns ---

    def _columns(self, hint: Hint, belief: float, forecast_per_s: float) -> list[float]:
        now_s = hint.given_s
        who = _who(hint)
        place, session_key, model_key = _keys(hint)
        model = self._models.get(hint.model)
        rates = self._rates(model, now_s)
        overall = self._rates(self._all, now_s)
        session = None if who is None else self._sessions.get(who)
        uses = None if session is None else session.models.get(hint.model)
        hour = 2.0 * math.pi * (now_s % 86_400.0) / 86_400.0
        has_forecast = not math.isnan(forecast_per_s)
        columns = [
            _odds(belief),
            self._record(place, belief),
            self._record(session_key, belief) if who is not None else _odds(belief),
            self._record(model_key, belief),
            _age(None if model is None else now_s - model.last_s),
            float(model is None),
            *(math.log(rate + 1e-7) for rate in rates),
            math.log((rates[0] + 1e-7) / (overall[0] + 1e-5)) - math.log((rates[2] + 1e-7) / (overall[2] + 1e-5)),
            math.log1p(0 if session is None else session.rows),
            math.log1p(0.0 if uses is None else uses[0]),
            _age(None if session is None else now_s - session.last_s),
            _age(None if uses is None else now_s - uses[1]),
            float(session is not None),
            float(uses is not None),
            float(session is not None and session.last_model == hint.model),
            math.sin(hour),
            math.cos(hour),
            math.log1p(max(hint.at_s - now_s, 0.0)),
            math.log1p(max(hint.until_s - hint.at_s, 0.0)),
            math.log1p(self._beside(hint, who)),
            math.log(max(forecast_per_s, 0.0) + 1e-7) if has_forecast else math.log(1e-4),
            float(has_forecast),
        ]
        return [round(value, 4) for value in columns]

    def _rates(self, of: _Model | None, now_s: float) -> list[float]:
        if of is None:
            return [0.0] * len(_TAUS_S)
        age_s = max(now_s - of.last_s, 0.0)
        return [c * math.exp(-age_s / tau_s) / tau_s for c, tau_s in zip(of.decayed, _TAUS_S, strict=True)]

    def _record(self, key: str, belief: float) -> float:
        kept, settled = self._records.get(key, (0.0, 0.0))
        return _odds((kept + _PRIOR * belief) / (settled + _PRIOR))

    def _beside(self, hint: Hint, who: str | None) -> int:
        """How many hints the same session gave a moment ago."""
        key = f"{hint.source}\0{who}"
        recent = self._recent.setdefault(key, deque(maxlen=64))
        self._recent.move_to_end(key)
        if len(self._recent) > _MOST_SESSIONS:
            self._recent.popitem(last=False)
        beside = sum(hint.given_s - given_s <= _BESIDE_S for given_s in recent)
        recent.append(hint.given_s)
        return beside

    # --- fits ---

    def refit(self, now_s: float) -> bool:
        """Fits on the settled hints whose time is up, so that broken ones are not missing; whether there were enough."""
        self._since_fit = 0
        samples = [s for s in self._samples if s[0] <= now_s]
        kept = np.array([s[3] for s in samples], np.bool_)
        cut = int(len(samples) * (1.0 - _HELD_OUT))
        if len(samples) < _LEAST_SAMPLES or not 0 < kept[:cut].sum() < cut:
            return False
        x, record = np.array([s[1] for s in samples], np.float32), np.array([s[2] for s in samples])
        trial = _trained(x[:cut], kept[:cut])
        brier = float(np.mean((Forest.parse(trial, len(FEATURES)).predict(x[cut:]) - kept[cut:]) ** 2))
        of_record = float(np.mean((record[cut:] - kept[cut:]) ** 2))
        fit = HintFit(trial, len(x), brier, of_record)
        self._take_over(replace(fit, text=_trained(x, kept)) if fit.pays else fit)
        return True

    def _take_over(self, fit: HintFit) -> None:
        self._forest = Forest.parse(fit.text, len(FEATURES)) if fit.pays else None
        self.fit = fit

    # --- the whole state ---

    def snapshot(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        fit = self.fit
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "features": list(FEATURES),
            "fit": None if fit is None else asdict(fit),
            "all": [self._all.last_s if self._models else None, self._all.decayed],
            "models": [[name, m.last_s, m.decayed] for name, m in self._models.items()],
            "sessions": [[u, s.rows, s.last_s, s.last_model, [[m, *v] for m, v in s.models.items()]] for u, s in self._sessions.items()],
            "records": [[key, *record] for key, record in self._records.items()],
            "pending": [[hint_id, *found] for hint_id, found in self._pending.items()],
            "recent": [[key, list(times)] for key, times in self._recent.items()],
            "samples": [list(sample) for sample in self._samples],
            "since_fit": self._since_fit,
            "fallbacks": dict(self.fallbacks),
        }

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any]) -> HintClassifier:
        """The classifier that `snapshot` was taken of. Raises `PredictorError` for one that it does not understand."""
        try:
            if (snapshot["format"], snapshot["version"], snapshot["features"]) != (_FORMAT, _VERSION, list(FEATURES)):
                raise PredictorError("a snapshot of another hint classifier; it learns anew", predictor="hints")
            made = cls()
            if snapshot["fit"] is not None:
                made._take_over(HintFit(**snapshot["fit"]))
            last_s, decayed = snapshot["all"]
            made._all = _Model(-math.inf if last_s is None else float(last_s), list(decayed))
            for name, last_s, decayed in snapshot["models"]:
                made._models[name] = _Model(float(last_s), list(decayed))
            for user, rows, last_s, last_model, models in snapshot["sessions"]:
                made._sessions[user] = _Session(rows, last_s, last_model, OrderedDict((m, list(v)) for m, *v in models))
            made._records.update((key, [kept, settled]) for key, kept, settled in snapshot["records"])
            made._pending.update((hint_id, (list(x), belief)) for hint_id, x, belief in snapshot["pending"])
            made._recent.update((key, deque(times, maxlen=64)) for key, times in snapshot["recent"])
            made._samples.extend((until_s, list(x), belief, bool(kept)) for until_s, x, belief, kept in snapshot["samples"])
            made._since_fit = int(snapshot["since_fit"])
            made.fallbacks.update(snapshot["fallbacks"])
        except (KeyError, TypeError, ValueError) as exc:
            raise PredictorError(f"a hint classifier's snapshot that lacks a part ({exc}); it learns anew", predictor="hints") from exc
        return made


def _who(hint: Hint) -> str | None:
    return hint.user or hint.session


def _keys(hint: Hint) -> tuple[str, str, str]:
    return (
        f"p\0{hint.source}\0{hint.surface}\0{hint.kind}",
        f"s\0{hint.source}\0{_who(hint) or ''}",
        f"m\0{hint.source}\0{hint.model}",
    )


def _odds(p: float) -> float:
    p = min(max(p, 1e-3), 1.0 - 1e-3)
    return math.log(p / (1.0 - p))


def _age(age_s: float | None) -> float:
    return math.log1p(_WEEK_S if age_s is None else min(max(age_s, 0.0), _WEEK_S))


def _trained(x: npt.NDArray[np.float32], kept: npt.NDArray[np.bool_]) -> str:
    import lightgbm

    words: dict[str, Any] = {
        "objective": "binary", "max_depth": DEPTH, "num_leaves": 2**DEPTH, "learning_rate": 0.06, "min_data_in_leaf": 20, "lambda_l2": 5.0,
        "feature_fraction": 0.6, "max_bin": 63, "seed": 1, "deterministic": True, "force_row_wise": True, "num_threads": 1, "verbose": -1,
    }  # fmt: skip
    return str(lightgbm.train(words, lightgbm.Dataset(x, kept.astype(np.float64)), num_boost_round=_TREES).model_to_string())

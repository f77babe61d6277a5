"""Co-activation: what active users will use next, by a small sequence model where that beats the transition table, else by the table.

The table (`transitions`) is always counted and gives the columns until the network has shown, on samples that came after its fit, that it
forecasts better; it is asked again after every fit, and loses its place the same way. Which of the two is in force, both scores and every
fallback are in `choice`. Where a log has no users there is nothing to learn: no sample is kept and torch is never imported. What arrivals
say of each other stays with the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.core.traffic import Block, Traffic
from prefetcher.errors import PredictorError
from prefetcher_models.calibration import calibration_line
from prefetcher_models.coactivation_net import WEIGHTS, NetSettings, Samples, fit_net, net_scorer
from prefetcher_models.feature_source import Floats32
from prefetcher_models.follow_scorer import LOOKS, VISITS, Scorer, score_samples, table_scorer
from prefetcher_models.follow_state import COLUMNS, OWN, TICK_SAMPLES, TURNS
from prefetcher_models.samples import EPOCH_S
from prefetcher_models.transitions import Seen, Transitions

__all__ = ["Coactivation", "CoactivationSettings", "Learned"]

#: Horizons of the chances, in seconds.
WITHIN_S = (120.0, 600.0)
#: How a comparison fades with every later one, and what the network must win by.
_FADE, _MARGIN = 0.7, 0.99
#: Fewest uses among compared samples (faded) before the network may be in force.
_FEWEST_USES = 30.0
#: Forecasts with outcomes that calibration looks back on, and the fewest that it needs.
_MOST_EVIDENCE, _FEWEST_EVIDENCE = 20_000, 1_000
_TABLE, _NET = 0, 1
_VERSION = 1


@dataclass(frozen=True, slots=True)
class CoactivationSettings:
    """Fits begin at `first_fit_s` of history and come again when it grew by `growth`, at least once a day; one needs `fewest` samples.

    `most`: the most instants (a user at a tick) that are kept, each with up to 40 candidates. `learn` false leaves it at the table.
    """

    seed: int = 0
    first_fit_s: float = 10_800.0
    growth: float = 0.5
    fewest: int = 2_000
    most: int = 8_000
    learn: bool = True
    net: NetSettings = field(default_factory=NetSettings)


@dataclass(frozen=True, slots=True)
class Learned:
    """A network (`coactivation_net.WEIGHTS`), its and the table's calibration lines, how both did (faded sums), and what trained it."""

    weights: Mapping[str, npt.NDArray[np.float32]]
    lines: npt.NDArray[np.float64]
    compared: npt.NDArray[np.float64]
    from_s: float
    until_s: float
    samples: int


class Coactivation:
    """A `FeatureSource`. Not for two threads at once."""

    def __init__(self, settings: CoactivationSettings | None = None) -> None:
        self.settings = settings or CoactivationSettings()
        self._table = Transitions()
        self._scorer = table_scorer()
        self._lines = np.tile(np.array([1.0, 0.0]), (2, 2, 1))
        self._weights: dict[str, npt.NDArray[np.float32]] = {}
        self._kept = _nothing()
        self._new: list[dict[str, npt.NDArray[Any]]] = []
        self._uses: list[tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        #: sums of log loss by scorer, samples and uses that were compared, faded
        self._compared = np.zeros(4)
        #: log-odds by scorer and horizon, and whether the model was used: float64[k, 6]
        self._evidence = np.zeros((0, 6))
        self._times = np.array([np.inf, np.inf, -np.inf])  # origin, next fit, last fit
        self._counts = {"fits": 0, "folds": 0, "fit_samples": 0}
        self._fallbacks = {"torch is not installed": 0, "fit failed": 0, "loses to the table": 0, "not compared yet": 0}

    @property
    def name(self) -> str:
        return "coactivation"

    @property
    def names(self) -> tuple[str, ...]:
        return COLUMNS

    @property
    def fits(self) -> int:
        """How many times the network was fitted."""
        return self._counts["fits"]

    @property
    def next_fit_s(self) -> float:
        """When the next fit is due; inf before the first row."""
        return float(self._times[1])

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """How often, at a time to fit, the table was left or put in force, by reason."""
        return self._fallbacks

    @property
    def choice(self) -> dict[str, Any]:
        """Which scorer is in force, and how both did on samples after their fits: mean log loss, samples, uses; recent ones count more."""
        table, net, samples, uses = (float(v) for v in self._compared)
        scores = {"table": table / samples, "sequence": net / samples} if samples else {}
        return {
            "in_force": "sequence" if self._in_force else "table",
            "log_loss": scores,
            "samples": samples,
            "uses": uses,
            "fits": self.fits,
            "fit_until_s": float(self._times[2]) if self.fits else None,
            "fallbacks": {reason: n for reason, n in self._fallbacks.items() if n},
        }

    @property
    def learned(self) -> Learned:
        """The network as it was fitted last; no weights before."""
        return Learned(
            self._weights, self._lines, self._compared, float(self._times[0]), float(self._times[2]), self._counts["fit_samples"]
        )

    def take_over(self, learned: Learned, in_force: bool) -> None:
        """Go on with a network that was fitted elsewhere. Raises `ValueError` for arrays of shapes that don't fit together."""
        weights = {name: np.array(learned.weights[name], dtype=np.float32) for name in WEIGHTS}
        width, hidden = weights["place"].shape[1], len(weights["first"])
        shapes = {
            "value": (len(weights["value"]), width),
            "key": (len(weights["value"]), width),
            "place": (VISITS, width),
            "heed": (VISITS, 2),
            "first": (hidden, len(LOOKS) + 1),
            "first_0": (hidden,),
            "second": (2, hidden),
            "second_0": (2,),
            "mean": (len(LOOKS),),
            "scale": (len(LOOKS),),
        }
        if any(weights[name].shape != shape or not np.isfinite(weights[name]).all() for name, shape in shapes.items()):
            raise ValueError("arrays of other shapes, or with numbers that are none")
        if learned.lines.shape != (2, 2, 2) or learned.compared.shape != (4,):
            raise ValueError("calibration or scores of another shape")
        self._weights, self._lines, self._compared = weights, learned.lines.copy(), learned.compared.copy()
        self._put_in_force(in_force)

    @property
    def _in_force(self) -> bool:
        return bool(self._scorer.in_force[0])

    def columns(self, traffic: Traffic, block: Block) -> tuple[Floats32, Floats32]:
        """See `FeatureSource.columns`."""
        if np.isinf(self._times[0]) and np.isfinite(traffic.origin_s):
            self._times[0] = traffic.origin_s
            self._times[1] = np.ceil((traffic.origin_s + self.settings.first_fit_s) / EPOCH_S) * EPOCH_S
        named = block.user >= 0
        room = TICK_SAMPLES * len(block.ticks) if self.settings.learn and (self._table.user_rows or named.any()) else 0
        seen = Seen(room, room * (OWN + TURNS))
        rows, ticks, instants, samples = self._table.take(traffic, block, self._scorer, seen)
        if samples:
            self._new.append(_trimmed(seen, instants, samples))
        if self.settings.learn and named.any():
            self._uses.append((block.ts[named], block.user[named], block.model[named]))
        return rows, ticks

    def refit(self, now_s: float) -> bool:
        """Compare, choose and fit again if that is due; whether another scorer or other weights are in force."""
        if now_s < self._times[1]:
            return False
        age_s = now_s - self._times[0]
        step_s = min(max(self.settings.first_fit_s, self.settings.growth * age_s), 86400.0)
        self._times[1] = np.ceil((now_s + step_s) / EPOCH_S) * EPOCH_S
        if not self.settings.learn or not (self._new or len(self._kept["at_s"])):
            return False
        self._merge(now_s)
        kept = self._kept
        at_s = kept["at_s"][kept["pairs"][:, 0]]
        known = at_s + WITHIN_S[1] <= now_s
        used = np.stack([kept["next_s"] <= at_s + within for within in WITHIN_S], axis=1)
        before = self._in_force
        self._compare(kept, known & (at_s >= self._times[2]), used)
        fitted = self._fit(kept, known, used, now_s)
        self._choose()
        return self._in_force != before or (fitted and self._in_force)

    def snapshot(self) -> dict[str, np.ndarray]:
        kept = _joined([self._kept, *self._new])
        ts, user, model = self._buffered()
        return {
            "version": np.array(_VERSION),
            "times": self._times.copy(),
            "counts": np.array([*self._counts.values(), *self._fallbacks.values(), int(self._in_force)], dtype=np.int64),
            "compared": self._compared.copy(),
            "lines": self._lines.copy(),
            "evidence": self._evidence.copy(),
            "uses_ts": ts,
            "uses_user": user,
            "uses_model": model,
            **{f"kept_{name}": array for name, array in kept.items()},
            **{f"net_{name}": array.copy() for name, array in self._weights.items()},
            **{f"table_{name}": array for name, array in self._table.snapshot().items()},
        }

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        try:
            if int(snapshot["version"]) != _VERSION:
                raise PredictorError(f"a snapshot of version {snapshot['version']}, expected {_VERSION}; learn anew", predictor=self.name)
            self._table.restore({name[6:]: array for name, array in snapshot.items() if name.startswith("table_")})
            kept = {name: np.array(snapshot[f"kept_{name}"]) for name in _nothing()}
            weights = {name[4:]: np.array(array) for name, array in snapshot.items() if name.startswith("net_")}
            numbers = [int(v) for v in snapshot["counts"]]
            uses = (np.array(snapshot["uses_ts"]), np.array(snapshot["uses_user"]), np.array(snapshot["uses_model"]))
            times, compared, evidence = (np.array(snapshot[name]) for name in ("times", "compared", "evidence"))
            lines = np.array(snapshot["lines"])
            if (
                len(numbers) != len(self._counts) + len(self._fallbacks) + 1
                or lines.shape != (2, 2, 2)
                or (weights and set(weights) != set(WEIGHTS))
            ):
                raise ValueError("parts of another shape")
        except (KeyError, ValueError) as error:
            raise PredictorError(f"a snapshot that co-activation does not understand: {error}; learn anew", predictor=self.name) from error
        self._kept, self._new, self._weights, self._uses = kept, [], weights, [uses]
        self._times, self._compared, self._evidence, self._lines = times, compared, evidence, lines
        self._counts = dict(zip(self._counts, numbers[: len(self._counts)], strict=True))
        self._fallbacks = dict(zip(self._fallbacks, numbers[len(self._counts) : -1], strict=True))
        self._put_in_force(bool(numbers[-1]))

    def _put_in_force(self, net: bool) -> None:
        self._scorer = net_scorer(self._weights, self._lines) if net else table_scorer()._replace(lines=self._lines)

    def _buffered(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if not self._uses:
            return np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)
        ts, user, model = (np.concatenate(part) for part in zip(*self._uses, strict=True))
        return ts, user, model

    def _merge(self, now_s: float) -> None:
        """New samples join those that are kept, with the uses that are known; beyond `most` the old are forgotten at random."""
        kept = _joined([self._kept, *self._new])
        self._new = []
        ts, user, model = self._buffered()
        open_ = np.flatnonzero(np.isinf(kept["next_s"]))
        instant = kept["pairs"][open_, 0]
        kept["next_s"][open_] = _next_uses(ts, user, model, kept["at_s"][instant], kept["user"][instant], kept["pairs"][open_, 1])
        recent = ts > now_s - WITHIN_S[1]
        self._uses = [(ts[recent], user[recent], model[recent])]
        n = len(kept["at_s"])
        if n > 1.5 * self.settings.most:
            rng = np.random.default_rng([self.settings.seed, self._counts["folds"]])
            self._counts["folds"] += 1
            rank = rng.random(n) ** (1.0 / np.linspace(0.3, 1.0, n))
            stays = np.zeros(n, bool)
            stays[np.argsort(-rank, kind="stable")[: self.settings.most]] = True
            stays |= kept["at_s"] > now_s - WITHIN_S[1]
            kept = _at(kept, stays)
        self._kept = kept

    def _odds(self, scorer: Scorer, kept: Mapping[str, npt.NDArray[Any]], which: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """float64[len(which), 2]: log-odds before calibration."""
        raw = scorer._replace(lines=np.tile(np.array([1.0, 0.0]), (2, 2, 1)))
        p = np.empty((len(which), 2))
        looks = np.ascontiguousarray(kept["looks"][which], dtype=np.float32)
        score_samples(raw, kept["visits"], kept["ages_s"], np.ascontiguousarray(kept["pairs"][which]), looks, p)
        p = np.clip(p, 1e-7, 1.0 - 1e-7)
        return np.log(p / (1.0 - p))

    def _compare(self, kept: Mapping[str, npt.NDArray[Any]], fresh: npt.NDArray[np.bool_], used: npt.NDArray[np.bool_]) -> None:
        """How the table and the network of the last fit did on samples after it, of models other than the user's current one."""
        which = np.flatnonzero(fresh & (kept["looks"][:, LOOKS.index("is_current")] == 0.0))
        if not self._weights or not len(which):
            return
        odds = [self._odds(scorer, kept, which) for scorer in (table_scorer(), net_scorer(self._weights, self._lines))]
        y = used[which]
        losses = [
            sum(float(_log_loss(self._lines[s, h, 0] * odds[s][:, h] + self._lines[s, h, 1], y[:, h]).sum()) for h in (0, 1))
            for s in (0, 1)
        ]
        self._compared = _FADE * self._compared + np.array([*losses, float(len(which)), float(y[:, 0].sum())])
        self._evidence = np.concatenate([self._evidence, np.concatenate([*odds, y.astype(np.float64)], axis=1)])[-_MOST_EVIDENCE:]
        if len(self._evidence) >= _FEWEST_EVIDENCE:
            for s in (_TABLE, _NET):
                for h in (0, 1):
                    self._lines[s, h] = calibration_line(self._evidence[:, 2 * s + h], self._evidence[:, 4 + h])

    def _fit(self, kept: Mapping[str, npt.NDArray[Any]], known: npt.NDArray[np.bool_], used: npt.NDArray[np.bool_], now_s: float) -> bool:
        which = np.flatnonzero(known & (kept["looks"][:, LOOKS.index("is_current")] == 0.0))
        if len(which) < self.settings.fewest or not used[which].any():
            return False
        samples = Samples(
            kept["visits"],
            kept["ages_s"],
            kept["pairs"][which],
            kept["looks"][which],
            self._odds(table_scorer(), kept, which),
            used[which].astype(np.float32),
        )
        seed = self.settings.seed * 10_007 + self.fits
        try:
            self._weights = fit_net(samples, self._table.n_models, self._weights, seed, self.settings.net)
        except ImportError:
            self._fallbacks["torch is not installed"] += 1
            return False
        if not all(np.isfinite(array).all() for array in self._weights.values()):
            self._weights = {}
            self._fallbacks["fit failed"] += 1
            return False
        self._times[2] = now_s
        self._counts["fits"] += 1
        self._counts["fit_samples"] = len(which)
        return True

    def _choose(self) -> None:
        table, net, _, uses = self._compared
        wins = bool(self._weights) and bool(uses >= _FEWEST_USES and net < _MARGIN * table)
        if self._weights and not wins:
            self._fallbacks["not compared yet" if uses < _FEWEST_USES else "loses to the table"] += 1
        self._put_in_force(wins)


def _log_loss(odds: npt.NDArray[np.float64], used: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    return np.logaddexp(0.0, np.where(used, -odds, odds))


def _nothing() -> dict[str, npt.NDArray[Any]]:
    return {
        "at_s": np.zeros(0),
        "user": np.zeros(0, np.int64),
        "visits": np.zeros((0, VISITS), np.int32),
        "ages_s": np.zeros((0, VISITS), np.float32),
        "pairs": np.zeros((0, 2), np.int64),
        "looks": np.zeros((0, len(LOOKS)), np.float16),
        "next_s": np.zeros(0),
    }


def _trimmed(seen: Seen, instants: int, samples: int) -> dict[str, npt.NDArray[Any]]:
    return {
        "at_s": seen.at_s[:instants].copy(),
        "user": seen.user[:instants].copy(),
        "visits": seen.visits[:instants].copy(),
        "ages_s": seen.ages_s[:instants].copy(),
        "pairs": seen.pairs[:samples].copy(),
        "looks": seen.looks[:samples].astype(np.float16),
        "next_s": np.full(samples, np.inf),
    }


def _joined(parts: list[dict[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    out = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    offset, begin = 0, 0
    for part in parts:
        end = begin + len(part["pairs"])
        out["pairs"][begin:end, 0] += offset
        offset, begin = offset + len(part["at_s"]), end
    return out


def _at(kept: Mapping[str, npt.NDArray[Any]], stays: npt.NDArray[np.bool_]) -> dict[str, npt.NDArray[Any]]:
    """The instants at `stays`, with their samples."""
    rows = stays[kept["pairs"][:, 0]]
    out = {name: kept[name][rows if name in ("pairs", "looks", "next_s") else stays] for name in kept}
    number = np.cumsum(stays) - 1
    out["pairs"][:, 0] = number[out["pairs"][:, 0]]
    return out


def _next_uses(
    ts: npt.NDArray[np.float64],
    user: npt.NDArray[np.int64],
    model: npt.NDArray[np.int64],
    at_s: npt.NDArray[np.float64],
    of_user: npt.NDArray[np.int64],
    of_model: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """float64[q]: when user `of_user` uses `of_model` for the first time after `at_s`, by the uses (ts, user, model); inf if never."""
    times, users, models = np.concatenate([ts, at_s]), np.concatenate([user, of_user]), np.concatenate([model, of_model])
    asked = np.arange(len(times)) >= len(ts)
    # a question stands after what was used at its very time
    order = np.lexsort((asked, times, models, users))
    new = np.ones(len(order), bool)
    u, m = users[order], models[order]
    new[1:] = (u[1:] != u[:-1]) | (m[1:] != m[:-1])
    group = np.cumsum(new)
    following = np.full(len(order), len(order))
    uses = np.flatnonzero(~asked[order])
    places = np.searchsorted(uses, np.arange(len(order)))
    found = places < len(uses)
    following[found] = uses[places[found]]
    out = np.full(len(order), np.inf)
    good = following < len(order)
    good[good] = group[following[good]] == group[good]
    out[order[good]] = times[order[following[good]]]
    return out[len(ts) :]

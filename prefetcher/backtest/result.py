"""What a backtest found, as one JSON document: scores by predictor, horizon and segment, each beside the baselines', with their spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.backtest.contenders import Contender
from prefetcher.backtest.outcomes import Outcomes
from prefetcher.backtest.plan import Plan
from prefetcher.backtest.scores import Interval, Scores, reliability, score_of, spread
from prefetcher.backtest.segments import SEGMENTS
from prefetcher.core.types import HORIZONS_S
from prefetcher_models.registry import BASELINES

__all__ = ["FORMAT", "result_of"]

FORMAT = "prefetcher backtest 1"
#: Figures that are compared over origins.
_SPREAD = ("ap", "brier", "ece", "recall")

Bools = npt.NDArray[np.bool_]


def result_of(
    described: Mapping[str, Any], plan: Plan, outcomes: Sequence[Outcomes], contenders: Sequence[Contender], waste: float
) -> dict[str, Any]:
    """The document. `described` says what was read and asked.

    Of each predictor only forecasts that it made are scored, and a baseline beside it on the same ones; one that made none has no scores.
    """
    names = [contender.name for contender in contenders]
    scores: list[dict[str, Any]] = []
    curves: dict[str, dict[str, list[list[float | None]]]] = {name: {} for name in names}
    for h, of in enumerate(outcomes):
        if not len(of.used):
            continue
        made = {name: np.isfinite(of.p[name]) for name in names}
        for name in names:
            ok = made[name]
            if not ok.any():
                continue
            entry = _entry(of, name, ok, plan, waste)
            beside = {}
            for baseline in BASELINES:
                if baseline != name and baseline in made and (both := ok & made[baseline]).any():
                    beside[baseline] = _over(of, name, baseline, both, len(plan.origins), waste)
            scores.append({"predictor": name, "horizon_s": HORIZONS_S[h], "segment": "all", **entry, "over": beside})
            for number, (segment, _) in enumerate(SEGMENTS):
                part = ok & (of.segment == number)
                if part.any():
                    scores.append(
                        {
                            "predictor": name,
                            "horizon_s": HORIZONS_S[h],
                            "segment": segment,
                            **_plain(score_of(of.p[name][part], of.used[part], waste)),
                        }
                    )
            curves[name][f"{HORIZONS_S[h]:g}"] = [[_short(p), _short(was), n] for p, was, n in reliability(of.p[name][ok], of.used[ok])]
    return {
        "format": FORMAT,
        "input": dict(described),
        "horizons_s": [HORIZONS_S[h] for h, of in enumerate(outcomes) if len(of.used)],
        "drawn_ratio": {f"{HORIZONS_S[h]:g}": _short(ratio) for h, ratio in enumerate(plan.drawn_ratio) if ratio},
        "segments": dict(SEGMENTS),
        "baselines": [name for name in BASELINES if name in names],
        "predictors": [_told(contender, curves[contender.name]) for contender in contenders],
        "scores": scores,
        "reliability": curves,
    }


def _told(contender: Contender, scored: Mapping[str, Any]) -> dict[str, Any]:
    failed = sum(n for reason, n in contender.failures.items() if not reason.startswith("fit"))
    return {
        "name": contender.name,
        "kind": contender.entry.kind,
        "what": contender.entry.what,
        "asked": contender.asked,
        "failed": failed,
        "failures": dict(contender.failures),
        "fallbacks": contender.fallbacks,
        "scored": bool(scored),
    }


def _entry(of: Outcomes, name: str, ok: Bools, plan: Plan, waste: float) -> dict[str, Any]:
    p, used = of.p[name][ok], of.used[ok]
    whole = score_of(p, used, waste)
    by_origin = [
        score_of(of.p[name][part], of.used[part], waste) for k in range(len(plan.origins)) if (part := ok & (of.origin == k)).any()
    ]
    spreads = {key: _interval(spread([getattr(one, key) for one in by_origin])) for key in _SPREAD}
    base = whole.starts / whole.pairs
    skill = None if whole.brier is None or not 0.0 < base < 1.0 else _short(1.0 - whole.brier / (base * (1.0 - base)))
    return {
        **_plain(whole),
        "left_out": int((~ok).sum()),
        "brier_skill": skill,
        "spread": spreads,
        "origins": [_plain(one) for one in by_origin],
    }


def _over(of: Outcomes, name: str, baseline: str, both: Bools, origins: int, waste: float) -> dict[str, Any]:
    """How many times the baseline's average precision, on the same forecasts; and by how much its Brier score is less."""

    def pair(part: Bools) -> tuple[Scores, Scores]:
        return score_of(of.p[name][part], of.used[part], waste), score_of(of.p[baseline][part], of.used[part], waste)

    mine, theirs = pair(both)
    ratios: list[float | None] = []
    for k in range(origins):
        part = both & (of.origin == k)
        if part.any():
            own, other = pair(part)
            ratios.append(None if own.ap is None or not other.ap else own.ap / other.ap)
    ratio = None if mine.ap is None or not theirs.ap else _short(mine.ap / theirs.ap)
    return {"ap_ratio": ratio, "ap_ratio_spread": _interval(spread(ratios, ratio=True)), "brier": theirs.brier, "ap": theirs.ap}


def _plain(scores: Scores) -> dict[str, Any]:
    return {key: _short(value) if isinstance(value, float) else value for key, value in asdict(scores).items()}


def _interval(found: Interval | None) -> dict[str, float | int | None] | None:
    if found is None:
        return None
    return {"mean": _short(found.mean), "low": _short(found.low), "high": _short(found.high), "n": found.n}


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None

"""`bench starts`: average precision on starts, models that are idle now and needed next, on held-out time of real logs.

For each window of ten minutes from a log's first row on and each of the catalog's models without a row in it: the score is
what was known at the window's end, the label whether the model has a row in the next window; all pooled. The hazard of ten
minutes runs as in production (ticks a minute, fits as they come) up to the end of the first 60 % of the windows, is fitted
there for the last time, and scores the other 40 % with these trees; features go on with the rows. Beside it, the same with
fits going on as in production, each strictly from the past; what was active in the last 24 hours; and seasonal-naive. A model
that was never used has no chance with any of them.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.bench.machine import describe_machine
from prefetcher.compiling import compile_aloud
from prefetcher.core.types import HORIZONS_S
from prefetcher.errors import InputError, UsageError
from prefetcher.replay.engine import TICK_S
from prefetcher.replay.trace import Trace, read_trace
from prefetcher_models.feature_source import FeatureSource
from prefetcher_models.hazard import Hazard
from prefetcher_models.seasonal_naive import SeasonalNaive
from prefetcher_models.stream import HazardStream

__all__ = ["REFERENCES", "average_precision", "run", "starts"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WINDOW_S = 600.0
#: Share of the windows that the trees are fitted on.
FIT_RATIO = 0.6
#: Windows that count as lately: 24 hours.
_DAY_WINDOWS = 144
_TEN_MINUTES = HORIZONS_S.index(WINDOW_S)

#: Average precision of a gradient-boosted model on 16 plain features, by the same definition.
REFERENCES: dict[str, float] = {
    "genai_sd": 0.24,
    "servegen_m_mid": 0.32,
    "servegen_m_small": 0.38,
    "azure_functions_day": 0.45,
    "bike_stations": 0.22,
}
_QUICK = ("genai_sd",)


@dataclass(slots=True)
class Scored:
    """Starts that were scored: one entry for each pair of window and idle model."""

    label: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    scores: dict[str, list[Floats]] = field(default_factory=dict)

    def add(self, label: npt.NDArray[np.bool_], scores: dict[str, Floats]) -> None:
        self.label.append(label)
        for name, score in scores.items():
            self.scores.setdefault(name, []).append(score)

    def precisions(self) -> dict[str, float]:
        label = np.concatenate(self.label)
        return {name: average_precision(label, np.concatenate(score)) for name, score in self.scores.items()}


def average_precision(label: npt.NDArray[np.bool_], score: Floats) -> float:
    """Σ (recall gained at a threshold) · (precision there), over the thresholds that occur; NaN without a positive."""
    order = np.argsort(-score, kind="stable")
    found = np.cumsum(label[order])
    last = np.append(np.diff(score[order]) != 0.0, True) if len(score) else np.zeros(0, bool)
    hits, asked = found[last], np.flatnonzero(last) + 1.0
    if not len(hits) or hits[-1] == 0:
        return math.nan
    return float(np.sum(np.diff(hits, prepend=0) * hits / asked) / hits[-1])


def run(
    json_out: Path,
    *,
    traces: Path | None = None,
    trace: str | None = None,
    quick: bool = False,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Scores `trace` (comma-separated; the five of `REFERENCES` if None, one of them if `quick`) and writes `json_out`.

    Figures: `ap_NAME` of each log, and `ap_over_reference`, the geometric mean of ap_NAME / reference. Peers: the same ratio of
    what was active in the last 24 hours, of seasonal-naive, and of ours with fits going on.
    """
    if traces is None:
        raise UsageError("bench starts needs --traces DIR")
    names = [n for n in trace.split(",") if n] if trace else list(_QUICK if quick else REFERENCES)
    unknown = [n for n in names if n not in REFERENCES]
    if unknown:
        raise UsageError(f"bench starts has no reference for {unknown[0]}; there are {', '.join(REFERENCES)}")
    tell = say or (lambda text: print(text, flush=True))
    compile_aloud()
    logs: dict[str, dict[str, Any]] = {}
    for name in names:
        logs[name] = starts(read_trace(Path(traces) / f"{name}.parquet", catalog=Path(traces) / f"{name}.catalog.json"), tell)
        logs[name]["reference"] = REFERENCES[name]
        tell(_line(name, logs[name]))
    over = {
        key: math.exp(sum(math.log(max(log[key], 1e-9) / log["reference"]) for log in logs.values()) / len(logs))
        for key in ("ap", "ap_refitted", "ap_active_24h", "ap_seasonal_naive")
    }
    figures = {**{f"ap_{name}": log["ap"] for name, log in logs.items()}, "ap_over_reference": over["ap"]}
    peers = {"active_24h": over["ap_active_24h"], "seasonal_naive": over["ap_seasonal_naive"], "refitted": over["ap_refitted"]}
    result = {"figures": figures, "peers": peers, "logs": logs, "machine": describe_machine()}
    Path(json_out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def starts(
    trace: Trace,
    tell: Callable[[str], None] = lambda text: None,
    upto_ratio: float = 1.0,
    sources: Sequence[FeatureSource] = (),
) -> dict[str, Any]:
    """Average precision on starts of one log: `ap`, `ap_refitted`, `ap_active_24h`, `ap_seasonal_naive`; how many were scored.

    `upto_ratio` takes only the first part of the windows, to choose settings without the rest; `sources` add their columns, and
    must be new. Raises `InputError` for a log of under ten windows.
    """
    windows = int(((trace.t1 - trace.t0) // WINDOW_S + 1) * upto_ratio)
    if windows < 10:
        raise InputError(f"has {windows} windows of ten minutes, too few to score", path=trace.path)
    cut = int(FIT_RATIO * (windows - 1))
    stream = HazardStream(len(trace.models), trace.t0, tick_s=TICK_S, horizons=(_TEN_MINUTES,), sources=sources)
    frozen: HazardStream | None = None
    active = np.zeros((windows, len(trace.models)), bool)
    window_of = ((trace.ts - trace.t0) // WINDOW_S).astype(np.int64)
    inside = window_of < windows
    active[window_of[inside], trace.model[inside]] = True
    lately = np.zeros(len(trace.models))
    seasonal, scored, said = SeasonalNaive(), Scored(), 0
    # A window's end is the next one's first tick: rows of that moment come after it.
    for number, rows in enumerate(_rows_of(trace, windows)):
        previous = number - 1
        if previous == cut:
            frozen = _frozen(stream)
        known = None
        if frozen is not None:
            known = seasonal.forecast(stream.traffic, trace.t0 + number * WINDOW_S).p[:, _TEN_MINUTES]
        going = stream.advance(*rows, trace.t0 + (number + 1) * WINDOW_S)
        if frozen is not None and known is not None:
            stays = frozen.advance(*rows, trace.t0 + (number + 1) * WINDOW_S)
            idle = np.flatnonzero(~active[previous])
            scores = {"ap": stays.p_ticks[0, idle, 0], "ap_refitted": going.p_ticks[0, idle, 0], "ap_active_24h": lately[idle]}
            scores["ap_seasonal_naive"] = known[idle]
            scored.add(active[number, idle], {name: np.nan_to_num(score.astype(np.float64)) for name, score in scores.items()})
        lately += active[number]
        if number >= _DAY_WINDOWS:
            lately -= active[number - _DAY_WINDOWS]
        if number * 10 // windows > said:
            said = number * 10 // windows
            tell(f"{Path(trace.path).stem}: {10 * said} %")
    labels = np.concatenate(scored.label)
    return {**scored.precisions(), "windows": windows, "scored": len(labels), "starts": int(labels.sum())}


def _rows_of(trace: Trace, windows: int) -> Iterator[tuple[Floats, Ints, Ints | None, Ints]]:
    """Each window's rows, as `HazardStream.advance` takes them."""
    bounds = np.searchsorted(trace.ts, trace.t0 + np.arange(windows + 1) * WINDOW_S)
    for first, last in pairwise(bounds):
        model, user, count = (column[first:last].astype(np.int64) for column in (trace.model, trace.user, trace.count))
        yield trace.ts[first:last], model, user if trace.users else None, count


def _frozen(stream: HazardStream) -> HazardStream:
    """A copy of the stream, fitted now and never again."""
    frozen = copy.deepcopy(stream)
    frozen.hazard.fit_now(stream.at_s)
    settings = replace(frozen.hazard.settings, first_fit_s=math.inf)
    frozen.hazard = Hazard(settings, frozen.hazard.fit, frozen.hazard.names)
    return frozen


def _line(name: str, log: dict[str, Any]) -> str:
    return (
        f"{name}: {log['ap']:.3f} ({log['ap'] / log['reference']:.2f} of the reference {log['reference']}); with fits going on "
        f"{log['ap_refitted']:.3f}, active in 24 h {log['ap_active_24h']:.3f}, seasonal-naive {log['ap_seasonal_naive']:.3f}; "
        f"{log['starts']:,} starts of {log['scored']:,}"
    )

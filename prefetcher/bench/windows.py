"""`bench windows`: what tuned windows cost, begun from bad ones, against the best window that could have been fixed from the start, and
against none at all."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prefetcher.bench.machine import describe_machine
from prefetcher.compiling import compile_aloud
from prefetcher.core.tuner import TunerSettings
from prefetcher.core.types import Window
from prefetcher.core.value import DEFAULT_PRICE_S_PER_GB_H
from prefetcher.core.windows import window_in_words
from prefetcher.errors import InputError, UsageError
from prefetcher.replay.engine import split_by_node
from prefetcher.replay.ours import RateBlock, computed_ahead, score_blocks
from prefetcher.replay.trace import Trace, read_trace
from prefetcher.tuning.command import sampled
from prefetcher.tuning.walk import TuningWalk

__all__ = ["FIXED", "STARTS", "TUNED_AFTER_DAYS", "best_of", "read_suite", "run", "seconds_of", "walk_all"]

#: The windows that stay as they are: lead 0, 1, 5, 15, 30 min × horizon 5, 15, 60 min × hold 1, 5, 10, 30, 60 min.
FIXED: tuple[Window, ...] = tuple(
    Window(60.0 * lead, 60.0 * horizon, 60.0 * hold)
    for lead, horizon, hold in itertools.product((0, 1, 5, 15, 30), (5, 15, 60), (1, 5, 10, 30, 60))
)
#: What the tuner begins with: too early and too long, and next to never.
STARTS: dict[str, Window] = {"bad": Window(1800.0, 3600.0, 3600.0), "timid": Window(0.0, 300.0, 60.0)}
#: Days that the tuner has before it counts, and days that a trace must have.
TUNED_AFTER_DAYS = 2
_LEAST_DAYS = 5.0
#: Of a log with more rows so many models go through, by the hash of their names, with their share of the memory, as have about so many.
_MOST_ROWS = 500_000
_DAY_S = 86_400.0
_QUICK = ("genai_sd",)


def run(
    json_out: Path,
    *,
    suite: Path | None = None,
    traces: Path | None = None,
    trace: str | None = None,
    quick: bool = False,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Runs the traces of the suite that have five days, each at its first capacity, and writes `json_out`; `trace` (comma-separated) and
    `quick` run a part.

    `cost_ratio_worst`: seconds of waiting and the price of GB·h held, from the third day on, over the same of the best of 75 fixed windows,
    at the worst trace and start. `peers`: by trace, the same over what no book of windows costs. Beside them of each trace: the spread of
    the fixed windows, and GB·h wasted.
    """
    tell = say or (lambda text: print(text, flush=True))
    plan = read_suite("windows", suite, traces)
    only = set(trace.split(",")) if trace else set(_QUICK) if quick else None
    compile_aloud()
    points: list[dict[str, Any]] = []
    for name, ratio, link_bytes_per_s, read in plan:
        if only is not None and name not in only:
            continue
        loaded = read()
        if loaded.t1 - loaded.t0 < _LEAST_DAYS * _DAY_S:
            continue
        part, share = sampled(loaded, math.ceil(len(loaded.models) * min(1.0, _MOST_ROWS / len(loaded))), seed=0)
        points.append(_point(name, ratio, part, share * ratio * float(loaded.bytes_.sum()), link_bytes_per_s, len(loaded.models)))
        tell(_line(points[-1]))
    if not points:
        raise UsageError(f"no trace of the suite is called {trace!r} and has {_LEAST_DAYS:g} days")
    ratios = [start["cost_ratio"] for point in points for start in point["starts"].values()]
    figures = {
        "cost_ratio_worst": max(ratios),
        "cost_ratio_mean": float(np.mean(ratios)),
        "cost_over_untuned_worst": max(s["over_untuned"] for point in points for s in point["starts"].values()),
        "cost_ratio_default_worst": max(point["default_ratio"] for point in points),
        "cost_ratio_start_worst": max(start["start_ratio"] for point in points for start in point["starts"].values()),
    }
    peers = {point["trace"]: {word: s["over_untuned"] for word, s in point["starts"].items()} for point in points}
    result = {"figures": figures, "peers": peers, "points": points, "machine": describe_machine()}
    Path(json_out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def read_suite(bench: str, suite: Path | None, traces: Path | None) -> Iterator[tuple[str, float, float, Callable[[], Trace]]]:
    """(trace, its first capacity as a share of all bytes, link speed, how to read it) for each point of a suite. Raises UsageError and
    InputError, before anything is read."""
    if suite is None or traces is None:
        raise UsageError(f"bench {bench} needs --suite FILE and --traces DIR")
    try:
        plan = json.loads(Path(suite).read_text(encoding="utf-8"))
        wanted = [(str(p["trace"]), float(p["capacity_ratio"][0])) for p in plan["points"]]
        link_bytes_per_s = float(plan.get("link_bytes_per_s", 3.5e9))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise InputError("is no suite: expected JSON with points of {trace, capacity_ratio: […]}", path=str(suite)) from error

    def reader(name: str) -> Callable[[], Trace]:
        return lambda: read_trace(Path(traces) / f"{name}.parquet", catalog=Path(traces) / f"{name}.catalog.json")

    return ((name, ratio, link_bytes_per_s, reader(name)) for name, ratio in wanted)


def walk_all(
    trace: Trace, capacity_bytes: float, link_bytes_per_s: float, starts: Sequence[Window], blocks: Iterator[RateBlock] | None = None
) -> list[TuningWalk]:
    """The tuner over a log from each of `starts`; beside the first one the fixed windows."""
    parts = split_by_node(trace, 1, link_bytes_per_s, None)
    settings = TunerSettings()
    walks = [
        TuningWalk(parts, capacity_bytes, settings=settings, start=start, fixed=FIXED if k == 0 else ()) for k, start in enumerate(starts)
    ]
    for block in blocks or computed_ahead(score_blocks(trace, 0, lambda _done, _what: None)):
        for walk in walks:
            walk.take(block)
    for walk in walks:
        walk.close()
    return walks


def seconds_of(costs: Any) -> Any:
    """float64[…] seconds, of costs float64[…, 3], at the default price."""
    return costs[..., 0] + DEFAULT_PRICE_S_PER_GB_H * costs[..., 1]


def best_of(walk: TuningWalk, from_day: int) -> tuple[int, Any]:
    """The fixed window that costs least from a day on, and what each fixed one costs on each day: float64[days, fixed]."""
    daily = seconds_of(np.stack([day.fixed for day in walk.days]))
    return int(np.argmin(daily[from_day:].sum(axis=0))), daily


def _point(name: str, ratio: float, trace: Trace, capacity_bytes: float, link_bytes_per_s: float, models: int) -> dict[str, Any]:
    walks = walk_all(trace, capacity_bytes, link_bytes_per_s, list(STARTS.values()))
    best, daily = best_of(walks[0], TUNED_AFTER_DAYS)
    total = daily[TUNED_AFTER_DAYS:].sum(axis=0)
    # The default is the first candidate: as the window of all models it is what no book of windows costs.
    untuned = np.stack([day.together[0] for day in walks[0].days])[TUNED_AFTER_DAYS:]
    untuned_s = float(seconds_of(untuned).sum())
    starts = {}
    for (word, start), walk in zip(STARTS.items(), walks, strict=True):
        tuned = np.stack([day.tuned for day in walk.days])[TUNED_AFTER_DAYS:]
        tuned_s = float(seconds_of(tuned).sum())
        starts[word] = {
            "window": window_in_words(start),
            "cost_ratio": tuned_s / float(total[best]),
            "over_untuned": tuned_s / untuned_s,
            "start_ratio": float(total[FIXED.index(start)] / total[best]),
            "wasted_gb_h": float(tuned[:, 2].sum()),
            "changes": len(walk.decisions),
            "chosen": {e.segment.name: window_in_words(e.window) for e in walk.in_force.entries},
        }
    return {
        "trace": name,
        "capacity_ratio": ratio,
        "days": len(walks[0].days),
        "models": models,
        "tuned_models": len(trace.models),
        "best_fixed": window_in_words(FIXED[best]),
        "best_fixed_s": float(total[best]),
        "best_fixed_wasted_gb_h": float(np.stack([day.fixed[best] for day in walks[0].days])[TUNED_AFTER_DAYS:, 2].sum()),
        "fixed_spread": float(total.max() / total[best]),
        "default_ratio": untuned_s / float(total[best]),
        "untuned_wasted_gb_h": float(untuned[:, 2].sum()),
        "starts": starts,
    }


def _line(point: dict[str, Any]) -> str:
    of = ", ".join(
        f"{word} start {s['cost_ratio']:.3f} (left as it was {s['start_ratio']:.3f}), {s['over_untuned']:.4f} of untuned, "
        f"{s['wasted_gb_h']:,.0f} GB·h wasted"
        for word, s in point["starts"].items()
    )
    part = "" if point["tuned_models"] == point["models"] else f" ({point['tuned_models']} of {point['models']} models)"
    return (
        f"{point['trace']} {point['capacity_ratio']:.2f}{part}: {of}; of the best fixed window, {point['best_fixed']}, which wastes "
        f"{point['best_fixed_wasted_gb_h']:,.0f}; the worst fixed one {point['fixed_spread']:.3f}, untuned {point['default_ratio']:.3f} "
        f"with {point['untuned_wasted_gb_h']:,.0f} wasted"
    )

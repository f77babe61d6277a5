"""`bench regime`: how long tuned windows take to be good again when a log changes in the middle."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prefetcher.bench.machine import describe_machine
from prefetcher.bench.windows import FIXED, STARTS, best_of, read_suite, seconds_of, walk_all
from prefetcher.compiling import compile_aloud
from prefetcher.core.windows import window_in_words
from prefetcher.errors import UsageError
from prefetcher.replay.trace import Trace

__all__ = ["WITHIN", "changed_log", "days_until_within", "run"]

#: A day is good again when it costs at most this over the best fixed window's.
WITHIN = 1.15
_PEAKS_MOVE_S = 3 * 3600.0
_DAY_S = 86_400.0
_TRACES = ("genai_sd", "azure_functions_14d")


def run(
    json_out: Path,
    *,
    suite: Path | None = None,
    traces: Path | None = None,
    trace: str | None = None,
    quick: bool = False,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Changes each log in its middle, tunes through it, and writes `json_out`; `trace` (comma-separated) runs other traces of the suite,
    `quick` the first alone.

    `days`: the days from the change until a whole day, and all after it together, cost at most 15 % more than with the fixed window that is
    best after the change, over the same days; the worst trace. Beside it what the first days cost over it.
    """
    tell = say or (lambda text: print(text, flush=True))
    names = set(trace.split(",")) if trace else set(_TRACES[: 1 if quick else None])
    compile_aloud()
    points: list[dict[str, Any]] = []
    for name, ratio, link_bytes_per_s, read in read_suite("regime", suite, traces):
        if name not in names:
            continue
        before = read()
        log, changed_day = changed_log(before)
        (walk,) = walk_all(log, ratio * float(before.bytes_.sum()), link_bytes_per_s, [STARTS["bad"]])
        best, daily = best_of(walk, changed_day)
        tuned = seconds_of(np.stack([day.tuned for day in walk.days]))
        over = tuned[changed_day:] / np.maximum(daily[changed_day:, best], 1e-9)
        points.append(
            {
                "trace": name,
                "changed_day": changed_day,
                "days": days_until_within(tuned[changed_day:], daily[changed_day:, best]),
                "best_fixed": window_in_words(FIXED[best]),
                "over_best_by_day": [float(v) for v in over],
                "over_best": float(tuned[changed_day:].sum() / daily[changed_day:, best].sum()),
                "changes_after": sum(d.at_s > log.t0 + changed_day * _DAY_S for d in walk.decisions),
            }
        )
        tell(f"{name}: {points[-1]['days']} days; all days after it {points[-1]['over_best']:.3f} of the best fixed window")
    if not points:
        raise UsageError(f"no trace of the suite is called {trace!r}")
    result = {"figures": {"days": max(p["days"] for p in points)}, "points": points, "machine": describe_machine()}
    Path(json_out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def changed_log(trace: Trace) -> tuple[Trace, int]:
    """The log with a change in the middle, at the end of a whole day, and the number of that day: from then on every other model has a
    new name, and everything comes three hours later in the day."""
    day = int((trace.t1 - trace.t0) / _DAY_S / 2.0)
    after = trace.ts >= trace.t0 + day * _DAY_S
    count = len(trace.models)
    renamed = np.arange(0, count, 2)
    new_number = np.arange(count)
    new_number[renamed] = count + np.arange(len(renamed))
    ts = np.where(after, trace.ts + _PEAKS_MOVE_S, trace.ts)
    model = np.where(after, new_number[trace.model], trace.model).astype(trace.model.dtype)
    names = [*trace.models, *(f"{trace.models[m]} renamed" for m in renamed)]
    sizes = np.concatenate([trace.bytes_, trace.bytes_[renamed]])
    return replace(trace, ts=ts, model=model, models=names, bytes_=sizes), day


def days_until_within(tuned_s: Any, best_s: Any) -> int:
    """How many days pass until a day costs at most `WITHIN` of the best, and the days from it on together too; float64[days] each. All of
    them where none does. A first day that is good is 1: it takes a day to see it."""
    for day in range(len(tuned_s)):
        if tuned_s[day] <= WITHIN * best_s[day] and tuned_s[day:].sum() <= WITHIN * best_s[day:].sum():
            return day + 1
    return len(tuned_s)

"""`prefetcher tune`: a log in; the windows that the tuner chose, why, and what others would have cost, as tables, JSON, book and page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prefetcher.backtest.plan import sampled_models
from prefetcher.compiling import compile_kernels, compiled
from prefetcher.core.tuner import CANDIDATES, TunerSettings
from prefetcher.core.value import DEFAULT_PRICE_S_PER_GB_H
from prefetcher.core.windows import DEFAULT_WINDOW, WindowBook, window_in_words
from prefetcher.errors import InputError, UsageError
from prefetcher.progress import Progress, shown_progress
from prefetcher.replay.capacity import bytes_in_words, capacity_notes, check_capacity
from prefetcher.replay.engine import split_by_node
from prefetcher.replay.ours import computed_ahead, score_blocks
from prefetcher.replay.run import check_figures
from prefetcher.replay.trace import Trace, read_trace
from prefetcher.replay.windows import read_book
from prefetcher.tuning.walk import Day, TuningWalk

__all__ = ["LEAST_DAYS", "MOST_MODELS", "sampled", "tune", "tune_command"]

#: Of more models, a sample by hash is tuned on: every candidate is a set of caches of all of them.
MOST_MODELS = 2000
#: Less shows no day twice: one to find segments, one to choose, one to see what that was worth.
LEAST_DAYS = 3.0
_DAY_S = 86_400.0
#: Days that are not counted when windows are compared: caches fill, forecasts have no fit, and the tuner has seen nothing.
_WARM_DAYS = 2


def tune_command(
    *,
    log: Path,
    out: Path | None = None,
    catalog: Path | None = None,
    models: Path | None = None,
    default_bytes: int | None = None,
    capacity_ratio: float | None = None,
    host_bytes: int | None = None,
    link_bytes_per_s: float = 3.5e9,
    nodes: int = 1,
    price: float | None = None,
    waste_budget: float | None = None,
    book: Path | None = None,
    most_models: int = MOST_MODELS,
    seed: int = 0,
    map: str | Mapping[str, str] | None = None,
    tz: str | None = None,
    strict: bool = False,
    as_json: bool = False,
) -> None:
    """Prints what was chosen, or JSON, and writes `out`/windows.json, tune.json and report.html. Raises UsageError and InputError."""
    from rich.console import Console

    from prefetcher.tuning.report import write_report
    from prefetcher.tuning.terminal import print_result

    check_capacity(capacity_ratio, host_bytes)
    check_figures(capacity_ratio, host_bytes, link_bytes_per_s, None, price)
    if waste_budget is not None and not 0.0 < waste_budget < 1e12:
        raise UsageError(f"--waste-budget is the GB·h a day that unused prefetches may hold, above 0, got {waste_budget}")
    if out is not None and out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; name a folder")
    start = None if book is None else read_book(book)
    settings = TunerSettings(DEFAULT_PRICE_S_PER_GB_H if price is None else price, waste_budget)
    errors = Console(stderr=True)
    with shown_progress(errors, "reading the log") as progress:
        trace = read_trace(
            log, catalog=catalog, models_dir=models, default_bytes=default_bytes, field_map=map, tz=tz, strict=strict,
            progress=lambda done, total: progress(done / max(total, 1), "reading the log"),
        )  # fmt: skip
        if out is not None:
            # Whether it can be written is known before the work, not after it.
            out.mkdir(parents=True, exist_ok=True)
        if not errors.is_terminal and not compiled():
            errors.print("compiling for this machine, once: about half a minute", soft_wrap=True, highlight=False)
        compile_kernels(progress)
        count = len(trace.node_names) or nodes
        capacity = float(trace.bytes_.sum()) * capacity_ratio / count if capacity_ratio is not None else float(host_bytes or 0)
        result = tune(
            trace, capacity, link_bytes_per_s=link_bytes_per_s, nodes=nodes, settings=settings, start=start, most_models=most_models,
            seed=seed, progress=progress,
        )  # fmt: skip
    for note in result["input"]["notes"]:
        errors.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False)
    if out is not None:
        (out / "windows.json").write_text(json.dumps(result["book"], ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        (out / "tune.json").write_text(json.dumps(result, ensure_ascii=False, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        write_report(out / "report.html", result)
    if as_json:
        print(json.dumps(result, ensure_ascii=False, indent=2, allow_nan=False))
        return
    print_result(Console(), result)
    if out is not None:
        written = f"{out}/report.html, {out}/tune.json, and the book for `prefetcher replay --windows`, {out}/windows.json"
        Console().print(written, soft_wrap=True, highlight=False, markup=False)


def sampled(trace: Trace, most_models: int, seed: int) -> tuple[Trace, float]:
    """The rows of at most `most_models` models, drawn by the hash of their names, and the share of all bytes that these have."""
    kept = sampled_models(trace.models, most_models, seed)
    if kept.all():
        return trace, 1.0
    number = np.cumsum(kept) - 1
    rows = kept[trace.model]
    if not rows.any():
        raise InputError(f"has no row of the {int(kept.sum()):,} models that were drawn; raise --most-models", path=trace.path)
    of_rows = {name: getattr(trace, name)[rows] for name in ("ts", "user", "node", "version", "count")}
    part = replace(
        trace,
        **of_rows,
        model=number[trace.model[rows]].astype(trace.model.dtype),
        models=[name for name, keep in zip(trace.models, kept, strict=True) if keep],
        bytes_=trace.bytes_[kept],
    )
    return part, float(part.bytes_.sum() / trace.bytes_.sum())


def tune(
    trace: Trace,
    capacity_bytes: float,
    *,
    link_bytes_per_s: float = 3.5e9,
    nodes: int = 1,
    settings: TunerSettings | None = None,
    start: WindowBook | None = None,
    most_models: int = MOST_MODELS,
    seed: int = 0,
    progress: Progress = lambda _done, _what: None,
) -> dict[str, Any]:
    """The tuner over a log that was read, from the default window or the book `start`: a document of JSON types. Of many models a sample is
    tuned on, with its share of the capacity. Raises InputError for a log of under three days."""
    settings = settings or TunerSettings()
    days = (trace.t1 - trace.t0) / _DAY_S
    if days < LEAST_DAYS:
        raise InputError(f"covers {days:.1f} days; windows are tuned on {LEAST_DAYS:g} days or more", path=trace.path)
    part, share = sampled(trace, most_models, seed)
    parts = split_by_node(part, nodes, link_bytes_per_s, None)
    notes = capacity_notes(part.bytes_, [p.world.model for p in parts], share * capacity_bytes)
    if share < 1.0:
        notes.append(
            f"{len(part.models):,} of {len(trace.models):,} models, drawn by the hash of their names, with {share:.0%} of the memory"
        )
    walk = TuningWalk(parts, share * capacity_bytes, settings=settings, start=start or DEFAULT_WINDOW)
    for block in computed_ahead(score_blocks(part, seed, lambda done, _what: progress(done, "tuning windows"))):
        walk.take(block)
    walk.close()
    return _document(trace, part, walk, settings, capacity_bytes, notes)


def _document(
    trace: Trace, part: Trace, walk: TuningWalk, settings: TunerSettings, capacity_bytes: float, notes: Sequence[str]
) -> dict[str, Any]:
    counted = walk.days[_WARM_DAYS:]
    book, facts = walk.in_force, walk.facts(part.t1)
    number = book.segment_numbers(facts)
    segments = []
    for k, entry in enumerate(book.entries):
        mine = number == k
        segments.append(
            {
                "name": entry.segment.name,
                "models": int(mine.sum()),
                "bytes": float(facts.bytes[mine].sum()),
                "rows_per_day": float(facts.rows_per_day[mine].sum()),
                "window": window_in_words(entry.window),
                "why": entry.why or "nothing else would have cost less by more than chance",
                "examples": [part.models[m] for m in np.argsort(-facts.rows_per_day * mine, kind="stable")[:3] if mine[m]],
            }
        )
    frontier = [_costs(np.stack([day.together[k] for day in counted]), window_in_words(w), settings) for k, w in enumerate(CANDIDATES)]
    tuned = _costs(np.stack([day.tuned for day in counted]), "tuned", settings)
    return {
        "input": {
            "log": trace.path,
            "rows": len(trace),
            "models": len(trace.models),
            "tuned_models": len(part.models),
            "capacity_bytes": capacity_bytes,
            "price_s_per_gb_h": settings.price_s_per_gb_h,
            "waste_gb_h_per_day": settings.waste_gb_h_per_day,
            "days": len(walk.days),
            "counted_days": len(counted),
            "notes": list(notes),
        },
        "sentence": _sentence(tuned, frontier, settings, counted),
        "book": book.to_json(),
        "segments": segments,
        "tuned": tuned,
        "frontier": frontier,
        "decisions": [decision.to_json() for decision in walk.decisions],
        "dual_price": walk.tuner.dual_price,
        "capacity": bytes_in_words(capacity_bytes),
    }


def _costs(daily: Any, window: str, settings: TunerSettings) -> dict[str, Any]:
    """Means a day of float64[days, 3]."""
    wait_s, held, wasted = (float(v) for v in daily.mean(axis=0))
    cost_s = wait_s + settings.price_s_per_gb_h * held
    return {"window": window, "cold_seconds": wait_s, "held_gb_h": held, "wasted_gb_h": wasted, "cost_s": cost_s}


def _sentence(tuned: Mapping[str, Any], frontier: Sequence[Mapping[str, Any]], settings: TunerSettings, counted: Sequence[Day]) -> str:
    default = frontier[0]
    best = min(frontier, key=lambda f: float(f["cost_s"]))
    worst = max(frontier, key=lambda f: float(f["cost_s"]))
    said = (
        f"tuned windows cost {tuned['cost_s']:,.0f} s a day over the last {len(counted)} days, the default {default['cost_s']:,.0f}, "
        f"the best that stays as it is {best['cost_s']:,.0f} ({best['window']}), the worst {worst['cost_s']:,.0f}"
    )
    if settings.waste_gb_h_per_day is None:
        return said
    kept = "within" if tuned["wasted_gb_h"] <= settings.waste_gb_h_per_day else "over"
    return f"{said}; {tuned['wasted_gb_h']:,.1f} GB·h wasted a day, {kept} the budget of {settings.waste_gb_h_per_day:g}"

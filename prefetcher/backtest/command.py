"""`prefetcher backtest`: a log in; how well each predictor foresaw starts out, as tables, JSON and a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prefetcher.backtest.contenders import Contender
from prefetcher.backtest.outcomes import Rows, walk
from prefetcher.backtest.plan import make_plan, sampled_models
from prefetcher.backtest.result import result_of
from prefetcher.backtest.terminal import sentence, tables
from prefetcher.compiling import compile_kernels, compiled
from prefetcher.errors import InputError, UsageError
from prefetcher.progress import shown_progress
from prefetcher.replay.trace import Trace, read_trace
from prefetcher_models.registry import PREDICTORS, Entry, entry, missing_packages

__all__ = ["DEFAULT_ORIGINS", "MOST_MODELS", "backtest", "backtest_command"]

DEFAULT_ORIGINS = 5
#: Of more models, a sample by hash is taken: their features at every minute of two weeks are what costs.
MOST_MODELS = 2000


def backtest_command(
    *,
    log: Path,
    catalog: Path | None = None,
    predictors: str | None = None,
    origins: int = DEFAULT_ORIGINS,
    warmup_ratio: float = 0.3,
    waste: float = 1.0,
    most_models: int = MOST_MODELS,
    seed: int = 0,
    map: str | Mapping[str, str] | None = None,
    tz: str | None = None,
    strict: bool = False,
    json_to: Path | None = None,
    report: Path | None = None,
) -> None:
    """Prints the sentence and the tables, and writes what was asked for. Raises UsageError and InputError."""
    from rich.console import Console

    chosen = _chosen(predictors)
    for out in (json_to, report):
        _check_file(out)
    errors = Console(stderr=True)
    with shown_progress(errors, "reading the log") as progress:
        trace = read_trace(
            log, catalog=catalog, default_bytes=1, field_map=map, tz=tz, strict=strict,
            progress=lambda done, total: progress(done / max(total, 1), "reading the log"),
        )  # fmt: skip
        if not errors.is_terminal and not compiled():
            errors.print("compiling for this machine, once: about half a minute", soft_wrap=True, highlight=False)
        compile_kernels(progress)
        result = backtest(
            trace, chosen, origins=origins, warmup_ratio=warmup_ratio, waste=waste, most_models=most_models, seed=seed, progress=progress
        )
    if json_to is not None:
        json_to.write_text(json.dumps(result, ensure_ascii=False, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if report is not None:
        from prefetcher.backtest.report import write_report

        write_report(report, result)
    console = Console()
    console.print(sentence(result), soft_wrap=True, highlight=False, markup=False)
    for table in tables(result, console.width):
        console.print(table)
    for note in result["input"]["notes"]:
        errors.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False)
    written = [str(out) for out in (report, json_to) if out is not None]
    if written:
        console.print(", ".join(written), soft_wrap=True, highlight=False, markup=False)


def backtest(
    trace: Trace,
    chosen: Sequence[Entry] = PREDICTORS,
    *,
    origins: int = DEFAULT_ORIGINS,
    warmup_ratio: float = 0.3,
    waste: float = 1.0,
    most_models: int = MOST_MODELS,
    seed: int = 0,
    progress: Any = lambda _done, _what: None,
) -> dict[str, Any]:
    """The document of `result.result_of` for a log that was read. Raises UsageError and InputError."""
    if origins < 1 or most_models < 1:
        raise UsageError(f"--origins and --most-models are at least 1, got {origins} and {most_models}")
    if not 0.0 <= warmup_ratio < 1.0:
        raise UsageError(f"--warmup-ratio must be at least 0 and below 1, got {warmup_ratio}")
    if not 0.0 < waste <= 1000.0:
        raise UsageError(f"--waste is how many wasted prefetches a start may cost, above 0 and at most 1000, got {waste}")
    notes = [f"{one.name} is left out: it needs {', '.join(missing)}" for one in chosen if (missing := missing_packages(one))]
    ready = [one for one in chosen if not missing_packages(one)]
    if not ready:
        raise UsageError(f"none of the predictors can run here: {'; '.join(notes)}")
    kept = sampled_models(trace.models, most_models, seed)
    which = np.flatnonzero(kept)
    rows = _rows(trace, kept)
    if not len(rows.ts):
        raise InputError(f"has no row of the {len(which):,} models that were drawn; raise --most-models", path=trace.path)
    if len(which) < len(trace.models):
        drawn = f"{len(rows.ts):,} of {len(trace):,} rows"
        notes.append(f"{len(which):,} of {len(trace.models):,} models, drawn by the hash of their names, with {drawn}")
    plan = make_plan(trace.t0, trace.t1, rows.models, warmup_ratio=warmup_ratio, origins=origins, seed=seed, path=trace.path)
    contenders = [Contender(one) for one in ready]
    outcomes = walk(rows, plan, contenders, progress)
    progress(1.0, "scoring")
    notes += [f"{c.name} failed: {n:,} times {reason}" for c in contenders for reason, n in c.failures.items()]
    described = {
        "log": trace.path,
        "rows": len(trace),
        "models": len(trace.models),
        "asked_models": rows.models,
        "from_s": trace.t0,
        "until_s": trace.t1,
        "scored_from_s": float(plan.origins[0]),
        "origins_s": plan.origins.tolist(),
        "warmup_ratio": warmup_ratio,
        "waste": waste,
        "seed": seed,
        "tz": trace.tz,
        "notes": [*trace.problems.lines(), *notes],
    }
    return result_of(described, plan, outcomes, contenders, waste)


def _chosen(names: str | None) -> list[Entry]:
    if names is None:
        return [one for one in PREDICTORS if not one.costly]
    if names.strip() == "all":
        return list(PREDICTORS)
    asked = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not asked:
        raise UsageError("no predictor named; give --predictors, as in --predictors hazard,seasonal-naive")
    return [entry(name) for name in asked]


def _rows(trace: Trace, kept: np.ndarray) -> Rows:
    """The rows of the kept models, numbered anew; the first row stays where the log begins."""
    number = np.cumsum(kept) - 1
    part = kept[trace.model]
    return Rows(
        ts=trace.ts[part],
        model=number[trace.model[part]].astype(np.int64),
        user=trace.user[part].astype(np.int64),
        count=trace.count[part].astype(np.int64),
        models=int(kept.sum()),
    )


def _check_file(out: Path | None) -> None:
    """Sees that a file can be written there, before anything long begins."""
    if out is None:
        return
    if out.is_dir():
        raise UsageError(f"{out} is a folder; name a file")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {out.absolute().parent}; make it, or name another file")
    try:
        with out.open("a", encoding="utf-8"):
            pass
    except OSError as exc:
        raise UsageError(f"{out} can't be written ({exc.strerror}); name another file") from exc

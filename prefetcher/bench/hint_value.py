"""`bench hint-value`: what hints are worth: cold seconds of hinted rows over those of the same rows without hints.

Every row is hinted 5 s ahead, 3 of 10 hints are false ones (`replay.hints.SyntheticHints`): synthetic, since no public log has hints.
Beside each figure stands how much more was moved and held.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from prefetcher.bench.machine import describe_machine
from prefetcher.compiling import compile_aloud
from prefetcher.errors import UsageError
from prefetcher.replay.hints import SyntheticHints
from prefetcher.replay.ours import RateBlock, score_blocks
from prefetcher.replay.policies import OURS
from prefetcher.replay.run import Ours, Simulation
from prefetcher.replay.trace import Trace, read_trace

__all__ = ["POINTS", "hint_value", "run"]

#: Trace and capacity ratio of each figure.
POINTS: dict[str, float] = {"genai_sd": 0.25, "bike_stations": 0.50}
_HINTS = SyntheticHints(precision=0.7, lead_s=5.0, seed=1)
_KEPT = ("cold_seconds", "held_gb_h", "idle_gb_h", "wasted_gb_h", "moved_gb", "prefetches", "outcomes")


def run(
    json_out: Path, *, traces: Path | None = None, trace: str | None = None, say: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Writes `json_out`: a key for each trace, its ratio of cold seconds; `moved_ratios` and `held_ratios` beside them, and `points` with
    all figures. `trace` (comma-separated) runs a part. Raises UsageError."""
    if traces is None:
        raise UsageError("bench hint-value needs --traces DIR")
    wanted = [name for name in POINTS if trace is None or name in trace.split(",")]
    if not wanted:
        raise UsageError(f"bench hint-value knows the traces {', '.join(POINTS)}, not {trace}")
    tell = say or (lambda text: print(text, flush=True))
    compile_aloud()
    figures: dict[str, float] = {}
    points, moved, held = [], {}, {}
    for name in wanted:
        loaded = read_trace(traces / f"{name}.parquet", catalog=traces / f"{name}.catalog.json")
        blocks = list(score_blocks(loaded, 0, lambda _done, _what: None))
        point = {"trace": name, "capacity_ratio": POINTS[name], **hint_value(loaded, POINTS[name], _HINTS, blocks)}
        figures[name], moved[name], held[name] = point["ratio"], point["moved_ratio"], point["held_ratio"]
        points.append(point)
        ratio = f"{point['ratio']:.3f} of the cold seconds without hints"
        tell(f"{name} {POINTS[name]:.2f}: {ratio}, {point['moved_ratio']:.2f} times the GB moved")
    result = {
        "figures": figures,
        "moved_ratios": moved,
        "held_ratios": held,
        "hints": {"synthetic": True, **asdict(_HINTS)},
        "points": points,
        "machine": describe_machine(),
    }
    Path(json_out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def hint_value(trace: Trace, capacity_ratio: float, hints: SyntheticHints, blocks: list[RateBlock]) -> dict[str, Any]:
    """One log, with and without `hints`: `ratio` of cold seconds over the scored rows that are hinted, `moved_ratio`, `held_ratio`."""
    capacity = capacity_ratio * float(trace.bytes_.sum())
    plain = Simulation(trace, capacity, blocks=blocks)
    told = Simulation(trace, capacity, blocks=blocks, hints=hints.make(trace))
    without, with_hints = plain.ours(), told.ours()
    feed = with_hints.hints
    assert feed is not None
    entries = {"without": _entry(plain, without), "with": _entry(told, with_hints)}
    scored = (trace.ts >= trace.scored_from_s(0.3)) & feed.hinted
    cold = {name: float(np.asarray(of.logs.waits["wait_s"])[scored].sum()) for name, of in (("without", without), ("with", with_hints))}
    fit = feed.classifier.fit
    return {
        "ratio": cold["with"] / max(cold["without"], 1e-9),
        "moved_ratio": entries["with"]["moved_gb"] / max(entries["without"]["moved_gb"], 1e-9),
        "held_ratio": entries["with"]["held_gb_h"] / max(entries["without"]["held_gb_h"], 1e-9),
        "hinted_rows": int(scored.sum()),
        "hinted_cold_seconds": cold,
        "hints": {"kept": feed.kept, "broken": feed.broken},
        "classifier": None if fit is None else {"in_force": fit.pays, "brier": fit.brier, "brier_of_record": fit.brier_of_record},
        **entries,
    }


def _entry(simulation: Simulation, ours: Ours) -> dict[str, Any]:
    entry = simulation.totals(OURS, ours.logs, ours.shadow)
    return {key: entry[key] for key in _KEPT}

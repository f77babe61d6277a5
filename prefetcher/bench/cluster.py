"""`bench cluster`: ours against every rival on nodes with tiers, at equal capacity; ours places rows, rivals hash them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

from prefetcher.bench.machine import describe_machine
from prefetcher.bench.policies import PEERS, SIMPLE
from prefetcher.compiling import compile_aloud
from prefetcher.errors import UsageError
from prefetcher.replay.cluster import ClusterSimulation
from prefetcher.replay.ours import score_blocks
from prefetcher.replay.policies import OURS
from prefetcher.replay.tiers import stack_of
from prefetcher.replay.trace import read_trace

__all__ = ["run"]

TIERS = ("remote", "disk", "host", "device")
#: Logs and numbers of nodes.
POINTS = (("azure_functions_day", 4), ("azure_functions_day", 16), ("servegen_m_mid", 4))
#: All host tiers together, as a share of the catalog's bytes.
HOST_RATIO = 0.25
#: `hybrid` fetches by a rule for one tier.
RIVALS = tuple(name for name in PEERS if name != "hybrid")
_LOCKSTEP = 6  #: policies at once: bounds the memory for their waits


def run(
    json_out: Path,
    *,
    traces: Path | None = None,
    policy: str | None = None,
    trace: str | None = None,
    quick: bool = False,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Runs the points and writes `json_out`; `policy` and `trace` (comma-separated) run a part, `quick` the first point with few rivals.

    Figures: `geomean`, the geometric mean over the points of cold seconds of ours over the best rival's, rows whose model fits no node left
    out; `geomean_all_rows`, the same with them; `geomean_over_best_simple`, over the best simple rival with our rules (victims as a set,
    bypass, Smith's order, in every tier); `geomean_held_over_best_peer` and `geomean_moved_over_best_peer` for GB·h held in host and
    device memory and GB read from disk; `worst_point`.
    """
    if traces is None:
        raise UsageError("bench cluster needs --traces DIR")
    names = [n for n in policy.split(",") if n] if policy else [*(RIVALS[:2] if quick else (*RIVALS, *SIMPLE)), OURS]
    only = set(trace.split(",")) if trace else None
    tell = say or (lambda text: print(text, flush=True))
    compile_aloud()
    points: list[dict[str, Any]] = []
    loaded, blocks = None, None
    for name, nodes in POINTS[:1] if quick else POINTS:
        if only is not None and name not in only:
            continue
        if loaded is None or Path(loaded.path).stem != name:
            loaded = read_trace(Path(traces) / f"{name}.parquet", catalog=Path(traces) / f"{name}.catalog.json")
            blocks = list(score_blocks(loaded, 0, lambda _done, _what: None)) if OURS in names else None
        stack = stack_of(TIERS, host_bytes=HOST_RATIO * float(loaded.bytes_.sum()) / nodes)
        points.append(_point(ClusterSimulation(loaded, stack, nodes=nodes, blocks=blocks), name, nodes, names))
        tell(_line(points[-1]))
    result = {"figures": _figures(points), "peers": _peers(points), "points": points, "machine": describe_machine()}
    Path(json_out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _point(simulation: ClusterSimulation, trace: str, nodes: int, names: list[str]) -> dict[str, Any]:
    policies: dict[str, dict[str, Any]] = {}

    def keep(name: str, entry: dict[str, Any]) -> None:
        policies[name] = {key: entry[key] for key in ("requests", "cold_starts", "cold_seconds", "held_gb_h", "wasted_gb_h", "moved_gb")}
        policies[name] |= {key: entry[key] for key in ("coverage", "tiers", "unfit")}

    rivals = [n for n in names if n != OURS]
    for first in range(0, len(rivals), _LOCKSTEP):
        for name, logs in simulation.rivals(rivals[first : first + _LOCKSTEP]).items():
            keep(name, simulation.totals(name, logs))
    if OURS in names:
        mine = simulation.ours()
        keep(OURS, simulation.totals(OURS, mine.logs, mine.shadow))
    point: dict[str, Any] = {"trace": trace, "nodes": nodes, "policies": policies}
    peers = [n for n in policies if n in RIVALS]
    best = min(peers, key=lambda n: policies[n]["cold_seconds"], default=None)
    point["best_peer"] = best
    for key, figure in (("over_best_peer", "cold_seconds"), ("held_over_best_peer", "held_gb_h"), ("moved_over_best_peer", "moved_gb")):
        point[key] = _over(policies, best, itemgetter(figure))
    point["all_rows_over_best_peer"] = max(
        (r for n in peers if (r := _over(policies, n, lambda e: e["cold_seconds"] + e["unfit"]["cold_seconds"])) is not None), default=None
    )
    point["over_best_simple"] = max((r for n in SIMPLE if (r := _over(policies, n, lambda e: e["cold_seconds"])) is not None), default=None)
    return point


def _over(policies: dict[str, dict[str, Any]], rival: str | None, figure: Callable[[dict[str, Any]], float]) -> float | None:
    """Ours over a rival; None where one of them was not run, or the rival has none of it."""
    if rival not in policies or OURS not in policies or figure(policies[rival]) <= 0.0:
        return None
    return figure(policies[OURS]) / figure(policies[rival])


def _peers(points: list[dict[str, Any]]) -> dict[str, float | None]:
    """Of each rival: ours over it, the geometric mean over the points that ran both."""
    over = {name: [_over(p["policies"], name, lambda entry: entry["cold_seconds"]) for p in points] for name in RIVALS}
    return {name: _geomean(ratios) for name, ratios in over.items() if any(r is not None for r in ratios)}


def _geomean(ratios: list[float | None]) -> float | None:
    known = [max(r, 1e-9) for r in ratios if r is not None]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None


def _figures(points: list[dict[str, Any]]) -> dict[str, float | None]:
    return {
        "geomean": _geomean([p["over_best_peer"] for p in points]),
        "geomean_all_rows": _geomean([p["all_rows_over_best_peer"] for p in points]),
        "geomean_over_best_simple": _geomean([p["over_best_simple"] for p in points]),
        "worst_point": max((p["over_best_peer"] for p in points if p["over_best_peer"] is not None), default=None),
        "geomean_held_over_best_peer": _geomean([p["held_over_best_peer"] for p in points]),
        "geomean_moved_over_best_peer": _geomean([p["moved_over_best_peer"] for p in points]),
    }


def _line(point: dict[str, Any]) -> str:
    mine, over = point["policies"].get(OURS), point["over_best_peer"]
    cold = f"{mine['cold_seconds']:,.0f}" if mine else "–"
    line = f"{point['trace']}, {point['nodes']} nodes: ours {cold} s cold"
    if over is None:
        return f"{line}, –"
    beside = f"{point['held_over_best_peer']:.2f} of its GB·h held and {point['moved_over_best_peer']:.2f} of its GB read from disk"
    return f"{line}, {over:.3f} of the best peer, {point['best_peer']}; {beside}"

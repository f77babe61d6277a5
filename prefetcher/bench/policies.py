"""`bench policies`: ours against every rival over a suite of traces, at equal capacity and at equal GB·h."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefetcher.bench.machine import describe_machine
from prefetcher.compiling import compile_aloud
from prefetcher.errors import InputError, UsageError
from prefetcher.replay.frontier import FrontierPoint, lower_hull, read_hull
from prefetcher.replay.ours import score_blocks
from prefetcher.replay.policies import OURS
from prefetcher.replay.run import FRONTIER_FACTORS, Simulation, check_figures
from prefetcher.replay.trace import read_trace

__all__ = ["run"]

_SINGLE = ("lru", "gdsf", "lfu:3600", "lfu:86400", "sieve", "lhd")
KEEP_ALIVES = ("ttl:300", "ttl:600", "ttl:1800", "ttl:3600", "ttl:7200")
PEERS = (*_SINGLE, *(f"{name}-smith" for name in _SINGLE), *KEEP_ALIVES, "hybrid")
SIMPLE = ("lfu:3600-smith-bypass", "lfu:86400-smith-bypass", "lhd-smith-bypass")
BELADYS = ("belady", "belady-size", "belady-smith", "belady-size-smith", "belady-smith-bypass")
REFERENCES = (*BELADYS, "clairvoyant")
#: Whom ours is compared with at their own GB·h held, read from its frontier.
AT_EQUAL_GB_H = (*KEEP_ALIVES, "hybrid")
#: The negative control: close to unpredictable, so that what is fetched ahead is mostly wasted.
CONTROL = "dlrm_launches"
#: Traces on which little can be known, whose figure is shown apart, and from which share of their bytes on.
SPARSE = {"genai_sd": 0.0, "dlrm_launches": 0.0, "azure_functions_day": 0.6}
_KEPT = ("cold_seconds", "held_gb_h", "wasted_gb_h", "moved_gb")
#: What stands beside a point's figure, over the best peer's.
_BESIDE = (("held_over_best_peer", "of its GB·h held"), ("moved_over_best_peer", "of its GB moved"))
_LOCKSTEP = 6  #: policies at once: bounds the memory for their waits


def run(
    json_out: Path,
    *,
    suite: Path | None = None,
    traces: Path | None = None,
    policy: str | None = None,
    trace: str | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Runs the suite and writes `json_out`; `policy` and `trace` (comma-separated) run a part.

    Figures are ratios of cold seconds, ours over theirs, as geometric means over the points: over the best peer of each point, over the
    best simple rival with our rules, over the one peer that comes closest, over LRU, at the GB·h held of the keep-alive (or hybrid) that
    does best against ours at the point, and on sparse traces; beside them the worst point, at how many points ours waits less than Belady,
    GB·h held and GB moved over the best peer's, and the largest share of GB·h held that was wasted on the negative control.
    """
    if suite is None or traces is None:
        raise UsageError("bench policies needs --suite FILE and --traces DIR")
    try:
        plan = json.loads(Path(suite).read_text(encoding="utf-8"))
        wanted = [(str(p["trace"]), float(ratio)) for p in plan["points"] for ratio in p["capacity_ratio"]]
        link_bytes_per_s, warmup_ratio = float(plan.get("link_bytes_per_s", 3.5e9)), float(plan.get("warmup_ratio", 0.3))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("is no suite: expected JSON with points of {trace, capacity_ratio: […]}", path=str(suite)) from error
    for _, ratio in wanted:
        check_figures(ratio, None, link_bytes_per_s, warmup_ratio)
    names = [n for n in policy.split(",") if n] if policy else [*PEERS, *SIMPLE, *REFERENCES, OURS]
    only = set(trace.split(",")) if trace else None
    tell = say or (lambda text: print(text, flush=True))
    compile_aloud()
    points = []
    loaded, blocks = None, None
    for name, ratio in wanted:
        if only is not None and name not in only:
            continue
        if loaded is None or Path(loaded.path).stem != name:
            loaded = read_trace(Path(traces) / f"{name}.parquet", catalog=Path(traces) / f"{name}.catalog.json")
            blocks = list(score_blocks(loaded, 0, lambda _done, _what: None)) if OURS in names else None
        simulation = Simulation(
            loaded,
            ratio * float(loaded.bytes_.sum()),
            link_bytes_per_s=link_bytes_per_s,
            warmup_ratio=warmup_ratio,
            blocks=blocks,
        )
        points.append(_point(simulation, name, ratio, names))
        tell(_line(points[-1]))
    result = {"figures": _figures(points), "peers": _peers(points), "points": points, "machine": describe_machine()}
    Path(json_out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _point(simulation: Simulation, trace: str, ratio: float, names: list[str]) -> dict[str, Any]:
    policies: dict[str, dict[str, float]] = {}
    rivals = [n for n in names if n != OURS]
    for first in range(0, len(rivals), _LOCKSTEP):
        for name, logs in simulation.rivals(rivals[first : first + _LOCKSTEP]).items():
            entry = simulation.totals(name, logs)
            policies[name] = {key: entry[key] for key in _KEPT}
    equal: dict[str, float] = {}
    if OURS in names:
        mine = simulation.ours([simulation.price * factor for factor in FRONTIER_FACTORS])
        entry = simulation.totals(OURS, mine.logs, mine.shadow)
        policies[OURS] = {key: entry[key] for key in _KEPT}
        hull = lower_hull([FrontierPoint(OURS, entry["held_gb_h"], entry["cold_seconds"], simulation.price), *mine.frontier])
        for name in AT_EQUAL_GB_H:
            if name in policies:
                equal[name] = read_hull(hull, policies[name]["held_gb_h"]).cold_seconds / max(policies[name]["cold_seconds"], 1e-9)
    point: dict[str, Any] = {"trace": trace, "capacity_ratio": ratio, "policies": policies, "equal_gb_h": equal}
    point["best_peer"] = min((n for n in PEERS if n in policies), key=lambda n: policies[n]["cold_seconds"], default=None)
    point["over_best_peer"] = next(iter(_over([point], PEERS)), None)
    point["held_over_best_peer"] = _over_best_peer(point, "held_gb_h")
    point["moved_over_best_peer"] = _over_best_peer(point, "moved_gb")
    return point


def _over_best_peer(point: dict[str, Any], key: str) -> float | None:
    """Ours over the best peer in something other than cold seconds; None without both, or where the peer has none of it."""
    policies, peer = point["policies"], point["best_peer"]
    return policies[OURS][key] / policies[peer][key] if OURS in policies and peer is not None and policies[peer][key] > 0.0 else None


def _best(point: dict[str, Any], names: tuple[str, ...]) -> float | None:
    cold = [point["policies"][n]["cold_seconds"] for n in names if n in point["policies"]]
    return min(cold) if cold else None


def _peers(points: list[dict[str, Any]]) -> dict[str, float | None]:
    """Of each peer: ours over it, the geometric mean over the points that ran both."""
    return {name: _geomean(_over(points, (name,))) for name in PEERS if any(name in point["policies"] for point in points)}


def _geomean(ratios: list[float]) -> float | None:
    positive = [max(r, 1e-9) for r in ratios]
    return math.exp(sum(math.log(r) for r in positive) / len(positive)) if positive else None


def _over(points: list[dict[str, Any]], names: tuple[str, ...]) -> list[float]:
    out = []
    for point in points:
        best = _best(point, names)
        if OURS in point["policies"] and best:
            out.append(point["policies"][OURS]["cold_seconds"] / best)
    return out


def _figures(points: list[dict[str, Any]]) -> dict[str, float | None]:
    over_best = _over(points, PEERS)
    singles = [g for g in (_geomean(_over(points, (n,))) for n in PEERS if all(n in p["policies"] for p in points)) if g is not None]
    below = sum(
        1 for p in points if OURS in p["policies"] and (b := _best(p, BELADYS[:4])) is not None and p["policies"][OURS]["cold_seconds"] < b
    )
    control = [p["policies"][OURS] for p in points if p["trace"] == CONTROL and OURS in p["policies"]]
    wasted = [mine["wasted_gb_h"] / mine["held_gb_h"] for mine in control if mine["held_gb_h"] > 0.0]
    return {
        "geomean_over_best_peer": _geomean(over_best),
        "geomean_over_best_simple": _geomean(_over(points, SIMPLE)),
        "geomean_over_best_single_peer": max(singles) if singles else None,
        "geomean_over_lru": _geomean(_over(points, ("lru",))),
        "geomean_equal_gb_h": _geomean([max(p["equal_gb_h"].values()) for p in points if p["equal_gb_h"]]),
        "geomean_sparse": _geomean(_over([p for p in points if p["capacity_ratio"] >= SPARSE.get(p["trace"], math.inf)], PEERS)),
        "points_below_belady": below,
        "worst_point": max(over_best) if over_best else None,
        "geomean_held_over_best_peer": _geomean([r for p in points if (r := p["held_over_best_peer"]) is not None]),
        "geomean_moved_over_best_peer": _geomean([r for p in points if (r := p["moved_over_best_peer"]) is not None]),
        "dlrm_wasted_ratio": max(wasted, default=None),
    }


def _line(point: dict[str, Any]) -> str:
    mine, over = point["policies"].get(OURS), point["over_best_peer"]
    cold = f"{mine['cold_seconds']:,.0f}" if mine else "–"
    line = f"{point['trace']} {point['capacity_ratio']:.2f}: ours {cold} s cold"
    if over is None:
        return f"{line}, –"
    beside = [f"{point[key]:.2f} {word}" for key, word in _BESIDE if point[key] is not None]
    return f"{line}, {over:.3f} of the best peer, {point['best_peer']}" + (f"; {' and '.join(beside)}" if beside else "")

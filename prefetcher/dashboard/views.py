"""What people are told of all nodes and models, a page at a time: memory by tier and state, loads on their way, models by name.

Sorted, filtered and cut here, so that a browser never holds ten thousand rows. Pure but for reading plans: everything else comes from
`api.fleet.View`. Covers neither what is wrong (`findings`) nor one model's story (`model_view`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from prefetcher.api.fleet import View
from prefetcher.controller import records
from prefetcher.controller.records import HeldWeights, NodeReport
from prefetcher.core.copies import IN_FLIGHT
from prefetcher.core.types import Cause, NodeName
from prefetcher.ports import StateStore

__all__ = ["NODE_SORTS", "NODE_STATES", "STATES", "ModelLine", "NodeSort", "NodeState", "expected_uses", "model_lines", "moves", "nodes"]

NodeSort = Literal["worst", "name", "full", "busy", "moving"]
NODE_SORTS: tuple[NodeSort, ...] = ("worst", "name", "full", "busy", "moving")
NodeState = Literal["all", "problem", "moving", "off"]
NODE_STATES: tuple[NodeState, ...] = ("all", "problem", "moving", "off")
#: Bytes of a tier are one of these: leased at this moment; kept by a pin; used before; brought ahead and not used yet; on their way in;
#: on their way out; of what made room for something smaller, and kept the rest.
STATES = ("leased", "pinned", "used", "early", "arriving", "leaving", "kept")
_TIERS = ("host", "device")
_ON_ITS_WAY = frozenset(stage.value for stage in IN_FLIGHT)
_LEAVING = frozenset({"cancelling", "evicting"})
_PROBLEMS_SHOWN = 3
#: What makes a node come first: a problem, then somebody who waits, then how full and how busy it is.
_PROBLEM, _WAITING = 100.0, 10.0


def state_of(held: HeldWeights) -> str:
    """Which of `STATES` a copy's bytes are in."""
    if held.state in _LEAVING:
        return "leaving"
    if held.state in _ON_ITS_WAY:
        return "arriving"
    if held.is_part:
        return "kept"
    if held.leases:
        return "leased"
    if held.pinned:
        return "pinned"
    return "early" if held.decision_id or held.last_use_s is None else "used"


def nodes(
    view: View, sort: NodeSort = "worst", matches: str = "", state: NodeState = "all", offset: int = 0, limit: int = 25
) -> dict[str, Any]:
    """One page of nodes, each with its memory by tier and state, and the sums over all that match."""
    lines = view_lines(view)
    wanted = matches.casefold()
    found = [line for line in lines if _is_wanted(line, wanted, state)]
    found.sort(key=_SORTS[sort])
    sums = {name: sum(line["tiers"]["host"]["states"][name] for line in found) for name in STATES}
    host = [line["tiers"]["host"] for line in found]
    return {
        "total": len(lines),
        "matched": len(found),
        "nodes": found[offset : offset + limit],
        "sums": {
            "budget_bytes": sum(tier["budget_bytes"] for tier in host),
            "taken_bytes": sum(tier["taken_bytes"] for tier in host),
            "states": sums,
        },
    }


def view_lines(view: View) -> list[dict[str, Any]]:
    """All nodes, each as one line; in no order."""
    return [_line(name, report) for name, report in view.reports.items()]


def _line(name: str, report: NodeReport) -> dict[str, Any]:
    by_tier: dict[str, dict[str, int]] = {tier: dict.fromkeys(STATES, 0) for tier in _TIERS}
    counts = {"held": 0, "moving": 0, "waited_for": 0}
    for held in report.held:
        state = state_of(held)
        by_tier.setdefault(held.tier, dict.fromkeys(STATES, 0))[state] += held.memory_bytes
        counts["held"] += 1
        if state == "arriving":
            counts["moving"] += 1
            counts["waited_for"] += held.cause == Cause.DEMAND.value
    memory = report.memory
    tiers: dict[str, dict[str, Any]] = {
        "host": {
            "budget_bytes": memory.budget_bytes,
            "taken_bytes": memory.taken_bytes,
            "locked": memory.locked,
            "backing": memory.backing,
            "states": by_tier["host"],
        }
    }
    if any(by_tier["device"].values()):
        taken = sum(by_tier["device"].values())
        tiers["device"] = {"budget_bytes": None, "taken_bytes": taken, "states": by_tier["device"]}
    problems = [*report.problems, *([memory.warning] if memory.warning else [])]
    ratio = memory.taken_bytes / max(1, memory.budget_bytes)
    on_disk = [known for known in report.known if known.tier == "disk"]
    return {
        "node": name,
        "group": report.group,
        "at_s": report.at_s,
        "mode": "observe" if report.observe else "on" if report.prefetching else "off",
        "tiers": tiers,
        "disk": {"models": len(on_disk), "bytes": sum(known.bytes for known in on_disk)},
        "link_bytes_per_s": report.link_bytes_per_s,
        "busy_ratio": report.busy_ratio,
        "recent_wait_s": report.recent_wait_s,
        **counts,
        "problems": problems[:_PROBLEMS_SHOWN],
        "problems_in_all": len(problems),
        "worst": _PROBLEM * len(report.problems) + _WAITING * counts["waited_for"] + ratio + report.busy_ratio,
    }


def _is_wanted(line: Mapping[str, Any], wanted: str, state: str) -> bool:
    if wanted and wanted not in line["node"].casefold() and wanted not in line["group"].casefold():
        return False
    if state == "problem":
        return bool(line["problems_in_all"])
    if state == "moving":
        return bool(line["moving"])
    return state != "off" or line["mode"] != "on"


def _fullness(line: Mapping[str, Any]) -> float:
    host = line["tiers"]["host"]
    return float(host["taken_bytes"] / max(1, host["budget_bytes"]))


_SORTS: Mapping[str, Callable[[Mapping[str, Any]], tuple[Any, ...]]] = {
    "worst": lambda line: (-line["worst"], line["node"]),
    "name": lambda line: (line["node"],),
    "full": lambda line: (-_fullness(line), line["node"]),
    "busy": lambda line: (-line["busy_ratio"], line["node"]),
    "moving": lambda line: (-line["moving"], line["node"]),
}


# --- what moves ---


def moves(view: View, offset: int = 0, limit: int = 25) -> dict[str, Any]:
    """Weights on their way into memory: those that a request waits for first, then by when they are ready."""
    found = [_move(node, report, held) for node, report in view.reports.items() for held in report.held if held.state in _ON_ITS_WAY]
    found.sort(key=lambda move: (move["cause"] != Cause.DEMAND.value, move["ready_in_s"], move["node"], move["model"]))
    left = sum(move["bytes"] - move["bytes_done"] for move in found)
    return {"total": len(found), "bytes_left": left, "moves": found[offset : offset + limit]}


def _move(node: str, report: NodeReport, held: HeldWeights) -> dict[str, Any]:
    left = max(0, held.bytes - held.bytes_done)
    return {
        "node": node,
        "model": held.model,
        "tier": held.tier,
        "state": held.state,
        "bytes": held.bytes,
        "bytes_done": held.bytes_done,
        "cause": held.cause,
        "decision_id": held.decision_id,
        "since_s": held.since_s,
        "ready_in_s": round(left / max(1.0, report.link_bytes_per_s), 3),
        "expected_use_s": None,
        "contributions": [list(part) for part in held.contributions],
    }


class _PlannedOrder(msgspec.Struct):
    decision_id: str
    expected_use_s: float
    hold_s: float


class _PlannedKey(msgspec.Struct):
    model: str


class _PlannedWeights(msgspec.Struct):
    key: _PlannedKey
    order: _PlannedOrder | None = None


class _PlannedNode(msgspec.Struct):
    """What is read of a `core.types.Plan`."""

    desired: list[_PlannedWeights] = []


_plans = msgspec.json.Decoder(_PlannedNode)


def expected_uses(state: StateStore, names: Iterable[str]) -> dict[tuple[str, str], tuple[float, float]]:
    """(expected use, hold) by (node, model) of the orders that the nodes' plans have at this moment. Raises UnavailableError."""
    chosen = list(dict.fromkeys(names))
    raw = state.read_many([records.node_key(NodeName(name), "plan") for name in chosen]) if chosen else []
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for name, item in zip(chosen, raw, strict=True):
        try:
            plan = _PlannedNode() if item is None else records.decode(item, _plans)
        except ValueError:
            continue
        for line in plan.desired:
            if line.order is not None:
                found[name, line.key.model] = (line.order.expected_use_s, line.order.hold_s)
    return found


# --- models ---


class ModelLine(msgspec.Struct):
    """A model over all nodes: `nodes` could load it, it is ready on `ready_on` and on its way to `moving_on` of them."""

    model: str
    bytes: int = 0
    nodes: int = 0
    ready_on: int = 0
    moving_on: int = 0
    pinned: bool = False
    last_use_s: float | None = None


def model_lines(view: View) -> list[ModelLine]:
    """Every model that a node that reports knows or has, used last first."""
    lines: dict[str, ModelLine] = {}
    for report in view.reports.values():
        for known in report.known:
            line = lines.get(known.model)
            if line is None:
                line = lines[known.model] = ModelLine(known.model, known.bytes)
            line.nodes += 1
            line.pinned = line.pinned or known.pinned
            line.last_use_s = _later(line.last_use_s, known.last_use_s)
        for held in report.held:
            line = lines.get(held.model)
            if line is None:
                line = lines[held.model] = ModelLine(held.model, held.bytes)
            line.ready_on += held.state == "ready"
            line.moving_on += held.state in _ON_ITS_WAY
            line.pinned = line.pinned or held.pinned
            line.last_use_s = _later(line.last_use_s, held.last_use_s)
    return sorted(lines.values(), key=lambda line: (-(line.last_use_s or 0.0), line.model))


def _later(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else max(one, other)


def matching(lines: Sequence[ModelLine], matches: str, offset: int, limit: int) -> dict[str, Any]:
    """Those whose name has `matches` in it; names that begin with it come first, else as in `lines`."""
    wanted = matches.casefold()
    found = [line for line in lines if wanted in line.model.casefold()] if wanted else list(lines)
    if wanted:
        found.sort(key=lambda line: not line.model.casefold().startswith(wanted))
    return {
        "total": len(lines),
        "matched": len(found),
        "models": [msgspec.to_builtins(line) for line in found[offset : offset + limit]],
    }

"""The report as everybody reads it: `GET /v1/report` with a window, `prefetcher report --json`, the dashboard.

Covers the fields alone; what they mean is in `docs/report.md`, and the sums behind them in `core.ledger`. Times are seconds since
1970-01-01 UTC, waits seconds, memory GB·h (1 GB held for an hour), moved bytes GB (1e9 bytes). None is "not known", never nought.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "BY",
    "ColdStart",
    "Figures",
    "Group",
    "IdlePin",
    "MissingNode",
    "NodeState",
    "Report",
    "Slo",
    "StageFigures",
    "Waits",
]

#: What a report may be broken down by.
BY = ("model", "node", "tier", "cause", "predictor", "source", "tenant", "arm", "hour", "stage")


class Waits(msgspec.Struct, frozen=True):
    """Quantiles of `count` waits, from log-spaced counts that add up over hours and nodes.

    A quantile is the upper bound of its bin: the true value is at most `Report.resolution_ratio` below it. None where nobody waited.
    """

    count: int = 0
    p50_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None


class Figures(msgspec.Struct, frozen=True):
    """What one group came to. Orders count in the hour of their issue, rows in that of their arrival, memory in the hours it was held.

    `hit`, `late`, `useless`, `displaced` are prefetches by outcome (the rest is in `outcomes`, exactly one each), `premature` a flag of
    unused ones; `miss` are requests that found nothing resident or moving. What people loaded by hand is no prefetch. `shadow_cold_s`:
    what `shadow_requests` of the requests, those of hours whose shadow is known, would have waited with prefetching off; `coverage` = 1 -
    what they waited / shadow_cold_s. held = idle + used; wasted is a part of idle, and early a part of held.
    """

    requests: int = 0
    ready: int = 0
    joined: int = 0
    cold_starts: int = 0
    miss: int = 0
    bypassed: int = 0
    dropped: int = 0
    cold_s: float = 0.0
    waits: Waits = Waits()
    first_waits: Waits = Waits()
    prefetches: int = 0
    outcomes: dict[str, int] = {}
    hit: int = 0
    late: int = 0
    useless: int = 0
    displaced: int = 0
    premature: int = 0
    redundant: int = 0
    accuracy: float | None = None
    timeliness: float | None = None
    shadow_requests: int = 0
    shadow_cold_s: float | None = None
    coverage: float | None = None
    saved_s: float = 0.0
    held_gb_h: float = 0.0
    used_gb_h: float = 0.0
    idle_gb_h: float = 0.0
    wasted_gb_h: float = 0.0
    early_gb_h: float = 0.0
    moved_gb: float = 0.0
    wasted_moved_gb: float = 0.0


class Group(msgspec.Struct, frozen=True):
    """One line of the breakdown: `name` is a model, a node, … as `Report.by` says ('none' where nothing names one; of hours, their start
    in seconds)."""

    name: str
    figures: Figures


class Slo(msgspec.Struct, frozen=True):
    """How first requests were served: `met` of `count` waited at most `under_s`, wanted is `target_ratio` of them.

    `burn_1h` and `burn_6h`: the share of slow first requests of the last 1 and 6 hours before the window's end over the share that is
    allowed; 1 spends the allowance just in time, None without a first request. `counted_under_s`: the edge of the bin that `under_s` was
    rounded up to.
    """

    under_s: float
    target_ratio: float
    counted_under_s: float
    count: int = 0
    met: int = 0
    met_ratio: float | None = None
    burn_1h: float | None = None
    burn_6h: float | None = None


class NodeState(msgspec.Struct, frozen=True):
    """How far a node is in the report: as of `told_at_s`, with hours from `from_s` on. `seq`: the number of what it told last."""

    node: str
    told_at_s: float
    from_s: float
    seq: int = 0


class MissingNode(msgspec.Struct, frozen=True):
    """A node of which something is not in the report, and why; `seen_at_s` None: unknown."""

    node: str
    reason: str
    seen_at_s: float | None = None


class IdlePin(msgspec.Struct, frozen=True):
    """Weights that a pin or a policy keeps, and whose index has been under the price since `under_since_s`.

    `why`: `pin`, or the policy that keeps it. `index_ratio`: its index over the price, as of now. Since then it held `held_gb_h`, which
    cost `cost_s` seconds of waiting by the price and saved `earned_s`. `allowed`: it may be released by itself; `released_at_s`: it was.
    """

    model: str
    node: str
    why: str
    bytes: int
    under_since_s: float
    index_ratio: float
    held_gb_h: float
    cost_s: float
    earned_s: float
    by: str = ""
    pinned_at_s: float | None = None
    allowed: bool = False
    released_at_s: float | None = None


class StageFigures(msgspec.Struct, frozen=True):
    """How long one stage of a cold start took: `stage` is fetch (remote to disk), read (disk to host), copy (host to device), engine_start
    or warm_up. `count` 0: nothing measured it in the window, and `note` says so; quantiles as in `Waits`. A mean is exact.
    """

    model: str
    node: str
    stage: str
    count: int = 0
    mean_s: float | None = None
    p50_s: float | None = None
    p90_s: float | None = None
    note: str = ""


class ColdStart(msgspec.Struct, frozen=True):
    """`GET /v1/models/{model}/cold-start`: every stage on every node that the model was loaded on in the window."""

    model: str
    since_s: float | None
    until_s: float
    stages: tuple[StageFigures, ...] = ()
    resolution_ratio: float = 0.0


class Report(msgspec.Struct, frozen=True):
    """What all nodes together came to from `since_s` (None: since the installation) to `until_s`, in whole hours from `from_hour_s` on.

    `groups_in_all` is above the number of `groups` where there are more than were asked for; the largest cold seconds come first. `effect`
    is the control group's own difference with its interval, None while it is not known.
    """

    since_s: float | None
    until_s: float
    from_hour_s: float | None
    by: str | None
    total: Figures
    slo: Slo
    groups: tuple[Group, ...] = ()
    groups_in_all: int = 0
    stages: tuple[StageFigures, ...] = ()
    nodes: tuple[NodeState, ...] = ()
    missing: tuple[MissingNode, ...] = ()
    idle_pins: tuple[IdlePin, ...] = ()
    resolution_ratio: float = 0.0
    first_gap_s: float = 600.0
    effect: dict[str, Any] | None = None

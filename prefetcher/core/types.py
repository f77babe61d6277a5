"""The words of the system as types: ids, tiers, models, plans, orders and their outcomes.

Events are past tense, instructions imperative; both live beside the residency machine that speaks them (`core.residency`). Times are
seconds since 1970-01-01 UTC (`_s`), sizes bytes (`_bytes`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NewType

__all__ = [
    "HORIZONS_S",
    "NAME_LIMIT_BYTES",
    "Arm",
    "Cause",
    "DecisionId",
    "DesiredWeights",
    "ModelName",
    "ModelVersion",
    "NodeName",
    "Order",
    "Outcome",
    "Plan",
    "RequestSeen",
    "TenantQuota",
    "Tier",
    "WeightsKey",
    "Window",
]

#: A longer name of a model, user, node or version is not taken in.
NAME_LIMIT_BYTES = 512

ModelName = NewType("ModelName", str)
ModelVersion = NewType("ModelVersion", str)
NodeName = NewType("NodeName", str)
DecisionId = NewType("DecisionId", str)

#: The horizons of every forecast, in seconds: 1, 2, 5, 10, 15, 30, 60, 360 minutes.
HORIZONS_S: tuple[float, ...] = (60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0, 21600.0)


class Tier(IntEnum):
    """Where weights lie; a higher tier is nearer to the computation, and a miss falls to the next one down."""

    REMOTE = 0
    DISK = 1
    HOST = 2
    DEVICE = 3


class Cause(StrEnum):
    """What started a load."""

    FORECAST = "forecast"
    HINT = "hint"
    COACTIVATION = "coactivation"
    BATCH = "batch"
    MANUAL = "manual"
    DEMAND = "demand"


class Outcome(StrEnum):
    """What became of a prefetch; exactly one each."""

    TIMELY = "timely"
    LATE = "late"
    USELESS = "useless"
    DISPLACED = "displaced"
    SUPERSEDED = "superseded"
    CANCELLED = "cancelled"
    FAILED = "failed"
    LOST = "lost"
    OPEN = "open"


class Arm(StrEnum):
    """The side of the permanent experiment that an order belongs to."""

    TREATED = "treated"
    CONTROL = "control"


@dataclass(frozen=True, slots=True, order=True)
class WeightsKey:
    """One version of one model's weights. `version` is '' where it is unknown."""

    model: ModelName
    version: ModelVersion = ModelVersion("")


@dataclass(frozen=True, slots=True)
class RequestSeen:
    """One validated row of the request log."""

    ts: float
    model: ModelName
    count: int = 1
    user: str | None = None
    node: NodeName | None = None
    version: ModelVersion | None = None
    request_id: str | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """How early (`lead_s`), how far ahead (`horizon_s`) and how long unused (`hold_s`) a prefetch may be; seconds. As it stands, it bounds
    nothing but the hold; what each means exactly is in `core.windows`."""

    lead_s: float = HORIZONS_S[-1]
    horizon_s: float = 0.0
    hold_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Order:
    """One decided prefetch. `contributions` names what led to it, largest first: (what, share of the score); `source` is who gave the hint
    or the schedule behind it."""

    decision_id: DecisionId
    node: NodeName
    key: WeightsKey
    tier: Tier
    cause: Cause
    arm: Arm
    issued_s: float
    expected_use_s: float
    deadline_s: float
    hold_s: float
    contributions: tuple[tuple[str, float], ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True)
class DesiredWeights:
    """One line of a plan: what a byte of these weights saves, and the order for them if there is one.

    `index` is seconds of waiting that a held byte saves per second (DESIGN: h·C/s); it ranks victims, admits demand loads (bypass) and
    is compared with the price. `rate_per_s` is the row rate. `pinned` weights are loaded, kept and never chosen as victims. `shadow`:
    whether the node would have them now without prefetching, as far as is known.
    """

    key: WeightsKey
    index: float
    rate_per_s: float
    pinned: bool = False
    order: Order | None = None
    shadow: bool | None = None


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """What the `models` of `tenant` (names, or patterns with * and ?) may hold of a node's host memory beyond demand: at most `most_ratio`
    of it, and `most_bytes`; None where that does not bound them."""

    tenant: str
    models: tuple[str, ...]
    most_ratio: float | None = None
    most_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A node's whole desired residency. An agent applies a plan only when (`fence`, `revision`) is above the last one that it applied."""

    node: NodeName
    revision: int
    fence: int
    issued_s: float
    price_per_byte_s: float
    desired: tuple[DesiredWeights, ...] = field(default=())
    prefetch_enabled: bool = True
    quotas: tuple[TenantQuota, ...] = ()

"""The facts that a ledger is made of: what happened to orders, rows, transfers and memory.

`core.residency` states them (in `Record` instructions), `core.ledger` adds them up; nothing else is needed to recompute a ledger. Times
are seconds since 1970-01-01 UTC (`_s`), sizes bytes (`_bytes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from prefetcher.core.types import Cause, DecisionId, ModelName, NodeName, Order, Tier, WeightsKey

__all__ = [
    "STAGE_INTO",
    "Ending",
    "Fact",
    "Found",
    "NodeLost",
    "OrderBegan",
    "OrderEnded",
    "OrderIssued",
    "OrderReady",
    "OrderRedundant",
    "OrderUsed",
    "ResidencyEnded",
    "RowSeen",
    "RowServed",
    "Stage",
    "StageEnded",
    "TransferEnded",
]


class Found(StrEnum):
    """What a row found when it came."""

    READY = "ready"
    MOVING = "moving"
    QUEUED = "queued"
    ABSENT = "absent"


class Ending(StrEnum):
    """Why an order came to its end; with the order's times it decides the outcome."""

    GIVEN_UP = "given_up"  # its hold, its price, a new version, by hand: any reason but displacement
    DISPLACED = "displaced"  # evicted to make room
    REPLACED = "replaced"  # before bytes moved: joined, refused, overtaken by demand, a newer version or a newer plan
    CANCELLED = "cancelled"  # stopped after bytes moved
    FAILED = "failed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class OrderIssued:
    order: Order
    bytes: int


@dataclass(frozen=True, slots=True)
class OrderBegan:
    decision_id: DecisionId
    at_s: float


@dataclass(frozen=True, slots=True)
class OrderReady:
    decision_id: DecisionId
    at_s: float


@dataclass(frozen=True, slots=True)
class OrderUsed:
    """The first row or lease that wanted these weights; also while they move."""

    decision_id: DecisionId
    at_s: float


@dataclass(frozen=True, slots=True)
class OrderEnded:
    """`reason` is a short name (`hold`, `room`, `newer_plan`, …)."""

    decision_id: DecisionId
    at_s: float
    ending: Ending
    reason: str


@dataclass(frozen=True, slots=True)
class OrderRedundant:
    """The shadow (the same policy without prefetching) had, or had not, these weights when they were first used."""

    decision_id: DecisionId
    redundant: bool


@dataclass(frozen=True, slots=True)
class RowSeen:
    """A row (or, with `lease`, a request for a lease) arrived.

    A program that sends its row and then asks for a lease is one use, and its lease `announced`; a lease that no row came before is a row
    as well. `tenant`: for whom it was, where somebody said so.
    """

    model: ModelName
    ts: float
    found: Found
    lease: bool = False
    announced: bool = True
    tenant: str = ""

    @property
    def is_row(self) -> bool:
        return not (self.lease and self.announced)


@dataclass(frozen=True, slots=True)
class RowServed:
    """The weights were there for it after `wait_s`, from its own time on, in `tier` (None where it got none).

    `bypass`: from the tier below; the wait then ends with the time of that link, as known. `dropped`: it was given up (no weights within
    the deadline, the holder died); its wait is what it had waited. `lease`, `announced` and `tenant` as in `RowSeen`.
    """

    model: ModelName
    ts: float
    found: Found
    wait_s: float
    bypass: bool = False
    dropped: bool = False
    lease: bool = False
    announced: bool = True
    tier: Tier | None = None
    tenant: str = ""

    @property
    def is_row(self) -> bool:
        return not (self.lease and self.announced)


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """One uninterrupted segment of a transfer."""

    key: WeightsKey
    from_tier: Tier
    to_tier: Tier
    start_s: float
    end_s: float
    bytes: int
    cause: Cause
    decision_id: DecisionId | None = None


class Stage(StrEnum):
    """The stages of a cold start, from the object store to the first answer."""

    FETCH = "fetch"  # remote to disk
    READ = "read"  # disk to host memory
    COPY = "copy"  # host to device memory
    ENGINE_START = "engine_start"
    WARM_UP = "warm_up"


#: The stage that a transfer into a tier is.
STAGE_INTO = {Tier.DISK: Stage.FETCH, Tier.HOST: Stage.READ, Tier.DEVICE: Stage.COPY}


@dataclass(frozen=True, slots=True)
class StageEnded:
    """One stage of bringing weights near was done at `end_s`, and took `took_s`, pauses left out. A load that failed has none.

    The residency machine tells of transfers; whoever starts engines tells of the others.
    """

    key: WeightsKey
    stage: Stage
    end_s: float
    took_s: float


@dataclass(frozen=True, slots=True)
class ResidencyEnded:
    """Memory of `bytes` was held from `start_s` to `end_s`.

    `ready_s` is None where it never became ready, `last_use_s` (at least `ready_s`) None where it was never used.
    """

    key: WeightsKey
    tier: Tier
    cause: Cause
    start_s: float
    ready_s: float | None
    last_use_s: float | None
    end_s: float
    bytes: int
    decision_id: DecisionId | None = None


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The node is gone, and every order that was open on it."""

    node: NodeName
    at_s: float


Fact = (
    OrderIssued
    | OrderBegan
    | OrderReady
    | OrderUsed
    | OrderEnded
    | OrderRedundant
    | RowSeen
    | RowServed
    | TransferEnded
    | StageEnded
    | ResidencyEnded
    | NodeLost
)

"""What an agent says about its node: the report that planning and people read, and the measured load of its link."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from prefetcher.agent.fetching import Fetches
from prefetcher.agent.hostmem import HostArena
from prefetcher.agent.moves import Moves
from prefetcher.agent.uses import Unknown
from prefetcher.controller.records import HeldWeights, KnownWeights, Memory, NodeReport, QueuedWeights
from prefetcher.core.admission import under_cap
from prefetcher.core.copies import Holdings, Stage, Weights
from prefetcher.core.facts import TransferEnded
from prefetcher.core.quotas import CAPPED
from prefetcher.core.residency import ResidencyMachine
from prefetcher.core.types import ModelName, Tier, WeightsKey
from prefetcher.errors import InputError

__all__ = ["LinkMeter", "make_report", "queued_of"]

#: Link use is measured over about ten minutes; waits and speed over about fifty loads, as the decision's trial did.
_BUSY_TAU_S = 600.0
_LOAD_WEIGHT = 0.02
#: Models that are named of those that a node is asked for and doesn't have.
_UNKNOWN_NAMED = 20
#: The speed of a link shows in loads of this size and more; smaller ones measure the start of threads.
_SPEED_BYTES = 4 << 20


class _Measured(msgspec.Struct):
    bytes_per_s: float
    recent_wait_s: float
    waiting_rows: float
    busy_s: float
    at_s: float
    measured: int
    others: dict[ModelName, float]
    loads: dict[ModelName, float]


class LinkMeter:
    """Moving figures of the disk-to-host link, as the node without bytes has them (`core.node_steps`). Times in the clock's seconds.

    `recent_wait_s` and `waiting_rows` are means over demand loads: how long a load had waited for its turn, and how many rows waited then,
    its own among them. By model, `others` counts the rows that waited for other weights at the turns of its `loads`.
    """

    def __init__(self, bytes_per_s: float, now_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.recent_wait_s = 0.0
        self.waiting_rows = 0.0
        self.others: dict[ModelName, float] = {}
        self.loads: dict[ModelName, float] = {}
        self._busy_s = 0.0
        self._at_s = now_s
        self._measured = 0

    def starting(self, weights: Weights, holdings: Holdings, now_s: float) -> None:
        """A load gets the link, and did not have it before for who waits. Prefetches say nothing about waiting."""
        if not weights.demanded:
            return
        waiting = sum(w.waiting for w in holdings.weights.values() if w.demanded)
        model = weights.key.model
        self.recent_wait_s += _LOAD_WEIGHT * (now_s - weights.demanded_since_s - self.recent_wait_s)
        self.waiting_rows += _LOAD_WEIGHT * (waiting - self.waiting_rows)
        self.others[model] = self.others.get(model, 0.0) + waiting - weights.waiting
        self.loads[model] = self.loads.get(model, 0.0) + 1.0

    def moved(self, fact: TransferEnded) -> None:
        took_s = fact.end_s - fact.start_s
        self._busy_s = self._busy(fact.end_s) * _BUSY_TAU_S + took_s
        self._at_s = max(self._at_s, fact.end_s)
        if fact.bytes >= _SPEED_BYTES and took_s > 0.0:
            self._measured += 1
            weight = max(1.0 / self._measured, _LOAD_WEIGHT)
            self.bytes_per_s += weight * (fact.bytes / took_s - self.bytes_per_s)

    def _busy(self, now_s: float) -> float:
        return self._busy_s * math.exp(-max(0.0, now_s - self._at_s) / _BUSY_TAU_S) / _BUSY_TAU_S

    def busy_ratio(self, now_s: float) -> float:
        return min(1.0, self._busy(now_s))

    def snapshot(self) -> dict[str, Any]:
        """Everything that was measured; JSON types only."""
        built: dict[str, Any] = msgspec.to_builtins(
            _Measured(
                self.bytes_per_s,
                self.recent_wait_s,
                self.waiting_rows,
                self._busy_s,
                self._at_s,
                self._measured,
                self.others,
                self.loads,
            )
        )
        return built

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Goes on from a snapshot. Raises InputError."""
        try:
            found = msgspec.convert(snapshot, _Measured)
        except msgspec.ValidationError as exc:
            raise InputError(f"not what was measured of a link: {exc}") from exc
        self.bytes_per_s, self.recent_wait_s, self.waiting_rows = found.bytes_per_s, found.recent_wait_s, found.waiting_rows
        self._busy_s, self._at_s, self._measured = found.busy_s, found.at_s, found.measured
        self.others, self.loads = found.others, found.loads


def make_report(
    machine: ResidencyMachine,
    meter: LinkMeter,
    arena: HostArena,
    moves: Moves,
    now_s: float,
    problems: Sequence[str],
    left: Mapping[ModelName, str],
    unknown: Unknown,
    group: str = "",
    store: tuple[float, Fetches] | None = None,
) -> NodeReport:
    """The node as it is at `now_s`. `left`: why models were evicted or bypassed last; `store`: its speed in bytes a second, and fetches."""
    holdings = machine.holdings
    usage = arena.usage()
    held: list[HeldWeights] = []
    for tier in (Tier.HOST, Tier.DEVICE):
        for key, copy in sorted(holdings.in_tier[tier].items()):
            weights = holdings.weights[key]
            order = copy.order
            done = weights.bytes if copy.stage is Stage.READY else max(copy.bytes_done, moves.done_bytes(key))
            held.append(
                HeldWeights(
                    model=key.model,
                    version=key.version,
                    tier=tier.name.lower(),
                    state=copy.stage.value,
                    bytes=weights.bytes,
                    bytes_done=done,
                    cause=copy.cause.value,
                    decision_id="" if order is None or copy.used else order.decision_id,
                    since_s=copy.ready_s if copy.ready_s is not None else copy.start_s,
                    last_use_s=copy.last_use_s,
                    leases=sum(copy.leases.values()),
                    pinned=weights.pinned,
                    contributions=() if order is None else order.contributions,
                )
            )
    serving = set(holdings.serving.values())
    known = tuple(
        KnownWeights(
            key.model,
            key.version,
            weights.bytes,
            weights.bytes / meter.bytes_per_s + _fetch_s(weights, store),
            meter.others.get(key.model, 0.0),
            meter.loads.get(key.model, 0.0),
            weights.last_use_s or None,
            _why_absent(machine, weights, left, now_s, None if store is None else store[1]),
            weights.pinned,
            "disk" if weights.ready(Tier.DISK) else "remote",
            _fetched_bytes(machine, weights, store),
        )
        for key, weights in sorted(holdings.weights.items())
        if key in serving and (weights.ready(Tier.DISK) or weights.ready(Tier.REMOTE))
    )
    locked = usage.published_bytes > 0 and usage.locked_bytes >= usage.published_bytes
    return NodeReport(
        node=machine.node,
        at_s=now_s,
        memory=Memory(
            usage.budget_bytes,
            usage.taken_bytes,
            locked,
            arena.kind,
            arena.lock_warning or "",
            machine.limits.reserve_bytes.get(Tier.HOST, 0),
        ),
        link_bytes_per_s=meter.bytes_per_s,
        group=group,
        recent_wait_s=meter.recent_wait_s,
        waiting_rows=meter.waiting_rows,
        busy_ratio=meter.busy_ratio(now_s),
        observe=machine.holdings.observing,
        prefetching=not machine.plans.switched_off,
        parts=machine.holdings.keeps_parts(Tier.HOST),
        fence=machine.plans.fence,
        revision=machine.plans.revision,
        held=tuple(held),
        known=known,
        problems=tuple(problems),
        unknown_rows=unknown.rows,
        unknown=unknown.most(_UNKNOWN_NAMED),
        queued=queued_of(machine, meter.bytes_per_s, moves.done_bytes, lambda weights: _fetch_s(weights, store)),
    )


def _fetch_s(weights: Weights, store: tuple[float, Fetches] | None) -> float:
    """How long the store takes for what is not on disk of the weights."""
    if store is None or weights.ready(Tier.DISK):
        return 0.0
    return max(0, weights.bytes - store[1].done_bytes(weights.key)) / max(1.0, store[0])


def _fetched_bytes(machine: ResidencyMachine, weights: Weights, store: tuple[float, Fetches] | None) -> int | None:
    if store is None or machine.holdings.mover.get(Tier.DISK) != weights.key:
        return None
    return store[1].done_bytes(weights.key)


def queued_of(
    machine: ResidencyMachine,
    bytes_per_s: float,
    done_bytes: Callable[[WeightsKey], int],
    fetch_s: Callable[[Weights], float] = lambda weights: 0.0,
) -> tuple[QueuedWeights, ...]:
    """What rows and programs wait for at a node, and how long that takes the link into the serving tier. `done_bytes`: of running loads;
    `fetch_s`: how long the links below take before."""
    tier = machine.limits.serving_tier
    found = []
    for key, weights in sorted(machine.holdings.weights.items()):
        if weights.demanded:
            left = min(weights.remaining_bytes(tier), weights.bytes - done_bytes(key)) + fetch_s(weights) * bytes_per_s
            stages = {copy.stage for copy in weights.copies.values()}
            link = Tier(min((weights.highest_ready() or Tier.REMOTE) + 1, tier))
            other = machine.holdings.mover.get(link)
            found.append(
                QueuedWeights(
                    key.model,
                    round(left / max(1.0, bytes_per_s), 3),
                    weights.waiting,
                    moving=machine.holdings.mover.get(tier) == key,
                    since_s=weights.demanded_since_s,
                    paused=Stage.PAUSED in stages,
                    behind="" if other is None or other == key else other.model,
                )
            )
    return tuple(found)


def _why_absent(
    machine: ResidencyMachine, weights: Weights, left: Mapping[ModelName, str], now_s: float, fetches: Fetches | None = None
) -> str:
    """Why weights are not in memory, as a short name; '' where they are, or nothing is known but that nobody asked."""
    holdings = machine.holdings
    if Tier.HOST in weights.copies and not weights.part_bytes(Tier.HOST):
        return ""
    if machine.holdings.observing:
        return "observe"
    fetching = "" if fetches is None or weights.ready(Tier.DISK) else fetches.why(weights.key)[0]
    if fetching and (weights.retry_at_s > now_s or Tier.DISK in weights.copies):
        return fetching
    why = machine.plans.why_never(weights, Tier.HOST, prefetch=False)
    if why or weights.retry_at_s > now_s:
        return why or "load_failed"
    capped = not under_cap(holdings, weights, now_s, guess=True)[1]
    return CAPPED if capped else left.get(weights.key.model, "")

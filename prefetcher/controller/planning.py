"""One node's plan: what every byte saves there, and which prefetches are worth starting. Pure.

The rules are the core's (`core.value`, `core.planner`); here they meet what an agent reported. Covers neither when to plan nor who is told
(`controller.controller`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from prefetcher.controller.learner import NextUse
from prefetcher.controller.records import HeldWeights, NodeReport
from prefetcher.core.planner import choose_victims, outbids
from prefetcher.core.types import (
    HORIZONS_S,
    Arm,
    Cause,
    DecisionId,
    DesiredWeights,
    ModelName,
    ModelVersion,
    NodeName,
    Order,
    Plan,
    Tier,
    WeightsKey,
)
from prefetcher.core.value import index_per_byte, load_discount, mean_load_s, miss_cost_s, price_per_byte_s

__all__ = ["Given", "PastOrder", "Planned", "make_plan"]

#: How many times what it displaces a prefetch must be worth: a guess against a known use.
MARGIN = 1.6
#: Link use over the last ten minutes above which nothing is prefetched.
BUSY_RATIO = 0.6
#: A prefetch that went unused comes back only for a row of its model, or for a score this many times its last one.
SECOND_CHANCE = 2.0
#: Candidates tried when the best ones do not outbid their victims.
CANDIDATES = 4


@dataclass(slots=True)
class PastOrder:
    """The last order for a model on a node: the order, its score, whether it is over, and whether it went unused."""

    order: Order
    score: float
    ended: bool = False
    unused: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """What a plan is made from besides the node's report and the forecasts."""

    now_s: float
    revision: int
    fence: int
    price_s_per_gb_h: float
    hold_s: float
    tick_s: float
    arm: Arm
    prefetching: bool
    pinned: frozenset[str]
    past: Mapping[str, PastOrder]
    last_row_s: Callable[[str], float]
    new_id: Callable[[], DecisionId]


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, the orders that are new in it with their scores, and why nothing else is.

    Orders of the control group are in it too: the node records and refuses them.
    """

    plan: Plan
    new: tuple[tuple[Order, float], ...] = ()
    skipped: dict[str, int] = field(default_factory=dict)


def make_plan(report: NodeReport, next_use: NextUse, given: Given) -> Planned:
    """The plan of one node. `next_use.models` are the models of `report.known`, in that order."""
    known = report.known
    price = price_per_byte_s(given.price_s_per_gb_h)
    link_s = np.array([max(k.load_s, 1e-6) for k in known])
    sizes = np.array([float(k.bytes) for k in known])
    index = np.zeros(len(known))
    for i in range(len(known)):
        cost_s = miss_cost_s(link_s[i], report.recent_wait_s, next_use.rows_per_s[i], report.waiting_rows)
        index[i] = index_per_byte(next_use.per_s[i], cost_s, max(sizes[i], 1.0))
    held = {h.model: h for h in report.held if h.tier == Tier.HOST.name.lower()}
    chooser = _Chooser(report, next_use, given, index, sizes, link_s, held, price)
    carried = chooser.carried()
    new = chooser.choose(len(carried))
    order_of = {str(order.key.model): order for order, _ in new} | {str(order.key.model): order for order in carried}
    desired = tuple(
        DesiredWeights(
            key=WeightsKey(ModelName(k.model), ModelVersion(k.version)),
            index=float(index[i]),
            rate_per_s=float(next_use.rows_per_s[i]),
            pinned=k.model in given.pinned,
            order=order_of.get(k.model),
        )
        for i, k in sorted(enumerate(known), key=lambda pair: -index[pair[0]])
        # Of a model without a row the log knows nothing; the node ranks it by its own last use.
        if next_use.per_s[i] > 0.0 or k.model in given.pinned
    )
    plan = Plan(
        node=NodeName(report.node),
        revision=given.revision,
        fence=given.fence,
        issued_s=given.now_s,
        price_per_byte_s=price,
        desired=desired,
        prefetch_enabled=given.prefetching,
    )
    return Planned(plan, tuple(new), chooser.skipped)


class _Chooser:
    """Greedy choice of prefetches under the node's bytes and link."""

    def __init__(
        self,
        report: NodeReport,
        next_use: NextUse,
        given: Given,
        index: np.ndarray,
        sizes: np.ndarray,
        link_s: np.ndarray,
        held: dict[str, HeldWeights],
        price: float,
    ) -> None:
        self._report = report
        self._next_use = next_use
        self._given = given
        self._index = index
        self._sizes = sizes
        self._link_s = link_s
        self._held = held
        self._price = price
        self.skipped: dict[str, int] = {}
        #: What carried orders that have not begun will take.
        self._promised_bytes = 0.0
        self._promised_s = 0.0

    def carried(self) -> list[Order]:
        """Orders of earlier plans that go on: still on their way, or waiting for the link within their deadline."""
        if not self._given.prefetching:
            return []
        carried = []
        for i, known in enumerate(self._report.known):
            past = self._given.past.get(known.model)
            if past is None or past.ended or past.order.key.version != known.version:
                continue
            held = self._held.get(known.model)
            on_its_way = held is not None and held.decision_id == past.order.decision_id
            waiting = held is None and self._given.now_s < past.order.deadline_s and self._index[i] >= self._price
            if on_its_way or waiting:
                carried.append(past.order)
            if waiting:
                self._promised_bytes += float(self._sizes[i])
                self._promised_s += float(self._link_s[i])
        return carried

    def _skip(self, reason: str, count: int = 1) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + count

    def _candidates(self, open_models: Iterable[str]) -> list[tuple[float, int]]:
        """(score, number) of models that could be fetched, best first."""
        given = self._given
        taken = set(open_models)
        found: list[tuple[float, int]] = []
        for i, known in enumerate(self._report.known):
            if known.model in self._held or known.model in taken or known.model in given.pinned:
                continue
            rate = float(self._next_use.per_s[i])
            if rate <= 0.0:
                continue
            if known.bytes > self._report.memory.budget_bytes:
                self._skip("does_not_fit")
                continue
            if self._index[i] < self._price:
                self._skip("below_price")
                continue
            score = float(self._index[i]) * load_discount(rate, float(self._link_s[i]))
            past = given.past.get(known.model)
            stale = past is not None and past.unused and given.last_row_s(known.model) < past.order.issued_s
            if past is not None and stale and score < SECOND_CHANCE * past.score:
                self._skip("went_unused_before")
                continue
            found.append((score, i))
        found.sort(key=lambda pair: (-pair[0], pair[1]))
        return found

    def choose(self, open_orders: int) -> list[tuple[Order, float]]:
        """New orders with their scores."""
        given, report = self._given, self._report
        if not given.prefetching:
            self._skip("switched_off")
            return []
        if report.busy_ratio >= BUSY_RATIO:
            self._skip("link_busy")
            return []
        candidates = self._candidates(
            past.order.key.model for past in given.past.values() if not past.ended and past.order.deadline_s > given.now_s
        )
        free = float(report.memory.budget_bytes - report.memory.taken_bytes) - self._promised_bytes
        link_left_s = given.tick_s * (1.0 - report.busy_ratio) - self._promised_s
        stays = np.array(
            [
                i
                for i, k in enumerate(report.known)
                if (h := self._held.get(k.model)) and h.state == "ready" and not h.leases and not h.pinned and not h.decision_id
            ],
            np.int64,
        )
        new: list[tuple[Order, float]] = []
        refused = 0
        for score, i in candidates:
            if refused >= CANDIDATES:
                break
            # One transfer always fits: a load longer than a tick must be possible.
            if self._link_s[i] > link_left_s and (new or open_orders):
                self._skip("link_budget")
                break
            need = self._sizes[i] - free
            below = stays[self._index[stays] < score] if len(stays) else stays
            victims, enough = choose_victims(self._index, self._sizes, below, float(need))
            if not enough:
                self._skip("no_room")
                refused += 1
                continue
            if not outbids(score / MARGIN, float(self._sizes[i]), self._index, self._sizes, victims):
                self._skip("victims_worth_more")
                refused += 1
                continue
            new.append((self._order(i), score))
            free += float(self._sizes[victims].sum()) - float(self._sizes[i])
            stays = stays[~np.isin(stays, victims)]
            link_left_s -= float(self._link_s[i])
        return new

    def _order(self, i: int) -> Order:
        given, known = self._given, self._report.known[i]
        rate = float(self._next_use.per_s[i])
        load_s = mean_load_s(float(self._link_s[i]), self._report.recent_wait_s)
        expected_s = given.now_s + min(1.0 / rate, HORIZONS_S[-1])
        return Order(
            decision_id=given.new_id(),
            node=NodeName(self._report.node),
            key=WeightsKey(ModelName(known.model), ModelVersion(known.version)),
            tier=Tier.HOST,
            cause=Cause.FORECAST,
            arm=given.arm,
            issued_s=given.now_s,
            expected_use_s=expected_s,
            # It must begin within its hold, and a link that is free needs no longer than a few loads to get to it.
            deadline_s=given.now_s + max(given.hold_s, 4.0 * load_s),
            hold_s=given.hold_s,
            contributions=self._next_use.contributions(i),
        )

"""One node's plan: what every byte saves there, and which prefetches are worth starting. Pure.

The rules are the core's (`core.value`, `core.planner`); here they meet what an agent reported. Covers neither when to plan nor who is told
(`controller.controller`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.controller.records import NodeReport
from prefetcher.core.hints import Expected
from prefetcher.core.planner import choose_parts, choose_victims, outbids
from prefetcher.core.quotas import CAPPED, Quotas, gives_up
from prefetcher.core.ranking import WAITING_PRIOR_LOADS
from prefetcher.core.schedules import Needs
from prefetcher.core.shadow_caches import Outlook
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
from prefetcher.core.value import (
    LEAST_CHANCE,
    MOST_HOLDS,
    beyond_hints,
    head_start,
    index_per_byte,
    load_discount,
    may_start,
    mean_load_s,
    miss_cost_s,
    price_per_byte_s,
)
from prefetcher.core.windows import NO_LEAD_LIMIT_S, WindowTable

__all__ = ["Given", "PastOrder", "Planned", "Worth", "make_plan", "worth_of"]

Floats = npt.NDArray[np.float64]

#: A prefetch that went unused comes back only for a row of its model, or for a score this many times its last one.
SECOND_CHANCE = 2.0
#: The index of what batch held and has no need of any more: it goes whatever a held byte costs.
RELEASED = -1.0
#: States of weights that are on their way into memory.
_MOVING = frozenset({"moving", "pausing", "paused"})
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
    expected: Mapping[str, Expected] = field(default_factory=dict)
    #: How far hints announce a model's uses (`core.announced`): the share of them, and the seconds before.
    announced: Callable[[str], tuple[float, float]] = lambda _model: (0.0, 0.0)
    #: What a model's learned forecast is made of, with shares; empty where nobody can say.
    why: Callable[[str], tuple[tuple[str, float], ...]] = lambda _model: ()
    #: What batch schedules need; their models are in `expected` too.
    batch: Needs = field(default_factory=Needs)
    #: Each model's window, in the report's order; None where none has one of its own: `hold_s` then bounds all, and nothing else does.
    windows: WindowTable | None = None
    #: What tenants may hold of a node beyond demand.
    quotas: Quotas = field(default_factory=Quotas)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, the orders that are new in it with their scores, and why nothing else is.

    Orders of the control group are in it too: the node records and refuses them.
    """

    plan: Plan
    new: tuple[tuple[Order, float], ...] = ()
    skipped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Worth:
    """What a held byte of each model of a report saves, seconds of waiting per second: float64[k] each, in the report's order.

    `keep` ranks what is held and what asks to come in; `fetch` ranks prefetches, None when the deciding expert does not prefetch, with
    `fetch_per_s`, the rate of next use behind it. `hint_per_s` is the rate that hints alone speak of, 0 without one. `rows_per_s` are row
    rates, `shadow` what a node without prefetching would hold.
    """

    keep: Floats
    fetch: Floats | None
    fetch_per_s: Floats
    hint_per_s: Floats
    rows_per_s: Floats
    shadow: npt.NDArray[np.bool_]


def worth_of(
    report: NodeReport,
    outlook: Outlook,
    numbers: npt.NDArray[np.int64],
    shadow: npt.NDArray[np.bool_],
    expected: Mapping[str, Expected] | None = None,
) -> Worth:
    """What the bytes of the report's models are worth. `numbers` int64[k] are theirs in the outlook, −1 for one never used.

    A hint is taken at its word where it says more than the deciding expert: the larger rate counts, for keeping and for fetching.
    """
    count = len(report.known)
    seen = numbers >= 0

    def of(values: npt.NDArray[Any]) -> Floats:
        out = np.zeros(count)
        out[seen] = values[numbers[seen]]
        return out

    keep_per_s, rows_per_s = of(outlook.keep_per_s), of(outlook.joiners_per_s)
    fetch_per_s = np.zeros(count) if outlook.prefetch_per_s is None else of(outlook.prefetch_per_s)
    hint_per_s = np.zeros(count)
    if expected:
        hint_per_s[:] = [said.per_s if (said := expected.get(k.model)) else 0.0 for k in report.known]
        keep_per_s, fetch_per_s = np.maximum(keep_per_s, hint_per_s), np.maximum(fetch_per_s, hint_per_s)
    keep, fetch = np.zeros(count), np.zeros(count)
    node_waiting = report.waiting_rows
    for i, known in enumerate(report.known):
        link_s, size = max(known.load_s, 1e-6), max(float(known.bytes), 1.0)
        own_waiting = (known.others + WAITING_PRIOR_LOADS * node_waiting) / (known.loads + WAITING_PRIOR_LOADS)
        keep[i] = index_per_byte(keep_per_s[i], miss_cost_s(link_s, report.recent_wait_s, rows_per_s[i], own_waiting), size)
        fetch[i] = index_per_byte(fetch_per_s[i], miss_cost_s(link_s, report.recent_wait_s, rows_per_s[i], node_waiting), size)
    fetches = outlook.prefetch_per_s is not None
    return Worth(keep, fetch if fetches else None, fetch_per_s, hint_per_s, rows_per_s, of(shadow).astype(np.bool_))


def make_plan(report: NodeReport, outlook: Outlook, worth: Worth, given: Given) -> Planned:
    """The plan of one node. Switched off, it says nothing about worth: the node loads on demand and keeps what was used last."""
    known = report.known
    price = price_per_byte_s(given.price_s_per_gb_h)
    chooser = _Chooser(report, outlook, worth, given, price)
    carried = chooser.carried()
    new = chooser.choose(len(carried))
    released = {h.model for h in report.held if h.cause == Cause.BATCH.value} - set(given.batch.models) - given.pinned
    order_of = {str(order.key.model): order for order, _ in new} | {str(order.key.model): order for order in carried}
    desired = tuple(
        DesiredWeights(
            key=WeightsKey(ModelName(k.model), ModelVersion(k.version)),
            index=RELEASED if k.model in released else float(worth.keep[i]),
            rate_per_s=float(worth.rows_per_s[i]),
            pinned=k.model in given.pinned,
            order=order_of.get(k.model),
            shadow=bool(worth.shadow[i]),
        )
        for i, k in sorted(enumerate(known), key=lambda pair: -worth.keep[pair[0]])
        # Of a model without a row the log knows nothing; the node ranks it by its own last use.
        if (worth.keep[i] > 0.0 and given.prefetching) or k.model in given.pinned or k.model in released
    )
    plan = Plan(
        node=NodeName(report.node),
        revision=given.revision,
        fence=given.fence,
        issued_s=given.now_s,
        price_per_byte_s=price,
        desired=desired,
        prefetch_enabled=given.prefetching,
        quotas=given.quotas.quotas,
    )
    return Planned(plan, tuple(new), chooser.skipped)


class _Chooser:
    """Greedy choice of prefetches under the node's bytes and link."""

    def __init__(self, report: NodeReport, outlook: Outlook, worth: Worth, given: Given, price: float) -> None:
        self._report = report
        self._outlook = outlook
        self._worth = worth
        self._given = given
        self._price = price
        self._sizes = np.array([float(k.bytes) for k in report.known])
        self._link_s = np.array([max(k.load_s, 1e-6) for k in report.known])
        self._index = worth.keep if worth.fetch is None else worth.fetch
        count, windows = len(report.known), given.windows
        self._hold_s = np.full(count, given.hold_s) if windows is None else windows.hold_s
        lead_s = np.full(count, np.inf) if windows is None else windows.lead_s
        self._lead_s = np.where(lead_s >= NO_LEAD_LIMIT_S, np.inf, lead_s)
        held = [h for h in report.held if h.tier == Tier.HOST.name.lower()]
        self._held = {h.model: h for h in held if not h.is_part}
        parts = {h.model: h.bytes_done for h in held if h.is_part}
        #: What is there of models that made room, but for these bytes: so much less has to come.
        self._parts = np.array([float(parts.get(k.model, 0)) for k in report.known])
        self._link_s *= 1.0 - self._parts / np.maximum(self._sizes, 1.0)
        self.skipped: dict[str, int] = {}
        #: What each tenant holds beyond demand, and which of that are prefetches that nobody used yet and may leave.
        self._claimed: dict[str, float] = {}
        self._may_go: dict[str, list[int]] = {}
        #: What carried orders that have not begun will take.
        self._promised_bytes = 0.0
        self._promised_s = 0.0

    def carried(self) -> list[Order]:
        """Orders of earlier plans that go on: still on their way, or waiting for the link within their deadline."""
        if not self._given.prefetching:
            return []
        fetches = self._worth.fetch is not None
        carried = []
        for i, known in enumerate(self._report.known):
            past = self._given.past.get(known.model)
            if past is None or past.ended or past.order.key.version != known.version:
                continue
            if past.order.cause is Cause.BATCH and known.model not in self._given.batch.models:
                continue
            held = self._held.get(known.model)
            on_its_way = held is not None and held.decision_id == past.order.decision_id
            # What waits for the link since a treated hour may not begin in a control hour: it ends there, in the wash-out.
            may = self._is_of_this_arm(past.order) and (fetches or self._worth.hint_per_s[i] > 0.0)
            waiting = may and held is None and self._given.now_s < past.order.deadline_s and self._index[i] >= self._price
            if on_its_way and held is not None and held.state == "ready":
                carried.append(self._staying(i, past))
            elif on_its_way or waiting:
                carried.append(past.order)
            if waiting:
                self._promised_bytes += float(self._sizes[i] - self._parts[i])
                self._claim(i)
                self._promised_s += float(self._link_s[i])
        return carried

    def _is_of_this_arm(self, order: Order) -> bool:
        return order.cause is Cause.BATCH or order.arm is self._given.arm

    def _staying(self, i: int, past: PastOrder) -> Order:
        """The order of what is there and unused: its hold lasts to the tick after the next while its score is still good, and
        not for ever."""
        given, order = self._given, past.order
        score = self._forecast_score(i)
        good = self._worth.fetch is not None and score >= self._outlook.policy.stays_at * past.score
        # In a control hour nothing of a treated one stays for longer than its hold, which is as long as the wash-out.
        if order.cause is not Cause.FORECAST or not good or given.arm is Arm.CONTROL:
            return order
        until_s = min(given.now_s + 2.0 * given.tick_s - order.issued_s, MOST_HOLDS * float(self._hold_s[i]))
        return replace(order, hold_s=max(order.hold_s, until_s))

    def _forecast_score(self, i: int) -> float:
        """What a prefetch by forecast is worth per byte, but for what hints will bring in time."""
        discount = load_discount(float(self._worth.fetch_per_s[i]), float(self._link_s[i]))
        return float(self._index[i]) * discount * self._beyond_hints(i)

    def _beyond_hints(self, i: int) -> float:
        return beyond_hints(*self._given.announced(self._report.known[i].model), float(self._link_s[i]))

    def _skip(self, reason: str, count: int = 1) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + count

    def _count_claims(self) -> None:
        """What tenants hold beyond demand, as the node reports it."""
        if not self._given.quotas.quotas:
            return
        for i, known in enumerate(self._report.known):
            held = self._held.get(known.model)
            guess = held is not None and bool(held.decision_id)
            coming = held is not None and held.state in _MOVING and held.cause != Cause.DEMAND.value
            if known.pinned or guess or coming or (held is not None and held.leases):
                self._claim(i, may_go=guess and held is not None and held.state == "ready" and not (held.leases or known.pinned))

    def _claim(self, i: int, *, may_go: bool = False) -> None:
        quota = self._given.quotas.of(self._report.known[i].model)
        if quota is not None:
            self._claimed[quota.tenant] = self._claimed.get(quota.tenant, 0.0) + float(self._sizes[i])
            if may_go:
                self._may_go.setdefault(quota.tenant, []).append(i)

    def _under_cap(self, i: int, score: float) -> npt.NDArray[np.int64] | None:
        """What the tenant of a candidate gives up for it, none where it need not; None where that does not suffice."""
        quota = self._given.quotas.of(self._report.known[i].model)
        if quota is None:
            return np.empty(0, np.int64)
        own = np.array(self._may_go.get(quota.tenant, []), np.int64)
        cap = self._given.quotas.cap_bytes(quota, float(self._report.memory.budget_bytes))
        claimed = self._claimed.get(quota.tenant, 0.0)
        chosen, enough = gives_up(cap, claimed, float(self._sizes[i]), score, self._index[own], self._sizes[own])
        return own[chosen] if enough else None

    def _give_up(self, victims: npt.NDArray[np.int64]) -> None:
        for v in victims.tolist():
            quota = self._given.quotas.of(self._report.known[v].model)
            assert quota is not None
            self._claimed[quota.tenant] -= float(self._sizes[v])
            self._may_go[quota.tenant].remove(v)

    def _said(self, i: int) -> Expected | None:
        """What hints and schedules say of a model, where they say more than the forecast, or than what hints leave of it."""
        model, hint_per_s = self._report.known[i].model, self._worth.hint_per_s[i]
        more = hint_per_s > 0.0 and hint_per_s >= self._worth.fetch_per_s[i] * self._beyond_hints(i)
        return self._given.expected.get(model) if more or model in self._given.batch.models else None

    def _candidates(self, open_models: Iterable[str], hinted_only: bool) -> list[tuple[float, int]]:
        """(score, number) of models that could be fetched, best first."""
        given = self._given
        taken = set(open_models)
        found: list[tuple[float, int]] = []
        for i, known in enumerate(self._report.known):
            if known.model in self._held or known.model in taken or known.model in given.pinned:
                continue
            rate, hinted = float(self._worth.fetch_per_s[i]), self._worth.hint_per_s[i] > 0.0
            if rate <= 0.0 or (hinted_only and not hinted):
                continue
            if not hinted and given.last_row_s(known.model) <= given.batch.ended.get(known.model, -np.inf):
                self._skip("batch_ended")
                continue
            if known.bytes > self._report.memory.budget_bytes - self._report.memory.reserve_bytes:
                self._skip("does_not_fit")
                continue
            if self._index[i] < self._price:
                self._skip("below_price")
                continue
            if not hinted and not may_start(rate, float(self._link_s[i]), self._report.recent_wait_s, float(self._lead_s[i])):
                self._skip("too_early")
                continue
            link_s, said = float(self._link_s[i]), self._said(i)
            if said is None:
                score = self._forecast_score(i)
                if score <= 0.0:
                    self._skip("left_to_hints")
                    continue
            else:
                # The index is of the larger rate, which need not be the hint's.
                by_hint = 1.0 if known.model in given.batch.models else float(self._worth.hint_per_s[i]) / rate
                score = float(self._index[i]) * by_hint * head_start(said.at_s, said.end_s, given.now_s, link_s)
            past = given.past.get(known.model)
            stale = past is not None and past.unused and given.last_row_s(known.model) < past.order.issued_s
            if past is not None and stale and not hinted and score < SECOND_CHANCE * past.score:
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
        if self._worth.fetch is None and not self._worth.hint_per_s.any():
            self._skip("expert_without_prefetch")
            return []
        margin = self._outlook.policy.margin
        busy = report.busy_ratio >= self._outlook.policy.busy_ratio
        if busy:
            self._skip("link_busy")
            # What is hinted is as good as asked for, and a batch job begins at its time, however busy the link is; requests go first there
            # all the same.
            if not self._worth.hint_per_s.any():
                return []
        candidates = self._candidates(
            (
                past.order.key.model
                for past in given.past.values()
                if not past.ended and past.order.deadline_s > given.now_s and self._is_of_this_arm(past.order)
            ),
            hinted_only=busy or self._worth.fetch is None,
        )
        free = float(report.memory.budget_bytes - report.memory.reserve_bytes - report.memory.taken_bytes) - self._promised_bytes
        self._count_claims()
        link_left_s = given.tick_s * (1.0 - report.busy_ratio) - self._promised_s
        stays = np.array(
            [
                i
                for i, k in enumerate(report.known)
                if ((h := self._held.get(k.model)) and h.state == "ready" and not h.leases and not h.pinned and not h.decision_id)
                or (self._parts[i] > 0.0 and not k.pinned)
            ],
            np.int64,
        )
        takes = np.where(self._parts > 0.0, self._parts, self._sizes)
        new: list[tuple[Order, float]] = []
        refused = 0
        for score, i in candidates:
            if refused >= CANDIDATES:
                break
            # One transfer always fits: a load longer than a tick must be possible.
            said = self._said(i)
            if self._link_s[i] > link_left_s and (new or open_orders) and said is None:
                self._skip("link_budget")
                break
            given_up = self._under_cap(i, score)
            if given_up is None:
                self._skip(CAPPED)
                continue
            size = float(self._sizes[i] - self._parts[i])
            need = size - free - float(self._sizes[given_up].sum())
            below = stays[(self._index[stays] < score) & (stays != i)] if len(stays) else stays
            kept = 0.0
            if report.parts:
                victims, enough, kept = choose_parts(self._index, takes, below, need)
            else:
                victims, enough = choose_victims(self._index, takes, below, need)
            if not enough:
                self._skip("no_room")
                refused += 1
                continue
            if said is not None and len(victims) and said.probability < LEAST_CHANCE:
                self._skip("hint_unlikely")
                continue
            highest = float(self._index[victims].max()) if len(victims) else 0.0
            bids = outbids(score / margin, float(self._sizes[i]), self._index, takes, victims, kept)
            if not bids or (len(victims) and score <= margin * highest):
                self._skip("victims_worth_more")
                refused += 1
                continue
            new.append((self._order(i), score))
            self._give_up(given_up)
            self._claim(i)
            free += float(takes[victims].sum()) - kept + float(self._sizes[given_up].sum()) - size
            stays = stays[~np.isin(stays, [*victims, i])]
            link_left_s -= float(self._link_s[i])
        return new

    def _order(self, i: int) -> Order:
        given, known = self._given, self._report.known[i]
        rate = float(self._worth.fetch_per_s[i])
        load_s = mean_load_s(float(self._link_s[i]), self._report.recent_wait_s)
        said = self._said(i)
        if said is not None:
            expected_s, hold_s = said.at_s, said.until_s - given.now_s
        else:
            expected_s, hold_s = given.now_s + min(1.0 / rate, HORIZONS_S[-1]), float(self._hold_s[i])
        cause = Cause.FORECAST if said is None else Cause.BATCH if known.model in given.batch.models else Cause.HINT
        return Order(
            decision_id=given.new_id(),
            node=NodeName(self._report.node),
            key=WeightsKey(ModelName(known.model), ModelVersion(known.version)),
            tier=Tier.HOST,
            cause=cause,
            # What people schedule is no part of the experiment.
            arm=Arm.TREATED if cause is Cause.BATCH else given.arm,
            issued_s=given.now_s,
            expected_use_s=expected_s,
            # It must begin within its hold, and a link that is free needs no longer than a few loads to get to it.
            deadline_s=given.now_s + max(hold_s, 4.0 * load_s),
            hold_s=hold_s,
            contributions=_made_of(self._outlook.parts, given.why(known.model)) if said is None else ((cause.value, 1.0),),
            source="" if said is None else said.source,
        )


def _made_of(parts: Iterable[tuple[str, float]], why: Iterable[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """The index's parts, the hazard's replaced by what its forecast is made of; largest first, parts of one name added up."""
    made: dict[str, float] = {}
    for name, share in parts:
        for inner, of in (tuple(why) or ((name, 1.0),)) if name == "hazard" else ((name, 1.0),):
            made[inner] = made.get(inner, 0.0) + share * of
    return tuple(sorted(made.items(), key=lambda pair: (-pair[1], pair[0])))

"""A plan moves the end of a hold out where what was fetched and not used is still worth about what it was fetched for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from prefetcher.controller.planning import Given, PastOrder, Worth, make_plan
from prefetcher.controller.records import HeldWeights, KnownWeights, Memory, NodeReport
from prefetcher.core.experts import EXPERTS, STAYS_AT
from prefetcher.core.shadow_caches import Outlook
from prefetcher.core.types import Arm, Cause, DecisionId, ModelName, ModelVersion, NodeName, Order, Tier, WeightsKey
from prefetcher.core.value import load_discount

NOW_S, GB = 10_000.0, 10**9
SCORE, RATE, LOAD_S = 1e-12, 1e-4, 1.0
FETCHES, KEEPS = "hazard-prefetch", "hazard"


def plan_of(
    share: float, *, cause: Cause = Cause.FORECAST, state: str = "ready", expert: str = FETCHES, age_s: float = 580.0
) -> Order:
    """The carried order of the one model of a node, whose score is `share` of what it was fetched at `age_s` ago."""
    key = WeightsKey(ModelName("m"), ModelVersion("1"))
    order = Order(DecisionId("o1"), NodeName("n"), key, Tier.HOST, cause, Arm.TREATED, NOW_S - age_s, NOW_S, NOW_S + 20.0, 600.0)
    held = HeldWeights("m", "1", "host", state, GB, decision_id="o1", cause=cause.value)
    known = KnownWeights("m", "1", GB, LOAD_S)
    report = NodeReport("n", NOW_S, Memory(4 * GB, GB, ""), 1e9, held=(held,), known=(known,))
    fetches = expert == FETCHES
    index = np.array([share * SCORE / load_discount(RATE, LOAD_S)])
    rate = np.array([RATE])
    outlook = Outlook(expert, EXPERTS[expert], rate, rate if fetches else None, rate, (("hazard", 1.0),))
    worth = Worth(index, index if fetches else None, rate if fetches else 0.0 * rate, 0.0 * rate, rate, np.zeros(1, np.bool_))
    made: Callable[[], DecisionId] = lambda: DecisionId("another")  # noqa: E731
    past = {"m": PastOrder(order, SCORE)}
    given = Given(NOW_S, 1, 1, 0.0, 600.0, 60.0, Arm.TREATED, True, frozenset(), past, lambda _model: 0.0, made)
    planned = make_plan(report, outlook, worth, given)
    assert planned.new == ()
    (desired,) = planned.plan.desired
    assert desired.order is not None
    assert past["m"].order == order, "what is known of the order stays as it was"
    assert replace(desired.order, hold_s=600.0) == order
    return desired.order


def test_it_stays_while_its_score_is_good() -> None:
    order = plan_of(1.01 * STAYS_AT)
    assert order.issued_s + order.hold_s == NOW_S + 120.0
    assert plan_of(0.99 * STAYS_AT).hold_s == 600.0


def test_it_does_not_stay_for_ever() -> None:
    assert plan_of(5.0, age_s=3_400.0).hold_s == 3_520.0
    assert plan_of(5.0, age_s=3_500.0).hold_s == 3_600.0
    assert plan_of(5.0, age_s=3_590.0).hold_s == 3_600.0


@pytest.mark.parametrize(
    "what", [{"cause": Cause.HINT}, {"cause": Cause.MANUAL}, {"state": "moving"}, {"expert": KEEPS}], ids=lambda what: next(iter(what))
)
def test_only_what_was_fetched_for_a_forecast_and_is_there_while_the_expert_prefetches(what: dict[str, object]) -> None:
    assert plan_of(5.0, **what).hold_s == 600.0  # type: ignore[arg-type]

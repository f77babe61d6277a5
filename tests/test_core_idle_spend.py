"""Weights that are kept and earn less than they cost: how long, at what loss, and when a pin may be taken away."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetcher.controller import records
from prefetcher.controller.idle_pins import BY, IdlePins, read_idle_pins
from prefetcher.controller.records import HeldWeights, KnownWeights, Memory, NodeReport, Pin
from prefetcher.core.idle_spend import IdleSpend, Kept, Spend
from prefetcher.core.types import ModelName, NodeName
from prefetcher.core.value import price_per_byte_s
from prefetcher.report.terminal import idle_line
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.memory import MemoryState

NODE = NodeName("n0")
DAY_S = 86_400.0
PRICE_S_PER_GB_H = 0.002
PRICE = price_per_byte_s(PRICE_S_PER_GB_H)


def kept(index: float, model: str = "a", size: int = 1000) -> Kept:
    return Kept(ModelName(model), size, index, "pin")


def test_what_is_worth_its_price_again_begins_anew() -> None:
    spend = IdleSpend()
    for at_s, index in ((0.0, 0.5), (60.0, 0.5), (120.0, 1.0), (180.0, 0.5), (240.0, 0.5)):
        spend.look(NODE, [kept(index)], 1.0, at_s)
    (found,) = spend.idle(0.0)
    assert (found.under_since_s, found.byte_s, found.cost_s, found.earned_s) == (180.0, 60_000.0, 60_000.0, 30_000.0)
    spend.look(NODE, [], 1.0, 300.0)
    assert spend.idle(0.0) == [], "it is kept no more"


def test_a_time_that_nobody_looked_is_not_held_against_it() -> None:
    spend = IdleSpend()
    for at_s in (0.0, 60.0, 10_000.0):
        spend.look(NODE, [kept(0.0)], 1.0, at_s)
    assert [each.under_since_s for each in spend.idle(0.0)] == [10_000.0]


@given(st.lists(st.tuples(st.floats(0.0, 3600.0), st.floats(0.0, 2.0)), min_size=1, max_size=30))
def test_what_it_cost_and_saved_is_the_sum_over_looks_under_the_price(looks: list[tuple[float, float]]) -> None:
    """Against a plain sum over the looks since the last one that was not under the price."""
    spend, now_s = IdleSpend(), 0.0
    times: list[tuple[float, float]] = []
    for passed_s, index in looks:
        now_s += passed_s
        spend.look(NODE, [kept(index)], 1.0, now_s)
        times.append((now_s, index))
    last_paid = max((i for i, (_, index) in enumerate(times) if index >= 1.0), default=-1)
    run = times[last_paid + 1 :]
    found = spend.idle(0.0)
    assert len(found) == bool(run)
    if run:
        assert found[0].earned_s == pytest.approx(sum(1000 * i * (b - a) for (a, _), (b, i) in itertools.pairwise(run)))
        assert found[0].cost_s == pytest.approx(1000 * (run[-1][0] - run[0][0]))
        again = IdleSpend()
        again.restore(msgspec.json.decode(msgspec.json.encode(spend.snapshot()), type=list[Spend]))
        assert again.idle(0.0) == found


def test_a_pin_is_released_only_where_it_is_idle_on_every_node() -> None:
    spend, other = IdleSpend(), NodeName("n1")
    for at_s in (0.0, 100.0):
        spend.look(NODE, [kept(0.0)], 1.0, at_s)
        spend.look(other, [kept(2.0)], 1.0, at_s)
    a = ModelName("a")
    assert spend.releasable(100.0, [(NODE, a), (other, a)]) == []
    assert spend.releasable(100.0, [(NODE, a)]) == ["a"]
    assert spend.releasable(101.0, [(NODE, a)]) == []


class Controller:
    """Looks at one node that keeps a pinned model, every ten minutes."""

    def __init__(self, *, release: bool = False, allow: bool = False, leases: int = 0) -> None:
        self.state = MemoryState()
        self.metrics = Metrics()
        self.pins = {"m": Pin("ops", 5.0, allow_release=allow)}
        self.state.write({records.PINS: records.encode(self.pins)})
        self.idle = IdlePins(self.state, self.metrics, PRICE_S_PER_GB_H, DAY_S, release)
        held = HeldWeights("m", "v", "host", "ready", 10**9, leases=leases, pinned=True)
        self.report = NodeReport(NODE, 0.0, Memory(1, 1), 1.0, held=(held,), known=(KnownWeights("m", "v", 10**9, 1.0),))

    def run(self, from_s: float, until_s: float, ratio: float = 0.25) -> None:
        for at_s in np.arange(from_s, until_s + 1.0, 600.0).tolist():
            self.idle.look(NODE, self.report, np.array([ratio * PRICE]), self.pins, at_s)
            self.idle.tell([NODE], at_s)


def test_a_pin_that_earns_too_little_is_reported_and_stays() -> None:
    controller = Controller()
    controller.run(0.0, DAY_S - 600.0)
    assert read_idle_pins(controller.state) == []
    controller.run(DAY_S, DAY_S)
    (pin,) = read_idle_pins(controller.state)
    assert (pin.model, pin.node, pin.why, pin.by, pin.under_since_s, pin.allowed) == ("m", NODE, "pin", "ops", 0.0, False)
    assert (pin.held_gb_h, pin.cost_s, pin.earned_s) == pytest.approx((24.0, 24.0 * PRICE_S_PER_GB_H, 6.0 * PRICE_S_PER_GB_H))
    assert controller.metrics.registry.get_sample_value("prefetcher_idle_pins") == 1.0
    assert controller.metrics.registry.get_sample_value("prefetcher_idle_pin_bytes") == 1e9
    assert "`prefetcher unpin m` gives it back" in idle_line(pin, DAY_S)
    assert records.decode_pins(controller.state.read(records.PINS)) == controller.pins


def test_what_is_followed_outlives_a_controller() -> None:
    controller = Controller()
    controller.run(0.0, DAY_S / 2)
    controller.idle = IdlePins(controller.state, Metrics(), PRICE_S_PER_GB_H, DAY_S, False)
    controller.idle.start()
    controller.run(DAY_S / 2 + 600.0, DAY_S)
    assert [pin.under_since_s for pin in read_idle_pins(controller.state)] == [0.0]


@pytest.mark.parametrize(("release", "allow"), [(True, False), (False, True)])
def test_a_pin_that_may_go_gets_an_end_and_the_list_says_why(release: bool, allow: bool) -> None:
    controller = Controller(release=release, allow=allow)
    controller.run(0.0, DAY_S)
    assert records.decode_pins(controller.state.read(records.PINS))["m"].until_s == DAY_S
    (done,) = [msgspec.json.decode(raw, type=records.ByHand) for raw in controller.state.tail(records.BY_HAND, 10)]
    assert (done.act, done.by, done.model) == ("unpin", BY, "m")
    assert done.reason == "worth less than its price for 24.0 h: 24.0 GB·h cost 0.048 s and saved 0.012 s"
    (pin,) = read_idle_pins(controller.state)
    assert pin.released_at_s == DAY_S
    assert idle_line(pin, DAY_S + 3600.0).startswith("released 60 min ago: m on n0")


def test_a_pin_that_somebody_changed_meanwhile_stands() -> None:
    controller = Controller(release=True)
    controller.run(0.0, DAY_S - 600.0)
    newer = {"m": Pin("boss", DAY_S - 1.0)}
    controller.state.write({records.PINS: records.encode(newer)})
    controller.run(DAY_S, DAY_S)
    assert records.decode_pins(controller.state.read(records.PINS)) == newer
    assert controller.state.tail(records.BY_HAND, 10) == []


def test_what_is_leased_is_in_use() -> None:
    controller = Controller(release=True, leases=1)
    controller.run(0.0, DAY_S)
    assert read_idle_pins(controller.state) == []

"""Caps of tenants and the reserve: never exceeded, whatever is asked, and nobody loses what he holds to another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefetcher.core import events as ev
from prefetcher.core.copies import NodeLimits, Stage
from prefetcher.core.quotas import Quotas, gives_up
from prefetcher.core.residency import ResidencyMachine
from prefetcher.core.types import (
    Arm,
    Cause,
    DecisionId,
    DesiredWeights,
    ModelName,
    ModelVersion,
    NodeName,
    Order,
    Plan,
    TenantQuota,
    Tier,
    WeightsKey,
)

NODE = NodeName("n")
BUDGET, RESERVE = 100, 15
SIZES = {"a/1": 30, "a/2": 20, "a/3": 10, "a/4": 25, "b/1": 30, "b/2": 15, "free": 40, "other": 20}
KEYS = {model: WeightsKey(ModelName(model), ModelVersion("1")) for model in SIZES}
A, B = TenantQuota("a", ("a/*",), most_ratio=0.45), TenantQuota("b", ("b/1", "b/2"), most_ratio=0.9, most_bytes=30)
CAPS = {"a": 45, "b": 30}
models = st.sampled_from(sorted(SIZES))
holders = st.sampled_from(["h1", "h2", "h3"])


def test_a_model_is_of_the_first_tenant_that_names_it() -> None:
    quotas = Quotas([A, B, TenantQuota("rest", ("*",), most_bytes=5)])
    assert [quotas.of(model).tenant for model in ("a/1", "b/2", "b/3")] == ["a", "b", "rest"]  # type: ignore[union-attr]
    assert Quotas([A]).of("b/1") is None
    assert Quotas([A]).of("A/1") is None
    assert [Quotas.cap_bytes(quota, 1000.0) for quota in (A, B, TenantQuota("c", ()))] == [450.0, 30.0, 1000.0]


@given(
    sizes=st.lists(st.integers(1, 50), max_size=8), seed=st.integers(0, 99), cap=st.integers(0, 150), entrant=st.integers(1, 60),
    others=st.integers(0, 100),
)  # fmt: skip
def test_what_a_tenant_gives_up_suffices_is_worth_less_and_is_needed(
    sizes: list[int], seed: int, cap: int, entrant: int, others: int
) -> None:
    index = np.random.default_rng(seed).random(len(sizes))
    own = np.array(sizes, dtype=float)
    claimed = own.sum() + others
    victims, enough = gives_up(cap, claimed, entrant, 0.5, index, own)
    below = index < 0.5
    assert enough == (claimed + entrant - own[below].sum() <= cap or claimed + entrant <= cap)
    assert below[victims].all()
    if enough:
        left = claimed - own[victims].sum()
        assert left + entrant <= cap
        assert all(left + own[v] + entrant > cap for v in victims), "nothing goes that need not"
    else:
        assert not len(victims)


class Tenants(RuleBasedStateMachine):
    """A node of two tenants and some models of nobody. The loader does as it is told, sooner or later."""

    def __init__(self) -> None:
        super().__init__()
        limits = NodeLimits(
            {Tier.HOST: BUDGET}, reserve_bytes={Tier.HOST: RESERVE}, link_bytes_per_s=10.0, demand_deadline_s=50.0, adopted_hold_s=30.0
        )
        self.machine = ResidencyMachine(NODE, limits, seed=1)
        self.now_s = 1000.0
        self.loading: set[WeightsKey] = set()
        self.leaving: set[WeightsKey] = set()
        self.leases: dict[str, set[tuple[str, WeightsKey]]] = {}
        self.tokens = self.revision = 0
        self.answers: dict[str, tuple[bool, str]] = {}
        for model, size in SIZES.items():
            self.tell(ev.CatalogSeen(KEYS[model], size, {Tier.HOST: size / 10}, frozenset({Tier.DISK})))
        self.plan([], [])

    def tell(self, event: ev.Event) -> None:
        holdings = self.machine.holdings
        kept = {key for key, w in holdings.weights.items() if w.pinned or (Tier.HOST in w.copies and w.copies[Tier.HOST].leases)}
        asked = event.target if isinstance(event, ev.Unpinned) else None
        for told in self.machine.handle(event, self.now_s):
            match told:
                case ev.LoadWeights(key, _, tier):
                    assert tier is Tier.HOST
                    self.loading.add(key)
                    by_hand = holdings.weights[key].pinned
                    if told.cause not in (Cause.DEMAND, Cause.MANUAL) and not told.resumed and not by_hand:
                        assert holdings.used_bytes[Tier.HOST] <= BUDGET - RESERVE, "a prefetch entered the reserve"
                case ev.EvictWeights(key) | ev.CancelLoad(key):
                    let_go = isinstance(event, ev.PlanReceived) or asked is not None
                    said_again = told.reason in ("stalled", "overdue")
                    assert (
                        key not in kept
                        or said_again
                        or (let_go and not any(key == of and at == "HOST" for held in self.leases.values() for at, of in held))
                    )
                    self.loading.discard(key)
                    self.leaving.add(key)
                case ev.PauseLoad(key):
                    self.loading.discard(key)
                    self.tell_later = key
                case ev.GrantLease(holder, key, tier):
                    self.leases.setdefault(holder, set()).add((tier.name, key))
                case ev.Answer(ask_id, ok, reason):
                    self.answers[ask_id] = (ok, reason)

    def plan(self, orders: list[tuple[str, float]], pins: list[str], quotas: tuple[TenantQuota, ...] = (A, B)) -> None:
        self.revision += 1
        index = dict(orders)
        desired = []
        for model in sorted(SIZES, key=lambda name: -index.get(name, 0.0)):
            order = None
            if model in index:
                decision = DecisionId(f"{self.revision}-{model}")
                order = Order(
                    decision, NODE, KEYS[model], Tier.HOST, Cause.FORECAST, Arm.TREATED, self.now_s, self.now_s, self.now_s + 60, 40.0
                )
            desired.append(DesiredWeights(KEYS[model], index.get(model, 0.5), 0.1, pinned=model in pins, order=order))
        self.tell(ev.PlanReceived(Plan(NODE, self.revision, 1, self.now_s, 0.0, tuple(desired), quotas=quotas)))

    @rule(
        orders=st.lists(st.tuples(models, st.floats(0.1, 5.0)), max_size=5, unique_by=lambda pair: pair[0]),
        pins=st.lists(models, max_size=3, unique=True),
    )
    def planned(self, orders: list[tuple[str, float]], pins: list[str]) -> None:
        self.plan(orders, pins)

    @rule(model=models)
    def row(self, model: str) -> None:
        self.tell(ev.Requested(ModelName(model), self.now_s))

    @rule(model=models, holder=holders)
    def opens(self, model: str, holder: str) -> None:
        self.tokens += 1
        self.tell(ev.LeaseRequested(holder, ModelName(model), str(self.tokens)))

    @rule(holder=holders)
    def dies(self, holder: str) -> None:
        self.leases.pop(holder, None)
        self.tell(ev.HolderLost(holder))

    @rule(model=models, act=st.sampled_from(["pin", "unpin", "load", "evict"]))
    def by_hand(self, model: str, act: str) -> None:
        self.tokens += 1
        ask, target = str(self.tokens), ModelName(model)
        kinds: dict[str, Any] = {"pin": ev.Pinned, "unpin": ev.Unpinned, "load": ev.LoadAsked, "evict": ev.EvictAsked}
        self.tell(kinds[act](target, ask))
        ok, reason = self.answers[ask]
        if act == "pin" and model[0] in "ab" and not ok:
            assert reason in ("tenant_cap", "does_not_fit")

    @rule(data=st.data())
    def loader(self, data: st.DataObject) -> None:
        self.now_s += 1.0
        copies = self.machine.holdings.in_tier[Tier.HOST]
        for key in sorted(k for k, c in copies.items() if c.stage is Stage.PAUSING):
            self.tell(ev.LoadPaused(key, Tier.HOST, copies[key].bytes_done))
            return
        for key in sorted(self.leaving):
            self.leaving.discard(key)
            self.tell(ev.WeightsEvicted(key, Tier.HOST, SIZES[key.model]))
            return
        if self.loading:
            key = data.draw(st.sampled_from(sorted(self.loading)))
            self.loading.discard(key)
            self.tell(ev.WeightsLoaded(key, Tier.HOST) if data.draw(st.booleans()) else ev.LoadFailed(key, Tier.HOST, "read"))

    @rule(by_s=st.sampled_from([1.0, 45.0, 400.0]))
    def time(self, by_s: float) -> None:
        self.now_s += by_s
        self.tell(ev.Ticked())

    @invariant()
    def nobody_holds_more_than_his_cap(self) -> None:
        holdings = self.machine.holdings
        assert self.machine.check() == []
        for quota in holdings.quotas.quotas:
            assert holdings.claimed_bytes(quota) <= CAPS[quota.tenant]
        for held in self.leases.values():
            for tier, key in held:
                assert tier == "DISK" or key in holdings.in_tier[Tier.HOST], "leased weights stay"

    @invariant()
    def a_restart_knows_as_much(self) -> None:
        twin = ResidencyMachine(NODE, self.machine.limits, seed=1)
        twin.restore(self.machine.snapshot())
        assert twin.holdings.quotas.quotas == self.machine.holdings.quotas.quotas


TestTenants = Tenants.TestCase
TestTenants.settings = settings(max_examples=25, stateful_step_count=30, deadline=None, phases=(Phase.explicit, Phase.generate))


# --- one by one ---


def loaded(tenants: Tenants) -> None:
    """Everything that is on its way arrives, and what leaves is gone."""
    for _ in range(40):
        for key in sorted(tenants.leaving):
            tenants.leaving.discard(key)
            tenants.tell(ev.WeightsEvicted(key, Tier.HOST, SIZES[key.model]))
        for key in sorted(tenants.loading):
            tenants.loading.discard(key)
            tenants.tell(ev.WeightsLoaded(key, Tier.HOST))


def there(tenants: Tenants) -> set[str]:
    return {key.model for key, copy in tenants.machine.holdings.in_tier[Tier.HOST].items() if copy.stage is Stage.READY}


def test_a_tenant_at_its_cap_gives_up_its_own_least_worth_prefetch() -> None:
    node = Tenants()
    node.plan([("a/1", 2.0), ("a/3", 1.0), ("b/2", 0.2)], [])
    loaded(node)
    assert there(node) == {"a/1", "a/3", "b/2"}
    node.plan([("a/2", 3.0), ("b/2", 0.2)], [])
    loaded(node)
    # 30 + 10 + 20 are over 45: of its own the one of 10 does not suffice, the one of 30 does, and then the other stays.
    assert there(node) == {"a/2", "a/3", "b/2"}
    refused: list[ev.Instruction] = []
    handle = node.machine.handle
    node.machine.handle = lambda event, now_s: refused.extend(found := handle(event, now_s)) or found  # type: ignore[method-assign]
    node.plan([("a/4", 0.3)], [])
    assert [told.reason for told in refused if isinstance(told, ev.RefuseOrder)] == ["tenant_cap"]


def test_a_pin_over_the_cap_is_refused_and_says_why() -> None:
    node = Tenants()
    for ask, model in enumerate(("a/1", "a/2", "a/3")):
        node.tell(ev.Pinned(ModelName(model), str(ask)))
    assert [node.answers[str(ask)] for ask in range(3)] == [(True, "loading"), (False, "tenant_cap"), (True, "loading")]


def test_who_opens_over_the_cap_reads_from_disk_and_demand_is_never_capped() -> None:
    node = Tenants()
    for model in ("a/1", "a/2"):
        node.row(model)
        loaded(node)
    assert there(node) == {"a/1", "a/2"}
    node.opens("a/1", "h1")
    node.opens("a/2", "h2")
    assert node.leases == {"h1": {("HOST", KEYS["a/1"])}, "h2": {("DISK", KEYS["a/2"])}}
    node.opens("a/1", "h3")
    assert ("HOST", KEYS["a/1"]) in node.leases["h3"], "the same bytes count once"
    node.dies("h1")
    node.opens("a/2", "h2")
    assert ("HOST", KEYS["a/2"]) not in node.leases["h2"], "another program still has the first one open"
    node.dies("h3")
    node.opens("a/2", "h2")
    assert ("HOST", KEYS["a/2"]) in node.leases["h2"]


def test_nothing_is_loaded_for_an_open_over_the_cap_alone() -> None:
    node = Tenants()
    node.opens("a/1", "h1")
    loaded(node)
    node.opens("a/2", "h2")
    assert not node.loading
    assert node.leases["h2"] == {("DISK", KEYS["a/2"])}
    # A row holds nothing, and who opens beside it is asked anew when the weights are there.
    node.row("a/2")
    assert node.loading == {KEYS["a/2"]}
    node.opens("a/2", "h3")
    loaded(node)
    assert there(node) == {"a/1", "a/2"}
    assert node.leases["h3"] == {("DISK", KEYS["a/2"])}


def test_one_who_lets_go_takes_nothing_from_another() -> None:
    node = Tenants()
    node.opens("b/1", "h1")
    loaded(node)
    node.opens("b/1", "h2")
    node.tell(ev.Pinned(ModelName("b/1"), "p"))
    node.dies("h1")
    for ask in ("evict", "unpin", "evict"):
        node.by_hand("b/1", ask)
    assert there(node) == {"b/1"}
    assert list(node.answers.values())[-3:] == [(False, "leased"), (True, "unpinned"), (False, "leased")]


def test_a_cap_that_falls_takes_unused_prefetches_and_no_more() -> None:
    node = Tenants()
    node.plan([("a/2", 2.0), ("a/3", 1.0)], [])
    loaded(node)
    node.opens("a/2", "h1")
    lower = TenantQuota("a", ("a/*",), most_bytes=5)
    node.plan([], [], (lower,))
    loaded(node)
    assert there(node) == {"a/2"}


@pytest.mark.parametrize("more", [{}, {"quotas": (A,)}])
def test_a_plan_of_an_older_controller_has_no_quotas(more: dict[str, Any]) -> None:
    from prefetcher.controller.records import decode_plan, encode

    plan = Plan(NODE, 1, 1, 0.0, 0.0, (), **more)
    assert decode_plan(encode(plan)) == plan
    assert decode_plan(encode(plan).replace(b',"quotas":[]', b"")) == plan

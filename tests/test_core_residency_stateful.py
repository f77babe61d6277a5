"""The residency machine against a loader that answers in any order, late, or with failures, and against its own restored snapshots."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefetcher.core import events as ev
from prefetcher.core import facts
from prefetcher.core.admission import Rank, index_of
from prefetcher.core.ledger import Ledger, sum_totals
from prefetcher.core.node import BLOCK_BYTES
from prefetcher.core.residency import NodeLimits, ResidencyMachine
from prefetcher.core.types import (
    Arm,
    Cause,
    DecisionId,
    DesiredWeights,
    ModelName,
    ModelVersion,
    NodeName,
    Order,
    Outcome,
    Plan,
    Tier,
    WeightsKey,
)

NODE = NodeName("n")
#: Sizes are in these; what a victim keeps is in blocks.
UNIT = BLOCK_BYTES * 2 // 3
LIMITS = NodeLimits(
    budget_bytes={Tier.HOST: 100 * UNIT, Tier.DEVICE: 60 * UNIT, Tier.DISK: 240 * UNIT},
    reserve_bytes={Tier.DEVICE: 20 * UNIT},
    link_bytes_per_s=10.0 * UNIT,
    stall_s=50.0,
    demand_deadline_s=120.0,
)
#: Bytes, and the tiers that are complete at the start. One model is larger than the host tier, two are only in the object store.
MODELS = {
    "a": (60 * UNIT, {Tier.REMOTE, Tier.DISK}),
    "b": (50 * UNIT, {Tier.DISK}),
    "c": (30 * UNIT, {Tier.DISK}),
    "d": (20 * UNIT, {Tier.REMOTE}),
    "e": (10 * UNIT, {Tier.DISK}),
    "f": (120 * UNIT, {Tier.REMOTE}),
}
KEYS = {(m, v): WeightsKey(ModelName(m), ModelVersion(v)) for m in MODELS for v in ("1", "2")}
models = st.sampled_from(sorted(MODELS))
holders = st.sampled_from(["h1", "h2", "h3"])
Place = tuple[WeightsKey, Tier]


def a_machine() -> ResidencyMachine:
    return ResidencyMachine(NODE, LIMITS, seed=5)


class Residency(RuleBasedStateMachine):
    """`there`, `loading`, `paused`, `parts` and `leaving` (with what stays) are the loader's books; they owe nothing to the machine's."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = a_machine()
        self.twin: ResidencyMachine | None = None
        self.now_s = 1000.0
        self.there: set[Place] = set()
        self.loading: dict[Place, int] = {}
        self.pausing: set[Place] = set()
        self.paused: dict[Place, int] = {}
        self.parts: dict[Place, int] = {}
        self.leaving: dict[Place, int] = {}
        self.held_byte_s = 0.0
        self.size: dict[WeightsKey, int] = {}
        self.leases: Counter[tuple[str, WeightsKey, Tier]] = Counter()
        self.waiting: dict[str, str] = {}
        self.tokens = 0
        self.orders: dict[str, str] = {}
        self.rows: Counter[tuple[str, bool]] = Counter()
        self.arrived = 0
        self.revision = 0
        self.decisions = 0
        self.asks = 0
        self.off = False
        self.ledger = Ledger(keep_hours=1_000_000)

    @initialize()
    def catalog(self) -> None:
        for model, (size, tiers) in MODELS.items():
            self.see(KEYS[model, "1"], size, tiers)

    def see(self, key: WeightsKey, size: int, tiers: set[Tier]) -> None:
        self.size[key] = size
        self.there |= {(key, tier) for tier in tiers}
        link_s = {Tier.DISK: size / UNIT / 5, Tier.HOST: size / UNIT / 10, Tier.DEVICE: size / UNIT / 50}
        self.tell(ev.CatalogSeen(key, size, link_s, frozenset(tiers)))

    # --- telling the machine, and doing as it says ---

    def tell(self, event: ev.Event) -> None:
        told = self.handle(event)
        if self.twin is not None:
            assert self.twin.handle(event, self.now_s) == told
        index = {k: index_of(w, self.machine.holdings, self.now_s) for k, w in self.machine.holdings.weights.items()}
        for instruction in told:
            self.obey(instruction, index)
        self.victims_are_minimal(told)

    def handle(self, event: ev.Event) -> list[ev.Instruction]:
        holdings = self.machine.holdings
        held = holdings.used_bytes[Tier.HOST] + holdings.used_bytes[Tier.DEVICE]
        self.held_byte_s += held * (self.now_s - self.machine.links.now_s)
        return self.machine.handle(event, self.now_s)

    def obey(self, told: ev.Instruction, index: dict[WeightsKey, float]) -> None:
        match told:
            case ev.LoadWeights(key, from_tier, tier, resumed=resumed):
                assert (key, from_tier) in self.there, "loads start from complete weights"
                assert not [p for p in self.loading if p[1] is tier], "one transfer an edge"
                if resumed:
                    assert self.paused.pop((key, tier)) == told.resume_from_bytes
                else:
                    assert told.resume_from_bytes == self.parts.pop((key, tier), 0)
                    assert not self.holds((key, tier))
                self.loading[key, tier] = told.resume_from_bytes
                if told.cause not in (Cause.DEMAND, Cause.MANUAL) and not resumed:
                    assert self.taken(tier) <= LIMITS.budget_bytes[tier] - LIMITS.reserve_bytes.get(tier, 0)
            case ev.PauseLoad(key, tier, to):
                assert (key, tier) in self.loading
                self.pausing.add((key, tier))
                if to is not None:
                    self.is_denser(to, key, tier)
            case ev.CancelLoad(key, tier):
                place = (key, tier)
                if place in self.leaving:  # said again
                    return
                assert place in self.loading or place in self.paused
                assert place not in self.paused or not self.machine.holdings.weights[key].demanded, "somebody waits for it"
                self.loading.pop(place, None)
                self.paused.pop(place, None)
                self.pausing.discard(place)
                self.leaving[place] = 0
            case ev.EvictWeights(key, tier, reason, room_for, keep_bytes):
                place = (key, tier)
                if reason is ev.Evicted.OVERDUE:
                    assert self.leaving[place] == keep_bytes
                    return
                assert (place in self.there) != (place in self.parts), "only what is ready, or a part, is evicted"
                assert place not in self.leaving
                assert not any(n for (_, k, t), n in self.leases.items() if (k, t) == (key, tier)), "leased"
                replaced = (tier is Tier.DISK and self.machine.holdings.weights[key].retired) or place in self.parts
                assert replaced or any((key, below) in self.there for below in Tier if below < tier) or reason is ev.Evicted.BAD
                if keep_bytes:
                    assert (tier, self.off, reason) == (Tier.HOST, False, ev.Evicted.ROOM)
                    assert keep_bytes % BLOCK_BYTES == 0
                    assert 0 < keep_bytes < self.held(place)
                if room_for is not None:
                    assert place in self.there or not self.machine.holdings.weights[key].demanded, "somebody waits for this part"
                    assert not self.machine.holdings.weights[key].pinned
                    rank = self.machine.links.rank(self.machine.holdings.weights[room_for], tier)
                    assert rank is not Rank.PREFETCH or index[key] <= index[room_for]
                self.there.discard(place)
                self.leaving[place] = keep_bytes
            case ev.GrantLease(holder, key, tier, token=token):
                assert self.waiting.pop(token) == holder
                assert (key, tier) in self.there
                self.leases[holder, key, tier] += 1
            case ev.RefuseLease(holder, token=token):
                assert self.waiting.pop(token) == holder
            case ev.SwitchVersion(old=old, new=new):
                assert old.model == new.model
            case ev.Record(fact):
                self.note(fact)
            case _:
                pass

    def is_denser(self, new: WeightsKey, moving: WeightsKey, tier: Tier) -> None:
        """A demand load gives way to another one alone, of which more rows wait per byte that is left."""
        assert not self.off
        assert new != moving
        waiting = {key: self.machine.holdings.weights[key].waiting for key in (new, moving)}
        left = {key: self.size[key] - self.loading.get((key, tier), self.paused.get((key, tier), 0)) for key in (new, moving)}
        assert waiting[new] * left[moving] > waiting[moving] * left[new]
        assert waiting[moving] > 0

    def note(self, fact: facts.Fact) -> None:
        self.ledger.record(fact)
        match fact:
            case facts.OrderIssued(order):
                assert order.decision_id not in self.orders
                self.orders[order.decision_id] = "issued"
            case facts.OrderBegan(decision_id):
                assert self.orders[decision_id] == "issued"
                self.orders[decision_id] = "begun"
            case facts.OrderReady(decision_id):
                assert self.orders[decision_id] == "begun"
                self.orders[decision_id] = "ready"
            case facts.OrderUsed(decision_id) | facts.OrderRedundant(decision_id):
                assert self.orders[decision_id] in ("begun", "ready")
            case facts.OrderEnded(decision_id, ending=ending):
                before = self.orders[decision_id]
                assert before != "ended"
                assert (ending is facts.Ending.REPLACED) == (before == "issued")
                if before == "ready":
                    assert ending in (facts.Ending.GIVEN_UP, facts.Ending.DISPLACED, facts.Ending.LOST)
                self.orders[decision_id] = "ended"
            case facts.RowSeen(model, lease=lease):
                self.rows[model, lease] += 1
                self.arrived += 1
            case facts.RowServed(model, wait_s=wait_s, lease=lease):
                assert wait_s >= 0.0
                self.rows[model, lease] -= 1
                assert self.rows[model, lease] >= 0
            case facts.ResidencyEnded():
                assert fact.start_s <= (fact.ready_s or fact.start_s) <= (fact.last_use_s or fact.end_s)
                assert (fact.last_use_s or fact.end_s) <= fact.end_s
            case facts.TransferEnded():
                assert fact.bytes >= 0
                assert fact.start_s <= fact.end_s
            case _:
                pass

    def victims_are_minimal(self, told: list[ev.Instruction]) -> None:
        """None of the victims of one decision could have stayed, or kept a block more: without it the entrant would still not fit."""
        for tier in (Tier.DISK, Tier.HOST, Tier.DEVICE):
            victims = [i for i in told if isinstance(i, ev.EvictWeights) and i.room_for is not None and i.tier is tier]
            if not victims:
                continue
            (entrant,) = {v.room_for for v in victims}
            assert entrant is not None
            rank = self.machine.links.rank(self.machine.holdings.weights[entrant], tier)
            guess = rank in (Rank.PREFETCH, Rank.CARRY)
            limit = LIMITS.budget_bytes[tier] - (LIMITS.reserve_bytes.get(tier, 0) if guess else 0)
            asks = self.machine.holdings.weights[entrant]
            # Requests don't wait for what somebody still maps.
            soon = rank is Rank.DEMAND and not asks.pinned and tier > Tier.DISK
            freed = {
                place: self.held(place) - keep
                for place, keep in self.leaving.items()
                if place[1] is tier and not (soon and self.lingers(place))
            }
            missing = self.size[entrant] - self.parts.get((entrant, tier), 0)
            room = limit - self.taken(tier) + sum(freed.values())
            assert room >= missing
            assert self.off or tier is not Tier.HOST or room - missing < BLOCK_BYTES
            # Where the last may keep a part, those before it are not asked whether they could have stayed.
            for victim in victims if self.off or tier is not Tier.HOST else victims[-1:]:
                assert room - freed[victim.key, tier] < missing
            assert not any(victim.keep_bytes for victim in victims[:-1])

    def holds(self, place: Place) -> bool:
        books: list[Iterable[Place]] = [self.there, self.loading, self.paused, self.parts, self.leaving]
        return any(place in of for of in books)

    def held(self, place: Place) -> int:
        return self.parts.get(place, self.size[place[0]])

    def taken(self, tier: Tier) -> int:
        places = {p for p in [*self.there, *self.loading, *self.paused, *self.parts, *self.leaving] if p[1] is tier}
        return sum(self.held(place) for place in places)

    # --- the world ---

    @rule(seconds=st.sampled_from([0.0, 0.5, 5.0, 40.0, 130.0, 700.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.tell(ev.Ticked())

    @rule(model=models, late_s=st.sampled_from([0.0, 3.0]), index=st.sampled_from([None, None, 0.0, 0.05 / UNIT]))
    def row(self, model: str, late_s: float, index: float | None) -> None:
        self.tell(ev.Requested(ModelName(model), self.now_s - late_s, index))

    @rule(model=models, holder=holders)
    def lease(self, model: str, holder: str) -> None:
        self.tokens += 1
        self.waiting[str(self.tokens)] = holder
        self.tell(ev.LeaseRequested(holder, ModelName(model), str(self.tokens)))

    @precondition(lambda self: any(self.leases.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(sorted(k for k, n in self.leases.items() if n)))
        self.leases[held] -= 1
        self.tell(ev.LeaseReleased(held[0], held[1], held[2]))

    @rule(holder=holders)
    def holder_dies(self, holder: str) -> None:
        for held in [k for k in self.leases if k[0] == holder]:
            del self.leases[held]
        self.waiting = {token: h for token, h in self.waiting.items() if h != holder}
        self.tell(ev.HolderLost(holder))

    @rule(
        scores=st.lists(st.tuples(models, st.sampled_from([0.0, 0.001 / UNIT, 0.01 / UNIT, 0.1 / UNIT])), unique_by=lambda s: s[0]),
        ordered=st.sets(models),
        pinned=st.sets(models, max_size=1),
        tier=st.sampled_from([Tier.DISK, Tier.HOST, Tier.HOST, Tier.DEVICE]),
        price=st.sampled_from([0.0, 0.0, 0.002 / UNIT]),
        enabled=st.sampled_from([True, True, True, False]),
        arm=st.sampled_from([Arm.TREATED, Arm.TREATED, Arm.CONTROL]),
        shadow=st.sampled_from([None, True, False]),
    )
    def plan(self, scores: Any, ordered: Any, pinned: Any, tier: Tier, price: float, enabled: bool, arm: Arm, shadow: bool | None) -> None:
        desired = []
        for model, index in scores:
            key = self.machine.holdings.serving[ModelName(model)]
            order = None
            if model in ordered:
                self.decisions += 1
                order = Order(
                    DecisionId(f"o{self.decisions}"), NODE, key, tier, Cause.FORECAST, arm, self.now_s, self.now_s + 60.0,
                    self.now_s + 200.0, 600.0,
                )  # fmt: skip
            desired.append(DesiredWeights(key, index, 0.01, model in pinned, order, shadow))
        self.revision += 1
        self.tell(ev.PlanReceived(Plan(NODE, self.revision, 1, self.now_s, price, tuple(desired), enabled)))

    @rule(model=models, act=st.sampled_from(["pin", "unpin", "load", "evict"]))
    def by_hand(self, model: str, act: str) -> None:
        self.asks += 1
        target, ask = ModelName(model), f"{self.asks}"
        event: ev.Event
        match act:
            case "pin":
                event = ev.Pinned(target, ask)
            case "unpin":
                event = ev.Unpinned(target, ask)
            case "load":
                event = ev.LoadAsked(target, ask)
            case _:
                event = ev.EvictAsked(target, ask)
        self.tell(event)

    @rule(on=st.booleans())
    def switch(self, on: bool) -> None:
        self.off = not on
        self.tell(ev.SwitchedOn() if on else ev.SwitchedOff())
        if not on:
            moving = [self.machine.holdings.weights[k].copies[t] for k, t in self.loading]
            assert all(c.cause in (Cause.DEMAND, Cause.MANUAL) or c.used or self.wanted(c.tier) for c in moving)

    def lingers(self, place: tuple[WeightsKey, Tier]) -> bool:
        holdings = self.machine.holdings
        return holdings.lingers(holdings.weights[place[0]].copies[place[1]], self.now_s)

    def wanted(self, tier: Tier) -> bool:
        mover = self.machine.holdings.weights[self.machine.holdings.mover[tier]]
        return not self.machine.links.is_guess(mover, tier)

    @rule(model=models, in_store=st.booleans())
    def new_version(self, model: str, in_store: bool) -> None:
        old, new = KEYS[model, "1"], KEYS[model, "2"]
        if new in self.size:
            return
        self.see(new, MODELS[model][0], {Tier.REMOTE} if in_store else {Tier.DISK, Tier.REMOTE})
        self.tell(ev.VersionPublished(old, new))

    # --- the loader ---

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), what=st.sampled_from(["block", "done", "done", "done", "fail", "bad"]))
    def load_goes_on(self, data: st.DataObject, what: str) -> None:
        place = data.draw(st.sampled_from(sorted(self.loading)))
        key, tier = place
        done = min(self.size[key], self.loading[place] + 7 * UNIT)
        if what == "block":
            self.loading[place] = done
            self.tell(ev.BytesVerified(key, tier, done))
            return
        del self.loading[place]
        self.pausing.discard(place)
        if what == "done":
            self.there.add(place)
            self.tell(ev.WeightsLoaded(key, tier))
        else:
            self.tell(ev.LoadFailed(key, tier, "disk", 2.0, source_bad=what == "bad" and tier is Tier.HOST))

    @precondition(lambda self: self.pausing)
    @rule(data=st.data())
    def load_pauses(self, data: st.DataObject) -> None:
        self.load_pauses_at(data.draw(st.sampled_from(sorted(self.pausing))))

    def load_pauses_at(self, place: Place) -> None:
        self.pausing.discard(place)
        self.paused[place] = self.loading.pop(place)
        self.tell(ev.LoadPaused(*place, self.paused[place]))

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), model=models, rows=st.integers(1, 4))
    def many_come_while_a_load_moves(self, data: st.DataObject, model: str, rows: int) -> None:
        """More of them than at one row a step, so that loads give way, and are paused before anything else happens."""
        for _ in range(rows):
            self.tell(ev.Requested(ModelName(model), self.now_s, 0.05 / UNIT))
        if self.pausing:
            self.load_pauses_at(data.draw(st.sampled_from(sorted(self.pausing))))

    @precondition(lambda self: self.leaving)
    @rule(data=st.data(), keeps=st.sampled_from([0, 1, 1, 2]))
    def memory_comes_back(self, data: st.DataObject, keeps: int) -> None:
        """But for what was to stay, or nearly that, or all of it."""
        place = data.draw(st.sampled_from(sorted(self.leaving)))
        keep = self.leaving.pop(place)
        kept = 0 if not keeps else keep if keeps == 1 else keep * 3 // 4
        self.parts.pop(place, None)
        if kept:
            self.parts[place] = kept
        self.tell(ev.WeightsEvicted(*place, self.size[place[0]] - kept, kept))

    @rule()
    def restart_from_snapshot(self) -> None:
        """From here on a machine that was restored from what was written must say the same, word for word."""
        written = json.loads(json.dumps(self.machine.snapshot()))
        self.twin = a_machine()
        self.twin.restore(written)
        assert json.loads(json.dumps(self.twin.snapshot())) == json.loads(self.twin.encoded()) == written

    @rule(data=st.data())
    def agent_is_killed_and_starts_again(self, data: st.DataObject) -> None:
        """Of what was near, some is found again, also loads that had completed without being told."""
        near = sorted(place for place in [*self.there, *self.loading] if place[1] >= Tier.HOST)
        kept = data.draw(st.sets(st.sampled_from(near))) if near else set()
        self.there = {place for place in self.there if place[1] < Tier.HOST} | kept
        for books in (self.loading, self.paused, self.parts, self.pausing, self.leaving, self.leases):
            books.clear()
        self.tell(ev.AgentRestarted(frozenset(kept)))

    # --- what always holds ---

    @invariant()
    def books_are_right(self) -> None:
        assert self.machine.check() == []

    @invariant()
    def budgets_hold(self) -> None:
        for tier in (Tier.HOST, Tier.DEVICE):
            assert self.taken(tier) <= LIMITS.budget_bytes[tier]
            assert self.taken(tier) == self.machine.holdings.used_bytes[tier]

    @invariant()
    def leases_agree(self) -> None:
        counted = Counter({
            (holder, key, tier): count
            for key, weights in self.machine.holdings.weights.items()
            for tier, copy in weights.copies.items()
            for holder, count in copy.leases.items()
        })  # fmt: skip
        assert counted == +self.leases

    @invariant()
    def who_waits_is_known(self) -> None:
        waiters = {w.token for weights in self.machine.holdings.weights.values() for w in weights.waiters}
        assert waiters == set(self.waiting)

    def teardown(self) -> None:
        """When the loader answers everything and time passes, nobody waits any more and every order is ended or ready."""
        for _ in range(60):
            for place in list(self.leaving):
                del self.leaving[place]
                self.parts.pop(place, None)
                self.tell(ev.WeightsEvicted(*place))
            for place in list(self.loading):
                self.load_completes(place)
            self.now_s += 100.0
            self.tell(ev.Ticked())
        assert self.waiting == {}
        assert all(count == 0 for count in self.rows.values())
        ready = {
            copy.order.decision_id
            for weights in self.machine.holdings.weights.values()
            for copy in weights.copies.values()
            if copy.order is not None
        }
        assert {o for o, state in self.orders.items() if state != "ended"} == ready
        assert {entry.order.decision_id for entry in self.ledger.open_orders()} == ready
        records = [*self.ledger.open_orders(), *self.ledger.take_closed(float("inf"))]
        total = sum_totals(self.ledger.totals().values())
        assert total.orders == len(records) == len(self.orders)
        assert Counter(r.outcome for r in records if r.outcome is not Outcome.OPEN) == Counter(total.outcomes)
        assert all(r.end_s is None or r.outcome is not Outcome.OPEN for r in records)
        assert total.rows + total.leases == self.arrived
        held = self.ledger.lifetime(self.machine.held(self.now_s))
        assert sum(totals.held_byte_s for totals in held.values()) == pytest.approx(self.held_byte_s, rel=1e-9)
        self.books_are_right()

    def load_completes(self, place: Place) -> None:
        if place in self.loading:
            del self.loading[place]
            self.pausing.discard(place)
            self.there.add(place)
            self.tell(ev.WeightsLoaded(*place))


Residency.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestResidency = Residency.TestCase

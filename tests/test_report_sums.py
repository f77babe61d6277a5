"""Sums by hour: memory in the hours that it was held in, bins that add up, and books that are the same however parts come."""

from __future__ import annotations

import math
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetcher.agent.sums import SumsState, Told, ToTell
from prefetcher.core import facts, histogram
from prefetcher.core.facts import Ending, Found, Stage
from prefetcher.core.held import HeldEntry, by_hour, provisional
from prefetcher.core.ledger import FIRST_GAP_S, Ledger
from prefetcher.core.totals import HOUR_S, Totals, TotalsKey, sum_totals
from prefetcher.core.types import Arm, Cause, DecisionId, ModelName, ModelVersion, NodeName, Order, Tier, WeightsKey
from prefetcher.report.build import Besides, Question, build_report
from prefetcher.report.sums import LedgerPart, NodeSums, StoredLedger, decode_hour, encode_hour
from prefetcher.report.tables import orders_table, read_sums, sums_table

NODE = NodeName("n")
T0 = 490_000 * 3600.0
WAITS = st.one_of(st.just(0.0), st.floats(0.0, 1e9), st.sampled_from([2.0, 0.5, 2.0**-10, math.nextafter(2.0, 3.0), 1e-300, math.inf]))


# --- bins ---


@given(st.lists(WAITS), st.lists(WAITS))
def test_counts_of_parts_add_up_to_the_counts_of_the_union(one: list[float], other: list[float]) -> None:
    together = histogram.add_up([histogram.bins_of(np.array(one)), histogram.bins_of(np.array(other))])
    assert together == histogram.bins_of(np.array(one + other))
    for wait_s in one + other:
        assert histogram.bins_of(np.array([wait_s])) == {histogram.bin_of(wait_s): 1}


@given(st.lists(st.floats(2.0**-10, 1e7), min_size=1), st.floats(0.0, 1.0))
def test_a_quantile_is_never_below_the_true_one_and_at_most_the_resolution_above(waits: list[float], share: float) -> None:
    true_s = sorted(waits)[max(1, math.ceil(share * len(waits))) - 1]
    found_s = histogram.quantile(histogram.bins_of(np.array(waits)), share)
    assert found_s is not None
    assert true_s <= found_s
    assert true_s >= found_s * (1.0 - histogram.RESOLUTION_RATIO) * (1.0 - 1e-12)


@given(st.lists(WAITS))
def test_what_waited_at_most_a_power_of_two_is_counted_exactly(waits: list[float]) -> None:
    assert histogram.edge_above_s(2.0) == 2.0
    assert histogram.at_most(histogram.bins_of(np.array(waits)), 2.0) == sum(wait_s <= 2.0 for wait_s in waits)


def test_no_quantile_without_a_wait() -> None:
    assert histogram.quantile({}, 0.5) is None
    assert histogram.quantile({histogram.NO_WAIT: 3}, 0.99) == 0.0


# --- memory by the hour ---

SECONDS = st.integers(0, 40_000)


@given(SECONDS, SECONDS)
def test_hours_of_a_span_are_disjoint_and_make_it_up(start: int, length: int) -> None:
    found = list(by_hour(T0 + start, T0 + start + length))
    assert sum(seconds for _, seconds in found) == length
    assert all(0.0 < seconds <= HOUR_S for _, seconds in found)
    assert [hour for hour, _ in found] == sorted({hour for hour, _ in found})


@st.composite
def entries(draw: st.DrawFn) -> HeldEntry:
    start = draw(SECONDS)
    used = draw(st.none() | st.integers(start, 40_000))
    return HeldEntry(
        ModelName(draw(st.sampled_from("ab"))), ModelVersion(""), "host", draw(st.sampled_from(list(Cause))), Arm.TREATED,
        draw(st.integers(1, 10**9)), T0 + start, None if used is None else T0 + used, draw(st.booleans()), draw(st.booleans()),
        draw(st.none() | st.just(T0 + start)),
    )  # fmt: skip


@given(st.lists(entries(), max_size=6))
def test_used_and_idle_make_up_what_is_held_in_every_hour_and_causes_make_up_all(held: list[HeldEntry]) -> None:
    """Whole seconds and bytes: sums are exact. What was used is counted here from the entries alone."""
    until_s = T0 + 40_000
    sums = provisional(held, until_s)
    used: dict[int, float] = {}
    for each in held:
        last_s = until_s if each.in_use else each.last_use_s
        for hour, seconds in by_hour(each.start_s, each.start_s if last_s is None else last_s):
            used[hour] = used.get(hour, 0.0) + each.bytes * seconds
    by_cause = {cause: sum_totals(t for k, t in sums.items() if k.cause is cause).held_byte_s for cause in Cause}
    assert sum(by_cause.values()) == sum(each.bytes * (until_s - each.start_s) for each in held)
    for hour in {key.hour for key in sums}:
        total = sum_totals(t for k, t in sums.items() if k.hour == hour)
        assert total.idle_byte_s + used.get(hour, 0.0) == total.held_byte_s
        assert 0.0 <= total.wasted_byte_s <= total.idle_byte_s
        assert total.early_byte_s <= total.held_byte_s


# --- first requests, stages, tenants ---


def row(ledger: Ledger, ts: float, wait_s: float, model: str = "a", tenant: str = "", bypass: bool = False) -> None:
    name = ModelName(model)
    ledger.record(facts.RowSeen(name, ts, Found.ABSENT, tenant=tenant))
    tier = Tier.DISK if bypass else Tier.HOST
    ledger.record(facts.RowServed(name, ts, Found.ABSENT, wait_s, bypass=bypass, tier=tier, tenant=tenant))


def test_the_first_request_after_a_pause_is_counted_whatever_the_policy_did() -> None:
    ledger = Ledger()
    for ts, wait_s in ((0.0, 3.0), (1.0, 2.0), (FIRST_GAP_S, 1.0), (2 * FIRST_GAP_S + 1.0, 4.0), (2 * FIRST_GAP_S + 1.0, 4.0)):
        row(ledger, T0 + ts, wait_s)
    total = sum_totals(ledger.totals().values())
    assert histogram.count_of(total.waits) == 5
    assert total.first_waits == histogram.bins_of(np.array([3.0, 4.0]))
    assert histogram.add_up(ledger.slots().values()) == total.first_waits


def test_a_first_request_that_waits_across_a_restart_is_counted_once() -> None:
    ledger = Ledger()
    ledger.record(facts.RowSeen(ModelName("a"), T0, Found.ABSENT))
    again = Ledger()
    again.restore(msgspec.json.decode(ledger.encoded()))
    again.record(facts.RowSeen(ModelName("a"), T0 + 5.0, Found.MOVING))
    for ts in (T0, T0 + 5.0):
        again.record(facts.RowServed(ModelName("a"), ts, Found.ABSENT, 8.0, tier=Tier.HOST))
    assert sum_totals(again.totals().values()).first_waits == {histogram.bin_of(8.0): 1}


def test_tenants_are_told_apart_up_to_a_bound() -> None:
    ledger = Ledger()
    for number in range(250):
        row(ledger, T0, 1.0, tenant=f"t{number}")
    row(ledger, T0, 1.0)
    rows = {key.tenant: totals.rows for key, totals in ledger.totals().items()}
    assert (len(rows), rows["others"], rows[""], rows["t0"]) == (202, 50, 1, 1)


# --- parts and books ---


class Node:
    """A ledger with what it tells; facts are drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ledger, self.told = Ledger(keep_hours=1, tells=True), Told(NODE, T0)
        self.held: list[facts.ResidencyEnded] = []
        self.now_s, self.seq, self.orders = T0, 0, 0
        self.messages: list[tuple[int, bytes]] = []
        self.store: dict[str, bytes] = {}
        self.stored: bytes = b""

    def live(self) -> None:
        draw = self.random
        self.now_s += draw.choice([1.0, 7.5, 300.0, 4000.0])
        kind = draw.randrange(5)
        name = ModelName(draw.choice("abc"))
        if kind == 0:
            row(self.ledger, self.now_s - draw.choice([0.0, 5000.0]), draw.uniform(0.0, 9.0), name, draw.choice(["", "t"]))
        elif kind == 1:
            decision_id = DecisionId(f"o{self.orders}")
            self.orders += 1
            cause = draw.choice([Cause.FORECAST, Cause.HINT, Cause.MANUAL])
            order = Order(
                decision_id, NODE, WeightsKey(name), Tier.HOST, cause, Arm.TREATED, self.now_s, 0.0, 0.0, 600.0, (("hazard", 0.7),), "s"
            )
            for fact in (
                facts.OrderIssued(order, 1000),
                facts.OrderBegan(decision_id, self.now_s),
                facts.OrderReady(decision_id, self.now_s),
            ):
                self.ledger.record(fact)
            if all(each.key.model != name for each in self.held):
                start_s = self.now_s
                self.held.append(
                    facts.ResidencyEnded(WeightsKey(name), Tier.HOST, cause, start_s, start_s, None, start_s, 1000, decision_id)
                )
        elif kind == 2 and self.held:
            fact = self.held.pop(draw.randrange(len(self.held)))
            if fact.decision_id is not None:
                self.ledger.record(facts.OrderEnded(fact.decision_id, self.now_s, draw.choice([Ending.GIVEN_UP, Ending.DISPLACED]), "why"))
            self.ledger.record(self.ended(fact))
        elif kind == 3:
            self.ledger.record(facts.StageEnded(WeightsKey(name), Stage.READ, self.now_s, draw.uniform(0.1, 3.0)))
        self.ledger.take_closed(self.now_s)
        self.ledger.take_old_totals(self.now_s)

    def ended(self, fact: facts.ResidencyEnded) -> facts.ResidencyEnded:
        from dataclasses import replace

        return replace(fact, end_s=self.now_s)

    def tell(self, arrives: bool = True) -> None:
        held = self.ledger.held_entries([self.ended(fact) for fact in self.held])
        told = self.told.to_tell(self.ledger, held, self.now_s, 0.0, last=True)
        assert told is not None
        if arrives:
            for part in told.parts:
                self.seq += 1
                self.messages.append((self.seq, msgspec.json.encode(part)))
            self.show(told)
        self.told.settle(told, self.ledger, arrives)

    def show(self, told: ToTell) -> None:
        self.store |= told.hours
        self.stored = msgspec.json.encode(msgspec.structs.replace(told.ledger, seq=self.seq))

    def restart(self) -> None:
        raw, state = self.ledger.encoded(), msgspec.json.encode(self.told.state())
        self.ledger, self.told = Ledger(keep_hours=1, tells=True), Told(NODE, 0.0)
        self.ledger.restore(msgspec.json.decode(raw))
        self.told.restore(msgspec.json.decode(state, type=SumsState))

    def shown(self) -> NodeSums:
        """As the state store has it."""
        stored = msgspec.json.decode(self.stored, type=StoredLedger)
        hours = {}
        for hour, part, _ in stored.hours:
            raw = self.store.get(f"prefetcher:{{node/{NODE}}}:hour/{hour}.{part}")
            if raw is not None:
                hours[hour, part] = decode_hour(raw)
        return NodeSums.stored(NODE, stored, hours)

    def rebuilt(self, messages: list[tuple[int, bytes]]) -> NodeSums:
        found = NodeSums(NODE)
        for seq, raw in messages:
            found.take(seq, msgspec.json.decode(raw, type=LedgerPart))
        return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.sampled_from(["live", "live", "live", "tell", "lost", "restart"]), min_size=5, max_size=60))
def test_the_topic_alone_gives_what_is_shown_live_to_the_last_digit(seed: int, steps: list[str]) -> None:
    node = Node(seed)
    for step in steps:
        match step:
            case "live":
                node.live()
            case "tell":
                node.tell()
            case "lost":
                node.tell(arrives=False)
            case _:
                node.restart()
    node.tell()
    twice = node.messages + node.messages
    random.Random(seed).shuffle(twice)
    live, again = node.shown(), node.rebuilt(twice)
    assert (live.at_s, live.seq, live.since_s) == (again.at_s, again.seq, again.since_s)
    assert live.by_key() == again.by_key()
    for by in ("model", "cause", "predictor", "source", "tenant", "hour", "tier", "stage"):
        question = Question(until_s=node.now_s + 1.0, by=by)
        assert msgspec.json.encode(build_report([live], question)) == msgspec.json.encode(build_report([again], question))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(5, 60))
def test_what_is_told_is_the_ledger_and_what_it_holds(seed: int, steps: int) -> None:
    """Against the sums that the ledger keeps for ever, with the memory that is still held."""
    node = Node(seed)
    for _ in range(steps):
        node.live()
        if node.random.random() < 0.3:
            node.tell()
    node.tell()
    ever = node.ledger.lifetime([node.ended(fact) for fact in node.held])
    found = node.rebuilt(node.messages).by_key()
    for cause, arm in {(key.cause, key.arm) for key in found} | set(ever):
        expected, told = ever[cause, arm], sum_totals(totals for key, totals in found.items() if (key.cause, key.arm) == (cause, arm))
        for name in Totals.__struct_fields__:
            one, other = getattr(expected, name), getattr(told, name)
            assert one == pytest.approx(other) if isinstance(one, float | dict) else one == other, name


def test_a_snapshot_of_the_old_format_is_restored_and_told() -> None:
    rows = {"rows": 3, "found": {"absent": 3}, "wait_s": 4.5}
    old = {
        "format": 1, "open": [], "closed": [], "changed": [],
        "hours": [[[{"model": "a", "cause": "demand", "arm": "treated", "hour": 490_000}, rows]]],
        "lifetime": [["demand", "treated", rows]],
    }  # fmt: skip
    ledger = Ledger(tells=True)
    ledger.restore(old)
    (told,) = ledger.changed_sums()
    assert (told.key, told.totals.rows) == (TotalsKey(ModelName("a"), Cause.DEMAND, Arm.TREATED, 490_000), 3)
    assert ledger.first_hour_s(T0 + 9e9) == T0


def test_an_hour_that_is_damaged_is_refused() -> None:
    raw = encode_hour([(TotalsKey(ModelName("a"), Cause.DEMAND, Arm.TREATED, 1), Totals(rows=1))])
    assert decode_hour(raw)[0][1].rows == 1
    for bad in (raw[:-3], b"", b"x" * 40, raw[:4] + b"?" + raw[5:]):
        with pytest.raises(ValueError, match=r"hour of a ledger|JSON|malformed|truncated"):
            decode_hour(bad)


# --- tables ---


def test_sums_and_orders_survive_parquet_as_they_are() -> None:
    node = Node(5)
    for _ in range(80):
        node.live()
    node.tell()
    sums = {(NODE, part, key): totals for (part, key), totals in node.rebuilt(node.messages).sums.items()}
    assert read_sums(sums_table(sums)) == sums
    order = {"decision_id": "d", "node": "n", "model": "m", "version": "v", "tier": "host", "cause": "hint", "arm": "treated"}
    order |= {"issued_s": 1.0, "contributions": [["hint", 1.0]], "source": "chat"}
    (found,) = orders_table([order]).to_pylist()
    assert (found["source"], found["contributions"], found["outcome"], found["ready_s"]) == ("chat", [("hint", 1.0)], "open", None)


# --- the report ---


def sums_of(node: str, *told: tuple[TotalsKey, Totals], at_s: float = T0 + 7200.0) -> NodeSums:
    return NodeSums(node, at_s, T0, 1, {(0, key): totals for key, totals in told})


def test_figures_groups_and_the_objective() -> None:
    rows = TotalsKey(ModelName("a"), Cause.DEMAND, Arm.TREATED, 490_000, tenant="chat")
    quick = Totals(rows=98, found={Found.READY: 98}, waits={histogram.NO_WAIT: 98}, first_waits={histogram.NO_WAIT: 8}, served={"host": 98})
    slow = Totals(rows=2, found={Found.ABSENT: 2}, wait_s=6.0, waits={histogram.bin_of(3.0): 2}, first_waits={histogram.bin_of(3.0): 2})
    slow.served, slow.served_wait_s = {"disk": 2}, {"disk": 6.0}
    other = TotalsKey(ModelName("b"), Cause.DEMAND, Arm.TREATED, 490_001)
    orders = TotalsKey(ModelName("a"), Cause.HINT, Arm.TREATED, 490_001, "host", "", "chat-page")
    nodes = [sums_of("n0", (rows, quick)), sums_of("n1", (other, slow), (orders, Totals(orders=3, outcomes={}, held_byte_s=3.6e12)))]
    besides = Besides(shadow_s={"n1": {490_001: 12.0}})
    report = build_report(nodes, Question(T0 + 7200.0, T0, "tier", slo_target_ratio=0.9), besides)
    total = report.total
    assert (total.requests, total.cold_s, total.miss, total.cold_starts) == (100, 6.0, 2, 2)
    assert (total.waits.p50_s, total.first_waits.count) == (0.0, 10)
    assert (total.shadow_requests, total.shadow_cold_s, total.coverage) == (2, 12.0, 0.5)
    assert (total.prefetches, total.outcomes["open"], total.held_gb_h, total.used_gb_h) == (3, 3, 1.0, 1.0)
    assert (report.slo.count, report.slo.met, report.slo.met_ratio) == (10, 8, 0.8)
    assert [(group.name, group.figures.requests) for group in report.groups] == [("disk", 2), ("host", 98)]
    by_source = build_report(nodes, Question(T0 + 7200.0, T0, "source")).groups
    assert {group.name: group.figures.prefetches for group in by_source} == {"chat-page": 3, "none": 0}
    with pytest.raises(ValueError, match="broken down"):
        build_report(nodes, Question(T0, by="colour"))


def test_burn_rates_look_back_from_the_end_of_the_window() -> None:
    node = sums_of("n0")
    until_s = T0 + 10 * HOUR_S
    slow, quick = histogram.bin_of(5.0), histogram.NO_WAIT
    node.slots = {
        int((until_s - 600.0) // 300): {slow: 1, quick: 9},
        int((until_s - 3 * HOUR_S) // 300): {quick: 90},
        int(T0 // 300): {slow: 9},
    }
    slo = build_report([node], Question(until_s)).slo
    assert (slo.burn_1h, slo.burn_6h) == (pytest.approx(10.0), pytest.approx(1.0))
    assert build_report([node], Question(T0 - 1e6)).slo.burn_1h is None


def test_a_window_leaves_out_other_hours_and_keeps_its_own_memory() -> None:
    entry = HeldEntry(ModelName("a"), ModelVersion("v"), "host", Cause.DEMAND, Arm.TREATED, 10**9, T0, None)
    node = NodeSums("n0", T0 + 3 * HOUR_S, T0, 1, held={entry.place: entry})
    report = build_report([node], Question(T0 + 2 * HOUR_S, T0 + HOUR_S, "hour"))
    assert (report.total.held_gb_h, report.total.idle_gb_h) == (1.0, 1.0)
    assert [group.name for group in report.groups] == [str(int(T0 + HOUR_S))]
    assert next(iter(node.by_key())).hour == 490_000

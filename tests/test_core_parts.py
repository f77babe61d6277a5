"""The residency machine and parts: who keeps what, what it costs to come back, and when a part leaves."""

from __future__ import annotations

import json

import pytest
from test_core_residency import NODE, Bench, key

from prefetcher.core import events as ev
from prefetcher.core import facts
from prefetcher.core.copies import Stage
from prefetcher.core.ledger import Ledger
from prefetcher.core.node import BLOCK_BYTES as BLOCK
from prefetcher.core.residency import NodeLimits, ResidencyMachine
from prefetcher.core.totals import Totals
from prefetcher.core.types import Cause, DesiredWeights, ModelName, Tier


class Parts(Bench):
    """Sizes and budgets in blocks; evictions and trims are answered when `answer` is called."""

    def __init__(self, sizes: dict[str, int], host: int, **limits: object) -> None:
        super().__init__({model: size * BLOCK for model, size in sizes.items()}, host * BLOCK, **limits)
        self.ledger = Ledger(keep_hours=1_000_000)
        self.freed = 0

    def tell(self, event: ev.Event, after_s: float = 1.0) -> Parts:
        super().tell(event, after_s)
        for told in self.told:
            if isinstance(told, ev.Record):
                self.ledger.record(told.fact)
        return self

    def ranks(self, **index: float) -> Parts:
        self.plan(*(DesiredWeights(key(model), at, 0.0) for model, at in index.items()))
        return self

    def asks(self, model: str) -> Parts:
        return self.tell(ev.Requested(ModelName(model), self.now_s + 1.0))

    def arrives(self, model: str) -> Parts:
        self.asks(model)
        self.answers()
        return self.tell(ev.WeightsLoaded(key(model), Tier.HOST))

    def answers(self, *, keeps: bool = True) -> Parts:
        """The shell does as it was told about evictions."""
        for told in [*self.of(ev.EvictWeights)]:
            self.tell(ev.WeightsEvicted(told.key, told.tier, kept_bytes=told.keep_bytes if keeps else 0))
        return self

    def stage(self, model: str) -> Stage | None:
        copy = self.machine.holdings.weights[key(model)].copies.get(Tier.HOST)
        return None if copy is None else copy.stage

    def held(self, model: str) -> float:
        return self.machine.holdings.weights[key(model)].held_bytes(Tier.HOST) / BLOCK

    def trimmed(self) -> Parts:
        """`large` has 10 blocks of 12 in memory, `small` of 3 comes: `large` keeps 9 of them."""
        self.ranks(large=1.0, small=20.0).arrives("large").arrives("small")
        return self


@pytest.fixture
def bench() -> Parts:
    return Parts({"large": 10, "small": 3, "other": 4}, 12)


def test_the_last_victim_keeps_what_the_room_does_not_need(bench: Parts) -> None:
    bench.ranks(large=1.0, small=20.0).arrives("large").asks("small")
    (evict,) = bench.of(ev.EvictWeights)
    assert (evict.key, evict.reason, evict.keep_bytes) == (key("large"), ev.Evicted.ROOM, 9 * BLOCK)
    assert bench.held("large") == 10, "until the kernel has them back"
    bench.answers()
    assert (bench.stage("large"), bench.held("large")) == (Stage.PART, 9)
    (ended,) = bench.facts(facts.ResidencyEnded)
    assert (ended.bytes, ended.ready_s is not None) == (10 * BLOCK, True)
    (load,) = bench.of(ev.LoadWeights)
    assert (load.key, load.resumed, load.resume_from_bytes) == (key("small"), False, 0)
    assert bench.machine.holdings.used_bytes[Tier.HOST] == 12 * BLOCK


def test_a_part_is_nothing_that_can_be_opened_and_goes_on_where_it_ends(bench: Parts) -> None:
    bench.trimmed().ranks(large=5.0, small=1.0)
    bench.tell(ev.LeaseRequested("h", ModelName("large"), "t"))
    assert bench.of(ev.GrantLease) == []
    (seen,) = bench.facts(facts.RowSeen)
    assert seen.found is facts.Found.ABSENT
    (evict,) = bench.of(ev.EvictWeights)
    assert (evict.key, evict.keep_bytes) == (key("small"), 2 * BLOCK), "one block more is all it needs"
    bench.answers()
    (load,) = bench.of(ev.LoadWeights)
    assert (load.key, load.resumed, load.resume_from_bytes, load.bytes) == (key("large"), False, 9 * BLOCK, 10 * BLOCK)
    assert [f.bytes for f in bench.facts(facts.ResidencyEnded)] == [3 * BLOCK, 9 * BLOCK]
    assert bench.held("large") == 10
    bench.tell(ev.WeightsLoaded(key("large"), Tier.HOST))
    assert [f.bytes for f in bench.facts(facts.TransferEnded)] == [BLOCK]
    assert [(g.tier, g.bypass) for g in bench.of(ev.GrantLease)] == [(Tier.HOST, False)]


def test_what_is_given_up_is_compared_with_all_that_is_there_then(bench: Parts) -> None:
    # `small` is worth 3 × 2, the one block of `large` that it needs 1 × 5: all of `large`, 50, would be worth more.
    bench.ranks(large=5.0, small=2.0).arrives("large").asks("small")
    assert [e.keep_bytes for e in bench.of(ev.EvictWeights)] == [9 * BLOCK]
    bench.answers().tell(ev.WeightsLoaded(key("small"), Tier.HOST))
    # `large`, 50 when it is whole, is not worth one block of `small` at 60.
    bench.ranks(large=5.0, small=60.0).asks("large")
    assert bench.of(ev.EvictWeights) == []
    (served,) = bench.facts(facts.RowServed)
    assert (served.bypass, served.tier) == (True, Tier.DISK)
    assert (bench.stage("large"), bench.held("large")) == (Stage.PART, 9)


def test_a_part_that_somebody_waits_for_is_no_victim() -> None:
    bench = Parts({"large": 10, "small": 3, "other": 4, "tiny": 1}, 13)
    bench.ranks(tiny=30.0, large=1.0, small=20.0).arrives("tiny").arrives("large").arrives("small")
    bench.tell(ev.EvictAsked(ModelName("small"), "ask")).answers()
    bench.ranks(tiny=1.0, large=2.0, small=20.0, other=50.0).asks("small").asks("large").asks("other")
    assert bench.of(ev.EvictWeights) == []
    (served,) = bench.facts(facts.RowServed)
    assert (served.model, served.bypass) == ("other", True)
    bench.tell(ev.WeightsLoaded(key("small"), Tier.HOST))
    assert [(e.key, e.keep_bytes) for e in bench.of(ev.EvictWeights)] == [(key("tiny"), 0)]
    bench.answers()
    assert [(load.key, load.resume_from_bytes) for load in bench.of(ev.LoadWeights)] == [(key("large"), 9 * BLOCK)]


@pytest.mark.parametrize("how", ["price", "by hand", "version", "trimmed again", "switched off"])
def test_parts_leave_as_what_is_idle_does(bench: Parts, how: str) -> None:
    bench.trimmed()
    if how == "price":
        bench.plan(DesiredWeights(key("large"), 1e-9, 0.0), price=1e-6)
        expected = (ev.Evicted.PRICE, 0)
    elif how == "by hand":
        bench.tell(ev.EvictAsked(ModelName("large"), "ask"))
        expected = (ev.Evicted.ASKED, 0)
    elif how == "version":
        bench.see(key("large", "2"), BLOCK)
        bench.tell(ev.VersionPublished(key("large"), key("large", "2")))
        assert bench.of(ev.LoadWeights) == [], "of what is a part nothing is carried"
        expected = (ev.Evicted.VERSION, 0)
    elif how == "trimmed again":
        bench.ranks(large=1.0, small=9.0, other=9.0).asks("other")
        expected = (ev.Evicted.ROOM, 5 * BLOCK)
    else:
        bench.load("small", "h").tell(ev.SwitchedOff())
        assert bench.of(ev.EvictWeights) == []
        bench.asks("other")
        expected = (ev.Evicted.ROOM, 0)
    (evict,) = bench.of(ev.EvictWeights)
    assert (evict.key, evict.reason, evict.keep_bytes) == (key("large"), *expected)
    bench.answers()
    assert bench.held("large") == expected[1] / BLOCK
    assert [f.bytes for f in bench.facts(facts.ResidencyEnded)] == [9 * BLOCK]


def test_switched_off_nothing_is_kept(bench: Parts) -> None:
    bench.tell(ev.SwitchedOff()).arrives("large").asks("small")
    assert [(e.key, e.keep_bytes) for e in bench.of(ev.EvictWeights)] == [(key("large"), 0)]


def test_a_node_that_is_told_so_keeps_no_parts() -> None:
    bench = Parts({"large": 10, "small": 3}, 12, parts=False).ranks(large=1.0, small=20.0).arrives("large").asks("small")
    assert [e.keep_bytes for e in bench.of(ev.EvictWeights)] == [0]


def test_what_could_not_be_cut_left_whole(bench: Parts) -> None:
    bench.ranks(large=1.0, small=20.0).arrives("large").asks("small").answers(keeps=False)
    assert bench.stage("large") is None
    assert bench.of(ev.LoadWeights)[0].key == key("small")


def test_an_answer_that_comes_twice_or_late_changes_nothing(bench: Parts) -> None:
    bench.trimmed().tell(ev.WeightsEvicted(key("large"), Tier.HOST, kept_bytes=9 * BLOCK))
    assert bench.held("large") == 9
    bench.tell(ev.EvictAsked(ModelName("large"), "ask"))
    bench.tell(ev.WeightsEvicted(key("large"), Tier.HOST, kept_bytes=9 * BLOCK))
    assert bench.stage("large") is Stage.EVICTING
    bench.tell(ev.WeightsEvicted(key("large"), Tier.HOST))
    assert bench.stage("large") is None


def test_an_instruction_that_is_said_again_says_what_stays(bench: Parts) -> None:
    bench.ranks(large=1.0, small=20.0).arrives("large").asks("small").tell(ev.Ticked(), 40.0)
    assert [(e.reason, e.keep_bytes) for e in bench.of(ev.EvictWeights)] == [(ev.Evicted.OVERDUE, 9 * BLOCK)]


def test_a_prefetch_that_is_cut_unused_was_displaced_and_one_of_a_part_reads_the_rest(bench: Parts) -> None:
    bench.plan(bench.wants("large", 1.0, "o1"), DesiredWeights(key("small"), 20.0, 0.0))
    bench.tell(ev.WeightsLoaded(key("large"), Tier.HOST)).arrives("small")
    assert bench.ledger.take_changed()[0].outcome.value == "displaced"
    bench.plan(bench.wants("large", 9.0, "o2"), DesiredWeights(key("small"), 1.0, 0.0)).answers()
    (load,) = bench.of(ev.LoadWeights)
    assert (load.order is not None, load.resume_from_bytes, load.cause) == (True, 9 * BLOCK, Cause.FORECAST)


def test_a_pin_keeps_a_part_and_makes_it_whole(bench: Parts) -> None:
    bench.trimmed().tell(ev.Pinned(ModelName("large"), "ask")).answers()
    assert bench.of(ev.LoadWeights)[0].resume_from_bytes == 9 * BLOCK


def test_snapshots_have_parts_and_a_dead_agent_has_none(bench: Parts) -> None:
    bench.trimmed()
    other = ResidencyMachine(NODE, bench.machine.limits)
    other.restore(json.loads(bench.machine.encoded()))
    assert other.check() == []
    assert other.snapshot() == bench.machine.snapshot()
    assert other.holdings.used_bytes == bench.machine.holdings.used_bytes
    bench.tell(ev.AgentRestarted(frozenset({(key("small"), Tier.HOST)})))
    assert bench.stage("large") is None
    assert [f.bytes for f in bench.facts(facts.ResidencyEnded)] == [9 * BLOCK]


def test_byte_seconds_are_those_that_were_held(bench: Parts) -> None:
    """Added up by hand, second by second, over everything that a part goes through."""
    held: list[float] = []
    real = bench.machine.handle

    def counted(event: ev.Event, now_s: float) -> list[ev.Instruction]:
        held.append(bench.machine.holdings.used_bytes[Tier.HOST] * (now_s - bench.machine.links.now_s))
        return real(event, now_s)

    bench.machine.handle = counted  # type: ignore[method-assign]
    bench.trimmed().ranks(large=5.0, small=1.0).asks("large").answers()
    bench.tell(ev.WeightsLoaded(key("large"), Tier.HOST)).ranks(large=1.0, small=9.0, other=9.0).arrives("other").arrives("small")
    sums = bench.ledger.lifetime(bench.machine.held(bench.now_s))
    assert sum(totals.held_byte_s for totals in sums.values()) == pytest.approx(sum(held), rel=1e-12)
    (totals,) = sums.values()
    assert isinstance(totals, Totals)
    assert 0.0 < totals.idle_byte_s < totals.held_byte_s
    assert totals.wasted_byte_s == 0.0


def test_only_host_memory_keeps_parts() -> None:
    limits = NodeLimits({Tier.HOST: 12 * BLOCK, Tier.DEVICE: 12 * BLOCK, Tier.DISK: 12 * BLOCK})
    machine = ResidencyMachine(NODE, limits)
    assert [machine.holdings.keeps_parts(tier) for tier in (Tier.DISK, Tier.HOST, Tier.DEVICE)] == [False, True, False]

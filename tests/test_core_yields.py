"""A demand load that gives way to a denser one in the residency machine, and what may happen to it while it is paused."""

from __future__ import annotations

import json

import pytest
from test_core_residency import NODE, Bench, key

from prefetcher.core import events as ev
from prefetcher.core import facts
from prefetcher.core.facts import Found
from prefetcher.core.residency import ResidencyMachine
from prefetcher.core.types import ModelName, Tier

HOST = Tier.HOST


def row(bench: Bench, model: str, rows: int = 1) -> Bench:
    for _ in range(rows):
        bench.tell(ev.Requested(ModelName(model), bench.now_s + 1.0))
    return bench


def asks(bench: Bench, model: str, holder: str) -> Bench:
    return bench.tell(ev.LeaseRequested(holder, ModelName(model), holder))


def started(bench: Bench) -> list[tuple[str, int]]:
    """The loads that start or go on, and at which byte."""
    return [(i.key.model, i.resume_from_bytes) for i in bench.of(ev.LoadWeights)]


def paused(sizes: dict[str, int], host: int = 1000, **limits: object) -> Bench:
    """`big` gave way to `small` after 20 bytes; a program waits for each."""
    bench = Bench({"big": 80, "small": 10} | sizes, host, **limits)
    asks(bench, "big", "h-big")
    asks(bench, "small", "h-small")
    assert bench.of(ev.PauseLoad) == [ev.PauseLoad(key("big"), HOST, key("small"))]
    bench.tell(ev.LoadPaused(key("big"), HOST, 20))
    assert started(bench) == [("small", 0)]
    return bench


def test_a_demand_load_gives_way_to_a_denser_one_and_goes_on_where_it_was() -> None:
    bench = paused({})
    bench.tell(ev.WeightsLoaded(key("small"), HOST), 3.0)
    assert [(s.model, s.wait_s) for s in bench.facts(facts.RowServed)] == [("small", 4.0)]
    assert started(bench) == [("big", 20)]
    bench.tell(ev.WeightsLoaded(key("big"), HOST), 6.0)
    assert [(s.model, s.wait_s) for s in bench.facts(facts.RowServed)] == [("big", 11.0)]
    (segment,) = bench.facts(facts.TransferEnded)
    assert segment.bytes == 60, "what was read before is not read again"
    (stage,) = bench.facts(facts.StageEnded)
    assert stage.took_s == 8.0, "2 s until it gave way, and 6 s"


@pytest.mark.parametrize(
    ("done", "rows", "gives_way"), [(0, 1, True), (0, 2, False), (79, 1, False), (60, 2, False), (15, 2, False), (0, 3, False)]
)
def test_it_gives_way_to_more_rows_per_byte_that_is_left_alone(done: int, rows: int, gives_way: bool) -> None:
    bench = Bench({"moving": 80, "new": 40}, host=1000)
    row(bench, "moving", rows).tell(ev.BytesVerified(key("moving"), HOST, done))
    row(bench, "new")
    assert bool(bench.of(ev.PauseLoad)) is gives_way
    if not gives_way:
        # It is asked when somebody comes, and not each time that something happens.
        bench.tell(ev.Ticked())
        assert bench.of(ev.PauseLoad) == []
        row(bench, "new", 40)
        assert bench.machine.holdings.weights[key("moving")].copies[HOST].stage == "pausing"


def test_who_comes_while_it_finishes_its_block_finds_it_moving_and_may_bring_it_back_first() -> None:
    bench = Bench({"big": 80, "small": 10}, host=1000)
    row(bench, "big")
    row(bench, "small")
    row(bench, "big", 6)
    assert [r.found for r in bench.facts(facts.RowSeen)] == [Found.MOVING]
    bench.tell(ev.LoadPaused(key("big"), HOST, 30))
    assert started(bench) == [("big", 30)], "seven rows for 50 bytes are more than one for 10"


def test_a_load_that_gave_way_is_queued_and_what_moves_gives_way_to_it_in_turn() -> None:
    bench = paused({})
    row(bench, "big", 5)
    assert [r.found for r in bench.facts(facts.RowSeen)] == [Found.QUEUED]
    assert bench.of(ev.PauseLoad) == []
    row(bench, "big")
    assert bench.of(ev.PauseLoad) == [], "six rows for 60 bytes are as dense as one for 10"
    row(bench, "big")
    assert bench.of(ev.PauseLoad) == [ev.PauseLoad(key("small"), HOST, key("big"))]
    bench.tell(ev.LoadPaused(key("small"), HOST, 5))
    assert started(bench) == [("small", 5)], "by then it has less left, and wins again"


def test_a_load_in_its_last_block_is_done_before_it_could_pause() -> None:
    bench = Bench({"big": 80, "small": 10}, host=1000)
    asks(bench, "big", "h")
    row(bench, "small")
    assert bench.of(ev.PauseLoad)
    bench.tell(ev.WeightsLoaded(key("big"), HOST))
    assert [g.holder for g in bench.of(ev.GrantLease)] == ["h"]
    assert started(bench) == [("small", 0)]


def test_switched_off_no_demand_load_gives_way() -> None:
    bench = Bench({"big": 80, "small": 10}, host=1000).tell(ev.SwitchedOff())
    row(bench, "big")
    row(bench, "small", 5)
    assert bench.of(ev.PauseLoad) == []
    bench.tell(ev.WeightsLoaded(key("big"), HOST))
    assert started(bench) == [("small", 0)]


@pytest.mark.parametrize("what", ["off", "observe", "plan"])
def test_what_switches_prefetching_off_leaves_a_paused_load_to_those_who_wait(what: str) -> None:
    bench = paused({})
    match what:
        case "off":
            bench.tell(ev.SwitchedOff())
        case "observe":
            bench.tell(ev.SwitchedOn(observe=True))
        case _:
            # Worth less than its price, too: that is looked at again once it is there.
            bench.plan(bench.wants("big", 1e-9), price=1.0, enabled=False)
    assert bench.of(ev.CancelLoad) == []
    bench.tell(ev.Ticked())
    bench.tell(ev.WeightsLoaded(key("small"), HOST))
    assert bench.of(ev.CancelLoad) == []
    assert started(bench) == [("big", 20)]
    bench.tell(ev.WeightsLoaded(key("big"), HOST))
    assert [g.bypass for g in bench.of(ev.GrantLease)] == [False]


def test_its_memory_is_nobody_elses_while_somebody_waits_and_free_for_others_once_nobody_does() -> None:
    bench = paused({"new": 30}, host=100)
    asks(bench, "new", "h-new")
    assert [(g.holder, g.reason) for g in bench.of(ev.GrantLease)] == [("h-new", "no_room")], "80 and 10 of 100 are taken"
    assert bench.of(ev.CancelLoad) == []
    bench.tell(ev.HolderLost("h-big"))
    asks(bench, "new", "h-new")
    assert bench.of(ev.GrantLease) == [], "it waits for its turn: there will be room"
    bench.tell(ev.WeightsLoaded(key("small"), HOST))
    assert [c.key.model for c in bench.of(ev.CancelLoad)] == ["big"]
    bench.tell(ev.WeightsEvicted(key("big"), HOST))
    assert started(bench) == [("new", 0)]


def test_a_paused_load_that_nobody_waits_for_any_more_gives_its_memory_back() -> None:
    bench = paused({}).tell(ev.HolderLost("h-big"))
    assert bench.of(ev.CancelLoad) == []
    bench.tell(ev.Ticked())
    assert [c.key.model for c in bench.of(ev.CancelLoad)] == ["big"]


def test_loads_that_are_paused_fill_the_memory_and_the_next_denser_one_is_served_from_disk() -> None:
    bench = Bench({"a": 60, "b": 25, "c": 12, "d": 8}, host=100)
    for holder, (model, before) in {"1": ("a", ""), "2": ("b", "a"), "3": ("c", "b")}.items():
        asks(bench, model, holder)
        if before:
            assert [p.key.model for p in bench.of(ev.PauseLoad)] == [before]
            bench.tell(ev.LoadPaused(key(before), HOST, 1))
        assert started(bench) == [(model, 0)]
    asks(bench, "d", "4")
    assert [(g.holder, g.bypass, g.reason) for g in bench.of(ev.GrantLease)] == [("4", True, "no_room")]
    assert bench.of(ev.PauseLoad) == [], "there is no room for what it would give way to"
    assert bench.of(ev.CancelLoad) == []
    order = []
    for model in ("c", "b", "a"):
        bench.tell(ev.WeightsLoaded(key(model), HOST))
        order += [g.holder for g in bench.of(ev.GrantLease)]
    assert order == ["3", "2", "1"], "all of them are loaded in the end, from where they were"


def test_a_load_that_stands_still_for_too_long_is_served_from_disk_and_one_that_moves_is_not() -> None:
    bench = paused({"next": 10}, demand_deadline_s=100.0, stall_s=1e6)
    bench.tell(ev.Ticked(), 90.0)
    bench.tell(ev.WeightsLoaded(key("small"), HOST))
    assert started(bench) == [("big", 20)]
    bench.tell(ev.BytesVerified(key("big"), HOST, 30), 200.0)
    bench.tell(ev.Ticked())
    assert bench.of(ev.GrantLease) == [], "292 s, of which 91 without a byte"
    row(bench, "next").tell(ev.LoadPaused(key("big"), HOST, 40))
    assert started(bench) == [("next", 0)]
    bench.tell(ev.Ticked(), 5.0)
    assert bench.of(ev.GrantLease) == []
    bench.tell(ev.Ticked(), 5.0)
    assert [(g.holder, g.bypass, g.reason) for g in bench.of(ev.GrantLease)] == [("h-big", True, "deadline")]
    bench.tell(ev.Ticked())
    assert [c.key.model for c in bench.of(ev.CancelLoad)] == ["big"]


def test_a_pause_is_no_stall_and_ends_with_no_hold() -> None:
    bench = paused({}, demand_deadline_s=1e6, stall_s=50.0, adopted_hold_s=10.0)
    for done in range(1, 10):
        bench.tell(ev.BytesVerified(key("small"), HOST, done))
        bench.tell(ev.Ticked(), 40.0)
        assert bench.of(ev.CancelLoad) == []
    bench.tell(ev.WeightsLoaded(key("small"), HOST))
    assert started(bench) == [("big", 20)]


def test_a_failed_load_that_gave_way_leaves_nothing_behind() -> None:
    bench = paused({}).tell(ev.WeightsLoaded(key("small"), HOST)).tell(ev.LoadFailed(key("big"), HOST, "disk", 5.0))
    assert [(g.holder, g.reason) for g in bench.of(ev.GrantLease)] == [("h-big", "load_failed")]
    assert bench.machine.holdings.used_bytes[HOST] == 10


def test_a_new_version_takes_over_who_waits_for_a_paused_load() -> None:
    bench = paused({})
    bench.see(key("big", "2"), 80)
    bench.tell(ev.VersionPublished(key("big"), key("big", "2")))
    bench.tell(ev.WeightsLoaded(key("small"), HOST))
    assert started(bench) == [("big", 20)], "who waits comes before a new version"
    bench.tell(ev.WeightsLoaded(key("big"), HOST))
    assert [g.key.version for g in bench.of(ev.GrantLease)] == ["1"]


def test_a_machine_that_is_restored_goes_on_with_what_gave_way() -> None:
    bench = paused({})
    other = ResidencyMachine(NODE, bench.machine.limits)
    other.restore(json.loads(bench.machine.encoded()))
    bench.machine = other
    row(bench, "big")
    assert [r.found for r in bench.facts(facts.RowSeen)] == [Found.QUEUED]
    bench.tell(ev.WeightsLoaded(key("small"), HOST))
    assert started(bench) == [("big", 20)]
    old = bench.machine.snapshot()
    for weights in old["weights"]:
        for copy in weights["copies"].values():
            del copy["yields"], copy["paused_s"]
    ResidencyMachine(NODE, bench.machine.limits).restore(old)


def test_what_comes_to_the_next_link_has_what_moves_there_give_way() -> None:
    bench = Bench({"big": 40, "small": 10}, serving_tier=Tier.DEVICE)
    row(bench, "big").tell(ev.WeightsLoaded(key("big"), HOST))
    assert [i.to_tier for i in bench.of(ev.LoadWeights)] == [Tier.DEVICE]
    row(bench, "small")
    assert bench.of(ev.PauseLoad) == [], "another link"
    bench.tell(ev.WeightsLoaded(key("small"), HOST))
    assert bench.of(ev.PauseLoad) == [ev.PauseLoad(key("big"), Tier.DEVICE, key("small"))]

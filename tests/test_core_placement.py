"""Where wanted models go: never twice, over idle links first, within memory and quotas, and the same whatever the order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetcher.core.placement import Placed, Site, Wanted, place
from prefetcher.core.placement_rule import At
from prefetcher.core.rendezvous import by_rendezvous

GB = 1e9


def sites_of(count: int, models: Sequence[str], load_s: float = 4.0, **more: object) -> list[Site]:
    return [Site(f"node-{n}", dict.fromkeys(models, load_s), free_bytes=100 * GB, **more) for n in range(count)]  # type: ignore[arg-type]


def loads(placed: Mapping[str, Placed]) -> dict[str, list[str]]:
    """The models that a placement begins to load, by node."""
    found: dict[str, list[str]] = {}
    for model, where in placed.items():
        if where.at in (At.ABSENT, At.PLACED):
            found.setdefault(where.node, []).append(model)
    return found


def total_cost_s(wanted: Sequence[Wanted], sites: Sequence[Site], nodes: Sequence[int]) -> float:
    """What an assignment costs, told from scratch: everybody's waiting in Smith's order, and what is displaced."""
    total = 0.0
    for n, site in enumerate(sites):
        mine = [w for w, node in zip(wanted, nodes, strict=True) if node == n]
        queue = [(site.load_s[w.model], w.rows) for w in mine] + list(site.queue)
        at_s = site.running_s
        for takes_s, rows in sorted(queue, key=lambda job: job[0] / job[1]):
            at_s += takes_s
            total += rows * at_s
        total += max(0.0, sum(w.size_bytes for w in mine) - site.free_bytes) * site.displaced_s_per_byte
    return total


@st.composite
def bursts(draw: st.DrawFn) -> tuple[list[Wanted], list[Site]]:
    models = [f"m{i}" for i in range(draw(st.integers(1, 6)))]
    seconds = st.floats(0.5, 30.0)
    wanted = [Wanted(m, draw(st.floats(0.1, 20.0)), draw(st.integers(1, 40)) * GB, draw(st.sampled_from(["", "batch"]))) for m in models]
    sites = []
    for n in range(draw(st.integers(1, 6))):
        known = {m: draw(seconds) for m in models if draw(st.integers(0, 5))}
        at = {m: draw(st.sampled_from(list(At)[1:])) for m in known if not draw(st.integers(0, 4))}
        sites.append(
            Site(
                f"node-{n}",
                known,
                at,
                {m: draw(seconds) for m, where in at.items() if where is At.MOVING},
                running_s=draw(st.sampled_from([0.0, 0.0, 3.0, 10.0])),
                queue=draw(st.lists(st.tuples(seconds, st.floats(0.5, 5.0)), max_size=3)),
                free_bytes=draw(st.integers(-5, 60)) * GB,
                evictable_bytes=draw(st.integers(0, 40)) * GB,
                displaced_s_per_byte=draw(st.sampled_from([0.0, 1e-10, 1e-8])),
                quota_left={"batch": draw(st.integers(0, 60)) * GB},
            )
        )
    return wanted, sites


@settings(max_examples=300, deadline=None)
@given(bursts())
def test_whatever_comes_nothing_is_loaded_twice_or_beyond_memory(burst: tuple[list[Wanted], list[Site]]) -> None:
    wanted, sites = burst
    placed = place(wanted, sites)
    of = {site.node: site for site in sites}
    size = {want.model: want.size_bytes for want in wanted}
    for want in wanted:
        able = [site for site in sites if want.model in site.load_s]
        assert (want.model in placed) == bool(able)
        best = max((site.at.get(want.model, At.ABSENT) for site in able), default=At.UNKNOWN)
        if best >= At.MOVING:
            # It is there, or comes: no other load of it.
            assert placed[want.model].at is best
    for node, models in loads(placed).items():
        site = of[node]
        with_memory = [m for m in models if placed[m].cached]
        assert sum(size[m] for m in with_memory) <= max(site.free_bytes, 0.0) + site.evictable_bytes + 1e-3
        batch = sum(size[w.model] for w in wanted if w.model in with_memory and w.quota)
        assert batch <= site.quota_left["batch"] + 1e-3
        for m in models:
            assert placed[m].wait_s >= site.load_s[m]


@settings(max_examples=300, deadline=None)
@given(bursts())
def test_no_load_queues_beside_an_idle_link_unless_that_is_far_slower(burst: tuple[list[Wanted], list[Site]]) -> None:
    wanted, sites = burst
    placed = place(wanted, sites)
    begun = loads(placed)
    size = {want.model: want.size_bytes for want in wanted}
    quota = {want.model: want.quota for want in wanted}
    idle = [site for site in sites if not site.running_s and not site.queue and site.node not in begun]
    busy = {node for node, models in begun.items() if len(models) > 1} | {site.node for site in sites if site.running_s or site.queue}
    for node, models in begun.items():
        for m in models:
            if node not in busy or placed[m].at is At.PLACED:
                continue
            for site in idle:
                room = size[m] <= max(site.free_bytes, 0.0) + site.evictable_bytes
                room = room and (not quota[m] or size[m] <= site.quota_left["batch"])
                if m in site.load_s and (room or not placed[m].cached):
                    assert site.load_s[m] > 2.0 * placed[m].wait_s
                    assert site.load_s[m] > 0.1 + placed[m].wait_s


@settings(max_examples=150, deadline=None)
@given(bursts(), st.randoms(use_true_random=False))
def test_the_order_of_models_and_nodes_changes_nothing(burst: tuple[list[Wanted], list[Site]], random: object) -> None:
    wanted, sites = burst
    first = place(wanted, sites)
    random.shuffle(wanted)  # type: ignore[attr-defined]
    random.shuffle(sites)  # type: ignore[attr-defined]
    assert place(wanted, sites) == first


@settings(max_examples=100, deadline=None)
@given(bursts())
def test_what_was_placed_stays_where_it_was_placed(burst: tuple[list[Wanted], list[Site]]) -> None:
    """The same burst again, with the first answer as a plan that did not begin: nothing flaps."""
    wanted, sites = burst
    first = {m: p for m, p in place(wanted, sites).items() if p.at is At.ABSENT and p.cached}
    planned = [replace(site, at={**site.at, **{m: At.PLACED for m, p in first.items() if p.node == site.node}}) for site in sites]
    again = place([want for want in wanted if want.model in first], planned)
    for model, where in again.items():
        if where.node != first[model].node:
            # It moves only to where it waits no longer, as when what was before it went elsewhere.
            assert where.wait_s <= first[model].wait_s


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_costs_no_more_than_a_little_above_the_best_of_all_assignments(seed: int) -> None:
    rng = np.random.default_rng(seed)
    models = [f"m{i}" for i in range(4)]
    wanted = [Wanted(m, float(rng.integers(1, 6)), float(rng.uniform(5, 35)) * GB) for m in models]
    sites = [
        Site(f"node-{n}", {w.model: w.size_bytes / 3.5e9 for w in wanted}, running_s=float(rng.choice([0.0, 10.0])), free_bytes=500 * GB)
        for n in range(4)
    ]
    placed = place(wanted, sites)
    index = {site.node: n for n, site in enumerate(sites)}
    ours = total_cost_s(wanted, sites, [index[placed[m].node] for m in models])
    best = min(total_cost_s(wanted, sites, nodes) for nodes in itertools.product(range(4), repeat=4))
    assert ours <= 1.05 * best


def test_waits_are_those_of_the_whole_queue_in_smiths_order() -> None:
    wanted = [Wanted("few", 1.0, GB), Wanted("many", 10.0, GB)]
    site = Site("node-0", {"few": 4.0, "many": 6.0}, running_s=2.0, queue=((1.0, 0.1), (3.0, 100.0)), free_bytes=10 * GB)
    placed = place(wanted, [site])
    # 2 s run, then 3 s for a hundred rows, then ten rows, then one, and then the one that hardly anybody waits for.
    assert placed["many"].wait_s == 2.0 + 3.0 + 6.0
    assert placed["few"].wait_s == 2.0 + 3.0 + 6.0 + 4.0


@pytest.mark.parametrize("count", range(3, 9))
def test_models_that_are_called_at_once_take_a_link_each(count: int) -> None:
    models = [f"long-tail-{i}" for i in range(count)]
    placed = place([Wanted(m, 1.0, 14 * GB) for m in models], sites_of(8, models))
    assert len(loads(placed)) == count


def test_of_equal_nodes_it_is_the_one_that_hashing_prefers_and_it_stays_there_when_costs_differ_a_little() -> None:
    names = [f"node-{n}" for n in range(6)]
    for model in (f"model-{i}" for i in range(20)):
        home = names[by_rendezvous(model, names)[0]]
        sites = sites_of(6, [model])
        assert place([Wanted(model, 1.0, GB)], sites)[model].node == home
        a_little_worse = [replace(site, load_s={model: 4.0 if site.node == home else 3.9}) for site in sites]
        assert place([Wanted(model, 1.0, GB)], a_little_worse)[model].node != home
        placed = [replace(site, at={model: At.PLACED}) if site.node == home else site for site in a_little_worse]
        assert place([Wanted(model, 1.0, GB)], placed)[model].node == home


def test_ready_beats_moving_beats_placed_and_the_first_to_be_ready_counts() -> None:
    sites = sites_of(4, ["m"])
    placed = replace(sites[1], at={"m": At.PLACED})
    late = replace(sites[2], at={"m": At.MOVING}, ready_in_s={"m": 50.0})
    soon = replace(sites[3], at={"m": At.MOVING}, ready_in_s={"m": 40.0})
    ready = replace(sites[0], at={"m": At.READY}, running_s=100.0)
    want = [Wanted("m", 1.0, GB)]
    assert place(want, [sites[0], placed, late])["m"] == Placed("m", "node-2", At.MOVING, 50.0)
    assert place(want, [sites[0], placed, late, soon])["m"] == Placed("m", "node-3", At.MOVING, 40.0)
    assert place(want, [ready, placed, late, soon])["m"] == Placed("m", "node-0", At.READY, 0.0)
    assert place(want, [sites[0], placed])["m"].node == "node-1"


def test_what_was_placed_moves_when_it_waits_far_longer_there() -> None:
    first, second = sites_of(2, ["m"])
    planned = replace(first, at={"m": At.PLACED})
    want = [Wanted("m", 1.0, GB)]
    assert place(want, [replace(planned, running_s=1.5), second])["m"].node == "node-0"
    assert place(want, [replace(planned, running_s=20.0), second])["m"].node == "node-1"


def test_a_node_that_would_displace_what_is_worth_more_is_passed_over_for_another_idle_one() -> None:
    cheap, dear = sites_of(2, ["m"])
    dear = replace(dear, free_bytes=0.0, evictable_bytes=50 * GB, displaced_s_per_byte=1e-9)
    assert place([Wanted("m", 1.0, 10 * GB)], [cheap, dear])["m"].node == cheap.node
    assert place([Wanted("m", 1.0, 10 * GB)], [replace(cheap, free_bytes=0.0, evictable_bytes=0.0), dear])["m"].node == dear.node


def test_memory_and_quota_of_a_node_are_shared_by_the_burst() -> None:
    models = ["a", "b", "c"]
    sites = [replace(site, free_bytes=15 * GB) for site in sites_of(2, models)]
    placed = place([Wanted(m, 1.0, 10 * GB) for m in models], sites)
    # Two nodes have room for one each; the third is served uncached rather than not at all.
    assert sorted(p.cached for p in placed.values()) == [False, True, True]
    bounded = [replace(site, free_bytes=100 * GB, quota_left={"batch": 10 * GB}) for site in sites]
    placed = place([Wanted(m, 1.0, 10 * GB, "batch") for m in models], bounded)
    assert sorted(p.cached for p in placed.values()) == [False, True, True]


def test_a_model_that_is_named_twice_is_placed_once_for_the_rows_of_both() -> None:
    sites = sites_of(2, ["a", "b"])
    assert place([Wanted("a", 1.0, GB), Wanted("a", 2.0, GB)], sites).keys() == {"a"}
    assert place([Wanted("unknown", 1.0, GB)], sites) == {}
    assert place([], sites) == {}
    assert place([Wanted("a", 1.0, GB)], []) == {}

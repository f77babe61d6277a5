"""One rule: what replay's routing chooses on a cluster's state is what live placement chooses on the same state told as sites."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetcher.core.cluster import ClusterCaches, ClusterWorld, new_cluster_caches
from prefetcher.core.cluster_routing import choose_node
from prefetcher.core.demand import new_demand
from prefetcher.core.link_queue import LinkLoad, link_goes_on
from prefetcher.core.node import DEMAND, LOADING, PREFETCH, PREFETCHING, QUEUED, READY, UNCACHED, Policy, Rank, no_hazard
from prefetcher.core.placement import Site, Wanted, place
from prefetcher.core.placement_rule import At, best_node, wait_on_link
from prefetcher.replay.cluster import ClusterSimulation
from prefetcher.replay.tiers import stack_of
from prefetcher.replay.trace import read_trace

GB = 1e9
HOLD_S = 600.0
MODELS = [f"m{i}" for i in range(6)]
NOW_S = 1000.0


@cache
def world_of(nodes: int) -> ClusterWorld:
    """As a replay makes it of a log with one row of each model that names no node."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "log.parquet"
        pq.write_table(pa.table({"ts": np.arange(float(len(MODELS))), "model": MODELS}), path)
        trace = read_trace(path, catalog=dict.fromkeys(MODELS, int(GB)))
    return ClusterSimulation(trace, stack_of(("disk", "host"), host_bytes=GB), nodes=nodes)._world(by_slot=False)


class State:
    """A cluster of one tier that a test fills, seen by replay's routing and as sites."""

    def __init__(self, nodes: int, size_gb: list[int], capacity_gb: int) -> None:
        self.names = [f"node-{n}" for n in range(nodes)]
        self.size = np.array(size_gb) * GB
        self.load_s = self.size / 3.5e9
        self.world = world_of(nodes)._replace(size_bytes=self.size, link_s=self.load_s[None])
        policy = Policy(Rank.LRU, yields=True)
        capacity = np.array([capacity_gb * GB])
        self.caches = new_cluster_caches([policy], self.world, capacity, np.zeros((1, 1)), 1, (HOLD_S, 0.0))
        # What is ranked by its last use is worth more than any room: none is passed over for its own worth.
        self.caches.seen["last_row_s"] = 1e30
        self.sites: list[dict[str, Any]] = [{"at": {}, "ready": {}, "queue": [], "running": 0.0} for _ in self.names]

    def ready(self, node: int, model: int) -> None:
        slot = node * len(MODELS) + model
        if self.caches.status[0, 0, slot] or self.caches.tier[0, 0, node]["used"] + self.size[model] > self._capacity(node):
            return
        self.caches.status[0, 0, slot] = READY
        self.caches.ready[0, 0, model] += 1
        self.caches.tier[0, 0, node]["used"] += self.size[model]
        self.sites[node]["at"][MODELS[model]] = At.READY

    def waits(self, node: int, model: int, rows: int) -> None:
        slot = node * len(MODELS) + model
        # Of one model, rows wait on one node.
        if self.caches.status[0, 0, slot] or self.caches.claims[0, model]:
            return
        link = self.caches.link[0, 0, node]
        self.caches.status[0, 0, slot] = QUEUED
        self.caches.queue[0, 0, node, link["queued"]] = slot
        link["queued"] += 1
        self._demand(slot, rows)
        self.sites[node]["queue"].append((self.load_s[model], float(rows)))
        self.sites[node]["at"][MODELS[model]] = At.MOVING

    def runs(self, node: int, model: int, use: int, rows: int, left: float) -> None:
        slot = node * len(MODELS) + model
        if self.caches.status[0, 0, slot] or self.caches.claims[0, model]:
            return
        left_s = left * self.load_s[model]
        link = self.caches.link[0, 0, node]
        link["use"], link["moving"] = use, slot
        link["segment_s"], link["finish_s"] = NOW_S + left_s - self.load_s[model], NOW_S + left_s
        self.caches.status[0, 0, slot] = PREFETCH if use == PREFETCHING else LOADING
        self.sites[node]["at"][MODELS[model]] = At.MOVING
        self.sites[node]["ready"][MODELS[model]] = left_s
        if use == PREFETCHING:
            self.caches.claims[0, model] += 1
            return
        self._demand(slot, rows)
        if use == DEMAND:
            self.sites[node]["queue"].append((left_s, float(rows)))
        else:
            self.sites[node]["running"] = left_s

    def _demand(self, slot: int, rows: int) -> None:
        self.caches.seen[0, slot]["stage"] = 0
        self.caches.seen[0, slot]["rows"] = rows
        self.caches.claims[0, slot % len(MODELS)] += 1

    def _capacity(self, node: int) -> float:
        return float(self.caches.tier[0, 0, node]["capacity"])

    def replay(self, model: int) -> str:
        """Where replay sends a row of it. The kernel's parts run as Python here; what is compiled is the same source."""
        seen = self.caches._replace(**{name: getattr(self.caches, name).view(np.recarray) for name in _RECORDS})
        node = choose_node(0, 0, model, NOW_S, self.world, new_demand(len(MODELS), 0.0), no_hazard(len(MODELS)), seen)
        return self.names[node]

    def live(self, model: int) -> str:
        sites = []
        for n, (name, told) in enumerate(zip(self.names, self.sites, strict=True)):
            used = float(self.caches.tier[0, 0, n]["used"])
            sites.append(
                Site(
                    name, dict(zip(MODELS, self.load_s.tolist(), strict=True)), told["at"], told["ready"], told["running"], told["queue"],
                    free_bytes=self._capacity(n) - used, evictable_bytes=used,
                    displaced_s_per_byte=float(self.caches.tier[0, 0, n]["worth"]) * HOLD_S,
                )
            )  # fmt: skip
        return place([Wanted(MODELS[model], 1.0, self.size[model])], sites)[MODELS[model]].node


_RECORDS = ("policy", "cache", "edge", "link", "tier", "copy", "seen", "others")


@st.composite
def states(draw: st.DrawFn) -> State:
    state = State(draw(st.integers(2, 4)), draw(st.lists(st.integers(2, 40), min_size=6, max_size=6)), draw(st.integers(30, 90)))
    model, rows, everywhere = st.integers(1, 5), st.integers(1, 6), draw(st.sampled_from([True, False]))
    for n in range(len(state.names)):
        state.caches.tier[0, 0, n]["worth"] = draw(st.sampled_from([0.0, 1e-13, 3e-12]))
        if everywhere or draw(st.booleans()):
            use = draw(st.sampled_from([DEMAND, UNCACHED] if everywhere else [DEMAND, UNCACHED, PREFETCHING]))
            state.runs(n, n if everywhere else draw(st.integers(0, 5)), use, draw(rows), draw(st.floats(0.05, 1.0)))
        for _ in range(draw(st.integers(0, 3)) if state.caches.link[0, 0, n]["use"] != PREFETCHING else 0):
            state.waits(n, draw(model), draw(rows))
        for _ in range(draw(st.integers(0, 3))):
            state.ready(n, draw(model))
    if not draw(st.integers(0, 4)):
        state.ready(draw(st.integers(0, len(state.names) - 1)), 0)
    return state


@settings(max_examples=60, deadline=None)
@given(states())
def test_replay_and_live_choose_the_same_node_for_the_same_state(state: State) -> None:
    for model in range(len(MODELS)):
        assert state.replay(model) == state.live(model), MODELS[model]


def test_states_ask_every_part_of_the_rule() -> None:
    """The property above is no empty one: among its states are rows that go to each kind of place."""
    found: set[str] = set()

    @settings(max_examples=80, deadline=None, database=None, derandomize=True)
    @given(states())
    def look(state: State) -> None:
        for m in range(len(MODELS)):
            n = state.names.index(state.live(m))
            told = state.sites[n]
            found.add(str(told["at"].get(MODELS[m], At.ABSENT).name))
            if MODELS[m] not in told["at"]:
                found.add("queues" if told["queue"] or told["running"] else "idle")
                if state.world.home[m] != n:
                    found.add("leaves home")

    look()
    assert found >= {"READY", "MOVING", "ABSENT", "queues", "idle", "leaves home"}


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 20.0), st.integers(1, 8)), max_size=5), st.floats(0.1, 20.0), st.integers(1, 8)
)  # fmt: skip
def test_what_a_load_costs_is_what_it_adds_to_everybodys_waiting(queue: list[tuple[float, int]], own_s: float, own_rows: int) -> None:
    """On a link whose loads all give way, told by serving it to the end with the load and without."""
    loads = [LinkLoad(0.0, left_s, float(rows)) for left_s, rows in queue]
    mine = LinkLoad(0.0, own_s, float(own_rows))

    def waited_s(all_of: list[LinkLoad]) -> float:
        return sum(load.rows * end_s for load, (_, end_s) in zip(all_of, link_goes_on(all_of, 0.0), strict=True))

    lefts, rows = np.array([q[0] for q in queue]), np.array([float(q[1]) for q in queue])
    wait_s, delay_s = wait_on_link(float(own_rows), own_s, 0.0, lefts, rows, len(queue))
    assert own_rows * wait_s + delay_s == pytest.approx(waited_s([*loads, mine]) - waited_s(loads))
    assert wait_s == pytest.approx(link_goes_on([*loads, mine], 0.0)[-1][1])


def test_a_link_goes_on_in_smiths_order_and_what_runs_gives_way() -> None:
    # Six seconds run when two seconds come after one: they go first, and the five that are left go on at three.
    found = link_goes_on([LinkLoad(0.0, 6.0, 1.0), LinkLoad(1.0, 2.0, 1.0)], 2.5)
    assert found == [(5.0, 8.0), (0.5, 3.0)]
    # With ten rows it is denser, and does not.
    assert link_goes_on([LinkLoad(0.0, 6.0, 10.0), LinkLoad(1.0, 2.0, 1.0)], 2.5) == [(3.5, 6.0), (2.0, 8.0)]
    # A link that was idle in between.
    assert link_goes_on([LinkLoad(0.0, 1.0, 1.0), LinkLoad(3.0, 2.0, 1.0)], 4.0) == [(0.0, 1.0), (1.0, 5.0)]
    assert link_goes_on([], 1.0) == []


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.floats(-5.0, 5.0), st.floats(0.0, 20.0), st.integers(1, 8)), max_size=5), st.floats(-6.0, 20.0))
def test_a_link_does_all_its_work_and_never_rests_beside_it(queue: list[tuple[float, float, int]], now_s: float) -> None:
    loads = [LinkLoad(*q) for q in queue]
    found = link_goes_on(loads, now_s)
    busy_s, free_s = 0.0, -np.inf
    for load in sorted(loads):
        begins_s = max(free_s, load.at_s)
        free_s = begins_s + load.left_s
        busy_s += min(max(now_s - begins_s, 0.0), load.left_s)
    assert sum(load.left_s for load in loads) - sum(left for left, _ in found) == pytest.approx(busy_s, abs=1e-6)
    if loads:
        assert max(end_s for _, end_s in found) == pytest.approx(free_s)
    for load, (left_s, end_s) in zip(loads, found, strict=True):
        assert 0.0 <= left_s <= load.left_s
        assert end_s >= load.at_s + load.left_s - 1e-6


def test_hashing_decides_among_equals_and_nothing_else() -> None:
    yes = np.ones(3, np.bool_)
    for rank in itertools.permutations(range(3)):
        order = np.array(rank, np.int64)
        same, dearer = np.array([4.0, 4.0, 4.0]), np.array([4.0, 4.1, 4.1])
        assert best_node(same, same, yes, yes, yes, order)[0] == rank.index(0)
        assert best_node(dearer, dearer, yes, yes, yes, order)[0] == 0


def test_the_type_of_caches_names_what_routing_reads() -> None:
    assert set(_RECORDS) < set(ClusterCaches._fields)

"""Nodes with tiers: waits computed by hand, a slow LRU beside it, limits from the logs alone, and one tier as the node without bytes."""

from __future__ import annotations

import heapq
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefetcher.core.experts import EXPERTS
from prefetcher.core.rendezvous import by_rendezvous
from prefetcher.errors import UsageError
from prefetcher.replay.accounts import PolicyLogs, check_limits
from prefetcher.replay.cluster import ClusterSimulation
from prefetcher.replay.run import Simulation
from prefetcher.replay.tiers import Stack, parse_tiers, stack_of
from prefetcher.replay.trace import Trace, read_trace

GB = 10**9
#: The first of them may have to compile.
pytestmark = pytest.mark.timeout(900)
ALL = ("remote", "disk", "host", "device")
RIVALS = [
    "lru", "gdsf", "lfu:3600", "sieve", "lru-smith", "gdsf-smith", "lfu:3600-smith-bypass", "lhd", "ttl:600", "belady", "belady-size",
]  # fmt: skip


def trace_of(folder: Path, rows: list[tuple[float, str, str | None]], sizes: dict[str, int]) -> Trace:
    """Rows of (time, model, node or None)."""
    path = folder / "log.parquet"
    columns: dict[str, object] = {"ts": [r[0] for r in rows], "model": [r[1] for r in rows]}
    if any(r[2] is not None for r in rows):
        columns["node"] = [r[2] for r in rows]
    pq.write_table(pa.table(columns), path)
    return read_trace(path, catalog=sizes)


def random_trace(folder: Path, seed: int = 0, rows: int = 3000, nodes: tuple[str, ...] = ()) -> Trace:
    rng = np.random.default_rng(seed)
    sizes = {f"m{i:02d}": int(rng.integers(1, 30)) * GB for i in range(20)}
    weights = rng.pareto(1.0, 20) + 0.05
    names = rng.choice(sorted(sizes), rows, p=weights / weights.sum()).tolist()
    ts = (np.sort(rng.uniform(0, 12 * 3600, rows)) + 1.7e9).tolist()
    where = rng.choice(nodes, rows).tolist() if nodes else [None] * rows
    return trace_of(folder, list(zip(ts, names, where, strict=True)), sizes)


def waits(logs: PolicyLogs) -> list[float]:
    values: list[float] = logs.waits["wait_s"].to_pylist()
    return values


def held(logs: PolicyLogs) -> list[tuple[str, str, str]]:
    """(tier, node, model) of every residency, in the order of their starts."""
    table = logs.residency.sort_by("start_s")
    return list(zip(*(table[c].to_pylist() for c in ("tier", "node", "model")), strict=True))


def limits_of(logs: PolicyLogs, stack: Stack) -> list[str]:
    """What the logs break, tier by tier and edge by edge."""
    return [
        b
        for tier, room in stack.capacities().items()
        for b in check_limits(logs.residency, logs.transfers, int(room), stack.rates(), tier=tier)
    ]


# --- by hand ---


def test_a_wait_sums_the_edges_that_are_left(tmp_path: Path) -> None:
    """5 GB from disk take 5 s and 0.1 s more to the device; what the device gave up and the host still has takes 0.1 s."""
    rows = [(0.0, "a", None), (3.0, "a", None), (10.0, "a", None), (20.0, "b", None), (40.0, "a", None)]
    trace = trace_of(tmp_path, rows, {"a": 5 * GB, "b": 5 * GB})
    stack = stack_of(ALL, host_bytes=20 * GB, device_bytes=6 * GB, link_bytes_per_s=1e9)
    logs = ClusterSimulation(trace, stack).rivals(["lru"])["lru"]
    assert waits(logs) == pytest.approx([5.1, 2.1, 0.0, 5.1, 0.1])
    assert logs.waits["found"].to_pylist() == ["absent", "moving", "ready", "absent", "absent"]
    moved = logs.transfers.sort_by("start_s")
    assert list(zip(moved["from_tier"].to_pylist(), moved["to_tier"].to_pylist(), moved["model"].to_pylist(), strict=True)) == [
        ("disk", "host", "a"), ("host", "device", "a"), ("disk", "host", "b"), ("host", "device", "b"), ("host", "device", "a"),
    ]  # fmt: skip
    assert [(t, m) for t, _, m in held(logs)] == [("host", "a"), ("device", "a"), ("host", "b"), ("device", "b"), ("device", "a")]


def test_what_finds_no_room_passes_through_the_tier(tmp_path: Path) -> None:
    """b is larger than the host tier and smaller than the device: it is read through the host, and kept in the device alone."""
    trace = trace_of(tmp_path, [(0.0, "b", None), (20.0, "b", None), (30.0, "c", None)], {"b": 5 * GB, "c": 9 * GB})
    stack = stack_of(ALL, host_bytes=4 * GB, device_bytes=6 * GB, link_bytes_per_s=1e9)
    simulation = ClusterSimulation(trace, stack, warmup_ratio=0.0)
    logs = simulation.rivals(["lru"])["lru"]
    assert waits(logs) == pytest.approx([5.1, 0.0, 9.18])
    assert [(t, m) for t, _, m in held(logs)] == [("device", "b")]
    entry = simulation.totals("lru", logs)
    assert entry["requests"] == 0  # neither fits a node in every tier
    assert entry["unfit"] == {"requests": 3, "cold_seconds": pytest.approx(14.28)}


def two_nodes_apart(sizes: dict[str, int]) -> tuple[str, str]:
    """A model at home on each of two nodes."""
    homes = {m: by_rendezvous(m, ["node-0", "node-1"])[0] for m in sizes}
    return next(m for m in sizes if homes[m] == 0), next(m for m in sizes if homes[m] == 1)


def test_all_nodes_share_the_link_from_the_store(tmp_path: Path) -> None:
    """Two nodes ask at once: 2 GB each over 1 GB/s, one after the other, then each over its own links."""
    sizes = {f"m{k}": 2 * GB for k in range(8)}
    a, b = two_nodes_apart(sizes)
    trace = trace_of(tmp_path, [(0.0, a, None), (0.5, b, None), (20.0, b, None)], {m: sizes[m] for m in (a, b)})
    stack = stack_of(ALL, host_bytes=4 * GB, device_bytes=4 * GB, disk_bytes=8 * GB, link_bytes_per_s=1e9)
    logs = ClusterSimulation(trace, stack, nodes=2).rivals(["lru"])["lru"]
    assert waits(logs) == pytest.approx([2 + 2 + 0.04, 1.5 + 2 + 2 + 0.04, 0.0])
    assert set(logs.waits["node"].to_pylist()) == {"node-0", "node-1"}
    assert limits_of(logs, stack) == []


def test_a_bounded_disk_gives_up_what_was_used_longest_ago(tmp_path: Path) -> None:
    """Disk for two of three models, memory for one: c displaces a on disk, so that a comes from the store again, and b does not."""
    rows = [(0.0, "a", None), (100.0, "b", None), (200.0, "c", None), (300.0, "b", None), (400.0, "a", None)]
    trace = trace_of(tmp_path, rows, dict.fromkeys("abc", 2 * GB))
    stack = stack_of(ALL, host_bytes=2 * GB, device_bytes=2 * GB, disk_bytes=4 * GB, link_bytes_per_s=1e9)
    logs = ClusterSimulation(trace, stack).rivals(["lru"])["lru"]
    assert waits(logs) == pytest.approx([4.04, 4.04, 4.04, 2.04, 4.04])
    assert [m for t, _, m in held(logs) if t == "disk"] == ["a", "b", "c", "a"]


def test_ours_puts_what_is_asked_for_at_once_on_two_nodes(tmp_path: Path) -> None:
    """Three loads within a second: rivals' home has to take two of them one after the other, ours no link two at first."""
    sizes = {f"m{k}": 10 * GB for k in range(8)}
    homes = {m: by_rendezvous(m, ["node-0", "node-1"])[0] for m in sizes}
    first, second = [m for m in sizes if homes[m] == homes["m0"]][:2]
    trace = trace_of(tmp_path, [(0.0, first, None), (0.5, second, None), (100.0, second, None)], {m: sizes[m] for m in (first, second)})
    stack = stack_of(ALL, host_bytes=40 * GB, device_bytes=40 * GB, link_bytes_per_s=1e9)
    simulation = ClusterSimulation(trace, stack, nodes=2)
    assert waits(simulation.rivals(["lru"])["lru"]) == pytest.approx([10.2, 19.7, 0.0])
    mine = simulation.ours().logs
    assert waits(mine) == pytest.approx([10.2, 10.2, 0.0])
    nodes = mine.waits["node"].to_pylist()
    assert nodes[0] != nodes[1] == nodes[2]


def test_ours_goes_to_the_node_that_a_row_names_and_follows_the_weights_else(tmp_path: Path) -> None:
    home, other = (["n0", "n1"][k] for k in by_rendezvous("a", ["n0", "n1"]))
    rows = [(0.0, "z", home), (0.0, "z", other), (100.0, "a", other), (101.0, "a", None), (106.0, "a", None), (107.0, "a", home)]
    trace = trace_of(tmp_path, rows, {"a": 4 * GB, "z": GB})
    stack = stack_of(ALL, host_bytes=20 * GB, device_bytes=20 * GB, link_bytes_per_s=1e9)
    logs = ClusterSimulation(trace, stack).ours().logs
    assert logs.waits["node"].to_pylist()[2:] == [other, other, other, home]
    assert waits(logs)[2:] == pytest.approx([4.08, 3.08, 0.0, 4.08])


# --- against others ---


@pytest.mark.parametrize("nodes", [1, 3])
def test_one_tier_is_what_the_node_without_bytes_does(nodes: int, tmp_path: Path) -> None:
    trace = random_trace(tmp_path)
    room = 0.3 * float(trace.bytes_.sum()) / nodes
    names = [n for n in RIVALS if nodes == 1 or n != "lhd"]  # hit densities are learned over all nodes together
    old = Simulation(trace, room, nodes=nodes).rivals(names)
    new = ClusterSimulation(trace, stack_of(("disk", "host"), host_bytes=room), nodes=nodes).rivals(names)
    for name in names:
        assert np.abs(np.subtract(waits(old[name]), waits(new[name]))).max() < 1e-9, name
        assert old[name].waits["found"].to_pylist() == new[name].waits["found"].to_pylist()
        assert sorted(old[name].residency["start_s"].to_pylist()) == sorted(new[name].residency["start_s"].to_pylist())


def test_ours_on_one_node_with_one_tier_is_todays(tmp_path: Path) -> None:
    trace = random_trace(tmp_path)
    room = 0.3 * float(trace.bytes_.sum())
    old = Simulation(trace, room).ours()
    new = ClusterSimulation(trace, stack_of(("disk", "host"), host_bytes=room), experts=tuple(EXPERTS)).ours()
    for before, after in ((old.logs, new.logs), (old.shadow, new.shadow)):
        assert np.abs(np.subtract(waits(before), waits(after))).max() < 1e-9
    assert old.logs.orders["outcome"].to_pylist() == new.logs.orders["outcome"].to_pylist()


def slow_lru(trace: Trace, names: list[str], stack: Stack) -> list[float]:
    """LRU in every tier of every node, first come first served on every link, in plain Python: the wait of each row."""
    size, tiers = trace.bytes_.tolist(), len(stack.tiers)
    used = {(k, j): 0 for k in range(len(names)) for j in range(tiers)}
    ready: dict[tuple[int, int], dict[int, float]] = {at: {} for at in used}  # model -> its load's end
    queue: dict[tuple[int, int], list[int]] = {at: [] for at in used}
    moving: dict[tuple[int, int], tuple[int, bool] | None] = dict.fromkeys(used)
    last: dict[tuple[int, int], float] = {}
    stage: dict[tuple[int, int], int] = {}
    waiting: dict[tuple[int, int], list[int]] = {}
    out = [0.0] * len(trace)
    ends: list[tuple[float, int, int]] = []

    def start(k: int, j: int, now: float) -> None:
        if moving[k, j] is not None or not queue[k, j]:
            return
        m = queue[k, j].pop(0)
        room = stack.capacity_bytes[j] - used[k, j]
        free = [v for v in ready[k, j] if stage.get((k, v)) != j + 1]
        fits = size[m] <= stack.capacity_bytes[j] and room + sum(size[v] for v in free) >= size[m]
        while fits and room < size[m]:
            victim = min(free, key=lambda v: (max(last[k, v], ready[k, j][v]), v))
            free.remove(victim)
            del ready[k, j][victim]
            used[k, j] -= size[victim]
            room += size[victim]
        used[k, j] += size[m] if fits else 0
        moving[k, j] = (m, fits)
        heapq.heappush(ends, (now + size[m] / stack.bytes_per_s[j], j, k))

    def end(now: float, j: int, k: int) -> None:
        current = moving[k, j]
        assert current is not None
        m, kept = current
        moving[k, j] = None
        if kept:
            ready[k, j][m] = now
        if j + 1 < tiers:
            stage[k, m] = j + 1
            queue[k, j + 1].append(m)
        else:
            del stage[k, m]
            for row in waiting.pop((k, m)):
                out[row] = now - float(trace.ts[row])
        start(k, j, now)
        if j + 1 < tiers:
            start(k, j + 1, now)

    for row, (ts, m) in enumerate(zip(trace.ts.tolist(), trace.model.tolist(), strict=True)):
        while ends and ends[0][0] <= ts:
            end(*heapq.heappop(ends))
        k = int(trace.node[row]) if len(trace.node_names) else by_rendezvous(trace.models[m], names)[0]
        last[k, m] = ts
        if m in ready[k, tiers - 1]:
            continue
        waiting.setdefault((k, m), []).append(row)
        if (k, m) not in stage:
            stage[k, m] = max((j + 1 for j in range(tiers) if m in ready[k, j]), default=0)
            queue[k, stage[k, m]].append(m)
            start(k, stage[k, m], ts)
    while ends:
        end(*heapq.heappop(ends))
    return out


@pytest.mark.parametrize("named", [False, True])
def test_lru_is_a_slow_lru(named: bool, tmp_path: Path) -> None:
    trace = random_trace(tmp_path, seed=3, nodes=("node-0", "node-1") if named else ())
    stack = stack_of(ALL, host_bytes=0.15 * float(trace.bytes_.sum()), device_bytes=40 * GB)
    logs = ClusterSimulation(trace, stack, nodes=2).rivals(["lru"])["lru"]
    assert waits(logs) == pytest.approx(slow_lru(trace, ["node-0", "node-1"], stack), abs=1e-6)


@pytest.mark.parametrize("disk", [None, 0.5])
def test_limits_hold_in_the_logs_alone(disk: float | None, tmp_path: Path) -> None:
    trace = random_trace(tmp_path)
    total = float(trace.bytes_.sum())
    stack = stack_of(ALL, host_bytes=0.1 * total, device_bytes=35 * GB, disk_bytes=None if disk is None else disk * total / 3)
    simulation = ClusterSimulation(trace, stack, nodes=3)
    logs = {**simulation.rivals(RIVALS), "ours": simulation.ours().logs}
    for name, of in logs.items():
        assert limits_of(of, stack) == [], name
        assert set(of.residency["tier"].to_pylist()) <= set(stack.tiers)
        edges = set(zip(of.transfers["from_tier"].to_pylist(), of.transfers["to_tier"].to_pylist(), strict=True))
        assert edges == set(zip(stack.below, stack.tiers, strict=True)), name
        # A row waits at least for the last edge unless it is ready there, and every wait ends with a transfer into it.
        ready = of.waits["found"].to_numpy() == "ready"
        assert ((np.array(waits(of)) == 0.0) == ready).all()
        last = of.transfers.filter(pa.compute.equal(of.transfers["to_tier"].cast(pa.string()), stack.tiers[-1]))
        ends = np.unique(last["end_s"].to_numpy())
        served = of.waits["ts"].to_numpy()[~ready] + np.array(waits(of))[~ready]
        near = ends[np.clip(np.searchsorted(ends, served), 0, len(ends) - 1)]
        before = ends[np.clip(np.searchsorted(ends, served) - 1, 0, len(ends) - 1)]
        assert np.minimum(np.abs(near - served), np.abs(before - served)).max() < 1e-5, name


def test_the_same_replay_twice_gives_the_same_logs(tmp_path: Path) -> None:
    trace = random_trace(tmp_path, seed=1, rows=1500)
    stack = stack_of(ALL, host_bytes=0.1 * float(trace.bytes_.sum()), device_bytes=30 * GB)
    first, second = (ClusterSimulation(trace, stack, nodes=2).ours().logs for _ in range(2))
    for name in ("residency", "transfers", "waits", "orders"):
        assert getattr(first, name).equals(getattr(second, name))
    assert first.orders.num_rows > 0


# --- what is asked for ---


@pytest.mark.parametrize("text", ["host", "disk", "disk,device", "host,disk", "remote,host", "disk,host,gpu", ""])
def test_tiers_are_a_run_from_disk_or_the_store(text: str) -> None:
    with pytest.raises(UsageError, match="--tiers"):
        parse_tiers(text)


def test_bytes_of_a_tier_that_is_not_there_are_refused() -> None:
    with pytest.raises(UsageError, match="--device-bytes"):
        stack_of(("disk", "host"), host_bytes=1.0, device_bytes=1.0)
    with pytest.raises(UsageError, match="--disk-bytes"):
        stack_of(("disk", "host", "device"), host_bytes=1.0, disk_bytes=1.0)


def test_a_rival_with_a_rule_of_its_own_is_refused(tmp_path: Path) -> None:
    trace = random_trace(tmp_path, rows=50)
    with pytest.raises(UsageError, match="hybrid"):
        ClusterSimulation(trace, stack_of(ALL, host_bytes=GB)).rivals(["lru", "hybrid"])

"""Rows without a node in a log that names some: ours follows the weights, rivals hash; checked by hand and from the logs alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefetcher.core.rendezvous import by_rendezvous
from prefetcher.replay.accounts import PolicyLogs, check_limits
from prefetcher.replay.routing import needs_routing
from prefetcher.replay.run import Simulation
from prefetcher.replay.trace import Trace, read_trace

GB = 10**9
NODES = ["n0", "n1", "n2"]


def trace_of(folder: Path, rows: list[tuple[float, str, str | None]], sizes: dict[str, int]) -> Trace:
    path = folder / "log.parquet"
    pq.write_table(pa.table({"ts": [r[0] for r in rows], "model": [r[1] for r in rows], "node": [r[2] for r in rows]}), path)
    return read_trace(path, catalog=sizes)


def away_from_home(model: str) -> tuple[str, str]:
    """(home, another node) of a model among NODES."""
    order = by_rendezvous(model, NODES)
    return NODES[order[0]], NODES[order[2]]


def nodes(logs: PolicyLogs) -> list[str]:
    return logs.waits["node"].to_pylist()


def test_a_row_without_a_node_follows_the_weights_for_ours_and_the_hash_for_rivals(tmp_path: Path) -> None:
    home, other = away_from_home("a")
    rows = [(float(k), "z", node) for k, node in enumerate(NODES)]
    rows += [(100.0, "a", other), (101.0, "a", None), (110.0, "a", None), (120.0, "b", None)]
    trace = trace_of(tmp_path, rows, {"a": 4 * GB, "b": GB, "z": GB})
    simulation = Simulation(trace, 8 * GB, link_bytes_per_s=1e9)
    logs = simulation.ours().logs
    assert nodes(logs)[3:6] == [other, other, other]
    assert logs.waits["found"].to_pylist()[3:6] == ["absent", "moving", "ready"]
    assert logs.waits["wait_s"].to_pylist()[3:6] == pytest.approx([4.0, 3.0, 0.0])
    assert nodes(logs)[6] == NODES[by_rendezvous("b", NODES)[0]]
    rival = simulation.rivals(["lru"])["lru"]
    assert nodes(rival)[3:6] == [other, home, home]
    assert rival.waits["found"].to_pylist()[3:6] == ["absent", "absent", "ready"]


def test_of_two_nodes_that_have_it_the_one_that_hashing_prefers(tmp_path: Path) -> None:
    order = [NODES[k] for k in by_rendezvous("a", NODES)]
    rows: list[tuple[float, str, str | None]] = [(float(k), "z", node) for k, node in enumerate(NODES)]
    rows += [(100.0, "a", order[2]), (110.0, "a", order[1]), (120.0, "a", None), (130.0, "a", None)]
    trace = trace_of(tmp_path, rows, {"a": 2 * GB, "z": GB})
    logs = Simulation(trace, 8 * GB, link_bytes_per_s=1e9).ours().logs
    assert nodes(logs)[3:] == [order[2], order[1], order[1], order[1]]
    assert logs.waits["found"].to_pylist()[5:] == ["ready", "ready"]


def mixed_trace(folder: Path) -> Trace:
    rng = np.random.default_rng(5)
    sizes = {f"m{i:02d}": int(rng.integers(1, 30)) * GB for i in range(12)}
    weights = rng.pareto(1.0, 12) + 0.1
    models = rng.choice(sorted(sizes), 4000, p=weights / weights.sum())
    ts = np.sort(rng.uniform(0, 30 * 3600, 4000)) + 1.7e9
    named = rng.choice([*NODES, None], 4000, p=[0.15, 0.15, 0.1, 0.6])
    return trace_of(folder, list(zip(ts.tolist(), models.tolist(), named.tolist(), strict=True)), sizes)


def test_every_row_goes_where_the_logs_say_that_its_weights_were(tmp_path: Path) -> None:
    """From the logs alone: where a model was ready or on its way at each row's time, on every node, and where the row went."""
    trace = mixed_trace(tmp_path)
    capacity = int(0.25 * trace.bytes_.sum())
    mine = Simulation(trace, capacity).ours()
    assert check_limits(mine.logs.residency, mine.logs.transfers, capacity, 3.5e9) == []
    assert check_limits(mine.shadow.residency, mine.shadow.transfers, capacity, 3.5e9) == []
    assert nodes(mine.logs) == nodes(mine.shadow)
    held = mine.logs.residency.to_pylist()
    waits = mine.logs.waits.to_pylist()
    elsewhere = 0
    for i, row in enumerate(waits):
        node, model, ts = row["node"], row["model"], row["ts"]
        if trace.node[i] >= 0:
            assert node == trace.node_names[trace.node[i]]
            continue
        names = trace.node_names
        order = [names[k] for k in by_rendezvous(model, names)]
        mine_of = [h for h in held if h["model"] == model and h["ready_s"] is not None]
        ready = {h["node"] for h in mine_of if h["ready_s"] <= ts < h["end_s"] or ts == trace.t1 == h["end_s"]}
        # On its way: a row that waits for it was there before, or a prefetch has taken memory.
        waited = {w["node"] for w in waits[:i] if w["model"] == model and w["ts"] + w["wait_s"] > ts}
        taken = {h["node"] for h in held if h["model"] == model and h["start_s"] <= ts < (h["ready_s"] or h["end_s"])}
        where = ready or (waited | taken) or {order[0]}
        assert node == min(where, key=order.index)
        elsewhere += node != order[0]
        assert (row["found"] == "ready") == bool(ready)
    assert elsewhere > 30, "the log must bring models away from their home"


def test_logs_that_name_every_node_or_none_need_no_routing(tmp_path: Path) -> None:
    trace = mixed_trace(tmp_path)
    assert needs_routing(trace)
    assert not needs_routing(replace(trace, node=np.maximum(trace.node, 0)))
    assert not needs_routing(replace(trace, node=np.full_like(trace.node, -1), node_names=[]))

"""Ours over a log: redundant orders against the shadow's own logs, other prices in the same pass, and blocks of any length."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefetcher.replay.accounts import LOGS
from prefetcher.replay.ours import score_blocks
from prefetcher.replay.run import Ours, Simulation
from prefetcher.replay.trace import Trace, read_trace

GB = 10**9


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Two days of beats, bursts and a tail, at whole seconds, so that several things happen at one moment."""
    rng = np.random.default_rng(11)
    found: list[tuple[float, str]] = []
    for i in range(6):
        beat = rng.integers(900, 7200)
        found += [(t + rng.normal(0, 15), f"m{i:02d}") for t in np.arange(rng.uniform(0, 900), 172_000, beat)]
    for start in rng.uniform(0, 170_000, 80):
        found += [(start, "m06"), (start + 60 + rng.exponential(90), "m07")]
    found += [(t, f"m{rng.integers(8, 16):02d}") for t in rng.uniform(0, 172_000, 700)]
    rows = sorted((1.7e9 + round(t), m) for t, m in found if 0 <= t < 172_800)
    folder = tmp_path_factory.mktemp("trace")
    pq.write_table(pa.table({"ts": [t for t, _ in rows], "model": [m for _, m in rows]}), folder / "log.parquet")
    return read_trace(folder / "log.parquet", catalog={f"m{i:02d}": (4 + 7 * i % 23) * GB for i in range(16)})


def simulation(trace: Trace) -> Simulation:
    return Simulation(trace, 0.35 * float(trace.bytes_.sum()), link_bytes_per_s=1e9)


@pytest.fixture(scope="module")
def mine(trace: Trace) -> Ours:
    run = simulation(trace)
    return run.ours([run.price, 2000 * run.price])


def same(one: Ours, two: Ours) -> bool:
    return all(getattr(one.logs, n).equals(getattr(two.logs, n)) and getattr(one.shadow, n).equals(getattr(two.shadow, n)) for n in LOGS)


def test_an_order_is_redundant_when_the_shadow_held_the_weights_at_its_first_use(mine: Ours) -> None:
    held = mine.shadow.residency.to_pylist()
    seen = {True: 0, False: 0, None: 0}
    for order in mine.logs.orders.to_pylist():
        seen[order["redundant"]] += 1
        at_s = order["first_use_s"]
        if at_s is None:
            assert order["redundant"] is None
            continue
        spans = [(h["ready_s"], h["end_s"]) for h in held if h["model"] == order["model"] and h["ready_s"] is not None]
        # At one moment a later row may make the shadow give up what an earlier one found: the end itself says nothing.
        if order["redundant"]:
            assert any(ready_s <= at_s <= end_s for ready_s, end_s in spans)
        else:
            assert not any(ready_s <= at_s < end_s for ready_s, end_s in spans)
    assert min(seen.values()) > 3, f"the log must have orders of every kind: {seen}"
    assert mine.shadow.orders.num_rows == 0


def test_rivals_have_no_shadow(trace: Trace) -> None:
    orders = simulation(trace).rivals(["clairvoyant"])["clairvoyant"].orders
    assert orders.num_rows > 0
    assert orders["redundant"].null_count == orders.num_rows


def test_at_the_same_price_the_frontier_is_ours_and_a_higher_price_holds_less(trace: Trace, mine: Ours) -> None:
    run = simulation(trace)
    entry = run.totals("ours", mine.logs)
    same_price, dear = mine.frontier
    assert (same_price.held_gb_h, same_price.cold_seconds) == (entry["held_gb_h"], entry["cold_seconds"])
    assert dear.held_gb_h < 0.9 * same_price.held_gb_h
    assert dear.price == 2000 * run.price


def test_neither_blocks_nor_other_prices_change_what_happens(trace: Trace, mine: Ours) -> None:
    blocks = list(score_blocks(trace, 0, lambda _done, _what: None, periods=1))
    assert len(blocks) == 48
    kept = Simulation(trace, 0.35 * float(trace.bytes_.sum()), link_bytes_per_s=1e9, blocks=blocks)
    assert same(kept.ours(), mine)
    assert same(kept.ours(), mine), "kept blocks can be used again"

"""The accounts against an independent slow reference, the limits against logs that keep and break them, and the logs'
round trip.
"""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_lru import requests, simulate, table

from prefetcher.errors import InputError
from prefetcher.replay.accounts import LOGS, PolicyLogs, check_limits, check_outcomes, read_logs, totals, write_logs

OUTCOMES = ["timely", "late", "useless", "displaced", "superseded", "cancelled", "failed", "lost", "open"]
FROM_S, END_S = 300.0, 1000.0


def random_logs(seed: int, rows: int) -> PolicyLogs:
    """Logs whose values are drawn freely within what the definitions speak of; nodes and models are few, and meet."""
    rng = np.random.default_rng(seed)

    def maybe(value: float, chance: float = 0.3) -> float | None:
        return None if rng.random() < chance else value

    nodes, models = ["a", "b"], ["m0", "m1", "m2"]
    residency = []
    for node in nodes:
        for model in models:
            now = float(rng.uniform(0, 200))
            while now < END_S and rng.random() < 0.8:
                length = float(rng.exponential(200.0))
                ready = maybe(now + length * float(rng.random()), 0.1)
                residency.append(
                    {"node": node, "model": model, "version": "", "tier": "host", "start_s": now, "ready_s": ready}
                    | {"last_use_s": maybe(now + length * float(rng.random())), "end_s": maybe(now + length, 0.05)}
                    | {
                        "cause": str(rng.choice(["demand", "forecast", "hint"])),
                        "outcome": None,
                        "bytes": (1 + models.index(model)) * 10**9,
                    }
                )
                if residency[-1]["end_s"] is None:
                    break
                now += length + float(rng.exponential(50.0))
    ts = np.sort(rng.uniform(0, END_S, rows))
    waits = [
        {"ts": float(t), "model": str(rng.choice(models)), "node": str(rng.choice(nodes))}
        | {"wait_s": float(rng.exponential(5.0)), "found": str(rng.choice(["ready", "moving", "queued", "absent"]))}
        for t in ts
    ]
    transfers = [
        {
            "node": "a",
            "model": "m0",
            "from_tier": "disk",
            "to_tier": "host",
            "start_s": t,
            "end_s": t + 5,
            "bytes": 10**9,
            "cause": "demand",
        }
        for t in rng.uniform(0, END_S, rows // 2).tolist()
    ]
    orders = []
    for i in range(rows // 2):
        t = float(rng.uniform(0, END_S))
        orders.append(
            {
                "decision_id": str(i),
                "node": "a",
                "model": str(rng.choice(models)),
                "version": "",
                "tier": "host",
                "cause": "hint",
            }
            | {"arm": "treated", "issued_s": t, "begin_s": t + 1, "ready_s": maybe(t + float(rng.exponential(50)))}
            | {
                "first_use_s": maybe(t + float(rng.exponential(80))),
                "end_s": maybe(t + 300.0),
                "outcome": str(rng.choice(OUTCOMES)),
            }
        )
    return PolicyLogs(*(table(n, r) for n, r in zip(LOGS, (residency, transfers, waits, orders), strict=True)))


def slow_totals(logs: PolicyLogs, shadow: PolicyLogs) -> dict[str, object]:
    """The definitions, one row at a time."""
    residency, waits, orders = logs.residency.to_pylist(), logs.waits.to_pylist(), logs.orders.to_pylist()

    def inside(start: float, end: float) -> float:
        return max(0.0, min(end, END_S) - max(start, FROM_S))

    held = idle = wasted = early = 0.0
    for r in residency:
        end = math.inf if r["end_s"] is None else r["end_s"]
        held += r["bytes"] * inside(r["start_s"], end)
        if r["last_use_s"] is None:
            idle += r["bytes"] * inside(r["start_s"], end)
            wasted += r["bytes"] * inside(r["start_s"], end) if r["cause"] != "demand" else 0.0
        elif r["ready_s"] is not None:
            idle += r["bytes"] * inside(max(r["last_use_s"], r["ready_s"]), end)
    sizes = {r["model"]: r["bytes"] for r in residency}
    for o in orders:
        if o["ready_s"] is not None:
            ends = [x for x in (o["first_use_s"], o["end_s"]) if x is not None]
            early += sizes.get(o["model"], 0) * inside(o["ready_s"], min(ends, default=math.inf))
    scored = [w for w in waits if w["ts"] >= FROM_S]
    issued = [o["outcome"] for o in orders if o["issued_s"] >= FROM_S]
    used = sum(o in ("timely", "late") for o in issued)
    decided = sum(o not in ("open", "superseded", "cancelled") for o in issued)
    polluted = 0
    for w in scored:
        if w["found"] not in ("absent", "queued"):
            continue
        same = (w["node"], w["model"])
        gone = [
            r["end_s"] for r in residency
            if (r["node"], r["model"]) == same and None not in (r["ready_s"], r["end_s"]) and r["end_s"] <= w["ts"]
        ]  # fmt: skip
        holds = [
            r for r in shadow.residency.to_pylist()
            if (r["node"], r["model"]) == same and r["ready_s"] is not None and r["ready_s"] <= w["ts"]
            and (r["end_s"] is None or r["end_s"] > w["ts"])
        ]  # fmt: skip
        polluted += bool(gone) and any(r["start_s"] <= max(gone) for r in holds)
    cold = math.fsum(w["wait_s"] for w in scored)
    shadow_cold = math.fsum(w["wait_s"] for w in shadow.waits.to_pylist() if w["ts"] >= FROM_S)
    return {
        "policy": "ours",
        "requests": len(scored),
        "cold_starts": sum(w["found"] == "absent" for w in scored),
        "cold_seconds": cold,
        "held_gb_h": held / 3.6e12,
        "idle_gb_h": idle / 3.6e12,
        "wasted_gb_h": wasted / 3.6e12,
        "early_gb_h": early / 3.6e12,
        "moved_gb": sum(t["bytes"] for t in logs.transfers.to_pylist() if t["end_s"] >= FROM_S) / 1e9,
        "prefetches": len(issued),
        "outcomes": {name: issued.count(name) for name in OUTCOMES},
        "accuracy": used / decided if decided else None,
        "timeliness": issued.count("timely") / used if used else None,
        "coverage": 1 - cold / shadow_cold if shadow_cold else None,
        "pollution": polluted / len(scored) if scored else None,
    }


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(0, 60))
def test_totals_equal_the_slow_reference(seed: int, rows: int) -> None:
    logs, shadow = random_logs(seed, rows), random_logs(seed + 1, rows)
    # The shadow sees the same rows.
    shadow_waits = shadow.waits
    for i, name in enumerate(("ts", "model", "node")):
        shadow_waits = shadow_waits.set_column(i, shadow.waits.schema.field(name), logs.waits.column(name))
    shadow = PolicyLogs(shadow.residency, shadow.transfers, shadow_waits, shadow.orders)
    got = totals(
        "ours", logs.residency, logs.transfers, logs.waits, logs.orders,
        scored_from_s=FROM_S, end_s=END_S, shadow=(shadow.residency, shadow.waits),
    )  # fmt: skip
    expected = slow_totals(logs, shadow)
    waits = sorted(w["wait_s"] for w in logs.waits.to_pylist() if w["ts"] >= FROM_S)
    for key, share in (("wait_p50_s", 0.5), ("wait_p95_s", 0.95), ("wait_p99_s", 0.99)):
        value = got.pop(key)
        if not waits:
            assert value is None
            continue
        at = share * (len(waits) - 1)
        low, high = waits[math.floor(at)], waits[math.ceil(at)]
        assert value == pytest.approx(low + (high - low) * (at - math.floor(at)), rel=1e-12)
    assert list(got) == list(expected)
    for key, value in expected.items():
        assert got[key] == (pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value), key


def test_totals_of_a_story_told_by_hand() -> None:
    """One demand load, one timely prefetch, one useless one; every figure worked out on paper."""
    gb = 10**9
    common = {"node": "n", "version": "", "tier": "host", "start_s": 0.0}
    m = common | {"model": "m", "ready_s": 10.0, "last_use_s": 5.0, "end_s": 3610.0, "cause": "demand", "bytes": 2 * gb}
    p = common | {
        "model": "p",
        "ready_s": 100.0,
        "last_use_s": 1900.0,
        "end_s": 3700.0,
        "cause": "forecast",
        "bytes": gb,
    }
    q = common | {"model": "q", "ready_s": 1800.0, "last_use_s": None, "end_s": 7200.0, "cause": "hint", "bytes": gb}
    residency = table("residency", [m, p, q])
    orders = table(
        "orders",
        [
            {
                "model": "p",
                "version": "",
                "issued_s": 0.0,
                "ready_s": 100.0,
                "first_use_s": 1900.0,
                "end_s": 3700.0,
                "outcome": "timely",
            },
            {"model": "q", "version": "", "issued_s": 0.0, "ready_s": 1800.0, "end_s": 7200.0, "outcome": "useless"},
        ],
    )
    waits = table("waits", [{"ts": 0.0, "model": "m", "node": "n", "wait_s": 10.0, "found": "absent"}])
    got = totals("x", residency, table("transfers", []), waits, orders, scored_from_s=0.0, end_s=5400.0)
    assert got["held_gb_h"] == pytest.approx((2 * 3610 + 3700 + 5400) / 3600)
    assert got["idle_gb_h"] == pytest.approx((2 * 3600 + 1800 + 5400) / 3600)
    assert got["wasted_gb_h"] == pytest.approx(1.5)
    assert got["early_gb_h"] == pytest.approx(0.5 + 1.0)
    assert (got["accuracy"], got["timeliness"], got["coverage"], got["pollution"]) == (0.5, 1.0, None, None)


def test_a_log_without_rows_or_orders_has_no_ratios() -> None:
    empty = [table(name, []) for name in LOGS]
    got = totals("lru", *empty, scored_from_s=0.0, end_s=1.0, shadow=(empty[0], empty[2]))
    assert got["requests"] == got["prefetches"] == 0
    undefined = ("wait_p50_s", "wait_p95_s", "wait_p99_s", "accuracy", "timeliness", "coverage", "pollution")
    assert all(got[key] is None for key in undefined)
    assert check_limits(empty[0], empty[1], 1, 1.0) == []


def test_an_outcome_that_its_times_contradict_is_said() -> None:
    order = {"model": "p", "version": "", "issued_s": 0.0, "ready_s": 10.0, "first_use_s": 20.0, "outcome": "timely"}
    orders = [
        order,
        order | {"first_use_s": 5.0, "outcome": "late"},
        order | {"first_use_s": None, "outcome": "useless"},
        order | {"first_use_s": None, "ready_s": None, "outcome": "superseded"},
        order | {"first_use_s": None, "outcome": "open"},
    ]
    assert check_outcomes(table("orders", orders)) == []
    wrong = [order | {"outcome": "late"}, order | {"outcome": "useless"}, order | {"first_use_s": None}]
    assert check_outcomes(table("orders", wrong)) == [
        "orders row 0: it is late, and its times say timely",
        "orders row 1: it is useless, and its times say timely",
        "orders row 2: it is timely, and its times say open",
    ]


def test_a_shadow_of_other_rows_is_refused() -> None:
    logs, other = random_logs(1, 10), random_logs(1, 12)
    with pytest.raises(ValueError, match="shadow saw 12 rows"):
        totals("ours", logs.residency, logs.transfers, logs.waits, logs.orders, scored_from_s=0.0, end_s=1.0,
               shadow=(other.residency, other.waits))  # fmt: skip


CAPACITY, RATE = 160 * 10**9, 3.5e9


@pytest.fixture(scope="module")
def coherent() -> PolicyLogs:
    ts, model, names, sizes = requests(1500, 12, seed=3)
    return simulate(ts, model, names, sizes, CAPACITY, RATE, prefetch_every=20)


def test_coherent_logs_keep_the_limits_and_tighter_ones_are_reported(coherent: PolicyLogs) -> None:
    assert check_limits(coherent.residency, coherent.transfers, CAPACITY, RATE) == []
    assert check_limits(coherent.residency, coherent.transfers, {"n0": CAPACITY}, {"disk>host": RATE}) == []
    (over,) = check_limits(coherent.residency, coherent.transfers, 141 * 10**9, RATE)
    assert "n0" in over
    assert "above its 141,000,000,000" in over
    (fast,) = check_limits(coherent.residency, coherent.transfers, CAPACITY, RATE * 0.99)
    assert "disk>host" in fast
    assert "too fast" in fast


def test_overlapping_transfers_are_reported_and_named(coherent: PolicyLogs) -> None:
    rows = coherent.transfers.to_pylist()
    rows[5] |= {"start_s": rows[4]["end_s"] - 0.01, "end_s": rows[4]["end_s"] + 1000.0}
    (breach, *_) = check_limits(coherent.residency, table("transfers", rows), CAPACITY, RATE)
    assert "transfers 4 and 5 overlap" in breach


def test_measured_load_times_replace_the_link(coherent: PolicyLogs) -> None:
    slow = dict.fromkeys(set(coherent.transfers.column("model").to_pylist()), 1e-3)
    assert check_limits(coherent.residency, coherent.transfers, CAPACITY, RATE / 10, load_seconds=slow) == []


def test_logs_come_back_as_written_and_the_same_tables_give_the_same_bytes(coherent: PolicyLogs, tmp_path) -> None:
    first = write_logs(tmp_path / "one", "lfu:3600-smith", coherent)
    second = write_logs(tmp_path / "two", "lfu:3600-smith", coherent)
    assert first.name == "lfu-3600-smith"
    again = read_logs(tmp_path / "one", "lfu:3600-smith")
    for name in LOGS:
        assert (first / f"{name}.parquet").read_bytes() == (second / f"{name}.parquet").read_bytes()
        assert getattr(again, name).to_pylist() == getattr(coherent, name).to_pylist()


def test_plain_strings_account_like_encoded_ones(coherent: PolicyLogs) -> None:
    def plain(t: pa.Table) -> pa.Table:
        return t.cast(pa.schema([(f.name, pa.string() if pa.types.is_dictionary(f.type) else f.type) for f in t.schema]))

    scored = {"scored_from_s": 1704067200.0 + 2 * 86400, "end_s": 1704067200.0 + 7 * 86400}
    encoded = totals("x", coherent.residency, coherent.transfers, coherent.waits, coherent.orders, **scored)
    assert encoded == totals("x", *(plain(getattr(coherent, name)) for name in LOGS), **scored)
    assert encoded["prefetches"] > 0
    assert encoded["idle_gb_h"] < encoded["held_gb_h"]


def test_missing_and_foreign_logs_are_input_errors(tmp_path) -> None:
    with pytest.raises(InputError, match="run the replay again"):
        read_logs(tmp_path, "lru")
    write_logs(tmp_path, "lru", PolicyLogs(*(table(name, []) for name in LOGS)))
    (tmp_path / "lru" / "waits.parquet").write_bytes((tmp_path / "lru" / "transfers.parquet").read_bytes())
    with pytest.raises(InputError, match="not a waits log"):
        read_logs(tmp_path, "lru")

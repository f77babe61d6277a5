"""Every policy on the node without bytes: hand-computed cases, limits from the logs alone, determinism, and a slow LRU beside it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefetcher.errors import UsageError
from prefetcher.replay.accounts import check_limits, check_outcomes, read_logs, write_logs
from prefetcher.replay.policies import known_policies, parse_policy, policy_in_words, standard_taus
from prefetcher.replay.run import Simulation, replay_command
from prefetcher.replay.trace import Trace, read_trace

GB = 10**9
EVERY = [
    "lru", "gdsf", "lfu:3600", "lfu:100", "sieve", "lhd", "lru-smith", "lhd-smith", "lhd-smith-bypass", "lfu:3600-smith-bypass", "ttl:600",
    "hybrid", "belady", "belady-size", "belady-smith", "belady-smith-bypass", "clairvoyant",
]  # fmt: skip


def trace_of(folder: Path, rows: list[tuple[float, str]], sizes: dict[str, int]) -> Trace:
    path = folder / "log.parquet"
    pq.write_table(pa.table({"ts": [r[0] for r in rows], "model": [r[1] for r in rows]}), path)
    return read_trace(path, catalog=sizes)


def busy_trace(folder: Path, seed: int = 0, rows: int = 3000, hours: float = 12.0) -> Trace:
    rng = np.random.default_rng(seed)
    sizes = {f"m{i:02d}": int(rng.integers(1, 30)) * GB for i in range(20)}
    weights = rng.pareto(1.0, 20) + 0.05
    names = rng.choice(sorted(sizes), rows, p=weights / weights.sum())
    ts = np.sort(rng.uniform(0, hours * 3600, rows)) + 1.7e9
    return trace_of(folder, list(zip(ts.tolist(), names.tolist(), strict=True)), sizes)


def waits(simulation: Simulation, policy: str) -> list[float]:
    return simulation.rivals([policy])[policy].waits["wait_s"].to_pylist()


def test_a_load_is_joined_and_a_hit_waits_nothing(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [(1000.0, "a"), (1001.0, "a"), (1010.0, "a"), (1011.0, "b")], {"a": 7 * GB, "b": 7 * GB})
    simulation = Simulation(trace, 8 * GB, link_bytes_per_s=3.5e9)
    assert waits(simulation, "lru") == pytest.approx([2.0, 1.0, 0.0, 2.0])
    found = simulation.rivals(["lru"])["lru"].waits["found"].to_pylist()
    assert found == ["absent", "moving", "ready", "absent"]


def test_what_fits_nowhere_is_served_uncached(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [(0.0, "a"), (100.0, "b"), (200.0, "a")], {"a": 1 * GB, "b": 9 * GB})
    simulation = Simulation(trace, 2 * GB, link_bytes_per_s=1e9)
    logs = simulation.rivals(["lru"])["lru"]
    assert logs.waits["wait_s"].to_pylist() == pytest.approx([1.0, 9.0, 0.0])
    assert set(logs.residency["model"].to_pylist()) == {"a"}


def test_smiths_order_serves_the_short_one_first(tmp_path: Path) -> None:
    rows = [(0.0, "x"), (0.1, "long"), (0.2, "short")]
    trace = trace_of(tmp_path, rows, {"x": 2 * GB, "long": 10 * GB, "short": 1 * GB})
    simulation = Simulation(trace, 20 * GB, link_bytes_per_s=1e9)
    assert waits(simulation, "lru") == pytest.approx([2.0, 11.9, 12.8])
    assert waits(simulation, "lru-smith") == pytest.approx([2.0, 12.9, 2.8])


def test_a_keep_alive_ends(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [(0.0, "a"), (50.0, "a"), (200.0, "a")], {"a": GB})
    simulation = Simulation(trace, 2 * GB, link_bytes_per_s=1e9)
    assert waits(simulation, "ttl:100") == pytest.approx([1.0, 0.0, 1.0])
    ends = simulation.rivals(["ttl:100"])["ttl:100"].residency["end_s"].to_pylist()
    assert ends[0] == pytest.approx(150.0)


@pytest.mark.parametrize("policy", EVERY)
def test_limits_hold_in_the_logs_alone(policy: str, tmp_path: Path) -> None:
    trace = busy_trace(tmp_path)
    capacity = int(0.3 * trace.bytes_.sum())
    logs = Simulation(trace, capacity).rivals([policy])[policy]
    assert check_limits(logs.residency, logs.transfers, capacity, 3.5e9) == []
    wait = np.array(logs.waits["wait_s"].to_pylist())
    assert (wait >= 0).all()
    assert wait.sum() > 0 or policy == "clairvoyant"


def test_knowing_the_future_helps(tmp_path: Path) -> None:
    trace = busy_trace(tmp_path, seed=3)
    simulation = Simulation(trace, 0.3 * float(trace.bytes_.sum()))
    cold = {n: simulation.totals(n, logs)["cold_seconds"] for n, logs in simulation.rivals(["lru", "belady", "clairvoyant"]).items()}
    assert cold["clairvoyant"] < cold["belady"] < cold["lru"]


def test_ours_keeps_the_limits_and_repeats_itself_byte_for_byte(tmp_path: Path) -> None:
    trace = busy_trace(tmp_path, seed=1, rows=6000, hours=36.0)
    capacity = int(0.3 * trace.bytes_.sum())
    folders = []
    for run in ("one", "two"):
        simulation = Simulation(trace, capacity)
        mine = simulation.ours()
        for logs in (mine.logs, mine.shadow):
            assert check_limits(logs.residency, logs.transfers, capacity, 3.5e9) == []
        assert check_outcomes(mine.logs.orders) == []
        entry = simulation.totals("ours", mine.logs, mine.shadow)
        assert sum(entry["outcomes"].values()) == entry["prefetches"]
        folders.append(write_logs(tmp_path / run, "ours", mine.logs))
    for name in ("residency", "transfers", "waits", "orders"):
        assert (folders[0] / f"{name}.parquet").read_bytes() == (folders[1] / f"{name}.parquet").read_bytes()


def test_nodes_share_the_models_by_rendezvous_and_rows_may_name_one(tmp_path: Path) -> None:
    trace = busy_trace(tmp_path, seed=2)
    logs = Simulation(trace, 0.1 * float(trace.bytes_.sum()), nodes=3).rivals(["lru"])["lru"]
    homes: dict[str, set[str]] = {}
    for model, node in zip(logs.waits["model"].to_pylist(), logs.waits["node"].to_pylist(), strict=True):
        homes.setdefault(model, set()).add(node)
    assert all(len(nodes) == 1 for nodes in homes.values())
    assert len(set.union(*homes.values())) == 3


@pytest.mark.parametrize("name", ["fifo", "lfu", "lfu:0", "ttl:x", "ttl:600-smith", "gdsf-smith-bypass", "lru-", "hybrid-smith"])
def test_unknown_policies_are_named(name: str) -> None:
    with pytest.raises(UsageError, match=name.split(":")[0]):
        parse_policy(name, standard_taus())


def test_an_unknown_policy_is_told_every_name_that_is_known() -> None:
    with pytest.raises(UsageError) as caught:
        parse_policy("lruu", standard_taus())
    said = str(caught.value)
    names = known_policies()
    assert all(name in said for name in names)
    assert {"lhd-smith", "lhd-smith-bypass", "lfu:SECONDS", "ours"} <= set(names)
    # The list is what is accepted, neither more nor less, and each is described.
    bases = ("lru", "gdsf", "lfu:SECONDS", "sieve", "lhd", "ttl:SECONDS", "hybrid", "belady", "belady-size", "clairvoyant")
    accepted = {"ours"}
    for name in (base + variant for base in bases for variant in ("", "-smith", "-bypass", "-smith-bypass")):
        with contextlib.suppress(UsageError):
            parse_policy(name.replace("SECONDS", "60"), standard_taus())
            accepted.add(name)
    assert accepted == set(names)
    assert all(policy_in_words(name.replace("SECONDS", "60")) for name in names)
    assert policy_in_words("fifo") == ""


def test_the_command_writes_everything_and_the_verdict_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = busy_trace(tmp_path, seed=4)
    catalog = tmp_path / "catalog.csv"
    catalog.write_text("model,bytes\n" + "".join(f"{m},{b}\n" for m, b in zip(trace.models, trace.bytes_.tolist(), strict=True)))
    out = tmp_path / "out"
    replay_command(log=tmp_path / "log.parquet", out=out, catalog=catalog, capacity_ratio=0.3, policy="lru,lfu:3600,ours")
    first = capsys.readouterr().out.splitlines()[0]
    assert "s of waiting an hour" in first
    for name in ("lru", "lfu-3600", "ours", "ours-shadow"):
        assert read_logs(out, name).waits.num_rows == len(trace)
    assert (out / "report.html").stat().st_size > 100_000
    assert (out / "summary.json").exists()

"""`bench policies` over a tiny suite: its figures follow from the points that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefetcher.bench import policies
from prefetcher.errors import InputError, UsageError

GB = 10**9


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two traces of a day, one of them called like a sparse one, and a suite of three points."""
    folder = tmp_path_factory.mktemp("suite")
    for seed, name in enumerate(("genai_sd", "other")):
        rng = np.random.default_rng(seed)
        sizes = {f"m{i:02d}": int(rng.integers(1, 30)) * GB for i in range(12)}
        chance = rng.pareto(1.0, 12) + 0.05
        ts = np.sort(rng.uniform(0, 86_400, 1500)) + 1.7e9
        pq.write_table(pa.table({"ts": ts, "model": rng.choice(sorted(sizes), 1500, p=chance / chance.sum())}), folder / f"{name}.parquet")
        (folder / f"{name}.catalog.json").write_text(json.dumps([{"model": m, "bytes": b} for m, b in sizes.items()]))
    points = [{"trace": "genai_sd", "capacity_ratio": [0.2, 0.4]}, {"trace": "other", "capacity_ratio": [0.3]}]
    (folder / "suite.json").write_text(json.dumps({"link_bytes_per_s": 3.5e9, "warmup_ratio": 0.3, "points": points}))
    return folder


def geomean(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def test_figures_follow_from_the_points(suite: Path) -> None:
    said: list[str] = []
    names = "lru,gdsf,ttl:600,ttl:7200,hybrid,lfu:3600-smith-bypass,belady,ours"
    policies.run(suite / "out.json", suite=suite / "suite.json", traces=suite, policy=names, say=said.append)
    result = json.loads((suite / "out.json").read_text())
    points, figures = result["points"], result["figures"]
    assert [(p["trace"], p["capacity_ratio"]) for p in points] == [("genai_sd", 0.2), ("genai_sd", 0.4), ("other", 0.3)]
    assert len(said) == 3
    cold = [{n: of["cold_seconds"] for n, of in p["policies"].items()} for p in points]
    of_peers = ("lru", "gdsf", "ttl:600", "ttl:7200", "hybrid")
    best = [min(of_peers, key=c.__getitem__) for c in cold]
    over = [c["ours"] / c[b] for c, b in zip(cold, best, strict=True)]
    assert [p["best_peer"] for p in points] == best
    assert [p["over_best_peer"] for p in points] == pytest.approx(over)
    assert figures["geomean_over_best_peer"] == pytest.approx(geomean(over))
    assert figures["worst_point"] == pytest.approx(max(over))
    assert figures["geomean_sparse"] == pytest.approx(geomean(over[:2]))
    assert figures["geomean_over_lru"] == pytest.approx(geomean([c["ours"] / c["lru"] for c in cold]))
    assert figures["geomean_over_best_simple"] == pytest.approx(geomean([c["ours"] / c["lfu:3600-smith-bypass"] for c in cold]))
    assert figures["points_below_belady"] == sum(c["ours"] < c["belady"] for c in cold)
    peers = {n: geomean([c["ours"] / c[n] for c in cold]) for n in of_peers}
    assert result["peers"] == pytest.approx(peers)
    assert figures["geomean_over_best_single_peer"] == pytest.approx(max(peers.values()))
    assert all(set(p["equal_gb_h"]) == {"ttl:600", "ttl:7200", "hybrid"} for p in points)
    assert any(max(p["equal_gb_h"].values()) > min(p["equal_gb_h"].values()) for p in points)
    assert figures["geomean_equal_gb_h"] == pytest.approx(geomean([max(p["equal_gb_h"].values()) for p in points]))
    for key, word in (("held_gb_h", "held"), ("moved_gb", "moved")):
        over = [p["policies"]["ours"][key] / p["policies"][b][key] for p, b in zip(points, best, strict=True)]
        assert [p[f"{word}_over_best_peer"] for p in points] == pytest.approx(over)
        assert figures[f"geomean_{word}_over_best_peer"] == pytest.approx(geomean(over))
    assert figures["dlrm_wasted_ratio"] is None
    assert result["machine"]["cores"] >= 1


def test_a_part_of_the_suite(suite: Path) -> None:
    result = policies.run(
        suite / "part.json", suite=suite / "suite.json", traces=suite, policy="lru,sieve", trace="other", say=lambda _text: None
    )
    (point,) = result["points"]
    assert set(point["policies"]) == {"lru", "sieve"}
    assert point["over_best_peer"] is None
    assert result["figures"]["geomean_sparse"] is None


def test_sparse_are_the_points_on_which_little_can_be_known() -> None:
    def point(trace: str, ratio: float, cold: float) -> dict[str, Any]:
        of = {"held_gb_h": 1.0, "moved_gb": 1.0, "wasted_gb_h": 0.0}
        both = {"lru": {"cold_seconds": 1.0, **of}, "ours": {"cold_seconds": cold, **of}}
        beside = {"best_peer": "lru", "held_over_best_peer": 1.0, "moved_over_best_peer": 1.0}
        return {"trace": trace, "capacity_ratio": ratio, "policies": both, "equal_gb_h": {}, **beside}

    points = [point("azure_functions_day", 0.4, 0.5), point("azure_functions_day", 0.6, 0.9), point("genai_sd", 0.1, 0.4)]
    assert policies._figures([*points, point("other", 0.9, 0.1)])["geomean_sparse"] == pytest.approx(0.6)


def test_the_negative_control_says_what_share_was_wasted() -> None:
    def point(trace: str, held: float, wasted: float) -> dict[str, Any]:
        ours = {"cold_seconds": 1.0, "held_gb_h": held, "moved_gb": 1.0, "wasted_gb_h": wasted}
        return {
            "trace": trace, "capacity_ratio": 0.1, "policies": {"ours": ours}, "equal_gb_h": {}, "best_peer": None,
            "held_over_best_peer": None, "moved_over_best_peer": None,
        }  # fmt: skip

    points = [point("dlrm_launches", 100.0, 4.0), point("dlrm_launches", 200.0, 6.0), point("genai_sd", 10.0, 9.0)]
    assert policies._figures(points)["dlrm_wasted_ratio"] == pytest.approx(0.04)


def test_what_is_no_suite_is_named(suite: Path) -> None:
    (suite / "bad.json").write_text("[]")
    with pytest.raises(InputError, match=r"bad\.json"):
        policies.run(suite / "x.json", suite=suite / "bad.json", traces=suite)
    for ratio in ("NaN", "Infinity", "-1", "0", "1e300"):
        (suite / "bad.json").write_text(f'{{"points": [{{"trace": "other", "capacity_ratio": [{ratio}]}}]}}')
        with pytest.raises(UsageError, match="--capacity-ratio"):
            policies.run(suite / "x.json", suite=suite / "bad.json", traces=suite)
    with pytest.raises(UsageError, match="--suite"):
        policies.run(suite / "x.json")

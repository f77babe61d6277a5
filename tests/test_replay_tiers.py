"""`prefetcher replay --tiers` and `bench cluster` from their options to what they write and say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefetcher.bench import cluster
from prefetcher.errors import UsageError
from prefetcher.replay.accounts import check_limits, read_logs
from prefetcher.replay.run import replay_command

GB = 10**9
#: The first of them may have to compile.
pytestmark = pytest.mark.timeout(900)


def log_of(folder: Path, name: str = "log", seed: int = 3, hours: float = 10.0, gb: tuple[int, int] = (2, 30)) -> Path:
    """A log with its catalog beside it; one of its models is larger than a device."""
    rng = np.random.default_rng(seed)
    sizes = {f"m{k:02d}": int(size) * GB for k, size in enumerate([90, *rng.integers(*gb, 9)])}
    ts = np.sort(rng.uniform(0, hours * 3600, 800)) + 1.7e9
    pq.write_table(pa.table({"ts": ts, "model": rng.choice(sorted(sizes), 800)}), folder / f"{name}.parquet")
    (folder / f"{name}.catalog.json").write_text(json.dumps([{"model": m, "bytes": b} for m, b in sizes.items()]))
    return folder / f"{name}.parquet"


def test_a_replay_with_tiers_tells_them_and_keeps_their_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = log_of(tmp_path), tmp_path / "out"
    replay_command(
        log=log, out=out, catalog=tmp_path / "log.catalog.json", policy="lru,lhd-smith,ours", capacity_ratio=0.8, nodes=2,
        tiers="remote,disk,host,device", device_bytes=60 * GB, disk_bytes=150 * GB,
    )  # fmt: skip
    said = capsys.readouterr().out
    assert "on 2 nodes with remote, disk, host and device" in said
    assert "requests for models that fit no node wait" in said
    summary = json.loads((out / "summary.json").read_text())
    assert summary["input"]["tiers"] == ["remote", "disk", "host", "device"]
    room, rates = summary["input"]["tier_bytes"], summary["input"]["edges_bytes_per_s"]
    assert rates == {"remote>disk": 1e9, "disk>host": 3.5e9, "host>device": 50e9}
    assert room["device"] == 60 * GB
    for entry in summary["policies"]:
        logs = read_logs(out, entry["policy"])
        for tier, capacity in room.items():
            assert check_limits(logs.residency, logs.transfers, int(capacity), rates, tier=tier) == []
        rows = [entry["requests"], entry["unfit"]["requests"]]
        assert all(rows)
        assert sum(of["requests"] for of in entry["nodes"].values()) == rows[0]
        assert sum(of["cold_seconds"] for of in entry["nodes"].values()) == pytest.approx(entry["cold_seconds"])
        scored = logs.waits["ts"].to_numpy() >= summary["input"]["scored_from_s"]
        assert sum(rows) == scored.sum()
        waited = entry["cold_seconds"] + entry["unfit"]["cold_seconds"]
        assert waited == pytest.approx(logs.waits["wait_s"].to_numpy()[scored].sum())
        of = entry["tiers"]
        assert entry["held_gb_h"] == pytest.approx(of["host"]["held_gb_h"] + of["device"]["held_gb_h"])
        assert entry["moved_gb"] == pytest.approx(of["disk"]["moved_gb"] + of["host"]["moved_gb"])
    page = (out / "report.html").read_text()
    assert "Tiers and nodes" in page
    assert "on 2 nodes with remote, disk, host and device" in page
    assert "node-1" in page


def test_default_tiers_are_todays_replay(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    for name, tiers in (("a", {}), ("b", {"tiers": "disk,host"}), ("c", {"tiers": "remote,disk,host"})):
        replay_command(
            log=log, out=tmp_path / name, catalog=tmp_path / "log.catalog.json", policy="lru,ours", capacity_ratio=0.5, nodes=2, **tiers
        )  # fmt: skip
    first, *others = ((tmp_path / name / "summary.json").read_bytes() for name in "abc")
    assert all(other == first for other in others)
    assert "tiers" not in json.loads(first)["input"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tiers": "host,device"}, "--tiers"),
        ({"device_bytes": GB}, "--device-bytes"),
        ({"disk_bytes": GB}, "--disk-bytes"),
        ({"tiers": "disk,host,device", "policy": "hybrid,ours"}, "hybrid"),
        ({"tiers": "disk,host,device", "hints": "synthetic:precision=0.7,lead=5,seed=1"}, "--hints"),
        ({"tiers": "disk,host,device", "device_bytes": 0}, "--device-bytes"),
    ],
)
def test_what_does_not_go_together_is_refused_before_reading(options: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        replay_command(log=tmp_path / "none.csv", out=tmp_path, capacity_ratio=0.5, **options)  # type: ignore[arg-type]


def test_figures_of_the_bench_follow_from_its_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "POINTS", (("azure_functions_day", 1), ("azure_functions_day", 2), ("servegen_m_mid", 1)))
    for seed, name in enumerate(("azure_functions_day", "servegen_m_mid")):
        log_of(tmp_path, name, seed, gb=(20, 55))
    said: list[str] = []
    result = cluster.run(tmp_path / "out.json", traces=tmp_path, policy="lru,lfu:3600-smith,ours", say=said.append)
    points, figures = result["points"], result["figures"]
    assert [(p["trace"], p["nodes"]) for p in points] == list(cluster.POINTS)
    assert len(said) == 3
    cold = [{n: of["cold_seconds"] for n, of in p["policies"].items()} for p in points]
    over = [c["ours"] / min(c["lru"], c["lfu:3600-smith"]) for c in cold]
    assert figures["geomean"] == pytest.approx(float(np.exp(np.mean(np.log(over)))))
    assert figures["worst_point"] == pytest.approx(max(over))
    assert result["peers"]["lru"] == pytest.approx(float(np.exp(np.mean([np.log(c["ours"] / c["lru"]) for c in cold]))))
    assert json.loads((tmp_path / "out.json").read_text()) == result
    with pytest.raises(UsageError, match="--traces"):
        cluster.run(tmp_path / "out.json")

"""`bench starts`: its definition against a direct computation, no knowledge of the future, and figures that follow from the logs'."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefetcher.bench import starts
from prefetcher.errors import InputError, UsageError
from prefetcher.replay.trace import Trace, read_trace

WINDOW_S, MODELS = 600.0, 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A day and a half: models with a beat, some at random, one of the catalog that is never used."""
    folder = tmp_path_factory.mktemp("traces")
    rng = np.random.default_rng(0)
    end_s = 1.5 * 86_400
    times = [np.arange(rng.uniform(0, p), end_s, p) for p in (1800.0, 3600.0, 5400.0)]
    times += [np.sort(rng.uniform(0, end_s, 60)) for _ in range(MODELS - 3)]
    ts = 1.7e9 + np.concatenate([[0.0], *times])
    model = np.repeat(np.arange(-1, MODELS), [1, *(len(t) for t in times)]).clip(0)
    order = np.argsort(ts, kind="stable")
    names = [f"m{m}" for m in model[order]]
    for name in ("genai_sd", "bike_stations"):
        pq.write_table(pa.table({"ts": ts[order], "model": names}), folder / f"{name}.parquet")
        sizes = [{"model": f"m{m}", "bytes": 10**9} for m in range(MODELS + 1)]
        (folder / f"{name}.catalog.json").write_text(json.dumps(sizes))
    return folder


@pytest.fixture(scope="module")
def trace(folder: Path) -> Trace:
    return read_trace(folder / "genai_sd.parquet", catalog=folder / "genai_sd.catalog.json")


@pytest.fixture(scope="module")
def scored(trace: Trace) -> dict[str, float]:
    return starts.starts(trace)


def test_average_precision_is_that_of_the_field() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(2)
    for digits in (1, 6):
        label, score = rng.random(500) < 0.1, np.round(rng.random(500), digits)
        assert starts.average_precision(label, score) == pytest.approx(metrics.average_precision_score(label, score))
    assert math.isnan(starts.average_precision(np.zeros(3, bool), np.zeros(3)))
    assert math.isnan(starts.average_precision(np.zeros(0, bool), np.zeros(0)))


def test_starts_are_what_the_definition_says(trace: Trace, scored: dict[str, float]) -> None:
    windows = int((trace.t1 - trace.t0) // WINDOW_S) + 1
    used = np.zeros((windows, len(trace.models)), bool)
    used[((trace.ts - trace.t0) // WINDOW_S).astype(int), trace.model] = True
    label, lately = [], []
    for k in range(int(0.6 * (windows - 1)), windows - 1):
        for m in range(len(trace.models)):
            if not used[k, m]:
                label.append(used[k + 1, m])
                lately.append(used[max(0, k - 143) : k + 1, m].sum())
    assert scored["scored"] == len(label)
    assert scored["starts"] == sum(label)
    expected = starts.average_precision(np.array(label), np.array(lately, float))
    assert scored["ap_active_24h"] == pytest.approx(expected)


def test_beats_are_forecast_better_than_by_yesterday_alone(scored: dict[str, float]) -> None:
    assert scored["ap"] > 1.5 * scored["ap_active_24h"]
    assert scored["ap_refitted"] > 1.5 * scored["ap_active_24h"]
    assert scored["ap"] != scored["ap_refitted"]


def test_what_comes_after_the_part_that_is_looked_at_does_not_matter(trace: Trace) -> None:
    windows = int((trace.t1 - trace.t0) // WINDOW_S) + 1
    part = int(windows * 0.7)
    early = trace.ts < trace.t0 + part * WINDOW_S
    changed = np.where(early, trace.model, (trace.model + 4) % MODELS).astype(np.int32)
    assert starts.starts(trace, upto_ratio=0.7) == starts.starts(replace(trace, model=changed), upto_ratio=0.7)


def test_figures_follow_from_the_logs(folder: Path, scored: dict[str, float]) -> None:
    said: list[str] = []
    result = starts.run(folder / "out.json", traces=folder, trace="genai_sd,bike_stations", say=said.append)
    assert json.loads((folder / "out.json").read_text()) == result
    ap = scored["ap"]
    assert result["figures"] == pytest.approx(
        {"ap_genai_sd": ap, "ap_bike_stations": ap, "ap_over_reference": math.sqrt(ap / 0.24 * ap / 0.22)}
    )
    assert result["peers"]["active_24h"] == pytest.approx(scored["ap_active_24h"] / math.sqrt(0.24 * 0.22))
    assert any("50 %" in line for line in said)
    with pytest.raises(UsageError, match="--traces"):
        starts.run(folder / "out.json")
    with pytest.raises(UsageError, match="no reference for else"):
        starts.run(folder / "out.json", traces=folder, trace="else")


def test_a_log_that_is_too_short_is_refused(trace: Trace) -> None:
    with pytest.raises(InputError, match="too few"):
        starts.starts(trace, upto_ratio=0.03)

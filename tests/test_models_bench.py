"""The benchmark of fits runs small and writes what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefetcher.bench import fit


@pytest.mark.slow
def test_the_benchmark_of_fits_runs(tmp_path: Path) -> None:
    told: list[str] = []
    result = fit.run(tmp_path / "fit.json", quick=True, say=told.append)
    assert json.loads((tmp_path / "fit.json").read_text()) == result
    figures = result["figures"]
    assert {"score_s", "retrain_s", "prophet_s"} <= set(figures)
    assert all(value > 0.0 for name, value in figures.items() if name not in ("prophet_failed", "prophet_used_ratio"))
    assert figures["prophet_failed"] == 0
    assert any(line.startswith("seasons: 6 of 6") for line in told)

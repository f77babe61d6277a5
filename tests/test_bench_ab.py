"""`bench ab`: its made-up blocks are as they are said to be, its switchback really switches, and its figures are rates."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from prefetcher.bench import ab
from prefetcher.bench.made_blocks import make_blocks, observed
from prefetcher.bench.switchback import SwitchbackRun
from prefetcher.core.experts import EXPERTS, VARIANTS
from prefetcher.core.holdout import HoldoutSettings, arm_of
from prefetcher.core.node import BLOCK_BYTES, World
from prefetcher.core.types import Arm, NodeName
from prefetcher.errors import UsageError
from prefetcher.replay.ours import LIVE, SHADOW, RateBlock


def test_made_blocks_are_heterogeneous_heavy_tailed_and_alike_from_hour_to_hour() -> None:
    made = [make_blocks(np.random.default_rng(seed)) for seed in range(20)]
    assert np.mean([of.saving for of in made]) == pytest.approx(0.2, abs=0.02)
    for of in made:
        waits = of.without_s
        assert waits.std() > 1.5 * waits.mean()
        means = waits.mean(axis=1)
        assert means.max() > 5.0 * means.min()
    following = [np.corrcoef(np.log1p(node[1:]), np.log1p(node[:-1]))[0, 1] for of in made for node in of.without_s]
    assert np.mean(following) > 0.3
    shadow = [np.corrcoef(of.without_s.ravel(), of.shadow_s.ravel())[0, 1] for of in made]
    assert 0.5 < np.mean(shadow) < 0.99


def test_the_other_side_is_carried_over_only_after_a_change() -> None:
    made = make_blocks(np.random.default_rng(1), nodes=2, days=1)
    control = np.zeros((2, 24), np.bool_)
    control[0, 5] = True
    seen = observed(made, control)
    assert (seen[1] == made.with_s[1]).all()
    assert min(made.with_s[0, 5], made.without_s[0, 5]) <= seen[0, 5] <= max(made.with_s[0, 5], made.without_s[0, 5])
    assert abs(seen[0, 5] - made.without_s[0, 5]) < 0.1 * abs(made.with_s[0, 5] - made.without_s[0, 5]) + 1e-9
    assert (seen[0, 7:] == made.with_s[0, 7:]).all()


def test_a_switchback_fetches_nothing_ahead_in_control_blocks() -> None:
    """Two models in turn, room for one of them, and forecasts that see every use coming."""
    hours, size = 12, np.array([10e9, 10e9])
    ts = np.concatenate([hour * 3600.0 + np.array([300.0, 900.0, 1500.0, 2100.0, 2700.0, 3300.0]) for hour in range(hours)])
    model = np.tile(np.array([0, 1], np.int32), len(ts) // 2)
    unknown = np.full(len(ts), np.inf)
    world = World(size, np.full(2, 3.0), BLOCK_BYTES / size * 3.0, ts, model, unknown, np.array([300.0, 900.0]), 0.0, hours * 3600.0, 60.0)
    settings = HoldoutSettings(share=0.5, seed=2)
    run = SwitchbackRun(world, 15e9, 0.002, 600.0, node="n", settings=settings)
    run._hedge.live = list(EXPERTS).index("hazard-prefetch")
    # A use is seen coming five minutes ahead.
    rates, rows = np.full((VARIANTS, hours * 60 + 1, 2), 1e-6, np.float32), np.full((VARIANTS, len(ts)), 1e-6, np.float32)
    for at_s, number in zip(ts, model, strict=True):
        rates[:, int((at_s - 300.0) // 60.0) : int(at_s // 60.0) + 1, number] = 1.0 / 60.0
    run.take(RateBlock(0.0, hours * 3600.0, 0, 0, rates, rows), np.arange(len(ts)))
    run.close()
    orders = run.log.orders[: run.log.filled[2]]
    mine = orders[orders["cache"] == LIVE]
    control = {hour for hour in range(hours) if arm_of(NodeName("n"), hour * 3600.0, settings)[0] is Arm.CONTROL}
    assert 2 <= len(control) <= 10
    assert len(mine) > 0
    # An order at the end of a block is still that block's.
    assert {int((at_s - 1e-6) // 3600.0) for at_s in mine["issued_s"]} & control == set()
    assert not len(orders[orders["cache"] == SHADOW])


def test_the_bench_writes_rates_and_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ab, "_QUICK_RUNS", 6)
    said: list[str] = []
    result = ab.run(tmp_path / "ab.json", quick=True, say=said.append)
    assert json.loads((tmp_path / "ab.json").read_text()) == result
    assert set(result["figures"]) == {"false_rate", "power"}
    assert 0.0 <= result["figures"]["false_rate"] <= 0.5
    assert result["figures"]["power"] >= 0.5
    assert set(result["peers"]) == {"difference_of_means", "without_shadow_caches"}
    assert result["made"]["runs"] == 6
    assert said[0].startswith("false rate ")


def test_it_says_what_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="knows the traces"):
        ab.run(tmp_path / "x.json", traces=tmp_path, trace="nonsense")
    with pytest.raises(UsageError, match="--traces DIR"):
        ab.run(tmp_path / "x.json", trace="genai_sd")

"""The control group's analysis: equal arms are found equal, a saving is found, and it says so where it can't know."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetcher.bench.made_blocks import FIRST_BLOCK, MadeBlocks, make_blocks, observed
from prefetcher.core.effect import Basis, Blocks, Comparison, detectable_ratio, effect_in_words, estimate, redraw
from prefetcher.core.holdout import HoldoutSettings, draw_control

SETTINGS = HoldoutSettings(share=0.05)


def blocks_of(made: MadeBlocks, drawn: HoldoutSettings, *, equal: bool = False) -> Blocks:
    nodes, hours = made.with_s.shape
    names = tuple(f"node-{k}" for k in range(nodes))
    node, block = np.repeat(np.arange(nodes), hours), np.tile(np.arange(hours) + FIRST_BLOCK, nodes)
    control = np.zeros(len(node) + 1, np.bool_)
    control[draw_control(names, node, block, drawn, np.array([drawn.seed]))[0]] = True
    cold_s = made.with_s if equal else observed(made, control[:-1].reshape(nodes, hours))
    return Blocks(names, node, block, control[:-1], cold_s.ravel(), made.rows.ravel(), made.shadow_s.ravel())


def made(seed: int, nodes: int = 8, days: int = 7) -> MadeBlocks:
    return make_blocks(np.random.default_rng(seed), nodes, days)


def test_equal_arms_are_found_different_about_once_in_twenty() -> None:
    runs = 200
    alarms = 0
    for seed in range(runs):
        drawn = replace(SETTINGS, seed=seed)
        blocks = blocks_of(made(seed, 4, 5), drawn, equal=True)
        alarms += Comparison(blocks, redraw(blocks, drawn, 199)).chance() <= 0.05
    # Binomial(200, 1/20): outside of this once in ten thousand.
    assert 1 <= alarms <= 23


def test_a_saving_of_a_fifth_is_found_with_an_interval_around_it() -> None:
    of = made(3, 16, 14)
    effect = estimate(blocks_of(of, SETTINGS), SETTINGS)
    assert effect.basis is Basis.CONTROL
    assert effect.found
    assert effect.low is not None
    assert effect.high is not None
    assert effect.saving_ratio is not None
    assert 0.0 < effect.low < effect.saving_ratio < effect.high
    assert effect.low < of.saving < effect.high
    assert effect.saved_s_per_h is not None
    true_per_h = (of.without_s - of.with_s).mean() * 16 * 3600.0 / 3000.0
    assert effect.saved_s_per_h == pytest.approx(true_per_h, rel=0.5)
    assert "less waiting than the control group (95 %:" in effect_in_words(effect)


def test_the_interval_is_what_the_test_does_not_reject() -> None:
    blocks = blocks_of(made(5), SETTINGS)
    comparison = Comparison(blocks, redraw(blocks, SETTINGS))
    low, high = comparison.interval()
    assert low < comparison.saving() < high
    for inside in (low + 0.01, comparison.saving(), high - 0.01):
        assert comparison.chance(inside) > 0.05
    for outside in (low - 0.01, high + 0.01):
        assert comparison.chance(outside) <= 0.06
    assert (comparison.chance() <= 0.05) == (low > 0.0 or high < 0.0)


def test_harm_is_found_too() -> None:
    of = made(4, 16, 14)
    harm = MadeBlocks(of.without_s, of.without_s * 1.5, of.shadow_s, of.rows)
    effect = estimate(blocks_of(harm, SETTINGS), SETTINGS)
    assert effect.high is not None
    assert effect.high < 0.0
    assert effect.found
    assert "more waiting" in effect_in_words(effect)


def test_shadow_caches_sharpen_what_is_found() -> None:
    blocks = blocks_of(made(6, 16, 14), SETTINGS)
    bare = replace(blocks, shadow_s=np.full(len(blocks), np.nan))
    widths = []
    for of in (blocks, bare):
        low, high = Comparison(of, redraw(of, SETTINGS)).interval()
        widths.append(high - low)
    assert widths[0] < 0.7 * widths[1]


def test_too_few_blocks_give_no_verdict_but_what_could_be_found() -> None:
    effect = estimate(blocks_of(made(2, 4, 3), SETTINGS), SETTINGS)
    assert effect.basis is Basis.CONTROL
    assert not effect.found
    assert effect.detectable is not None
    assert effect.days_to_tenth is not None
    assert effect.days_to_tenth > effect.days
    assert "too early to say" in effect_in_words(effect)
    assert "would be found" in effect_in_words(effect)


def test_without_a_control_group_only_shadow_caches_speak_and_that_is_said() -> None:
    of = made(8, 1, 7)
    blocks = blocks_of(of, HoldoutSettings(share=0.0))
    effect = estimate(blocks, SETTINGS)
    assert effect.basis is Basis.SHADOW
    assert effect.low is None
    assert effect.chance is None
    assert not effect.found
    assert "no control group runs" in effect.why
    assert "not an experiment" in effect_in_words(effect)
    assert effect.saving_ratio == pytest.approx(1.0 - blocks.cold_s.sum() / blocks.shadow_s.sum())


def test_a_few_control_blocks_are_not_judged() -> None:
    blocks = blocks_of(made(9, 2, 2), SETTINGS)
    assert 0 < blocks.control.sum() < 8
    effect = estimate(blocks, SETTINGS)
    assert effect.basis is Basis.SHADOW
    assert "control blocks so far" in effect.why


def test_nothing_measured_and_nobody_waiting_are_said() -> None:
    blocks = blocks_of(made(10, 2, 2), SETTINGS)
    none = np.zeros(0, np.int64)
    empty = Blocks(blocks.nodes, none, none, np.zeros(0, np.bool_), np.zeros(0), np.zeros(0), np.zeros(0))
    assert estimate(empty, SETTINGS).basis is Basis.NOTHING
    assert "nothing was measured" in effect_in_words(estimate(empty, SETTINGS))
    idle = replace(blocks, cold_s=np.zeros(len(blocks)), shadow_s=np.zeros(len(blocks)))
    assert "nobody waited" in effect_in_words(estimate(idle, SETTINGS))


@settings(max_examples=20)
@given(scale=st.floats(1e-3, 1e4), seed=st.integers(0, 20))
def test_the_saving_does_not_depend_on_the_unit_of_time(scale: float, seed: int) -> None:
    blocks = blocks_of(made(seed, 4, 5), SETTINGS)
    larger = replace(blocks, cold_s=blocks.cold_s * scale, shadow_s=blocks.shadow_s * scale)
    one, other = (Comparison(of, redraw(of, SETTINGS, 99)) for of in (blocks, larger))
    assert other.saving() == pytest.approx(one.saving(), abs=1e-3)
    assert other.chance() == pytest.approx(one.chance(), abs=0.021)


@settings(max_examples=20)
@given(saving=st.floats(-1.0, 0.8), seed=st.integers(0, 20))
def test_an_exact_saving_is_read_exactly_where_shadows_are_right(saving: float, seed: int) -> None:
    of = made(seed, 4, 5)
    blocks = blocks_of(of, SETTINGS, equal=True)
    without = of.without_s.ravel()
    exact = replace(blocks, cold_s=np.where(blocks.control, without, without * (1.0 - saving)), shadow_s=without)
    comparison = Comparison(exact, redraw(exact, SETTINGS, 99))
    assert comparison.saving() == pytest.approx(saving, abs=5e-3)


def test_more_nodes_and_days_find_smaller_savings() -> None:
    assert detectable_ratio(16, 14, SETTINGS) < 0.2
    assert detectable_ratio(4, 14, SETTINGS) == pytest.approx(2.0 * detectable_ratio(16, 14, SETTINGS))
    assert math.isinf(detectable_ratio(1, 14, SETTINGS))
    assert math.isinf(detectable_ratio(16, 14, HoldoutSettings(share=0.0)))

"""The planner's rules and the value formulas, against slow references."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetcher.core.hedge import Hedge
from prefetcher.core.node import BLOCK_BYTES
from prefetcher.core.planner import choose_parts, choose_victims, next_in_smith_order, outbids
from prefetcher.core.value import miss_cost_s, next_use_rate, price_per_byte_s

resident = st.tuples(st.floats(0, 1), st.integers(1, 50))


@given(st.lists(resident, min_size=1, max_size=12), st.floats(-5, 400))
@settings(deadline=None, max_examples=200)
def test_victims_suffice_and_none_could_have_stayed(residents: list[tuple[float, int]], need: float) -> None:
    index = np.array([r[0] for r in residents])
    size = np.array([float(r[1]) for r in residents])
    victims, suffice = choose_victims(index, size, np.arange(len(residents)), need)
    assert suffice == (size.sum() >= need)
    if not suffice or need <= 0:
        assert len(victims) == 0
        return
    freed = size[victims].sum()
    assert freed >= need
    assert all(freed - size[v] < need for v in victims)
    assert len(set(victims.tolist())) == len(victims)


def test_the_lowest_index_goes_first_and_the_highest_stays_where_it_can() -> None:
    index = np.array([1.0, 2.0, 3.0])
    victims, _ = choose_victims(index, np.array([1.0, 5.0, 5.0]), np.arange(3), 5.0)
    assert victims.tolist() == [1]


def test_bypass_compares_with_the_sum_over_the_victims() -> None:
    index, size = np.array([1.0, 1.0]), np.array([10.0, 10.0])
    both = np.array([0, 1])
    assert outbids(1.0, 20.0, index, size, both, 0.0)
    assert not outbids(1.0, 19.0, index, size, both, 0.0)
    assert outbids(1.0, 16.0, index, size, both, 4.0), "the last of them keeps 4 bytes"


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 400)), min_size=1, max_size=12), st.floats(-5, 3000))
@settings(deadline=None, max_examples=200)
def test_what_the_last_victim_keeps_is_not_needed(residents: list[tuple[float, int]], need_mb: float) -> None:
    index = np.array([r[0] for r in residents])
    size = np.array([r[1] * 1e6 for r in residents])
    victims, suffice, kept = choose_parts(index, size, np.arange(len(residents)), need_mb * 1e6)
    assert suffice == (size.sum() >= need_mb * 1e6)
    if not suffice or need_mb <= 0:
        assert (len(victims), kept) == (0, 0.0)
        return
    stay = np.setdiff1d(np.arange(len(residents)), victims)
    assert all(index[stay] >= index[victims].max())
    surplus = size[victims].sum() - need_mb * 1e6
    assert 0.0 <= surplus - kept < BLOCK_BYTES
    assert kept % BLOCK_BYTES == 0.0
    assert kept < size[victims[-1]]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8))
@settings(deadline=None)
def test_smiths_order_takes_the_most_waiting_rows_per_byte(loads: list[tuple[int, int]]) -> None:
    waiting = np.array([float(w) for w, _ in loads])
    left = np.array([float(b) for _, b in loads])
    position = next_in_smith_order(waiting, left)
    assert waiting[position] / left[position] == pytest.approx((waiting / left).max())


def test_the_cost_of_a_miss_counts_joiners_and_those_who_wait() -> None:
    assert miss_cost_s(2.0, 0.0, 0.0, 0.0) == 2.0
    assert miss_cost_s(2.0, 2.0, 0.5, 3.0) == pytest.approx(3.0 * (1 + 0.5 * 3.0 / 2) + 6.0)


def test_a_constant_hazard_gives_its_own_rate_at_every_window() -> None:
    horizons = np.array([60.0, 600.0, 3600.0])
    rate = 1 / 900.0
    p = np.array([[1 - math.exp(-rate * h) for h in horizons]], np.float32)
    for last in range(3):
        assert next_use_rate(p, horizons, last)[0] == pytest.approx(rate, rel=1e-2)
    assert np.isnan(next_use_rate(np.full((1, 3), np.nan, np.float32), horizons, 2)[0])


def test_the_price_is_seconds_per_byte_second() -> None:
    assert price_per_byte_s(3.6) == pytest.approx(1e-12)


def test_the_hedge_changes_only_for_a_clear_gain_and_survives_a_restart() -> None:
    hedge = Hedge(2, settle_periods=2)
    assert hedge.learn(np.array([10.0, 0.0]), 3600) == 0
    assert hedge.learn(np.array([10.0, 19.9]), 3600) == 0
    again = Hedge(2, settle_periods=2)
    again.restore(hedge.snapshot())
    for h in (hedge, again):
        assert h.learn(np.array([10.0, 0.0]), 3600) == 1

"""Sums by block of the experiment: what counts where, and which blocks are evidence."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetcher.core.block_sums import BLOCKS_KEPT, BlockSums, is_whole
from prefetcher.core.facts import Found, RowSeen, RowServed
from prefetcher.core.holdout import HoldoutSettings
from prefetcher.core.types import Arm, ModelName
from prefetcher.errors import InputError

M = ModelName("m")
SETTINGS = HoldoutSettings()
BEGIN_S = 1_000 * 3600.0


def sums(control: bool = False) -> BlockSums:
    return BlockSums(lambda now_s: Arm.CONTROL if control else Arm.TREATED)


def stay(of: BlockSums, from_s: float, until_s: float, on: bool = True, step_s: float = 10.0) -> None:
    now_s = from_s
    while now_s <= until_s:
        of.note(now_s, on)
        now_s += step_s


def test_a_row_counts_in_the_block_of_its_arrival_though_it_is_served_in_the_next() -> None:
    of = sums(control=True)
    of.add(RowSeen(M, BEGIN_S + 3590.0, Found.ABSENT))
    of.add(RowServed(M, BEGIN_S + 3590.0, Found.ABSENT, 30.0))
    (block,) = of.blocks()
    assert (block.block, block.control, block.rows, block.cold_s, block.cold_starts) == (1000, True, 1, 30.0, 1)


def test_the_wash_out_and_leases_that_are_no_rows_are_left_out() -> None:
    of = sums()
    of.add(RowSeen(M, BEGIN_S + 599.0, Found.ABSENT))
    of.add(RowServed(M, BEGIN_S + 599.0, Found.ABSENT, 9.0))
    of.add(RowSeen(M, BEGIN_S + 700.0, Found.ABSENT, lease=True, announced=True))
    assert of.blocks() == []
    of.add(RowSeen(M, BEGIN_S + 700.0, Found.READY, lease=True, announced=False))
    assert [block.rows for block in of.blocks()] == [1]


def test_a_block_is_whole_when_the_node_was_there_and_prefetching_for_all_of_it() -> None:
    of = sums()
    stay(of, BEGIN_S - 20.0, BEGIN_S + 2 * 3600.0 + 700.0)
    stay(of, BEGIN_S + 2 * 3600.0 + 710.0, BEGIN_S + 3 * 3600.0, on=False)
    whole = {block.block: is_whole(block, SETTINGS) for block in of.blocks()}
    assert whole == {999: False, 1000: True, 1001: True, 1002: False}
    assert {block.block: block.on_s for block in of.blocks()}[1000] == pytest.approx(3000.0)


def test_time_in_which_the_node_said_nothing_is_not_counted() -> None:
    of = sums()
    stay(of, BEGIN_S + 600.0, BEGIN_S + 1600.0)
    stay(of, BEGIN_S + 2600.0, BEGIN_S + 3600.0)
    (block,) = of.blocks()
    assert block.on_s == pytest.approx(2000.0)
    assert not is_whole(block, SETTINGS)


def test_what_was_kept_goes_on_and_the_newest_replace_what_was_written_before() -> None:
    of = sums()
    stay(of, BEGIN_S, BEGIN_S + 2 * 3600.0 + 1000.0)
    written = msgspec.json.decode(msgspec.json.encode(of.blocks()))
    of.unchanged()
    of.add(RowSeen(M, BEGIN_S + 3 * 3600.0 - 1.0, Found.READY))
    newest_only = of.changed
    assert not newest_only
    other = sums()
    other.restore(written, msgspec.json.decode(msgspec.json.encode(of.newest())))
    assert other.blocks() == of.blocks()
    of.add(RowSeen(M, BEGIN_S + 1000.0, Found.READY))
    assert of.changed
    with pytest.raises(InputError, match="blocks"):
        other.restore([{"nonsense": 1}])


@given(st.lists(st.tuples(st.integers(0, 3 * BLOCKS_KEPT), st.floats(0.0, 3599.0), st.floats(0.0, 1e4)), max_size=60))
def test_no_row_is_lost_or_counted_twice_among_the_blocks_that_are_kept(rows: list[tuple[int, float, float]]) -> None:
    of = sums()
    for number, offset_s, wait_s in rows:
        of.add(RowSeen(M, number * 3600.0 + offset_s, Found.ABSENT))
        of.add(RowServed(M, number * 3600.0 + offset_s, Found.ABSENT, wait_s))
    kept = of.blocks()
    assert len(kept) <= BLOCKS_KEPT
    newest = max((number for number, offset_s, _ in rows if offset_s >= 600.0), default=0)
    for block in kept:
        mine = [wait_s for number, offset_s, wait_s in rows if number == block.block and offset_s >= 600.0]
        assert block.rows <= len(mine)
        assert block.cold_s <= sum(mine) + 1e-6
        if all(number > newest - BLOCKS_KEPT for number, _, _ in rows):
            assert block.rows == len(mine)
            assert block.cold_s == pytest.approx(sum(mine))

"""The control group: its share, its balance, and its stability."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetcher.core.holdout import HoldoutSettings, arm_of, draw_control
from prefetcher.core.types import Arm, NodeName

NODES = [NodeName(f"node-{i}") for i in range(40)]


def control(node: NodeName, blocks: range, settings: HoldoutSettings) -> list[bool]:
    return [arm_of(node, block * 3600.0, settings)[0] is Arm.CONTROL for block in blocks]


def test_every_node_gives_its_share_and_no_day_much_more_than_another() -> None:
    settings = HoldoutSettings(share=0.05, seed=7)
    drawn = np.array([control(node, range(14 * 24), settings) for node in NODES])
    # 336 blocks are 16 to 17 whole frames of 20, and a part of one at both ends.
    assert drawn.sum(axis=1).min() >= 15
    assert drawn.sum(axis=1).max() <= 18
    a_day = drawn.reshape(len(NODES), 14, 24).sum(axis=(0, 2))
    assert a_day.min() > 0.6 * 48
    assert a_day.max() < 1.4 * 48


def test_nodes_are_drawn_one_by_one() -> None:
    settings = HoldoutSettings(share=0.05, seed=1)
    drawn = [tuple(control(node, range(500), settings)) for node in NODES]
    assert len(set(drawn)) == len(NODES)


def test_an_arm_holds_for_a_whole_block_and_follows_from_the_seed() -> None:
    settings = HoldoutSettings(share=0.5, seed=3)
    for block in range(50):
        arms = {arm_of(NODES[0], block * 3600.0 + offset, settings)[0] for offset in (0.0, 1.0, 1800.0, 3599.9)}
        assert len(arms) == 1
    assert control(NODES[0], range(50), settings) != control(NODES[0], range(50), HoldoutSettings(share=0.5, seed=4))


def test_the_wash_out_begins_every_block_on_both_sides() -> None:
    settings = HoldoutSettings(share=0.5, washout_s=600.0)
    for block in range(1, 100):
        assert arm_of(NODES[1], block * 3600.0 + 599.0, settings)[1] is True
        assert arm_of(NODES[1], block * 3600.0 + 600.0, settings)[1] is False


@given(
    share=st.sampled_from([0.02, 0.03, 0.05, 0.3, 0.5]),
    seed=st.integers(0, 2**63 - 1),
    node=st.integers(0, 39),
    block=st.integers(0, 10_000_000),
)
def test_drawing_many_at_once_says_what_each_process_says(share: float, seed: int, node: int, block: int) -> None:
    settings = HoldoutSettings(share=share, seed=seed)
    blocks = np.arange(block, block + 60)
    many = draw_control(NODES, np.full(60, node), blocks, settings, np.array([seed, 5]))
    said = control(NODES[node], range(block, block + 60), settings)
    assert sorted(number for number in many[0] if number < 60) == [k for k, is_control in enumerate(said) if is_control]


def test_no_share_is_no_control() -> None:
    settings = HoldoutSettings(share=0.0)
    assert not any(control(NODES[0], range(200), settings))
    assert draw_control(NODES, np.zeros(3, np.int64), np.arange(3), settings, np.arange(2)).shape == (2, 0)


@pytest.mark.parametrize("wrong", [{"share": -0.1}, {"share": 0.6}, {"block_s": 0.0}, {"washout_s": 3600.0}])
def test_settings_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="control group"):
        HoldoutSettings(**wrong)

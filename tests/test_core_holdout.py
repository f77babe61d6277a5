"""The control group: its share, its stability, and that a node alone is never control."""

from __future__ import annotations

import pytest

from prefetcher.core.holdout import ControlGroup, HoldoutSettings, arm_of
from prefetcher.core.types import Arm, NodeName

NODES = [NodeName(f"node-{i}") for i in range(40)]


def test_about_the_share_of_node_blocks_is_control() -> None:
    settings = HoldoutSettings(share=0.05, groups=16, seed=7)
    arms = [arm_of(node, block * 3600.0, settings)[0] for node in NODES for block in range(500)]
    assert 0.03 < arms.count(Arm.CONTROL) / len(arms) < 0.07


def test_every_group_takes_its_turn() -> None:
    settings = HoldoutSettings(share=0.05, seed=1)
    for node in NODES:
        assert any(arm_of(node, block * 3600.0, settings)[0] is Arm.CONTROL for block in range(500))


def test_an_arm_holds_for_a_whole_block_and_follows_from_the_seed() -> None:
    settings = HoldoutSettings(share=0.5, seed=3)
    for block in range(50):
        arms = {arm_of(NODES[0], block * 3600.0 + offset, settings)[0] for offset in (0.0, 1.0, 1800.0, 3599.9)}
        assert len(arms) == 1
    other = HoldoutSettings(share=0.5, seed=4)
    assert [arm_of(NODES[0], b * 3600.0, settings) for b in range(50)] != [arm_of(NODES[0], b * 3600.0, other) for b in range(50)]


def test_wash_out_follows_a_change_of_sides_and_nothing_else() -> None:
    settings = HoldoutSettings(share=0.5, washout_s=600.0)
    changes = 0
    for block in range(1, 100):
        start_s = block * 3600.0
        changed = arm_of(NODES[1], start_s, settings)[0] is not arm_of(NODES[1], start_s - 1.0, settings)[0]
        changes += changed
        assert arm_of(NODES[1], start_s + 599.0, settings)[1] is changed
        assert arm_of(NODES[1], start_s + 601.0, settings)[1] is False
    assert 20 < changes < 80


def test_a_node_alone_is_never_control() -> None:
    group = ControlGroup(share=0.5, seed=0, nodes=1)
    assert {group.arm(NODES[0], block * 3600.0) for block in range(200)} == {Arm.TREATED}
    assert not any(group.in_washout(NODES[0], block * 3600.0) for block in range(200))
    fleet = ControlGroup(share=0.5, seed=0, nodes=3)
    assert {fleet.arm(NODES[0], block * 3600.0) for block in range(200)} == {Arm.TREATED, Arm.CONTROL}


@pytest.mark.parametrize("wrong", [{"share": -0.1}, {"share": 0.6}, {"groups": 0}, {"washout_s": 3600.0}])
def test_settings_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="control group"):
        HoldoutSettings(**wrong)  # type: ignore[arg-type]

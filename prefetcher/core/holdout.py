"""The permanent control group: which nodes do without prefetching, and when.

A switchback: groups of nodes (requests on one node share its memory, so the node is the smallest unit) times blocks of time. Which side a
group is on in a block follows from a hash, so that every process agrees without talking. What is measured for some time after a change of
sides is shaped by the other side and is left out (wash-out).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from prefetcher.core.types import Arm, NodeName

__all__ = ["ControlGroup", "HoldoutSettings", "arm_of"]


@dataclass(frozen=True, slots=True)
class HoldoutSettings:
    """`share` of node-hours are control: 0 (off) or up to 0.5; 0.02 to 0.05 serves.

    A block is long enough for memory to settle after a change: six holds of 600 s. The wash-out is one hold.
    """

    share: float = 0.03
    groups: int = 16
    block_s: float = 3600.0
    washout_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 0.5:
            raise ValueError(f"the control group's share must be from 0 to 0.5, got {self.share}")
        if self.groups < 1 or self.block_s <= 0 or not 0.0 <= self.washout_s < self.block_s:
            raise ValueError("the control group needs a group, a block above 0 s and a wash-out shorter than a block")


def arm_of(node: NodeName, now_s: float, settings: HoldoutSettings, *, nodes: int = 2) -> tuple[Arm, bool]:
    """The side that `node` is on at `now_s`, and whether it is in the wash-out after a change. One node alone is never control."""
    if settings.share == 0.0 or nodes < 2:
        return Arm.TREATED, False
    group = int(_uniform(f"group:{settings.seed}:{node}") * settings.groups)
    block = int(now_s // settings.block_s)
    arm = _arm_in(group, block, settings)
    fresh = now_s - block * settings.block_s < settings.washout_s
    return arm, fresh and arm is not _arm_in(group, block - 1, settings)


def _arm_in(group: int, block: int, settings: HoldoutSettings) -> Arm:
    drawn = _uniform(f"arm:{settings.seed}:{group}:{block}")
    return Arm.CONTROL if drawn < settings.share else Arm.TREATED


def _uniform(text: str) -> float:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """`arm_of` for one process: settings and the number of nodes bound to it."""

    share: float = 0.0
    seed: int = 0
    nodes: int = 1

    def arm(self, node: NodeName, now_s: float) -> Arm:
        """The side that `node` is on at `now_s`."""
        return arm_of(node, now_s, HoldoutSettings(share=self.share, seed=self.seed), nodes=self.nodes)[0]

    def in_washout(self, node: NodeName, now_s: float) -> bool:
        """Whether what is measured on `node` at `now_s` is still shaped by the other side."""
        return arm_of(node, now_s, HoldoutSettings(share=self.share, seed=self.seed), nodes=self.nodes)[1]

"""The permanent control group: which nodes do without prefetching, and when.

A switchback: nodes (requests on one node share its memory, so the node is the smallest unit) times blocks of time. Which side a node is on
follows from a hash, so that every process agrees without talking. The draw is stratified: time is cut into frames of so many blocks, and in
each frame every node is control for exactly one block, drawn at random. So every node gives its share, no day has much more control than
another, and frames of different nodes begin at different blocks. Nodes are drawn one by one, not in hashed groups: sixteen nodes in sixteen
hashed groups would be ten groups, and the fewer units there are, the less is known.

What is measured in the first minutes of **every** block is left out (wash-out), whether or not the side changed: control blocks nearly
always follow treated ones, and leaving out the first minutes of one side alone would compare different parts of the hour, which is full of
jobs that start on it. Covers no analysis (`core.effect`).

Source: Bojinov, Simchi-Levi, Zhao, "Design and analysis of switchback experiments", Management Science 2023 (blocks, carry-over).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from prefetcher.core.types import Arm, NodeName

__all__ = ["HoldoutSettings", "arm_of", "block_of", "draw_control", "is_measured"]

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class HoldoutSettings:
    """`share` of node-blocks are control: 0 (off) or up to 0.5; 0.02 to 0.05 serves. It is rounded to one block in `frame`.

    A block is long enough for memory to settle after a change: six holds of 600 s. The wash-out is one hold.
    """

    share: float = 0.05
    block_s: float = 3600.0
    washout_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 0.5:
            raise ValueError(f"the control group's share must be from 0 to 0.5, got {self.share}")
        if self.block_s <= 0 or not 0.0 <= self.washout_s < self.block_s:
            raise ValueError("the control group needs a block above 0 s and a wash-out shorter than a block")

    @property
    def frame(self) -> int:
        """How many blocks of a node one control block is in; 0 where there is none."""
        return 0 if self.share == 0.0 else max(2, round(1.0 / self.share))


def block_of(now_s: float, settings: HoldoutSettings) -> int:
    """The number of the block that `now_s` is in, from 1970 on."""
    return int(now_s // settings.block_s)


def is_measured(now_s: float, settings: HoldoutSettings) -> bool:
    """Whether what arrives at `now_s` counts: it is not in its block's wash-out."""
    return now_s - block_of(now_s, settings) * settings.block_s >= settings.washout_s


def arm_of(node: NodeName, now_s: float, settings: HoldoutSettings) -> tuple[Arm, bool]:
    """The side that `node` is on at `now_s`, and whether that is in the wash-out of its block."""
    fresh = not is_measured(now_s, settings)
    if settings.frame == 0:
        return Arm.TREATED, fresh
    block = block_of(now_s, settings)
    return (Arm.CONTROL if _is_control(node, block, settings.frame, settings.seed) else Arm.TREATED), fresh


def draw_control(
    nodes: Sequence[str], node: npt.NDArray[np.int64], block: npt.NDArray[np.int64], settings: HoldoutSettings, seeds: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """int64[S, F]: which of N node-blocks are control under each of S seeds; exactly what `arm_of` says.

    `node` int64[N] are positions in `nodes`, `block` int64[N] block numbers, no pair twice. There is a column for each frame of a node that
    has one of these blocks, with the number of its control block among the N; N where that is not one of them.
    """
    frame, n = settings.frame, len(node)
    if frame == 0 or n == 0:
        return np.zeros((len(seeds), 0), np.int64)
    named = np.array([_digest(name) for name in nodes], np.uint64)
    frames, place = np.divmod(block + (named % np.uint64(frame)).astype(np.int64)[node], frame)
    first = int(frames.min())
    span = int(frames.max()) - first + 1
    pairs, which = np.unique(node * span + (frames - first), return_inverse=True)
    number = np.full((len(pairs), frame), n, np.int64)
    number[which, place] = np.arange(n)
    seeded = _mixed(seeds.astype(np.uint64))[:, None]
    slots = _mixed(_mixed(seeded ^ named[pairs // span]) ^ (pairs % span + first).astype(np.uint64)) % np.uint64(frame)
    return number[np.arange(len(pairs)), slots.astype(np.int64)]


@lru_cache(maxsize=4096)
def _is_control(node: str, block: int, frame: int, seed: int) -> bool:
    named = _digest(node)
    frames, place = divmod(block + named % frame, frame)
    return _mix(_mix(_mix(seed & _MASK) ^ named) ^ (frames & _MASK)) % frame == place


@lru_cache(maxsize=4096)
def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def _mix(value: int) -> int:
    """A 64-bit number that looks random. Source: the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    value = (value + _STEP) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`_mix` of each; whole numbers wrap around."""
    values = values + np.uint64(_STEP)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed

"""What requests waited on one node, by block of the experiment, without wash-outs: what the control group's analysis is made of. Pure.

Rows count in the block of their arrival, also when they are served in the next one. Beside the sums stands for how many measured seconds
prefetching was in force as drawn: a block in which the node was away, observed or was switched off is no evidence. Covers no analysis
(`core.effect`) and no drawing (`core.holdout`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from prefetcher.core.facts import Fact, Found, RowSeen, RowServed
from prefetcher.core.holdout import HoldoutSettings, block_of, is_measured
from prefetcher.core.types import Arm
from prefetcher.errors import InputError

__all__ = ["BLOCKS_KEPT", "BLOCKS_OPEN", "BlockSum", "BlockSums", "is_whole"]

#: Six weeks of hours.
BLOCKS_KEPT = 1_008
#: A block counts when the node was as drawn for this share of its measured time.
_WHOLE_RATIO = 0.95
#: Blocks that still change: the one that runs, and the one before it, whose last rows are being served.
BLOCKS_OPEN = 2


class BlockSum(msgspec.Struct, array_like=True):
    """One block: its number, whether the node was control, rows that arrived in its measured minutes, how long those waited, how many found
    nothing, and for how many of those seconds the node was as drawn."""

    block: int
    control: bool
    rows: int = 0
    cold_s: float = 0.0
    cold_starts: int = 0
    on_s: float = 0.0


def is_whole(block: BlockSum, settings: HoldoutSettings) -> bool:
    """Whether the node was as drawn for nearly all of a block."""
    return block.on_s >= _WHOLE_RATIO * (settings.block_s - settings.washout_s)


class BlockSums:
    """The sums of one node. `arm_of(now_s)` is its side, the same for all of a block; `gap_s`: a longer silence between two `note`s is not
    counted as time in which the node was there."""

    def __init__(self, arm_of: Callable[[float], Arm], *, gap_s: float = 30.0, settings: HoldoutSettings | None = None) -> None:
        self.arm_of = arm_of
        self._gap_s = gap_s
        self._settings = settings or HoldoutSettings()
        self._blocks: dict[int, BlockSum] = {}
        self._newest: int | None = None
        self._noted_s: float | None = None
        self._noted_on = False
        #: Whether a block that is not among the `newest` changed since `unchanged` was said.
        self.changed = False

    def add(self, fact: Fact) -> None:
        """Takes a row in, when it comes and when it was served; other facts change nothing."""
        if not isinstance(fact, RowSeen | RowServed) or not fact.is_row or not is_measured(fact.ts, self._settings):
            return
        block = self._of(block_of(fact.ts, self._settings))
        if block is None:
            return
        if isinstance(fact, RowSeen):
            block.rows += 1
            block.cold_starts += fact.found is Found.ABSENT
        else:
            block.cold_s += max(0.0, fact.wait_s)

    def note(self, now_s: float, on: bool) -> None:
        """The node is there, and prefetches if it is not control (`on`); said every second or so."""
        before_s, self._noted_s = self._noted_s, now_s
        was_on, self._noted_on = self._noted_on, on
        if before_s is None or not (on and was_on) or not 0.0 <= now_s - before_s <= self._gap_s:
            return
        settings, number = self._settings, block_of(now_s, self._settings)
        from_s = max(before_s, number * settings.block_s + settings.washout_s)
        block = self._of(number) if now_s > from_s else None
        if block is not None:
            block.on_s += now_s - from_s
        if block_of(before_s, settings) == number - 1 and (last := self._of(number - 1)) is not None:
            last.on_s += number * settings.block_s - max(before_s, (number - 1) * settings.block_s + settings.washout_s)

    def _of(self, number: int) -> BlockSum | None:
        """The sums of a block; None for one that is no longer kept."""
        newest = number if self._newest is None else self._newest
        if number <= newest - BLOCKS_OPEN:
            self.changed = True
        found = self._blocks.get(number)
        if found is None:
            if number <= newest - BLOCKS_KEPT:
                return None
            control = self.arm_of((number + 0.5) * self._settings.block_s) is Arm.CONTROL
            found = self._blocks[number] = BlockSum(number, control)
            self.changed = True
            self._newest = max(newest, number)
            for old in [n for n in self._blocks if n <= self._newest - BLOCKS_KEPT]:
                del self._blocks[old]
        return found

    def unchanged(self) -> None:
        """`blocks` were written."""
        self.changed = False

    def blocks(self) -> list[BlockSum]:
        """All sums, oldest first."""
        return [self._blocks[number] for number in sorted(self._blocks)]

    def newest(self) -> list[BlockSum]:
        """Those that change all the time."""
        return self.blocks()[-BLOCKS_OPEN:]

    def restore(self, *parts: Any) -> None:
        """Goes on from lists of sums as JSON types; later ones replace earlier ones. Raises InputError."""
        try:
            found = [block for part in parts for block in msgspec.convert(part, list[BlockSum])]
        except msgspec.ValidationError as exc:
            raise InputError(f"not the sums of a node's blocks: {exc}") from exc
        self._blocks = {block.block: block for block in found}
        self._newest = max(self._blocks, default=None)

"""The permanent control group of the live system: node and time block to arm, by hash; nothing is stored.

A switchback: within its share of blocks a node gets no prefetch, so that what prefetching is worth stays measured.
"""

from __future__ import annotations

import hashlib

from prefetcher.core.types import Arm, NodeName

__all__ = ["BLOCK_S", "ControlGroup"]

#: Longer than a hold, so that what was fetched before a block has left within it; short enough to spread over the day.
BLOCK_S = 3600.0


class ControlGroup:
    """`share` of all blocks, 0 to 0.5; the same for the same `seed`."""

    def __init__(self, share: float, seed: int = 0) -> None:
        self._share = share
        self._seed = seed

    def arm(self, node: NodeName, now_s: float) -> Arm:
        """The node's arm at `now_s`."""
        block = f"{self._seed}\0{node}\0{int(now_s // BLOCK_S)}".encode()
        drawn = int.from_bytes(hashlib.blake2b(block, digest_size=8).digest(), "big") / 2.0**64
        return Arm.CONTROL if drawn < self._share else Arm.TREATED

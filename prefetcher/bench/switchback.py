"""A node's replay that really switches: in its control blocks the live cache runs the deciding expert without prefetching."""

from __future__ import annotations

from typing import Any

from prefetcher.core.experts import PERIOD_S, without_prefetch
from prefetcher.core.holdout import HoldoutSettings, arm_of
from prefetcher.core.node import World, set_policy
from prefetcher.core.types import Arm, NodeName
from prefetcher.replay.ours import LIVE, NodeRun

__all__ = ["SwitchbackRun"]


class SwitchbackRun(NodeRun):
    """`NodeRun` of `node` whose blocks, counted in periods from the log's start, are drawn by `settings`."""

    def __init__(
        self,
        world: World,
        capacity_bytes: float,
        price_s_per_gb_h: float,
        hold_s: float,
        *,
        node: str,
        settings: HoldoutSettings,
        **more: Any,
    ) -> None:
        super().__init__(world, capacity_bytes, price_s_per_gb_h, hold_s, **more)
        self._node = NodeName(node)
        self._settings = settings

    def begin_period(self) -> None:
        """The Hedge's expert decides, and in a control block fetches nothing ahead."""
        block = len(self.chosen)
        super().begin_period()
        if arm_of(self._node, block * PERIOD_S, self._settings)[0] is Arm.CONTROL:
            set_policy(self._caches.policy[LIVE], without_prefetch(self._live[self.chosen[-1]]))

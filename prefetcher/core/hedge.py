"""Which expert decides: discounted regret over the experts' shadow caches, with hysteresis.

Every expert runs as a shadow cache over all arrivals, so what each would have cost is known in full, not only for the one that was live.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["Hedge"]


class Hedge:
    """Chooses among `experts` by costs discounted with `half_life_s`; the live one changes only for a gain of `hysteresis`.

    `start` is live until `settle_periods` costs were seen. Costs are seconds of waiting plus the price of what was held.
    """

    def __init__(
        self, experts: int, *, half_life_s: float = 86400.0, hysteresis: float = 0.02, settle_periods: int = 6, start: int = 0
    ) -> None:
        self.cost = np.zeros(experts)
        self.live = start
        self._half_life_s = half_life_s
        self._hysteresis = hysteresis
        self._settle = settle_periods
        self._periods = 0

    def learn(self, cost_s: npt.NDArray[np.float64], period_s: float) -> int:
        """Takes one period's cost of every expert (float64[experts], seconds) and returns the expert to run from now on."""
        self.cost = self.cost * math.exp(-math.log(2.0) * period_s / self._half_life_s) + cost_s
        self._periods += 1
        if self._periods >= self._settle:
            best = int(np.argmin(self.cost))
            if self.cost[best] < (1.0 - self._hysteresis) * self.cost[self.live]:
                self.live = best
        return self.live

    def snapshot(self) -> dict[str, object]:
        """JSON-able state."""
        return {"cost": self.cost.tolist(), "live": self.live, "periods": self._periods}

    def restore(self, state: dict[str, object]) -> None:
        """Goes on from a snapshot of as many experts."""
        cost = np.array(state["cost"], dtype=np.float64)
        if cost.shape != self.cost.shape:
            raise ValueError(f"snapshot of {cost.size} experts, expected {self.cost.size}")
        self.cost = cost
        self.live = int(str(state["live"]))
        self._periods = int(str(state["periods"]))

"""Which windows are in force: a discounted Hedge for each segment over what candidate windows would have cost. Pure.

`WindowTuner` takes evidence (what every candidate window would have cost each segment in a period, from shadow caches:
`core.window_caches`) and gives decisions: changes of the book, each with its evidence.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefetcher.core.types import Window

__all__ = ["Cost", "Decision"]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a window costs: `wait_s` cold seconds, `held_gb_h` GB·h, of which `wasted_gb_h` belong to prefetches that nobody used."""

    wait_s: float = 0.0
    held_gb_h: float = 0.0
    wasted_gb_h: float = 0.0

    def seconds(self, price_s_per_gb_h: float) -> float:
        """Seconds of waiting plus the price of what was held."""
        return self.wait_s + price_s_per_gb_h * self.held_gb_h


@dataclass(frozen=True, slots=True)
class Decision:
    """A change of one segment's window, with its evidence: discounted costs of the window that was and of the one that is, over
    `periods` periods, at `price_s_per_gb_h`."""

    segment: str
    old: Window
    new: Window
    at_s: float
    old_cost: Cost
    new_cost: Cost
    periods: int
    price_s_per_gb_h: float
    why: str

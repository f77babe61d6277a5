"""What adds columns of its own to the hazard's features: a seasonal forecast, what follows what, what people expect.

A source learns from the same blocks as the hazard (`prefetcher.core.traffic.Block`) and says, for each of a block's rows and for each model
at each tick, what it knew at that moment. The hazard learns what that is worth, so a source that is wrong costs little and a source that
is away says NaN. Choosing between forecasts is not its business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from prefetcher.core.traffic import Block, Traffic

__all__ = ["FeatureSource", "Floats32"]

Floats32 = npt.NDArray[np.float32]


@runtime_checkable
class FeatureSource(Protocol):
    """Columns beside the traffic features; K of them, always the same ones in the same order."""

    @property
    def names(self) -> tuple[str, ...]:
        """K names, stable and without spaces: a fit is refused where they are other ones."""
        ...

    def columns(self, traffic: Traffic, block: Block) -> tuple[Floats32, Floats32]:
        """float32[N, K], a line for each row of the block right after it came, and float32[M, K], a line for each (`tick_of`, `tick_model`)
        of its ticks; NaN where it knows nothing. Uses rows that came by then, and no others, whatever the bounds of blocks are; then it has
        taken the block in. `traffic` is the state after the block.
        """
        ...

    def refit(self, now_s: float) -> bool:
        """Fit again from what was learned, if that is due; whether it did. Uses only what was known before `now_s`."""
        ...

    def snapshot(self) -> dict[str, np.ndarray]:
        """Everything that was learned, as arrays."""
        ...

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        """Take over a snapshot of the same source. Raises `PredictorError` for one that it does not understand."""
        ...

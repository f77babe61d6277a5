"""Few kinds of models, told apart by what was known when a forecast was made. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prefetcher.core.traffic import FEATURE_NAMES, Block, Traffic

__all__ = ["SEGMENTS", "segments_of"]

#: Names and meanings, in the order in which a model is put into the first that fits.
SEGMENTS: tuple[tuple[str, str], ...] = (
    ("never seen", "no request so far"),
    ("new", "first request less than a day ago"),
    ("regular", "gaps that differ little: a timer, a job"),
    ("busy", "a request an hour or more, of late"),
    ("now and then", "a request a day or more, of late"),
    ("rare", "less than a request a day, of late"),
)
_DAY_S = 86400.0
#: Gaps within a factor of about 1.6 of their mean, seen often enough that it is no chance.
_REGULAR_VARIANCE, _REGULAR_ROWS = 0.25, 8
_VARIANCE = FEATURE_NAMES.index("log_gap_variance")
_RATE = FEATURE_NAMES.index("log_rate_86400s")


def segments_of(
    traffic: Traffic, block: Block, now_s: float, first_s: npt.NDArray[np.float64], total: npt.NDArray[np.int64]
) -> npt.NDArray[np.int8]:
    """int8[n_models]: the number of each model's segment at `now_s`, from the rows of the block's first tick.

    `first_s` and `total` are those of the state before the block.
    """
    out = np.zeros(traffic.n_models, np.int8)
    first = np.flatnonzero(block.tick_of == 0)
    models, x = block.tick_model[first], block.tick_features[first]
    per_s = np.exp(x[:, _RATE].astype(np.float64))
    out[models] = np.select(
        [
            now_s - first_s[models] < _DAY_S,
            (x[:, _VARIANCE] < _REGULAR_VARIANCE) & (total[models] >= _REGULAR_ROWS),
            per_s >= 1.0 / 3600.0,
            per_s >= 1.0 / _DAY_S,
        ],
        [1, 2, 3, 4],
        5,
    )
    return out

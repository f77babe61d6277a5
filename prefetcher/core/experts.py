"""The experts of the Hedge: the policies that compete to decide, and the rates of next use that they are told.

What each of them would have cost is known from its shadow cache (`core.shadow_caches`, and replay's own caches).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from prefetcher.core.node import Policy, PrefetchRule, Rank
from prefetcher.core.types import HORIZONS_S
from prefetcher.core.value import mean_rate, next_use_rate, price_per_byte_s

__all__ = [
    "EXPERTS",
    "HORIZONS",
    "PERIOD_S",
    "VARIANTS",
    "VARIANT_OF_HORIZON",
    "WINDOWS_S",
    "expert_policies",
    "rates_of_next_use",
    "without_prefetch",
]

#: How often the Hedge looks at what each expert cost.
PERIOD_S = 3600.0
#: Horizons that the experts' rates need, as indices of HORIZONS_S: 1, 2, 5, 10 and 60 min.
HORIZONS = (0, 1, 2, 3, 6)
#: The windows W of the rates, as indices of HORIZONS: the rates' first axis is in this order.
_WINDOWS = (3, 1, 4)
WINDOWS_S: tuple[float, ...] = tuple(HORIZONS_S[HORIZONS[w]] for w in _WINDOWS)
#: How many rates the experts are told of each model: those of the windows, then the geometric mean of those of all HORIZONS as windows:
#: it sees both who comes at once and who comes again within the hour. Then those that only windows of the tuner ask for, 5 and 15 min.
VARIANTS = len(WINDOWS_S) + 3
_W10, _W2, _W60, _ALL, _W5, _W15 = range(VARIANTS)
#: The number of the rate whose horizon a window may have (`core.windows.WINDOW_HORIZONS_S`); −1: the expert's own.
VARIANT_OF_HORIZON: dict[float, int] = {0.0: -1, 120.0: _W2, 300.0: _W5, 600.0: _W10, 900.0: _W15, 3600.0: _W60}
_HORIZONS_S = np.array([HORIZONS_S[j] for j in HORIZONS])
_TO_QUARTER_S = np.array([*_HORIZONS_S[:-1], 900.0])
_QUARTER_SHARE = (900.0 - _HORIZONS_S[-2]) / (_HORIZONS_S[-1] - _HORIZONS_S[-2])

#: An unused prefetch stays beyond its hold while its score is at least this share of what it was fetched at: what would follow it into its
#: room is worth less. At a half, a log that can't be predicted (`dlrm_launches`) wastes up to 6 % of the GB·h held, at one 3 %.
STAYS_AT = 0.75
#: How many times the value that it displaces a prefetch must be worth: less moves and wastes more, and saves no more.
MARGIN = 2.0

_OURS = Policy(Rank.HAZARD, yields=True, parts=True, load_aware=True)
_FETCH = replace(_OURS, prefetch=PrefetchRule.INDEX, margin=MARGIN, stays_at=STAYS_AT)
_MIX = replace(_FETCH, rank=Rank.HAZARD_MIX)

#: The experts of the Hedge. The first decides until enough was seen; it goes by recent rates as long as there is no fit. One of them
#: without prefetch and without learning is always there.
EXPERTS: dict[str, Policy] = {
    "hazard-prefetch": replace(_FETCH, variant=_ALL, prefetch_variant=_ALL),
    "hazard": replace(_OURS, variant=_ALL),
    "hazard-mix-prefetch": replace(_MIX, variant=_ALL, prefetch_variant=_ALL),
    "hazard-mix-10min-prefetch": replace(_MIX, variant=_W10, prefetch_variant=_W10),
    "hazard-prefetch-2min": replace(_FETCH, variant=_ALL, prefetch_variant=_W2),
    "hazard-60min-prefetch": replace(_FETCH, variant=_W60, prefetch_variant=_W10),
    "lhd": replace(_OURS, rank=Rank.LHD),
    "mix": replace(_OURS, rank=Rank.MIX),
    "lfu-1h": replace(_OURS, rank=Rank.LFU, tau=1),
    "lfu-1d": replace(_OURS, rank=Rank.LFU, tau=3),
    "lfu-7d": replace(_OURS, rank=Rank.LFU, tau=4),
}


def expert_policies(price_s_per_gb_h: float, hold_s: float) -> list[Policy]:
    """The experts at a price and a hold, in the order of `EXPERTS`."""
    price = price_per_byte_s(price_s_per_gb_h)
    return [replace(policy, price_per_byte_s=price, hold_s=hold_s) for policy in EXPERTS.values()]


def without_prefetch(policy: Policy) -> Policy:
    """The same policy, fetching on demand only: the shadow's."""
    return replace(policy, prefetch=PrefetchRule.NONE)


def rates_of_next_use(probability: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """float32[VARIANTS, n]: h per second for each of `WINDOWS_S`, for all horizons together, for 5 and for 15 min, from P(used within each
    of HORIZONS), float32[n, len(HORIZONS)]. Between 10 min and an hour the hazard is taken as constant.
    """
    p = np.ascontiguousarray(probability, dtype=np.float32)
    rates = np.stack([next_use_rate(p, _HORIZONS_S, window) for window in range(len(HORIZONS))])
    quarter = next_use_rate(_to_quarter(p), _TO_QUARTER_S, len(_TO_QUARTER_S) - 1)
    return np.concatenate([rates[list(_WINDOWS)], mean_rate(rates)[np.newaxis], rates[2:3], quarter[np.newaxis]])


def _to_quarter(p: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """P(used within 1, 2, 5, 10 and 15 min): the last by a constant hazard from 10 to 60 min."""
    before, after = 1.0 - p[:, -2].astype(np.float64), 1.0 - p[:, -1].astype(np.float64)
    with np.errstate(invalid="ignore"):
        kept = np.clip(after / np.maximum(before, 1e-6), 0.0, 1.0) ** _QUARTER_SHARE
    out = p.copy()
    out[:, -1] = 1.0 - before * kept
    return out

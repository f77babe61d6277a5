"""Who will use a model, from what was looked up of him: by the transition table alone, or by the network that corrects it, as kernels.

What is looked up is counted in `follow_state`; the network is fitted elsewhere (`coactivation_net`) and only evaluated here.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefetcher.core.compiled import kernel, kernel_part

__all__ = ["LOOKS", "N_LOOKS", "VISITS", "Scorer", "chances", "remember", "score_samples", "table_scorer"]

#: Last visits of a user that are kept.
VISITS = 8
#: What is looked up of a user and a model, in order (`follow_state`).
LOOKS: tuple[str, ...] = (
    "log_user_age",
    "is_current",
    "own_share",
    "log_own",
    "log_own_age",
    "log_user_rows",
    "turn_share",
    "turn_share_before",
    "log_popular_share",
    "log_choice",
    "log_move_120s",
    "log_move_600s",
    "visits_1h",
    "visit_place",
    "log_user_gap",
    "others_now",
    "log_model_age",
    "own_turns",
)
N_LOOKS = len(LOOKS)
_CURRENT, _CHOICE, _MOVE_120, _MOVE_600 = 1, 9, 10, 11


class Scorer(NamedTuple):
    """What turns looks into chances: the table alone (`in_force` 0), or the learned network (1); d numbers a model, h hidden units.

    `value` and `key` float32[n, d]: of a visited model and of a candidate; `place` float32[VISITS, d] weighs visits by their place;
    `heed` float32[VISITS, 2]: how much a visit counts (offset, slope by log age). `first` float32[h, LOOKS + 1], `first_0` float32[h],
    `second` float32[2, h], `second_0` float32[2]; looks are scaled by `mean` and `scale` float32[LOOKS]. `lines` float64[2, 2, 2]:
    calibration (slope, offset) by scorer and horizon.
    """

    in_force: npt.NDArray[np.int64]
    value: npt.NDArray[np.float32]
    key: npt.NDArray[np.float32]
    place: npt.NDArray[np.float32]
    heed: npt.NDArray[np.float32]
    first: npt.NDArray[np.float32]
    first_0: npt.NDArray[np.float32]
    second: npt.NDArray[np.float32]
    second_0: npt.NDArray[np.float32]
    mean: npt.NDArray[np.float32]
    scale: npt.NDArray[np.float32]
    lines: npt.NDArray[np.float64]


def table_scorer() -> Scorer:
    """The table alone, as it counts."""
    none = np.zeros((0, 1), np.float32)
    return Scorer(
        in_force=np.zeros(1, np.int64),
        value=none,
        key=none,
        place=np.zeros((VISITS, 1), np.float32),
        heed=np.zeros((VISITS, 2), np.float32),
        first=np.zeros((0, len(LOOKS) + 1), np.float32),
        first_0=np.zeros(0, np.float32),
        second=np.zeros((2, 0), np.float32),
        second_0=np.zeros(2, np.float32),
        mean=np.zeros(len(LOOKS), np.float32),
        scale=np.ones(len(LOOKS), np.float32),
        lines=np.tile(np.array([1.0, 0.0]), (2, 2, 1)),
    )


@kernel_part
def remember(scorer: Scorer, visits: Any, visit_s: Any, t: float, query: Any) -> None:
    """A user's visits as one vector, into query[d]."""
    query[:] = 0.0
    if scorer.in_force[0] == 0:
        return
    total = 0.0
    for j in range(VISITS):
        m = visits[j]
        if m < 0:
            break
        heed = math.exp(scorer.heed[j, 0] + scorer.heed[j, 1] * math.log(max(0.0, t - visit_s[j]) + 1.0))
        total += heed
        if m < len(scorer.value):
            for d in range(len(query)):
                query[d] += heed * scorer.place[j, d] * scorer.value[m, d]
    for d in range(len(query)):
        query[d] /= total + 1e-9


@kernel_part
def _log_odds(p: float) -> float:
    p = min(max(p, 1e-7), 1.0 - 1e-7)
    return math.log(p / (1.0 - p))


@kernel_part
def chances(scorer: Scorer, query: Any, m: int, x: Any, p: Any) -> None:
    """P(the user uses m within 120 s, within 600 s) from what was looked up, into p[2]. His current model is left to the table."""
    near, wide = _log_odds(math.exp(x[_CHOICE] + x[_MOVE_120])), _log_odds(math.exp(x[_CHOICE] + x[_MOVE_600]))
    mode = scorer.in_force[0]
    if mode == 1 and x[_CURRENT] == 0.0:
        match = 0.0
        if m < len(scorer.key):
            for d in range(len(query)):
                match += query[d] * scorer.key[m, d]
        near += scorer.second_0[0]
        wide += scorer.second_0[1]
        for i in range(len(scorer.first)):
            z = scorer.first_0[i] + scorer.first[i, N_LOOKS] * match
            for j in range(N_LOOKS):
                z += scorer.first[i, j] * (x[j] - scorer.mean[j]) * scorer.scale[j]
            if z > 0.0:
                near += scorer.second[0, i] * z
                wide += scorer.second[1, i] * z
    if x[_CURRENT] == 0.0:
        near = scorer.lines[mode, 0, 0] * near + scorer.lines[mode, 0, 1]
        wide = scorer.lines[mode, 1, 0] * wide + scorer.lines[mode, 1, 1]
    p[0] = 1.0 / (1.0 + math.exp(-near))
    p[1] = max(p[0], 1.0 / (1.0 + math.exp(-wide)))


@kernel
def score_samples(scorer: Scorer, visits: Any, ages_s: Any, pairs: Any, looks: Any, out: Any) -> None:
    """The chances of samples that `follow_block` gave, in order of their instants, into out[S, 2]."""
    query, p, x = np.zeros(scorer.place.shape[1]), np.zeros(2), np.zeros(N_LOOKS)
    last = -1
    for i in range(len(pairs)):
        if pairs[i, 0] != last:
            last = pairs[i, 0]
            remember(scorer, visits[last], -ages_s[last].astype(np.float64), 0.0, query)
        for j in range(N_LOOKS):
            x[j] = looks[i, j]
        chances(scorer, query, pairs[i, 1], x, p)
        out[i, 0] = p[0]
        out[i, 1] = p[1]

"""Boosted trees of depth four as flat arrays, and the kernel that evaluates them.

LightGBM fits the trees; replay evaluates them millions of times and a controller once a tick, so that the evaluation
is a kernel of ours. Every tree is laid out as a complete one (15 questions, 16 leaves), which makes each step the
same two loads and a comparison: three times as fast as LightGBM's own, without its threads, and the same bytes for
one row as for many. It covers what the hazard uses: numeric float32 features that are never missing, binary log loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.core.compiled import kernel
from prefetcher.errors import PredictorError

__all__ = ["DEPTH", "Forest"]

#: The deepest tree. On held-out rows trees of depth 4 score as well as leaf-wise ones of 15 leaves and any depth.
DEPTH = 4
_QUESTIONS = 2**DEPTH - 1
_LEAVES = 2**DEPTH
#: Rows scored tree by tree at a time: their features and scores stay in the nearest cache.
_ROWS = 128


@dataclass(frozen=True, slots=True)
class Forest:
    """The trees of one fit, or of several whose scores are averaged; K trees.

    `feature` int32[K, 15] and `threshold` float32[K, 15]: question i sends a row to question 2i + 1 if its feature ≤
    threshold, else to 2i + 2; a question that the tree lacks has threshold +inf. `leaf` float64[K, 16]: log-odds that
    the trees add up.
    """

    feature: npt.NDArray[np.int32]
    threshold: npt.NDArray[np.float32]
    leaf: npt.NDArray[np.float64]

    @classmethod
    def parse(cls, text: str, n_features: int) -> Forest:
        """The trees of a LightGBM model text. Raises `PredictorError` for a text that is none or uses what is not
        covered.
        """
        try:
            trees = [_complete(part, n_features) for part in text.split("\nTree=")[1:]]
            if not trees:
                raise ValueError("no trees")
        except (ValueError, KeyError, IndexError) as error:
            raise PredictorError(f"a text that is no LightGBM model of the expected kind: {error}") from error
        feature, threshold, leaf = zip(*trees, strict=True)
        return cls(np.stack(feature), np.stack(threshold), np.stack(leaf))

    @classmethod
    def average(cls, forests: list[Forest]) -> Forest:
        """One forest whose log-odds are the mean of those of `forests`."""
        return cls(
            feature=np.concatenate([f.feature for f in forests]),
            threshold=np.concatenate([f.threshold for f in forests]),
            leaf=np.concatenate([f.leaf for f in forests]) / len(forests),
        )

    def along(self, slope: float, offset: float) -> Forest:
        """These trees with log-odds slope·x + offset instead of x."""
        return Forest(self.feature, self.threshold, self.leaf * slope + offset / len(self.leaf))

    def log_odds(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """float64[n]: the log-odds for each row of x float32[n, F]."""
        out = np.empty(len(x))
        _add_up(self.feature, self.threshold, self.leaf, x, out)
        return out

    def predict(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """float64[n]: the probability for each row of x float32[n, F]."""
        out = self.log_odds(x)
        _to_probabilities(out)
        return out


def _complete(
    text: str, n_features: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """One tree of the text as a complete one. A subtree that is missing repeats the leaf above it."""
    fields = dict(line.split("=", 1) for line in text.splitlines()[1:] if "=" in line)
    values = [float(v) for v in fields["leaf_value"].split()]
    if int(fields["num_cat"]) != 0 or int(fields["num_leaves"]) != len(values):
        raise ValueError("a tree with categories, or one that was cut short")
    feature = np.zeros(_QUESTIONS, np.int32)
    threshold = np.full(_QUESTIONS, np.inf, np.float32)
    leaf = np.empty(_LEAVES)
    splits = len(values) - 1
    asked, left, right = (
        [int(v) for v in fields.get(key, "").split()] for key in ("split_feature", "left_child", "right_child")
    )
    cuts = [float(v) for v in fields.get("threshold", "").split()]
    if splits and not len(asked) == len(left) == len(right) == len(cuts) == splits:
        raise ValueError("a tree that was cut short")
    if any(not 0 <= f < n_features for f in asked) or not np.isfinite([*cuts, *values]).all():
        raise ValueError("a tree that asks for a feature that is not there, or holds numbers that are none")
    # (the text's node, or ~leaf; the place in the complete tree)
    todo = [(0 if splits else -1, 0)]
    while todo:
        node, place = todo.pop()
        if place >= _QUESTIONS:
            if node >= 0:
                raise ValueError(f"a tree deeper than {DEPTH}")
            leaf[place - _QUESTIONS] = values[~node]
            continue
        if node >= 0:
            feature[place] = asked[node]
            near = np.float32(cuts[node])
            threshold[place] = near if float(near) <= cuts[node] else np.nextafter(near, np.float32(-np.inf))
        todo.append((left[node] if node >= 0 else node, 2 * place + 1))
        todo.append((right[node] if node >= 0 else node, 2 * place + 2))
    return feature, threshold, leaf


@kernel
def _add_up(feature: Any, threshold: Any, leaf: Any, x: Any, out: Any) -> None:
    n = len(x)
    for begin in range(0, n, _ROWS):
        end = min(n, begin + _ROWS)
        for r in range(begin, end):
            out[r] = 0.0
        for k in range(len(feature)):
            asked, cut, values = feature[k], threshold[k], leaf[k]
            for r in range(begin, end):
                place = 0
                for _ in range(DEPTH):
                    place = 2 * place + 1 + (1 if x[r, asked[place]] > cut[place] else 0)
                out[r] += values[place - _QUESTIONS]


@kernel
def _to_probabilities(out: Any) -> None:
    for r in range(len(out)):
        out[r] = 1.0 / (1.0 + math.exp(-out[r]))

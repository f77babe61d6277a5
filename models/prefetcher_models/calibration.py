"""Calibration of a fit by how its predecessors did: a line through log-odds, learned from forecasts whose outcomes
came later.

Trees that saw few models or few days are too sure of themselves on the days after. The forecasts of the trees in
force, compared with what then happened, tell by how much, without holding anything back from the fit. The line has
two parameters, so that little evidence suffices, it never changes the order of two forecasts of one horizon, and
evidence pulls it away from the identity only as far as it goes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["calibration_line"]

#: The prior: as much as this many outcomes at even odds, for slope 1 and offset 0.
_PRIOR = 20.0
_STEPS = 30


def calibration_line(log_odds: npt.NDArray[np.float64], used: npt.NDArray[np.float64]) -> tuple[float, float]:
    """(slope, offset) that make slope·log_odds + offset likeliest for outcomes `used` (0 or 1); slope at least 0.05.

    Source: Platt 1999, fitted by Newton's method, with a Gaussian prior around (1, 0).
    """
    x = np.stack([np.clip(log_odds, -20.0, 20.0), np.ones(len(log_odds))], axis=1)
    prior = np.array([1.0, 0.0])
    line = prior.copy()
    for _ in range(_STEPS):
        p = 1.0 / (1.0 + np.exp(-(x @ line)))
        slope = x.T @ (p - used) + _PRIOR * (line - prior)
        curve = (x * (p * (1.0 - p))[:, None]).T @ x + _PRIOR * np.eye(2)
        step = np.linalg.solve(curve, slope)
        # full steps can overshoot where p is near 0 or 1: half a unit of slope and two of offset at most
        line -= step / max(1.0, abs(step[0]) / 0.5, abs(step[1]) / 2.0)
        if np.abs(step).max() < 1e-9:
            break
    return max(float(line[0]), 0.05), float(line[1])

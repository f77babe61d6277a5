"""What prefetching saves, proved by the control group: sums of node-blocks in, a saving with its 95 % interval out. Pure.

A block is an hour of one node, without its wash-out; it was `control` (no prefetching) or treated, as `core.holdout` drew it. Control
blocks are few (one in twenty), heavy-tailed, differ by node and hour, and neighbours look alike, so neither a t-interval nor independence
is assumed:

1. **Hypothesis.** Prefetching multiplies a block's cold seconds by 1 − s. Under it, what each block would have cost without prefetching is
   known: a treated block's sum over 1 − s.
2. **Adjustment.** Those sums are predicted from what no arm can change: the seconds that the node's shadow cache (the same decisions
   without prefetching, fed by the same arrivals) waited in that block; the node's own mean at that hour of other days; what other nodes
   waited in that block. One weighted least-squares fit over both arms together; what is left over is compared.
3. **Test.** The studentized difference of control's and treated's mean remainder, against the same figure under `DRAWS` other draws of
   the same scheme. Nothing but the drawing is assumed, so that two equal arms look different in one of twenty experiments, however the sums
   are distributed and correlated. Studentized, it also holds, for many blocks, where savings differ from block to block.
4. **Interval.** All s that the test does not reject; the estimate is the s at which the difference is nought.

Without control blocks all that can be said is what shadow caches say (`Basis.SHADOW`): a computation, not an experiment, and without an
interval. Covers neither the drawing (`core.holdout`) nor where sums are kept.

Source: Fisher 1935 (randomization test); Rosenbaum, "Covariance adjustment in randomized experiments and observational studies",
Statistical Science 2002 (2., and 4. by inversion); Wu, Ding, "Randomization tests for weak null hypotheses in randomized experiments", JASA
2021 (studentizing); Deng, Xu, Kohavi, Walker, "Improving the sensitivity of online controlled experiments by utilizing pre-experiment
data", WSDM 2013 (covariates); Bojinov, Simchi-Levi, Zhao, "Design and analysis of switchback experiments", Management Science 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from prefetcher.core.holdout import HoldoutSettings, draw_control

__all__ = ["DRAWS", "Basis", "Blocks", "Comparison", "Effect", "detectable_ratio", "effect_in_words", "estimate", "redraw"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

#: Other draws that the true one is compared with: the 2.5 % points are ranks 25 of 1,000.
DRAWS = 999
#: 1.96 for a two-sided 5 %, and 0.84 for being found in four of five experiments.
_FOUND = 1.96 + 0.84
#: Standard deviation of what is left of a block after the adjustment, over the mean block: as `bench ab` sees it on made and on replayed
#: logs. Only for saying what could be found before anything is measured.
DISPERSION = 1.1
#: With fewer control blocks no interval is given: the smallest two-sided chance is above 5 % or close to it, and the fit is worth nothing.
_FEWEST_CONTROL = 8
#: Savings that are looked at: from 20 times as much waiting to a twentieth of a twentieth.
_LOG_FROM, _LOG_TO = -6.0, 3.0
_BISECTIONS = 17
_HOURS_OF_DAY = 24
_DAY_S = 86_400.0


class Basis(StrEnum):
    """What a saving is known from."""

    CONTROL = "control"
    SHADOW = "shadow"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Blocks:
    """N measured node-blocks, without their wash-out. `node` int64[N] are positions in `nodes`, `block` int64[N] numbers of blocks,
    `control` bool[N], `cold_s` float64[N] seconds waited, `rows` float64[N] requests, `shadow_s` float64[N] seconds that the node's shadow
    waited in the same minutes, NaN where that is not known."""

    nodes: tuple[str, ...]
    node: Ints
    block: Ints
    control: Bools
    cold_s: Floats
    rows: Floats
    shadow_s: Floats

    def __len__(self) -> int:
        return len(self.node)


@dataclass(frozen=True, slots=True)
class Effect:
    """What prefetching saves. Ratios are shares of what would be waited without it: 0.2 is 20 % less; negative is harm.

    `low` and `high` bound the 95 % interval, None where there is none. `saved_s_per_h` is of all nodes together, with its bounds.
    `chance`: how often two equal arms would look as different as these. `detectable`: the smallest saving that this many blocks would
    find in four of five such experiments. `days`: how long was measured; `days_to_tenth`: how long a saving of a tenth takes to be found.
    `shadow_over_control`: what shadow caches said of control blocks over what those waited; 1 is right.
    """

    basis: Basis
    saving_ratio: float | None = None
    low: float | None = None
    high: float | None = None
    saved_s_per_h: float | None = None
    saved_low_s_per_h: float | None = None
    saved_high_s_per_h: float | None = None
    chance: float | None = None
    detectable: float | None = None
    nodes: int = 0
    blocks: int = 0
    control_blocks: int = 0
    rows: int = 0
    control_rows: int = 0
    cold_s: float = 0.0
    control_cold_s: float = 0.0
    from_s: float | None = None
    until_s: float | None = None
    days: float = 0.0
    days_to_tenth: float | None = None
    shadow_over_control: float | None = None
    why: str = ""

    @property
    def found(self) -> bool:
        """Whether a saving, or harm, is proved at 95 %."""
        return self.low is not None and self.high is not None and (self.low > 0.0 or self.high < 0.0)


def detectable_ratio(nodes: int, days: float, settings: HoldoutSettings, dispersion: float = DISPERSION) -> float:
    """The smallest saving that is found in four of five experiments with so many nodes and days; infinite where none is.

    `dispersion`: standard deviation over mean of a block after the adjustment. Source: the usual formula for the difference of two means.
    """
    blocks = nodes * days * _DAY_S / settings.block_s
    if settings.frame == 0 or nodes < 2 or blocks < settings.frame:
        return math.inf
    control = blocks / settings.frame
    return _FOUND * dispersion * math.sqrt(1.0 / control + 1.0 / (blocks - control))


# --- the comparison ---


def redraw(blocks: Blocks, settings: HoldoutSettings, draws: int = DRAWS) -> Ints:
    """int64[S, F]: the control blocks of other draws of the scheme (`core.holdout.draw_control`), the same ones for the same seed. Draws
    that give an arm fewer than two of these blocks are left out."""
    seeds = np.random.default_rng([settings.seed, draws]).integers(0, 2**62, draws)
    drawn = draw_control(blocks.nodes, blocks.node, blocks.block, settings, seeds)
    count = (drawn < len(blocks)).sum(axis=1)
    kept: Ints = drawn[(count >= 2) & (count <= len(blocks) - 2)]
    return kept


class Comparison:
    """Control against treated over the same blocks, for any saving. `others` are other draws (`redraw`)."""

    def __init__(self, blocks: Blocks, others: Ints, block_s: float = 3600.0) -> None:
        self._blocks = blocks
        self._others = others
        self._mine = np.flatnonzero(blocks.control)[None]
        self._covariates = _Covariates(blocks, max(1, round(3600.0 / block_s * _HOURS_OF_DAY)))

    def _remainders(self, saving: float) -> Floats:
        """float64[N]: what a block would wait without prefetching, over what it was expected to, were the saving so large."""
        without = np.where(self._blocks.control, self._blocks.cold_s, self._blocks.cold_s / (1.0 - saving))
        return without - self._covariates.expected(without)

    def difference(self, saving: float) -> float:
        """Mean remainder of control less that of treated blocks, seconds; falls as `saving` rises."""
        return float(_differences(self._mine, self._remainders(saving))[0][0])

    def spread(self, saving: float) -> float:
        """Standard deviation of that difference over all draws, were the saving so large."""
        return float(_differences(self._others, self._remainders(saving))[0].std())

    def chances(self, saving: float) -> tuple[float, float]:
        """How often other draws show at least as much, and at most as much, were the saving so large: (more, less)."""
        left = self._remainders(saving)
        mine = _studentized(*_differences(self._mine, left))[0]
        others = _studentized(*_differences(self._others, left))
        near = 1e-9 * max(1.0, abs(float(mine)))
        return (1 + int((others >= mine - near).sum())) / (len(others) + 1), (1 + int((others <= mine + near).sum())) / (len(others) + 1)

    def chance(self, saving: float = 0.0) -> float:
        """How often arms would look as different as these, were the saving so large; two-sided."""
        return min(1.0, 2.0 * min(self.chances(saving)))

    def saving(self) -> float:
        """The saving at which nothing is left of the difference."""
        return _crossing(lambda s: self.difference(s) > 0.0)

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """All savings that are not rejected at `level`."""
        tail = (1.0 - level) / 2.0
        return _crossing(lambda s: self.chances(s)[0] <= tail), _crossing(lambda s: self.chances(s)[1] > tail)


def _crossing(below: Callable[[float], bool]) -> float:
    """The saving up to which `below` holds, found by halving on the logarithm of what is left."""
    low, high = _LOG_FROM, _LOG_TO  # log of what is left of the waiting: a large saving is a low one
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        if below(1.0 - math.exp(middle)):
            high = middle
        else:
            low = middle
    return 1.0 - math.exp((low + high) / 2.0)


def _differences(control: Ints, left: Floats) -> tuple[Floats, Floats]:
    """(difference of means, its standard error) for each draw of `control` int64[S, F], numbers of blocks, N for none."""
    n, total, squares = len(left), float(left.sum()), float((left * left).sum())
    count = (control < n).sum(axis=1).astype(np.float64)
    drawn = np.append(left, 0.0)[control]
    first, second = drawn.sum(axis=1), (drawn * drawn).sum(axis=1)
    mean_c, mean_t = first / count, (total - first) / (n - count)
    var_c = np.maximum(second / count - mean_c**2, 0.0) / np.maximum(count - 1, 1)
    var_t = np.maximum((squares - second) / (n - count) - mean_t**2, 0.0) / np.maximum(n - count - 1, 1)
    return mean_c - mean_t, np.sqrt(var_c + var_t)


def _studentized(difference: Floats, error: Floats) -> Floats:
    return difference / np.maximum(error, 1e-12)


class _Covariates:
    """What a block is expected to wait without prefetching, from what no arm changes (see 2. above)."""

    def __init__(self, blocks: Blocks, a_day: int) -> None:
        self._node = blocks.node
        _, self._time = np.unique(blocks.block, return_inverse=True)
        _, self._slot = np.unique(blocks.node * a_day + blocks.block % a_day, return_inverse=True)
        known = np.isfinite(blocks.shadow_s)
        self._shadow = np.where(known, blocks.shadow_s, 0.0)
        self._known = known.astype(np.float64)
        self._node_count = np.bincount(self._node)[self._node].astype(np.float64)
        self._slot_count = np.bincount(self._slot)[self._slot].astype(np.float64)

    def expected(self, without: Floats) -> Floats:
        """float64[N], for sums `without` prefetching, float64[N]."""
        node = _mean_of_others(without, self._node, self._node_count, float(without.mean()), 1.0)
        # Few days make a poor mean of an hour: it leans on the node's own until there are several.
        slot = _mean_of_others(without, self._slot, self._slot_count, node, 2.0)
        time = np.bincount(self._time, without)[self._time] - without
        usual = np.bincount(self._time, node)[self._time] - node
        others = node * np.where(usual > 0.0, (time + node) / np.where(usual > 0.0, usual + node, 1.0), 1.0)
        columns = np.stack([self._shadow, node, slot, others, node * (1.0 - self._known), np.ones_like(node)], axis=1)
        scale = np.sqrt((columns * columns).mean(axis=0))
        columns = columns / np.where(scale > 0.0, scale, 1.0)
        # The larger a block is expected to be, the wider it scatters: about in proportion, as counts with bursts do.
        weight = 1.0 / np.maximum(node + slot + self._shadow, 1e-3 * max(float(node.mean()), 1e-9))
        weighted = columns * weight[:, None]
        gram = columns.T @ weighted
        ridge = 1e-6 * np.trace(gram) / len(gram) + 1e-12
        fitted: Floats = columns @ np.linalg.solve(gram + ridge * np.eye(len(gram)), weighted.T @ without)
        return fitted


def _mean_of_others(values: Floats, group: Ints, count: Floats, prior: Floats | float, prior_count: float) -> Floats:
    """The mean of each one's group without itself, drawn to `prior` as if that were so many values more."""
    mean: Floats = (np.bincount(group, values)[group] - values + prior_count * prior) / (count - 1.0 + prior_count)
    return mean


# --- the estimate ---


def estimate(blocks: Blocks, settings: HoldoutSettings, *, draws: int = DRAWS) -> Effect:
    """What prefetching saves by these blocks, all of them over.

    With fewer than eight control blocks, or none, what shadow caches say; `why` says so.
    """
    effect = _counted(blocks, settings)
    if not len(blocks) or effect.cold_s + effect.control_cold_s + np.nansum(blocks.shadow_s) <= 0.0:
        why = "nothing was measured yet" if not len(blocks) else "nobody waited in any block"
        return replace(effect, basis=Basis.NOTHING, why=why)
    if effect.control_blocks < _FEWEST_CONTROL or effect.blocks - effect.control_blocks < _FEWEST_CONTROL:
        return _by_shadow(blocks, effect)
    comparison = Comparison(blocks, redraw(blocks, settings, draws), settings.block_s)
    saving = comparison.saving()
    low, high = comparison.interval()
    usual = float(np.where(blocks.control, blocks.cold_s, blocks.cold_s / (1.0 - saving)).mean())
    detectable = _FOUND * comparison.spread(saving) / usual if usual > 0.0 else None
    per_h = _treated_s_per_h(blocks, settings)
    return replace(
        effect,
        basis=Basis.CONTROL,
        saving_ratio=saving,
        low=low,
        high=high,
        saved_s_per_h=_saved(saving, per_h),
        saved_low_s_per_h=_saved(low, per_h),
        saved_high_s_per_h=_saved(high, per_h),
        chance=comparison.chance(),
        detectable=detectable,
        days_to_tenth=None if detectable is None else effect.days * max(1.0, (detectable / 0.1) ** 2),
    )


def _counted(blocks: Blocks, settings: HoldoutSettings) -> Effect:
    control, here = blocks.control, len(blocks) > 0
    known = control & np.isfinite(blocks.shadow_s)
    waited = float(blocks.cold_s[known].sum())
    first, last = (int(blocks.block.min()), int(blocks.block.max()) + 1) if here else (0, 0)
    return Effect(
        basis=Basis.NOTHING,
        nodes=len(np.unique(blocks.node)),
        blocks=len(blocks),
        control_blocks=int(control.sum()),
        rows=int(blocks.rows.sum()),
        control_rows=int(blocks.rows[control].sum()),
        cold_s=float(blocks.cold_s[~control].sum()),
        control_cold_s=float(blocks.cold_s[control].sum()),
        from_s=first * settings.block_s if here else None,
        until_s=last * settings.block_s if here else None,
        days=(last - first) * settings.block_s / _DAY_S,
        shadow_over_control=float(blocks.shadow_s[known].sum()) / waited if waited > 0.0 else None,
    )


def _by_shadow(blocks: Blocks, effect: Effect) -> Effect:
    """What the nodes waited against what their shadows did, in treated blocks."""
    known = ~blocks.control & np.isfinite(blocks.shadow_s)
    waited, shadow = float(blocks.cold_s[known].sum()), float(blocks.shadow_s[known].sum())
    why = (
        "no control group runs"
        if effect.control_blocks == 0
        else f"only {effect.control_blocks} control blocks so far, {_FEWEST_CONTROL} are the least"
    )
    if shadow <= 0.0:
        return replace(effect, basis=Basis.NOTHING, why=f"{why}, and shadow caches never waited")
    a_node = (shadow - waited) / max(int(known.sum()), 1)
    return replace(effect, basis=Basis.SHADOW, saving_ratio=1.0 - waited / shadow, saved_s_per_h=a_node * effect.nodes, why=why)


def _treated_s_per_h(blocks: Blocks, settings: HoldoutSettings) -> float:
    """Cold seconds an hour of all nodes together, prefetching: the sum of their own means over an hour's measured minutes, made whole."""
    treated = ~blocks.control
    count = np.bincount(blocks.node[treated], minlength=len(blocks.nodes))
    sums = np.bincount(blocks.node[treated], blocks.cold_s[treated], len(blocks.nodes))
    return float((sums / np.maximum(count, 1)).sum()) * 3600.0 / (settings.block_s - settings.washout_s)


def _saved(saving: float, with_prefetch: float) -> float:
    return with_prefetch * saving / (1.0 - saving)


def effect_in_words(effect: Effect) -> str:
    """One line for people."""
    if effect.basis is Basis.NOTHING or effect.saving_ratio is None:
        return f"not known: {effect.why}"
    percent = 100.0 * effect.saving_ratio
    if effect.basis is Basis.SHADOW:
        return f"shadow caches say {percent:.0f} % less waiting; {effect.why}, so this is a computation, not an experiment"
    assert effect.low is not None
    assert effect.high is not None
    between = f"95 %: {100.0 * effect.low:.0f} to {100.0 * effect.high:.0f} %"
    about = f"{effect.control_blocks} control blocks of {effect.blocks} on {effect.nodes} nodes, {effect.days:.1f} days"
    if effect.found:
        word = "less" if effect.saving_ratio > 0.0 else "more"
        seconds = "" if effect.saved_s_per_h is None else f", {abs(effect.saved_s_per_h):,.0f} s an hour"
        return f"{abs(percent):.0f} % {word} waiting than the control group ({between}{seconds}); {about}"
    least = "" if effect.detectable is None else f"; a saving of {100.0 * effect.detectable:.0f} % or more would be found"
    return f"too early to say: {percent:.0f} % ({between}); {about}{least}"

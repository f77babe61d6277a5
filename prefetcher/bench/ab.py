"""`prefetcher bench ab`: does the control group's analysis cry wolf, and does it find a saving that is there?

Two thousand experiments over made-up blocks (`bench.made_blocks`: sixteen nodes, fourteen days, one block in twenty is control), twice:
with one policy on both sides, where every "saving" or "harm" is false, and with a true saving of a fifth. Beside the analysis
(`core.effect`) stands what people would otherwise do, the difference of means with Welch's t-interval, and the analysis without shadow
caches. With `--traces` also over a replayed log: false alarms under two thousand draws, and one true switchback, in which a node's cache
really runs without prefetching in its control blocks, with all that is carried over; what it says stands beside what whole runs with and
without prefetching say.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefetcher.bench.machine import describe_machine
from prefetcher.bench.made_blocks import FIRST_BLOCK, make_blocks, observed
from prefetcher.core.effect import Blocks, Comparison, Effect, effect_in_words, estimate, redraw
from prefetcher.core.holdout import HoldoutSettings, draw_control
from prefetcher.errors import UsageError

__all__ = ["run"]

_NODES, _DAYS, _SHARE, _SAVING = 16, 14, 0.05, 0.2
_RUNS, _QUICK_RUNS = 2_000, 100
#: Experiments of which the whole interval is computed: it takes ten times as long as the test.
_INTERVALS = 100
#: Trace, nodes and capacity ratio of the replayed part.
_REPLAYED: dict[str, tuple[int, float]] = {"genai_sd": (4, 0.25), "servegen_m_mid": (8, 0.5), "azure_functions_day": (8, 0.4)}
_WASHOUT_S = HoldoutSettings().washout_s
#: Two-sided 5 % of the normal distribution; Student's t at over a hundred degrees of freedom is within 1 %.
_TWO_SIDED = 1.96


class _Told(NamedTuple):
    """Of one experiment: the chance of its test and which side it favours, the same without shadow caches, the naive t, the truth, and
    (estimate, low, high) where that was computed."""

    chance: float
    saves: bool
    chance_without_shadow: float
    naive_t: float
    truth: float
    interval: tuple[float, float, float] | None


def run(
    json_out: Path,
    *,
    traces: Path | None = None,
    trace: str | None = None,
    quick: bool = False,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Writes `json_out`: `figures` with `false_rate` (how often two equal sides look different at 95 %) and `power` (how often a saving of
    20 % is found), and beside them the rates of `peers`. `quick`: a hundred experiments. `trace` names one of the replayed logs. Raises
    UsageError."""
    if trace is not None and trace not in _REPLAYED:
        raise UsageError(f"bench ab knows the traces {', '.join(_REPLAYED)}, not {trace}")
    if trace is not None and traces is None:
        raise UsageError("bench ab --trace needs --traces DIR")
    tell = say or (lambda text: print(text, flush=True))
    runs = _QUICK_RUNS if quick else _RUNS
    equal, better = _all(runs, 0.0), _all(runs, _SAVING)
    figures = {"false_rate": _rate(equal, _found), "power": _rate(better, _found)}
    peers = {
        "difference_of_means": {"false_rate": _rate(equal, _found_naively), "power": _rate(better, _found_naively)},
        "without_shadow_caches": {"false_rate": _rate(equal, _found_bare), "power": _rate(better, _found_bare)},
    }
    tell(f"false rate {figures['false_rate']:.3f}, power {figures['power']:.3f} over {runs} experiments each")
    tell(f"difference of means: {peers['difference_of_means']['false_rate']:.3f}, {peers['difference_of_means']['power']:.3f}")
    whole = [told for told in better if told.interval is not None]
    about = {
        "runs": runs,
        "nodes": _NODES,
        "days": _DAYS,
        "control_share": _SHARE,
        "true_saving": float(np.mean([told.truth for told in better])),
        "estimate": float(np.mean([told.interval[0] for told in whole if told.interval])),
        "covered": _rate(whole, lambda told: told.interval is not None and told.interval[1] <= told.truth <= told.interval[2]),
        "width": float(np.median([told.interval[2] - told.interval[1] for told in whole if told.interval])),
        "false_savings": _rate(equal, lambda told: told.chance <= 0.05 and told.saves),
        "false_harms": _rate(equal, lambda told: told.chance <= 0.05 and not told.saves),
    }
    result: dict[str, Any] = {"figures": figures, "peers": peers, "made": about, "machine": describe_machine()}
    if traces is not None:
        names = [trace] if trace is not None else ["genai_sd"]
        result["replayed"] = {name: _replayed(traces, name, runs, tell) for name in names}
    Path(json_out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _rate(told: Sequence[_Told], is_so: Callable[[_Told], bool]) -> float:
    return sum(map(is_so, told)) / max(len(told), 1)


def _found(told: _Told) -> bool:
    return told.chance <= 0.05


def _found_bare(told: _Told) -> bool:
    return told.chance_without_shadow <= 0.05


def _found_naively(told: _Told) -> bool:
    return abs(told.naive_t) >= _TWO_SIDED


# --- made-up blocks ---


def _all(runs: int, saving: float) -> list[_Told]:
    """Experiments 0 to `runs`, on as many cores as there are; the result does not depend on how many."""
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        return list(pool.map(partial(_experiment, saving), range(runs), chunksize=10))


def _experiment(saving: float, number: int) -> _Told:
    made = make_blocks(np.random.default_rng([number, 1]), _NODES, _DAYS)
    settings = HoldoutSettings(share=_SHARE, seed=number)
    names, shape = tuple(f"node-{k}" for k in range(_NODES)), made.with_s.shape
    node, block = np.repeat(np.arange(shape[0]), shape[1]), np.tile(np.arange(shape[1]) + FIRST_BLOCK, shape[0])
    control = _drawn(names, node, block, settings)
    cold_s = observed(made, control.reshape(shape)) if saving else made.with_s
    blocks = Blocks(names, node, block, control, cold_s.ravel(), made.rows.ravel(), made.shadow_s.ravel())
    others = redraw(blocks, settings)
    comparison = Comparison(blocks, others)
    bare = Comparison(replace(blocks, shadow_s=np.full(len(blocks), np.nan)), others)
    whole = saving and number < _INTERVALS
    interval = (comparison.saving(), *comparison.interval()) if whole else None
    truth = made.saving if saving else 0.0
    return _Told(
        comparison.chance(), comparison.difference(0.0) > 0.0, bare.chance(), _welch(blocks.cold_s, control), truth, interval
    )  # fmt: skip


def _drawn(
    names: tuple[str, ...], node: npt.NDArray[np.int64], block: npt.NDArray[np.int64], settings: HoldoutSettings
) -> npt.NDArray[np.bool_]:
    control = np.zeros(len(node) + 1, np.bool_)
    control[draw_control(names, node, block, settings, np.array([settings.seed]))[0]] = True
    return control[:-1]


def _welch(values: npt.NDArray[np.float64], control: npt.NDArray[np.bool_]) -> float:
    """Welch's t of the difference of means."""
    a, b = values[control], values[~control]
    error = math.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))
    return float(a.mean() - b.mean()) / max(error, 1e-12)


# --- a replayed log ---


def _replayed(traces: Path, name: str, runs: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """False alarms on a log's own blocks, and one switchback over it."""
    from prefetcher.compiling import compile_aloud
    from prefetcher.replay.ours import LIVE, SHADOW, NodeRun, score_blocks
    from prefetcher.replay.run import DEFAULT_HOLD_S, Simulation
    from prefetcher.replay.trace import read_trace

    compile_aloud()
    nodes, ratio = _REPLAYED[name]
    loaded = read_trace(traces / f"{name}.parquet", catalog=traces / f"{name}.catalog.json")
    simulation = Simulation(loaded, ratio * float(loaded.bytes_.sum()) / nodes, nodes=nodes)
    settings = HoldoutSettings(share=_SHARE, seed=1)

    from prefetcher.bench.switchback import SwitchbackRun

    plain, switched = [], []
    for part in simulation.parts:
        args = (part.world, simulation.capacity_bytes, simulation.price, DEFAULT_HOLD_S)
        plain.append(NodeRun(*args))
        switched.append(SwitchbackRun(*args, node=part.node, settings=settings))
    for scored in score_blocks(loaded, 0, lambda _done, _what: None):
        for part, one, other in zip(simulation.parts, plain, switched, strict=True):
            one.take(scored, part.rows)
            other.take(scored, part.rows)
    for of in (*plain, *switched):
        of.close()
    hours = int((loaded.t1 - loaded.t0) // 3600.0)
    names = tuple(part.node for part in simulation.parts)

    def sums(of: Sequence[NodeRun], slot: int) -> npt.NDArray[np.float64]:
        """float64[nodes × hours]: seconds waited, without wash-outs."""
        return np.concatenate([_hourly(one.world.ts - loaded.t0, one.log.wait_s[int(one.log.slot[slot])], hours) for one in of])

    rows = np.concatenate([_hourly(one.world.ts - loaded.t0, np.ones(len(one.world.ts)), hours) for one in plain])
    node, block = np.repeat(np.arange(nodes), hours), np.tile(np.arange(hours), nodes)
    with_s, without_s = sums(plain, LIVE), sums(plain, SHADOW)
    alarms = 0
    for seed in range(runs):
        drawn = replace(settings, seed=seed + 10)
        equal = Blocks(names, node, block, _drawn(names, node, block, drawn), with_s, rows, without_s)
        alarms += Comparison(equal, redraw(equal, drawn)).chance() <= 0.05
    control = _drawn(names, node, block, settings)
    effect: Effect = estimate(Blocks(names, node, block, control, sums(switched, LIVE), rows, sums(switched, SHADOW)), settings)
    truth = 1.0 - float(with_s.sum()) / max(float(without_s.sum()), 1e-9)
    tell(f"{name} on {nodes} nodes: false rate {alarms / runs:.3f}; whole runs say {100 * truth:.1f} %")
    tell(f"a switchback: {effect_in_words(effect)}")
    return {
        "nodes": nodes,
        "capacity_ratio": ratio,
        "false_rate": alarms / runs,
        "true_saving": truth,
        "switchback": asdict(effect),
    }


def _hourly(since_s: npt.NDArray[np.float64], values: npt.NDArray[np.float64], hours: int) -> npt.NDArray[np.float64]:
    counted = (since_s % 3600.0 >= _WASHOUT_S) & (since_s < hours * 3600.0)
    sums: npt.NDArray[np.float64] = np.bincount((since_s[counted] // 3600.0).astype(np.int64), values[counted], hours).astype(np.float64)
    return sums

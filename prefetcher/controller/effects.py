"""What prefetching saves, from what is stored: nodes' block sums, shadows' waits, the experiment's spans.

Covers no statistics (`core.effect`) and no writing of any of these (`agent.kept`, `controller.experiment`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from prefetcher.controller import records
from prefetcher.controller.experiment import EXPERIMENT, SHADOW_KEPT, Experiment, Span, decode_experiment
from prefetcher.core.block_sums import BLOCKS_OPEN, BlockSum, is_whole
from prefetcher.core.effect import Blocks, Effect, effect_in_words, estimate
from prefetcher.core.holdout import HoldoutSettings, arm_of
from prefetcher.core.types import Arm, NodeName
from prefetcher.ports import StateStore
from prefetcher.report.gone import read_gone
from prefetcher.telemetry.logs import log

__all__ = ["EffectReader", "effect_of", "read_blocks"]

#: An answer stands for a minute: what it is made of changes once an hour.
_FRESH_S = 60.0
_sums = msgspec.json.Decoder(list[BlockSum])
_hours = msgspec.json.Decoder(tuple[int, float])


def read_blocks(state: StateStore, nodes: Iterable[str]) -> dict[str, tuple[list[BlockSum], dict[int, float]]]:
    """Of each node, and of nodes that were forgotten: its blocks that are over, and what its shadow waited by hour. What can't be read is
    left out, and an error in the log.

    Raises:
        UnavailableError: the state store does not answer.
    """
    names = list(nodes)
    gone = {each.node: (list(each.blocks), dict(each.shadow)) for each in read_gone(state)}
    found = dict(gone)
    for name, raw in zip(names, state.read_many([records.node_key(NodeName(name), "blocks") for name in names]), strict=True):
        if raw is None:
            continue
        try:
            # The newest are as they were when the last of them began.
            blocks = records.decode(raw, _sums)[:-BLOCKS_OPEN]
            tail = state.tail(records.node_key(NodeName(name), "shadow"), SHADOW_KEPT)
            # A name that was forgotten and came back has hours of both lives.
            before, waited = gone.get(name, ([], {}))
            new = {block.block for block in blocks}
            blocks = [*(block for block in before if block.block not in new), *blocks]
            found[name] = blocks, waited | dict(records.decode(each, _hours) for each in tail)
        except ValueError as exc:
            log().error("blocks_unreadable", node=name, reason=str(exc), then="the node is left out of what prefetching saves")
    return found


def effect_of(
    of: dict[str, tuple[list[BlockSum], dict[int, float]]],
    experiment: Experiment,
    *,
    from_s: float | None = None,
    until_s: float = math.inf,
) -> tuple[Effect, HoldoutSettings, int]:
    """(effect, what it was drawn by, blocks left out) over the blocks that lie in the time asked for.

    Blocks in which a node was away, or not as drawn, are left out. Where a control group ran, those of its last span alone are looked at.
    """
    span = _span_of(experiment, from_s, until_s)
    settings = HoldoutSettings(share=0.0) if span is None else HoldoutSettings(share=span.share, seed=span.seed)
    if span is not None:
        from_s, until_s = max(from_s or 0.0, span.from_s), min(until_s, math.inf if span.until_s is None else span.until_s)
    names = tuple(sorted(of))
    rows: list[tuple[int, BlockSum, float]] = []
    left_out = 0
    for number, name in enumerate(names):
        blocks, shadow = of[name]
        for block in blocks:
            begin_s = block.block * settings.block_s
            if begin_s < (from_s or 0.0) or begin_s + settings.block_s > until_s:
                continue
            drawn = span is not None and arm_of(NodeName(name), begin_s, settings)[0] is Arm.CONTROL
            if not is_whole(block, settings) or drawn != block.control:
                left_out += 1
                continue
            rows.append((number, block, shadow.get(block.block, math.nan)))
    return estimate(_table(names, rows), settings), settings, left_out


def _span_of(experiment: Experiment, from_s: float | None, until_s: float) -> Span | None:
    """The last span that lies in the time asked for."""
    for span in reversed(experiment.spans):
        if span.from_s < until_s and (span.until_s is None or span.until_s > (from_s or 0.0)):
            return span
    return None


def _table(names: tuple[str, ...], rows: Sequence[tuple[int, BlockSum, float]]) -> Blocks:
    return Blocks(
        nodes=names,
        node=np.array([number for number, _, _ in rows], np.int64),
        block=np.array([block.block for _, block, _ in rows], np.int64),
        control=np.array([block.control for _, block, _ in rows], np.bool_),
        cold_s=np.array([block.cold_s for _, block, _ in rows], np.float64),
        rows=np.array([block.rows for _, block, _ in rows], np.float64),
        shadow_s=np.array([shadow for _, _, shadow in rows], np.float64),
    )


class EffectReader:
    """Says what prefetching saves, as JSON types, and remembers the last answer for a minute. For any thread."""

    def __init__(self, state: StateStore) -> None:
        self._state = state
        self._last: tuple[float, tuple[float | None, float | None], dict[str, Any]] | None = None

    def read(self, now_s: float, from_s: float | None = None, until_s: float | None = None) -> dict[str, Any]:
        """The effect of the blocks that lie in the time asked for, None for all that are kept; with `words`, whether a control group runs
        (`running`), and why or why not (`experiment`).

        Raises:
            UnavailableError: the state store does not answer.
        """
        hour_s = HoldoutSettings().block_s
        from_s = None if from_s is None else math.ceil(from_s / hour_s) * hour_s
        until_s = None if until_s is None else math.floor(until_s / hour_s) * hour_s
        last = self._last
        if last is not None and 0.0 <= now_s - last[0] < _FRESH_S and last[1] == (from_s, until_s):
            return last[2]
        try:
            experiment = decode_experiment(self._state.read(EXPERIMENT))
        except ValueError as exc:
            log().error("experiment_unreadable", reason=str(exc), then="only shadow caches speak")
            experiment = Experiment()
        nodes = self._state.members(records.NODES, float("-inf"))
        blocks = read_blocks(self._state, nodes)
        effect, settings, left_out = effect_of(blocks, experiment, from_s=from_s, until_s=math.inf if until_s is None else until_s)
        told = asdict(effect) | {
            "basis": effect.basis.value,
            "found": effect.found,
            "words": effect_in_words(effect),
            "running": experiment.span_at(now_s) is not None,
            "experiment": experiment.why,
            "nodes_needed": experiment.needed,
            "control_share": settings.share,
            "blocks_left_out": left_out,
        }
        self._last = now_s, (from_s, until_s), told
        return told

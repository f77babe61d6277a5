"""Whether the control group runs, since when, and how every process knows: a record that the leading controller writes.

It runs by itself once there are nodes enough that a saving worth knowing would be found in a month (`nodes_needed`), and stops when there
are too few; before that only shadow caches say what prefetching saves (`controller.effects`). A change begins with a block of the
experiment that is far enough ahead for every process to have heard of it, so that nobody takes a node for treated that another takes for
control. Earlier spans are kept, for their blocks are evidence too. Covers no drawing (`core.holdout`) and no analysis (`core.effect`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from prefetcher.controller import records
from prefetcher.controller.remembered import Remembered
from prefetcher.core.effect import detectable_ratio
from prefetcher.core.holdout import HoldoutSettings, arm_of
from prefetcher.core.shadow_caches import ShadowCaches
from prefetcher.core.types import Arm, NodeName
from prefetcher.ports import StateStore
from prefetcher.telemetry.logs import log
from prefetcher.telemetry.metrics import Metrics

__all__ = ["EXPERIMENT", "SHADOW_KEPT", "Experiment", "ExperimentKeeper", "ExperimentView", "Span", "decode_experiment", "nodes_needed"]

EXPERIMENT = "prefetcher:{controller}:experiment"
#: A control group runs where a saving of this size would be found, in four of five experiments, within so many days.
_WORTH_KNOWING, _WITHIN_DAYS = 0.3, 28.0
#: Real seconds for every process to hear of a change; they look every `LOOK_S`.
_HEARD_S = 60.0
LOOK_S = 5.0
#: Spans that are kept: a fleet that goes up and down once a day fills a month.
_SPANS_KEPT = 32
#: Hours of the shadow's waits that the store keeps of a node: as many as of its blocks.
SHADOW_KEPT = 1_008


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """From `from_s` to `until_s` (None: still) nodes were drawn with this share and seed."""

    from_s: float
    share: float
    seed: int
    until_s: float | None = None


class Experiment(msgspec.Struct, frozen=True, omit_defaults=True):
    """The spans in which a control group ran, oldest first, and why it does or does not run. `needed`: with how many nodes it would."""

    at_s: float = 0.0
    why: str = ""
    nodes: int = 0
    needed: int | None = None
    spans: tuple[Span, ...] = ()

    def span_at(self, now_s: float) -> Span | None:
        """The span that `now_s` is in."""
        for span in reversed(self.spans):
            if span.from_s <= now_s and (span.until_s is None or now_s < span.until_s):
                return span
        return None


_decoder = msgspec.json.Decoder(Experiment)


def decode_experiment(raw: bytes | None) -> Experiment:
    """An experiment as it was written; an empty one for None. Raises ValueError for something else."""
    return Experiment() if raw is None else records.decode(raw, _decoder)


def nodes_needed(share: float) -> int | None:
    """With how many nodes a control group of this share would find a saving of three tenths in four weeks; None: never."""
    settings = HoldoutSettings(share=share)
    if settings.frame == 0:
        return None
    return next(nodes for nodes in range(2, 10_000) if detectable_ratio(nodes, _WITHIN_DAYS, settings) <= _WORTH_KNOWING)


class ExperimentView:
    """What one process knows of the experiment. `arm` is safe for all threads, `look` for one at a time."""

    def __init__(self, state: StateStore) -> None:
        self._state = state
        self._remembered = Remembered(state)
        self._problem = ""
        self.known = Experiment()

    def look(self) -> None:
        """Reads the record; while it can't be read, the last one stands.

        Raises:
            UnavailableError: the state store does not answer.
        """
        (raw,) = self._remembered.look([EXPERIMENT], [self._state.read(EXPERIMENT)])
        try:
            self.known = decode_experiment(raw)
            self._problem = ""
        except ValueError as exc:
            self._remembered.refuse(EXPERIMENT)
            if str(exc) != self._problem:
                log().error("experiment_unreadable", reason=str(exc), then="the last one stands; remove the key to begin anew")
            self._problem = str(exc)

    def arm(self, node: NodeName, now_s: float) -> Arm:
        """The side that `node` is on at `now_s`."""
        span = self.known.span_at(now_s)
        return Arm.TREATED if span is None else arm_of(node, now_s, HoldoutSettings(share=span.share, seed=span.seed))[0]


class ExperimentKeeper:
    """The leading controller's part: starts and stops the control group, and keeps what shadows waited. For the controller's thread."""

    def __init__(self, state: StateStore, view: ExperimentView, metrics: Metrics, share: float, seed: int, speed: float = 1.0) -> None:
        self._state = state
        self._view = view
        self._metrics = metrics
        self._share = share
        self._seed = seed
        self._heard_s = _HEARD_S * speed
        self._needed = nodes_needed(share)
        self._kept: dict[NodeName, int] = {}

    def tick(self, now_s: float, fence: int, nodes: Sequence[NodeName], shadows: Mapping[NodeName, ShadowCaches]) -> None:
        """Looks after the experiment of `nodes`, those that can take part.

        Raises:
            UnavailableError: the state store does not answer.
        """
        self._view.look()
        known = self._view.known
        wanted = self._next(known, now_s, len(nodes))
        if wanted != msgspec.structs.replace(known, at_s=wanted.at_s) and self._state.write_fenced(
            records.FENCE, fence, {EXPERIMENT: records.encode(wanted)}
        ):
            log().info("experiment", why=wanted.why, nodes=wanted.nodes, needed=wanted.needed, running=wanted.span_at(math.inf) is not None)
            self._view.known = wanted
        arms = [self._view.arm(node, now_s) for node in nodes]
        for arm in Arm:
            self._metrics.arms.labels(arm=arm.value).set(arms.count(arm))
        for node, shadow in shadows.items():
            self._keep(node, shadow.shadow_measured)
        self._kept = {node: hour for node, hour in self._kept.items() if node in shadows}

    def _next(self, known: Experiment, now_s: float, nodes: int) -> Experiment:
        runs = known.spans[-1] if known.spans and known.spans[-1].until_s is None else None
        why, runs_on = self._why(nodes)
        spans = known.spans
        begin_s = self._next_block_s(now_s)
        if runs is not None and (not runs_on or (runs.share, runs.seed) != (self._share, self._seed)):
            ended = msgspec.structs.replace(runs, until_s=max(begin_s, runs.from_s))
            spans = (*spans[:-1], *([] if ended.until_s == ended.from_s else [ended]))
            runs = None
        if runs_on and runs is None:
            spans = (*spans, Span(max(begin_s, spans[-1].until_s or 0.0) if spans else begin_s, self._share, self._seed))
        return Experiment(now_s, why, nodes, self._needed, spans[-_SPANS_KEPT:])

    def _why(self, nodes: int) -> tuple[str, bool]:
        if self._needed is None:
            return "the control group is switched off: decision.control_ratio is 0", False
        found = f"a saving of {_WORTH_KNOWING:.0%} would be found in {_WITHIN_DAYS:.0f} days"
        if nodes >= self._needed:
            return f"a control group runs: {found}", True
        return f"{nodes} node{'' if nodes == 1 else 's'}, and a control group needs {self._needed}: only then {found}", False

    def _next_block_s(self, now_s: float) -> float:
        block_s = HoldoutSettings().block_s
        return math.ceil((now_s + self._heard_s) / block_s) * block_s

    def _keep(self, node: NodeName, waited: Mapping[int, float]) -> None:
        """Appends hours that are new to the list of what the node's shadow waited."""
        key = records.node_key(node, "shadow")
        if node not in self._kept:
            last = self._state.tail(key, 1)
            try:
                self._kept[node] = int(msgspec.json.decode(last[0])[0]) if last else -1
            except (msgspec.DecodeError, TypeError, ValueError, LookupError):
                self._kept[node] = -1
        new = [(hour, round(wait_s, 3)) for hour, wait_s in sorted(waited.items()) if hour > self._kept[node]]
        if new:
            self._state.append(key, [records.encode(each) for each in new], SHADOW_KEPT)
            self._kept[node] = new[-1][0]

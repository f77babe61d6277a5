"""From nodes' sums to a report: figures, groups, quantiles, the objective and its burn rate. Pure.

The same sums give the same report, to the last digit, whether they came from the state store, the outcomes topic or the parquet history.
Covers no reading of any of these (`report.reading`). Windows are whole hours, because sums are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prefetcher.core import histogram
from prefetcher.core.facts import Found, Stage
from prefetcher.core.ledger import FIRST_GAP_S, SLOT_S
from prefetcher.core.totals import HOUR_S, Totals, TotalsKey, sum_totals
from prefetcher.core.types import Cause, Outcome
from prefetcher.report.messages import Figures, Group, IdlePin, MissingNode, NodeState, Report, Slo, StageFigures, Waits
from prefetcher.report.sums import NodeSums

__all__ = ["NONE", "Besides", "Question", "ShadowSum", "build_report", "figures_of", "hours_of", "merge_slots", "stages_of"]

#: The name of a group of what nothing names.
NONE = "none"
_GB_H = 3.6e12
_GB = 1e9
_NOTHING = {
    Stage.FETCH: "nothing was fetched from a store in this time",
    Stage.READ: "nothing was read into memory in this time",
    Stage.COPY: "nothing measures it: no device tier",
    Stage.ENGINE_START: "nothing measures it: no engine is connected",
    Stage.WARM_UP: "nothing measures it: no engine is connected",
}


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: a window [`since_s`, `until_s`) (None: from the beginning), broken down `by` one of `messages.BY`, at most `most`
    groups; the objective is that `slo_target_ratio` of first requests wait at most `slo_under_s`."""

    until_s: float
    since_s: float | None = None
    by: str | None = None
    most: int = 1000
    slo_under_s: float = 2.0
    slo_target_ratio: float = 0.99


@dataclass(frozen=True, slots=True)
class Besides:
    """What is known beside the sums. `shadow_s`: by node and hour, what its requests would have waited with prefetching off."""

    missing: Sequence[MissingNode] = ()
    idle_pins: Sequence[IdlePin] = ()
    shadow_s: Mapping[str, Mapping[int, float]] = field(default_factory=dict)


def hours_of(since_s: float | None, until_s: float) -> range:
    """The hours since 1970 that lie in the window, the first and the last one whole."""
    last = int(-(-until_s // HOUR_S))
    return range(0 if since_s is None else int(since_s // HOUR_S), last)


def build_report(nodes: Iterable[NodeSums], question: Question, besides: Besides | None = None) -> Report:
    """The report over all `nodes`.

    Raises ValueError where `question.by` is nothing that a report is broken down by.
    """
    besides = besides or Besides()
    hours = hours_of(question.since_s, question.until_s)
    told = sorted(nodes, key=lambda each: each.node)
    sums = {each.node: each.by_key(hours) for each in told}
    pairs = [(node, key, totals) for node, found in sums.items() for key, totals in found.items()]
    shadow = _Shadow(besides.shadow_s, sums)
    total = figures_of([(key, totals) for _, key, totals in pairs], shadow.all())
    groups: list[Group] = []
    if question.by is not None and question.by != "stage":
        groups = _groups(pairs, question.by, shadow)
    stages: tuple[StageFigures, ...] = ()
    staged = 0
    if question.by == "stage":
        stages, staged = _slowest_stages(sums, question.most)
    return Report(
        since_s=question.since_s,
        until_s=question.until_s,
        from_hour_s=min((key.hour * HOUR_S for _, key, _ in pairs), default=None),
        by=question.by,
        total=total,
        slo=_slo([totals.first_waits for _, _, totals in pairs], merge_slots(told), question),
        groups=tuple(groups[: question.most]),
        groups_in_all=len(groups) or staged,
        stages=stages,
        nodes=tuple(NodeState(each.node, each.at_s, each.since_s, each.seq) for each in told),
        missing=tuple(besides.missing),
        idle_pins=tuple(besides.idle_pins),
        resolution_ratio=histogram.RESOLUTION_RATIO,
        first_gap_s=FIRST_GAP_S,
    )


# --- figures ---


def figures_of(sums: Iterable[tuple[TotalsKey, Totals]], shadow: ShadowSum | None = None) -> Figures:
    """The figures of some sums together. What people loaded by hand counts as memory and as no prefetch."""
    pairs = list(sums)
    everything = sum_totals(totals for _, totals in pairs)
    # Orders have a tier, requests none.
    guessed = sum_totals(totals for key, totals in pairs if key.tier and key.cause is not Cause.MANUAL)
    found, outcomes = everything.found, guessed.outcomes
    settled = sum(outcomes.values())
    counts = {outcome.value: outcomes.get(outcome, 0) for outcome in Outcome}
    counts[Outcome.OPEN.value] = guessed.orders - settled
    used = everything.held_byte_s - everything.idle_byte_s
    return Figures(
        requests=everything.rows,
        ready=found.get(Found.READY, 0),
        joined=found.get(Found.MOVING, 0) + found.get(Found.QUEUED, 0),
        cold_starts=everything.cold_starts,
        miss=found.get(Found.ABSENT, 0) + found.get(Found.QUEUED, 0),
        bypassed=everything.bypassed,
        dropped=everything.dropped,
        cold_s=everything.wait_s,
        waits=_waits(everything.waits),
        first_waits=_waits(everything.first_waits),
        prefetches=guessed.orders,
        outcomes=counts,
        hit=counts[Outcome.TIMELY.value],
        late=counts[Outcome.LATE.value],
        useless=counts[Outcome.USELESS.value],
        displaced=counts[Outcome.DISPLACED.value],
        premature=guessed.premature,
        redundant=guessed.redundant,
        accuracy=guessed.accuracy,
        timeliness=guessed.timeliness,
        shadow_requests=0 if shadow is None else shadow.requests,
        shadow_cold_s=None if shadow is None else shadow.shadow_s,
        coverage=None if shadow is None or shadow.shadow_s <= 0.0 else 1.0 - shadow.cold_s / shadow.shadow_s,
        saved_s=guessed.saved_s,
        held_gb_h=everything.held_byte_s / _GB_H,
        used_gb_h=used / _GB_H,
        idle_gb_h=everything.idle_byte_s / _GB_H,
        wasted_gb_h=everything.wasted_byte_s / _GB_H,
        early_gb_h=guessed.early_byte_s / _GB_H,
        moved_gb=everything.moved_bytes / _GB,
        wasted_moved_gb=guessed.wasted_moved_bytes / _GB,
    )


def _waits(bins: Mapping[int, int]) -> Waits:
    p50, p95, p99 = (histogram.quantile(bins, share) for share in (0.5, 0.95, 0.99))
    return Waits(histogram.count_of(bins), p50, p95, p99)


# --- groups ---

_Pair = tuple[str, TotalsKey, Totals]

_NAMES: dict[str, Callable[[str, TotalsKey], str]] = {
    "model": lambda node, key: key.model,
    "node": lambda node, key: node,
    "cause": lambda node, key: key.cause.value,
    "predictor": lambda node, key: key.predictor or NONE,
    "source": lambda node, key: key.source or NONE,
    "tenant": lambda node, key: key.tenant or NONE,
    "arm": lambda node, key: key.arm.value,
    "hour": lambda node, key: str(key.hour * int(HOUR_S)),
}


def _groups(pairs: Sequence[_Pair], by: str, shadow: _Shadow) -> list[Group]:
    """Hours in their order, all others with the largest cold seconds, then the most memory, first."""
    members: dict[str, list[tuple[TotalsKey, Totals]]] = {}
    for name, key, totals in _by_tier(pairs) if by == "tier" else _named(pairs, by):
        members.setdefault(name, []).append((key, totals))
    groups = [Group(name, figures_of(found, shadow.of(by, name))) for name, found in members.items()]
    if by == "hour":
        return sorted(groups, key=lambda group: int(group.name))
    return sorted(groups, key=lambda group: (-group.figures.cold_s, -group.figures.held_gb_h, group.name))


def _named(pairs: Sequence[_Pair], by: str) -> Iterator[tuple[str, TotalsKey, Totals]]:
    name_of = _NAMES.get(by)
    if name_of is None:
        raise ValueError(f"a report is broken down by {', '.join([*_NAMES, 'tier', 'stage'])}, not by {by[:40]!r}")
    for node, key, totals in pairs:
        yield name_of(node, key), key, totals


def _by_tier(pairs: Sequence[_Pair]) -> Iterator[tuple[str, TotalsKey, Totals]]:
    """Orders, memory and transfers by their tier; rows and their waits by the tier that served them. Of what rows found, and how waits
    are spread, tiers know nothing."""
    for _, key, totals in pairs:
        if key.tier:
            yield key.tier, key, totals
            continue
        for tier, count in totals.served.items():
            yield tier, key, Totals(rows=count, wait_s=totals.served_wait_s.get(tier, 0.0))


@dataclass(slots=True)
class ShadowSum:
    """Requests of hours whose shadow is known, what they waited, and what they would have waited with prefetching off."""

    requests: int = 0
    cold_s: float = 0.0
    shadow_s: float = 0.0


class _Shadow:
    """The hours of nodes whose shadow is known."""

    def __init__(self, shadow_s: Mapping[str, Mapping[int, float]], sums: Mapping[str, Mapping[TotalsKey, Totals]]) -> None:
        self._cells: dict[tuple[str, int], ShadowSum] = {}
        for node, found in sums.items():
            known = shadow_s.get(node, {})
            for key, totals in found.items():
                if totals.rows and key.hour in known:
                    cell = self._cells.setdefault((node, key.hour), ShadowSum(shadow_s=known[key.hour]))
                    cell.requests += totals.rows
                    cell.cold_s += totals.wait_s
        self._groups: dict[tuple[str, str], list[ShadowSum]] = {}
        for (node, hour), cell in self._cells.items():
            self._groups.setdefault(("node", node), []).append(cell)
            self._groups.setdefault(("hour", str(hour * int(HOUR_S))), []).append(cell)

    def all(self) -> ShadowSum | None:
        return self._sum(self._cells.values())

    def of(self, by: str, name: str) -> ShadowSum | None:
        """Of a node, or of an hour; shadows tell no more apart."""
        return self._sum(self._groups.get((by, name), ()))

    def _sum(self, cells: Iterable[ShadowSum]) -> ShadowSum | None:
        known = list(cells)
        if not known:
            return None
        return ShadowSum(sum(c.requests for c in known), sum(c.cold_s for c in known), sum(c.shadow_s for c in known))


# --- the objective ---


def merge_slots(nodes: Iterable[NodeSums]) -> dict[int, dict[int, int]]:
    """Waits of first requests by slot, over all nodes."""
    found: dict[int, list[Mapping[int, int]]] = {}
    for each in nodes:
        for slot, bins in each.slots.items():
            found.setdefault(slot, []).append(bins)
    return {slot: histogram.add_up(parts) for slot, parts in found.items()}


def _slo(first_waits: Iterable[Mapping[int, int]], slots: Mapping[int, Mapping[int, int]], question: Question) -> Slo:
    bins = histogram.add_up(first_waits)
    count, met = histogram.count_of(bins), histogram.at_most(bins, question.slo_under_s)

    def burn(window_s: float) -> float | None:
        first, end = int((question.until_s - window_s) // SLOT_S), int(-(-question.until_s // SLOT_S))
        recent = histogram.add_up(found for slot, found in slots.items() if first <= slot < end)
        asked = histogram.count_of(recent)
        if not asked or question.slo_target_ratio >= 1.0:
            return None
        return (1.0 - histogram.at_most(recent, question.slo_under_s) / asked) / (1.0 - question.slo_target_ratio)

    return Slo(
        under_s=question.slo_under_s,
        target_ratio=question.slo_target_ratio,
        counted_under_s=histogram.edge_above_s(question.slo_under_s),
        count=count,
        met=met,
        met_ratio=met / count if count else None,
        burn_1h=burn(HOUR_S),
        burn_6h=burn(6.0 * HOUR_S),
    )


# --- stages ---


def stages_of(nodes: Iterable[NodeSums], model: str, hours: range | None = None) -> list[StageFigures]:
    """Every stage of a cold start of `model`, on every node that told of one; also stages that nothing measured, which say so."""
    found: list[StageFigures] = []
    for each in sorted(nodes, key=lambda one: one.node):
        mine = {key: totals for key, totals in each.by_key(hours).items() if key.model == model}
        if mine:
            found += _stages_of_node(each.node, mine, every=True)
    return found


def _slowest_stages(sums: Mapping[str, Mapping[TotalsKey, Totals]], most: int) -> tuple[tuple[StageFigures, ...], int]:
    """The stages of the `most` models on nodes whose loads took longest in all, by node and model; and how many there are."""
    took_s: dict[tuple[str, str], float] = {}
    for node, found in sums.items():
        for key, totals in found.items():
            if totals.stage_bins:
                took_s[node, key.model] = took_s.get((node, key.model), 0.0) + sum(totals.stage_s.values())
    shown: dict[str, set[str]] = {}
    for node, model in sorted(took_s, key=lambda place: (-took_s[place], place))[:most]:
        shown.setdefault(node, set()).add(model)
    stages: list[StageFigures] = []
    for node, models in sorted(shown.items()):
        stages += _stages_of_node(node, {key: totals for key, totals in sums[node].items() if key.model in models})
    return tuple(stages), len(took_s)


def _stages_of_node(node: str, sums: Mapping[TotalsKey, Totals], *, every: bool = False) -> Iterator[StageFigures]:
    by_model: dict[str, list[Totals]] = {}
    for key, totals in sums.items():
        if totals.stage_bins or every:
            by_model.setdefault(key.model, []).append(totals)
    for model, parts in sorted(by_model.items()):
        together = sum_totals(parts)
        for stage in Stage:
            bins = {int(name.partition(":")[2]): n for name, n in together.stage_bins.items() if name.startswith(f"{stage.value}:")}
            count = histogram.count_of(bins)
            if not count:
                yield StageFigures(model, node, stage.value, note=_NOTHING[stage])
                continue
            p50, p90 = histogram.quantile(bins, 0.5), histogram.quantile(bins, 0.9)
            yield StageFigures(model, node, stage.value, count, together.stage_s[stage.value] / count, p50, p90)

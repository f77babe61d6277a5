"""`prefetcher replay`: a log in, the four logs of each policy, summary, report and a verdict out.

`Simulation` runs policies over one trace at one capacity; `replay_command` is the command around it. Benchmarks use `Simulation` too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.compiling import compile_kernels, compiled
from prefetcher.core.demand import new_demand
from prefetcher.core.node import new_caches, new_event_log, no_hazard
from prefetcher.core.node_run import run_rows
from prefetcher.core.value import DEFAULT_PRICE_S_PER_GB_H
from prefetcher.core.windows import WindowBook
from prefetcher.errors import UsageError
from prefetcher.progress import Progress, shown_progress
from prefetcher.replay.accounts import PolicyLogs, totals, write_logs
from prefetcher.replay.capacity import capacity_notes, check_capacity
from prefetcher.replay.catalog import read_load_times
from prefetcher.replay.engine import TICK_S, build_tables, close_node, split_by_node
from prefetcher.replay.frontier import FrontierPoint
from prefetcher.replay.hints import HintFeed, HintLog, check_hints, describe_hints, of_hinted_rows, read_hints
from prefetcher.replay.ours import AT_PRICE, LIVE, SHADOW, NodeRun, RateBlock, computed_ahead, score_blocks
from prefetcher.replay.policies import DEFAULT_POLICIES, OURS, check_one_tier, parse_policy, standard_taus
from prefetcher.replay.report_tiers import places_in_words, unfit_in_words
from prefetcher.replay.routing import RoutedNodes, needs_routing
from prefetcher.replay.terminal import hints_in_words, policies_table, scored_in_words
from prefetcher.replay.tiers import DEFAULT_TIERS, parse_tiers, stack_of
from prefetcher.replay.trace import Trace, read_trace
from prefetcher.replay.verdict import Verdict
from prefetcher.replay.windows import read_book

__all__ = ["DEFAULT_HOLD_S", "FRONTIER_FACTORS", "Ours", "Simulation", "check_figures", "replay_command"]

DEFAULT_HOLD_S = 600.0
#: The prices of the frontier, as factors of the price asked for.
FRONTIER_FACTORS: tuple[float, ...] = (4.0, 16.0, 64.0, 256.0)
#: Beyond these, figures would be infinite: a mistake.
_MOST_CAPACITY_RATIO = 1e6
_MOST_PRICE = 1e6
SHADOW_NAME = "ours-shadow"


def _quiet(_done: float, _what: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Ours:
    """The logs of ours and of its shadow without prefetching, what ours held and waited at other prices, and how hints turned out."""

    logs: PolicyLogs
    shadow: PolicyLogs
    frontier: list[FrontierPoint]
    hints: HintFeed | None = None


class Simulation:
    """One trace on `nodes` nodes of `capacity_bytes` each. Runs policies by name.

    `blocks` are the hazard's rates for ours, if they are kept (`list(score_blocks(…))`); else they are computed as they are needed. `hints`
    are told to ours, and `windows` bound its prefetches.
    """

    def __init__(
        self,
        trace: Trace,
        capacity_bytes: float,
        *,
        link_bytes_per_s: float = 3.5e9,
        nodes: int = 1,
        warmup_ratio: float = 0.3,
        load_s: npt.NDArray[np.float64] | None = None,
        price: float = DEFAULT_PRICE_S_PER_GB_H,
        hold_s: float = DEFAULT_HOLD_S,
        seed: int = 0,
        blocks: Sequence[RateBlock] | None = None,
        hints: HintLog | None = None,
        windows: WindowBook | None = None,
        progress: Progress = _quiet,
    ) -> None:
        self.trace = trace
        self.parts = split_by_node(trace, nodes, link_bytes_per_s, load_s)
        self.capacity_bytes = capacity_bytes
        self.price = price
        self.hold_s = hold_s
        self._blocks = blocks
        self._hints = hints
        self._windows = windows
        self._warmup_ratio = warmup_ratio
        self._seed = seed
        self._progress = progress

    def rivals(self, names: Iterable[str]) -> dict[str, PolicyLogs]:
        """The four logs of each named policy but ours; they run in lockstep."""
        names = list(names)
        taus_s = standard_taus()
        policies = [parse_policy(name, taus_s) for name in names]
        if not policies:
            return {}
        done = []
        for part in self.parts:
            world, rows = part.world, len(part.world.ts)
            demand = new_demand(len(world.size_bytes), world.t0_s, tuple(taus_s))
            caches = new_caches(policies, world, self.capacity_bytes)
            log = new_event_log(len(policies), rows, list(range(len(policies))))
            hazard = no_hazard(len(world.size_bytes))
            step = max(1, rows // 100)
            for first in range(0, rows, step):
                last = min(rows, first + step)
                log = run_rows(first, last, world.ts[last - 1], world, demand, hazard, caches, log)
                self._progress(last / rows, "rival policies")
            done.append((part, close_node(rows, world, demand, hazard, caches, log)))
        return {name: build_tables(e, done, self.trace) for e, name in enumerate(names)}

    def ours(self, prices: Sequence[float] = ()) -> Ours:
        """Ours, its shadow without prefetching, and what ours does at other `prices` (seconds per GB·h) with the same experts."""
        make = partial(
            NodeRun,
            capacity_bytes=self.capacity_bytes,
            price_s_per_gb_h=self.price,
            hold_s=self.hold_s,
            prices=tuple(prices),
            hints=self._hints is not None,
            windows=self._windows,
        )
        feed = None if self._hints is None else HintFeed(self.trace, self._hints, [part.node for part in self.parts])
        kept = self._blocks
        blocks = iter(kept) if kept is not None else computed_ahead(score_blocks(self.trace, self._seed, self._progress))
        if needs_routing(self.trace):
            routed = RoutedNodes(self.trace, self.parts, make)
            for block in blocks:
                routed.take(block, None if feed is None else self._told(feed, block))
            parts, runs = routed.close()
        else:
            parts, runs = self.parts, [make(part.world) for part in self.parts]
            for block in blocks:
                told = [None] * len(parts) if feed is None else self._told(feed, block)
                for part, run, hints in zip(parts, runs, told, strict=True):
                    run.take(block, part.rows, hints)
            for run in runs:
                run.close()
        done = [(part, run.log) for part, run in zip(parts, runs, strict=True)]
        frontier = []
        for k, price in enumerate(prices):
            at = self.totals(OURS, build_tables(AT_PRICE + k, done, self.trace))
            frontier.append(FrontierPoint(OURS, at["held_gb_h"], at["cold_seconds"], price))
        return Ours(build_tables(LIVE, done, self.trace, SHADOW), build_tables(SHADOW, done, self.trace), frontier, feed)

    def shown(self, logs: PolicyLogs) -> PolicyLogs:
        """The logs as figures count them: here all of them."""
        return logs

    def _told(self, feed: HintFeed, block: RateBlock) -> list[npt.NDArray[np.void]]:
        """What each node is told of hints in a block."""
        t0_s, until_s = self.trace.t0, min(block.until_s, self.trace.t1)

        def forecast(model: int, now_s: float) -> float:
            tick = int((now_s - t0_s) / TICK_S) - block.first_tick
            return float(block.at_tick[0, min(max(tick, 0), block.at_tick.shape[1] - 1), model])

        return feed.until(until_s, forecast)

    def totals(self, name: str, logs: PolicyLogs, shadow: PolicyLogs | None = None) -> dict[str, Any]:
        """The summary's entry of one policy, from its logs."""
        return totals(
            name,
            logs.residency,
            logs.transfers,
            logs.waits,
            logs.orders,
            scored_from_s=self.trace.scored_from_s(self._warmup_ratio),
            end_s=self.trace.t1,
            shadow=None if shadow is None else (shadow.residency, shadow.waits),
        )


def replay_command(
    *,
    log: Path,
    out: Path,
    catalog: Path | None = None,
    models: Path | None = None,
    default_bytes: int | None = None,
    policy: str = ",".join(DEFAULT_POLICIES),
    capacity_ratio: float | None = None,
    host_bytes: int | None = None,
    link_bytes_per_s: float = 3.5e9,
    load_times: Path | None = None,
    nodes: int = 1,
    warmup_ratio: float = 0.3,
    price: float | None = None,
    seed: int = 0,
    map: str | Mapping[str, str] | None = None,
    tz: str | None = None,
    strict: bool = False,
    hints: str | None = None,
    tiers: str = ",".join(DEFAULT_TIERS),
    device_bytes: int | None = None,
    disk_bytes: int | None = None,
    windows: Path | None = None,
) -> None:
    """Replays `log` and writes `out`; prints the verdict first. Raises UsageError and InputError."""
    from rich.console import Console

    names = list(dict.fromkeys(p.strip() for p in policy.split(",") if p.strip()))
    rivals = [name for name in names if name != OURS]
    taus_s = standard_taus()
    for name in rivals:
        parse_policy(name, taus_s)
    if not names:
        raise UsageError("no policy named; give --policy, as in --policy lru,ours")
    if hints is not None:
        check_hints(hints)
        if OURS not in names:
            raise UsageError("--hints are told to ours alone, and --policy does not name it; add ours, or leave --hints out")
    stack = partial(stack_of, parse_tiers(tiers), device_bytes=device_bytes, disk_bytes=disk_bytes, link_bytes_per_s=link_bytes_per_s)
    with_tiers = len(stack(host_bytes=1.0).tiers) > 1
    if with_tiers:
        if hints is not None:
            raise UsageError("--hints are told on one tier of memory only; leave out --hints, or --tiers")
        if windows is not None:
            raise UsageError("--windows bound prefetches into one tier of memory only; leave out --windows, or --tiers")
        for name in rivals:
            check_one_tier(name)
    check_capacity(capacity_ratio, host_bytes)
    check_figures(capacity_ratio, host_bytes, link_bytes_per_s, warmup_ratio, price)
    price = DEFAULT_PRICE_S_PER_GB_H if price is None else price
    book = None if windows is None else read_book(windows)
    errors = Console(stderr=True)
    with shown_progress(errors, "reading the log") as progress:
        trace = read_trace(
            log, catalog=catalog, models_dir=models, default_bytes=default_bytes, field_map=map, tz=tz, strict=strict,
            progress=lambda done, total: progress(done / max(total, 1), "reading the log"),
        )  # fmt: skip
        told = None if hints is None else read_hints(hints, trace, strict=strict)
        load_s = None if load_times is None else read_load_times(load_times, trace.models)
        if not errors.is_terminal and not compiled():
            errors.print("compiling for this machine, once: about half a minute", soft_wrap=True, highlight=False)
        compile_kernels(progress)
        node_count = len(trace.node_names) or nodes
        capacity = float(trace.bytes_.sum()) * capacity_ratio / node_count if capacity_ratio is not None else float(host_bytes or 0)
        settings: dict[str, Any] = {
            "nodes": nodes, "warmup_ratio": warmup_ratio, "load_s": load_s, "price": price, "seed": seed, "progress": progress,
        }  # fmt: skip
        simulation: Simulation
        about_tiers: dict[str, Any] = {}
        if with_tiers:
            from prefetcher.replay.cluster import ClusterSimulation, compiled_for_tiers

            if not compiled_for_tiers():
                errors.print("compiling what tiers need, once: about a minute", soft_wrap=True, highlight=False)
            there = stack(host_bytes=capacity)
            simulation = ClusterSimulation(trace, there, **settings)
            about_tiers = {"tiers": [there.below[0], *there.tiers], "tier_bytes": there.capacities(), "edges_bytes_per_s": there.rates()}
        else:
            simulation = Simulation(trace, capacity, link_bytes_per_s=link_bytes_per_s, hints=told, windows=book, **settings)
        notes = capacity_notes(trace.bytes_, [part.world.model for part in simulation.parts], capacity, capacity_ratio)
        for note in notes:
            errors.print(f"note: {note}", soft_wrap=True, highlight=False)
        logs = simulation.rivals(rivals)
        entries = {name: simulation.totals(name, of) for name, of in logs.items()}
        frontier: list[FrontierPoint] = []
        about_hints: dict[str, Any] = {}
        if OURS in names:
            mine = simulation.ours([price * factor for factor in FRONTIER_FACTORS] if price > 0 else [])
            logs[OURS], logs[SHADOW_NAME], frontier = mine.logs, mine.shadow, mine.frontier
            entries[OURS] = simulation.totals(OURS, mine.logs, mine.shadow)
            if told is not None and mine.hints is not None:
                about_hints = {"hints": describe_hints(told, mine.hints)}
                entries[OURS] |= of_hinted_rows(mine.hints.hinted, trace.ts >= trace.scored_from_s(warmup_ratio), mine.logs, mine.shadow)
        progress(0.0, "writing logs and report")
        verdict = _write(out, trace, simulation, names, entries, logs, frontier, nodes=node_count,
                         link_bytes_per_s=link_bytes_per_s, seed=seed, notes=notes,
                         warmup_ratio=warmup_ratio, tz=tz, **about_tiers, **about_hints,
                         **({} if book is None else {"windows": book.to_json()}))  # fmt: skip
    console = Console()
    hours = (trace.t1 - trace.scored_from_s(warmup_ratio)) / 3600.0
    for line in (verdict.line, verdict.why, scored_in_words(entries[names[0]]["requests"], len(trace), hours)):
        if line:
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    if about_hints:
        console.print(hints_in_words(about_hints["hints"], entries[OURS]), soft_wrap=True, highlight=False, markup=False)
    if about_tiers:
        listed = [entries[name] for name in names]
        for line in (f"on {places_in_words(about_tiers['tiers'], node_count)}", unfit_in_words(listed)):
            if line:
                console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(policies_table([entries[name] for name in names], console.width))
    for problem in [*trace.problems.lines(), *([] if told is None else told.problem_lines())]:
        errors.print(f"note: {problem}", soft_wrap=True, highlight=False)
    console.print(f"{out}/report.html, {out}/summary.json, and four logs a policy", soft_wrap=True, highlight=False, markup=False)


def check_figures(
    capacity_ratio: float | None = None,
    host_bytes: int | None = None,
    link_bytes_per_s: float | None = None,
    warmup_ratio: float | None = None,
    price: float | None = None,
) -> None:
    """Raises UsageError for a figure that is out of range, no number, or so large that results would be infinite; None is not given."""
    for option, value in (("--capacity-ratio", capacity_ratio), ("--host-bytes", host_bytes), ("--link-bytes-per-s", link_bytes_per_s)):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{option} must be positive, got {value}")
    if capacity_ratio is not None and capacity_ratio > _MOST_CAPACITY_RATIO:
        raise UsageError(f"--capacity-ratio is at most {_MOST_CAPACITY_RATIO:,.0f} (1 is room for every model), got {capacity_ratio}")
    if warmup_ratio is not None and not 0 <= warmup_ratio < 1:
        raise UsageError(f"--warmup-ratio must be at least 0 and below 1, got {warmup_ratio}")
    if price is not None and not 0 <= price <= _MOST_PRICE:
        raise UsageError(f"--price must be from 0 to {_MOST_PRICE:,.0f} seconds a GB·h, got {price}")


def _write(
    out: Path,
    trace: Trace,
    simulation: Simulation,
    names: list[str],
    entries: dict[str, dict[str, Any]],
    logs: dict[str, PolicyLogs],
    frontier: list[FrontierPoint],
    *,
    tz: str | None,
    warmup_ratio: float,
    **settings: Any,
) -> Verdict:
    from prefetcher.replay.report import write_report
    from prefetcher.replay.summary import describe_input, write_summary

    out.mkdir(parents=True, exist_ok=True)
    for name, of in logs.items():
        write_logs(out, name, of)
    described = describe_input(
        trace, warmup_ratio=warmup_ratio, host_bytes=simulation.capacity_bytes, price=simulation.price, hold_s=simulation.hold_s, **settings
    )
    summary = write_summary(out / "summary.json", described, [entries[name] for name in names])
    return write_report(out / "report.html", summary, {n: simulation.shown(logs[n]) for n in names}, frontier, trace, tz=tz)

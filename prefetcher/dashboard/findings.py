"""What is wrong, worst first, each with the next step as a command: models and hints that don't pay, what fell back, lags, fails, idles.

Judges what nodes, controllers and schedulers wrote by the rules below, and changes nothing. Covers no figures over time (the report).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from prefetcher.api.fleet import View
from prefetcher.api.service import Service
from prefetcher.controller import records
from prefetcher.core.types import Cause, NodeName, Outcome
from prefetcher.errors import TemporaryError
from prefetcher.words import count, reason, size, span

__all__ = ["Finding", "away_nodes", "findings"]

Severity = Literal["bad", "warn", "note"]
_RANK: Mapping[str, int] = {"bad": 0, "warn": 1, "note": 2}
_GB_H = 3.6e12
_DAY_S = 86_400.0
#: Orders of each node that wasteful models and failed loads are looked for in, and how old they may be.
_ORDERS = 200
_LOOK_BACK_S = _DAY_S
#: A model wastes when so many of its judged prefetches went unused, and fewer than this share were used.
_UNUSED = 3
_USED_SHARE = 1.0 / 3.0
#: A source's hints don't convert when so many were settled, and fewer than this share were kept.
_SETTLED = 10
_KEPT_SHARE = 0.2
#: A pin earns little when nobody used it for so long.
_IDLE_PIN_S = 3_600.0
#: Real seconds that the next forecasts may be late.
_LATE_S = 5.0
#: So much that is not learned or counted yet takes longer than a tick.
_LAG_BYTES = 1 << 20
_LAG_RECORDS = 10_000
#: How many of one kind are listed.
_OF_A_KIND = 20

_orders = msgspec.json.Decoder(records.OrderRecord)
_decides = msgspec.json.Decoder(records.Decides)


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that is wrong: `what` in a line, `detail` below it, `command` to copy and what it does (`then`). `weight` ranks those
    of one severity. `model` and `node` are '' where it concerns neither."""

    kind: str
    severity: Severity
    what: str
    detail: str = ""
    command: str = ""
    then: str = ""
    model: str = ""
    node: str = ""
    weight: float = 0.0


def findings(service: Service, view: View) -> list[Finding]:
    """Worst first. Raises UnavailableError where the state store is away."""
    found = [
        *_of_process(service),
        *_of_controllers(service, view),
        *_of_nodes(service, view),
        *_of_jobs(service),
        *_of_orders(service, view),
        *_of_hints(view),
        *_of_pins(service, view),
    ]
    found.sort(key=lambda one: (_RANK[one.severity], -one.weight, one.kind, one.what))
    return found


# --- processes and controllers ---


def _of_process(service: Service) -> Iterator[Finding]:
    for problem in service.problems():
        yield Finding("health", "bad", problem, command="prefetcher doctor", then="looks at this machine, part by part")
    note = service.note()
    if note:
        yield Finding("followed log", "warn", note)
    lag, records_behind = _gauge(service.metrics.lag), _gauge(service.metrics.ingest_lag)
    if lag > _LAG_BYTES:
        then = "shows how far it has come; it catches up by itself"
        yield Finding("lag", "warn", f"{size(lag)} of requests are not learned from yet", command="prefetcher status", then=then)
    if records_behind > _LAG_RECORDS:
        then = "starts one more; members share the partitions"
        what = f"{count(round(records_behind), 'request is', 'requests are')} not counted yet"
        yield Finding("lag", "warn", what, command="prefetcher ingest --port 0", then=then)


def _gauge(gauge: Any) -> float:
    """A gauge's own value; 0 where this process doesn't set it."""
    value = next((sample.value for metric in gauge.collect() for sample in metric.samples), 0.0)
    return 0.0 if math.isnan(value) else float(value)


def _of_controllers(service: Service, view: View) -> Iterator[Finding]:
    told, now_s = view.forecasts, service.now_s
    if view.reports and (told is None or now_s > told.until_s + _LATE_S * service.clock.speed):
        since = "" if told is None else f" since {span(now_s - told.at_s)}"
        detail = "nodes keep their last plan, and load what is asked for"
        then = "starts one where none runs; else its log says why it does not lead"
        yield Finding("lag", "bad", f"no controller forecasts{since}", detail, "prefetcher controller", then)
    raw = service.state.read_many([records.node_key(name, "decides") for name in sorted(view.reports)[:_OF_A_KIND]])
    seen: set[str] = set()
    for item in raw:
        try:
            decides = None if item is None else records.decode(item, _decides)
        except ValueError:
            continue
        for one in decides.predictors if decides is not None else ():
            if one.why_not and one.name not in seen:
                seen.add(one.name)
                fits = f"fitted {count(one.fits, 'time')}" if one.fits else "not fitted yet"
                detail = f"recent rates stand in for it; {fits}, on {count(one.rows, 'request')} last"
                then = "says which forecasts speak, on what they were trained and how they did"
                severity: Severity = "warn" if one.fits else "note"
                yield Finding(
                    "fallback", severity, f"{one.name} fell back: {reason(one.why_not)}", detail, "prefetcher predictors", then, weight=1.0
                )


# --- nodes ---


def away_nodes(service: Service, view: View) -> list[dict[str, Any]]:
    """Nodes that reported within a day and do not now: for how long they are silent at least and at most, in seconds, and when they were
    heard last. Raises UnavailableError."""
    found = service.nodes.heard(view)
    now_s, noted_s = service.now_s, records.SEEN_EVERY_S * service.clock.speed
    return [
        {"node": node, "silent_s": max(0.0, now_s - at_s - noted_s), "at_most_s": max(0.0, now_s - at_s), "last_heard_s": at_s}
        for node, at_s in sorted(found.items())
        if node not in view.reports and now_s - at_s <= _DAY_S
    ]


def _of_nodes(service: Service, view: View) -> Iterator[Finding]:
    for away in away_nodes(service, view)[:_OF_A_KIND]:
        name = away["node"]
        what = f"node {name} does not report, for {span(away['silent_s'])} to {span(away['at_most_s'])}"
        then = f"on {name}, where its agent is down; programs keep what they mapped"
        yield Finding("node away", "bad", what, "", "systemctl status prefetcher@agent", then, node=name, weight=10.0)
    shown = 0
    for name, report in sorted(view.reports.items()):
        for problem in report.problems:
            if shown < _OF_A_KIND:
                shown += 1
                yield Finding("node", "bad", f"{name}: {problem}", command="prefetcher doctor", then=f"on {name}", node=name, weight=5.0)
    warned = {report.memory.warning: name for name, report in view.reports.items() if report.memory.warning}
    for warning, name in warned.items():
        others = sum(report.memory.warning == warning for report in view.reports.values()) - 1
        more = f", and {others} more" if others else ""
        yield Finding(
            "memory", "note", f"{name}{more}: {warning}", command="prefetcher doctor", then="says which limit to raise", node=name
        )
    unknown: dict[str, int] = {}
    for report in view.reports.values():
        for model, rows in report.unknown:
            unknown[model] = unknown.get(model, 0) + rows
    for model, rows in sorted(unknown.items(), key=lambda item: -item[1])[:_OF_A_KIND]:
        # Another node may have it: rows that name no node go to all.
        if model not in view.models:
            what = f"{model} was asked for {count(rows, 'time')}, and no node has it"
            then = "in the folder of models; a folder without a manifest is no model"
            yield Finding("unknown model", "warn", what, "", f"prefetcher manifest DIR/{shlex.quote(model)}", then, model, weight=rows)


# --- jobs ---


def _of_jobs(service: Service) -> Iterator[Finding]:
    try:
        jobs = service.jobs.jobs()
    except TemporaryError:
        return
    for job in jobs:
        last = job["last"]
        if last is not None and last["result"] in ("failed", "hung", "lost"):
            then = "runs it again at once"
            what = f"job {job['name']} {last['result']}"
            yield Finding("job", "warn", what, str(last["error"]), f"prefetcher jobs run {shlex.quote(job['name'])}", then, weight=8.0)


# --- prefetches, hints, pins ---


class _Tally(msgspec.Struct):
    judged: int = 0
    used: int = 0
    unused: int = 0
    failed: int = 0
    wasted_byte_s: float = 0.0
    why: str = ""


def _of_orders(service: Service, view: View) -> Iterator[Finding]:
    tallies: dict[str, _Tally] = {}
    for order in _last_orders(service, view):
        if order.cause == Cause.MANUAL.value:
            continue
        tally = tallies.setdefault(order.model, _Tally())
        if order.outcome in (Outcome.TIMELY.value, Outcome.LATE.value):
            tally.judged += 1
            tally.used += 1
        elif order.outcome in (Outcome.USELESS.value, Outcome.DISPLACED.value):
            tally.judged += 1
            tally.unused += 1
            if order.begin_s is not None and order.end_s is not None:
                tally.wasted_byte_s += order.bytes * max(0.0, order.end_s - order.begin_s)
        elif order.outcome == Outcome.FAILED.value:
            tally.failed += 1
            tally.why = order.reason or tally.why
    wasteful = [(name, t) for name, t in tallies.items() if t.unused >= _UNUSED and t.used < _USED_SHARE * t.judged]
    for name, tally in sorted(wasteful, key=lambda item: -item[1].wasted_byte_s)[:_OF_A_KIND]:
        what = f"{name}: {tally.unused} of its last {tally.judged} prefetches went unused"
        detail = f"{tally.wasted_byte_s / _GB_H:.3g} GB·h were held for nothing"
        then = "says what it was prefetched for"
        command = f"prefetcher explain {shlex.quote(name)}"
        yield Finding("wasteful", "warn", what, detail, command, then, name, weight=2.0 + tally.wasted_byte_s / _GB_H)
    failed = [(name, t) for name, t in tallies.items() if t.failed]
    for name, tally in sorted(failed, key=lambda item: -item[1].failed)[:_OF_A_KIND]:
        what = f"{name}: {tally.failed} loads failed"
        detail = reason(tally.why) if tally.why else ""
        then = "in the folder of models: checks its files and writes their manifest anew"
        command = f"prefetcher manifest DIR/{shlex.quote(name)}"
        yield Finding("failed load", "bad", what, detail, command, then, name, weight=3.0 + tally.failed)


def _last_orders(service: Service, view: View) -> Iterator[records.OrderRecord]:
    """Of each node the last orders within a day, each once."""
    since_s = service.now_s - _LOOK_BACK_S
    for node in view.reports:
        latest: dict[str, records.OrderRecord] = {}
        for raw in service.state.tail(records.node_key(NodeName(node), "orders"), _ORDERS):
            try:
                order = records.decode(raw, _orders)
            except ValueError:
                continue
            latest[order.decision_id] = order
        yield from (order for order in latest.values() if order.issued_s >= since_s)


def _of_hints(view: View) -> Iterator[Finding]:
    for source in view.forecasts.sources if view.forecasts is not None else ():
        settled = source.kept + source.broken
        if settled >= _SETTLED and source.kept < _KEPT_SHARE * settled:
            name = source.source or "hints without a source"
            what = f"{name}: {source.kept} of {count(settled, 'hint')} were kept"
            detail = f"the next one is believed to {source.weight:.0%}; it does no harm, and says nothing"
            then = "has every source beside the others"
            yield Finding("hints", "warn", what, detail, "prefetcher status", then, weight=1.0 + source.broken / 1e6)


def _of_pins(service: Service, view: View) -> Iterator[Finding]:
    """Those that the controller holds against the price, then those that nobody used for long."""
    now_s, judged = service.now_s, set[str]()
    for pin in sorted(service.reports.idle_pins(), key=lambda pin: -pin.cost_s)[:_OF_A_KIND]:
        judged.add(pin.model)
        if pin.released_at_s is not None:
            continue
        what = f"{pin.model} is kept on {pin.node} by {pin.why}, and a held byte of it saves {pin.index_ratio:.0%} of its price"
        detail = f"{pin.held_gb_h:.3g} GB·h since then cost {pin.cost_s:.3g} s of waiting by the price and saved {pin.earned_s:.3g} s"
        command, then = f"prefetcher unpin {shlex.quote(pin.model)}", "leaves it to the decision again"
        yield Finding("idle pin", "note", what, detail, command, then, pin.model, pin.node, weight=pin.held_gb_h)
    idle: dict[str, tuple[float, float, int]] = {}
    for report in view.reports.values():
        for held in report.held:
            if not held.pinned or held.state != "ready" or held.leases or held.model in judged:
                continue
            since_s = held.last_use_s if held.last_use_s is not None else held.since_s
            before = idle.get(held.model, (0.0, since_s, 0))
            idle[held.model] = (before[0] + held.bytes * max(0.0, now_s - since_s), max(before[1], since_s), before[2] + 1)
    long = [(model, *found) for model, found in idle.items() if now_s - found[1] >= _IDLE_PIN_S]
    for model, byte_s, since_s, copies in sorted(long, key=lambda item: -item[1])[:_OF_A_KIND]:
        where = f" on {copies} nodes" if copies > 1 else ""
        what = f"{model} is pinned{where} and was not used for {span(now_s - since_s)}"
        detail = f"{byte_s / _GB_H:.3g} GB·h since then"
        then = "leaves it to the decision again"
        yield Finding("idle pin", "note", what, detail, f"prefetcher unpin {shlex.quote(model)}", then, model, weight=byte_s / _GB_H)

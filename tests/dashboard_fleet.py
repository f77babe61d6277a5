"""A fleet for pages: reports, plans, totals, orders, forecasts and jobs of many nodes in a store, as agents and controllers write them.

What is written is made by a seeded generator, and served by the real endpoint. `Fleet.report` is what two hundred agents do each second.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from prefetcher.api.endpoint import make_endpoint
from prefetcher.api.service import Service
from prefetcher.batch.runs import JobAbout, JobRecord, JobRun
from prefetcher.clock import SystemClock
from prefetcher.controller import records
from prefetcher.controller.records import HeldWeights, KnownWeights, Memory, NodeReport, OrderRecord
from prefetcher.core.facts import Found
from prefetcher.core.histogram import bins_of
from prefetcher.core.totals import HOUR_S, Totals, TotalsKey
from prefetcher.core.types import (
    Arm,
    Cause,
    DecisionId,
    DesiredWeights,
    ModelName,
    ModelVersion,
    NodeName,
    Order,
    Outcome,
    Plan,
    Tier,
    WeightsKey,
)
from prefetcher.ports import Acted, StateStore
from prefetcher.process import Process, listen
from prefetcher.report.sums import StoredLedger, encode_hour
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.memory import MemoryStreams

__all__ = ["Fleet", "served"]

GB = 10**9
_OUTCOMES = ("timely", "timely", "timely", "late", "useless", "displaced", "open", "failed")
_CAUSES = ("forecast", "forecast", "forecast", "hint", "coactivation", "batch")


def _reads(rng: np.random.Generator) -> dict[str, int]:
    return {f"read:{number}": count for number, count in bins_of(rng.exponential(1.2, 6)).items()}


def _job(name: str, what: str, every_s: float) -> JobAbout:
    return JobAbout(name, what, every_s)


@dataclass
class Fleet:
    """`nodes` nodes that know `known` of `models` models each and hold `held` of them."""

    state: StateStore
    models: int = 10_000
    nodes: int = 200
    known: int = 250
    held: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.names = [f"org-{i % 37}/model-{i:05d}" for i in range(self.models)]
        self.sizes = np.exp(self.rng.normal(np.log(4e9), 1.0, self.models)).astype(np.int64)
        self.node_names = [NodeName(f"gpu-{i:03d}") for i in range(self.nodes)]
        self.silent: set[str] = set()
        self._of_node = [self.rng.choice(self.models, min(self.known, self.models), replace=False) for _ in self.node_names]
        self._progress = 0.1

    def report(self, now_s: float) -> None:
        """Every node that is not silent says how it is."""
        items: dict[str, bytes] = {}
        self._progress = (self._progress + 0.13) % 1.0
        for number, name in enumerate(self.node_names):
            if name not in self.silent:
                items[records.node_key(name, "report")] = records.encode(self._report(number, name, now_s))
        if items:
            self.state.write(items, expire_s=records.REPORT_EXPIRES_S)
        for name in self.node_names:
            if name not in self.silent:
                self.state.see(records.NODES, name, now_s)

    def _report(self, number: int, name: NodeName, now_s: float) -> NodeReport:
        rng = np.random.default_rng((self.seed, number))
        mine = self._of_node[number]
        held = []
        for place, model in enumerate(mine[: self.held]):
            moving = place == 0 and number % 9 == 0
            pinned = place == 1 and number % 20 == 0
            early = place % 7 == 2
            used = now_s - float(rng.uniform(1, 9000))
            held.append(
                HeldWeights(
                    self.names[model],
                    "v1",
                    "host",
                    "moving" if moving else "ready",
                    int(self.sizes[model]),
                    int(self.sizes[model] * self._progress) if moving else int(self.sizes[model]),
                    "demand" if moving and number % 27 == 0 else _CAUSES[place % len(_CAUSES)],
                    f"d{number}-{place}" if moving or early else "",
                    now_s - 30 if moving else now_s - 9000,
                    None if moving or early else used,
                    int(place == 5),
                    pinned,
                    (("hazard", 0.81), ("season", 0.12)),
                )
            )
        link = 3.5e9
        known = tuple(KnownWeights(self.names[m], "v1", int(self.sizes[m]), float(self.sizes[m]) / link) for m in mine)
        taken = sum(h.bytes for h in held)
        problems = (f"{self.names[mine[3]]}: its bytes are not those of its manifest",) if number % 50 == 7 else ()
        return NodeReport(
            name,
            now_s,
            Memory(int(taken * (1.02 + rng.uniform(0, 0.8))), taken, True, "huge pages"),
            link,
            group=f"rack-{number // 20}",
            recent_wait_s=0.2,
            busy_ratio=float(rng.uniform(0, 0.7)),
            observe=number % 60 == 5,
            held=tuple(held),
            known=known,
            problems=problems,
        )

    def write(self, now_s: float) -> None:
        """What stands longer: orders, totals, plans, forecasts, jobs."""
        items: dict[str, bytes] = {}
        for number, name in enumerate(self.node_names):
            mine = self._of_node[number]
            orders = [self._order(number, place, int(mine[place % min(60, len(mine))]), now_s) for place in range(120)]
            self.state.append(records.node_key(name, "orders"), [records.encode(order) for order in orders], records.ORDERS_KEPT)
            totals = {
                "rows": 9000, "ready": 8700, "joined": 90, "cold_starts": 210, "cold_seconds": 540.5, "orders": 120, "opens": 9000,
                "outcomes": {"timely": 50, "late": 12, "useless": 14, "displaced": 9, "failed": 1}, "accuracy": 0.72, "timeliness": 0.8,
                "premature": 4, "redundant": 0, "saved_seconds": 130.25, "early_byte_seconds": 1e13, "wasted_moved_bytes": 9e9,
                "held_byte_seconds": 9e15, "idle_byte_seconds": 3e15, "wasted_byte_seconds": 2e14, "moved_bytes": 4e12,
            }  # fmt: skip
            items[records.node_key(name, "totals")] = records.encode(totals)
            first = int(mine[0])
            key = WeightsKey(ModelName(self.names[first]), ModelVersion("v1"))
            order = Order(
                DecisionId(f"d{number}-0"), name, key, Tier.HOST, Cause.FORECAST, Arm.TREATED, now_s, now_s + 95.0, now_s + 60.0, 600.0
            )
            items[records.node_key(name, "plan")] = records.encode(
                Plan(name, 1, 1, now_s, 5e-16, (DesiredWeights(key, 1e-12, 0.01, order=order),))
            )
            fell = "stale" if number == 0 else ""
            items[records.node_key(name, "decides")] = records.encode(
                records.Decides("hazard-prefetch", now_s, {"lhd": 9.0, "hazard-prefetch": 7.0}, 700.0, 120_000,
                                (records.PredictorState("hazard", fell, 3, now_s - 9e4, now_s - 60, 120_000),))
            )  # fmt: skip
        chances = np.sort(self.rng.beta(0.4, 6.0, (self.models, 3)), axis=1).round(4).tolist()
        forecasts = records.Forecasts(
            now_s,
            now_s + 1e6,
            {name: tuple(p) for name, p in zip(self.names, chances, strict=True)},
            sources=(records.HintSource("chat-page", 80, 20, 0.8), records.HintSource("banner", 3, 97, 0.03)),
        )
        items[records.FORECASTS] = records.encode(forecasts)
        items |= self._jobs(now_s) | self._sums(now_s)
        self.state.write(items)
        self.state.see(records.SCHEDULERS, "here", now_s)

    def _order(self, number: int, place: int, model: int, now_s: float) -> OrderRecord:
        outcome = _OUTCOMES[(place * 7 + model) % len(_OUTCOMES)]
        issued = now_s - 60.0 * (120 - place)
        ready = issued + 1.4 if outcome not in ("open", "failed") else None
        return OrderRecord(
            f"o{number}-{place}",
            self.node_names[number],
            self.names[model],
            "v1",
            "host",
            _CAUSES[place % len(_CAUSES)],
            "treated",
            issued,
            issued + 0.1,
            ready,
            issued + 40 if outcome == "timely" else issued + 1.0 if outcome == "late" else None,
            issued + 610 if outcome in ("useless", "displaced", "failed") else None,
            outcome,
            {"useless": "hold", "displaced": "room", "failed": "bad"}.get(outcome, ""),
            int(self.sizes[model]),
            contributions=(("hazard", 0.7), ("hint", 0.2)),
        )

    def _sums(self, now_s: float) -> dict[str, bytes]:
        """What each node's ledger told of the last hours: one busy model each, with waits of first requests and stages."""
        items: dict[str, bytes] = {}
        last = int(now_s // HOUR_S)
        for number, name in enumerate(self.node_names):
            rng = np.random.default_rng((self.seed, number, 1))
            model = ModelName(self.names[int(self._of_node[number][2])])
            hours = range(last - 7, last + 1)
            for hour in hours:
                waits = bins_of(rng.exponential(0.15, 40))
                rows = Totals(
                    rows=40, found={Found.READY: 34, Found.ABSENT: 6}, wait_s=float(rng.uniform(1, 9)), waits=waits, first_waits=waits
                )
                outcomes = {Outcome.TIMELY: 3, Outcome.LATE: 1, Outcome.USELESS: int(rng.integers(0, 2)), Outcome.DISPLACED: 1}
                ahead = Totals(
                    orders=6, outcomes=outcomes, premature=1, saved_s=float(rng.uniform(2, 6)), moved_bytes=4 * GB, held_byte_s=4e13,
                    idle_byte_s=float(rng.uniform(1e12, 2e13)), wasted_byte_s=8e11, stage_s={"read": 7.2}, stage_bins=_reads(rng),
                )  # fmt: skip
                told = [
                    (TotalsKey(model, Cause.DEMAND, Arm.TREATED, hour), rows),
                    (TotalsKey(model, Cause.FORECAST, Arm.TREATED, hour, "host", "hazard"), ahead),
                ]
                items[records.hour_key(name, hour, 0)] = encode_hour(told)
            stored = StoredLedger(now_s, hours[0] * HOUR_S, 1, hours=[(hour, 0, hour) for hour in hours])
            items[records.node_key(name, "sums")] = records.encode(stored)
        return items

    def _jobs(self, now_s: float) -> dict[str, bytes]:
        known = [
            _job("forecast-all", "how likely every model is used within each horizon", 300.0),
            _job("recalibrate", "how forecasts came true", 3600.0),
            _job("hazard-retrain", "a fitted hazard as an artifact", 3600.0),
        ]
        done = JobRun(
            "r1", "forecast-all", 1, now_s - 100, "here", due_s=now_s - 100, result="done", ended_s=now_s - 99, did="10,000 models forecast"
        )
        bad = JobRun("r2", "recalibrate", 1, now_s - 900, "here", result="failed", ended_s=now_s - 890, error="too few outcomes")
        return {
            records.JOBS: records.encode(known),
            records.job_key("forecast-all", "record"): records.encode(JobRecord(now_s - 100, runs=(done,), last_success_s=now_s - 99)),
            records.job_key("recalibrate", "record"): records.encode(JobRecord(now_s - 900, runs=(bad,))),
        }


class _NoNode:
    def act(self, act: str, model: str) -> Acted:
        raise AssertionError("nobody acts here")

    def switch(self, on: bool) -> None: ...

    def check(self) -> str:
        return ""


@contextlib.contextmanager
def served(state: StateStore, fleet: Fleet | None = None, port: int = 0) -> Iterator[str]:
    """The address of a real endpoint over `state`; the agents of `fleet` report each second meanwhile."""
    clock, process, stop = SystemClock(), Process("api"), threading.Event()
    service = Service(None, MemoryStreams().writer(), state, None, clock, Metrics(), lambda reason: None, lambda: "")
    endpoint = make_endpoint(service, 1_000_000)
    listener = listen("127.0.0.1", port)

    def keep_reporting() -> None:
        while fleet is not None and not clock.wait(stop, 1.0):
            fleet.report(clock.now_s())

    if fleet is not None:
        fleet.report(clock.now_s())
    agents = threading.Thread(target=keep_reporting)
    agents.start()
    try:
        yield process.serve(endpoint, listener)
    finally:
        stop.set()
        agents.join()
        endpoint.state.events.close()
        process.stop()
        listener.close()
        service.close()

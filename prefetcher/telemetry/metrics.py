"""Every metric of the program, in one place; `docs/metrics.md` is the reference.

Base units, names ending in `_total`, `_seconds`, `_bytes`; ratios are derived in queries. No label is a request, a user or a model. What
can be counted is there with 0 before it happened, where its labels are known: an alert sees the first time too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from prefetcher.core.facts import Found
from prefetcher.core.types import Arm, Cause, Outcome

__all__ = ["Metrics"]

#: From a mapped page (1 ms) to a large model over a slow link (10 min).
_WAIT_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
#: Planning: from a few models to ten thousand.
_PLAN_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
#: What labels can say, where that is known beforehand.
_CAUSES = [cause.value for cause in Cause]
_BEFOREHAND: dict[str, Mapping[str, Sequence[str]]] = {
    "orders": {"cause": [cause for cause in _CAUSES if cause not in (Cause.DEMAND, Cause.MANUAL)], "arm": [arm.value for arm in Arm]},
    "outcomes": {"outcome": [outcome.value for outcome in Outcome if outcome is not Outcome.OPEN]},
    "loads": {"cause": _CAUSES, "result": ["ready", "failed"]},
    "moved": {"cause": _CAUSES},
    "fetches": {"cause": _CAUSES, "result": ["ready", "failed"]},
    "fetched": {"cause": _CAUSES},
    "store_waits": {"reason": ["busy", "away", "model_slot", "cluster_slot"]},
    "opens": {"found": [found.value for found in Found]},
    "requests": {"source": ["http"]},
    "hints": {"result": ["new", "folded", "repeated", "past", "full"]},
    "hint_posts": {"result": ["taken", "refused", "not_allowed", "limited", "overloaded"]},
}


class Metrics:
    """The metrics of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("prefetcher_requests_total", "Request rows taken in, by where from.", ["source"], registry=registry)
        self.bad_requests = Counter(
            "prefetcher_bad_requests_total", "Request rows refused or skipped.", ["source", "reason"], registry=registry
        )
        self.plans = Counter("prefetcher_plans_total", "Plans written, by what asked for them.", ["trigger"], registry=registry)
        self.plan_time = Histogram("prefetcher_plan_seconds", "Time to make and write one plan.", registry=registry, buckets=_PLAN_BUCKETS)
        self.arms = Gauge("prefetcher_experiment_nodes", "Nodes by side of the experiment now.", ["arm"], registry=registry)
        self.orders = Counter("prefetcher_orders_total", "Prefetches decided.", ["cause", "arm"], registry=registry)
        self.skipped = Counter("prefetcher_skipped_total", "What was not done, and why.", ["what", "reason"], registry=registry)
        self.outcomes = Counter("prefetcher_outcomes_total", "What became of prefetches.", ["outcome"], registry=registry)
        self.loads = Counter("prefetcher_loads_total", "Loads ended.", ["cause", "result"], registry=registry)
        self.yields = Counter("prefetcher_yields_total", "Loads for requests that gave way to denser ones.", registry=registry)
        self.load_time = Histogram(
            "prefetcher_load_seconds",
            "Time from the start of a load to weights ready.",
            registry=registry,
            buckets=_WAIT_BUCKETS,
        )
        self.moved = Counter("prefetcher_moved_bytes_total", "Bytes loaded and verified.", ["cause"], registry=registry)
        self.kept = Counter(
            "prefetcher_kept_bytes_total",
            "Bytes that a load, or who was served from disk, did not read there because a part of the weights was in memory.",
            registry=registry,
        )
        self.fetches = Counter("prefetcher_fetches_total", "Fetches from the store ended.", ["cause", "result"], registry=registry)
        self.fetch_time = Histogram(
            "prefetcher_fetch_seconds", "Time from the start of a fetch to weights on disk.", registry=registry, buckets=_WAIT_BUCKETS
        )
        self.fetched = Counter("prefetcher_fetched_bytes_total", "Bytes fetched from the store and verified.", ["cause"], registry=registry)
        self.store_waits = Counter(
            "prefetcher_store_waits_total", "Times that a fetch had to wait, by what for.", ["reason"], registry=registry
        )
        self.opens = Counter(
            "prefetcher_opens_total",
            "Programs that asked for weights, by what they found.",
            ["found"],
            registry=registry,
        )
        self.waits = Histogram(
            "prefetcher_wait_seconds",
            "Wait of a request until its weights were there.",
            registry=registry,
            buckets=_WAIT_BUCKETS,
        )
        self.host = Gauge("prefetcher_host_bytes", "Host memory for weights, by use.", ["use"], registry=registry)
        self.idle = Gauge(
            "prefetcher_idle_byte_seconds",
            "Bytes held times the time since their last use, what is still held included.",
            registry=registry,
        )
        self.idle_pins = Gauge(
            "prefetcher_idle_pins",
            "Weights that pins keep and that have been worth less than their price for long.",
            registry=registry,
        )
        self.idle_pin_bytes = Gauge("prefetcher_idle_pin_bytes", "Memory that they take.", registry=registry)
        self.wasted = Gauge(
            "prefetcher_wasted_byte_seconds",
            "The part of it that belongs to prefetches never used.",
            registry=registry,
        )
        self.hints = Counter("prefetcher_hints_total", "Hints that a controller took in, by what they were.", ["result"], registry=registry)
        self.hint_posts = Counter("prefetcher_hint_posts_total", "Posts of hints, by what became of them.", ["result"], registry=registry)
        self.fallbacks = Counter(
            "prefetcher_predictor_fallbacks_total",
            "Forecasts that a predictor could not make.",
            ["predictor", "reason"],
            registry=registry,
        )
        self.jobs = Counter("prefetcher_jobs_total", "Scheduled jobs, by what came of them.", ["job", "result"], registry=registry)
        self.job_time = Histogram(
            "prefetcher_job_seconds", "Time of runs of jobs that ended by themselves.", ["job"], registry=registry, buckets=_WAIT_BUCKETS
        )
        self.job_period = Gauge("prefetcher_job_period_seconds", "Time between the times that a job is due.", ["job"], registry=registry)
        self.job_age = Gauge(
            "prefetcher_job_success_age_seconds", "Time since a job did its work; NaN before the first.", ["job"], registry=registry
        )
        self.jobs_overdue = Gauge("prefetcher_job_overdue", "1 while a run here takes longer than its time.", ["job"], registry=registry)
        self.lag = Gauge("prefetcher_stream_lag_bytes", "Requests not yet learned from; NaN where no controller leads.", registry=registry)
        self.lag.set(float("nan"))
        self.ingest_records = Counter("prefetcher_ingest_records_total", "Records of the requests topic.", ["result"], registry=registry)
        self.ingest_batch_time = Histogram(
            "prefetcher_ingest_batch_seconds", "Time to take in one batch.", registry=registry, buckets=_PLAN_BUCKETS
        )
        self.learned = Gauge("prefetcher_learned_rows", "Requests learned from since ever, by the controller here.", registry=registry)
        self.ingest_lag = Gauge("prefetcher_ingest_lag_records", "Records not polled yet.", registry=registry)
        self.ingest_waits = Counter(
            "prefetcher_ingest_waits_total", "Tries that failed and are repeated.", ["reason"], registry=registry
        )
        self.ingest_reloads = Counter(
            "prefetcher_ingest_reloads_total", "Partitions whose tables were loaded or counted again.", ["reason"], registry=registry
        )
        self.history_hours = Counter("prefetcher_history_hours_total", "Hours of a partition written as parquet.", registry=registry)
        self.snapshots = Counter("prefetcher_snapshots_total", "Snapshots of what was learned.", registry=registry)
        self.prefetching = Gauge("prefetcher_prefetching", "1 while prefetching is on.", registry=registry)
        self.locked = Gauge("prefetcher_host_locked", "1 while the host tier is locked in memory.", registry=registry)
        self.available = Gauge(
            "prefetcher_memory_available_bytes",
            "Memory that this machine and the control groups around the process have left.",
            registry=registry,
        )
        for name, labels in _BEFOREHAND.items():
            for values in product(*labels.values()):
                getattr(self, name).labels(**dict(zip(labels, values, strict=True)))

    def text(self) -> bytes:
        """The exposition, as Prometheus scrapes it."""
        return generate_latest(self.registry)

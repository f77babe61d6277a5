"""The controller: takes the stream in, keeps what was learned, writes every node's plan, and remembers all of it across a crash.

Runs in one thread of its own (`run`); `wake` may be called from any. A step takes in what is new, plans when a tick is due or something
happened that can't wait for it, and now and then writes a snapshot together with the position that it stands for. Everything that it needs
of the outside comes in through ports.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from prefetcher.clock import Clock
from prefetcher.controller import records
from prefetcher.controller.learner import Learner, Refit, Taken
from prefetcher.controller.planning import Given, PastOrder, Planned, Worth, make_plan, worth_of
from prefetcher.core.shadow_caches import Outlook, ShadowCaches
from prefetcher.core.types import Arm, DecisionId, NodeName, Outcome, RequestSeen
from prefetcher.errors import PredictorError, UnavailableError
from prefetcher.ports import RequestStream, StateStore
from prefetcher.telemetry.logs import log
from prefetcher.telemetry.metrics import Metrics

__all__ = ["Controller", "ControllerOptions"]

#: Rows taken in one step: some 50 ms of work, so that stopping and planning never wait long behind a backlog.
_ROWS_A_STEP = 2_000
#: A row older than this is history: learned from, but nobody waits for it.
_FRESH_S = 30.0
#: Longer than this after the last row, time passes on its own.
_SILENCE_S = 86_400.0
#: Longest wait between looks at the stream, for rows that came without a wake.
_IDLE_S = 0.5
#: Back-off while the state store is away.
_AWAY_S = 1.0
_UNUSED = (Outcome.USELESS.value, Outcome.DISPLACED.value)


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """How a controller decides; names as in `config.DecisionSettings`."""

    nodes: tuple[NodeName, ...]
    price_s_per_gb_h: float
    tick_s: float
    hold_s: float
    snapshot_s: float


class Controller:
    """One controller over `options.nodes`.

    `arm_of(node, now_s)` says which side of the experiment a node is on; `on_rows` hears of fresh rows with the index of their models,
    these rows counted in, and `on_plan` of every plan written, both in the controller's thread.
    """

    def __init__(
        self,
        stream: RequestStream,
        state: StateStore,
        learner: Learner,
        clock: Clock,
        metrics: Metrics,
        options: ControllerOptions,
        arm_of: Callable[[NodeName, float], Arm],
        on_rows: Callable[[Sequence[RequestSeen], Mapping[str, float]], None] = lambda rows, index: None,
        on_plan: Callable[[NodeName], None] = lambda node: None,
    ) -> None:
        self._stream = stream
        self._state = state
        self._learner = learner
        self._clock = clock
        self._metrics = metrics
        self._options = options
        self._arm_of = arm_of
        self._on_rows = on_rows
        self._on_plan = on_plan
        self._wake = threading.Event()
        self._wanted: set[str] = set()
        self._past: dict[NodeName, dict[str, PastOrder]] = {node: {} for node in options.nodes}
        self._next_tick_s = -np.inf
        self._next_snapshot_s = -np.inf
        self._saved_position = -1
        self._reports: dict[NodeName, records.NodeReport] = {}
        self._shadows: dict[NodeName, ShadowCaches] = {}
        self._switched_on = True
        self._refit: Refit | None = None
        self._counted: dict[tuple[str, str], int] = {}
        self.fence = 0
        self.deposed = False
        self.alive_s = -np.inf
        self._revision = 0

    def start(self) -> None:
        """Becomes the leader and takes over what was learned; the stream is then read from there.

        Raises:
            UnavailableError: the state store does not answer.
        """
        self._metrics.lag.set_function(lambda: float(self._stream.end() - self._learner.position))
        self.fence = self._state.next_number(records.EPOCH)
        raw, shadows = self._state.read_many([records.LEARNED, records.SHADOWS])
        if raw is not None:
            try:
                self._learner.restore(raw)
                self._restore_shadows(shadows)
                log().info("learned_restored", position=self._learner.position, rows=self._learner.traffic.rows)
            except ValueError as exc:
                log().error("snapshot_unreadable", reason=str(exc), then="learning again from the request log")
        self._saved_position = self._learner.position
        now_s = self._clock.now_s()
        self._next_snapshot_s = now_s + self._options.snapshot_s

    def _restore_shadows(self, raw: bytes | None) -> None:
        if raw is None:
            return
        arrays, meta = records.unpack_arrays(raw)
        for node in self._options.nodes:
            if node not in meta:
                continue
            shadows = self._new_shadows(self._clock.now_s())
            prefix = f"{node}/"
            mine = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
            try:
                shadows.restore(mine, meta[node])
            except (ValueError, KeyError) as exc:
                log().warning("shadow_caches_not_restored", node=node, reason=str(exc), then="they start anew")
                continue
            self._shadows[node] = shadows

    def wake(self, reason: str = "") -> None:
        """Something is new in the stream; with a `reason`, plan as soon as it is taken in."""
        if reason:
            self._wanted.add(reason)
        self._wake.set()

    def run(self, stop: threading.Event) -> None:
        """Steps until `stop`, then saves. An error of the state store is waited out."""
        away = False
        while not stop.is_set() and not self.deposed:
            try:
                more = self.step()
                away = False
            except UnavailableError as exc:
                if not away:
                    log().warning("state_away", reason=str(exc))
                away, more = True, False
                self._clock.wait(stop, _AWAY_S * self._clock.speed)
            if not more:
                due_s = self._next_tick_s - self._clock.now_s()
                self._clock.wait(self._wake, max(0.0, min(due_s, _IDLE_S * self._clock.speed)))
            self._wake.clear()
        try:
            self.save()
        except UnavailableError as exc:
            log().error(
                "snapshot_not_saved",
                reason=str(exc),
                then="the rows since the last one are learned again at the next start",
            )
        if self._refit is not None:
            self._refit.done.wait(2.0)

    def step(self) -> bool:
        """Takes in what is new and does what is due; whether more rows wait."""
        self.alive_s = self._clock.steady_s()
        wanted = {"tick"} if self._clock.now_s() >= self._next_tick_s else set()
        while self._wanted:
            wanted.add(self._wanted.pop())
        now_s = self._clock.now_s()
        batch = self._stream.read(self._learner.position, _ROWS_A_STEP)
        for bad in batch.bad:
            self._metrics.bad_requests.labels(source="log", reason="unreadable").inc()
            log().warning("record_skipped", position=bad.position, reason=bad.reason)
        more = len(batch.requests) + len(batch.bad) >= _ROWS_A_STEP
        tick = "tick" in wanted and not more
        if batch.next_position != self._learner.position or tick:
            pieces = _by_hour(batch.requests)
            if not more and batch.requests and now_s - max(row.ts for row in batch.requests) > _SILENCE_S:
                # The silence after old rows is a piece of its own: shadow caches leave out most of a silence that rows don't come before.
                pieces.append(())
            for number, piece in enumerate(pieces, start=1):
                last = number == len(pieces)
                caught_up = last and not more
                taken = self._learner.take(piece, batch.next_position if last else self._learner.position, now_s, caught_up=caught_up)
                if taken.repeated:
                    self._metrics.skipped.labels(what="request", reason="repeated_request_id").inc(taken.repeated)
                self._let_shadows_see(taken, now_s if caught_up else -np.inf)
                self.alive_s = self._clock.steady_s()
                if not caught_up and self._refit is None:
                    # History is being read, nobody waits for a plan, and what comes next is to be scored by what was before.
                    self._learner.refit_now(self._learner.traffic.newest_s)
                fresh = [row for row in taken.rows if now_s - row.ts <= _FRESH_S * self._clock.speed]
                if fresh:
                    self._on_rows(fresh, self._index_after(fresh, now_s))
                    if taken.started:
                        wanted.add("started")
        if more:
            self._wanted |= wanted - {"tick"}
            return True
        if tick:
            self._next_tick_s = (now_s // self._options.tick_s + 1.0) * self._options.tick_s
        if wanted:
            for node in self._options.nodes:
                self.plan(node, "tick" if "tick" in wanted else sorted(wanted)[0])
        self._look_after_fit(now_s)
        if now_s >= self._next_snapshot_s:
            self.save()
        self._count_fallbacks()
        return False

    # --- shadow caches ---

    def _let_shadows_see(self, taken: Taken, until_s: float) -> None:
        """Takes every node's shadow caches through the rows that are its own: those that name it, or no node."""
        for node in self._options.nodes:
            if self._reports.get(node) is None and not self._read_report(node):
                continue
            until = until_s if np.isfinite(until_s) else float(taken.ts.max(initial=self._learner.traffic.newest_s))
            shadows = self._shadows.get(node)
            if shadows is None and not len(taken.ts):
                # Nothing was asked for yet; the first row may be an old one, of a log that is followed from its beginning.
                continue
            anew = shadows is None
            if shadows is None:
                shadows = self._shadows[node] = self._new_shadows(float(taken.ts[0]))
            if anew or taken.started:
                self._tell_catalog(node)
            mine = np.array([row.node is None or row.node == node for row in taken.rows], np.bool_)
            shadows.advance(taken.ts[mine], taken.model[mine], taken.after_row[:, mine], taken.ticks, taken.at_tick, until)

    def _new_shadows(self, start_s: float) -> ShadowCaches:
        options = self._options
        return ShadowCaches(
            price_s_per_gb_h=options.price_s_per_gb_h,
            hold_s=options.hold_s,
            tick_s=options.tick_s,
            start_s=start_s,
        )

    def _read_report(self, node: NodeName) -> bool:
        raw = self._state.read(records.node_key(node, "report"))
        if raw is not None:
            self._reports[node] = records.decode_report(raw)
        return raw is not None

    def _tell_catalog(self, node: NodeName) -> None:
        """The node's shadow caches serve what the node does, with as much memory, at its link's measured speed."""
        shadows, report = self._shadows.get(node), self._reports[node]
        if shadows is None:
            return
        known = [(self._learner.number(k.model), float(max(k.bytes, 1)), max(k.load_s, 1e-6)) for k in report.known]
        served = [entry for entry in known if entry[0] >= 0]
        numbers, sizes, link_s = (np.array([entry[i] for entry in served]) for i in range(3))
        shadows.serve(numbers.astype(np.int64), sizes.astype(float), link_s.astype(float), float(report.memory.budget_bytes))

    def _worth(self, report: records.NodeReport, now_s: float) -> tuple[Outlook, Worth]:
        node = NodeName(report.node)
        shadows = self._shadows.get(node)
        if shadows is None:
            shadows = self._new_shadows(now_s)
        outlook = shadows.outlook(now_s)
        numbers = np.array([self._learner.number(k.model) for k in report.known], np.int64)
        # A model that was asked for since the catalog was told is not in the outlook yet.
        numbers[numbers >= len(outlook.keep_per_s)] = -1
        return outlook, worth_of(report, outlook, numbers, shadows.shadow_holds())

    def _index_after(self, rows: Sequence[RequestSeen], now_s: float) -> dict[str, float]:
        """The index of each model of `rows`, with these rows counted in: scores are refreshed before they are compared."""
        found: dict[str, float] = {}
        if not self._switched_on:
            return found
        asked = {row.model for row in rows}
        for report in self._reports.values():
            of = msgspec.structs.replace(report, known=tuple(k for k in report.known if k.model in asked))
            _, worth = self._worth(of, now_s)
            found |= {k.model: float(worth.keep[i]) for i, k in enumerate(of.known)}
        return found

    def plan(self, node: NodeName, trigger: str) -> Planned | None:
        """Makes and writes one node's plan; None while the node reports nothing, or when another controller leads."""
        started_s = self._clock.steady_s()
        raw, switch_raw, pins_raw = self._state.read_many([records.node_key(node, "report"), records.SWITCH, records.PINS])
        if raw is None:
            self._metrics.skipped.labels(what="plan", reason="node_silent").inc()
            return None
        report = self._reports[node] = records.decode_report(raw)
        switch = msgspec.json.decode(switch_raw, type=records.Switch) if switch_raw else records.Switch()
        pins = msgspec.json.decode(pins_raw, type=list[str]) if pins_raw else []
        now_s = self._clock.now_s()
        past = self._past[node]
        self._close_past(past, report, now_s)
        self._revision += 1
        self._switched_on = switch.on
        given = Given(
            now_s=now_s,
            revision=self._revision,
            fence=self.fence,
            price_s_per_gb_h=self._options.price_s_per_gb_h,
            hold_s=self._options.hold_s,
            tick_s=self._options.tick_s,
            arm=self._arm_of(node, now_s),
            prefetching=switch.on,
            pinned=frozenset(pins),
            past=past,
            last_row_s=self._learner.last_row_s,
            new_id=lambda: DecisionId(uuid.uuid4().hex[:16]),
        )
        self._tell_catalog(node)
        outlook, worth = self._worth(report, now_s)
        planned = make_plan(report, outlook, worth, given)
        shadows = self._shadows.get(node)
        costs_s, shadow_wait_s = ({}, 0.0) if shadows is None else (shadows.costs_s, shadows.shadow_wait_s)
        decides = records.Decides(outlook.expert, now_s, costs_s, shadow_wait_s)
        items = {records.node_key(node, "plan"): records.encode(planned.plan), records.node_key(node, "decides"): records.encode(decides)}
        if not self._state.write_fenced(records.node_key(node, "fence"), self.fence, items):
            self.deposed = True
            log().error("controller_deposed", fence=self.fence, reason="another controller leads")
            return None
        for order, score in planned.new:
            past[str(order.key.model)] = PastOrder(order, score)
            log().info(
                "prefetch_ordered",
                decision_id=order.decision_id,
                model=order.key.model,
                node=node,
                cause=order.cause.value,
                arm=order.arm.value,
                expert=outlook.expert,
                expected_use_s=round(order.expected_use_s - now_s, 1),
                observe=report.observe,
            )
        self._count_plan(planned, trigger, self._clock.steady_s() - started_s)
        self._on_plan(node)
        return planned

    def _close_past(self, past: dict[str, PastOrder], report: records.NodeReport, now_s: float) -> None:
        """An order is over once the node applied its plan and neither holds nor moves its weights, or its time is up."""
        held = {h.decision_id for h in report.held}
        for model, entry in past.items():
            if entry.ended or entry.order.decision_id in held:
                continue
            used = self._learner.last_row_s(model) >= entry.order.issued_s
            known = any(h.model == model for h in report.held)
            if used or known or now_s >= entry.order.deadline_s:
                entry.ended = True
        for model in [m for m, e in past.items() if e.ended and now_s - e.order.issued_s > 86_400.0]:
            del past[model]

    def order_ended(self, node: NodeName, decision_id: str, outcome: str) -> None:
        """An agent says that an order is over, and what became of it. Any thread."""
        for entry in list(self._past.get(node, {}).values()):
            # The control group's are refused at once; they stand until their time is up, as if they had been carried out.
            if entry.order.decision_id == decision_id and entry.order.arm is not Arm.CONTROL:
                entry.unused = outcome in _UNUSED
                entry.ended = True

    def _count_plan(self, planned: Planned, trigger: str, took_s: float) -> None:
        self._metrics.plans.labels(trigger=trigger).inc()
        self._metrics.plan_time.observe(took_s)
        for order, _ in planned.new:
            self._metrics.orders.labels(cause=order.cause.value, arm=order.arm.value).inc()
        for reason, count in planned.skipped.items():
            self._metrics.skipped.labels(what="prefetch", reason=reason).inc(count)

    def _count_fallbacks(self) -> None:
        for key, count in self._learner.fallback_counts().items():
            # A copy that was fitted meanwhile knows fewer of them.
            new = max(0, count - self._counted.get(key, 0))
            if new:
                self._metrics.fallbacks.labels(predictor=key[0], reason=key[1]).inc(new)
            self._counted[key] = count

    def _look_after_fit(self, now_s: float) -> None:
        if self._refit is not None:
            if not self._refit.done.is_set():
                return
            paid = self._learner.finish_refit(self._refit)
            log().info("predictor_fitted", predictor=self._refit.predictor.name, paid=paid)
            self._refit = None
        try:
            self._refit = self._learner.start_refit(now_s)
        except PredictorError as exc:
            log().warning("fit_not_started", reason=str(exc))
            return
        if self._refit is not None:
            threading.Thread(target=self._refit.run, name="fit", daemon=True).start()

    def save(self) -> None:
        """Writes a snapshot of what was learned, with its position, unless another controller leads or nothing is new."""
        self._next_snapshot_s = self._clock.now_s() + self._options.snapshot_s
        if self._learner.position == self._saved_position or self.deposed:
            return
        arrays: dict[str, np.ndarray] = {}
        facts = {}
        for node, shadows in self._shadows.items():
            mine, facts[str(node)] = shadows.snapshot()
            arrays |= {f"{node}/{name}": array for name, array in mine.items()}
        learned = {records.LEARNED: self._learner.snapshot(), records.SHADOWS: records.pack_arrays(arrays, facts)}
        if self._state.write_fenced(records.FENCE, self.fence, learned):
            self._saved_position = self._learner.position
            self._metrics.snapshots.inc()
            self._stream.drop_before(self._saved_position)
        else:
            self.deposed = True


def _by_hour(rows: Sequence[RequestSeen]) -> list[Sequence[RequestSeen]]:
    """The rows cut where an hour of the log begins, at least one piece: history is learned from hour by hour, as it would have been."""
    cuts, newest_s = [], -np.inf
    for i, row in enumerate(rows):
        if i and row.ts // 3600.0 > newest_s // 3600.0:
            cuts.append(i)
        newest_s = max(newest_s, row.ts)
    return [rows[start:end] for start, end in itertools.pairwise([0, *cuts, len(rows)])]

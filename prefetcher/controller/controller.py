"""The controller: takes the streams in, keeps what was learned, writes every node's plan, and remembers all of it across a crash.

Runs in one thread of its own (`run`); `wake` may be called from any. A step takes in what is new, plans when a tick is due or something
happened that can't wait for it, and now and then writes a snapshot together with the positions that it stands for. Everything that it needs
of the outside comes in through ports. Covers no election (`leadership`): a controller leads from its start until a store or an agent has
seen a higher fence.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from prefetcher.clock import Clock
from prefetcher.controller import records
from prefetcher.controller.batch_windows import BatchWindows
from prefetcher.controller.experiment import ExperimentKeeper
from prefetcher.controller.idle_pins import IdlePins
from prefetcher.controller.intake import Came, Intake
from prefetcher.controller.learner import Learner, Refit, Taken
from prefetcher.controller.nodes import Nodes
from prefetcher.controller.placing import ELSEWHERE, Placing
from prefetcher.controller.planning import Given, PastOrder, Planned, Worth, make_plan, worth_of
from prefetcher.controller.windows import WindowView
from prefetcher.core.experts import WINDOWS_S
from prefetcher.core.hints import Expected, Hint
from prefetcher.core.quotas import Quotas
from prefetcher.core.shadow_caches import Outlook, ShadowCaches
from prefetcher.core.types import Arm, DecisionId, NodeName, Outcome, RequestSeen, TenantQuota
from prefetcher.core.windows import WindowTable
from prefetcher.errors import PredictorError, UnavailableError
from prefetcher.ports import Partition, StateStore, Streams
from prefetcher.report.shadows import ShadowHours
from prefetcher.telemetry.logs import log
from prefetcher.telemetry.metrics import Metrics
from prefetcher.wire import HintMessage, RequestMapping, read_request
from prefetcher_models.hints import Hints

__all__ = ["Controller", "ControllerOptions"]

#: Rows taken in one step: some 50 ms of work, so that stopping and planning never wait long behind a backlog.
_ROWS_A_STEP = 2_000
#: A row older than this is history: learned from, but nobody waits for it.
_FRESH_S = 30.0
#: Longer than this after the last row, time passes on its own.
_SILENCE_S = 86_400.0
#: Longest real wait for something new, so that a wake for another reason is noticed soon: people who act by hand wait for it.
_IDLE_S = 0.05
#: A hint for weights that are there or on their way changes what is kept, which may wait so long; one for others is planned for at once.
_HINT_WAITS_S = 1.0
#: Sources whose records are told to endpoints, those settled last.
_SOURCES_TOLD = 100
#: Back-off while the state store is away.
_AWAY_S = 1.0
_UNUSED = (Outcome.USELESS.value, Outcome.DISPLACED.value)


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """How a controller decides; names as in `config.DecisionSettings`. `nodes` are planned for before they report, others once they do."""

    nodes: tuple[NodeName, ...]
    price_s_per_gb_h: float
    tick_s: float
    hold_s: float
    snapshot_s: float
    batch_ratio: float = 0.5
    idle_pin_after_s: float = 86_400.0
    release_idle_pins: bool = False
    quotas: tuple[TenantQuota, ...] = ()


class Controller:
    """One controller over all nodes that report.

    `arm_of(node, now_s)` says which side of the experiment a node is on; `on_rows(node, rows, index)` hears of fresh rows of a node with
    the index of their models, these rows counted in, and `on_plan` of every plan written, both in the controller's thread. `read_request`
    makes a row of a record; `experiment` starts and stops the control group.
    """

    def __init__(
        self,
        streams: Streams,
        state: StateStore,
        learner: Learner,
        clock: Clock,
        metrics: Metrics,
        options: ControllerOptions,
        arm_of: Callable[[NodeName, float], Arm],
        on_rows: Callable[[NodeName, Sequence[RequestSeen], Mapping[str, float]], None] = lambda node, rows, index: None,
        on_plan: Callable[[NodeName], None] = lambda node: None,
        read_request: RequestMapping = read_request,
        experiment: ExperimentKeeper | None = None,
    ) -> None:
        self._streams = streams
        self._state = state
        self._learner = learner
        self._clock = clock
        self._metrics = metrics
        self._options = options
        self._arm_of = arm_of
        self._on_rows = on_rows
        self._on_plan = on_plan
        self._read_request = read_request
        self._experiment = experiment
        self._windows = WindowView(state)
        self._intake: Intake | None = None
        self._wanted: set[str] = set()
        self._nodes = Nodes(state, options.nodes)
        self._placing = Placing(self._nodes, options.price_s_per_gb_h, options.hold_s, self._ordered_for)
        self._batch = BatchWindows(state, options.batch_ratio, options.tick_s)
        self._idle = IdlePins(state, metrics, options.price_s_per_gb_h, options.idle_pin_after_s, options.release_idle_pins)
        self._past: dict[NodeName, dict[str, PastOrder]] = {}
        self._next_tick_s = -np.inf
        self._next_snapshot_s = -np.inf
        self._saved: dict[Partition, int] = {}
        self._hints = Hints()
        #: Models that a hint came for since the last plan.
        self._hinted: set[str] = set()
        #: When they are planned for at the latest.
        self._hint_due_s = np.inf
        #: float32[windows, n]: rates of next use of every model at the last tick.
        self._rates = np.zeros((len(WINDOWS_S), 0), np.float32)
        self._shadows: dict[NodeName, ShadowCaches] = {}
        #: Names of models, and how much of each one's forecast is whose, as of the last tick; None for one node alone.
        self._shares: tuple[list[str], dict[NodeName, npt.NDArray[np.float32]] | None] | None = None
        self._switched_on = True
        self._quotas = Quotas(options.quotas)
        self._refit: Refit | None = None
        self._counted: dict[tuple[str, str], int] = {}
        self.fence = 0
        self.deposed = False
        self.alive_s = -np.inf
        self._revision = 0

    def start(self, fence: int | None = None) -> None:
        """Becomes the leader and takes over what was learned; the streams are then read from there. `fence` is its term's number, else a
        new one is taken.

        Raises:
            UnavailableError: the state store does not answer.
        """
        self.fence = self._state.next_number(records.EPOCH) if fence is None else fence
        kept = [records.LEARNED, records.SHADOWS, records.HINTS, records.ROUTES, records.SWITCH]
        raw, shadows, hints, routes, switch = self._state.read_many(kept)
        self._switched_on = self._nodes.read_switch(switch).on
        self._idle.start()
        if raw is not None:
            try:
                self._learner.restore(raw)
                self._restore_shadows(shadows)
                if hints is not None:
                    self._hints = Hints.restore(msgspec.json.decode(hints))
                    if self._hints.problem:
                        log().warning("hint_classifier_not_restored", reason=self._hints.problem, then="sources' records stand meanwhile")
                if routes is not None:
                    self._nodes.restore_shares(msgspec.json.decode(routes))
                log().info("learned_restored", positions=len(self._learner.positions), rows=self._learner.traffic.rows)
            except (ValueError, KeyError, TypeError) as exc:
                log().error("snapshot_unreadable", reason=str(exc), then="learning again from the request log")
        self._metrics.learned.set(self._learner.traffic.rows)
        self._saved = dict(self._learner.positions)
        self._intake = intake = Intake(self._streams, self._learner.positions, self._clock, self._metrics, self._read_request)
        self._metrics.lag.set_function(lambda: float(intake.lag))
        now_s = self._clock.now_s()
        self._next_snapshot_s = now_s + self._options.snapshot_s

    def _restore_shadows(self, raw: bytes | None) -> None:
        if raw is None:
            return
        arrays, meta = records.unpack_arrays(raw)
        for node in map(NodeName, meta):
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
        """Plan for this `reason` as soon as what is new was taken in."""
        if reason:
            self._wanted.add(reason)

    def run(self, stop: threading.Event) -> None:
        """Steps until `stop`, then saves. Streams or a state store that are away are waited out."""
        away = False
        while not stop.is_set() and not self.deposed:
            due_s = (min(self._next_tick_s, self._hint_due_s, self._batch.due_s) - self._clock.now_s()) / self._clock.speed
            try:
                self.step(max(0.0, min(due_s, _IDLE_S)))
                away = False
            except UnavailableError as exc:
                if not away:
                    log().warning("controller_waits", reason=str(exc), then="it goes on by itself")
                away = True
                self._clock.wait(stop, _AWAY_S * self._clock.speed)
        try:
            self.save()
        except UnavailableError as exc:
            log().error(
                "snapshot_not_saved",
                reason=str(exc),
                then="the rows since the last one are learned again at the next start",
            )
        self.close()
        if self._refit is not None:
            self._refit.done.wait(2.0)

    def close(self) -> None:
        """Ends the reading of the streams."""
        if self._intake is not None:
            self._intake.close()

    def step(self, timeout_s: float = 0.0) -> bool:
        """Takes in what is new, waiting up to `timeout_s` real seconds for it, and does what is due; whether more rows wait.

        Raises:
            UnavailableError: streams or store are away. What was taken in is; what was due is due again.
        """
        assert self._intake is not None
        self.alive_s = self._clock.steady_s()
        self._mind_the_clock(self._clock.now_s())
        if self._clock.now_s() >= self._next_tick_s:
            self._wanted.add("tick")
        elif self._clock.now_s() >= self._batch.due_s:
            self._wanted.add("batch")
        if "tick" in self._wanted or not self._nodes.reports:
            # Before anything is taken in: from there to the plans nothing can fail halfway. A tick that comes while the streams are
            # waited for is the next step's.
            self._look_at_nodes()
        came = self._intake.poll(_ROWS_A_STEP, 0.0 if self._wanted else timeout_s)
        now_s = self._clock.now_s()
        tick = "tick" in self._wanted and not came.more
        if came.rows or tick:
            self._take(came, now_s)
        else:
            self._learner.positions.update(came.positions)
        for outcome in came.outcomes:
            order = outcome.order or {}
            # One that only begins goes on.
            if order.get("end_s") is not None or order.get("first_use_s") is not None:
                self.order_ended(NodeName(outcome.node), str(order.get("decision_id", "")), str(order.get("outcome", "")))
        self._take_hints(came.hints, now_s)
        if came.more:
            # A backlog is taken in before anything is planned by it; but hints don't wait for it, and what was learned is not lost.
            if "hint" in self._wanted:
                self._plan_for({"hint"})
                self._wanted.discard("hint")
            if now_s >= self._next_snapshot_s:
                self.save()
            return True
        if tick:
            self._next_tick_s = (now_s // self._options.tick_s + 1.0) * self._options.tick_s
        wanted = set(self._wanted)
        if wanted:
            self._plan_for(wanted)
            self._wanted -= wanted
        if tick and not self.deposed:
            self._tell_forecasts(now_s)
            self._idle.tell(self._nodes.names, now_s)
            self._run_experiment(now_s)
            self._nodes.shares.forget(now_s)
            self._placing.weigh_copies(dict(zip(self._learner.names, np.nan_to_num(self._rates[0]).tolist(), strict=False)))
        self._look_after_fit(now_s)
        if now_s >= self._next_snapshot_s:
            self.save()
        self._count_fallbacks()
        return False

    def _take(self, came: Came, now_s: float) -> None:
        """Learns rows, or that there were none, and lets shadow caches and nodes know."""
        pieces = _by_hour(came.rows)
        if not came.more and came.rows and now_s - max(row.ts for row in came.rows) > _SILENCE_S:
            # The silence after old rows is a piece of its own: shadow caches leave out most of a silence that rows don't come before.
            pieces.append(())
        for number, piece in enumerate(pieces, start=1):
            last = number == len(pieces)
            caught_up = last and not came.more
            taken = self._learner.take(piece, came.positions if last else {}, now_s, caught_up=caught_up)
            if taken.repeated:
                self._metrics.skipped.labels(what="request", reason="repeated_request_id").inc(taken.repeated)
            if len(taken.ticks):
                self._rates = taken.at_tick[: len(WINDOWS_S), -1]
                if caught_up:
                    self._place(now_s)
            self._let_shadows_see(taken, now_s if caught_up else -np.inf)
            self.alive_s = self._clock.steady_s()
            self._metrics.learned.set(self._learner.traffic.rows)
            self._nodes.served(taken.rows)
            for row in taken.rows:
                self._hints.saw(row.model, _nameless(row.user), row.ts)
            if not caught_up and self._refit is None:
                # History is being read, nobody waits for a plan, and what comes next is to be scored by what was before.
                self._learner.refit_now(self._learner.traffic.newest_s)
            fresh = [row for row in taken.rows if now_s - row.ts <= _FRESH_S * self._clock.speed]
            for node, rows in self._by_node(fresh).items():
                self._on_rows(node, rows, self._index_after(node, rows, now_s))
            if fresh and taken.started:
                self._wanted.add("started")

    # --- hints ---

    def _take_hints(self, messages: Sequence[HintMessage], now_s: float) -> None:
        for message in messages:
            at_s = message.ts + message.in_s
            hint = Hint(
                message.hint_id, message.model or "", message.source, message.session, message.ts, at_s, at_s + message.ttl_s,
                _nameless(message.user), message.surface, message.kind,
            )  # fmt: skip
            if message.model is None:
                found = self._hints.take_unnamed(hint, now_s, lambda model: self._home(model) is not None)
                said = next(iter(found.values()), "new" if hint.until_s > now_s else "past")
            else:
                said = self._hints.take(hint, now_s, self._forecast_per_s)
                found = {hint.model: said}
            for model, was in found.items():
                if was in ("new", "folded"):
                    self._hinted.add(model)
                    waits_s = _HINT_WAITS_S * self._clock.speed if self._is_coming(model, now_s) else 0.0
                    self._hint_due_s = min(self._hint_due_s, now_s + waits_s)
            self._metrics.hints.labels(result=said).inc()
        self._hints.book.expire(now_s)
        if now_s >= self._hint_due_s:
            self._wanted.add("hint")

    def _forecast_per_s(self, model: str) -> float:
        """The rate of next use at the last tick, over the first of the experts' windows; NaN without one."""
        number = self._learner.number(model)
        return float(self._rates[0, number]) if 0 <= number < self._rates.shape[1] else np.nan

    def _is_coming(self, model: str, now_s: float) -> bool:
        """Whether a plan would bring nothing for `model`: no node could load it a moment ago, or its home had it or has an order for it."""
        home = self._home(model)
        if home is None:
            return True
        past = self._past.get(home, {}).get(model)
        ordered = past is not None and not past.ended and now_s < past.order.deadline_s
        return ordered or not self._nodes.may_bring(home, model, now_s - _HINT_WAITS_S * self._clock.speed)

    def _home(self, model: str) -> NodeName | None:
        return self._placing.home(model)

    def _ordered_for(self, model: str) -> list[NodeName]:
        return [node for node, past in self._past.items() if (entry := past.get(model)) is not None and not entry.ended]

    def _place(self, now_s: float) -> None:
        """Spreads what hints, schedules and forecasts say is wanted soon, and is nowhere, over all nodes."""
        if len(self._nodes.reports) < 2:
            return
        within_s = WINDOWS_S[0]
        chances = -np.expm1(-np.nan_to_num(self._rates[0]) * within_s)
        wanted = dict(zip(self._learner.names, chances.tolist(), strict=False))
        for model in self._hints.book.models():
            said = self._hints.book.expected(model, now_s)
            if said is not None:
                wanted[model] = max(wanted.get(model, 0.0), said.probability)
        wanted |= dict.fromkeys(self._batch.models_soon(now_s), 1.0)
        self._placing.place(wanted)

    def _expected(self, node: NodeName, now_s: float) -> dict[str, Expected]:
        """What hints and batch schedules say about the models that this node is to bring."""
        found = {}
        for model in self._hints.book.models():
            said = self._hints.book.expected(model, now_s)
            if said is not None and self._home(model) == node:
                found[model] = said
        return self._batch.expected(node, found, now_s)

    # --- nodes and their shadow caches ---

    def _by_node(self, rows: Sequence[RequestSeen]) -> dict[NodeName, list[RequestSeen]]:
        """The rows of each node: those that name it, and those without a name whose model is at home there."""
        found: dict[NodeName, list[RequestSeen]] = {}
        for row in rows:
            node = row.node or self._home(row.model)
            if node is not None:
                found.setdefault(node, []).append(row)
        return found

    def _mind_the_clock(self, now_s: float) -> None:
        """A clock that was set back must not put off what was due by the time before."""
        if self._next_tick_s - now_s > 2.0 * self._options.tick_s:
            log().warning("clock_set_back", by_s=round(self._next_tick_s - now_s), then="planning goes on by the new time")
            self._metrics.skipped.labels(what="tick", reason="clock_set_back").inc()
            self._next_tick_s = self._next_snapshot_s = self._hint_due_s = now_s

    def _look_at_nodes(self) -> None:
        self._nodes.look(self._clock.now_s())
        self._windows.look()
        self._mind_the_fence()
        there = set(self._nodes.names)
        for node in self._shadows.keys() - there:
            # The snapshot is to have it no more either, also where nothing new is learned.
            del self._shadows[node]
            self._saved = {}
        for node in self._past.keys() - there:
            del self._past[node]
        self._placing.keep_only(there)

    def _mind_the_fence(self) -> None:
        """Agents refuse whoever has a lower fence than they saw. Where the store itself knows no higher one, it lost its memory: then the
        fence is raised above theirs; else somebody else leads.
        """
        highest = max((report.fence for report in self._nodes.reports.values()), default=0)
        if highest <= self.fence:
            return
        if int(self._state.read(records.EPOCH) or 0) >= highest:
            self.deposed = True
            return
        while self.fence <= highest:
            self.fence = self._state.next_number(records.EPOCH)
        # What was learned went with it, and is written again.
        self._saved = {}
        log().warning("fence_raised", fence=self.fence, reason="the state store lost its memory")

    def _plan_for(self, wanted: set[str]) -> None:
        """Plans every node at a tick and for what concerns all, and for a hint or a start only the nodes that it concerns."""
        nodes = self._nodes.names
        if wanted != {"hint"}:
            self._batch.look()
        self._place(self._clock.now_s())
        if wanted == {"hint"}:
            nodes = list(dict.fromkeys(home for model in sorted(self._hinted) if (home := self._home(model)) is not None))
        for node in nodes:
            self.plan(node, "tick" if "tick" in wanted else sorted(wanted)[0])
        if not self.deposed:
            self._tell_placements(self._clock.now_s())
        self._hinted.clear()
        self._hint_due_s = np.inf

    def _let_shadows_see(self, taken: Taken, until_s: float) -> None:
        """Takes every node's shadow caches through the rows that are its own."""
        homes = {model: self._home(model) for model in {row.model for row in taken.rows if row.node is None}}
        if len(taken.ticks) or self._shares is None or len(self._shares[0]) < len(self._learner.names):
            self._shares = (list(self._learner.names), self._placing.shares_at(self._learner.names))
        shares = self._shares[1]
        for node in self._nodes.reports:
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
            mine = np.array([(row.node or homes[row.model]) == node for row in taken.rows], np.bool_)
            after_row, at_tick = taken.after_row[:, mine], taken.at_tick
            if shares is not None and node in shares:
                # A model's forecast is for the requests of all nodes; each gets its own share of it.
                share = shares[node]
                after_row, at_tick = after_row * share[taken.model[mine]], at_tick * share[: at_tick.shape[2]]
            shadows.advance(taken.ts[mine], taken.model[mine], after_row, taken.ticks, at_tick, until)

    def _new_shadows(self, start_s: float) -> ShadowCaches:
        options = self._options
        return ShadowCaches(
            price_s_per_gb_h=options.price_s_per_gb_h,
            hold_s=options.hold_s,
            tick_s=options.tick_s,
            start_s=start_s,
        )

    def _tell_catalog(self, node: NodeName) -> None:
        """The node's shadow caches serve what the node does, with as much memory, at its link's measured speed."""
        shadows, report = self._shadows.get(node), self._nodes.reports[node]
        if shadows is None:
            return
        known = [(self._learner.number(k.model), float(max(k.bytes, 1)), max(k.load_s, 1e-6)) for k in report.known]
        served = [entry for entry in known if entry[0] >= 0]
        numbers, sizes, link_s = (np.array([entry[i] for entry in served]) for i in range(3))
        shadows.serve(numbers.astype(np.int64), sizes.astype(float), link_s.astype(float), float(report.memory.budget_bytes))
        windows = self._windows_of(report)
        seen = np.array([number >= 0 for number, _, _ in known], np.bool_)
        shadows.bound(numbers.astype(np.int64), None if windows is None else WindowTable(*(column[seen] for column in windows)))

    def _windows_of(self, report: records.NodeReport) -> WindowTable | None:
        """The window of each model that a node knows; None while none has one of its own."""
        view = self._windows
        return None if view.is_plain else view.book.windows_of(view.facts([(k.model, float(k.bytes)) for k in report.known]))

    def _worth(self, report: records.NodeReport, now_s: float, expected: Mapping[str, Expected]) -> tuple[Outlook, Worth]:
        node = NodeName(report.node)
        shadows = self._shadows.get(node)
        if shadows is None:
            shadows = self._new_shadows(now_s)
        shares = None if self._shares is None or self._shares[1] is None else self._shares[1].get(node)
        outlook = shadows.outlook(now_s, None if shares is None else shares > ELSEWHERE)
        numbers = np.array([self._learner.number(k.model) for k in report.known], np.int64)
        # A model that was asked for since the catalog was told is not in the outlook yet.
        numbers[numbers >= len(outlook.keep_per_s)] = -1
        return outlook, worth_of(report, outlook, numbers, shadows.shadow_holds(), expected)

    def _index_after(self, node: NodeName, rows: Sequence[RequestSeen], now_s: float) -> dict[str, float]:
        """The index of each model of a node's `rows`, with these rows counted in: scores are refreshed before they are compared."""
        report = self._nodes.reports.get(node)
        if not self._switched_on or report is None:
            return {}
        asked = {row.model for row in rows}
        of = msgspec.structs.replace(report, known=tuple(k for k in report.known if k.model in asked))
        _, worth = self._worth(of, now_s, self._expected(node, now_s))
        return {k.model: float(worth.keep[i]) for i, k in enumerate(of.known)}

    def _run_experiment(self, now_s: float) -> None:
        """Nodes that only observe have nothing to leave out."""
        if self._experiment is not None:
            observing = {node for node, report in self._nodes.reports.items() if report.observe}
            able = [node for node in self._nodes.names if node not in observing]
            self._experiment.tick(now_s, self.fence, able, self._shadows)

    def _tell_forecasts(self, now_s: float) -> None:
        """How likely every model is used soon, for endpoints: P(T ≤ W) of a rate h that holds for W is 1 − exp(−h·W)."""
        windows_s = np.array(WINDOWS_S)[:, None]
        order = np.argsort(windows_s[:, 0])
        chance = -np.expm1(-np.nan_to_num(self._rates) * windows_s)[order].T
        models = {name: tuple(p) for name, p in zip(self._learner.names, chance.round(4).tolist(), strict=False)}
        until_s = now_s + 2.0 * self._options.tick_s
        likely = {place: tuple(found) for place, found in self._hints.spread.places().items()}
        known = self._hints.book.sources()[:_SOURCES_TOLD]
        sources = tuple(records.HintSource(s.source, s.kept, s.broken, round(s.weight, 4)) for s in known)
        told = records.encode(records.Forecasts(now_s, until_s, models, likely, sources, self._hints.classifier.stands))
        self._state.write({records.FORECASTS: told}, expire_s=2.0 * self._options.tick_s / self._clock.speed)

    def _tell_placements(self, now_s: float) -> None:
        """Where routers may send what, for endpoints."""
        until_s = now_s + 2.0 * self._options.tick_s
        told = records.encode(self._placing.told(now_s, until_s))
        self._state.write({records.PLACEMENTS: told}, expire_s=2.0 * self._options.tick_s / self._clock.speed)

    def plan(self, node: NodeName, trigger: str) -> Planned | None:
        """Makes and writes one node's plan; None while the node reports nothing, or when another controller leads."""
        started_s = self._clock.steady_s()
        raw, switch_raw, pins_raw = self._state.read_many([records.node_key(node, "report"), records.SWITCH, records.PINS])
        if raw is None:
            self._metrics.skipped.labels(what="plan", reason="node_silent").inc()
            return None
        now_s = self._clock.now_s()
        report = self._nodes.take(node, raw, now_s)
        if report is None:
            self._metrics.skipped.labels(what="plan", reason="report_unreadable").inc()
            return None
        switch, pins = self._nodes.read_switch(switch_raw), self._nodes.read_pins(pins_raw)
        past = self._past.setdefault(node, {})
        self._close_past(past, report, now_s)
        self._revision += 1
        self._switched_on = switch.on
        batch = self._batch.at(node, report, lambda model: self._home(model) == node, now_s)
        expected = self._expected(node, now_s)
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
            why=self._learner.why,
            new_id=lambda: DecisionId(uuid.uuid4().hex[:16]),
            expected=expected,
            announced=self._hints.book.announced.of,
            batch=batch,
            windows=self._windows_of(report),
            quotas=self._quotas,
        )
        self._tell_catalog(node)
        outlook, worth = self._worth(report, now_s, expected)
        planned = make_plan(report, outlook, worth, given)
        self._idle.look(node, report, worth.keep, pins, now_s)
        shadows = self._shadows.get(node)
        costs_s, shadow_wait_s = ({}, 0.0) if shadows is None else (shadows.costs_s, shadows.shadow_wait_s)
        learner = self._learner
        decides = records.Decides(outlook.expert, now_s, costs_s, shadow_wait_s, learner.traffic.rows, learner.predictor_states())
        items = {records.node_key(node, "plan"): records.encode(planned.plan), records.node_key(node, "decides"): records.encode(decides)}
        items[records.node_key(node, "shadow-hours")] = records.encode(ShadowHours({} if shadows is None else shadows.shadow_hours))
        if not self._state.write_fenced(records.node_key(node, "fence"), self.fence, items):
            self.deposed = True
            log().error("controller_deposed", fence=self.fence, reason="another controller leads")
            return None
        self._placing.planned(report, {str(w.key.model): w.index for w in planned.plan.desired})
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
        of_hints = {("hints", reason): count for reason, count in self._hints.classifier.fallbacks.items()}
        for key, count in {**self._learner.fallback_counts(), **of_hints}.items():
            # A copy that was fitted meanwhile knows fewer of them.
            new = max(0, count - self._counted.get(key, 0))
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
        if self.deposed or self._intake is None:
            return
        if self._learner.positions == self._saved and self._state.read(records.FENCE) is not None:
            # Nothing is new, and the store still has it.
            return
        arrays: dict[str, np.ndarray] = {}
        facts = {}
        for node, shadows in self._shadows.items():
            mine, facts[str(node)] = shadows.snapshot()
            arrays |= {f"{node}/{name}": array for name, array in mine.items()}
        learned = {
            records.LEARNED: self._learner.snapshot(),
            records.SHADOWS: records.pack_arrays(arrays, facts),
            records.HINTS: records.encode(self._hints.snapshot()),
            records.ROUTES: records.encode(self._nodes.shares.snapshot()),
        }
        if self._state.write_fenced(records.FENCE, self.fence, learned):
            self._saved = dict(self._learner.positions)
            self._metrics.snapshots.inc()
            self._intake.done(self._saved)
        else:
            self.deposed = True


def _nameless(user: str | None) -> str | None:
    """Who it was, told apart from others but not by name: what writes hints straight into the stream may not have hashed it."""
    return None if user is None else hashlib.blake2b(user.encode(), digest_size=8).hexdigest()


def _by_hour(rows: Sequence[RequestSeen]) -> list[Sequence[RequestSeen]]:
    """The rows cut where an hour of the log begins, at least one piece: history is learned from hour by hour, as it would have been."""
    cuts, newest_s = [], -np.inf
    for i, row in enumerate(rows):
        if i and row.ts // 3600.0 > newest_s // 3600.0:
            cuts.append(i)
        newest_s = max(newest_s, row.ts)
    return [rows[start:end] for start, end in itertools.pairwise([0, *cuts, len(rows)])]

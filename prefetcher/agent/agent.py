"""The node agent: one thread owns the residency machine, hears everything as events, and has its instructions carried out.

Wires the machine to the loader and the host memory (`agent.moves`), to the lease socket, and by `agent.state_link` to the state store:
plans come from there, its report goes there, and what it needs to go on after a crash. It waits for none of them, and its timers are its
own: what nobody uses leaves also when controller and store are gone.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefetcher.agent import client, protocol
from prefetcher.agent.disk import DiskTier
from prefetcher.agent.fetched import FetchedFolder
from prefetcher.agent.fetching import Fetches, StoreOptions
from prefetcher.agent.hostfolder import LockPolicy
from prefetcher.agent.hostmem import HostArena
from prefetcher.agent.kept import Kept, Snapshot
from prefetcher.agent.lease_desk import LeaseDesk
from prefetcher.agent.lease_server import LeaseServer
from prefetcher.agent.manifest import ModelSource
from prefetcher.agent.model_sources import Look, ModelSources
from prefetcher.agent.moves import Moves
from prefetcher.agent.name_lease import NameLease
from prefetcher.agent.orderbook import OrderBook
from prefetcher.agent.paths import ServedPaths
from prefetcher.agent.pulls import Pulls
from prefetcher.agent.report import LinkMeter, make_report
from prefetcher.agent.state_link import StateLink
from prefetcher.agent.store_catalog import StoreCatalog
from prefetcher.agent.sums import Told
from prefetcher.agent.uses import Unknown, Uses
from prefetcher.agent.waits import Waits
from prefetcher.clock import Clock
from prefetcher.controller import records
from prefetcher.core import events as ev
from prefetcher.core.block_sums import BlockSums
from prefetcher.core.copies import NodeLimits
from prefetcher.core.facts import RowSeen, RowServed, TransferEnded
from prefetcher.core.residency import ResidencyMachine
from prefetcher.core.types import Arm, Cause, ModelName, NodeName, Plan, RequestSeen, Tier, WeightsKey
from prefetcher.core.value import price_per_byte_s
from prefetcher.errors import (
    PrefetcherError,
    UnavailableError,
    shortened,
)
from prefetcher.ports import Acted, StateStore, WeightsStore
from prefetcher.telemetry.logs import log
from prefetcher.telemetry.metrics import Metrics

__all__ = ["Agent", "AgentOptions"]

#: Real seconds between looks at timers, and between reports without a change.
_TICK_S = 0.1
_REPORT_S = 1.0
#: Real seconds without a report after which a node is not taken to have been there.
_AWAY_S = 30.0
#: An act by hand is answered by the machine at once; longer means that the loop hangs.
_ANSWER_S = 10.0
#: What a person loads by hand stays an hour unused.
_BY_HAND_HOLD_S = 3600.0
#: Models that are asked for and not there: so many are named in the log, each once.
_LOGGED_UNKNOWN = 100


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """One node's weights and memory; names as in `config.NodeSettings`.

    `prefetch_bytes_per_s` caps what prefetches read, so that a slow disk stays free for others; None: as fast as the disk gives.
    """

    node: NodeName
    models_dir: Path
    host_bytes: int
    state_dir: Path
    host_dir: Path | None = None
    paths_dir: Path | None = None
    lock: LockPolicy = "auto"
    link_bytes_per_s: float = 3.5e9
    socket: Path | None = None
    observe: bool = False
    hold_s: float = 600.0
    price_s_per_gb_h: float = 0.002
    threads: int = 4
    prefetch_bytes_per_s: float | None = None
    parts: bool = True
    seed: int = 0
    group: str = ""
    reserve_bytes: int = 0
    store: StoreOptions = field(default_factory=StoreOptions)


class Agent:
    """One node. `start` brings it up or raises; `close` ends it and gives all memory back. Other methods are safe for threads.

    Who builds it may set, before rows come: `on_unannounced(row)`, told of every open that no request row came before, as a row (it comes
    back by `requested`, if it does, without counting twice); `arm_of(now_s)`, the node's side of the experiment; `on_died(part, error)`,
    told when the loop fails and the agent is of no use any more. All are called in the agent's loop and must be quick; but for
    `tell(snapshot, last)`, which sends on what a snapshot has to tell, in the thread of the state store, and raises TemporaryError where it
    can't.
    """

    def __init__(self, options: AgentOptions, state: StateStore, clock: Clock, metrics: Metrics, store: WeightsStore | None = None) -> None:
        self._options = options
        self._state = state
        self._clock = clock
        self._metrics = metrics
        self._inbox: queue.SimpleQueue[ev.Event | Callable[[], None]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._waits = Waits(self._stop)
        self._loop: threading.Thread | None = None
        self._scanner: threading.Thread | None = None
        self._server: LeaseServer | None = None
        self._disk = DiskTier(options.state_dir / "quarantine.json")
        self._sources = ModelSources(options.models_dir, options.host_bytes, options.link_bytes_per_s, self._disk, clock)
        self._fetches = None if store is None else self._make_fetches(store)
        self._sources.fetches = self._fetches
        self._store_meter = LinkMeter(options.store.bytes_per_s, clock.now_s())
        self._book = OrderBook()
        self._uses = Uses(options.node, clock.speed)
        self._meter = LinkMeter(options.link_bytes_per_s, clock.now_s())
        self._reported_at_s = -1e18
        self._changed = True
        self._load_started: dict[WeightsKey, float] = {}
        self._unknown = Unknown()
        self._unknown_logged = 0
        #: Why models were evicted or bypassed last.
        self._left: dict[ModelName, str] = {}
        self.on_unannounced: Callable[[RequestSeen], None] = lambda row: None
        self.arm_of: Callable[[float], Arm] = lambda now_s: Arm.TREATED
        self._blocks = BlockSums(lambda now_s: self.arm_of(now_s), gap_s=_AWAY_S * clock.speed)
        self.on_died: Callable[[str, BaseException], None] = lambda part, error: None
        self.tell: Callable[[Snapshot, bool], None] = lambda snapshot, last: None
        self._arena: HostArena | None = None
        self._paths = None if options.paths_dir is None else ServedPaths(options.paths_dir)
        self._machine = ResidencyMachine(
            options.node,
            NodeLimits(
                budget_bytes={Tier.HOST: options.host_bytes},
                reserve_bytes={Tier.HOST: options.reserve_bytes},
                link_bytes_per_s=options.link_bytes_per_s,
                adopted_hold_s=options.hold_s,
                observe=options.observe,
                parts=options.parts,
            ).on_clock(clock.speed),
            seed=options.seed,
        )
        told = Told(options.node, clock.now_s())
        self._kept = Kept(clock, self._machine, self._book, self._uses, self._meter, told, self._blocks)
        self._lease = NameLease(state, options.node, options.state_dir, clock)
        self._link = StateLink(
            state,
            options.node,
            clock,
            on_plan=self._plan_read,
            on_kept=self._kept_settled,
            on_died=lambda exc: self.on_died("agent", exc),
            on_switch=self._switched,
            tell=lambda snapshot, last: self.tell(snapshot, last),
            group=options.group,
            lease=self._lease,
        )

    # --- life ---

    def start(self) -> None:
        """Takes the memory, goes on from what an earlier agent wrote and adopts what it left, listens for leases.

        Raises:
            UnavailableError: the state store does not answer.
            BudgetError, LockLimitError, UsageError: as the host memory says, or another agent of this name runs; nothing is left behind.
            ModelNotFoundError: no folder of models.
        """
        options = self._options
        self._lease.take()
        if self._paths is not None:
            self._paths.open(options.models_dir)
        self._arena = HostArena(
            options.host_bytes, folder=options.host_dir, lock=options.lock, name=options.node, with_path=self._paths is not None
        )
        self._moves = Moves(
            self._arena,
            self._disk,
            self._clock,
            options.threads,
            self._post,
            self._sources.source,
            options.prefetch_bytes_per_s,
            self._paths,
        )
        if self._arena.lock_warning:
            log().warning("not_locked", reason=self._arena.lock_warning)
        if self._fetches is not None:
            # Parts of what the store had last are kept: it may be away just now.
            self._fetches.folder.open({model.key for model in self._fetches.catalog.found.models.values()} or None)
        look = self._sources.look(at_store=True)
        if self._paths is not None:
            self._paths.take(look.sources())
        adopted = self._adopt(look.sources())
        if adopted:
            log().info("adopted", models=sorted(key.model for key in adopted))
        self._go_on(look, adopted)
        path = options.socket or protocol.default_socket_path()
        self._server = LeaseServer(path, self._desk(self._arena))
        self._server.start()
        self.socket_path = path
        self._loop = threading.Thread(target=self._run_or_end, name="agent")
        self._loop.start()
        self._scanner = threading.Thread(target=self._sources.run, args=(self._stop, self._post, self._take_look), name="catalog")
        self._scanner.start()
        self._link.start()

    def _adopt(self, sources: Mapping[ModelName, ModelSource]) -> set[WeightsKey]:
        assert self._arena is not None
        copies = self._arena.adopt(sources)
        if self._paths is not None:
            for copy in copies:
                self._paths.in_host(sources[copy.key.model], self._arena.paths(copy))
        return {copy.key for copy in copies}

    def _desk(self, arena: HostArena) -> LeaseDesk:
        return LeaseDesk(
            self._waits,
            self._post,
            self._lease_asked,
            self.act,
            self._machine.holdings,
            self._sources,
            self._disk,
            arena,
            self._paths,
            self._fetches,
            self._metrics,
            self._clock,
        )

    def _make_fetches(self, store: WeightsStore) -> Fetches:
        options = self._options
        pulls = Pulls(self._state, options.node, self._clock, options.store.pulls_per_model, options.store.pulls)
        return Fetches(
            StoreCatalog(store, options.state_dir),
            FetchedFolder(options.models_dir),
            pulls,
            options.store,
            self._clock,
            self._post,
            self._sources.was_fetched,
            self._sources.look_again,
            self._metrics,
            lambda: self._machine.holdings.used_bytes[Tier.DISK],
        )

    def _go_on(self, look: Look, adopted: Iterable[WeightsKey]) -> None:
        """Takes over what the last agent of this node wrote, then what is there now: memory, weights, the switch, pins."""
        group, node = records.group_key(self._options.group, "switch"), records.node_key(self._options.node, "switch")
        *switches, pins, fence = self._state.read_many([records.SWITCH, group, node, records.PINS, records.FENCE])
        self._kept.restore(self._state)
        # A node that was forgotten, or is new, knows no fence: whoever led before the last leader is refused all the same.
        self._machine.plans.heard_of(_number_of(fence))
        switch = self._last_switch(switches)
        self._machine.links.price_per_byte_s = price_per_byte_s(self._options.price_s_per_gb_h)
        self._machine.plans.switched_off = not switch.on
        self._machine.holdings.observing = self._options.observe or (switch.on and switch.observe)
        kept = frozenset((key, Tier.HOST) for key in adopted)
        self._hear(ev.AgentRestarted(kept, frozenset(look.keys())))
        self._take_look(look, set(adopted))
        self._hear(_switch_event(switch))
        by_hand = {key.model for key, weights in self._machine.holdings.weights.items() if weights.pinned_by_hand}
        pinned = self._last_pins(pins, by_hand)
        for model in sorted(by_hand - pinned):
            self._hear(ev.Unpinned(model))
        for model in sorted(pinned - by_hand):
            self._hear(ev.Pinned(model))

    def _last_switch(self, raw: Sequence[bytes | None]) -> records.Switch:
        """What the switches say; where one can't be read, what this node heard last, or off if it remembers nothing."""
        try:
            return records.strictest(raw)
        except ValueError as exc:
            log().error("switch_unreadable", reason=str(exc), then="the last one stands; set it again with `prefetcher on` or `off`")
            remembers = bool(self._machine.holdings.weights)
            return records.Switch(remembers and not self._machine.plans.switched_off, observe=self._machine.holdings.observing)

    def _last_pins(self, raw: bytes | None, by_hand: Iterable[ModelName]) -> set[ModelName]:
        """The pins; where they can't be read, what was pinned `by_hand` here already."""
        try:
            return {ModelName(model) for model in records.decode_pins(raw)}
        except ValueError as exc:
            log().error("pins_unreadable", reason=str(exc), then="what is pinned stays so; pin again what else is to stay")
            return set(by_hand)

    def close(self) -> None:
        """Ends leases, loads and the loop, and gives the memory back."""
        if self._server is not None:
            self._server.stop()
        self._stop.set()
        for thread in (self._scanner, self._loop):
            if thread is not None:
                thread.join()
        last = None if self._loop is None else self._kept.snapshot(self._totals(), self.arm_of(self._clock.now_s()), last=True)
        if self._loop is None:
            with contextlib.suppress(UnavailableError):
                self._lease.drop()
        if not self._link.close(last):
            log().error(
                "ledger_not_saved",
                reason="the state store did not take it in time",
                then="what happened since the last write is not counted",
            )
        if self._fetches is not None:
            self._fetches.close()
        if self._arena is not None:
            self._moves.close()
        if self._paths is not None:
            self._paths.close()
        if self._arena is not None:
            self._arena.close()

    # --- the loop ---

    def _post(self, event: ev.Event | Callable[[], None]) -> None:
        self._inbox.put(event)

    def _run_or_end(self) -> None:
        try:
            self._run()
        except BaseException as exc:
            self.on_died("agent", exc)
            raise

    def _run(self) -> None:
        due_s = self._clock_real()
        while not self._stop.is_set():
            try:
                item = self._inbox.get(timeout=_TICK_S)
            except queue.Empty:
                item = None
            if callable(item):
                item()
            elif item is not None:
                self._hear(item)
            if self._clock_real() >= due_s:
                due_s = self._clock_real() + _TICK_S
                self._moves.collect()
                self._hear(ev.Ticked())
                self._announce()
            self._tell_state()
        self._waits.end()

    def _clock_real(self) -> float:
        """Real seconds, also where the clock runs faster."""
        return self._clock.steady_s() / self._clock.speed

    def _hear(self, event: ev.Event) -> None:
        now_s = self._clock.now_s()
        if isinstance(event, ev.Requested | ev.LeaseRequested):
            self._tell_progress(now_s)
        out = self._machine.handle(event, now_s)
        if out:
            self._changed = True
        if out or not isinstance(event, ev.Ticked):
            self._kept.changed = True
        for told in out:
            self._do(told, event)
        match event:
            case ev.Requested() | ev.LeaseRequested():
                self._hurry(event.target)
            case ev.LoadPaused():
                self._gave_way(event)
            case ev.WeightsEvicted():
                self._load_started.pop(event.key, None)
        self._book.take_changed()

    def _tell_progress(self, now_s: float) -> None:
        """How far the load on the link is: whether it gives way to what comes depends on it."""
        key = self._machine.holdings.mover.get(Tier.HOST)
        if key is not None:
            self._machine.handle(ev.BytesVerified(key, Tier.HOST, self._moves.done_bytes(key)), now_s)

    def _gave_way(self, event: ev.LoadPaused) -> None:
        weights = self._machine.holdings.weights.get(event.key)
        copy = None if weights is None else weights.copies.get(event.tier)
        if copy is not None and copy.yields:
            self._metrics.yields.inc()

    def _hurry(self, target: ev.Target) -> None:
        weights = self._machine.holdings.resolve(target)
        if weights is not None and weights.demanded and self._machine.holdings.mover.get(Tier.HOST) == weights.key:
            self._moves.hurry(weights.key)
        elif weights is not None and weights.demanded and self._fetches is not None:
            self._fetches.hurry(weights.key)

    def _announce(self) -> None:
        for row in self._uses.overdue(self._clock.now_s(), self._rows_waiting):
            self._kept.changed = True
            try:
                self.on_unannounced(row)
            except PrefetcherError as exc:
                log().warning("open_not_announced", model=row.model, reason=str(exc), then="it is not learned from")

    def _rows_waiting(self, model: ModelName) -> int:
        weights = self._machine.holdings.resolve(model)
        return 0 if weights is None else len(weights.rows)

    def _do(self, told: ev.Instruction, event: ev.Event) -> None:
        match told:
            case ev.LoadWeights(to_tier=tier) | ev.PauseLoad(tier=tier) | ev.CancelLoad(tier=tier) | ev.EvictWeights(tier=tier) if (
                tier <= Tier.DISK and self._fetches is not None
            ):
                self._fetches.carry_out(told, demanded=self._machine.holdings.weights[told.key].demanded)
            case ev.LoadWeights():
                weights = self._machine.holdings.weights[told.key]
                if not (told.resumed and weights.copies[told.to_tier].yields):
                    self._meter.starting(weights, self._machine.holdings, self._clock.now_s())
                self._load_started.setdefault(told.key, self._clock.steady_s())
                if not told.resumed:
                    self._metrics.kept.inc(told.resume_from_bytes)
                log().info("load_started", model=told.key.model, cause=told.cause.value, bytes=told.bytes, from_byte=told.resume_from_bytes)
                self._moves.start(told)
                if weights.demanded:
                    self._moves.hurry(told.key)
            case ev.PauseLoad():
                if told.to is not None:
                    log().info("load_gives_way", model=told.key.model, to=told.to.model)
                self._moves.pause(told.key)
            case ev.CancelLoad():
                self._moves.evict(told.key, told.tier)
            case ev.EvictWeights():
                where, reason = told.tier.name.lower(), told.reason.value
                log().info("evicting", model=told.key.model, tier=where, reason=reason, keep_bytes=told.keep_bytes)
                self._left[told.key.model] = reason
                self._moves.evict(told.key, told.tier, told.keep_bytes)
            case ev.GrantLease() | ev.RefuseLease():
                self._waits.answer(told.token, told)
            case ev.Answer():
                self._waits.answer(told.ask_id, told)
            case ev.Record():
                self._record(told, event)
            case ev.NoteSkipped():
                self._metrics.skipped.labels(what=told.what, reason=told.reason).inc()
            case ev.RefuseOrder():
                self._metrics.skipped.labels(what="order", reason=told.reason).inc()
            case ev.RefusePlan():
                self._metrics.skipped.labels(what="plan", reason=told.reason).inc()
            case ev.SwitchVersion():
                log().info("version_switched", model=told.model, old=told.old.version, new=told.new.version)
                if self._paths is not None:
                    self._paths.serve(told.model, told.new)
        if isinstance(event, ev.WeightsLoaded | ev.LoadFailed) and event.tier > Tier.DISK:
            self._load_ended(event)

    def _load_ended(self, event: ev.WeightsLoaded | ev.LoadFailed) -> None:
        started_s = self._load_started.pop(event.key, None)
        if started_s is None:
            return
        weights = self._machine.holdings.weights[event.key]
        copy = weights.copies.get(event.tier)
        cause = copy.cause.value if copy is not None else "unknown"
        ok = isinstance(event, ev.WeightsLoaded)
        self._metrics.loads.labels(cause=cause, result="ready" if ok else "failed").inc()
        took_s = self._clock.steady_s() - started_s
        if ok:
            self._metrics.load_time.observe(took_s)
            log().info("load_ready", model=event.key.model, cause=cause, took_s=round(took_s, 3))

    def _record(self, told: ev.Record, event: ev.Event) -> None:
        fact = told.fact
        self._blocks.add(fact)
        for settled in self._book.add(fact, self.arm_of(self._clock.now_s())):
            if settled.order.cause is not Cause.MANUAL:
                self._metrics.outcomes.labels(outcome=settled.outcome.value).inc()
        if isinstance(fact, RowSeen) and isinstance(event, ev.LeaseRequested):
            self._metrics.opens.labels(found=fact.found.value).inc()
            wait = self._waits.of(event.token)
            if wait is not None:
                wait.found = fact.found.value
        elif isinstance(fact, RowServed) and fact.is_row:
            self._metrics.waits.observe(max(0.0, fact.wait_s))
            if fact.bypass:
                self._left[fact.model] = "bypass"
        elif isinstance(fact, TransferEnded):
            fetched = fact.to_tier <= Tier.DISK
            (self._metrics.fetched if fetched else self._metrics.moved).labels(cause=fact.cause.value).inc(fact.bytes)
            (self._store_meter if fetched else self._meter).moved(fact)

    # --- plans and reports ---

    def plan_written(self) -> None:
        """The controller wrote a plan, or the switch was moved."""
        self._link.look()

    def _switched(self, switch: records.Switch) -> None:
        log().info("switched", mode=switch.mode, by=switch.by)
        self._post(_switch_event(switch))

    def _plan_read(self, raw: bytes) -> None:
        try:
            plan = records.decode_plan(raw)
        except ValueError as exc:
            self._metrics.skipped.labels(what="plan", reason="unreadable").inc()
            log().error("plan_unreadable", reason=str(exc), then="the last plan goes on")
            return
        self._post(lambda: self._take_plan(plan))

    def _take_plan(self, plan: Plan) -> None:
        if (plan.fence, plan.revision) > (self._machine.plans.fence, self._machine.plans.revision):
            self._hear(ev.PlanReceived(plan))

    def _kept_settled(self, snapshot: Snapshot, written: bool) -> None:
        self._post(lambda: self._kept.settle(snapshot, written))

    def _tell_state(self) -> None:
        now_s = self._clock_real()
        passed_s = now_s - self._reported_at_s
        if passed_s >= _REPORT_S or (self._changed and passed_s >= _TICK_S and not self._link.away):
            self._reported_at_s, self._changed = now_s, False
            self._report()
            if self._kept.is_due() and not self._link.away:
                self._link.keep(self._kept.snapshot(self._totals(), self.arm_of(self._clock.now_s())))

    def _report(self) -> None:
        assert self._arena is not None
        now_s, problems = self._clock.now_s(), self._problems()
        self._blocks.note(now_s, not self._machine.plans.switched_off and not self._machine.holdings.observing)
        group = self._options.group
        store = None if self._fetches is None else (self._store_meter.bytes_per_s, self._fetches)
        report = make_report(self._machine, self._meter, self._arena, self._moves, now_s, problems, self._left, self._unknown, group, store)
        totals = self._totals()
        self._link.show(records.encode(report), records.encode(totals) if self._kept.all_written else None)
        usage = self._arena.usage()
        for use in ("budget", "loading", "published", "part", "lingering", "locked", "allocated"):
            self._metrics.host.labels(use=use).set(getattr(usage, f"{use}_bytes"))
        self._metrics.idle.set(totals["idle_byte_seconds"])
        self._metrics.wasted.set(totals["wasted_byte_seconds"])
        self._metrics.locked.set(1.0 if report.memory.locked else 0.0)

    def _totals(self) -> dict[str, Any]:
        now_s = self._clock.now_s()
        return self._book.totals(self._machine.held(now_s), self.arm_of(now_s))

    def _problems(self) -> list[str]:
        return [*self._sources.problems(), *(self._paths.problems() if self._paths is not None else ())]

    # --- the models folder and the store ---

    def _take_look(self, look: Look, adopted: Set[WeightsKey] = frozenset()) -> None:
        self._sources.take(look, adopted, self._machine.holdings, self._hear)
        if self._paths is not None:
            self._paths.take(look.sources())
            for model, key in self._machine.holdings.serving.items():
                self._paths.serve(model, key)
        self._unknown.forget(self._sources.names())
        self._changed = True

    # --- requests and acts by hand ---

    def requested(self, rows: Sequence[RequestSeen], index: Mapping[str, float] | None = None) -> None:
        """Fresh request rows: those of this node, or of no named one, are demand here.

        `index` is by model what a held byte of its weights saves, in seconds of waiting a second, with these rows counted in; a model that
        nothing is known of is not in it, or has 0 there, and is ranked by its last use.
        """
        mine = [row for row in rows if row.node is None or row.node == self._options.node]
        if mine:
            self._post(lambda: self._take_rows(mine, index or {}))

    def _take_rows(self, rows: Sequence[RequestSeen], index: Mapping[str, float]) -> None:
        for row in rows:
            new = self._uses.row(row, self._clock.now_s())
            if new and row.model not in self._machine.holdings.serving:
                self._asked_for_unknown(row.model)
            known = index.get(row.model, 0.0)
            at_s, index_of = min(row.ts, self._clock.now_s()), known if known > 0.0 else None
            self._hear(ev.Requested(row.model, at_s, index_of, counted=not new, tenant=row.tenant or ""))

    def _asked_for_unknown(self, model: ModelName) -> None:
        if self._unknown.add(model) and self._unknown_logged < _LOGGED_UNKNOWN:
            self._unknown_logged += 1
            then = f"its requests are learned from, and nothing is loaded: it is not in {self._options.models_dir}"
            log().warning("unknown_model", model=shortened(model), then=then)

    def act(self, act: str, model: str) -> Acted:
        target = ModelName(model)
        ask_id = uuid.uuid4().hex
        event: ev.Event
        match act:
            case "pin":
                event = ev.Pinned(target, ask_id)
            case "unpin":
                event = ev.Unpinned(target, ask_id)
            case "load":
                event = ev.LoadAsked(target, ask_id, hold_s=_BY_HAND_HOLD_S)
            case _:
                event = ev.EvictAsked(target, ask_id)
        wait = self._waits.ask(ask_id, lambda: self._post(event), _ANSWER_S)
        if wait.answer is None:
            raise UnavailableError(f"node {self._options.node} did not answer within {_ANSWER_S:.0f} s", retry_after_s=5.0)
        return Acted(wait.answer.ok, wait.answer.reason)

    def switch(self, on: bool) -> None:
        """The switch was moved: the node looks at what all that concern it say."""
        self._link.look()

    def check(self) -> str:
        """'' when a question through the lease socket comes back, else what is wrong."""
        try:
            client.ask("status", timeout_s=5.0, socket_path=self.socket_path)
        except PrefetcherError as exc:
            return str(exc)
        return ""

    def _lease_asked(self, holder: str, model: ModelName, target: ev.Target) -> None:
        announced = model not in self._machine.holdings.serving or self._uses.open(model, self._clock.now_s())
        self._hear(ev.LeaseRequested(holder, target, holder, announced))


def _number_of(raw: bytes | None) -> int:
    return int(raw) if raw is not None and raw.isdigit() else -1


def _switch_event(switch: records.Switch) -> ev.Event:
    return ev.SwitchedOn(switch.observe) if switch.on else ev.SwitchedOff()

"""A replay on several nodes with tiers: all nodes go through the log together, rivals and ours alike.

Rivals send a row to the node that it names, else to its model's by rendezvous hashing; each tier of a node is a cache of theirs. Ours
places rows by the rule of live placement (`core.cluster_routing`). The kernels are in `core.cluster_steps`; the default tiers need none of
this (`replay.run`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from prefetcher.core.cluster import ClusterCaches, ClusterWorld, new_cluster_caches, new_cluster_log
from prefetcher.core.cluster_run import finish_cluster, run_cluster
from prefetcher.core.cluster_steps import advance_cluster, settle_cluster
from prefetcher.core.compiled import is_compiled
from prefetcher.core.demand import STANDARD_TAUS_S, new_demand
from prefetcher.core.experts import EXPERTS, PERIOD_S, VARIANTS, expert_policies, without_prefetch
from prefetcher.core.hedge import Hedge
from prefetcher.core.node import BLOCK_BYTES, EventLog, Hazard, Policy, no_hazard, set_policy
from prefetcher.core.rendezvous import by_rendezvous
from prefetcher.core.value import price_per_byte_s
from prefetcher.replay.accounts import PolicyLogs, totals
from prefetcher.replay.engine import TICK_S, next_rows
from prefetcher.replay.frontier import FrontierPoint
from prefetcher.replay.log_tables import coded, orders_table, redundant_orders, residency_table, transfers_table, waits_table
from prefetcher.replay.ours import RateBlock, computed_ahead, score_blocks
from prefetcher.replay.policies import OURS, check_one_tier, parse_policy, standard_taus
from prefetcher.replay.run import Ours, Simulation
from prefetcher.replay.tiers import MEMORY, Stack
from prefetcher.replay.trace import Trace

__all__ = ["CLUSTER_EXPERTS", "ClusterSimulation", "compiled_for_tiers"]

#: The experts that ours chooses among: each is a whole cluster. Those left out differ from one of these by a window or a decay.
CLUSTER_EXPERTS = ("hazard-prefetch", "hazard", "hazard-mix-prefetch", "lhd", "mix", "lfu-1d")
#: How placement weighs: seconds for which what a load displaces counts, and how often a second what is covered by another copy loses it.
PLACE = (600.0, 1.0 / 3600.0)


def compiled_for_tiers() -> bool:
    """Whether the kernels of a cluster are compiled for this machine; else the first replay with tiers compiles them."""
    return is_compiled(advance_cluster)


class ClusterSimulation(Simulation):
    """One trace on nodes with tiers; otherwise as `Simulation`, and `capacity_bytes` is each node's host tier.

    `device_price` is what a GB held for an hour in the device tier is worth (seconds; as `price` unless given), `experts` name those that
    ours chooses among.
    """

    def __init__(
        self,
        trace: Trace,
        stack: Stack,
        *,
        nodes: int = 1,
        device_price: float | None = None,
        experts: Sequence[str] = CLUSTER_EXPERTS,
        place: tuple[float, float] = PLACE,
        load_s: npt.NDArray[np.float64] | None = None,
        **settings: Any,
    ) -> None:
        at = stack.tiers.index("host")
        super().__init__(
            trace,
            float(stack.capacity_bytes[at]),
            link_bytes_per_s=float(stack.bytes_per_s[at]),
            nodes=nodes,
            load_s=load_s,
            **settings,
        )
        self.stack = stack
        self.nodes = [part.node for part in self.parts]
        self.device_price = self.price if device_price is None else device_price
        self._experts = tuple(experts)
        self._place = place
        self._load_s = load_s
        #: bool[n]: the models that fit a node in every tier; rows of others are told apart.
        self.fits = stack.fits(trace.bytes_)

    def rivals(self, names: Iterable[str]) -> dict[str, PolicyLogs]:
        """The four logs of each named policy but ours; they run in lockstep."""
        names = list(names)
        taus_s = standard_taus()
        policies = [parse_policy(name, taus_s) for name in names]
        if not policies:
            return {}
        for name in names:
            check_one_tier(name)
        world = self._world(by_slot=True)
        rows, count = len(world.ts), len(policies)
        demand = new_demand(len(world.first_ts), world.t0_s, tuple(taus_s))
        caches = new_cluster_caches(policies, world, self.stack.capacity_bytes, np.zeros((count, len(self.stack.tiers))), count)
        log = new_cluster_log(count, rows, list(range(count)))
        hazard = no_hazard(len(world.size_bytes))
        step = max(1, rows // 100)
        for first in range(0, rows, step):
            last = min(rows, first + step)
            log = run_cluster(first, last, float(world.ts[last - 1]), world, demand, hazard, caches, log)
            self._progress(last / rows, "rival policies")
        log = finish_cluster(rows, world, demand, hazard, caches, log)
        return {name: self._tables(e, world, caches, log) for e, name in enumerate(names)}

    def ours(self, prices: Sequence[float] = ()) -> Ours:
        """Ours, its shadow without prefetching, and what ours does at other `prices` (seconds per GB·h) with the same experts."""
        run = _OursRun(self, self._world(by_slot=False), prices)
        kept = self._blocks
        for block in iter(kept) if kept is not None else computed_ahead(score_blocks(self.trace, self._seed, self._progress)):
            run.take(block)
        run.close()
        self.chosen = run.chosen
        live, shadow = run.live, run.live + 1
        frontier = []
        for k, price in enumerate(prices):
            at = self.totals(OURS, self._tables(shadow + 1 + k, run.world, run.caches, run.log))
            frontier.append(FrontierPoint(OURS, at["held_gb_h"], at["cold_seconds"], price))
        logs = self._tables(live, run.world, run.caches, run.log, shadow)
        return Ours(logs, self._tables(shadow, run.world, run.caches, run.log), frontier, None)

    def totals(self, name: str, logs: PolicyLogs, shadow: PolicyLogs | None = None) -> dict[str, Any]:
        """The summary's entry of one policy, from its logs: rows whose model fits, and bytes held in host and device memory.

        `moved_gb` is what was read from disk or further away. `tiers` has what was held and moved by tier, `nodes` rows and waiting by
        node, `unfit` the rows that were left out.
        """
        fits = pa.array(self.fits[self.trace.model])
        total = partial(totals, name, scored_from_s=self.trace.scored_from_s(self._warmup_ratio), end_s=self.trace.t1)
        waits = logs.waits.filter(fits)
        beside = None if shadow is None else (_of_tiers(shadow.residency, "tier", (self.stack.tiers[-1],)), shadow.waits.filter(fits))
        memory = _of_tiers(logs.residency, "tier", MEMORY)
        entry = total(memory, logs.transfers, waits, logs.orders)
        if beside is not None:
            # Pollution is of the last tier: a row is ready nowhere else.
            last = _of_tiers(logs.residency, "tier", (self.stack.tiers[-1],))
            top = total(last, logs.transfers, waits, logs.orders, shadow=beside)
            entry |= {key: top[key] for key in ("coverage", "pollution")}
        entry |= {"tiers": {}, "nodes": self._by_node(waits)}
        for tier in self.stack.tiers:
            parts = (_of_tiers(logs.residency, "tier", (tier,)), _of_tiers(logs.transfers, "to_tier", (tier,)))
            of = total(*parts, waits.slice(0, 0), _of_tiers(logs.orders, "tier", (tier,)))
            entry["tiers"][tier] = {key: of[key] for key in ("held_gb_h", "idle_gb_h", "wasted_gb_h", "moved_gb", "prefetches")}
        none = (logs.residency.slice(0, 0), logs.transfers.slice(0, 0))
        unfit = total(*none, logs.waits.filter(pc.invert(fits)), logs.orders.slice(0, 0))
        entry["moved_gb"] -= entry["tiers"].get("device", {}).get("moved_gb", 0.0)
        entry["unfit"] = {key: unfit[key] for key in ("requests", "cold_seconds")}
        return entry

    def shown(self, logs: PolicyLogs) -> PolicyLogs:
        """The logs without the rows that figures leave out."""
        return replace(logs, waits=logs.waits.filter(pa.array(self.fits[self.trace.model])))

    def _by_node(self, waits: Any) -> dict[str, dict[str, Any]]:
        """Scored rows and their waiting by the node that they went to."""
        scored = waits.filter(pc.greater_equal(waits.column("ts"), self.trace.scored_from_s(self._warmup_ratio)))
        node = pc.index_in(pc.cast(scored.column("node"), pa.string()), pa.array(self.nodes)).to_numpy()
        wait_s = scored.column("wait_s").to_numpy()
        return {
            name: {"requests": int((node == k).sum()), "cold_seconds": float(wait_s[node == k].sum())} for k, name in enumerate(self.nodes)
        }

    def _world(self, by_slot: bool) -> ClusterWorld:
        trace, stack = self.trace, self.stack
        size = trace.bytes_.astype(np.float64)
        link_s = size[np.newaxis] / stack.bytes_per_s[:, np.newaxis]
        if self._load_s is not None:
            host = stack.tiers.index("host")
            link_s[host] = np.where(np.isnan(self._load_s), link_s[host], self._load_s)
        liked = np.array([by_rendezvous(m, self.nodes) for m in trace.models], np.int64).reshape(len(size), len(self.nodes))
        home = liked[:, 0].astype(np.int32)
        named = trace.node.astype(np.int32) if len(trace.node_names) else np.full(len(trace), -1, np.int32)
        column, columns = trace.model, len(size)
        if by_slot:
            columns = len(size) * len(self.nodes)
            column = np.where(named >= 0, named, home[trace.model]) * len(size) + trace.model
        next_ts, first_ts = next_rows(trace.ts, column.astype(np.int32), columns)
        return ClusterWorld(
            size_bytes=size,
            link_s=link_s,
            block_s=BLOCK_BYTES / size * link_s,
            ts=trace.ts,
            model=trace.model,
            node=named,
            next_ts=next_ts,
            first_ts=first_ts,
            home=home,
            rank=np.argsort(liked, axis=1),
            nodes=len(self.nodes),
            shared=stack.shared,
            by_slot=by_slot,
            parts_tier=stack.tiers.index("host"),
            apart=by_slot or bool((named >= 0).any()),
            t0_s=trace.t0,
            t1_s=trace.t1,
            tick_s=TICK_S,
        )

    def _tables(self, e: int, world: ClusterWorld, caches: ClusterCaches, log: EventLog, shadow: int | None = None) -> PolicyLogs:
        """The four logs of cache `e`."""
        trace, stack, t1 = self.trace, self.stack, world.t1_s
        orders = log.orders[: log.filled[2]]
        held = log.residency[: log.filled[0]]
        held = held[held["cache"] == e]
        moved = log.transfers[: log.filled[1]]
        moved = moved[moved["cache"] == e]
        mine = orders[orders["cache"] == e]
        slot = int(log.slot[e])
        return PolicyLogs(
            residency=residency_table(held, orders, coded(held["node"], self.nodes), coded(held["tier"], stack.tiers), trace, t1),
            transfers=transfers_table(
                moved,
                orders,
                world.link_s[moved["tier"], moved["model"]],
                coded(moved["node"], self.nodes),
                coded(moved["tier"], stack.below),
                coded(moved["tier"], stack.tiers),
                trace,
            ),
            waits=waits_table(log.wait_s[slot], log.found[slot], caches.log_node[slot], self.nodes, trace),
            orders=orders_table(
                mine,
                [f"{self.nodes[k]}/{i}" for i, k in enumerate(mine["node"].tolist())],
                coded(mine["node"], self.nodes),
                coded(mine["tier"], stack.tiers),
                redundant_orders(mine, log, shadow),
                trace,
                t1,
            ),
        )


class _OursRun:
    """Ours on all nodes: the experts, the live cache, its twin without prefetching, and the live cache at other prices, in lockstep.

    The Hedge chooses for the whole cluster. `live` is the number of the live cache; its twin and those at other prices follow.
    """

    def __init__(self, simulation: ClusterSimulation, world: ClusterWorld, prices: Sequence[float]) -> None:
        self.world = world
        self.chosen: list[int] = []
        names, tiers = simulation._experts, simulation.stack.tiers
        every = dict(zip(EXPERTS, expert_policies(simulation.price, simulation.hold_s), strict=True))
        self._experts: list[Policy] = [every[name] for name in names]
        self.live = len(names)
        self._hedge = Hedge(len(names))
        at = [simulation.price] * (self.live + 2) + list(prices)
        dearer = simulation.device_price / simulation.price if simulation.price > 0 else 0.0
        factor = {"disk": 0.0, "host": 1.0, "device": dearer}
        price = np.array([[factor[t] * price_per_byte_s(p) for t in tiers] for p in at])
        first = self._experts[0]
        policies = [*self._experts, first, without_prefetch(first), *[first] * len(prices)]
        logged = list(range(self.live, len(policies)))
        self.caches = new_cluster_caches(policies, world, simulation.stack.capacity_bytes, price, len(logged), simulation._place)
        self.log = new_cluster_log(len(policies), len(world.ts), logged)
        self._demand = new_demand(len(world.size_bytes), world.t0_s, STANDARD_TAUS_S)
        self._hazard = no_hazard(len(world.size_bytes), VARIANTS)
        self._rows = 0

    def take(self, block: RateBlock) -> None:
        """All nodes go through a block."""
        self._hazard = Hazard(block.at_tick, block.after_row, self._hazard.latest, block.first_tick, block.first_row)
        for end_s, until_s in block.periods(self.world.t1_s):
            number = self._hedge.live
            self.chosen.append(number)
            for e in range(self.live, len(self.caches.policy)):
                policy = self._experts[number]
                set_policy(self.caches.policy[e], without_prefetch(policy) if e == self.live + 1 else policy)
            rows = int(np.searchsorted(self.world.ts, end_s))
            self.log = run_cluster(self._rows, rows, until_s, self.world, self._demand, self._hazard, self.caches, self.log)
            self._rows = rows
            settle_cluster(until_s, self.caches)
            cache = self.caches.cache
            self._hedge.learn((cache["period_wait_s"] + cache["period_cost_s"])[: self.live], PERIOD_S)
            cache["period_wait_s"] = cache["period_cost_s"] = 0.0

    def close(self) -> None:
        """Lets running loads finish and ends what is held at the log's end."""
        self.log = finish_cluster(self._rows, self.world, self._demand, self._hazard, self.caches, self.log)


def _of_tiers(table: Any, column: str, tiers: Sequence[str]) -> Any:
    names = pc.cast(table.column(column), pa.string())
    return table.filter(pc.is_in(names, pa.array(list(tiers), pa.string())))

"""Nodes with tiers, without bytes: struct-of-arrays state of caches that go through a log together, all nodes and tiers by one clock.

A *cache* here is one policy on a whole cluster: N nodes, each a stack of T tiers, the lowest first. Tier j is filled by edge j, from tier
j − 1 of its node or, for j = 0, from below the stack, where everything always is. Each edge of a node is a link of its own; where the
lowest edge is shared, all nodes have one link there. Transitions are in `core.cluster_steps`. One node with one tier is `core.node`.

A model on a node has a *slot*, `node × models + model`. What rivals know of demand is by slot (each node sees its own rows); what ours
knows is by model.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefetcher.core.node import ORDER_EVENT, POLICY, RESIDENCY_EVENT, TRANSFER_EVENT, EventLog, Policy, set_policy

__all__ = ["ClusterCaches", "ClusterWorld", "new_cluster_caches", "new_cluster_log"]

_EVENT_ROWS = 4096
#: Nobody serves from below the stack: the stage of a model for which no row waits.
NOT_WAITING = -1

CACHE = np.dtype(
    [
        ("next_tick_s", "f8"),
        ("period_wait_s", "f8"), ("period_cost_s", "f8"),  # what the Hedge compares: waiting, and the price of what was held
        ("cost_per_s", "f8"), ("held_at_s", "f8"),
    ]
)  # fmt: skip
EDGE = np.dtype([("recent_wait_s", "f8"), ("waiting_mean", "f8")])  # moving means over the loads of all nodes
LINK = np.dtype(
    [
        ("use", "i8"), ("moving", "i8"), ("finish_s", "f8"), ("segment_s", "f8"), ("partial", "i8"), ("queued", "i8"),
        ("waiting", "f8"), ("busy_s", "f8"), ("busy_at_s", "f8"),
    ]
)  # fmt: skip
TIER = np.dtype(
    [
        ("capacity", "f8"), ("used", "f8"), ("clock", "f8"), ("sieve_hand", "i8"), ("sieve_head", "i8"), ("sieve_tail", "i8"),
        ("expiry_s", "f8"),
        ("worth", "f8"),  # moving mean over those who asked for room: what a byte of it would have saved, seconds a second
    ]
)  # fmt: skip
COPY = np.dtype(
    [
        ("left_s", "f8"), ("taken_s", "f8"), ("ready_s", "f8"), ("load_end_s", "f8"), ("prefetched", "?"), ("unused", "?"), ("order", "i8"),
        ("expiry_s", "f8"), ("priority", "f8"), ("older", "i8"), ("newer", "i8"), ("visited", "?"), ("last_order", "i8"),
        ("refused_after_s", "f8"), ("held_bytes", "f8"),
    ]
)  # fmt: skip
#: Rows of one model on one node: those that wait, at which edge they do, and what the node saw of it.
SEEN = np.dtype(
    [
        ("rows", "f8"), ("row_sum_s", "f8"), ("stage_s", "f8"), ("stage", "i8"), ("started", "?"), ("wait_head", "i8"),
        ("last_row_s", "f8"), ("seen", "f8"),
    ]
)  # fmt: skip
#: What else waited while a model was loaded, over an edge.
OTHERS = np.dtype([("others", "f8"), ("loads", "f8")])

_PLACE = [("node", "i8"), ("tier", "i8")]
CLUSTER_RESIDENCY_EVENT = np.dtype(RESIDENCY_EVENT.descr + _PLACE)
CLUSTER_TRANSFER_EVENT = np.dtype(TRANSFER_EVENT.descr + _PLACE)
CLUSTER_ORDER_EVENT = np.dtype(ORDER_EVENT.descr + _PLACE)


class ClusterWorld(NamedTuple):
    """What does not change: models, rows and links."""

    size_bytes: npt.NDArray[np.float64]  #: float64[n]
    link_s: npt.NDArray[np.float64]  #: float64[T, n], whole transfer over each edge on an idle link
    block_s: npt.NDArray[np.float64]  #: float64[T, n], one BLOCK_BYTES of it
    ts: npt.NDArray[np.float64]  #: float64[N], sorted
    model: npt.NDArray[np.int32]  #: int32[N]
    node: npt.NDArray[np.int32]  #: int32[N], the node that a row names, -1 for none
    next_ts: npt.NDArray[np.float64]  #: float64[N], the next row of the same model (by slot: on the same node), inf where none
    first_ts: npt.NDArray[np.float64]  #: float64[columns], likewise before the first row
    home: npt.NDArray[np.int32]  #: int32[n], each model's node by rendezvous hashing
    rank: npt.NDArray[np.int64]  #: int64[n, nodes], the place of each node in each model's order by rendezvous hashing
    nodes: int
    shared: bool  #: whether edge 0 is one link for all nodes
    by_slot: bool  #: demand is known by slot, and rows go to the model's home; else by model, and rows are placed
    parts_tier: int  #: in which victims may keep a part (`Policy.parts`)
    apart: bool  #: copies on other nodes don't serve a node's rows: rows name their node, or go to their model's home
    t0_s: float
    t1_s: float
    tick_s: float


class ClusterCaches(NamedTuple):
    """E caches in lockstep; T tiers, n models, S = nodes × n slots."""

    policy: npt.NDArray[np.void]  #: POLICY[E]
    price: npt.NDArray[np.float64]  #: float64[E, T], seconds of waiting that a byte-second is worth
    cache: npt.NDArray[np.void]  #: CACHE[E]
    edge: npt.NDArray[np.void]  #: EDGE[E, T]
    link: npt.NDArray[np.void]  #: LINK[E, T, nodes]
    tier: npt.NDArray[np.void]  #: TIER[E, T, nodes]
    status: npt.NDArray[np.int8]  #: int8[E, T, S], `node.Status`
    copy: npt.NDArray[np.void]  #: COPY[E, T, S]
    seen: npt.NDArray[np.void]  #: SEEN[E, S]
    others: npt.NDArray[np.void]  #: OTHERS[E, T, n]
    ready: npt.NDArray[np.int32]  #: int32[E, T, n], on how many nodes it is ready
    claims: npt.NDArray[np.int32]  #: int32[E, n], on how many nodes rows wait for it, and how many prefetches of it have begun
    queue: npt.NDArray[np.int64]  #: int64[E, T, nodes, room], queued slots in the order in which they came
    next_ts: npt.NDArray[np.float64]  #: float64[columns], next row; only for who knows the future
    next_event_s: npt.NDArray[np.float64]  #: float64[E], earliest transfer end or tick
    log_node: npt.NDArray[np.int16]  #: int16[slots of the log, N], where each row went
    place: npt.NDArray[np.float64]  #: float64[2], how placement weighs: `core.cluster_routing`


def new_cluster_caches(
    policies: list[Policy],
    world: ClusterWorld,
    capacity_bytes: npt.NDArray[np.float64],
    price_per_byte_s: npt.NDArray[np.float64],
    logged: int,
    place: tuple[float, float] = (0.0, 0.0),
) -> ClusterCaches:
    """Empty caches, one a policy, `logged` of them logged. `capacity_bytes` float64[T] is each node's, `price_per_byte_s` float64[E, T]."""
    count, tiers, models = len(policies), len(world.link_s), len(world.size_bytes)
    nodes, slots = world.nodes, world.nodes * len(world.size_bytes)
    caches = ClusterCaches(
        policy=np.zeros(count, POLICY),
        price=np.array(price_per_byte_s, dtype=np.float64),
        cache=np.zeros(count, CACHE),
        edge=np.zeros((count, tiers), EDGE),
        link=np.zeros((count, tiers, nodes), LINK),
        tier=np.zeros((count, tiers, nodes), TIER),
        status=np.zeros((count, tiers, slots), np.int8),
        copy=np.zeros((count, tiers, slots), COPY),
        seen=np.zeros((count, slots), SEEN),
        others=np.zeros((count, tiers, models), OTHERS),
        ready=np.zeros((count, tiers, models), np.int32),
        claims=np.zeros((count, models), np.int32),
        queue=np.zeros((count, tiers, nodes, slots if world.shared else models), np.int64),
        next_ts=world.first_ts.copy(),
        next_event_s=np.full(count, np.inf),
        log_node=np.zeros((max(logged, 1), len(world.ts)), np.int16),
        place=np.array(place),
    )
    for record, policy in zip(caches.policy, policies, strict=True):
        set_policy(record, policy)
    caches.cache["next_tick_s"] = world.t0_s + world.tick_s
    caches.cache["held_at_s"] = caches.link["busy_at_s"] = world.t0_s
    caches.link["moving"] = caches.link["partial"] = -1
    caches.link["finish_s"] = caches.tier["expiry_s"] = np.inf
    caches.tier["capacity"] = capacity_bytes[np.newaxis, :, np.newaxis]
    caches.tier["sieve_hand"] = caches.tier["sieve_head"] = caches.tier["sieve_tail"] = -1
    copy = caches.copy
    copy["left_s"] = np.tile(world.link_s, (1, nodes))[np.newaxis]
    copy["order"] = copy["last_order"] = copy["older"] = copy["newer"] = -1
    copy["expiry_s"] = np.inf
    copy["refused_after_s"] = -np.inf
    caches.seen["stage"] = NOT_WAITING
    caches.seen["wait_head"] = -1
    caches.seen["last_row_s"] = -np.inf
    caches.next_event_s[:] = caches.cache["next_tick_s"]
    return caches


def new_cluster_log(caches: int, rows: int, logged: list[int]) -> EventLog:
    """An empty log for `caches` caches over `rows` rows, whose events also say node and tier; waits are kept for the caches in `logged`."""
    slot = np.full(caches, -1, np.int64)
    slot[logged] = np.arange(len(logged))
    shape = (len(logged), rows) if logged else (1, 1)
    return EventLog(
        residency=np.zeros(_EVENT_ROWS, CLUSTER_RESIDENCY_EVENT),
        transfers=np.zeros(_EVENT_ROWS, CLUSTER_TRANSFER_EVENT),
        orders=np.zeros(_EVENT_ROWS, CLUSTER_ORDER_EVENT),
        filled=np.zeros(3, np.int64),
        slot=slot,
        wait_s=np.zeros(shape),
        found=np.zeros(shape, np.int8),
        next_row=np.full(shape, -1, np.int32),
    )

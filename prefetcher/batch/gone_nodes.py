"""Forgetting nodes that are gone: all that the state store has of a node goes, once what reports and the experiment need is elsewhere.

A node whose name comes back later begins as if it had never been: nothing of what it told before is lost or counted again, and numbers that
agents and controllers are compared by (fences, numbers of messages) do not go back (`agent.agent`). Covers neither who is wanted to go
(`api.nodes`) nor what a controller keeps in memory, which goes when the name does.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec

from prefetcher.batch.scheduler import Did, Run
from prefetcher.controller import records
from prefetcher.core.block_sums import BLOCKS_KEPT, BlockSum
from prefetcher.core.types import NodeName
from prefetcher.errors import UnavailableError
from prefetcher.ports import StateStore
from prefetcher.report.gone import JOB, GoneNode, decode_gone, ledger_of, why_stays, with_gone
from prefetcher.report.history import copy_node
from prefetcher.report.shadows import read_shadows
from prefetcher.telemetry.logs import log

__all__ = ["forget_nodes"]

#: The lease that keeps a node from coming back halfway, in the store's seconds: what is written under it takes a few round trips.
_LEASE_S = 10.0
#: Keys that are deleted at once.
_AT_ONCE = 500
#: Nodes that a run's line names.
_NAMED = 5
_TRIES = 20
_blocks = msgspec.json.Decoder(list[BlockSum])
_hours = msgspec.json.Decoder(tuple[int, float])


class _Newest(msgspec.Struct):
    """What is read of `agent.kept.LedgerState`."""

    blocks: list[BlockSum] = []


_newest = msgspec.json.Decoder(_Newest)


def forget_nodes(run: Run, state: StateStore, folder: Path, keep_s: float, now_s: float) -> Did:
    """Forgets nodes that were not there for `keep_s`, and those that somebody wants forgotten; says which. `folder`: history of ledgers.

    Raises:
        UnavailableError: the state store does not answer.
        OSError, InputError: the history can't be written, or read; the node is then not forgotten.
    """
    wanted = state.last_seen(records.TO_FORGET)
    seen = state.last_seen(records.NODES)
    due = sorted(name for name, last_s in seen.items() if name in wanted or now_s - last_s > keep_s)
    gone, kept = [], []
    for number, name in enumerate(due):
        run.at(number, len(due), name)
        why = why_stays(state, NodeName(name), now_s) or _forget(run, state, NodeName(name), seen[name], folder, now_s)
        if not why:
            gone.append(name)
        elif name in wanted:
            kept.append(f"{name} stays: {why}")
    state.unsee(records.TO_FORGET, sorted(wanted))
    _drop_old(state, now_s)
    named = ", ".join(gone[:_NAMED]) + (", …" if len(gone) > _NAMED else "")
    forgotten = [f"{len(gone)} node{'' if len(gone) == 1 else 's'} forgotten: {named}"] if gone else []
    return Did(len(gone), "; ".join([*forgotten, *kept]))


def _forget(run: Run, state: StateStore, node: NodeName, last_s: float, folder: Path, now_s: float) -> str:
    """Forgets the node; '' or why not."""
    key = records.node_key(node, "sums")
    told = state.read(key)
    stored = ledger_of(told)
    if told is not None and stored is None:
        log().error("ledger_unreadable", node=node, then="its hours are not copied into the history, and it is forgotten all the same")
    hours = 0 if stored is None else copy_node(state, folder, node, stored)
    holder = f"{JOB}/{uuid.uuid4().hex}"
    lease = records.node_key(node, "lease")
    if not state.take_lease(lease, holder, _LEASE_S):
        return "it came back"
    try:
        if state.read(key) != told:
            return "it came back"
        _keep(state, _gone(state, node, last_s), now_s)
        run.check()
        keys = [records.node_key(node, what) for what in sorted(records.NODE_KEYS - {"lease"})]
        keys += [records.hour_key(node, hour, part) for hour, part, _ in ([] if stored is None else stored.hours)]
        for first in range(0, len(keys), _AT_ONCE):
            state.delete(keys[first : first + _AT_ONCE])
        state.unsee(records.NODES, [node])
    finally:
        state.drop_lease(lease, holder)
    log().info("node_forgotten", node=node, silent_s=round(now_s - last_s), hours=hours)
    return ""


def _gone(state: StateStore, node: NodeName, last_s: float) -> GoneNode:
    """What of the node is needed later and is in no history. What can't be read is left out."""
    raw, ledger = state.read_many([records.node_key(node, what) for what in ("blocks", "ledger")])
    blocks: dict[int, BlockSum] = {}
    try:
        # The newest are up to date beside the ledger alone.
        of_key = [] if raw is None else records.decode(raw, _blocks)
        newest = _Newest() if ledger is None else records.decode(ledger, _newest)
        blocks = {block.block: block for block in (*of_key, *newest.blocks)}
    except ValueError as exc:
        log().error("blocks_unreadable", node=node, reason=str(exc), then="the node is left out of what prefetching saves")
    shadow = dict(_tail(state, node))
    hours = read_shadows(state, [node])[node]
    return GoneNode(node, last_s, tuple(blocks[number] for number in sorted(blocks)), shadow, dict(hours))


def _tail(state: StateStore, node: NodeName) -> Iterator[tuple[int, float]]:
    for raw in state.tail(records.node_key(node, "shadow"), BLOCKS_KEPT):
        try:
            yield records.decode(raw, _hours)
        except ValueError:
            continue


def _keep(state: StateStore, gone: GoneNode, now_s: float) -> None:
    _change(state, [gone] if gone.blocks or gone.shadow or gone.shadow_hours else [], now_s)


def _drop_old(state: StateStore, now_s: float) -> None:
    _change(state, [], now_s)


def _change(state: StateStore, new: list[GoneNode], now_s: float) -> None:
    for _ in range(_TRIES):
        raw = state.read(records.GONE)
        try:
            before = decode_gone(raw)
        except ValueError as exc:
            log().error("gone_unreadable", reason=str(exc), then="a new record of forgotten nodes is begun")
            before = []
        after = with_gone(before, new, now_s)
        if (after == before and raw is not None) or (not after and raw is None):
            return
        if state.replace(records.GONE, raw, records.encode(after)):
            return
    raise UnavailableError("another run keeps changing the record of forgotten nodes; ask again")

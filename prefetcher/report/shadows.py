"""What requests would have waited with prefetching off, by node and hour: the shadow that coverage is measured against.

The controller's shadow caches count it and only tell of hours that they saw from beginning to end. Covers no shadow caches
(`core.shadow_caches`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from prefetcher.controller import records
from prefetcher.core.types import NodeName
from prefetcher.ports import StateStore
from prefetcher.report.gone import read_gone

__all__ = ["ShadowHours", "read_shadows"]


class ShadowHours(msgspec.Struct, frozen=True):
    """The record under a node's `shadow-hours` key: seconds by hour since 1970."""

    hours: dict[int, float] = {}


_decoder = msgspec.json.Decoder(ShadowHours)


def read_shadows(state: StateStore, nodes: Sequence[str]) -> Mapping[str, Mapping[int, float]]:
    """By node and hour what its requests would have waited, where that is known; of nodes that were forgotten too.

    Raises:
        UnavailableError: the state store does not answer.
    """
    raw = state.read_many([records.node_key(NodeName(node), "shadow-hours") for node in nodes])
    gone = {each.node: each.shadow_hours for each in read_gone(state)}
    return {node: {**gone.get(node, {}), **_hours(item)} for node, item in zip(nodes, raw, strict=True)}


def _hours(raw: bytes | None) -> Mapping[int, float]:
    """Nothing where it can't be read: what is not known is said to be so."""
    try:
        return {} if raw is None else records.decode(raw, _decoder).hours
    except ValueError:
        return {}

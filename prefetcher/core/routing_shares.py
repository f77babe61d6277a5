"""Where the requests of a model go, learned from rows that name their node, and what a second copy of it would earn. Pure.

A prefetch belongs where the requests will go. Counts decay by event time, so that a router that changes its mind is followed within hours.
Rows that name no node go wherever the model is at home (`controller.nodes`), and are counted apart. Covers no choice of a node for what is
nowhere yet (`core.placement`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prefetcher.core.compiled import kernel_part

__all__ = ["HALF_LIFE_S", "RoutingShares", "decayed", "second_copy_gain"]

#: A router's habits hold for hours; one that was changed is believed after an hour or two.
HALF_LIFE_S = 3_600.0
#: Less than this share is chance, or a router that fell back once.
_LEAST_SHARE = 0.05
#: A model that is asked for once an hour, and not there each time, is a rare one, not one that needs another copy.
_FIRST_ROWS = 8.0
_FORGOTTEN_S = 2_592_000.0
#: The node of rows that name none.
_NOWHERE = ""


@kernel_part
def decayed(count: float, last_s: float, now_s: float, half_life_s: float) -> float:
    """What is left at `now_s` of a `count` as of `last_s`; a time before that takes nothing away."""
    return float(count * 0.5 ** (max(0.0, now_s - last_s) / half_life_s))


@kernel_part
def second_copy_gain(rate_per_s: float, share: float, behind: float, miss_s: float, first_wait_s: float) -> float:
    """What a copy on another node saves beside the first, in seconds of waiting per second of time.

    `rate_per_s` is the rate of the model's next use, `share` the part of its rows that goes to the other node whatever we do, each of them
    a miss of `miss_s` there. Of the rest, `behind` is the share that waits at the first node, for its link or because its memory does not
    keep the model: such a row waits `first_wait_s` there and could be served by the second copy. Per byte it compares with the price and
    with what it displaces, as any other index.
    """
    return rate_per_s * (share * miss_s + (1.0 - share) * behind * first_wait_s)


class RoutingShares:
    """By model, decayed counts of rows by node, and of those that found the model not ready there. For one thread."""

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self._half_life_s = half_life_s
        #: model → node → (rows, rows that waited, as of).
        self._seen: dict[str, dict[str, tuple[float, float, float]]] = {}

    def saw(self, model: str, node: str | None, ts: float, waited: bool = False) -> None:
        """A row of `model` went to `node` (None: it named none) at `ts`, and had to wait there or not. A late row counts in full."""
        nodes = self._seen.setdefault(model, {})
        rows, waits, last_s = nodes.get(node or _NOWHERE, (0.0, 0.0, ts))
        left = decayed(1.0, last_s, ts, self._half_life_s)
        nodes[node or _NOWHERE] = (rows * left + 1.0, waits * left + waited, max(last_s, ts))

    def of(self, model: str, among: Iterable[str]) -> dict[str, float]:
        """The share of its rows that name each node of `among`, largest first; what is left to 1 names none. Empty where none does. Equal
        shares are in the order of names. However long ago its last row was: a model that is used once a week goes where it went."""
        nodes = self._seen.get(model)
        if nodes is None:
            return {}
        now_s = max(last_s for _, _, last_s in nodes.values())
        counts = {node: decayed(rows, last_s, now_s, self._half_life_s) for node, (rows, _, last_s) in nodes.items()}
        able = {node: counts[node] for node in among if node in counts and node != _NOWHERE}
        # A node that is gone takes its share along: those that are left share what it had.
        total = sum(able.values()) + counts.get(_NOWHERE, 0.0)
        if not able or total <= 0.0:
            return {}
        found = {node: count / total for node, count in able.items() if count / total >= _LEAST_SHARE}
        return dict(sorted(found.items(), key=lambda pair: (-pair[1], pair[0])))

    def behind(self, model: str, node: str) -> float:
        """The share of the rows of `model` at `node` that had to wait there; 0 before any came. A few say little, for the first ones find
        it nowhere: as many as `_FIRST_ROWS` that found it ready are added."""
        rows, waits, _ = self._seen.get(model, {}).get(node, (0.0, 0.0, 0.0))
        return waits / (rows + _FIRST_ROWS)

    def models(self) -> list[str]:
        """Those of which some row named a node."""
        return [model for model, nodes in self._seen.items() if nodes.keys() - {_NOWHERE}]

    def nodes(self) -> set[str]:
        """Those that some row named."""
        return {node for nodes in self._seen.values() for node in nodes} - {_NOWHERE}

    def drop(self, node: str) -> None:
        """Forgets what went to `node`: there is no such node any more."""
        for model in [model for model, nodes in self._seen.items() if nodes.pop(node, None) is not None and not nodes]:
            del self._seen[model]

    def forget(self, now_s: float) -> None:
        """Drops what nobody asked for in a month."""
        for model in list(self._seen):
            nodes = self._seen[model]
            for node in [node for node, (_, _, last_s) in nodes.items() if now_s - last_s > _FORGOTTEN_S]:
                del nodes[node]
            if not nodes:
                del self._seen[model]

    def snapshot(self) -> dict[str, Any]:
        """JSON types only."""
        return {model: {node: list(counts) for node, counts in nodes.items()} for model, nodes in self._seen.items()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Goes on from a snapshot. Raises ValueError for something else, and stays as it was."""
        try:
            found = {
                str(model): {str(node): (float(rows), float(waits), float(last_s)) for node, (rows, waits, last_s) in nodes.items()}
                for model, nodes in snapshot.items()
            }
        except (AttributeError, TypeError, ValueError) as exc:
            raise ValueError(f"not what was learned of routes: {exc}") from exc
        self._seen = found

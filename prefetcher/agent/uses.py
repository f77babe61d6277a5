"""Which request rows and which opens are one use of a model: a program that posts its row and then opens is counted once.

Rows reach the agent by way of the request log, opens directly, so that either may come first. Also keeps rows from counting twice that
come again: after a restart a controller reads those anew that it had not saved; and counts those that no model is there for. Not for two
threads at once. Times are the clock's seconds, and so are all windows.
"""

from __future__ import annotations

import hashlib
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from prefetcher.core.types import ModelName, NodeName, RequestSeen

__all__ = ["Unknown", "Uses", "UsesState"]

#: How long a row that was served waits for its open.
ROW_WAITS_S = 30.0
#: How long an open waits for its row before it is announced: a row is handed on within milliseconds of being durable, or within the second
#: that planning for ten thousand models takes.
OPEN_WAITS_S = 2.0
#: A controller hands on rows of the last 30 s, and clocks of gateways may run up to 60 s ahead.
_REMEMBER_S = 90.0
#: 550 rows a second for `_REMEMBER_S`.
_REMEMBERED_ROWS = 50_000
_OWN_ROW = "prefetcher-open-"
#: Names of models that a node doesn't have: so many are counted each for itself.
_UNKNOWN_NAMES = 1000
_T = TypeVar("_T")


class UsesState(msgspec.Struct):
    """Everything that `Uses` needs to go on. Rows are told apart by a digest."""

    rows: dict[ModelName, list[float]] = msgspec.field(default_factory=dict)
    opens: dict[ModelName, list[tuple[float, str]]] = msgspec.field(default_factory=dict)
    recent: list[tuple[float, int]] = msgspec.field(default_factory=list)


class Uses:
    """Pairs the rows and opens of `node`, oldest first: N rows and M opens of a model leave max(0, M − N) opens to announce."""

    def __init__(self, node: NodeName, speed: float = 1.0) -> None:
        self._node = node
        self._speed = speed
        self._rows: dict[ModelName, deque[float]] = {}
        self._opens: dict[ModelName, deque[tuple[float, str]]] = {}
        self._recent: deque[tuple[float, int]] = deque()
        self._again: Counter[int] = Counter()
        self._again_until_s = 0.0

    def row(self, row: RequestSeen, now_s: float) -> bool:
        """Takes a row in; whether it is a use that was not seen yet."""
        if row.request_id is not None and row.request_id.startswith(_OWN_ROW):
            return False
        digest = _digest(row)
        if self._again and now_s < self._again_until_s and self._again[digest] > 0:
            self._again[digest] -= 1
            return False
        self._recent.append((now_s, digest))
        if len(self._recent) > _REMEMBERED_ROWS:
            self._recent.popleft()
        if _take(self._opens, row.model):
            return False
        self._rows.setdefault(row.model, deque()).append(now_s)
        return True

    def open(self, model: ModelName, now_s: float) -> bool:
        """Takes an open in; whether a row came before it. Else it waits for one, and is `overdue` in the end."""
        if _take(self._rows, model):
            return True
        self._opens.setdefault(model, deque()).append((now_s, f"{_OWN_ROW}{uuid.uuid4().hex}"))
        return False

    def overdue(self, now_s: float, waiting: Callable[[ModelName], int]) -> list[RequestSeen]:
        """Opens that no row announced, as rows, each handed out once. `waiting` is how many rows of a model still wait for its weights.

        Their request ids are the node's own: what comes back by way of the request log is no second use, and what is announced again by
        an agent that was killed meanwhile is learned from once.
        """
        while self._recent and self._recent[0][0] < now_s - _REMEMBER_S * self._speed:
            self._recent.popleft()
        for model, queue in list(self._rows.items()):
            # What is not served yet can't be opened yet: its time to open begins when it is.
            for i in range(max(0, len(queue) - waiting(model)), len(queue)):
                queue[i] = now_s
            while queue and queue[0] <= now_s - ROW_WAITS_S * self._speed:
                _take(self._rows, model)
        found = []
        for model, opens in list(self._opens.items()):
            while opens and opens[0][0] <= now_s - OPEN_WAITS_S * self._speed:
                opened_s, request_id = opens[0]
                _take(self._opens, model)
                found.append(RequestSeen(ts=opened_s, model=model, node=self._node, request_id=request_id))
        return sorted(found, key=lambda row: row.ts)

    def snapshot(self) -> UsesState:
        return UsesState(
            {model: list(queue) for model, queue in self._rows.items()},
            {model: list(queue) for model, queue in self._opens.items()},
            list(self._recent),
        )

    def restore(self, state: UsesState, now_s: float) -> None:
        """Goes on from a snapshot; rows that it knows may come again from now on."""
        self._rows = {model: deque(queue) for model, queue in state.rows.items() if queue}
        self._opens = {model: deque(queue) for model, queue in state.opens.items() if queue}
        self._recent = deque(state.recent)
        self._again = Counter(digest for _, digest in state.recent)
        self._again_until_s = now_s + _REMEMBER_S * self._speed


class Unknown:
    """Requests for models that the node doesn't have: how many, and of which. Names beyond `_UNKNOWN_NAMES` count in `rows` alone."""

    def __init__(self) -> None:
        self.rows = 0
        self._by_name: Counter[str] = Counter()

    def add(self, model: str) -> bool:
        """Counts a request; whether its model is named for the first time."""
        self.rows += 1
        if model not in self._by_name and len(self._by_name) >= _UNKNOWN_NAMES:
            return False
        self._by_name[model] += 1
        return self._by_name[model] == 1

    def forget(self, models: Iterable[str]) -> None:
        """The node has these now."""
        for model in models:
            self.rows -= self._by_name.pop(model, 0)

    def most(self, count: int) -> tuple[tuple[str, int], ...]:
        """The `count` models that were asked for most, with how often."""
        return tuple(self._by_name.most_common(count))


def _take(queues: dict[ModelName, deque[_T]], model: ModelName) -> bool:
    """Drops the oldest of a model; whether there was one."""
    queue = queues.get(model)
    if queue is None:
        return False
    queue.popleft()
    if not queue:
        del queues[model]
    return True


def _digest(row: RequestSeen) -> int:
    parts: list[Any] = [row.model, row.ts, row.user, row.request_id, row.count]
    return int.from_bytes(hashlib.blake2b(msgspec.json.encode(parts), digest_size=8).digest(), "big") >> 1

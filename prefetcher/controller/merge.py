"""Rows of many partitions as one log: in event time, whatever order the broker hands partitions over in.

Partitions are read at different speeds, above all when a backlog is caught up with; traffic takes rows only up to ten minutes late. So rows
wait here until every partition that is still behind has got as far. Covers no reading and no learning.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Sequence

from prefetcher.core.types import RequestSeen
from prefetcher.ports import Partition

__all__ = ["RowMerge"]

#: Rows that may wait for a partition that is behind; past that the others go on without it: some 50 MB.
MOST_HELD = 200_000


class RowMerge:
    """Rows in, in the order of each partition; rows out, in the order of their times over all partitions.

    Inside a partition rows keep their order: one with an earlier time than its predecessor goes with that one.
    """

    def __init__(self) -> None:
        #: (time that it is ordered by, the offset after it, row) by partition.
        self._held: dict[Partition, deque[tuple[float, int, RequestSeen]]] = {}
        self._newest_s: dict[Partition, float] = {}
        #: Where a partition whose rows were all taken out stands: records that were no rows may come after the last row.
        self._until: dict[Partition, int] = {}
        self.rows = 0

    def add(self, partition: Partition, rows: Sequence[tuple[int, RequestSeen]], next_offset: int) -> None:
        """`rows` are (offset after it, row) of one partition; everything before `next_offset` was read."""
        held = self._held.setdefault(partition, deque())
        key_s = self._newest_s.get(partition, float("-inf"))
        for after, row in rows:
            key_s = max(key_s, row.ts)
            held.append((key_s, after, row))
        self._newest_s[partition] = key_s
        self._until[partition] = next_offset
        self.rows += len(rows)

    def take(self, limit: int, behind: Collection[Partition]) -> tuple[list[RequestSeen], dict[Partition, int]]:
        """Up to `limit` rows that no partition of `behind` can still come before, and the positions that they lead to."""
        until_s = float("inf")
        if self.rows <= MOST_HELD:
            until_s = min((self._newest_s[p] if self._held.get(p) else -until_s for p in behind), default=until_s)
        heads = [(held[0][0], partition) for partition, held in self._held.items() if held]
        heapq.heapify(heads)
        out: list[RequestSeen] = []
        positions: dict[Partition, int] = {}
        while heads and len(out) < limit and heads[0][0] <= until_s:
            _, partition = heads[0]
            held = self._held[partition]
            _, positions[partition], row = held.popleft()
            out.append(row)
            if held:
                heapq.heapreplace(heads, (held[0][0], partition))
            else:
                heapq.heappop(heads)
        self.rows -= len(out)
        return out, positions | {partition: until for partition, until in self._until.items() if not self._held[partition]}

    def drop(self, partition: Partition) -> None:
        """Forgets what was read of a partition and not taken out."""
        self.rows -= len(self._held.pop(partition, ()))
        self._until.pop(partition, None)
        self._newest_s.pop(partition, None)

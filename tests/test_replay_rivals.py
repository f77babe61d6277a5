"""Rivals beside slow, plain versions of themselves, on a link that is idle whenever a row comes: who is found there, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefetcher.replay.run import Simulation
from prefetcher.replay.trace import Trace, read_trace

GB = 10**9
LINK = 1e9


def spaced_trace(folder: Path, seed: int, rows: int = 2500) -> Trace:
    """Rows a minute and more apart, loads of up to 25 s; one model fits nowhere."""
    rng = np.random.default_rng(seed)
    sizes = {f"m{i:02d}": int(rng.integers(1, 25)) * GB for i in range(14)} | {"m99": 500 * GB}
    chance = rng.pareto(1.2, 14) + 0.1
    names = rng.choice(sorted(sizes)[:14], rows, p=chance / chance.sum())
    names[rng.choice(rows, 3, replace=False)] = "m99"
    ts = 1.7e9 + np.cumsum(rng.uniform(600.0, 900.0, rows))
    pq.write_table(pa.table({"ts": ts, "model": names}), folder / "log.parquet")
    return read_trace(folder / "log.parquet", catalog=sizes)


class Slow:
    """A cache of whole models: what is asked for and absent comes in at once, after victims went one by one until it fits."""

    def __init__(self, trace: Trace, capacity: float) -> None:
        self.size = trace.bytes_.astype(float)
        self.capacity = capacity
        self.held: list[int] = []
        self.ts, self.model = trace.ts.tolist(), trace.model.tolist()

    def run(self) -> list[bool]:
        """Whether each row found its model."""
        hits = []
        for row, m in enumerate(self.model):
            hits.append(m in self.held)
            self.seen(row, m)
            if hits[-1]:
                self.hit(row, m)
            elif self.size[m] <= self.capacity:
                while sum(self.size[k] for k in self.held) + self.size[m] > self.capacity:
                    victim = self.victim(row)
                    self.held.remove(victim)
                self.held.append(m)
                self.enter(row, m)
        return hits

    def seen(self, row: int, m: int) -> None: ...

    def hit(self, row: int, m: int) -> None: ...

    def enter(self, row: int, m: int) -> None: ...

    def victim(self, row: int) -> int:
        raise NotImplementedError


class Lru(Slow):
    def victim(self, row: int) -> int:
        before = self.model[:row]
        return min(self.held, key=lambda m: len(before) - 1 - before[::-1].index(m))


class Gdsf(Slow):
    def __init__(self, trace: Trace, capacity: float) -> None:
        super().__init__(trace, capacity)
        self.clock, self.rows, self.priority = 0.0, dict.fromkeys(range(len(self.size)), 0), dict[int, float]()

    def seen(self, row: int, m: int) -> None:
        self.rows[m] += 1

    def hit(self, row: int, m: int) -> None:
        self.priority[m] = self.clock + self.rows[m]

    enter = hit

    def victim(self, row: int) -> int:
        least = min(sorted(self.held), key=self.priority.__getitem__)
        self.clock = self.priority[least]
        return least


class Lfu(Slow):
    """Rows decayed with a time constant of an hour."""

    def victim(self, row: int) -> int:
        def count(m: int) -> float:
            return sum(math.exp((self.ts[i] - self.ts[row]) / 3600.0) for i in range(row) if self.model[i] == m)

        return min(self.held, key=count)


class Belady(Slow):
    def victim(self, row: int) -> int:
        after = self.model[row + 1 :]
        return max(sorted(self.held), key=lambda m: after.index(m) if m in after else math.inf)


class Sieve(Slow):
    """Algorithm 1 of Zhang et al., NSDI 2024: `p` is the hand, `queue[0]` the tail, `prev` leads to the head; past the head it is None."""

    def __init__(self, trace: Trace, capacity: float) -> None:
        super().__init__(trace, capacity)
        self.queue: list[int] = []
        self.visited: dict[int, bool] = {}
        self.p: int | None = None

    def prev(self, m: int) -> int | None:
        at = self.queue.index(m) + 1
        return self.queue[at] if at < len(self.queue) else None

    def hit(self, row: int, m: int) -> None:
        self.visited[m] = True

    def enter(self, row: int, m: int) -> None:
        self.queue.append(m)
        self.visited[m] = False

    def victim(self, row: int) -> int:
        o = self.queue[0] if self.p is None else self.p
        while self.visited[o]:
            self.visited[o] = False
            following = self.prev(o)
            o = self.queue[0] if following is None else following
        self.p = self.prev(o)
        self.queue.remove(o)
        return o


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("name", "slow"), [("lru", Lru), ("gdsf", Gdsf), ("lfu:3600", Lfu), ("belady", Belady), ("sieve", Sieve)])
def test_as_a_plain_version_of_itself(name: str, slow: Callable[[Trace, float], Slow], seed: int, tmp_path: Path) -> None:
    trace = spaced_trace(tmp_path, seed)
    capacity = 0.3 * float(trace.bytes_.sum() - 500 * GB)
    logs = Simulation(trace, capacity, link_bytes_per_s=LINK).rivals([name])[name]
    found = [f == "ready" for f in logs.waits["found"].to_pylist()]
    hits = slow(trace, capacity).run()
    assert 0.1 < np.mean(hits) < 0.95
    assert found == hits

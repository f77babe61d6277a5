"""A tiny simulation of one node with LRU, on-demand loads and a naive prefetcher: it makes coherent logs for tests of
what reads them.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from prefetcher.replay.accounts import SCHEMAS, PolicyLogs


def table(name: str, rows: list[dict[str, object]]) -> pa.Table:
    """`rows` as the log called `name`; columns that a row leaves out are null."""
    schema = SCHEMAS[name]
    return pa.table(
        {field.name: pa.array([r.get(field.name) for r in rows], field.type) for field in schema}, schema=schema
    )


def simulate(
    ts: np.ndarray,
    model: np.ndarray,
    names: list[str],
    sizes: np.ndarray,
    capacity: int,
    rate: float,
    *,
    prefetch_every: int = 0,
    seed: int = 0,
) -> PolicyLogs:
    """Serve rows in order over one link, first come first served; every `prefetch_every` rows, guess a model and load
    it if it fits.
    """
    rng = np.random.default_rng(seed)
    held: dict[int, dict[str, object]] = {}
    residency: list[dict[str, object]] = []
    transfers: list[dict[str, object]] = []
    waits: list[dict[str, object]] = []
    orders: list[dict[str, object]] = []
    link_free = float(ts[0])
    end = float(ts[-1])

    def give_up(m: int, when: float, outcome: str) -> None:
        entry = held.pop(m)
        entry["end_s"] = when
        order = entry.pop("order", None)
        if isinstance(order, dict):
            order["end_s"] = when
            if order["first_use_s"] is None:
                order["outcome"] = outcome
            entry["outcome"] = order["outcome"]

    def load(m: int, now: float, cause: str) -> float:
        """Take memory and move the bytes; the time at which they are ready."""
        nonlocal link_free
        start = max(now, link_free)
        size = int(sizes[m])
        ready = start + size / rate
        idle = sorted((k for k in held if float(held[k]["ready_s"]) <= start), key=lambda k: held[k]["used"])
        room = capacity - sum(int(held[k]["bytes"]) for k in held)
        fits = room + sum(int(held[k]["bytes"]) for k in idle) >= size
        while fits and room < size:
            room += int(held[idle[0]]["bytes"])
            give_up(idle.pop(0), start, "displaced")
        link_free = ready
        transfers.append(
            {
                "node": "n0",
                "model": names[m],
                "from_tier": "disk",
                "to_tier": "host",
                "start_s": start,
                "end_s": ready,
                "bytes": size,
            }
            | {"cause": cause}
        )
        if fits:
            entry = {
                "node": "n0",
                "model": names[m],
                "version": "",
                "tier": "host",
                "start_s": start,
                "ready_s": ready,
                "cause": cause,
            }
            entry |= {"last_use_s": None, "outcome": "demand", "bytes": size, "used": start}
            held[m] = entry
            residency.append(entry)
        return ready

    for i, (now, m) in enumerate(zip(ts.tolist(), model.tolist(), strict=True)):
        if m in held:
            entry = held[m]
            wait = max(0.0, float(entry["ready_s"]) - now)
            found = "moving" if wait else "ready"
            order = entry.get("order")
            if isinstance(order, dict) and order["first_use_s"] is None:
                order |= {"first_use_s": now, "outcome": "late" if wait else "timely"}
            entry |= {"last_use_s": now, "used": now}
        else:
            wait, found = load(m, now, "demand") - now, "absent"
            if m in held:
                held[m] |= {"last_use_s": now}
        waits.append({"ts": now, "model": names[m], "node": "n0", "wait_s": wait, "found": found})
        if prefetch_every and i % prefetch_every == 0:
            guess = int(rng.integers(len(names)))
            if guess not in held and link_free <= now:
                ready = load(guess, now, "forecast")
                order = {"decision_id": f"d{i}", "node": "n0", "model": names[guess], "version": "", "tier": "host"}
                order |= {
                    "cause": "forecast",
                    "arm": "treated",
                    "issued_s": now,
                    "begin_s": ready - int(sizes[guess]) / rate,
                }
                order |= {
                    "ready_s": ready,
                    "first_use_s": None,
                    "end_s": None,
                    "outcome": "open",
                    "premature": False,
                    "redundant": False,
                }
                if guess in held:
                    held[guess]["order"] = order
                else:
                    order |= {"ready_s": None, "outcome": "failed", "end_s": ready}
                orders.append(order)
    for m in list(held):
        give_up(m, max(end, float(held[m]["ready_s"])), "useless")
    return PolicyLogs(
        table("residency", residency), table("transfers", transfers), table("waits", waits), table("orders", orders)
    )


def requests(
    rows: int, models: int, *, days: float = 7.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, list[str], np.ndarray]:
    """(ts, model, names, sizes) of a skewed log with a daily rhythm, from Monday 2024-01-01 UTC on."""
    rng = np.random.default_rng(seed)
    day = rng.integers(0, max(1, int(days)), rows) * 86400.0
    hour = np.clip(rng.normal(14.0, 4.0, rows), 0.0, 23.99) * 3600.0
    ts = np.sort(1704067200.0 + day + hour)
    model = np.minimum(rng.zipf(1.4, rows) - 1, models - 1)
    names = [f"team-{i % 5}/model-{i:02d}" for i in range(models)]
    return ts, model, names, rng.choice([0.1, 2.0, 15.0, 40.0, 140.0], models) * 1e9

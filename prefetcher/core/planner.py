"""Who is loaded next, who makes room, and who is not cached at all: the rules that every shell shares.

Each rule is a kernel over arrays, called by the simulated node of replay and shadow caches (`core.node`), by the agent's residency machine
(`core.residency`) and by the controller. Scores come in as `index` (seconds of waiting saved per byte-second, `core.value`).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from prefetcher.core.compiled import kernel, kernel_part
from prefetcher.core.node import BLOCK_BYTES

__all__ = ["choose_parts", "choose_victims", "next_in_smith_order", "outbids", "outranks", "victims_in_order"]

#: What is as close as this is a tie: seconds that are left are sums of many blocks' seconds.
ROUNDING = 1e-9


@kernel_part
def victims_in_order(
    index: npt.NDArray[np.float64], size_bytes: npt.NDArray[np.float64], candidates: npt.NDArray[np.int64], need_bytes: float
) -> tuple[npt.NDArray[np.int64], bool]:
    """The classic way: lowest index first until the room suffices; ties fall to the earlier candidate.

    `index` float64[n] and `size_bytes` float64[n] are by model, `candidates` int64[c] are the models that may go. Returns the victims in
    the order of their index, and whether they suffice; if not, there are none.
    """
    total = 0.0
    for m in candidates:
        total += size_bytes[m]
    if total < need_bytes:
        return candidates[:0], False
    order = np.empty(len(candidates), np.int64)
    taken = np.zeros(len(candidates), np.bool_)
    got = 0.0
    number = 0
    while got < need_bytes and number < len(candidates):
        lowest = -1
        for c in range(len(candidates)):
            if not taken[c] and (lowest < 0 or index[candidates[c]] < index[candidates[lowest]]):
                lowest = c
        taken[lowest] = True
        order[number] = candidates[lowest]
        got += size_bytes[candidates[lowest]]
        number += 1
    return order[:number], True


@kernel
def choose_victims(
    index: npt.NDArray[np.float64], size_bytes: npt.NDArray[np.float64], candidates: npt.NDArray[np.int64], need_bytes: float
) -> tuple[npt.NDArray[np.int64], bool]:
    """The victims as a set: as `victims_in_order`, then, from the highest down, those not needed stay."""
    chosen, suffice = victims_in_order(index, size_bytes, candidates, need_bytes)
    got = 0.0
    for m in chosen:
        got += size_bytes[m]
    stays = np.zeros(len(chosen), np.bool_)
    for v in range(len(chosen) - 2, -1, -1):
        if got - size_bytes[chosen[v]] >= need_bytes:
            got -= size_bytes[chosen[v]]
            stays[v] = True
    return chosen[~stays], suffice


@kernel
def choose_parts(
    index: npt.NDArray[np.float64], size_bytes: npt.NDArray[np.float64], candidates: npt.NDArray[np.int64], need_bytes: float
) -> tuple[npt.NDArray[np.int64], bool, float]:
    """The victims where the last one may keep a part: as `victims_in_order`, and how many bytes the last keeps: what the room does not
    need, in whole blocks.
    """
    chosen, suffice = victims_in_order(index, size_bytes, candidates, need_bytes)
    got = 0.0
    for m in chosen:
        got += size_bytes[m]
    kept = math.floor(max(got - need_bytes, 0.0) / BLOCK_BYTES) * float(BLOCK_BYTES) if len(chosen) else 0.0
    return chosen, suffice, kept


@kernel
def outbids(
    index_of_entrant: float,
    entrant_bytes: float,
    index: npt.NDArray[np.float64],
    size_bytes: npt.NDArray[np.float64],
    victims: npt.NDArray[np.int64],
    kept: float,
) -> bool:
    """Whether the entrant is worth its victims: index × bytes at least the sum over them. When not, serve it without caching (bypass).

    `entrant_bytes` are all of its bytes, also where it holds a part of them: whole it saves by every byte, as a part by none. `kept` are
    those that the last victim keeps (`choose_parts`).
    """
    value = 0.0
    for v in victims:
        value += index[v] * size_bytes[v]
    if kept > 0.0:
        value -= index[victims[-1]] * kept
    return index_of_entrant * entrant_bytes >= value


@kernel_part
def outranks(waiting: float, remaining: float, waiting_of_other: float, remaining_of_other: float) -> bool:
    """Whether a load goes before another in Smith's order: more waiting rows per remaining byte (or second), by more than what rounding
    of seconds can make. A demand load that moves gives way to one that does."""
    return waiting * remaining_of_other > waiting_of_other * remaining * (1.0 + ROUNDING)


@kernel
def next_in_smith_order(waiting: npt.NDArray[np.float64], remaining: npt.NDArray[np.float64]) -> int:
    """The position of the queued load with the most waiting rows per remaining byte (or second); ties to the earlier in the queue.

    Source: W. E. Smith, "Various optimizers for single-stage production", 1956.
    """
    best = 0
    for q in range(1, len(waiting)):
        if outranks(waiting[q], remaining[q], waiting[best], remaining[best]):
            best = q
    return best

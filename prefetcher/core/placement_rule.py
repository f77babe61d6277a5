"""Which node a load goes to: the rule that replay's routing and live placement share. Kernel parts over arrays; pure.

What a load costs on a node is what it adds to everybody's waiting there, in seconds: the rows that want it wait for what the links have
before it and for the load itself, those that it goes before wait for it, and what its memory displaces would have saved its own. Links
serve demand in Smith's order (`core.planner`), and what runs gives way like what waits, so a load that runs stands in the queue with what
is left of it; only what does not give way is told apart. Covers neither what is decided for a burst (`core.placement`) nor where the
arrays come from (`core.cluster_routing`, `controller.placing`).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from prefetcher.core.compiled import kernel_part
from prefetcher.core.planner import outranks

__all__ = [
    "ABSENT",
    "MOVING",
    "PLACED",
    "READY",
    "UNKNOWN",
    "At",
    "best_node",
    "displaced_s",
    "is_far_sooner",
    "most_present",
    "wait_on_link",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class At(IntEnum):
    """Where a model is at a node."""

    UNKNOWN = 0  #: it can't be loaded there
    ABSENT = 1
    PLACED = 2  #: decided, not begun, and nobody waits there
    MOVING = 3  #: on the link, or demand waits for the link
    READY = 4


# The same codes as plain integers, for kernels.
UNKNOWN, ABSENT, PLACED, MOVING, READY = (int(at) for at in At)

#: A load queues beside an idle link only where that has it ready in less than this share of the time: that link is slow, or the weights are
#: nearer to the busy one. And so many seconds sooner: below that, speeds are noise, and requests are on their way.
_QUEUES_AT = 0.5
_QUEUES_S = 0.1
#: Costs that differ by less are equal, and hashing decides: it is no more than what adding up seconds in another order changes.
_SAME_RATIO = 1e-9


@kernel_part
def wait_on_link(own_rows: float, own_s: float, running_s: float, queue_s: Floats, queue_rows: Floats, queued: int) -> tuple[float, float]:
    """How long `own_rows` rows wait for a load of `own_s` seconds that comes to a link now, and how long it makes others wait, all their
    rows together.

    `running_s` is what is left of a load that does not give way; of the `queued` loads that wait or give way, `queue_s` is what is left and
    `queue_rows` how many rows wait for each. Of equals, what was there goes first.
    """
    before_s = running_s
    behind = 0.0
    for q in range(queued):
        if outranks(own_rows, own_s, queue_rows[q], queue_s[q]):
            behind += queue_rows[q]
        else:
            before_s += queue_s[q]
    return before_s + own_s, own_s * behind


@kernel_part
def displaced_s(size: float, free: float, worth_per_byte: float, own: float) -> float:
    """What a load of `size` bytes takes from others on a node with `free` bytes, where each byte that goes would have saved
    `worth_per_byte` seconds; or `own`, what it saves itself, where that is less: then it is not kept."""
    return min(max(0.0, size - max(free, 0.0)) * worth_per_byte, own)


@kernel_part
def is_far_sooner(queued_s: float, idle_s: float) -> bool:
    """Whether waiting in a queue is so much shorter than an idle link's load that it is worth it."""
    return queued_s < _QUEUES_AT * idle_s and queued_s < idle_s - _QUEUES_S


@kernel_part
def _may_go(n: int, able: Flags, fits: Flags, some_fit: bool, idle: Flags, wait: Floats, idle_wait: float) -> bool:
    if not able[n] or (some_fit and not fits[n]):
        return False
    return bool(idle[n] or is_far_sooner(wait[n], idle_wait))


@kernel_part
def best_node(cost: Floats, wait: Floats, able: Flags, fits: Flags, idle: Flags, rank: Ints) -> tuple[int, float]:
    """Of N nodes the one for a load, and what it would cost more without it; −1 where none can load it.

    By node: `cost` and `wait` float64[N], seconds; whether it is `able` to load it, it `fits` its memory, and its links are `idle`; `rank`
    int64[N], the model's preference where costs are equal, 0 first. Where it fits nowhere, the one that serves it soonest without caching
    it. No busy one while another is idle, unless that is far slower.
    """
    nodes = len(cost)
    some_fit = False
    for n in range(nodes):
        some_fit = some_fit or (able[n] and fits[n])
    idle_wait = np.inf
    for n in range(nodes):
        if able[n] and (fits[n] or not some_fit) and idle[n]:
            idle_wait = min(idle_wait, wait[n])
    least, second = np.inf, np.inf
    for n in range(nodes):
        if _may_go(n, able, fits, some_fit, idle, wait, idle_wait):
            if cost[n] < least:
                least, second = cost[n], least
            else:
                second = min(second, cost[n])
    best = -1
    same = least + _SAME_RATIO * least
    for n in range(nodes):
        if (best < 0 or rank[n] < rank[best]) and cost[n] <= same and _may_go(n, able, fits, some_fit, idle, wait, idle_wait):
            best = n
    return best, second - least if second < np.inf else np.inf


@kernel_part
def most_present(at: npt.NDArray[np.int8], ready_in_s: Floats, rank: Ints) -> int:
    """The node where a model is ready, or else is moving and comes first; −1 for neither. Of equals the first by `rank`."""
    best = -1
    for n in range(len(at)):
        if at[n] < MOVING:
            continue
        if best < 0 or at[n] > at[best]:
            best = n
        elif at[n] == at[best]:
            ahead_s = 0.0 if at[n] == READY else ready_in_s[best] - ready_in_s[n]
            if ahead_s > 0.0 or (ahead_s == 0.0 and rank[n] < rank[best]):
                best = n
    return best

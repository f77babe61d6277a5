"""What becomes of an order: the one rule, for one order as a ledger follows it, and for many as a replay's log has them.

Outcomes, with begin b, ready t1, first use u and end e of an order (exactly one each):

| outcome      | when                                              | settled at |
| ------------ | ------------------------------------------------- | ---------- |
| `timely`     | t1 <= u                                           | u          |
| `late`       | b <= u < t1                                       | t1         |
| `useless`    | ready, given up unused for any reason but room    | e          |
| `displaced`  | ready, evicted unused to make room                | e          |
| `superseded` | ended before bytes moved                          | e          |
| `cancelled`  | stopped after bytes moved and before ready        | e          |
| `failed`     | the load failed                                   | e          |
| `lost`       | the node, or its agent's process, is gone         | e          |

A row that is heard of late may make an order `late` when it is ready already.

Covers no totals (`core.ledger`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefetcher.core.facts import Ending
from prefetcher.core.types import Order, Outcome

__all__ = ["OrderEntry", "outcome_of", "outcomes_of"]

_BY_ENDING = {
    Ending.GIVEN_UP: Outcome.USELESS,
    Ending.DISPLACED: Outcome.DISPLACED,
    Ending.REPLACED: Outcome.SUPERSEDED,
    Ending.CANCELLED: Outcome.CANCELLED,
    Ending.FAILED: Outcome.FAILED,
    Ending.LOST: Outcome.LOST,
}


@dataclass(slots=True)
class OrderEntry:
    """One order's record. `moved_bytes` were moved for it, in `moving_s`; flags are None while they can't be known."""

    order: Order
    bytes: int
    begin_s: float | None = None
    ready_s: float | None = None
    first_use_s: float | None = None
    end_s: float | None = None
    ending: Ending | None = None
    reason: str = ""
    moved_bytes: int = 0
    moving_s: float = 0.0
    premature: bool = False
    redundant: bool | None = None

    @property
    def outcome(self) -> Outcome:
        return outcome_of(self.ready_s, self.first_use_s, self.ending)

    @property
    def early_s(self) -> float:
        """How long it was ready before its first use, or its end."""
        until_s = self.first_use_s if self.first_use_s is not None else self.end_s
        return 0.0 if self.ready_s is None or until_s is None else max(0.0, until_s - self.ready_s)

    @property
    def saved_s(self) -> float:
        """How long its bytes had moved before somebody wanted them: that much less was waited for. 0 unless it was used."""
        if self.ready_s is None or self.first_use_s is None:
            return 0.0
        return max(0.0, self.moving_s - max(0.0, self.ready_s - self.first_use_s))


def outcome_of(ready_s: float | None, first_use_s: float | None, ending: Ending | None) -> Outcome:
    """The one outcome of an order, as the table above says."""
    if ready_s is not None and first_use_s is not None:
        return Outcome.TIMELY if ready_s <= first_use_s else Outcome.LATE
    return Outcome.OPEN if ending is None else _BY_ENDING[ending]


def outcomes_of(
    ready_s: npt.NDArray[np.float64], first_use_s: npt.NDArray[np.float64], unused: npt.NDArray[np.object_]
) -> npt.NDArray[np.object_]:
    """`outcome_of` for many orders: object[n] of `Outcome`.

    Args:
        ready_s: float64[n], NaN or infinite where it never became ready.
        first_use_s: float64[n], the same where it was never used.
        unused: object[n], the `Ending` of each order, None where it has not ended.
    """
    found = np.empty(len(ready_s), dtype=object)
    found[:] = [Outcome.OPEN if ending is None else _BY_ENDING[ending] for ending in unused]
    used = np.isfinite(ready_s) & np.isfinite(first_use_s)
    with np.errstate(invalid="ignore"):
        in_time = ready_s <= first_use_s
    # One at a time: numpy would make plain text of names.
    found[used & in_time] = Outcome.TIMELY
    found[used & ~in_time] = Outcome.LATE
    return found

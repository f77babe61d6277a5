"""What a tenant may hold of a node's memory beyond demand: prefetches that nobody used yet, pins, and leases of programs.

Demand is never capped: what requests bring and use is weighed as anybody's. A tenant that asks for more than its share gives up its own
unused prefetches first, those of the lowest index; where they don't suffice it gets no more, and nobody else loses anything. One rule for
the controller's plan and the residency machine. Covers neither who a caller is nor what a tenant's requests waited (`core.ledger`). Pure.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prefetcher.core.planner import choose_victims
from prefetcher.core.types import TenantQuota

__all__ = ["CAPPED", "Quotas", "gives_up"]

#: Why something is refused, as a short name.
CAPPED = "tenant_cap"
_MOST_REMEMBERED = 100_000


def gives_up(
    cap_bytes: float,
    claimed_bytes: float,
    entrant_bytes: float,
    entrant_index: float,
    index: npt.NDArray[np.float64],
    size_bytes: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.int64], bool]:
    """What a tenant that holds `claimed_bytes` gives up of its own so that `entrant_bytes` more stay within `cap_bytes`.

    `index` and `size_bytes` float64[c] are of its claims that may go; those worth as much as the entrant stay. Returns their positions,
    lowest index first, none where nothing has to go, and whether they suffice.
    """
    below = np.flatnonzero(index < entrant_index)
    victims, enough = choose_victims(index, size_bytes, below, float(claimed_bytes + entrant_bytes - cap_bytes))
    return victims, bool(enough)


class Quotas:
    """The quotas of all tenants. A model is of the first tenant that names it; one that none names is nobody's, and not capped."""

    def __init__(self, quotas: Sequence[TenantQuota] = ()) -> None:
        self.quotas = tuple(quotas)
        self._of: dict[str, TenantQuota | None] = {}

    def of(self, model: str) -> TenantQuota | None:
        """The quota that `model` counts against."""
        if not self.quotas:
            return None
        if model not in self._of:
            if len(self._of) >= _MOST_REMEMBERED:
                self._of.clear()
            self._of[model] = next((quota for quota in self.quotas if any(_names(each, model) for each in quota.models)), None)
        return self._of[model]

    @staticmethod
    def cap_bytes(quota: TenantQuota, budget_bytes: float) -> float:
        """How many bytes of a memory of `budget_bytes` that is: the smaller of its share and its bytes."""
        share = budget_bytes if quota.most_ratio is None else quota.most_ratio * budget_bytes
        return share if quota.most_bytes is None else min(share, float(quota.most_bytes))


def _names(pattern: str, model: str) -> bool:
    return pattern == model or fnmatch.fnmatchcase(model, pattern)

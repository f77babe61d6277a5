"""Token buckets by name: how many may come at once and how many in the long run. In memory of this process, and bounded.

Among several processes each has buckets of its own, so that together they let as many times as much through.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from prefetcher.clock import Clock

__all__ = ["MOST_BUCKETS", "TokenBuckets"]

#: Past that the bucket that was used longest ago is forgotten, which fills it.
MOST_BUCKETS = 50_000


class TokenBuckets:
    """Buckets by name. Safe for threads."""

    def __init__(self, clock: Clock, most: int = MOST_BUCKETS) -> None:
        self._clock = clock
        self._most = most
        self._lock = threading.Lock()
        #: name -> (tokens, at which real second).
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, name: str, count: float, rate_per_s: float, burst: float) -> float:
        """Takes `count` tokens, at most a full bucket's, out of the bucket that gets `rate_per_s` and holds `burst`: 0, or, where there are
        not as many and none is taken, the real seconds until there will be."""
        now_s = self._clock.steady_s() / self._clock.speed
        wanted = min(count, burst)
        with self._lock:
            tokens, at_s = self._buckets.pop(name, (burst, now_s))
            tokens = min(burst, tokens + (now_s - at_s) * rate_per_s)
            left = tokens - wanted
            # A sum of many small refills may miss a whole token by its last bit.
            enough = left >= -1e-9
            self._buckets[name] = (max(0.0, left) if enough else tokens, now_s)
            if len(self._buckets) > self._most:
                self._buckets.popitem(last=False)
        return 0.0 if enough else -left / rate_per_s

    def __len__(self) -> int:
        return len(self._buckets)

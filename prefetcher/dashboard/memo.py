"""What was made lately, kept for whoever asks next: many open pages cost what one costs.

Covers no making, and no promise that it is the latest: each thing is as old as its maker allows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prefetcher.clock import Clock

__all__ = ["Memo"]

T = TypeVar("T")
#: Things that are kept; the one that was made first goes first.
_MOST = 256


@dataclass(slots=True)
class _Slot:
    guard: threading.Lock = field(default_factory=threading.Lock)
    made_s: float = float("-inf")
    value: Any = None


class Memo:
    """Safe for threads: one makes a thing while the others that want it wait."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slots: dict[object, _Slot] = {}
        self._guard = threading.Lock()

    def get(self, key: object, for_s: float, make: Callable[[], T]) -> T:
        """What is kept under `key` if it is younger than `for_s` real seconds, else what `make` gives. What `make` raises is not kept."""
        with self._guard:
            slot = self._slots.setdefault(key, _Slot())
            while len(self._slots) > _MOST:
                del self._slots[next(iter(self._slots))]
        with slot.guard:
            now_s = self._clock.steady_s() / self._clock.speed
            if now_s - slot.made_s >= for_s:
                slot.value = make()
                slot.made_s = now_s
            found: T = slot.value
            return found

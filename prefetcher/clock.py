"""The only place that reads a clock or sleeps; everything else takes `now_s` or a `Clock`."""

from __future__ import annotations

import threading
import time
from typing import Protocol

__all__ = ["Clock", "ScaledClock", "SystemClock", "VirtualClock"]


class Clock(Protocol):
    """Time since 1970-01-01 UTC in seconds, a steady time for durations, and a wait that another thread can end.

    `speed` is how many of its seconds pass in one of the machine's: patience with the machine is multiplied by it.
    """

    speed: float

    def now_s(self) -> float: ...

    def steady_s(self) -> float: ...

    def wait(self, event: threading.Event, timeout_s: float) -> bool: ...


class SystemClock:
    """The machine's clock."""

    speed = 1.0

    def now_s(self) -> float:
        return time.time()

    def steady_s(self) -> float:
        return time.monotonic()

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        return event.wait(timeout_s)


class ScaledClock:
    """A clock that runs `speed` times as fast as the machine's from `origin_s` on: demos drive a day in minutes with it."""

    def __init__(self, speed: float, origin_s: float) -> None:
        if speed <= 0:
            raise ValueError(f"a clock's speed must be positive, got {speed}")
        self.speed = speed
        self._origin_s = origin_s
        self._start_s = time.monotonic()

    def now_s(self) -> float:
        return self._origin_s + (time.monotonic() - self._start_s) * self.speed

    def steady_s(self) -> float:
        return (time.monotonic() - self._start_s) * self.speed

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        return event.wait(timeout_s / self.speed)


class VirtualClock:
    """A clock that moves only when it is told: tests."""

    speed = 1.0

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def steady_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        if not event.is_set():
            self._now_s += timeout_s
        return event.is_set()

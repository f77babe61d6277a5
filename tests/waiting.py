"""Waiting for what happens by itself, within a bound that is longer than anything here takes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from prefetcher.errors import PrefetcherError

T = TypeVar("T")
_LOOK_S = 0.02


def eventually(what: Callable[[], T], timeout_s: float = 60.0) -> T:
    """What `what` gives once it is true; whoever does not answer meanwhile, or is too busy to, is asked again."""
    never = threading.Event()
    error: Exception | None = None
    for _ in range(int(timeout_s / _LOOK_S)):
        with contextlib.suppress(PrefetcherError, OSError):
            found = what()
            if found:
                return found
        never.wait(_LOOK_S)
    try:
        what()
    except (PrefetcherError, OSError) as exc:
        error = exc
    pytest.fail(f"it did not happen in {timeout_s:.0f} s" + (f": {error}" if error else ""))

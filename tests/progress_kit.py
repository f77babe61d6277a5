"""For tests of what stands on standard error: how far a slow machine has come is `prefetcher.progress`'s matter, and tested there."""

from __future__ import annotations

import pytest

from prefetcher import progress

__all__ = ["no_progress"]


@pytest.fixture
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_EVERY_S", float("inf"))

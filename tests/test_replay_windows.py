"""Replay under a book of windows: the default changes nothing, another one bounds ours, and what is none is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_tuning import told, two_kinds

from prefetcher.core.tuner import book_of
from prefetcher.core.types import Window
from prefetcher.core.windows import DEFAULT_WINDOW, OWN_HORIZON_S, BookEntry, Segment, WindowBook
from prefetcher.errors import InputError, UsageError
from prefetcher.replay.run import Ours, Simulation, replay_command
from prefetcher.replay.trace import Trace
from prefetcher.replay.windows import read_book

SMALL = Segment("small", (("bytes", -np.inf, 20e9),))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return two_kinds(tmp_path_factory.mktemp("two"), days=3)


def ours(trace: Trace, windows: WindowBook | None) -> Ours:
    return Simulation(trace, 70e9, blocks=told(trace), windows=windows).ours()


def test_a_book_of_default_windows_changes_nothing(trace: Trace) -> None:
    without, with_book = ours(trace, None), ours(trace, book_of((SMALL,), DEFAULT_WINDOW))
    assert len(without.logs.orders) > 50
    for name in ("orders", "waits", "residency", "transfers"):
        assert getattr(without.logs, name).equals(getattr(with_book.logs, name)), name


def test_windows_bound_what_ours_fetches_segment_by_segment(trace: Trace) -> None:
    """Small models are never fetched early enough to matter, large ones as ever."""
    book = WindowBook((BookEntry(SMALL, Window(0.0, OWN_HORIZON_S, 60.0)),))
    orders = ours(trace, book).logs.orders.to_pydict()
    assert len(orders["model"]) > 5
    assert all(model.startswith("rare") for model in orders["model"])
    held = WindowBook(rest=Window(21_600.0, OWN_HORIZON_S, 60.0))
    short = ours(trace, held).logs.orders.to_pandas()
    stayed = (short.end_s - short.ready_s)[short.outcome == "useless"]
    assert stayed.max() <= 6 * 60.0 + 1e-6, "six holds of a minute"


def test_what_is_no_book_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can't be read as a book of windows"):
        read_book(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(InputError, match="is no book of windows: a book of windows is a JSON object"):
        read_book(tmp_path / "list.json")
    (tmp_path / "book.json").write_text(json.dumps(WindowBook().to_json()))
    assert read_book(tmp_path / "book.json") == WindowBook()
    with pytest.raises(UsageError, match="--windows bound prefetches into one tier of memory only"):
        replay_command(
            log=tmp_path / "log", out=tmp_path / "out", policy="lru", host_bytes=10**9, tiers="disk,host,device",
            windows=tmp_path / "book.json",
        )  # fmt: skip

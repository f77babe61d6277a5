"""`bench load` on a small model: the whole way is measured, and files that cannot be made cold are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from prefetcher.bench import load
from prefetcher.errors import InputError

MB = 1 << 20


def on_a_disk(folder: Path) -> bool:
    path = folder / "probe"
    path.write_bytes(b"x" * MB)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return load._make_cold([path]) == 0.0


def test_pages_in_memory_are_seen_and_dropped(tmp_path: Path) -> None:
    if not on_a_disk(tmp_path):
        pytest.skip("the folder for temporary files is in memory")
    path = tmp_path / "weights"
    path.write_bytes(bytes(3 * MB + 5))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    assert load._cached_pages(path) == (769, 769)
    assert load._make_cold([path]) == 0.0
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), 1, 2 * MB)
    assert load._cached_pages(path) == (1, 769)


def test_the_whole_way_is_measured(tmp_path: Path) -> None:
    if not on_a_disk(tmp_path):
        pytest.skip("the folder for temporary files is in memory")
    said: list[str] = []
    report = load.run(tmp_path / "load.json", said.append, folder=tmp_path, total_bytes=24 * MB, rounds=2)
    assert json.loads((tmp_path / "load.json").read_text()) == report
    figures, phases = report["figures"], report["phases"]
    assert figures["bytes"] > 24 * MB
    assert 0 < figures["best_ratio_over_cat"] <= figures["ratio_over_cat"] <= figures["worst_ratio_over_cat"]
    assert set(phases) == {"order_to_start_s", "load_s", "ready_to_tensors_s"}
    assert all(seconds >= 0 for seconds in phases.values())
    # The phases are parts of the whole, each a median of its own.
    assert phases["load_s"] < figures["seconds"] * 2
    assert len([line for line in said if line.startswith("round")]) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["load.json", "probe"]


def test_a_folder_in_memory_is_refused_with_what_to_do() -> None:
    memory = Path("/dev/shm")
    with pytest.raises(InputError, match="set TMPDIR"):
        load.run(None, None, folder=memory, total_bytes=8 * MB, rounds=1)
    assert not list(memory.glob("prefetcher-bench-*"))

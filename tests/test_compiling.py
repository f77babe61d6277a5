"""How kernels are compiled: what a cached one depends on, what goes by reference, and that all is compiled ahead, in one version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core.caching import FunctionCache

from prefetcher import compiling
from prefetcher.core import compiled
from prefetcher.core.compiled import fingerprint, is_compiled, kernel, kernel_part
from prefetcher.core.planner import victims_in_order
from prefetcher.core.references import by_reference
from prefetcher.errors import PrefetcherError


def python(script: str, *arguments: str, cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=cwd,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- by reference ---


class Shelf(NamedTuple):
    size: np.ndarray
    count: np.ndarray
    limit: float


@kernel_part
def put(shelf: Shelf, place: int, size: float) -> float:
    if size > shelf.limit:
        return -1.0
    shelf.size[place] += size
    shelf.count[0] += 1
    return float(shelf.size.sum())


@kernel
def put_all(shelf: Shelf, sizes: np.ndarray) -> float:
    shelf = by_reference(shelf)
    total = 0.0
    for i in range(len(sizes)):
        total += put(shelf, i % len(shelf.size), sizes[i])
    return total


def test_parts_read_and_write_through_a_reference_what_python_would() -> None:
    sizes = np.array([1.0, 2.5, 9.0, 4.0])
    shelves = [Shelf(np.zeros(3), np.zeros(1, np.int64), 5.0) for _ in range(2)]
    assert put_all(shelves[0], sizes) == put_all.py_func(shelves[1], sizes) == 1.0 + 3.5 - 1.0 + 7.5
    np.testing.assert_array_equal(shelves[0].size, [5.0, 2.5, 0.0])
    np.testing.assert_array_equal(shelves[0].size, shelves[1].size)
    assert shelves[0].count[0] == shelves[1].count[0] == 3


def test_in_python_a_reference_is_the_tuple_itself() -> None:
    shelf = Shelf(np.zeros(1), np.zeros(1, np.int64), 1.0)
    assert by_reference(shelf) is shelf


def test_arrays_outlive_the_references_to_them() -> None:
    shelf = Shelf(np.zeros(3), np.zeros(1, np.int64), 5.0)
    references = [sys.getrefcount(array) for array in (shelf.size, shelf.count)]
    for _ in range(50):
        put_all(shelf, np.ones(4))
    assert [sys.getrefcount(array) for array in (shelf.size, shelf.count)] == references


# --- what a cached kernel depends on ---


def made(code: str, **names: Any) -> Any:
    exec(textwrap.dedent(code), names)
    return names["f"]


def test_a_fingerprint_follows_code_constants_and_parts() -> None:
    code = "def f(x): return g(x) * FACTOR + TABLE[0]"

    def of(part: str = "def f(x): return x + 1", factor: Any = 2.0, table: float = 1.0, code: str = code) -> str:
        return fingerprint(made(code, g=kernel_part(made(part)), FACTOR=factor, TABLE=np.array([table])))

    assert of() == of()
    others = [
        of(part="def f(x): return x + 2"),
        of(part="def f(x): return x - 1"),
        of(factor=3.0),
        of(factor=(2.0, 1)),
        of(table=2.0),
        of(code="def f(x): return g(x) * FACTOR - TABLE[0]"),
        of(code="def f(x): return g(x) * FACTOR + TABLE[1]"),
    ]
    assert len({of(), *others}) == 1 + len(others)


def test_a_fingerprint_follows_parts_of_parts_and_kernels() -> None:
    def of(number: int) -> set[str]:
        inner = kernel_part(made(f"def f(x): return x + {number}"))
        middle = made("def f(x): return inner(x)", inner=inner)
        return {
            fingerprint(made("def f(x): return middle(x)", middle=kernel_part(middle))),
            fingerprint(made("def f(x): return middle(x)", middle=kernel(made("def f(x): return inner(x)", inner=inner)))),
        }

    assert of(1).isdisjoint(of(2))


def test_a_change_in_another_file_is_seen(tmp_path: Path) -> None:
    part, whole = tmp_path / "part.py", tmp_path / "whole.py"
    part.write_text("from prefetcher.core.compiled import kernel_part\n@kernel_part\ndef step(x):\n    return x + 1\n")
    whole.write_text(
        "from prefetcher.core.compiled import is_compiled, kernel\nfrom part import step\n@kernel\ndef walk(x):\n    return step(x) * 10\n"
    )
    script = """
        import json
        from whole import is_compiled, walk
        before = is_compiled(walk)
        print(json.dumps([before, walk(1), sum(walk.stats.cache_hits.values())]))
    """

    def walk() -> Any:
        return json.loads(python(script, cwd=tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "cache")))

    assert walk() == [False, 20, 0]
    assert walk() == [True, 20, 1]
    part.write_text(part.read_text().replace("x + 1", "x + 2"))
    assert walk() == [False, 30, 0]


# --- without a disk that takes it ---


def homeless(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kernel of a process that found no folder to keep it in."""

    def none(_function: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    with monkeypatch.context() as patch:
        patch.setattr(compiled, "_Cache", none)
        return kernel(made("def f(x): return x + 1"))


def test_without_a_folder_a_kernel_compiles_for_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = homeless(monkeypatch)
    assert alone.stats.cache_path is None
    assert not is_compiled(alone)
    assert alone(1) == 2
    assert is_compiled(alone)


def test_without_a_folder_all_is_compiled_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = homeless(monkeypatch)
    monkeypatch.setattr(compiling, "_kernels", lambda: [alone])
    monkeypatch.setattr(compiling, "_PARTS", {"one": lambda: alone(1)})
    with pytest.raises(PrefetcherError, match="NUMBA_CACHE_DIR"):
        compiling.compile_command()
    shares: list[float] = []
    assert compiling.compile_kernels(lambda done, _what: shares.append(done))
    assert shares
    assert compiling.compiled()


def test_a_full_disk_does_not_stop_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FunctionCache, "save_overload", full)
    assert put_all.stats.cache_path is not None
    assert put_all(Shelf(np.zeros(1, np.float32), np.zeros(1, np.int32), 5.0), np.ones(2, np.float32)) == 3.0


# --- ahead ---

#: Learns, decides, restores, and replays with rivals and ours; prints each kernel's versions and those that were not compiled before.
USE = """
import json, sys
from pathlib import Path
import numpy as np
import pyarrow as pa, pyarrow.parquet as pq
from prefetcher import compiling
compiling.compile_kernels()
assert compiling.compiled()
folder = Path(sys.argv[1])
ts = 1.7e9 + np.cumsum(np.tile([40.0, 700.0, 5.0, 90.0], 40))
pq.write_table(pa.table({"ts": ts, "model": [f"m{i * i % 5}" for i in range(len(ts))]}), folder / "log.parquet")
from prefetcher.replay.run import replay_command
policies = "lru,gdsf,sieve,hybrid,belady,lfu:3600,lhd-smith,ours"
replay_command(log=folder / "log.parquet", out=folder / "out", default_bytes=10**9, host_bytes=3 * 10**9, policy=policies)
from prefetcher.controller.learner import Learner
from prefetcher.core.planner import choose_parts, choose_victims, next_in_smith_order, outbids
from prefetcher.core.shadow_caches import ShadowCaches
from prefetcher.core.traffic import Traffic
from prefetcher.core.types import RequestSeen
from prefetcher_models.hazard import Hazard
shadows = ShadowCaches(price_s_per_gb_h=0.002, hold_s=600, tick_s=60, start_s=1.7e9)
shadows.serve(np.arange(5), np.full(5, 1e9), np.full(5, 0.3), 3e9)
learner = Learner(Hazard)
taken = learner.take([RequestSeen(float(t), f"m{i % 5}") for i, t in enumerate(ts[:20])], {}, float(ts[19]) + 100.0)
shadows.advance(taken.ts, taken.model, taken.after_row, taken.ticks, taken.at_tick, float(ts[19]) + 100.0)
shadows.outlook(float(ts[19]) + 100.0)
again = ShadowCaches(price_s_per_gb_h=0.002, hold_s=600, tick_s=60, start_s=1.7e9)
again.restore(*shadows.snapshot())
again.advance(taken.ts[:0], taken.model[:0], taken.after_row[:, :0], taken.ticks[:0], taken.at_tick[:, :0], float(ts[20]) + 100.0)
Traffic.restore(learner.traffic.snapshot()).advance(ts[20:40], np.arange(20) % 5, ticks=[ts[39] + 1.0])
key = np.array([3.0, 1.0])
victims, _ = choose_victims(key, key, np.arange(2), 1.0)
outbids(1.0, 1.0, key, key, choose_parts(key, key, np.arange(2), 1.0)[0], 0.0)
next_in_smith_order(key, key)
print(json.dumps({k.py_func.__name__: [len(k.overloads), sum(k.stats.cache_misses.values())] for k in compiling._kernels()}))
"""


def test_what_is_compiled_ahead_is_what_is_used_in_one_version_each(tmp_path: Path) -> None:
    kernels = json.loads(python(USE, str(tmp_path)).splitlines()[-1])
    assert {name for name, (versions, _) in kernels.items() if versions == 0} == {"take_features", "take_rates", "take_counts"}
    assert {name: versions for name, (versions, _) in kernels.items() if versions > 1} == {}
    assert {name: misses for name, (_, misses) in kernels.items() if misses} == {}


def test_compiling_ends_when_it_is_stopped_and_leaves_no_process(tmp_path: Path) -> None:
    script = """
        import os, threading
        from prefetcher import compiling
        stop = threading.Event()
        stop.set()
        assert not compiling.compile_kernels(stop=stop)
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            print("none left")
    """
    assert python(script, NUMBA_CACHE_DIR=str(tmp_path)).strip() == "none left"


def test_a_process_that_cannot_compile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_PARTS", {"nothing-of-that-name": lambda: None})
    monkeypatch.setattr(compiling, "compiled", lambda: False)
    assert not compiling.compile_kernels(stop=threading.Event())
    with pytest.raises(PrefetcherError, match="did not compile"):
        compiling.compile_command()


# --- the order of victims ---


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(0, 30))
def test_victims_go_in_the_order_of_a_stable_sort(keys: list[int], need: int) -> None:
    key, size = np.array(keys, np.float64), np.arange(1.0, len(keys) + 1.0)
    candidates = np.arange(len(keys))[::-1].copy()
    victims, suffice = victims_in_order(key, size, candidates, float(need))
    order = candidates[np.argsort(key[candidates], kind="stable")]
    if size.sum() < need:
        assert (len(victims), suffice) == (0, False)
        return
    count = int(np.searchsorted(np.cumsum(size[order]), need)) + 1 if need > 0 else 0
    assert suffice
    assert victims.tolist() == order[:count].tolist()

"""`bench replay`: seconds and peak memory of whole `prefetcher replay` processes, reading, fitting, logs and report included."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from prefetcher.bench.machine import describe_machine
from prefetcher.clock import SystemClock
from prefetcher.compiling import compile_aloud
from prefetcher.errors import InputError, PrefetcherError, UsageError

__all__ = ["run"]


def run(json_out: Path, *, traces: Path | None = None, trace: str = "servegen_m_mid") -> dict[str, Any]:
    """Replays `trace` at half its catalog: with lru alone and with ours alone, and ours on the first half of its rows.

    Figures: `lru_s`, `ours_s`, `half_s` seconds; `scale_2x` = ours_s / half_s, what twice the rows take; `peak_gb` of the largest process.
    Kernels are compiled before, and a first run of each, whose time does not count, brings files into the page cache.
    """
    if traces is None:
        raise UsageError("bench replay needs --traces DIR")
    log, catalog = Path(traces) / f"{trace}.parquet", Path(traces) / f"{trace}.catalog.json"
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            table = pq.read_table(log).sort_by("ts")
        except (OSError, KeyError, ValueError) as error:
            raise InputError(f"is no trace: {error}", path=str(log)) from error
        half, short = Path(folder) / "half.parquet", Path(folder) / "short.parquet"
        pq.write_table(table.slice(0, table.num_rows // 2), half)
        pq.write_table(table.slice(0, min(table.num_rows, 20_000)), short)
        del table
        compile_aloud()
        for name, policy, of in (
            ("", "lru", short), ("", "ours", short), ("lru_s", "lru", log), ("half_s", "ours", half), ("ours_s", "ours", log),
        ):  # fmt: skip
            took_s = _replay(of, catalog, policy, Path(folder) / "out")
            if name:
                seconds[name] = took_s
                print(f"{policy}, {of.stem}: {took_s:.1f} s", flush=True)
    peak_gb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    figures = {**seconds, "scale_2x": seconds["ours_s"] / seconds["half_s"], "peak_gb": peak_gb}
    result = {"figures": figures, "peers": {}, "trace": trace, "machine": describe_machine()}
    Path(json_out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _replay(log: Path, catalog: Path, policy: str, out: Path) -> float:
    """Seconds of one `prefetcher replay` process."""
    clock = SystemClock()
    command = [
        str(Path(sys.executable).with_name("prefetcher")), "replay", str(log), "--catalog", str(catalog), "--policy", policy,
        "--capacity-ratio", "0.5", "--out", str(out),
    ]  # fmt: skip
    start_s = clock.steady_s()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not (out / "summary.json").exists():
        raise PrefetcherError(f"replay of {log} failed: {done.stderr.strip()[-300:]}")
    return clock.steady_s() - start_s

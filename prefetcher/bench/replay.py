"""`bench replay`: seconds and peak memory of whole `prefetcher replay` processes, reading, fitting, logs and report included."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from prefetcher.bench.machine import describe_machine
from prefetcher.clock import SystemClock
from prefetcher.errors import PrefetcherError, UsageError

__all__ = ["run"]


def run(json_out: Path, *, traces: Path | None = None, trace: str = "servegen_m_mid") -> dict[str, Any]:
    """Replays `trace` at half its catalog with lru alone (twice; the first compiles) and with ours alone. Seconds and GB."""
    if traces is None:
        raise UsageError("bench replay needs --traces DIR")
    clock = SystemClock()
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, policy in (("warm", "lru"), ("lru_s", "lru"), ("ours_s", "ours")):
            command = [str(Path(sys.executable).with_name("prefetcher")), "replay", str(Path(traces) / f"{trace}.parquet")]
            command += [
                "--catalog",
                str(Path(traces) / f"{trace}.catalog.json"),
                "--policy",
                policy,
                "--capacity-ratio",
                "0.5",
                "--out",
                folder,
            ]
            start_s = clock.steady_s()
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode or not (Path(folder) / "summary.json").exists():
                raise PrefetcherError(f"replay of {trace} failed: {done.stderr.strip()[-300:]}")
            seconds[name] = clock.steady_s() - start_s
            print(f"{policy}: {seconds[name]:.1f} s", flush=True)
    peak_gb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    figures = {"lru_s": seconds["lru_s"], "ours_s": seconds["ours_s"], "peak_gb": peak_gb}
    result = {"figures": figures, "peers": {"trace": trace}, "machine": describe_machine()}
    Path(json_out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result

"""`prefetcher bench load`: from a prefetch order to leased tensors in another process, over `cat` of the same cold files.

Covers the whole product: `prefetcher up` as it is installed, an order over HTTP, a program that opens the model at once and waits for it,
real files and digests. Not the decision to prefetch: the order is given. What is measured alternates within each round, and every ratio is
of two runs of one round. The clock is the machine's: this measures the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from prefetcher.agent.manifest import write_manifests
from prefetcher.api.client import get, post
from prefetcher.bench.machine import describe_machine
from prefetcher.clock import Clock, SystemClock
from prefetcher.errors import InputError, PrefetcherError, UnavailableError

__all__ = ["run"]

_MODEL = "bench"
_SHARDS = 4
_TENSORS_A_SHARD = 32
_START_S = 60.0
_FREE_S = 30.0
#: Of a file dropped from the page cache, what may stay: pages that the kernel holds in batches of its own.
_WARM_RATIO = 0.02
_POPULATE_WRITE = 23

# The program that uses the weights: opens the model when it is told to, reads both ends of every tensor, says when it has them.
_CLIENT = """
import sys
import prefetcher
for line in sys.stdin:
    with prefetcher.open("bench", socket_path=sys.argv[1]) as tensors:
        views = [tensors[name] for name in tensors]
        ends = [float(v.reshape(-1)[i]) for v in views for i in (0, -1)]
        print(tensors.source, tensors.found, sum(v.nbytes for v in views), sum(ends), flush=True)
        views.clear()
"""

_SAFETENSORS = """
import sys
from safetensors import safe_open
for line in sys.stdin:
    total = 0
    for path in sys.argv[1:]:
        with safe_open(path, "numpy") as file:
            total += sum(file.get_tensor(name).nbytes for name in file.keys())
    print(total, flush=True)
"""


class _Child:
    """A process that answers one line for each line that it is sent."""

    def __init__(self, code: str, arguments: list[str]) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer.strip():
            raise UnavailableError("the measured process died; its message is above")
        return answer

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()


class _Node:
    """`prefetcher up` with one model and everything of its own under `folder`."""

    def __init__(self, folder: Path, models: Path, host_bytes: int, clock: Clock) -> None:
        self._clock = clock
        self._log = folder / "log"
        self.socket = folder / "run" / "agent.sock"
        # fmt: off
        options = ["--models", str(models), "--host-bytes", str(host_bytes), "--state-dir", str(folder / "state"),
                   "--socket", str(self.socket), "--port", "0", "--control-ratio", "0", "--log-format", "json"]
        # fmt: on
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prefetcher", "up", *options],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PREFETCHER_NODE__NAME": f"bench-{os.getpid()}"},
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if "is up at" not in line:
            self._process.wait(_START_S)
            last = (self._log.read_text().strip().splitlines() or ["it said nothing"])[-1]
            raise UnavailableError(f"`prefetcher up` did not start: {last}")
        self.url = line.split()[-1]
        self._until(lambda: any(k["model"] == _MODEL for k in self.status()["known"]), "knows the model")
        # What is opened again and again would be forecast, and be there before it is ordered.
        post(self.url, "/v1/off")

    def status(self) -> dict[str, Any]:
        with contextlib.suppress(UnavailableError):  # before its first report
            return dict(get(self.url, "/v1/status")["node"])
        return {"known": []}

    def order(self) -> None:
        post(self.url, f"/v1/models/{_MODEL}:load")

    def evict(self) -> None:
        """Returns when all memory was given back."""

        def gone() -> bool:
            with contextlib.suppress(PrefetcherError):  # still leased: the release is on its way
                post(self.url, f"/v1/models/{_MODEL}:evict")
            status = self.status()
            return not status["held"] and not status["memory"]["taken_bytes"]

        self._until(gone, "gives the memory back")

    def _until(self, true: Callable[[], bool], what: str) -> None:
        end_s = self._clock.steady_s() + _FREE_S
        while not true():
            if self._clock.steady_s() > end_s or self._process.poll() is not None:
                raise UnavailableError(f"`prefetcher up` never {what}")
            self._clock.wait(threading.Event(), 0.05)

    def last(self, event: str) -> float:
        """When an event was logged last, seconds since 1970 UTC."""
        lines = [line for line in self._log.read_text().splitlines() if f'"{event}"' in line]
        return datetime.fromisoformat(json.loads(lines[-1])["timestamp"]).timestamp()

    def close(self) -> None:
        with self._process:
            self._process.send_signal(signal.SIGTERM)


def _make_model(folder: Path, total_bytes: int) -> list[Path]:
    """Random weights, so that nothing on the way can compress them; written to the disk, or they could not leave the page cache."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    size = total_bytes // _SHARDS // _TENSORS_A_SHARD // 4
    paths = [folder / f"model-{shard + 1:05d}-of-{_SHARDS:05d}.safetensors" for shard in range(_SHARDS)]
    for shard, path in enumerate(paths):
        save_file({f"layers.{shard}.{i}": rng.random(size, dtype=np.float32) for i in range(_TENSORS_A_SHARD)}, path)
        with path.open("rb") as written:
            os.fsync(written.fileno())
    return paths


def _make_cold(paths: list[Path]) -> float:
    """Drops the files from the page cache; returns the share that is still there."""
    cached = total = 0
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found, pages = _cached_pages(path)
        cached, total = cached + found, total + pages
    return cached / total


def _cached_pages(path: Path) -> tuple[int, int]:
    """Pages of a file in the page cache, and all (mincore). Reading without waiting would start the reading that it looks for."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        pages = -(-len(view) // mmap.PAGESIZE)
        answer = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(view)
        problem = libc.mincore(ctypes.byref(start), ctypes.c_size_t(len(view)), answer)
        del start
        if problem:
            raise InputError(os.strerror(ctypes.get_errno()), path=str(path))
    return sum(bytes(answer).translate(bytes(i & 1 for i in range(256)))), pages


def _touch_memory(size: int) -> None:
    """Uses and frees memory: a hypervisor that takes free memory back gives it again slowly, and neither side shall pay for that."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        try:
            memory.madvise(_POPULATE_WRITE)
        except OSError:  # a kernel before 5.14
            for at in range(0, size, mmap.PAGESIZE):
                memory[at] = 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(
    json_out: Path | None = None,
    progress: Callable[[str], None] | None = _say,
    *,
    folder: Path | None = None,
    total_bytes: int = 1 << 30,
    rounds: int = 11,
) -> dict[str, Any]:
    """Measures and returns {"figures", "phases", "peers", "method", "machine"}; ratios are medians of paired runs.

    `folder` is where the files are made and removed again, on the disk to be measured; without it the one for temporary files (`TMPDIR`).
    `json_out` gets the same as JSON.

    Raises:
        InputError: the folder's files can't be made cold (a filesystem in memory).
        UnavailableError: `prefetcher up` did not start or went away.
    """
    say = progress or (lambda _: None)
    clock = SystemClock()
    base = Path(tempfile.mkdtemp(prefix="prefetcher-bench-", dir=folder)).resolve()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        say(f"making a model of {total_bytes / 1e9:.2f} GB in {base}")
        paths = _make_model(base / "models" / _MODEL, total_bytes)
        size = write_manifests(base / "models")[0].bytes
        node = _Node(base, base / "models", size + (64 << 20), clock)
        stack.callback(node.close)
        client = _Child(_CLIENT, [str(node.socket)])
        stack.callback(client.close)
        mapper = _Child(_SAFETENSORS, [str(p) for p in paths])
        stack.callback(mapper.close)

        phases: dict[str, list[float]] = {"order_to_start_s": [], "load_s": [], "ready_to_tensors_s": []}

        def ours() -> None:
            ordered_s = clock.now_s()
            node.order()
            source, found, *_ = client.ask().split()
            ended_s = clock.now_s()
            if source != "host" or found == "absent":
                raise UnavailableError(f"the model came from {source} and was {found}: the order did not bring it")
            started_s, ready_s = node.last("load_started"), node.last("load_ready")
            if started_s < ordered_s:
                raise UnavailableError("the model was loaded before it was ordered: nothing was measured")
            for name, seconds in zip(phases, (started_s - ordered_s, ready_s - started_s, ended_s - ready_s), strict=True):
                phases[name].append(seconds)

        def cat() -> None:
            subprocess.run(["cat", *map(str, paths)], stdout=subprocess.DEVNULL, check=True)

        took: dict[str, list[float]] = {"ours": [], "cat": [], "safetensors": []}
        runs: list[tuple[str, Callable[[], object]]] = [("ours", ours), ("cat", cat), ("safetensors", mapper.ask)]
        for number in range(rounds + 1):
            for name, measure in runs if number % 2 else reversed(runs):
                left = _make_cold(paths)
                if left > _WARM_RATIO:
                    raise InputError(f"{left:.0%} of the files stay in memory; set TMPDIR to a folder on a disk", path=str(base))
                _touch_memory(2 * size)
                start_s = clock.steady_s()
                measure()
                took[name].append(clock.steady_s() - start_s)
                if name == "ours":
                    node.evict()
            say(f"round {number}: " + ", ".join(f"{name} {seconds[-1]:.3f} s" for name, seconds in took.items()))
        memory = node.status()["memory"]
    report = _report(took, phases, size, rounds) | {"machine": _machine(memory)}
    if json_out is not None:
        json_out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def _report(took: dict[str, list[float]], phases: dict[str, list[float]], size: int, rounds: int) -> dict[str, Any]:
    # The first round warms code up and is left out.
    scored = {name: seconds[1:] for name, seconds in took.items()}
    ratios = {name: [a / b for a, b in zip(seconds, scored["cat"], strict=True)] for name, seconds in scored.items()}
    medians = {name: round(statistics.median(seconds), 4) for name, seconds in scored.items()}
    return {
        "figures": {
            "ratio_over_cat": round(statistics.median(ratios["ours"]), 3),
            "best_ratio_over_cat": round(min(ratios["ours"]), 3),
            "worst_ratio_over_cat": round(max(ratios["ours"]), 3),
            "seconds": medians["ours"],
            "gb_per_s": round(size / medians["ours"] / 1e9, 3),
            "bytes": size,
            "rounds": rounds,
        },
        "phases": {name: round(statistics.median(seconds[1:]), 4) for name, seconds in phases.items()},
        "peers": {
            name: {"seconds": medians[name], "ratio_over_cat": round(statistics.median(ratios[name]), 3)} for name in ("cat", "safetensors")
        },
        "method": {
            "measured": "POST /v1/models/bench:load to `prefetcher up`, until a program that opened it read both ends of every tensor",
            "cold": "before every run posix_fadvise(DONTNEED) on all files, checked with mincore",
            "memory": "before every run twice the model's bytes of memory were touched and freed",
            "order": "ours, cat, safetensors, and the other way round in every second round; the first round is left out",
        },
    }


def _machine(memory: dict[str, Any]) -> dict[str, Any]:
    return {
        **describe_machine(),
        "kernel": platform.release(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "host_folder": memory["backing"],
        "locked": memory["warning"] == "",
    }

"""`prefetcher bench load`: from prefetch order to leased tensors in another process, over `cat` of the same cold files.

Covers a live measurement with real files, real digests, the real socket and a second process; not the planner (the
order is given). Rounds alternate, and every ratio is of two runs beside each other. The clock is the machine's: this
measures the machine.
"""

from __future__ import annotations

import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prefetcher.agent.hostmem import HostArena
from prefetcher.agent.lease_server import Grant, GrantedFile, Holder, LeaseServer
from prefetcher.agent.loader import load
from prefetcher.agent.manifest import ModelSource, scan_models_folder, write_manifests
from prefetcher.agent.protocol import Verb
from prefetcher.clock import SystemClock
from prefetcher.errors import InputError, UnavailableError

__all__ = ["run"]

_SHARDS = 4
_TENSORS_A_SHARD = 32
_READY_S = 120.0

# The other process: says that it waits, opens the model, touches every tensor, says when it has them.
_CLIENT = """
import sys
import prefetcher
for line in sys.stdin:
    with prefetcher.open("bench", socket_path=sys.argv[1]) as tensors:
        views = [tensors[name] for name in tensors]
        print(len(views), sum(v.nbytes for v in views), float(views[-1].reshape(-1)[-1]), flush=True)
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


class _Port:
    """Grants the one model once it is loaded."""

    def __init__(self, arena: HostArena, source: ModelSource) -> None:
        self._arena, self._source = arena, source
        self.ready = threading.Event()

    def acquire(self, holder: Holder, model: str, version: str, timeout_s: float, gone: threading.Event) -> Grant:
        if not self.ready.wait(min(timeout_s, _READY_S)):
            raise UnavailableError(f"{model} was not loaded in {_READY_S:g} s")
        copy = self._arena.copy(self._source.key)
        if copy is None:
            raise UnavailableError(f"{model} is not loaded")
        fds = self._arena.descriptors(copy)
        files = [GrantedFile(fd, f.path, f.bytes) for fd, f in zip(fds, copy.manifest.files, strict=True)]
        return Grant(copy.key, "host", files, "moving", 0.0)

    def release(self, holder: Holder) -> None:
        pass

    def control(self, verb: Verb, model: str, version: str) -> msgspec.Struct | None:
        return None


def _make_model(folder: Path, total_bytes: int) -> None:
    """Random weights, so that nothing on the way can compress them."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    size = total_bytes // _SHARDS // _TENSORS_A_SHARD // 4
    for shard in range(_SHARDS):
        tensors = {f"layers.{shard}.{i}": rng.random(size, dtype=np.float32) for i in range(_TENSORS_A_SHARD)}
        save_file(tensors, folder / f"model-{shard + 1:05d}-of-{_SHARDS:05d}.safetensors")


def _make_cold(paths: list[Path]) -> float:
    """Drops the files from the page cache; returns the share that is still there."""
    cached = total = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            cached += _cached_pages(fd)
            total += -(-os.fstat(fd).st_size // mmap.PAGESIZE)
        finally:
            os.close(fd)
    return cached / total


def _cached_pages(fd: int) -> int:
    """Sampled every 2 MiB: reads without waiting succeed only from the page cache."""
    found = 0
    buffer = bytearray(mmap.PAGESIZE)
    for offset in range(0, os.fstat(fd).st_size - mmap.PAGESIZE, 2 << 20):
        try:
            os.preadv(fd, [buffer], offset, os.RWF_NOWAIT)
            found += (2 << 20) // mmap.PAGESIZE
        except BlockingIOError:
            pass
    return found


def _ask(child: subprocess.Popen[str]) -> str:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    return child.stdout.readline()


def run(
    json_out: Path | None = None,
    progress: Callable[[str], None] | None = None,
    *,
    folder: Path | None = None,
    total_bytes: int = 1 << 30,
    rounds: int = 7,
    budget_bytes: int | None = None,
) -> dict[str, Any]:
    """Measures and returns {"figures", "peers", "machine"}; ratios are medians over paired rounds, seconds are medians.

    `folder` is where the files are made and removed again; it must be on the disk to be measured. `json_out` gets the
    same as JSON.

    Raises:
        InputError: the folder's files can't be made cold (a filesystem in memory).
    """
    say = progress or (lambda _: None)
    clock = SystemClock()
    base = Path(tempfile.mkdtemp(prefix="prefetcher-bench-", dir=folder))
    children: list[subprocess.Popen[str]] = []
    arena = None
    server = None
    try:
        say(f"making a model of {total_bytes / 1e9:.2f} GB in {base}")
        _make_model(base / "models" / "bench", total_bytes)
        write_manifests(base / "models")
        source = scan_models_folder(base / "models").source("bench")
        paths = [source.folder / f.path for f in source.manifest.files]
        arena = HostArena(budget_bytes or source.manifest.bytes + (64 << 20), name=f"bench-{os.getpid()}")
        port = _Port(arena, source)
        server = LeaseServer(base / "run" / "agent.sock", port)
        server.start()
        for code, arguments in ((_CLIENT, [str(server.path)]), (_SAFETENSORS, [str(p) for p in paths])):
            children.append(
                subprocess.Popen(
                    [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
        ours: list[float] = []
        cat: list[float] = []
        mapped: list[float] = []
        for number in range(rounds + 1):
            runs: list[tuple[list[float], Callable[[], None]]] = [
                (ours, lambda: _order(arena, source, port, children[0], clock)),
                (cat, lambda: _cat(paths)),
                (mapped, lambda: _check(_ask(children[1]))),
            ]
            if number % 2:
                runs.reverse()
            for seconds, measure in runs:
                left = _make_cold(paths)
                if left > 0.02:
                    raise InputError(f"{left:.0%} of the files stay in memory; name a folder on a disk", path=str(base))
                start = clock.steady_s()
                measure()
                seconds.append(clock.steady_s() - start)
                if seconds is ours:
                    copy = arena.copy(source.key)
                    assert copy is not None
                    arena.evict(copy)
                    port.ready.clear()
            say(f"round {number}: ours {ours[-1]:.3f} s, cat {cat[-1]:.3f} s, safetensors {mapped[-1]:.3f} s")
        # The first round warms code and page tables up and is left out.
        ratios = [a / b for a, b in zip(ours[1:], cat[1:], strict=True)]
        report: dict[str, Any] = {
            "figures": {
                "ratio_over_cat": round(statistics.median(ratios), 3),
                "worst_ratio_over_cat": round(max(ratios), 3),
                "seconds": round(statistics.median(ours[1:]), 4),
                "bytes": source.manifest.bytes,
                "rounds": rounds,
            },
            "peers": {
                "cat": {"seconds": round(statistics.median(cat[1:]), 4)},
                "safetensors": {
                    "seconds": round(statistics.median(mapped[1:]), 4),
                    "ratio_over_cat": round(
                        statistics.median([a / b for a, b in zip(mapped[1:], cat[1:], strict=True)]), 3
                    ),
                },
            },
            "machine": {
                "cores": os.cpu_count(),
                "kernel": platform.release(),
                "host_folder": arena.kind,
                "huge_pages": arena.huge,
                "locked": arena.lock_warning is None,
            },
        }
    finally:
        for child in children:
            if child.stdin is not None:
                child.stdin.close()
            child.wait(30)
            if child.stdout is not None:
                child.stdout.close()
        if server is not None:
            server.stop()
        if arena is not None:
            arena.close()
        shutil.rmtree(base, ignore_errors=True)
    if json_out is not None:
        json_out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return report


def _order(
    arena: HostArena, source: ModelSource, port: _Port, child: subprocess.Popen[str], clock: SystemClock
) -> None:
    copy = arena.begin(source.manifest)
    load(source.manifest, source.folder, arena, copy, clock=clock)
    arena.publish(copy)
    port.ready.set()
    _check(_ask(child))


def _check(answer: str) -> None:
    if not answer.strip():
        raise UnavailableError("the measured process died; run it again to see its message")


def _cat(paths: list[Path]) -> None:
    subprocess.run(["cat", *map(str, paths)], stdout=subprocess.DEVNULL, check=True)

"""The models folder and how fast it is read, the folder of state, and how many files may be open."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prefetcher.agent.files import BLOCK_BYTES
from prefetcher.agent.manifest import scan_models_folder
from prefetcher.clock import SystemClock
from prefetcher.config import Settings
from prefetcher.doctor.finding import Finding, fail, ok, warn
from prefetcher.errors import shortened
from prefetcher.words import size, span

__all__ = ["check_disk", "check_models", "check_open_files", "check_state_folder"]

#: What a look at the disk may read and take, in real seconds; and by how many threads, so that its queue is never empty.
_MOST_BYTES = 2 << 30
_MOST_S = 2.0
_THREADS = 4
#: A model of this size stands for others.
_EXAMPLE_BYTES = 16_000_000_000
#: Below this, loads take minutes.
_SLOW_BYTES_PER_S = 200e6
#: Files that are open beside shards: streams, sockets of clients and programs, libraries.
_BESIDE_FILES = 1024


def _folder(settings: Settings) -> Path:
    return settings.node.models_dir.expanduser()


def check_models(settings: Settings) -> Finding:
    """Whether there are models, and each has its manifest."""
    folder = _folder(settings)
    if not folder.is_dir():
        return warn(f"no folder of models at {folder}", "agents need one: set PREFETCHER_NODE__MODELS_DIR; other roles don't")
    catalog = scan_models_folder(folder)
    models = {name: source.manifest.bytes for name, source in catalog.models.items()}
    found = f"{len(models)} models with {size(sum(models.values()))} in {folder}"
    if catalog.refused:
        name, error = min(catalog.refused.items())
        return warn(f"{found}; {len(catalog.refused)} refused, as {shortened(name)}", str(error))
    if not models:
        return warn(found, f"put one folder of safetensors files for each model there, then `prefetcher manifest {folder}`")
    largest = max(models, key=lambda name: models[name])
    if models[largest] > settings.node.host_bytes:
        todo = "it is never kept: raise PREFETCHER_NODE__HOST_BYTES, or leave it out"
        return warn(f"{found}; {shortened(largest)} alone has {size(models[largest])}", todo)
    return ok(found)


def check_disk(settings: Settings) -> Finding:
    """How fast the largest files of models are read, past the page cache."""
    folder = _folder(settings)
    if not folder.is_dir():
        return ok("nothing to read: there is no folder of models")
    files = sorted((path for path in folder.rglob("*.safetensors") if path.is_file()), key=lambda path: -path.stat().st_size)
    if not files or files[0].stat().st_size < BLOCK_BYTES:
        return ok("no file is large enough to measure by")
    try:
        read_bytes, took_s = _read(files)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return warn(f"{folder} can't be read past the page cache, so its speed is not known", "put models on a local disk with ext4 or xfs")
    speed = read_bytes / max(took_s, 1e-6)
    example = f"a model of {size(_EXAMPLE_BYTES)} takes {span(_EXAMPLE_BYTES / speed)}"
    found = f"{size(speed)}/s ({size(read_bytes)} in {took_s:.1f} s): {example}"
    if speed < _SLOW_BYTES_PER_S:
        return warn(found, "put models on a local NVMe disk; where nothing faster is to be had, the more is won by prefetching")
    return ok(found)


def _read(files: list[Path]) -> tuple[int, float]:
    """Bytes that were read and the seconds that it took. Raises OSError, EINVAL where there is no O_DIRECT."""
    clock = SystemClock()
    blocks = [(path, at) for path in files for at in range(0, path.stat().st_size - BLOCK_BYTES + 1, BLOCK_BYTES)]
    blocks = blocks[: _MOST_BYTES // BLOCK_BYTES]
    guard, done, start_s = threading.Lock(), [0], clock.steady_s()
    left = iter(blocks)

    def work() -> None:
        # Anonymous memory begins at a page, as O_DIRECT wants it.
        with mmap.mmap(-1, BLOCK_BYTES) as buffer:
            while clock.steady_s() - start_s < _MOST_S:
                with guard:
                    block = next(left, None)
                if block is None:
                    return
                fd = os.open(block[0], os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                try:
                    count = os.preadv(fd, [buffer], block[1])
                finally:
                    os.close(fd)
                with guard:
                    done[0] += count

    with ThreadPoolExecutor(_THREADS) as threads:
        for future in [threads.submit(work) for _ in range(_THREADS)]:
            future.result()
    return done[0], clock.steady_s() - start_s


def check_state_folder(settings: Settings) -> Finding:
    """Whether what was learned and the request log can be kept."""
    folder = settings.state.dir.expanduser().absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return fail(f"{folder} can't be made or written to", "name another folder with PREFETCHER_STATE__DIR")
    stat = os.statvfs(there)
    free = stat.f_bavail * stat.f_frsize
    wanted = settings.stream.segment_bytes * settings.stream.keep_segments if settings.kafka.brokers is None else 100_000_000
    found = f"{folder}, with {size(free)} free"
    if free < wanted:
        return warn(found, f"make room for {size(wanted)}, or lower PREFETCHER_STREAM__KEEP_SEGMENTS")
    return ok(found)


def check_open_files(settings: Settings) -> Finding:
    """Whether every shard in memory can be an open file."""
    folder = _folder(settings)
    shards = sum(1 for path in folder.rglob("*.safetensors")) if folder.is_dir() else 0
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        return ok(f"without limit; models have {shards} files")
    found = f"{hard:,} may be open; models have {shards:,}"
    if hard < shards + _BESIDE_FILES:
        return warn(found, f"raise it above {shards + _BESIDE_FILES:,}: `ulimit -Hn`, or LimitNOFILE= in the unit")
    return ok(found)

"""What the tests of weights share: small models, loads, and the least that a lease port can be."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import load_file, save_file

from prefetcher.agent.disk import DiskTier
from prefetcher.agent.hostmem import HostArena, HostCopy
from prefetcher.agent.lease_server import Grant, GrantedFile, Holder, LeaseServer
from prefetcher.agent.loader import LoadResult, load
from prefetcher.agent.manifest import ModelSource, scan_models_folder, write_manifests
from prefetcher.clock import SystemClock
from prefetcher.errors import ModelNotFoundError, NoRoomError, UnavailableError

MB = 1 << 20


def _capabilities() -> int:
    found = re.search(r"^CapEff:\s+([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1], 16) if found else 0


#: Whether this process may give files away (CAP_CHOWN) and become another user (CAP_SETGID, CAP_SETUID).
MAY_BE_ANYBODY = _capabilities() & 0b1100_0001 == 0b1100_0001


def make_model(folder: Path, megabytes: int = 40, shards: int = 2, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for shard in range(shards):
        rows = megabytes * MB // shards // 4096
        tensors = {
            f"layer.{shard}.weight": rng.random((rows, 1024), dtype=np.float32)[:, :].copy(),
            f"layer.{shard}.bias": rng.integers(0, 9, 3, dtype=np.int64),
            f"layer.{shard}.empty": np.zeros((0, 4), np.float16),
        }
        save_file(tensors, folder / f"model-{shard}.safetensors")
    return folder


def make_source(models: Path, name: str, megabytes: int = 40, shards: int = 2, seed: int = 0) -> ModelSource:
    make_model(models / name, megabytes, shards, seed)
    write_manifests(models / name)
    return scan_models_folder(models).source(name)


def fill(arena: HostArena, source: ModelSource, **options: object) -> tuple[HostCopy, LoadResult]:
    copy = arena.begin(source.manifest)
    try:
        result = load(source.manifest, source.folder, arena, copy, clock=SystemClock(), **options)  # type: ignore[arg-type]
    except BaseException:
        arena.evict(copy)
        raise
    arena.publish(copy)
    return copy, result


def expected(source: ModelSource) -> dict[str, np.ndarray]:
    return {k: v for f in source.manifest.files for k, v in load_file(source.folder / f.path).items()}


class OneModelAgent:
    """Everything that is asked for is granted, from host memory when it is there, else from disk."""

    def __init__(self, arena: HostArena, *sources: ModelSource) -> None:
        self.arena, self.disk = arena, DiskTier()
        self.sources = {source.manifest.model: source for source in sources}
        self.held: dict[str, int] = {}
        self.released: list[str] = []
        self.hang = False
        self.asked = threading.Event()

    def acquire(self, holder: Holder, model: str, version: str, timeout_s: float, gone: threading.Event) -> Grant:
        source = self.sources.get(model)
        if source is None:
            raise ModelNotFoundError(f"no {model}", model=model)
        if self.hang:
            self.asked.set()
            gone.wait(30)
            raise UnavailableError("gave up")
        copy = self.arena.copy(source.key)
        fds = self.arena.descriptors(copy) if copy else self.disk.open_verified(source)
        self.held[holder.name] = holder.pid
        files = [GrantedFile(fd, f.path, f.bytes) for fd, f in zip(fds, source.manifest.files, strict=True)]
        return Grant(source.key, "host" if copy else "disk", files, "ready" if copy else "absent", 0.0)

    def release(self, holder: Holder) -> None:
        self.held.pop(holder.name, None)
        self.released.append(holder.name)

    def control(self, verb: str, model: str, version: str) -> msgspec.Struct | None:
        if verb == "pin":
            raise NoRoomError("no room for that", retry_after_s=7.0)
        return None


@contextlib.contextmanager
def serving(agent: OneModelAgent, tmp_path: Path, **options: float) -> Iterator[Path]:
    path = tmp_path / "run" / "agent.sock"
    server = LeaseServer(path, agent, **options)
    server.start()
    try:
        yield path
    finally:
        server.stop()


def eventually(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not come true"
        time.sleep(0.01)

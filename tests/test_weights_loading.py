"""Loads: the cap on prefetches, reading without O_DIRECT, disks that fail, and a quarantine that outlives the agent."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from weights_kit import MB, eventually, fill, make_model, make_source

from prefetcher.agent import disk, loader
from prefetcher.agent.disk import DiskTier
from prefetcher.agent.hostmem import HostArena, HostCopy
from prefetcher.agent.loader import LoadCancelledError, LoadControl, load
from prefetcher.agent.manifest import ModelSource, scan_models_folder, write_manifests
from prefetcher.agent.moves import Moves
from prefetcher.bench.load import _cached_pages, _make_cold
from prefetcher.clock import SystemClock, VirtualClock
from prefetcher.core import events as ev
from prefetcher.core.types import Cause, Tier, WeightsKey
from prefetcher.errors import IntegrityError

BLOCK = 16 * MB


@pytest.fixture
def arena() -> Iterator[HostArena]:
    arena = HostArena(256 * MB, name=f"loading-{os.getpid()}", lock="off")
    yield arena
    arena.close()


@pytest.fixture
def model(tmp_path: Path) -> ModelSource:
    return make_source(tmp_path / "models", "llama", 160, shards=1)


def content(copy: HostCopy) -> list[bytes]:
    return [os.pread(file.fd, file.entry.bytes, 0) for file in copy.files]


def right(copy: HostCopy, source: ModelSource) -> bool:
    return content(copy) == [(source.folder / entry.path).read_bytes() for entry in source.manifest.files]


# --- the cap ---


class StepClock(VirtualClock):
    """Whoever waits moves the time; several threads may."""

    def __init__(self, speed: float = 1.0) -> None:
        super().__init__()
        self.speed = speed
        self.guard = threading.Lock()

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        with self.guard:
            if not event.is_set():
                self._now_s += timeout_s
        return event.is_set()


@pytest.mark.parametrize(("threads", "speed"), [(1, 1.0), (8, 1.0), (3, 500.0)])
def test_a_capped_load_takes_as_long_as_its_cap_says(threads: int, speed: float, arena: HostArena, model: ModelSource) -> None:
    clock = StepClock(speed)
    copy = arena.begin(model.manifest)
    load(model.manifest, model.folder, arena, copy, clock=clock, control=LoadControl(BLOCK / 10), threads=threads)
    blocks = len(model.manifest.files[0].blocks)
    # Ten of the machine's seconds a block; the first begins at once.
    assert clock.now_s() == pytest.approx((blocks - 1) * 10 * speed, rel=0.2)
    assert right(copy, model)


def test_a_load_without_a_cap_never_waits(arena: HostArena, model: ModelSource) -> None:
    clock = StepClock()
    fill_with(arena, model, clock, LoadControl())
    assert clock.now_s() == 0.0


def fill_with(
    arena: HostArena, source: ModelSource, clock: VirtualClock, control: LoadControl, on_block: Callable[..., None] | None = None
) -> None:
    load(source.manifest, source.folder, arena, arena.begin(source.manifest), clock=clock, control=control, on_block=on_block, threads=1)


def test_the_cap_is_lifted_when_demand_comes(arena: HostArena, model: ModelSource) -> None:
    clock, control = StepClock(), LoadControl(BLOCK / 10)
    seen: list[float] = []

    def on_block(_file: int, _block: int, _done: int) -> None:
        seen.append(clock.now_s())
        if len(seen) == 3:
            control.rate_bytes_per_s = None  # the lock is held here; `limit` from elsewhere

    fill_with(arena, model, clock, control, on_block)
    assert seen[:3] == [0.0, 10.0, 20.0]
    assert set(seen[3:]) == {20.0}


def test_a_pause_earns_no_burst(arena: HostArena, model: ModelSource) -> None:
    clock, control, paused = StepClock(), LoadControl(BLOCK / 10), threading.Event()
    seen: list[float] = []

    def on_block(_file: int, block: int, _done: int) -> None:
        seen.append(clock.now_s())
        if block == 3:
            control.paused = True

    copy = arena.begin(model.manifest)
    runner = threading.Thread(
        target=load,
        args=(model.manifest, model.folder, arena, copy),
        kwargs={"clock": clock, "control": control, "on_block": on_block, "on_paused": lambda _: paused.set(), "threads": 1},
    )
    runner.start()
    assert paused.wait(30)
    clock.advance(1000.0)
    control.resume()
    runner.join(30)
    steps = [b - a for a, b in itertools.pairwise(seen[4:])]
    assert seen[4] >= 1000.0
    assert steps == [10.0] * len(steps)


@pytest.mark.parametrize("act", ["cancel", "limit"])
def test_a_slow_load_hears_at_once(act: str, arena: HostArena, model: ModelSource) -> None:
    control, begun = LoadControl(1.0), threading.Event()
    errors: list[BaseException] = []
    copy = arena.begin(model.manifest)

    def run() -> None:
        try:
            load(
                model.manifest, model.folder, arena, copy, clock=SystemClock(), control=control, on_block=lambda *_: begun.set(), threads=2
            )
        except LoadCancelledError as exc:
            errors.append(exc)

    runner = threading.Thread(target=run)
    runner.start()
    assert begun.wait(30)
    # At a byte a second the next block is half a year away.
    if act == "cancel":
        control.cancel()
    else:
        control.limit(None)
    runner.join(30)
    assert not runner.is_alive()
    assert len(errors) == (act == "cancel")


class Loop:
    """What the agent's loop is to `Moves`."""

    def __init__(self, arena: HostArena, source: ModelSource, tier: DiskTier, **options: float) -> None:
        self.heard: list[ev.Event] = []
        self.moves = Moves(arena, tier, SystemClock(), 2, self.heard.append, {source.key: source}.get, **options)  # type: ignore[arg-type]
        self.key: WeightsKey = source.key
        self.bytes = source.manifest.bytes

    def start(self, cause: Cause) -> None:
        self.moves.start(ev.LoadWeights(self.key, Tier.DISK, Tier.HOST, cause, self.bytes))

    def ended(self) -> bool:
        return any(isinstance(event, ev.WeightsLoaded | ev.LoadFailed | ev.WeightsEvicted) for event in self.heard)


def test_prefetches_are_capped_and_demand_is_not(arena: HostArena, model: ModelSource) -> None:
    loop = Loop(arena, model, DiskTier(), prefetch_bytes_per_s=1.0)
    loop.start(Cause.DEMAND)
    eventually(loop.ended)
    assert ev.WeightsLoaded(loop.key, Tier.HOST) in loop.heard
    copy = arena.copy(loop.key)
    assert copy is not None
    arena.evict(copy)

    loop = Loop(arena, model, DiskTier(), prefetch_bytes_per_s=1.0)
    loop.start(Cause.FORECAST)
    eventually(lambda: loop.moves.done_bytes(loop.key) == BLOCK)
    assert not loop.ended()
    loop.moves.hurry(loop.key)  # demand joined it
    eventually(loop.ended)
    assert ev.WeightsLoaded(loop.key, Tier.HOST) in loop.heard
    loop.moves.close()


def test_a_capped_prefetch_ends_when_the_agent_does(arena: HostArena, model: ModelSource) -> None:
    loop = Loop(arena, model, DiskTier(), prefetch_bytes_per_s=1.0)
    loop.start(Cause.FORECAST)
    eventually(lambda: loop.moves.done_bytes(loop.key) == BLOCK)
    loop.moves.close()
    assert isinstance(loop.heard[-1], ev.WeightsEvicted)
    assert arena.usage().taken_bytes == 0


def test_a_load_that_ends_by_an_error_nobody_foresaw_is_told(arena: HostArena, model: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(loader, "block_digest", broken)
    loop = Loop(arena, model, DiskTier())
    loop.start(Cause.DEMAND)
    eventually(loop.ended)
    (failed,) = [event for event in loop.heard if isinstance(event, ev.LoadFailed)]
    assert (failed.reason, failed.source_bad) == ("a bug", False)
    assert arena.usage().taken_bytes == 0


# --- without O_DIRECT ---


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a filesystem that has no O_DIRECT."""
    real = os.open

    def opened(path: str, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", opened)


def test_a_filesystem_without_direct_reads_is_read_through_the_page_cache(
    arena: HostArena, model: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch)
    copy, result = fill(arena, model)
    assert not result.direct
    assert right(copy, model)


RAMFS = """
import ctypes, os, shutil, sys
from pathlib import Path
libc = ctypes.CDLL(None, use_errno=True)
uid, gid = os.getuid(), os.getgid()
if libc.unshare(0x00020000 if uid == 0 else 0x10020000):
    sys.exit(77)
if uid:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        Path("/proc/self/" + name).write_text(text)
source = Path(sys.argv[1])
libc.mount(b"none", b"/", None, 0x44000, None)
if libc.mount(b"none", os.fsencode(source.parent), b"ramfs", 0, b"mode=700"):
    sys.exit(77)
from prefetcher.agent.hostmem import HostArena
from prefetcher.agent.loader import load
from prefetcher.agent.manifest import scan_models_folder, write_manifests
from prefetcher.clock import SystemClock
from safetensors.numpy import save_file
import numpy as np
source.mkdir()
save_file({"w": np.arange(5_000_001, dtype=np.int32)}, source / "w.safetensors")
write_manifests(source)
model = scan_models_folder(source).source("llama")
arena = HostArena(64 << 20, name=sys.argv[2], lock="off")
copy = arena.begin(model.manifest)
result = load(model.manifest, source, arena, copy, clock=SystemClock())
assert os.pread(copy.files[0].fd, model.manifest.bytes, 0) == (source / "w.safetensors").read_bytes()
arena.close()
print(result.direct)
"""


def test_a_real_filesystem_in_memory_is_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    command = [sys.executable, "-c", RAMFS, str(tmp_path / "in" / "llama"), f"ramfs-{os.getpid()}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode == 77:
        pytest.skip("this user may not mount anything")
    assert done.stdout == "False\n", done.stderr


def test_a_filesystem_that_takes_the_flag_and_refuses_to_read_is_read_through_the_page_cache(
    arena: HostArena, model: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    copy, result = fill(arena, model)
    assert not result.direct
    assert right(copy, model)


@pytest.mark.parametrize("direct", [True, False])
def test_a_load_leaves_the_page_cache_alone(direct: bool, arena: HostArena, model: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = [model.folder / entry.path for entry in model.manifest.files]
    with path.open("rb") as file:
        os.fsync(file.fileno())
    if _make_cold([path]):
        pytest.skip("the folder for temporary files is in memory")
    if not direct:
        refuse_direct(monkeypatch)
    _, result = fill(arena, model)
    assert result.direct == direct
    cached, pages = _cached_pages(path)
    # Reading ahead through the cache may bring a little back behind the dropping.
    assert cached <= (0 if direct else pages // 10)


# --- disks that fail ---


def test_a_disk_error_is_a_bad_file_and_not_a_traceback(arena: HostArena, model: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset >= 2 * BLOCK:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(IntegrityError, match=r"Input/output error.*disk"):
        fill(arena, model)
    assert arena.usage().taken_bytes == 0
    with pytest.raises(IntegrityError, match="Input/output error"):
        write_manifests(model.folder)
    model.folder.joinpath("model-0.safetensors").touch()
    with pytest.raises(IntegrityError, match="Input/output error"):
        DiskTier().open_verified(model)


# --- the quarantine ---


def damage(source: ModelSource) -> None:
    path = source.folder / source.manifest.files[0].path
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def test_the_quarantine_outlives_the_agent(tmp_path: Path) -> None:
    source = make_source(tmp_path / "models", "llama", 4)
    kept_in = tmp_path / "state" / "quarantine.json"
    damage(source)
    with pytest.raises(IntegrityError, match="differs"):
        DiskTier(kept_in).open_verified(source)
    after = DiskTier(kept_in)
    assert "differs" in (after.quarantined(source) or "")
    with pytest.raises(IntegrityError, match=r"is quarantined: .*differs"):
        after.open_verified(source)
    assert sorted(p.name for p in source.folder.iterdir()) == ["model-0.safetensors", "model-1.safetensors", "prefetcher.manifest.json"]

    damage(source)  # turned back: a replaced file ends it, for every agent to come
    assert after.quarantined(source) is None
    assert DiskTier(kept_in).quarantined(source) is None


def test_new_bytes_that_get_a_manifest_of_their_own_are_no_longer_bad(tmp_path: Path) -> None:
    source = make_source(tmp_path / "models", "llama", 4)
    kept_in = tmp_path / "quarantine.json"
    damage(source)
    tier = DiskTier(kept_in)
    with pytest.raises(IntegrityError):
        tier.open_verified(source)
    write_manifests(source.folder)
    renewed = scan_models_folder(tmp_path / "models").source("llama")
    assert tier.quarantined(renewed) is None
    for fd in tier.open_verified(renewed):
        os.close(fd)


def test_a_missing_file_is_quarantined_until_it_comes(tmp_path: Path) -> None:
    source = make_source(tmp_path / "models", "llama", 4)
    path = source.folder / "model-0.safetensors"
    raw = path.read_bytes()
    path.unlink()
    kept_in = tmp_path / "quarantine.json"
    with pytest.raises(IntegrityError, match="missing"):
        DiskTier(kept_in).open_verified(source)
    assert "missing" in (DiskTier(kept_in).quarantined(source) or "")
    path.write_bytes(raw)
    for fd in DiskTier(kept_in).open_verified(source):
        os.close(fd)


@pytest.mark.parametrize("content", [b"", b"{", b'[{"a": 1}]', b"\xff\xfe"])
def test_a_quarantine_that_cannot_be_read_begins_anew(content: bytes, tmp_path: Path) -> None:
    source = make_source(tmp_path / "models", "llama", 4)
    kept_in = tmp_path / "quarantine.json"
    kept_in.write_bytes(content)
    damage(source)
    tier = DiskTier(kept_in)
    assert tier.quarantined(source) is None
    with pytest.raises(IntegrityError):
        tier.open_verified(source)
    assert DiskTier(kept_in).quarantined(source) is not None


def test_where_nothing_can_be_kept_the_quarantine_holds_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(tmp_path / "models", "llama", 4)
    damage(source)
    for tier in (DiskTier(), DiskTier(tmp_path / "models" / "llama" / "model-1.safetensors" / "quarantine.json")):
        with pytest.raises(IntegrityError):
            tier.open_verified(source)
        assert tier.quarantined(source) is not None

    def full(path: Path, text: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write_whole", full)
    tier = DiskTier(tmp_path / "quarantine.json")
    with pytest.raises(IntegrityError):
        tier.open_verified(source)
    assert tier.quarantined(source) is not None
    assert not (tmp_path / "quarantine.json").exists()


def test_a_quarantined_model_is_not_read_again(arena: HostArena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(tmp_path / "models", "llama", 4)
    kept_in = tmp_path / "quarantine.json"
    damage(source)
    loop = Loop(arena, source, DiskTier(kept_in))
    loop.start(Cause.DEMAND)
    eventually(loop.ended)
    (failed,) = [event for event in loop.heard if isinstance(event, ev.LoadFailed)]
    assert failed.source_bad
    assert "differs" in failed.reason

    def read(*_: object, **__: object) -> None:
        raise AssertionError("bad files were read again")

    monkeypatch.setattr("prefetcher.agent.moves.load", read)
    loop = Loop(arena, source, DiskTier(kept_in))
    loop.start(Cause.FORECAST)
    (failed,) = loop.heard
    assert isinstance(failed, ev.LoadFailed)
    assert failed.source_bad
    assert "differs" in failed.reason
    assert arena.usage().taken_bytes == 0


def test_two_versions_side_by_side_are_verified_each_by_its_own_manifest(arena: HostArena, tmp_path: Path) -> None:
    old = make_source(tmp_path / "models", "llama", 4, seed=1)
    fill(arena, old)
    for file in old.folder.glob("*.safetensors"):
        file.unlink()
    make_model(tmp_path / "new", 4, seed=2)
    for file in (tmp_path / "new").iterdir():
        file.rename(old.folder / file.name)
    write_manifests(old.folder)
    new = scan_models_folder(tmp_path / "models").source("llama")
    assert new.key.model == old.key.model
    assert new.key.version != old.key.version
    copy, _ = fill(arena, new)
    assert right(copy, new)
    assert arena.copy(old.key) is not arena.copy(new.key)
    first = arena.copy(old.key)
    assert first is not None
    arena.evict(first)
    with pytest.raises(IntegrityError):
        fill(arena, old)  # its files are gone
    assert arena.copy(new.key) is copy

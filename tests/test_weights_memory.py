"""Host memory: memory files without names, what a load may take, freed bytes that are poisoned, and folders that hold more than ours."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from weights_kit import MB, OneModelAgent, eventually, expected, fill, make_model, make_source, serving

import prefetcher
from prefetcher.agent import hostfolder
from prefetcher.agent.client import OpenModel
from prefetcher.agent.hostmem import HostArena
from prefetcher.agent.loader import load
from prefetcher.agent.manifest import ModelSource, scan_models_folder, write_manifests
from prefetcher.clock import SystemClock
from prefetcher.errors import BudgetError, NoRoomError, UsageError


def no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with neither user namespaces nor room in /dev/shm."""
    monkeypatch.setattr(hostfolder, "_private", lambda _: None)
    monkeypatch.setattr(hostfolder, "_fits", lambda path, budget: False)


@pytest.fixture
def memfd(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostArena]:
    no_folders(monkeypatch)
    arena = HostArena(64 * MB, name=f"memory-{os.getpid()}", lock="off")
    assert arena.kind == "memfd"
    yield arena
    arena.close()


@pytest.fixture(params=["private", "shm", "memfd"])
def arena(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostArena]:
    if request.param == "memfd":
        no_folders(monkeypatch)
    elif request.param == "shm":
        monkeypatch.setattr(hostfolder, "_private", lambda _: None)
    arena = HostArena(64 * MB, name=f"memory-{os.getpid()}", lock="off")
    if arena.kind != request.param:
        arena.close()
        pytest.skip(f"this machine gives {arena.kind}")
    yield arena
    arena.close()
    assert not Path(f"/dev/shm/prefetcher-{os.getuid()}-memory-{os.getpid()}").exists()


@pytest.fixture
def model(tmp_path: Path) -> ModelSource:
    return make_source(tmp_path / "models", "llama", 8)


# --- memory files without names ---


def test_memory_files_serve_open_and_have_no_path(memfd: HostArena, model: ModelSource, tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    copy, _ = fill(memfd, model)
    assert set(Path("/dev/shm").iterdir()) == before
    assert all("memfd:" in os.readlink(f"/proc/self/fd/{file.fd}") for file in copy.files)
    with serving(OneModelAgent(memfd, model), tmp_path) as path, prefetcher.open("llama", socket_path=path) as tensors:
        assert tensors.source == "host"
        for name, want in expected(model).items():
            assert tensors[name].tobytes() == want.tobytes()


def test_memory_files_give_their_memory_back(memfd: HostArena, model: ModelSource) -> None:
    for _ in range(3):
        copy, _ = fill(memfd, model)
        assert memfd.usage().allocated_bytes >= model.manifest.bytes
        assert memfd.evict(copy) == 0
        assert memfd.usage().taken_bytes == 0
        assert memfd.usage().allocated_bytes == 0


def test_memory_files_are_not_adopted(memfd: HostArena, model: ModelSource) -> None:
    models = scan_models_folder(model.folder.parent).models
    assert memfd.adopt(models) == []
    fill(memfd, model)
    assert memfd.copy(model.key) is not None


# --- evicted bytes ---


def test_evicted_bytes_count_until_the_last_view_is_gone(arena: HostArena, model: ModelSource, tmp_path: Path) -> None:
    copy, _ = fill(arena, model)
    with serving(OneModelAgent(arena, model), tmp_path) as path:
        tensors = prefetcher.open("llama", socket_path=path)
        view = tensors["layer.1.weight"]
        tensors.close()
    assert arena.evict(copy) == model.manifest.bytes
    room = arena.budget_bytes - arena.usage().taken_bytes
    assert room == arena.budget_bytes - model.manifest.bytes
    assert (view == expected(model)["layer.1.weight"]).all()
    del view, tensors
    eventually(lambda: arena.collect() == 0)
    assert arena.usage().taken_bytes == 0


def test_freed_bytes_are_poisoned_and_no_view_sees_it(arena: HostArena, tmp_path: Path) -> None:
    first, second, third = (make_source(tmp_path / "models", f"m{i}", 12, seed=i) for i in range(3))

    def poison_a_load_of(source: ModelSource) -> None:
        copy = arena.begin(source.manifest)
        load(source.manifest, source.folder, arena, copy, clock=SystemClock())
        writers = [mmap.mmap(file.fd, file.entry.bytes) for file in copy.files]
        arena.publish(copy)
        arena.evict(copy)
        for writer in writers:
            writer[:] = b"\xdb" * len(writer)
            writer.close()
        eventually(lambda: arena.collect() <= first.manifest.bytes)

    def right(tensors: OpenModel, source: ModelSource) -> bool:
        return all(tensors[name].tobytes() == want.tobytes() for name, want in expected(source).items())

    copy, _ = fill(arena, first)
    with serving(OneModelAgent(arena, first, second, third), tmp_path) as path, prefetcher.open("m0", socket_path=path) as held:
        poison_a_load_of(second)
        assert right(held, first)
        fill(arena, third)
        with prefetcher.open("m2", socket_path=path) as after:
            assert after.source == "host"
            assert right(after, third)
        arena.evict(copy)  # its bytes stay as long as they are held
        poison_a_load_of(second)
        assert right(held, first)


def test_two_copies_never_share_a_file(arena: HostArena, tmp_path: Path) -> None:
    first, second = (make_source(tmp_path / "models", name, 4, seed=len(name)) for name in ("a", "bb"))
    seen: set[tuple[int, int]] = set()
    kept: list[int] = []
    for source in (first, second, first, second):
        copy, _ = fill(arena, source)
        inodes = {(os.fstat(f.fd).st_dev, os.fstat(f.fd).st_ino) for f in copy.files}
        assert not inodes & seen
        seen |= inodes
        kept += arena.descriptors(copy)  # as long as somebody has a file, its number is not given again
        arena.evict(copy)
    assert arena.usage().lingering_bytes == 2 * (first.manifest.bytes + second.manifest.bytes)
    for fd in kept:
        os.close(fd)
    assert arena.collect() == 0


# --- what a load takes ---

LOAD = """
import re, sys, threading
from pathlib import Path
from prefetcher.agent import hostfolder
from prefetcher.agent.hostmem import HostArena
from prefetcher.agent.loader import load
from prefetcher.agent.manifest import scan_models_folder, write_manifests
from prefetcher.clock import SystemClock

def status(name):
    return int(re.search(rf"^{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text(), re.M)[1]) * 1024

folder = Path(sys.argv[1])
if sys.argv[2] == "manifest":
    write_manifests(folder)
    print(status("VmHWM"))
    sys.exit()
if sys.argv[2] == "shm":
    hostfolder._private = lambda _: None
source = scan_models_folder(folder).source("llama")
arena = HostArena(512 << 20, name=sys.argv[3], lock="off")
peak = [0]
copy = arena.begin(source.manifest)
load(source.manifest, source.folder, arena, copy, clock=SystemClock(),
     on_block=lambda *_: peak.__setitem__(0, max(peak[0], status("RssAnon"))))
arena.publish(copy)
print(peak[0], status("VmHWM"), arena.usage().allocated_bytes, arena.kind)
arena.close()
"""


@pytest.mark.parametrize("kind", ["default", "shm"])
def test_a_load_takes_the_weights_and_little_else(kind: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "models", "llama", 320, shards=1)
    command = [sys.executable, "-c", LOAD, str(tmp_path / "models")]
    done = subprocess.run([*command, kind, f"rss-{os.getpid()}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    anonymous, peak, allocated, found = done.stdout.split()
    assert found == "shm" or kind == "default"
    assert int(anonymous) < 128 * MB
    assert int(peak) < source.manifest.bytes + 256 * MB
    assert source.manifest.bytes <= int(allocated) <= 1.03 * source.manifest.bytes


def test_a_manifest_is_made_in_bounded_memory(tmp_path: Path) -> None:
    make_source(tmp_path / "models", "llama", 320, shards=1)
    command = [sys.executable, "-c", LOAD, str(tmp_path / "models"), "manifest"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert int(done.stdout) < 160 * MB


def test_a_budget_that_is_full_is_said_before_anything_is_read(arena: HostArena, tmp_path: Path) -> None:
    first, second = (make_source(tmp_path / "models", name, 36, seed=len(name)) for name in ("a", "bb"))
    fill(arena, first)
    with pytest.raises(NoRoomError, match="evict first"):
        arena.begin(second.manifest)
    assert arena.usage().taken_bytes == first.manifest.bytes


# --- the folder that was given ---


def test_what_is_not_ours_in_the_given_folder_is_left_alone(model: ModelSource, tmp_path: Path) -> None:
    tier = Path(f"/dev/shm/prefetcher-test-given-{os.getpid()}")
    try:
        (tier / "precious" / "deep").mkdir(parents=True)
        (tier / "precious" / "deep" / "thesis.txt").write_text("mine")
        (tier / "notes.txt").write_text("mine")
        (tier / "deadbeef").mkdir()
        (tier / ("0" * 24)).mkdir()
        (tier / ".3.loading").mkdir()
        (tier / ".3.loading" / "00000.safetensors").write_bytes(b"half")
        arena = HostArena(64 * MB, folder=tier, lock="off")
        arena.adopt(scan_models_folder(model.folder.parent).models)
        fill(arena, model)
        arena.close()
        left = sorted(str(p.relative_to(tier)) for p in tier.rglob("*") if p.is_file())
        assert left == [".lock", "notes.txt", "precious/deep/thesis.txt"]
        assert sorted(p.name for p in tier.iterdir() if p.is_dir()) == ["deadbeef", "precious"]
    finally:
        subprocess.run(["rm", "-r", str(tier)], check=True)


def test_a_given_folder_on_a_disk_is_refused_and_not_made(tmp_path: Path) -> None:
    if hostfolder._mount_of(tmp_path)[0] in {"tmpfs", "ramfs"}:
        pytest.skip("the folder for temporary files is in memory")
    for folder in (tmp_path, tmp_path / "new" / "tier"):
        with pytest.raises(UsageError, match="not in memory") as caught:
            HostArena(64 * MB, folder=folder)
        assert caught.value.exit_code == 2
    assert not (tmp_path / "new").exists()


def test_a_given_folder_that_is_too_small_is_refused_and_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostfolder, "_fits", lambda path, budget: False)
    tier = Path(f"/dev/shm/prefetcher-test-small-{os.getpid()}")
    with pytest.raises(BudgetError, match="--host-dir"):
        HostArena(64 * MB, folder=tier)
    assert not tier.exists()


def test_mount_points_with_blanks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = "/dev/vda / ext4 rw 0 0\ntmpfs /mnt/my\\040memory tmpfs rw,huge=within_size 0 0\ntmpfs /mnt/my tmpfs rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda self: mounts)
    assert hostfolder._mount_of(Path("/mnt/my memory/tier")) == ("tmpfs", "rw,huge=within_size")
    assert hostfolder._mount_of(Path("/mnt/my/tier")) == ("tmpfs", "rw")
    assert hostfolder._mount_of(Path("/mnt/mystery"))[0] == "ext4"
    assert hostfolder._is_huge(Path("/mnt/my memory"))


def test_the_limit_of_the_own_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "/proc/meminfo": "MemTotal:       16000000 kB\n",
        "/proc/self/cgroup": "0::/system.slice/prefetcher.service\n",
        "/sys/fs/cgroup/system.slice/memory.max": "max\n",
        "/sys/fs/cgroup/system.slice/prefetcher.service/memory.max": f"{3 * MB}\n",
    }

    def read(self: Path) -> str:
        if str(self) not in texts:
            raise FileNotFoundError(self)
        return texts[str(self)]

    monkeypatch.setattr(Path, "read_text", read)
    hostfolder.check_budget(3 * MB)
    with pytest.raises(BudgetError, match="--host-bytes"):
        hostfolder.check_budget(3 * MB + 1)


def test_a_new_model_fits_where_a_lingering_one_has_gone(arena: HostArena, tmp_path: Path) -> None:
    make_model(tmp_path / "models" / "a", 36, seed=1)
    make_model(tmp_path / "models" / "b", 36, seed=2)
    write_manifests(tmp_path / "models")
    catalog = scan_models_folder(tmp_path / "models")
    first, _ = fill(arena, catalog.source("a"))
    (fd, *rest) = arena.descriptors(first)
    arena.evict(first)
    with pytest.raises(NoRoomError):
        arena.begin(catalog.source("b").manifest)
    for held in (fd, *rest):
        os.close(held)
    copy, _ = fill(arena, catalog.source("b"))
    assert arena.usage().taken_bytes == catalog.source("b").manifest.bytes
    assert np.fromfile(f"/proc/self/fd/{copy.files[0].fd}", np.uint8).nbytes == catalog.source("b").manifest.files[0].bytes

"""Parts of models in host memory, with real files: what a victim keeps, what the kernel gets back, and how it becomes whole again."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_kit import MB, OneModelAgent, expected, fill, make_source, serving

import prefetcher
from prefetcher.agent import hostfolder, loader
from prefetcher.agent.agent import Agent, AgentOptions
from prefetcher.agent.disk import DiskTier
from prefetcher.agent.files import BLOCK_BYTES
from prefetcher.agent.hostmem import HostArena, HostCopy
from prefetcher.agent.manifest import ModelSource, scan_models_folder
from prefetcher.agent.moves import Moves
from prefetcher.clock import SystemClock
from prefetcher.core import events as ev
from prefetcher.core.types import Cause, NodeName, Tier
from prefetcher.errors import NoRoomError
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.memory import MemoryState

HOLD = """
import sys, prefetcher
tensors = prefetcher.open("big", socket_path=sys.argv[1])
kept = tensors["layer.2.weight"]
tensors.close()
print("open", flush=True)
sys.stdin.read()
"""
KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from weights_kit import MB, fill
from prefetcher.agent.hostmem import HostArena
from prefetcher.agent.manifest import scan_models_folder
arena = HostArena(256 * MB, folder=Path(sys.argv[2]), name="killed")
copy, _ = fill(arena, scan_models_folder(Path(sys.argv[1])).source("big"))
assert arena.trim(copy, 30 * MB)[0]
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """Three files of 20 MB and a bit: six blocks, every second one short."""
    return make_source(tmp_path_factory.mktemp("models"), "big", megabytes=60, shards=3)


@pytest.fixture(params=["private", "given"])
def arena(request: pytest.FixtureRequest) -> Iterator[HostArena]:
    folder = Path(f"/dev/shm/prefetcher-test-parts-{os.getpid()}") if request.param == "given" else None
    arena = HostArena(256 * MB, folder=folder, name=f"parts-{os.getpid()}")
    yield arena
    arena.close()
    if folder:
        (folder / ".lock").unlink()
        folder.rmdir()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that loads read from disk, block by block."""
    found: list[int] = []
    real = loader._fill

    def counted(fd: int, view: memoryview, offset: int, direct: bool) -> int:
        found.append(len(view))
        return real(fd, view, offset, direct)

    monkeypatch.setattr(loader, "_fill", counted)
    return found


def digests(copy: HostCopy) -> list[str]:
    return [hashlib.sha256(np.fromfile(f"/proc/self/fd/{file.fd}", np.uint8).tobytes()).hexdigest() for file in copy.files]


def read_all(fds: list[int]) -> list[str]:
    """Digests of files by descriptors, which are closed."""
    found = []
    for fd in fds:
        with os.fdopen(fd, "rb") as file:
            found.append(hashlib.sha256(file.read()).hexdigest())
    return found


def sha256(source: ModelSource) -> list[str]:
    return [entry.sha256 for entry in source.manifest.files]


@pytest.mark.parametrize("keep", [17 * MB, 37 * MB, 59 * MB])
def test_a_part_holds_its_first_blocks_and_only_the_rest_is_read_again(
    keep: int, arena: HostArena, source: ModelSource, reads: list[int]
) -> None:
    copy, _ = fill(arena, source)
    kept, why = arena.trim(copy, keep)
    assert why == ""
    assert keep - BLOCK_BYTES < kept <= keep
    assert kept == copy.whole_blocks(keep)
    usage = arena.usage()
    assert (usage.published_bytes, usage.part_bytes, usage.taken_bytes) == (0, kept, kept)
    # Every file's last page is whole, and with huge pages the last of those.
    assert kept <= usage.allocated_bytes <= kept + 3 * (2 << 20)
    assert arena.copy(source.key) is None
    assert read_all(arena.descriptors(copy)) == sha256(source)[: kept // (20 * MB + 1)], "whole files may be read, and no other"
    assert arena.trim(copy, keep) == (kept, ""), "said again"
    reads.clear()
    again, result = fill(arena, source)
    assert again is copy
    assert result.bytes == source.manifest.bytes
    assert sum(reads) == source.manifest.bytes - kept
    assert digests(copy) == sha256(source)
    assert arena.usage().published_bytes == arena.usage().taken_bytes == source.manifest.bytes
    assert arena.usage().locked_bytes in (0, source.manifest.bytes)
    assert arena.evict(copy) == 0
    assert arena.usage().allocated_bytes == 0


def test_a_part_may_shrink_and_leaves_whole(arena: HostArena, source: ModelSource) -> None:
    copy, _ = fill(arena, source)
    kept, _ = arena.trim(copy, 45 * MB)
    less, _ = arena.trim(copy, 25 * MB)
    assert less < kept
    assert arena.usage().taken_bytes == less
    assert arena.evict(copy) == 0
    assert arena.usage().taken_bytes == arena.usage().allocated_bytes == 0
    assert fill(arena, source)[1].bytes == source.manifest.bytes


def test_what_a_program_maps_is_not_cut_and_leaves_whole(arena: HostArena, source: ModelSource, tmp_path: Path) -> None:
    copy, _ = fill(arena, source)
    told: list[ev.Event] = []
    moves = a_mover(arena, source, told)
    with serving(OneModelAgent(arena, source), tmp_path) as path:
        child = subprocess.Popen([sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with child:
            assert child.stdout is not None
            assert child.stdin is not None
            assert child.stdout.readline() == b"open\n"
            moves.evict(source.key, Tier.HOST, 30 * MB)
            assert told == []
            assert arena.usage().lingering_bytes == source.manifest.bytes
            assert digests(copy) == sha256(source), "not a byte of what it maps was touched"
            moves.collect()
            assert told == []
            child.stdin.close()
        moves.collect()
    assert told == [ev.WeightsEvicted(source.key, Tier.HOST, source.manifest.bytes)]
    assert arena.usage().allocated_bytes == 0


def test_a_file_of_a_part_that_somebody_reads_is_not_cut(arena: HostArena, source: ModelSource) -> None:
    copy, _ = fill(arena, source)
    arena.trim(copy, 45 * MB)
    fds = arena.descriptors(copy)
    assert len(fds) == 2
    assert arena.trim(copy, 25 * MB) == (0, "somebody still has it open or mapped")
    assert arena.evict(copy) > 0
    assert read_all(fds) == sha256(source)[:2]
    assert arena.collect() == 0


def test_who_is_served_from_disk_reads_the_whole_files_of_a_part_from_memory(source: ModelSource, tmp_path: Path) -> None:
    options = AgentOptions(
        NodeName("n"), source.folder.parent, 128 * MB, tmp_path, paths_dir=tmp_path / "paths", socket=tmp_path / "agent.sock", lock="off",
        host_dir=Path(f"/dev/shm/prefetcher-test-parts-{os.getpid()}"),
    )  # fmt: skip
    metrics = Metrics()
    agent = Agent(options, MemoryState(), SystemClock(), metrics)
    agent.start()
    try:
        with prefetcher.open("big", socket_path=agent.socket_path) as opened:
            assert opened.source == "host"
        arena = agent._arena
        assert arena is not None
        agent._moves.evict(source.key, Tier.HOST, 45 * MB)
        with prefetcher.open("big", socket_path=agent.socket_path) as opened:
            assert opened.source == "disk"
            assert {name: np.array(opened[name]).tobytes() for name in opened} == {n: a.tobytes() for n, a in expected(source).items()}
        first, second, third = source.manifest.files
        assert metrics.kept._value.get() == first.bytes + second.bytes
        leads_to = [Path(os.path.realpath(tmp_path / "paths" / "big" / file.path)) for file in (first, second, third)]
        assert all(path.is_relative_to(source.folder) for path in leads_to), "paths know no parts"
        assert [hashlib.sha256(path.read_bytes()).hexdigest() for path in leads_to] == sha256(source)
    finally:
        agent.close()
        shutil.rmtree(f"/dev/shm/prefetcher-test-parts-{os.getpid()}", ignore_errors=True)


def a_mover(arena: HostArena, source: ModelSource, told: list[ev.Event]) -> Moves:
    return Moves(arena, DiskTier(), SystemClock(), 4, told.append, lambda key: source)


def test_memory_files_leave_whole(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostfolder, "choose", lambda *_, **__: hostfolder.HostFolder("memfd"))
    arena = HostArena(256 * MB)
    told: list[ev.Event] = []
    fill(arena, source)
    a_mover(arena, source, told).evict(source.key, Tier.HOST, 30 * MB)
    assert told == [ev.WeightsEvicted(source.key, Tier.HOST, source.manifest.bytes)]
    assert arena.usage().taken_bytes == 0
    arena.close()


def test_a_kernel_that_gives_nothing_back_is_not_believed(arena: HostArena, source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, _ = fill(arena, source)
    monkeypatch.setattr(hostfolder, "punch", lambda fd, start, end: None)
    assert arena.trim(copy, 30 * MB) == (0, "the kernel did not give it back")
    assert arena.evict(copy) == 0


def test_a_load_from_a_part_that_fails_leaves_nothing(arena: HostArena, source: ModelSource) -> None:
    copy, _ = fill(arena, source)
    arena.trim(copy, 30 * MB)
    told: list[ev.Event] = []
    moves = a_mover(arena, source, told)
    arena.budget_bytes = source.manifest.bytes - 1
    moves.start(ev.LoadWeights(source.key, Tier.DISK, Tier.HOST, Cause.DEMAND, source.manifest.bytes, resume_from_bytes=copy.bytes))
    moves.close()
    (failed,) = told
    assert isinstance(failed, ev.LoadFailed)
    assert arena.usage().taken_bytes == arena.usage().allocated_bytes == 0


def test_a_killed_agents_part_is_removed(source: ModelSource) -> None:
    tier = Path(f"/dev/shm/prefetcher-test-parts-killed-{os.getpid()}")
    ran = subprocess.run([sys.executable, "-c", KILLED, str(source.folder.parent), str(tier), str(Path(__file__).parent)], timeout=60)
    assert ran.returncode == -signal.SIGKILL
    assert len([p for p in tier.iterdir() if p.is_dir()]) == 1
    arena = HostArena(256 * MB, folder=tier)
    try:
        assert arena.adopt(scan_models_folder(source.folder.parent).models) == []
        assert not [p for p in tier.iterdir() if p.is_dir()]
        assert arena.usage().taken_bytes == 0
    finally:
        arena.close()
        (tier / ".lock").unlink()
        tier.rmdir()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[ModelSource]:
    folder = tmp_path_factory.mktemp("three")
    return [make_source(folder, f"m{i}", megabytes=34 + 2 * i, shards=1 + i % 2, seed=i) for i in range(3)]


@settings(max_examples=12, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["load", "load", "trim", "evict", "open"]), st.integers(0, 40)), max_size=14
    )
)
def test_the_byte_ledger_holds_what_the_kernel_holds_and_never_more_than_the_budget(
    three: list[ModelSource], steps: list[tuple[int, str, int]]
) -> None:
    arena = HostArena(90 * MB, name=f"parts-{os.getpid()}")
    parts: dict[int, int] = {}
    try:
        for number, what, keep in steps:
            source = three[number]
            copy = arena.copy(source.key) or arena.part(source.key)
            if what == "load" and arena.copy(source.key) is None:
                fits = arena.usage().taken_bytes - parts.get(number, 0) + source.manifest.bytes <= arena.budget_bytes
                try:
                    fill(arena, source)
                except NoRoomError:
                    assert not fits
                else:
                    assert fits
                    parts.pop(number, None)
            elif what == "trim" and copy is not None:
                before = copy.bytes
                kept, why = arena.trim(copy, keep * MB)
                assert kept <= before
                if not kept:
                    assert why
                    assert arena.evict(copy) == 0
                    parts.pop(number, None)
                else:
                    parts[number] = kept
            elif what == "evict" and copy is not None:
                assert arena.evict(copy) == 0
                parts.pop(number, None)
            elif what == "open" and arena.copy(source.key) is not None:
                assert digests(arena.copy(source.key)) == sha256(source)  # type: ignore[arg-type]
            usage = arena.usage()
            assert usage.part_bytes == sum(parts.values())
            assert usage.taken_bytes <= arena.budget_bytes
            assert usage.taken_bytes <= usage.allocated_bytes <= usage.taken_bytes + 6 * (2 << 20)
    finally:
        arena.close()


def test_a_resumed_model_opens_as_any(arena: HostArena, source: ModelSource, tmp_path: Path) -> None:
    copy, _ = fill(arena, source)
    arena.trim(copy, 32 * MB)
    agent = OneModelAgent(arena, source)
    with serving(agent, tmp_path) as path:
        with prefetcher.open("big", socket_path=path) as tensors:
            assert tensors.source == "disk"
        fill(arena, source)
        with prefetcher.open("big", socket_path=path) as tensors:
            assert tensors.source == "host"
            for name, array in expected(source).items():
                assert (np.asarray(tensors[name]) == array).all()

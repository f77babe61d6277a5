"""From a models folder to leased tensors: manifests, loading, memory, the lease socket, and what must be refused."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save
from weights_kit import MAY_BE_ANYBODY, MB, OneModelAgent, eventually, expected, fill, make_model, serving

import prefetcher
from prefetcher.agent import hostfolder
from prefetcher.agent.client import ask
from prefetcher.agent.headers import parse_header
from prefetcher.agent.hostmem import HostArena
from prefetcher.agent.lease_server import LeaseServer
from prefetcher.agent.loader import LoadCancelledError, LoadControl, load
from prefetcher.agent.manifest import MANIFEST_NAME, ModelSource, read_manifest, scan_models_folder, write_manifests
from prefetcher.clock import SystemClock
from prefetcher.core.types import ModelName
from prefetcher.errors import (
    BudgetError,
    IntegrityError,
    LockLimitError,
    ManifestError,
    ModelNotFoundError,
    NoRoomError,
    PrefetcherError,
    UnavailableError,
    UnsafeFormatError,
    UsageError,
)


@pytest.fixture
def model(tmp_path: Path) -> ModelSource:
    make_model(tmp_path / "models" / "llama")
    write_manifests(tmp_path / "models")
    return scan_models_folder(tmp_path / "models").source("llama")


@pytest.fixture(params=["private", "given", "memfd"])
def arena(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostArena]:
    folder = Path(f"/dev/shm/prefetcher-test-{os.getpid()}") if request.param == "given" else None
    if request.param == "memfd":
        monkeypatch.setattr(hostfolder, "choose", lambda *_, **__: hostfolder.HostFolder("memfd"))
    arena = HostArena(256 * MB, folder=folder, name=f"test-{os.getpid()}")
    yield arena
    arena.close()
    if folder:
        (folder / ".lock").unlink()
        folder.rmdir()


# --- the whole way ---


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_tensors_equal_safetensors_bit_for_bit(framework, arena, model, tmp_path):
    copy, result = fill(arena, model)
    assert result.bytes == model.manifest.bytes
    agent = OneModelAgent(arena, model)
    with serving(agent, tmp_path) as path:
        with prefetcher.open("llama", framework=framework, socket_path=path) as tensors:
            assert tensors.source == "host"
            want = expected(model)
            assert set(tensors) == set(want)
            assert len(tensors) == model.manifest.tensors
            for name, array in want.items():
                got = np.asarray(tensors[name])
                assert got.dtype == array.dtype
                assert got.shape == array.shape
                assert got.tobytes() == array.tobytes()
            assert list(agent.held.values()) == [os.getpid()]
            late = tensors["layer.0.weight"]
            del got
        eventually(lambda: not agent.held)
        with pytest.raises(UsageError):
            tensors["layer.0.weight"]
        # A view that outlives its lease keeps its bytes; they count until it is gone.
        assert arena.evict(copy) == model.manifest.bytes
        assert arena.usage().lingering_bytes == model.manifest.bytes
        assert np.asarray(late).tobytes() == want["layer.0.weight"].tobytes()
        del late
        eventually(lambda: arena.collect() == 0)
        assert arena.usage().allocated_bytes == 0


def test_numpy_views_cannot_be_written_and_torch_writes_stay_private(arena, model, tmp_path):
    fill(arena, model)
    with serving(OneModelAgent(arena, model), tmp_path) as path:
        with prefetcher.open("llama", framework="torch", socket_path=path) as tensors:
            tensors["layer.0.bias"].fill_(77)
        with prefetcher.open("llama", socket_path=path) as tensors:
            with pytest.raises(ValueError, match="read-only"):
                tensors["layer.0.weight"][0] = 1
            assert (tensors["layer.0.bias"] == expected(model)["layer.0.bias"]).all()


def test_memory_is_counted_and_locked_bytes_are_the_payload(arena, model):
    fill(arena, model)
    usage = arena.usage()
    assert usage.published_bytes == model.manifest.bytes
    assert model.manifest.bytes <= usage.allocated_bytes <= 1.03 * model.manifest.bytes
    assert usage.locked_bytes in (0, model.manifest.bytes)
    assert (usage.locked_bytes == 0) == (arena.lock_warning is not None)
    with pytest.raises(NoRoomError):
        arena.begin(model.manifest)


def test_what_is_bypassed_is_read_from_disk_and_hashed_only_when_it_changed(arena, model, tmp_path):
    agent = OneModelAgent(arena, model)
    with serving(agent, tmp_path) as path:
        with prefetcher.open("llama", socket_path=path) as tensors:
            assert tensors.source == "disk"
            assert (tensors["layer.1.weight"] == expected(model)["layer.1.weight"]).all()
        file = model.folder / "model-1.safetensors"
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
        with pytest.raises(IntegrityError, match="differs"):
            prefetcher.open("llama", socket_path=path)
        with pytest.raises(IntegrityError, match="quarantined"):
            prefetcher.open("llama", socket_path=path)
        raw[-1] ^= 1
        file.write_bytes(raw)  # replaced: looked at again
        prefetcher.open("llama", socket_path=path).close()


# --- holders that die ---

HOLD = """
import sys, prefetcher
tensors = prefetcher.open("llama", socket_path=sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def test_a_killed_holder_frees_its_lease_and_memory(arena, model, tmp_path):
    copy, _ = fill(arena, model)
    agent = OneModelAgent(arena, model)
    with serving(agent, tmp_path) as path:
        child = subprocess.Popen([sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"open\n"
            assert list(agent.held.values()) == [child.pid]
            assert arena.evict(copy) == model.manifest.bytes
            child.send_signal(signal.SIGKILL)
        eventually(lambda: not agent.held)
        eventually(lambda: arena.collect() == 0)


def test_a_holder_that_dies_while_it_waits_is_told_to_the_agent(arena, model, tmp_path):
    agent = OneModelAgent(arena, model)
    agent.hang = True
    with serving(agent, tmp_path) as path:
        child = subprocess.Popen([sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE)
        with child:
            assert agent.asked.wait(30)
            child.send_signal(signal.SIGKILL)
        eventually(lambda: len(agent.released) == 1)
        assert not agent.held
        with pytest.raises(UsageError):
            prefetcher.open("llama", socket_path=path, timeout_s=-1)


def test_errors_cross_the_socket_as_themselves(arena, model, tmp_path):
    with serving(OneModelAgent(arena, model), tmp_path) as path:
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ModelNotFoundError):
            prefetcher.open("other", socket_path=path)
        with pytest.raises(NoRoomError) as caught:
            ask("pin", "llama", socket_path=path)
        assert caught.value.retry_after_s == 7.0
        assert json.loads(ask("status", socket_path=path)) is None
        with pytest.raises(UsageError):
            LeaseServer(path, OneModelAgent(arena, model)).start()
    with pytest.raises(UnavailableError):
        prefetcher.open("llama", socket_path=path)


# --- loads that pause, end, fail ---


def test_a_paused_load_stops_at_a_boundary_and_resumes_right(tmp_path):
    make_model(tmp_path / "m" / "big", megabytes=160, shards=1)
    write_manifests(tmp_path / "m")
    source = scan_models_folder(tmp_path / "m").source("big")
    arena = HostArena(256 * MB, name=f"test-{os.getpid()}")
    control, paused = LoadControl(), threading.Event()
    seen: list[int] = []

    def on_block(_file: int, _block: int, done: int) -> None:
        if not seen:
            control.pause()
        seen.append(done)

    def on_paused(done: int) -> None:
        seen.append(-done)
        paused.set()

    copy = arena.begin(source.manifest)
    runner = threading.Thread(
        target=load,
        args=(source.manifest, source.folder, arena, copy),
        kwargs={"clock": SystemClock(), "control": control, "on_block": on_block, "on_paused": on_paused},
    )
    runner.start()
    assert paused.wait(30)
    at = -seen[-1]
    assert at % (64 * MB) == 0
    assert 0 < at < source.manifest.bytes
    assert runner.is_alive()
    control.resume()
    runner.join(30)
    assert seen[-1] == source.manifest.bytes
    arena.publish(copy)
    assert bytes(np.fromfile(f"/proc/self/fd/{copy.files[0].fd}", np.uint8)) == (source.folder / "model-0.safetensors").read_bytes()
    arena.close()


def test_a_load_that_pauses_again_before_it_went_on_says_so_again(tmp_path):
    make_model(tmp_path / "m" / "big", megabytes=160, shards=1)
    write_manifests(tmp_path / "m")
    source = scan_models_folder(tmp_path / "m").source("big")
    arena = HostArena(256 * MB, name=f"test-{os.getpid()}")
    control, told = LoadControl(), queue.SimpleQueue[int]()
    control.pause()
    runner = threading.Thread(
        target=load,
        args=(source.manifest, source.folder, arena, arena.begin(source.manifest)),
        kwargs={"clock": SystemClock(), "control": control, "on_paused": told.put},
    )
    runner.start()
    assert told.get(timeout=30) == 0
    with control.changed:  # no thread of the load comes in between
        control.resume()
        control.pause()
    assert told.get(timeout=30) == 0
    control.resume()
    runner.join(30)
    assert not runner.is_alive()
    arena.close()


def test_a_cancelled_load_leaves_nothing(arena, model):
    control = LoadControl()
    control.cancel()
    with pytest.raises(LoadCancelledError):
        fill(arena, model, control=control)
    assert arena.usage().taken_bytes == 0
    assert arena.copy(model.key) is None


@pytest.mark.parametrize("damage", ["flip", "truncate", "grow", "remove"])
def test_bad_bytes_are_never_visible(damage, arena, model):
    file = model.folder / "model-1.safetensors"
    raw = file.read_bytes()
    if damage == "remove":
        file.unlink()
    else:
        flipped = raw[:-5] + bytes([raw[-5] ^ 64]) + raw[-4:]
        file.write_bytes({"flip": flipped, "truncate": raw[:-1], "grow": raw + b"x"}[damage])
    with pytest.raises(IntegrityError):
        fill(arena, model)
    assert arena.copy(model.key) is None
    assert arena.usage().taken_bytes == 0


def test_a_file_that_shrinks_while_it_is_read_is_refused(arena, model):
    file = model.folder / "model-1.safetensors"

    def shrink(_file: int, _block: int, _done: int) -> None:
        os.truncate(file, 17 * MB + 5)

    with pytest.raises(IntegrityError):
        fill(arena, model, on_block=shrink, threads=1)
    assert arena.usage().taken_bytes == 0


# --- manifests and folders ---


def test_manifest_errors_say_what_to_do(model, tmp_path):
    path = model.folder / MANIFEST_NAME
    good = json.loads(path.read_text())
    for change, kind in [
        ({"bytes": 1}, ManifestError),
        ({"format": 9}, ManifestError),
        ({"model": "../x"}, ManifestError),
        ({"files": []}, ManifestError),
        ({"surprise": 1}, ManifestError),
        (
            {
                "files": [{**good["files"][0], "path": "../../etc/passwd.safetensors"}],
                "bytes": good["files"][0]["bytes"],
            },
            ManifestError,
        ),
        ({"files": [{**good["files"][0], "path": "w.bin"}], "bytes": good["files"][0]["bytes"]}, UnsafeFormatError),
        ({"files": [{**good["files"][0], "blocks": []}], "bytes": good["files"][0]["bytes"]}, ManifestError),
    ]:
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(kind) as caught:
            read_manifest(model.folder)
        assert "\n" not in str(caught.value)
        assert "prefetcher manifest" in str(caught.value)
        catalog = scan_models_folder(tmp_path / "models")
        assert not catalog.models
        assert isinstance(catalog.refused["llama"], kind)
    path.write_text("{")
    with pytest.raises(ManifestError):
        read_manifest(model.folder)
    path.unlink()
    with pytest.raises(ManifestError, match="prefetcher manifest"):
        read_manifest(model.folder)


def test_links_pickles_and_empty_files_are_refused(tmp_path):
    outside = make_model(tmp_path / "outside", 1, 1)
    models = tmp_path / "models"
    (models / "a").mkdir(parents=True)
    (models / "a" / "w.safetensors").symlink_to(outside / "model-0.safetensors")
    with pytest.raises(ManifestError, match="out of its folder"):
        write_manifests(models)
    (models / "a" / "w.safetensors").unlink()
    (models / "a").rmdir()
    (models / "a").symlink_to(outside)
    with pytest.raises(ManifestError, match="out of the models folder"):
        write_manifests(models)
    (models / "a").unlink()
    for name, raw, kind in [
        ("w.bin", b"x", UnsafeFormatError),
        ("w.safetensors", b"\x80\x04\x95" + b"\x11" * 20, UnsafeFormatError),
        ("w.safetensors", b"PK\x03\x04\x00\x00\x08\x08" + b"\x11" * 20, UnsafeFormatError),
        ("w.safetensors", b"", IntegrityError),
        ("w.safetensors", b"\x00\x01", IntegrityError),
        ("w.safetensors", struct.pack("<Q", 5000) + b"{}", IntegrityError),
    ]:
        (models / "a").mkdir()
        (models / "a" / name).write_bytes(raw)
        with pytest.raises(kind) as caught:
            write_manifests(models)
        assert "\n" not in str(caught.value)
        assert sorted(p.name for p in (models / "a").iterdir()) == [name]
        (models / "a" / name).unlink()
        (models / "a").rmdir()
    with pytest.raises(ModelNotFoundError):
        write_manifests(models)
    with pytest.raises(ModelNotFoundError):
        scan_models_folder(tmp_path / "none")


def test_a_sound_header_may_begin_like_a_pickle(tmp_path):
    raw = save({"t": np.zeros(4, np.float32)})
    text = raw[8 : 8 + int.from_bytes(raw[:8], "little")].ljust(0x280)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "w.safetensors").write_bytes(struct.pack("<Q", 0x280) + text + b"\0" * 16)
    assert write_manifests(tmp_path)[0].tensors == 1


def test_version_follows_content_and_the_same_content_gives_the_same(tmp_path):
    make_model(tmp_path / "x" / "m", 1, seed=1)
    make_model(tmp_path / "y" / "m", 1, seed=1)
    make_model(tmp_path / "z" / "m", 1, seed=2)
    x, y, z = (write_manifests(tmp_path / n)[0].version for n in "xyz")
    assert x == y != z
    assert write_manifests(tmp_path / "x", version="v2")[0].version == "v2"


TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda t: t != "__metadata__"),
    st.tuples(st.sampled_from([np.float32, np.int8, np.float16, np.uint64]), st.lists(st.integers(0, 4), max_size=3)),
    max_size=6,
)


@given(TENSORS)
def test_every_header_that_safetensors_writes_is_read(tensors):
    raw = save({n: np.zeros(s, d) for n, (d, s) in tensors.items()})
    header = parse_header(raw, len(raw), what="x")
    assert {t.name: t.shape for t in header.tensors} == {n: tuple(s) for n, (_, s) in tensors.items()}
    assert header.data_start + sum(t.end - t.start for t in header.tensors) == len(raw)


@given(TENSORS.filter(bool), st.data())
def test_a_header_that_lies_is_refused(tensors, data):
    raw = save({n: np.zeros([*s, 2], d) for n, (d, s) in tensors.items()})
    length = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + length])
    name = data.draw(st.sampled_from(sorted(entries)))
    lie = data.draw(st.sampled_from(["begin", "end", "dtype", "shape", "negative", "extra", "drop", "float"]))
    entry = entries[name]
    begin, end = entry["data_offsets"]
    match lie:
        case "begin":
            entry["data_offsets"] = [begin + data.draw(st.integers(1, 9)), end]
        case "end":
            entry["data_offsets"] = [begin, end + data.draw(st.integers(1, 1 << 60))]
        case "dtype":
            entry["dtype"] = data.draw(st.sampled_from(["F33", "", None, 4, []]))
        case "shape":
            entry["shape"] = [*entry["shape"], data.draw(st.integers(2, 1 << 60))]
            if begin == end:
                entry["shape"] = "all"
        case "negative":
            entry["shape"] = [-1, *entry["shape"]]
        case "extra":
            entry["more"] = 1
        case "drop":
            del entry["shape"]
        case "float":
            entry["data_offsets"] = [float(begin), end]
    text = json.dumps(entries).encode()
    body = raw[8 + length :]
    with pytest.raises((UnsafeFormatError, IntegrityError)):
        parse_header(struct.pack("<Q", len(text)) + text, 8 + len(text) + len(body), what="x")


@given(st.binary(max_size=200))
def test_noise_is_refused_and_never_a_traceback(noise):
    text = b"{" + noise
    with contextlib.suppress(PrefetcherError):
        parse_header(struct.pack("<Q", len(text)) + text, len(text) + 8, what="x")


# --- the machine ---


def test_a_budget_larger_than_the_machine_is_refused(tmp_path):
    for budget in (0, -1, 1 << 60):
        with pytest.raises(BudgetError) as caught:
            HostArena(budget, folder=tmp_path / "tier")
        assert caught.value.exit_code == 2
    assert not (tmp_path / "tier").exists()


ORDINARY = """
import os, resource, sys
from pathlib import Path
sys.path[:0] = sys.argv[2].split(os.pathsep)
import ctypes
from prefetcher.agent.hostmem import HostArena
from prefetcher.agent.loader import load
from prefetcher.agent.manifest import scan_models_folder
from prefetcher.clock import SystemClock
from prefetcher.errors import LockLimitError
resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
if sys.argv[4] == "True":
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1)
try:
    HostArena(128 << 20, lock="require")
except LockLimitError as exc:
    assert exc.exit_code == 2 and "8 MiB" in str(exc)
else:
    sys.exit("require was not refused")
arena = HostArena(128 << 20, name=sys.argv[3])
assert "not locked" in (arena.lock_warning or "")
source = scan_models_folder(Path(sys.argv[1])).source("llama")
copy = arena.begin(source.manifest)
load(source.manifest, source.folder, arena, copy, clock=SystemClock())
arena.publish(copy)
assert arena.usage().locked_bytes == 0
fd = arena.descriptors(copy)[0]
try:
    os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
except PermissionError:
    pass
else:
    sys.exit("a client can write")
print(arena.kind)
arena.close()
"""


def test_an_ordinary_user_with_8_mib_of_lockable_memory(model):
    for folder in (model.folder, *model.folder.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    for file in model.folder.iterdir():
        file.chmod(0o644)
    arguments = [str(model.folder.parent), os.pathsep.join(sys.path), f"ordinary-{os.getpid()}", str(MAY_BE_ANYBODY)]
    done = subprocess.run([sys.executable, "-c", ORDINARY, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.strip() in {"private", "shm", "memfd", "mount"}
    assert not Path(f"/dev/shm/prefetcher-65534-ordinary-{os.getpid()}").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from prefetcher.agent.hostmem import HostArena
from prefetcher.agent.loader import load
from prefetcher.agent.manifest import scan_models_folder
from prefetcher.clock import SystemClock
arena = HostArena(256 << 20, folder=Path(sys.argv[2]))
models = scan_models_folder(Path(sys.argv[1]))
for name in sorted(models.models):
    source = models.source(name)
    copy = arena.begin(source.manifest)
    load(source.manifest, source.folder, arena, copy, clock=SystemClock())
    if name != "half":
        arena.publish(copy)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_agent_left_is_adopted_when_it_is_right_and_removed_otherwise(tmp_path):
    for name in ("good", "half", "rotten", "gone"):
        make_model(tmp_path / "models" / name, 4, seed=len(name))
    write_manifests(tmp_path / "models")
    tier = Path(f"/dev/shm/prefetcher-test-adopt-{os.getpid()}")
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "models"), str(tier)], timeout=60)
    left = [p for p in tier.iterdir() if p.is_dir()]
    assert len(left) == 4
    catalog = scan_models_folder(tmp_path / "models")
    rotten = expected(catalog.source("rotten"))["layer.1.weight"].tobytes()
    for file in tier.glob("*/*.safetensors"):
        if rotten in file.read_bytes():
            file.chmod(0o600)
            with file.open("r+b") as out:
                out.seek(-1, os.SEEK_END)
                out.write(b"!")
    del catalog.models[ModelName("gone")]
    arena = HostArena(256 * MB, folder=tier)
    try:
        assert [c.manifest.model for c in arena.adopt(catalog.models)] == ["good"]
        assert len([p for p in tier.iterdir() if p.is_dir()]) == 1
        assert arena.usage().published_bytes == catalog.source("good").manifest.bytes
        with pytest.raises(UsageError, match="another agent"):
            HostArena(256 * MB, folder=tier)
    finally:
        arena.close()
        (tier / ".lock").unlink()
        tier.rmdir()


def test_require_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("prefetcher.agent.hostfolder._may_lock_anything", lambda: False)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * MB, 8 * MB))
    with pytest.raises(LockLimitError):
        HostArena(64 * MB, folder=tmp_path / "tier", lock="require")
    assert not (tmp_path / "tier").exists()

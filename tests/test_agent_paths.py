"""Paths for engines: every link leads to a whole file of the right version, whatever is loaded, evicted, replaced or killed meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_live_agent import Node, opens
from typer.testing import CliRunner
from waiting import eventually

import prefetcher
from prefetcher import cli
from prefetcher.agent import hostfolder
from prefetcher.agent.hostmem import HostArena
from prefetcher.agent.manifest import ModelSource, scan_models_folder, write_manifests
from prefetcher.agent.paths import ServedPaths
from prefetcher.core.types import ModelName
from prefetcher.errors import UsageError

M = ModelName("m")
AGENT = """
import sys
from pathlib import Path
from prefetcher.agent.agent import Agent, AgentOptions
from prefetcher.clock import SystemClock
from prefetcher.core.types import NodeName
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.memory import MemoryState

folder, host = Path(sys.argv[1]), Path(sys.argv[2])
options = AgentOptions(
    NodeName("node-0"), folder / "models", 2_500_000, folder, host_dir=host, paths_dir=folder / "paths", socket=folder / "agent.sock",
    lock="off",
)
agent = Agent(options, MemoryState(), SystemClock(), Metrics())
agent.start()
print("up", flush=True)
sys.stdin.read()
"""


def write(folder: Path, value: int, shards: int = 2) -> ModelSource:
    """A model of shards that are full of `value`, with what lies beside them."""
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        save_file({f"w{shard}": np.full(1000, value, np.float32)}, folder / f"model-{shard}.safetensors")
    for name in ("config.json", "tokenizer/merges.txt", ".secret", "old.bin"):
        (folder / name).write_text(str(value))
    write_manifests(folder)
    return scan_models_folder(folder.parent).source(folder.name)


def values(path: Path) -> set[float]:
    """Of all shards that a path leads to."""
    arrays = [array for file in sorted(path.glob("*.safetensors")) for array in load_file(file).values()]
    return {float(value) for array in arrays for value in (array[0], array[-1])}


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[ServedPaths]:
    made = ServedPaths(tmp_path / "paths")
    (tmp_path / "models").mkdir()
    made.open(tmp_path / "models")
    yield made
    made.close()


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Copies of files, as they would lie in memory."""
    (tmp_path / "host").mkdir()
    return tmp_path / "host"


def near(source: ModelSource, host: Path) -> list[Path]:
    found = []
    for number, entry in enumerate(source.manifest.files):
        file = host / f"{source.key.version}-{number:05d}.safetensors"
        shutil.copy(source.folder / entry.path, file)
        found.append(file)
    return found


def leads_to(paths: ServedPaths, file: str) -> Path:
    return Path(os.path.realpath(paths.folder / "m" / file))


def test_a_file_is_in_memory_or_on_disk_and_the_rest_of_a_model_lies_beside_it(paths: ServedPaths, tmp_path: Path, host: Path) -> None:
    source = write(tmp_path / "models" / "m", 7)
    paths.take({M: source})
    assert values(paths.folder / "m") == {7.0}
    assert leads_to(paths, "model-0.safetensors") == source.folder / "model-0.safetensors"
    assert sorted(p.relative_to(paths.folder / "m").as_posix() for p in (paths.folder / "m").rglob("*")) == [
        "config.json", "model-0.safetensors", "model-1.safetensors", "tokenizer", "tokenizer/merges.txt",
    ]  # fmt: skip
    files = near(source, host)
    paths.in_host(source, files)
    assert [leads_to(paths, f"model-{n}.safetensors") for n in range(2)] == files
    assert (paths.folder / "m" / "config.json").read_text() == "7"
    paths.leaves_host(source.key)
    for file in files:
        file.unlink()
    assert values(paths.folder / "m") == {7.0}
    paths.take({})
    assert [p.name for p in paths.folder.iterdir()] == [".versions"]
    assert not list((paths.folder / ".versions").rglob("*.safetensors"))


def test_an_old_version_in_memory_serves_until_the_machine_says_so(paths: ServedPaths, tmp_path: Path, host: Path) -> None:
    old = write(tmp_path / "models" / "m", 1)
    paths.take({M: old})
    paths.serve(M, old.key)
    paths.in_host(old, near(old, host))
    new = write(tmp_path / "models" / "m", 2)  # in the same place: the old files are gone from disk
    paths.take({M: new})
    assert values(paths.folder / "m") == {1.0}
    assert values(Path(paths.of(new.key))) == {2.0}
    paths.in_host(new, near(new, host))
    assert values(paths.folder / "m") == {1.0}
    paths.serve(M, new.key)
    assert values(paths.folder / "m") == {2.0}
    assert values(Path(paths.of(old.key))) == {1.0}, "who began with the old one goes on with it"
    old_path = Path(paths.of(old.key))
    paths.leaves_host(old.key)
    assert (paths.of(old.key), old_path.exists()) == ("", False)


def test_an_old_version_that_leaves_memory_before_the_new_one_came_is_not_mixed_with_it(
    paths: ServedPaths, tmp_path: Path, host: Path
) -> None:
    old = write(tmp_path / "models" / "m", 1)
    paths.take({M: old})
    paths.serve(M, old.key)
    paths.in_host(old, near(old, host))
    paths.take({M: write(tmp_path / "models" / "m", 2)})
    paths.leaves_host(old.key)
    assert values(paths.folder / "m") == {2.0}


def test_what_an_agent_left_behind_is_made_right(paths: ServedPaths, tmp_path: Path, host: Path) -> None:
    source = write(tmp_path / "models" / "m", 7)
    gone = write(tmp_path / "models" / "gone", 8)
    paths.take({M: source, ModelName("gone"): gone})
    paths.in_host(source, near(source, host))
    os.close(paths._lock_fd)  # as if it had been killed
    paths._lock_fd = -1
    shutil.rmtree(host)
    again = ServedPaths(paths.folder)
    again.open(tmp_path / "models")
    again.take({M: source})
    assert values(paths.folder / "m") == {7.0}
    assert sorted(p.name for p in paths.folder.iterdir()) == [".versions", "m"]
    again.close()


def test_a_folder_that_is_somebody_elses_is_refused(paths: ServedPaths, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="another agent uses"):
        ServedPaths(paths.folder).open(tmp_path / "models")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="holds something else"):
        ServedPaths(tmp_path / "full").open(tmp_path / "models")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.tex"]
    for inside in (tmp_path / "models" / "paths", tmp_path):
        with pytest.raises(UsageError, match="lie in each other"):
            ServedPaths(inside).open(tmp_path / "models")
    with pytest.raises(UsageError, match="can't be used"):
        ServedPaths(tmp_path / "full" / "thesis.tex" / "paths").open(tmp_path / "models")


def test_a_folder_with_versions_of_somebody_else_is_not_ours(tmp_path: Path) -> None:
    theirs = tmp_path / "docs" / ".versions" / "thesis" / "v1" / "thesis.tex"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    with pytest.raises(UsageError, match="holds something else"):
        ServedPaths(tmp_path / "docs").open(tmp_path / "models")
    assert theirs.exists()


def test_what_somebody_put_among_old_links_stays(paths: ServedPaths, tmp_path: Path) -> None:
    theirs = paths.folder / ".versions" / "gone" / "1" / "mine"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    (theirs.parent / "link").symlink_to("/nowhere")
    paths.take({M: write(tmp_path / "models" / "m", 1)})
    assert [p.name for p in theirs.parent.iterdir()] == ["mine"]


def test_the_way_back_to_disk_needs_no_room(paths: ServedPaths, tmp_path: Path, host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without an inode left: what leaves memory is on disk again, and what comes there stays on disk until there is room."""
    there, coming = write(tmp_path / "models" / "m", 7), write(tmp_path / "models" / "other", 8)
    on_disk = {M: there, ModelName("other"): coming}
    paths.take(on_disk)
    files = near(there, host)
    paths.in_host(there, files)
    full = monkeypatch.context()
    with full as patched:
        patched.setattr(Path, "symlink_to", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        paths.leaves_host(there.key)
        for file in files:
            file.unlink()
        assert values(paths.folder / "m") == {7.0}
        paths.in_host(coming, near(coming, host))
        assert values(paths.folder / "other") == {8.0}
        assert leads_to_disk(paths, coming)
        assert paths.problems() == [f"other: no path: {paths.folder}: No space left on device"]
    paths.take(on_disk)
    assert paths.problems() == []
    assert not leads_to_disk(paths, coming)


def leads_to_disk(paths: ServedPaths, source: ModelSource) -> bool:
    return Path(os.path.realpath(paths.folder / source.key.model / "model-0.safetensors")).is_relative_to(source.folder)


def test_files_that_come_and_go_beside_the_weights_are_seen(paths: ServedPaths, tmp_path: Path) -> None:
    source = write(tmp_path / "models" / "m", 7)
    paths.take({M: source})
    (source.folder / "chat_template.jinja").write_text("{{ }}")
    (source.folder / "config.json").unlink()
    paths.take({M: source})
    shards = ["model-0.safetensors", "model-1.safetensors"]
    assert sorted(p.name for p in (paths.folder / "m").iterdir()) == ["chat_template.jinja", *shards, "tokenizer"]


def test_paths_that_somebody_removed_come_back(paths: ServedPaths, tmp_path: Path) -> None:
    source = write(tmp_path / "models" / "m", 7)
    paths.take({M: source})
    shutil.rmtree(paths.folder)
    assert paths.of(source.key) == ""
    paths.take({M: source})
    assert values(Path(paths.of(source.key))) == values(paths.folder / "m") == {7.0}
    assert (paths.folder / "m" / "config.json").read_text() == "7"


def test_a_file_in_the_way_is_not_written_over(paths: ServedPaths, tmp_path: Path) -> None:
    (paths.folder / "m").write_text("precious")
    paths.take({M: write(tmp_path / "models" / "m", 1)})
    assert (paths.folder / "m").read_text() == "precious"
    assert "something else lies there" in paths.problems()[0]


def test_what_lies_in_the_way_of_a_path_is_left_alone_and_said(paths: ServedPaths, tmp_path: Path) -> None:
    (paths.folder / "m").mkdir()
    (paths.folder / "m" / "mine").touch()
    sources = {M: write(tmp_path / "models" / "m", 1), ModelName("other"): write(tmp_path / "models" / "other", 2)}
    paths.take(sources)
    assert (paths.folder / "m" / "mine").exists()
    assert [problem.split(":")[:2] for problem in paths.problems()] == [["m", " no path"]]
    assert values(paths.folder / "other") == {2.0}
    shutil.rmtree(paths.folder / "m")
    paths.take(sources)
    assert (paths.problems(), values(paths.folder / "m")) == ([], {1.0})


def test_versions_are_any_text(paths: ServedPaths, tmp_path: Path) -> None:
    write(tmp_path / "models" / "m", 1)
    write_manifests(tmp_path / "models", version="../../v 1/é")
    source = scan_models_folder(tmp_path / "models").source("m")
    paths.take({M: source})
    assert values(paths.folder / "m") == {1.0}
    assert Path(paths.of(source.key)).parent == paths.folder / ".versions" / "m"


# --- with an agent ---


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path("/dev/shm") / f"prefetcher-test-{uuid.uuid4().hex[:12]}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def value_of(path: Path) -> tuple[float, float]:
    found = load_file(path / "model.safetensors")["w"]
    return float(found[0]), float(found[-1])


def test_who_reads_by_path_always_gets_the_right_bytes_while_models_come_and_go(tmp_path: Path, memory: Path) -> None:
    """Room for two of three models: every open makes one leave."""
    node = Node(tmp_path, host_dir=memory, paths_dir=tmp_path / "paths")
    done, wrong, reads, from_memory = threading.Event(), [], 0, 0

    def read() -> None:
        nonlocal reads, from_memory
        while not done.is_set():
            for model in range(3):
                path = tmp_path / "paths" / f"m{model}"
                from_memory += os.path.realpath(path / "model.safetensors").startswith(str(memory))
                try:
                    found = value_of(path)
                except Exception as exc:  # noqa: BLE001 - whatever it is, a reader must never see it
                    wrong.append(repr(exc))
                else:
                    wrong.extend([] if found == (model, model) else [f"m{model}: {found}"])
                reads += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for round_ in range(30):
            assert opens(node, f"m{round_ % 3}")
        eventually(lambda: reads > 100 and from_memory > 10)
    finally:
        done.set()
        reader.join()
        node.agent.close()
    assert wrong == []
    assert [value_of(tmp_path / "paths" / f"m{model}") for model in range(3)] == [(m, m) for m in range(3)], "also when the agent is gone"


def test_an_open_has_the_path_of_its_version_and_the_command_prints_the_one_that_lasts(tmp_path: Path, memory: Path) -> None:
    node = Node(tmp_path, host_dir=memory, paths_dir=tmp_path / "paths")
    try:
        with prefetcher.open("m1", socket_path=node.socket) as opened:
            assert value_of(Path(opened.path)) == (1.0, 1.0)
            assert Path(opened.path).parts[-3:] == (".versions", "m1", opened.version)
            assert os.path.realpath(Path(opened.path) / "model.safetensors").startswith(str(memory))
        done = CliRunner().invoke(cli.app, ["path", "m1", "--socket", str(node.socket)])
        assert (done.exit_code, done.output) == (0, f"{tmp_path / 'paths' / 'm1'}\n")
    finally:
        node.agent.close()


def test_without_a_folder_of_paths_the_command_says_what_to_do(tmp_path: Path) -> None:
    node = Node(tmp_path)
    try:
        with prefetcher.open("m1", socket_path=node.socket) as opened:
            assert opened.path == ""
        done = subprocess.run(
            [sys.executable, "-m", "prefetcher", "path", "m1", "--socket", str(node.socket)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2
        assert "--paths-dir" in done.stderr
    finally:
        node.agent.close()


def test_paths_lead_to_whole_files_after_the_agent_was_killed_and_when_the_next_one_adopts_them(tmp_path: Path, memory: Path) -> None:
    for model in range(3):
        (tmp_path / "models" / f"m{model}").mkdir(parents=True)
        save_file({"w": np.full(250_000, model, np.float32)}, tmp_path / "models" / f"m{model}" / "model.safetensors")
    write_manifests(tmp_path / "models")
    killed = subprocess.Popen([sys.executable, "-c", AGENT, str(tmp_path), str(memory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"up\n"
        with prefetcher.open("m1", socket_path=tmp_path / "agent.sock") as opened:
            assert opened.source == "host"
    finally:
        killed.kill()
        killed.communicate()
    everywhere = [tmp_path / "paths" / f"m{model}" for model in range(3)]
    assert [value_of(path) for path in everywhere] == [(m, m) for m in range(3)]
    node = Node(tmp_path, manifests=False, host_dir=memory, paths_dir=tmp_path / "paths")
    try:
        assert os.path.realpath(everywhere[1] / "model.safetensors").startswith(str(memory))
        assert [value_of(path) for path in everywhere] == [(m, m) for m in range(3)]
    finally:
        node.agent.close()


def test_paths_need_host_memory_with_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostfolder, "_fits", lambda path, budget_bytes: False)
    with pytest.raises(UsageError, match=r"--host-dir"):
        HostArena(1_000_000, with_path=True)
    HostArena(1_000_000).close()

"""Bad weights and places, from the command line as a person meets them: one line that says what to do, an exit code, nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from weights_kit import MAY_BE_ANYBODY

import prefetcher
from prefetcher.agent.headers import parse_header
from prefetcher.agent.manifest import MANIFEST_NAME, scan_models_folder, write_manifests
from prefetcher.api.client import get
from prefetcher.bench.load import _cached_pages, _make_cold
from prefetcher.errors import IntegrityError, ManifestError, ModelNotFoundError, PrefetcherError, UnsafeFormatError

COMMAND = [sys.executable, "-m", "prefetcher"]
Change = Callable[[Path], object]


def cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, env=os.environ | environment)


def make(folder: Path, value: int = 1) -> Path:
    folder.mkdir(parents=True)
    save_file({"w": np.full(100_000, value, np.float32), "b": np.arange(4)}, folder / "w.safetensors")
    return folder


def header(change: Callable[[dict[str, Any]], object]) -> Change:
    """Rewrites a file's header, as a file that lies has it."""

    def lie(model: Path) -> None:
        raw = (model / "w.safetensors").read_bytes()
        length = int.from_bytes(raw[:8], "little")
        entries = json.loads(raw[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode()
        (model / "w.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return lie


def replaced(name: str, content: bytes) -> Change:
    def replace(model: Path) -> None:
        (model / "w.safetensors").unlink()
        (model / name).write_bytes(content)

    return replace


def outside(model: Path) -> None:
    other = make(model.parent.parent / "elsewhere")
    (model / "x.safetensors").symlink_to(other / "w.safetensors")


CASES: dict[str, tuple[Change, str, str]] = {
    "truncated": (lambda m: os.truncate(m / "w.safetensors", 100_000), "truncated", "fetch it again"),
    "truncated in its header": (lambda m: os.truncate(m / "w.safetensors", 30), "truncated", "fetch it again"),
    "empty": (replaced("w.safetensors", b""), "empty", "fetch it again"),
    "shape lies": (header(lambda h: h["w"].update(shape=[1 << 40])), "'w'", "fetch it again"),
    "offsets overlap": (header(lambda h: h["b"].update(data_offsets=h["b"]["data_offsets"][:1] * 2, shape=[0])), "'w'", "fetch it again"),
    "unknown dtype": (header(lambda h: h["w"].update(dtype="F33" * 1000)), "unknown dtype", "fetch it again"),
    "header too long": (replaced("w.safetensors", struct.pack("<Q", 1 << 40) + b"{}"), "not safetensors", "fetch it again"),
    "bin": (replaced("pytorch_model.bin", b"PK\x03\x04"), "pickled weights", "convert it with safetensors"),
    "pt": (replaced("model.pt", b"\x80\x04"), "pickled weights", "convert it with safetensors"),
    "pickle by another name": (replaced("w.safetensors", b"\x80\x04\x95" + b"\x11" * 40), "pickle", "convert it with safetensors"),
    "a link out": (outside, "link out of its folder", "copy the file into"),
    "twice the same tensor": (lambda m: shutil.copy(m / "w.safetensors", m / "x.safetensors"), "in w.safetensors and in", "keep one"),
    "a pipe": (lambda m: os.mkfifo(m / "x.safetensors"), "not a regular file", ""),
    "a name with a newline": (lambda m: (m / "w.safetensors").rename(m / "w\n.safetensors"), "cannot be printed", "rename it"),
    "a name that is no text": (
        lambda m: os.rename(os.fsencode(m / "w.safetensors"), os.fsencode(m) + b"/\xff.safetensors"),
        "",
        "rename it",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_model_gets_no_manifest_and_the_others_do(case: str, tmp_path: Path) -> None:
    spoil, found, advice = CASES[case]
    models = tmp_path / "models"
    for name in ("bad", "good"):
        make(models / name)
    spoil(models / "bad")
    before = sorted(os.fsencode(p) for p in models.rglob("*"))
    done = cli("manifest", str(models))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")
    assert found in done.stderr
    assert advice in done.stderr
    assert str(models / "bad") in done.stderr or "'bad'" in done.stderr
    assert len(done.stderr) < 600
    after = sorted(os.fsencode(p) for p in models.rglob("*"))
    assert set(after) - set(before) == {os.fsencode(models / "good" / MANIFEST_NAME)}


def test_every_bad_model_is_named_and_a_summary_ends_it(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name in ("a", "b", "good", "z"):
        make(models / name)
    os.truncate(models / "a" / "w.safetensors", 100_000)
    replaced("model.pt", b"\x80\x04")(models / "b")
    (models / "z" / "w.safetensors").write_bytes(b"")
    done = cli("manifest", str(models))
    assert done.returncode == 1
    assert [line.split(":")[:2] for line in done.stderr.splitlines()] == [
        ["error", f" {models / name}"] for name in ("a/w.safetensors", "b/model.pt", "z/w.safetensors")
    ]
    first, last = done.stdout.splitlines()
    assert first.startswith("good  version ")
    assert last == "3 of 4 models refused, see above; the others have their manifests"


def test_a_folder_of_pickled_weights_alone_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "pk").mkdir()
    (tmp_path / "pk" / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    done = cli("manifest", str(tmp_path / "pk"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "pytorch_model.bin: pickled weights; convert it with safetensors" in done.stderr
    (tmp_path / "pk" / "pytorch_model.bin").unlink()
    assert "holds no model" in cli("manifest", str(tmp_path / "pk")).stderr


def test_what_may_not_be_read_or_written_is_said_and_keeps_its_old_manifest(tmp_path: Path) -> None:
    make(tmp_path / "models" / "m")
    (old,) = write_manifests(tmp_path / "models")
    make(tmp_path / "new", 2)
    (tmp_path / "new" / "w.safetensors").rename(tmp_path / "models" / "m" / "w.safetensors")
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from prefetcher.agent.manifest import write_manifests\n"
        "from prefetcher.errors import PrefetcherError\n"
        "if sys.argv[2] == 'True':\n    os.setgid(65534); os.setuid(65534)\n"
        "try:\n    write_manifests(Path(sys.argv[1]))\n"
        "except PrefetcherError as exc:\n    print(exc)\n"
    )
    for folder in (tmp_path / "models", *(tmp_path / "models").parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    folder = tmp_path / "models" / "m"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for mode, advice in ((0o000, "make it readable"), (0o444, "make the folder writable")):
        (folder / "w.safetensors").chmod(mode)
        folder.chmod(0o555)
        command = [sys.executable, "-c", script, str(tmp_path / "models"), str(MAY_BE_ANYBODY)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
        folder.chmod(0o755)
        assert advice in done.stdout, done.stderr
    assert json.loads((tmp_path / "models" / "m" / MANIFEST_NAME).read_text())["version"] == old.version
    assert sorted(p.name for p in (tmp_path / "models" / "m").iterdir()) == [MANIFEST_NAME, "w.safetensors"]


def test_a_folder_that_may_not_be_read_does_not_keep_others_from_being_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "models" / "closed")
    make(tmp_path / "models" / "open")
    write_manifests(tmp_path / "models")
    exists = Path.exists

    def may_not(path: Path) -> bool:
        if path.parent.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", may_not)
    catalog = scan_models_folder(tmp_path / "models")
    assert list(catalog.models) == ["open"]
    assert "make it readable" in str(catalog.refused["closed"])


# --- `prefetcher up` beside bad models ---


def climb(model: Path) -> None:
    path = model / MANIFEST_NAME
    said = json.loads(path.read_text())
    said["files"][0]["path"] = "../../elsewhere/w.safetensors"
    path.write_text(json.dumps(said))


def flip(model: Path) -> None:
    raw = bytearray((model / "w.safetensors").read_bytes())
    raw[-1] ^= 1
    (model / "w.safetensors").write_bytes(raw)


#: Spoiled after its manifest was made: what `open` raises and says.
LATER: dict[str, tuple[Change, type[PrefetcherError], str]] = {
    "short": (lambda m: os.truncate(m / "w.safetensors", 5_000), IntegrityError, "the manifest says"),
    "gone": (lambda m: (m / "w.safetensors").unlink(), IntegrityError, "missing"),
    "climbs": (climb, ManifestError, "leads out of the folder"),
    "mangled": (lambda m: (m / MANIFEST_NAME).write_text("{"), ManifestError, "run `prefetcher manifest"),
    "unlisted": (lambda m: (m / MANIFEST_NAME).unlink(), ManifestError, "run `prefetcher manifest"),
    "flipped": (flip, IntegrityError, "differs from its manifest"),
    "pickled": (lambda m: (replaced("model.pt", b"\x80\x04")(m), (m / MANIFEST_NAME).unlink()), UnsafeFormatError, "convert it"),
}


@contextlib.contextmanager
def running(folder: Path) -> Iterator[str]:
    """`prefetcher up` with everything of its own under `folder`, whose `models` are there already."""
    # fmt: off
    options = ["--models", str(folder / "models"), "--host-bytes", "20MB", "--state-dir", str(folder / "state"), "--port", "0",
               "--socket", str(folder / "run" / "agent.sock"), "--log-format", "json", "--lock", "off"]
    # fmt: on
    environment = os.environ | {"PREFETCHER_NODE__NAME": f"{folder.name}-{os.getpid()}"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*COMMAND, "up", *options], stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "is up at" in line, (folder / "log").read_text()
        yield line.split()[-1]
        process.send_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("up")
    for number, name in enumerate((*LATER, "good")):
        make(folder / "models" / name, number)
        write_manifests(folder / "models" / name)
    for name, (spoil, _, _) in LATER.items():
        spoil(folder / "models" / name)
    with running(folder) as url:
        yield url, folder


def test_bad_bytes_are_not_read_again_after_a_restart_and_serve_once_they_are_replaced(tmp_path: Path) -> None:
    model = make(tmp_path / "models" / "m", 7)
    right = (model / "w.safetensors").read_bytes()
    write_manifests(tmp_path / "models")
    flip(model)
    file = model / "w.safetensors"
    with file.open("rb") as written:
        os.fsync(written.fileno())
    for _ in range(2):
        on_a_disk = _make_cold([file]) == 0.0
        with running(tmp_path), pytest.raises(IntegrityError, match="differs from its manifest"):
            prefetcher.open("m", socket_path=tmp_path / "run" / "agent.sock", timeout_s=20)
    events = [json.loads(line)["event"] for line in (tmp_path / "log").read_text().splitlines()]
    assert "load_failed" not in events
    if on_a_disk:
        assert _cached_pages(file)[0] == 0
    assert sorted(p.name for p in model.iterdir()) == [MANIFEST_NAME, "w.safetensors"]
    file.write_bytes(right)
    with running(tmp_path), prefetcher.open("m", socket_path=tmp_path / "run" / "agent.sock", timeout_s=20) as tensors:
        assert tensors["w"][0] == 7


@pytest.mark.parametrize("name", LATER)
def test_a_bad_model_is_never_opened_and_says_why(name: str, up: tuple[str, Path]) -> None:
    _, folder = up
    _, kind, found = LATER[name]
    with pytest.raises(kind, match=found) as caught:
        prefetcher.open(name, socket_path=folder / "run" / "agent.sock", timeout_s=20)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_an_act_on_a_bad_model_says_once_what_to_do(up: tuple[str, Path]) -> None:
    url, _ = up
    said = cli("load", "short", "--url", url).stderr
    assert said.count("\n") == 1
    assert "the manifest says" in said
    assert said.count("prefetcher manifest") == 1


def test_good_models_are_served_beside_bad_ones_and_nothing_of_those_is_in_memory(up: tuple[str, Path]) -> None:
    url, folder = up
    with pytest.raises(IntegrityError):
        prefetcher.open("flipped", socket_path=folder / "run" / "agent.sock", timeout_s=20)
    with prefetcher.open("good", socket_path=folder / "run" / "agent.sock", timeout_s=20) as tensors:
        assert tensors["w"][99_999] == len(LATER)
    never = threading.Event()
    for _ in range(100):
        if [held["model"] for held in get(url, "/v1/residency")] == ["good"]:
            break
        never.wait(0.1)
    assert [held["model"] for held in get(url, "/v1/residency")] == ["good"]


def test_a_model_that_does_not_exist(up: tuple[str, Path]) -> None:
    url, folder = up
    with pytest.raises(ModelNotFoundError, match="check the name"):
        prefetcher.open("nothing", socket_path=folder / "run" / "agent.sock", timeout_s=20)
    for act in ("load", "pin", "unpin", "evict"):
        done = cli(act, "nothing", "--url", url)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert "'nothing'" in done.stderr


def test_a_second_agent_at_the_same_socket_is_refused_and_the_first_goes_on(up: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = up
    socket = folder / "run" / "agent.sock"
    options = ["--models", str(folder / "models"), "--host-bytes", "20MB", "--port", "0", "--state-dir", str(tmp_path / "state")]
    done = cli(
        "up", *options, "--socket", str(socket), "--lock", "off", "--log-format", "json", PREFETCHER_NODE__NAME=f"second-{os.getpid()}"
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2, done.stderr
    assert len(errors) == 1
    assert "--socket" in errors[0]
    prefetcher.open("good", socket_path=socket, timeout_s=20).close()


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--host-bytes", "900TB"], "--host-bytes"),
        (["--host-dir", "models"], "not in memory"),
        (["--socket", "/proc/nothing/agent.sock"], "--socket"),
    ],
)
def test_places_that_cannot_be_are_refused_before_anything_is_made(options: list[str], hint: str, tmp_path: Path) -> None:
    make(tmp_path / "models" / "m")
    write_manifests(tmp_path / "models")
    common = ["--models", str(tmp_path / "models"), "--host-bytes", "20MB", "--port", "0", "--state-dir", str(tmp_path / "state")]
    socket = ["--socket", str(tmp_path / "run" / "a.sock")]
    environment = os.environ | {"PREFETCHER_NODE__NAME": f"refused-{os.getpid()}", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*COMMAND, "up", *common, *socket, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=tmp_path)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2, done.stderr
    assert len(errors) == 1
    assert hint in errors[0]
    assert not (tmp_path / "run" / "a.sock").exists()
    assert not list(Path("/dev/shm").glob(f"*refused-{os.getpid()}*"))
    assert sorted(p.name for p in (tmp_path / "models" / "m").iterdir()) == [MANIFEST_NAME, "w.safetensors"]


def test_a_message_never_repeats_all_that_a_header_says() -> None:
    name = "n" * 100_000
    text = json.dumps({name: {"dtype": "F32", "shape": [1] * 50_000, "data_offsets": [0, 8]}}).encode()
    with pytest.raises(UnsafeFormatError) as caught:
        parse_header(struct.pack("<Q", len(text)) + text, len(text) + 16, what="x")
    assert len(str(caught.value)) < 400

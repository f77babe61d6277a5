"""`prefetcher doctor`: real limits, disks, brokers and state servers, good ones and bad ones; it changes nothing."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from broker_kit import Broker
from safetensors.numpy import save_file
from up_kit import COMMAND

import prefetcher
from prefetcher.agent.manifest import write_manifests
from prefetcher.config import KafkaSettings, NodeSettings, Settings, StateSettings
from prefetcher.doctor import files, memory, runtime, servers
from prefetcher.doctor.checks import CHECKS
from prefetcher.doctor.finding import Finding
from prefetcher.ingest.tables import connect
from prefetcher_connectors.kafka import KafkaOptions, KafkaStreams
from prefetcher_connectors.redis import EmbeddedServer

PAGE = (Path(prefetcher.__file__).parent / "docs" / "doctor.md").read_text()


def doctor(*arguments: str, under: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PREFETCHER_")}
    command = [*under, *COMMAND, "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=own | environment)


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return {found["check"]: found for found in json.loads(done.stdout)["checks"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "m0").mkdir()
    save_file({"w": np.zeros(10_000_000, np.float32)}, folder / "m0" / "w.safetensors")
    write_manifests(folder)
    return folder


def node(**values: Any) -> Settings:
    return Settings.model_construct(node=NodeSettings(**values), state=StateSettings(), kafka=KafkaSettings())


# --- the command ---


def test_a_machine_that_is_ready(models: Path, tmp_path: Path) -> None:
    state = tmp_path / "none" / "yet"
    settings = {"PREFETCHER_NODE__MODELS_DIR": str(models), "PREFETCHER_NODE__HOST_BYTES": "100MB", "PREFETCHER_STATE__DIR": str(state)}
    done = doctor("--json", **settings)
    told = json.loads(done.stdout)
    assert (done.returncode, told["ok"], done.stderr) == (0, True, "")
    found = findings(done)
    assert list(found) == list(CHECKS)
    assert all(bool(one["todo"]) == (one["level"] != "ok") for one in found.values())
    assert found["settings"]["found"].startswith("3 set")
    assert found["models"]["found"].startswith("1 models with 40.0 MB in ")
    assert "B/s (" in found["disk"]["found"] or "page cache" in found["disk"]["found"]
    assert not state.parent.exists()


def test_what_fails_is_said_with_what_to_do_and_by_the_exit_code(tmp_path: Path) -> None:
    done = doctor(PREFETCHER_NODE__HOST_BYTES="900TB", PREFETCHER_STATE__DIR="/dev/null/x", PREFETCHER_API__PROT="1")
    assert done.returncode == 1
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith("fail  settings ")
    assert "did you mean PREFETCHER_API__PORT?" in lines[0]
    assert lines[-1].endswith(" 1 failed"), "the others went by the defaults"
    again = findings(doctor("--json", PREFETCHER_NODE__HOST_BYTES="900TB", PREFETCHER_STATE__DIR="/dev/null/x"))
    assert {name for name, found in again.items() if found["level"] == "fail"} >= {"memory", "state folder"}
    assert "PREFETCHER_NODE__HOST_BYTES" in again["memory"]["todo"]


def test_colours_only_in_a_terminal() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", closefd=True) as screen:
        environment = {"PATH": os.environ["PATH"], "TERM": "xterm-256color", "HOME": os.environ.get("HOME", "/")}
        process = subprocess.Popen([*COMMAND, "doctor"], stdout=theirs, env=environment)
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = screen.read1(65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
        assert process.wait(60) == 0
    assert b"\x1b[32mok" in shown
    assert b"\x1b" not in doctor().stdout.encode()


@pytest.mark.skipif(not (shutil.which("prlimit") and shutil.which("setpriv")), reason="util-linux: prlimit and setpriv")
def test_limits_are_those_of_the_process(models: Path) -> None:
    drops = ("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock") if os.getuid() == 0 else ()
    under = ("prlimit", "--memlock=8388608:8388608", "--nofile=256:256", *drops)
    settings = {"PREFETCHER_NODE__MODELS_DIR": str(models), "PREFETCHER_NODE__HOST_BYTES": "100MB"}
    found = findings(doctor("--json", under=under, **settings))
    assert (found["memory lock"]["level"], found["open files"]["level"]) == ("warn", "warn")
    assert "8.4 MB" in found["memory lock"]["found"]
    assert "ulimit -l" in found["memory lock"]["todo"]
    assert "above 1,025" in found["open files"]["todo"]
    required = doctor("--json", under=under, PREFETCHER_NODE__LOCK="require", **settings)
    assert (required.returncode, findings(required)["memory lock"]["level"]) == (1, "fail")


def test_every_check_is_in_the_reference() -> None:
    for name in CHECKS:
        assert f"| `{name}` | " in PAGE


# --- memory and files ---


def test_a_host_folder_that_is_too_small(tmp_path: Path) -> None:
    room = os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize
    found = memory.check_place(node(host_dir=Path("/dev/shm/none/yet"), host_bytes=room + 1))
    assert (found.level, "remount" in found.todo) == ("fail", True)
    assert memory.check_place(node(host_dir=Path("/dev/shm/none/yet"), host_bytes=room // 2)).level == "ok"
    assert not Path("/dev/shm/none").exists()


def test_models_that_are_none(models: Path, tmp_path: Path) -> None:
    assert files.check_models(node(models_dir=tmp_path / "none")).level == "warn"
    assert "prefetcher manifest" in files.check_models(node(models_dir=tmp_path)).todo
    (tmp_path / "raw").mkdir()
    shutil.copy(models / "m0" / "w.safetensors", tmp_path / "raw")
    found = files.check_models(node(models_dir=tmp_path))
    assert (found.level, "1 refused, as raw" in found.found) == ("warn", True)
    large = files.check_models(node(models_dir=models, host_bytes=1_000_000))
    assert "m0 alone has 40.0 MB" in large.found


def test_a_disk_that_has_nothing_large_enough(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    save_file({"w": np.zeros(10, np.float32)}, tmp_path / "m" / "w.safetensors")
    assert files.check_disk(node(models_dir=tmp_path)) == Finding("ok", "no file is large enough to measure by")


@pytest.mark.parametrize(
    ("told", "are_there", "has_torch", "level", "words"),
    [
        ({"code": 0, "version": 12040, "devices": [["NVIDIA H200", 150_000_000_000]]}, True, True, "ok", "H200 with 150.0 GB; CUDA 12.4"),
        ({"code": 0, "version": 12040, "devices": [["NVIDIA H200", 150_000_000_000]]}, True, False, "warn", "torch is not installed"),
        ({"code": 999, "version": 0, "devices": []}, True, True, "warn", "error 999"),
        ({"code": 100, "version": 0, "devices": []}, False, True, "ok", "no GPU"),
        ("libcuda.so.1 can't be loaded", True, True, "warn", "no driver"),
        ("libcuda.so.1 can't be loaded", False, True, "ok", "no GPU"),
    ],
)
def test_what_a_driver_tells(told: Any, are_there: bool, has_torch: bool, level: str, words: str) -> None:
    found = runtime.of_driver(told, are_there, has_torch)
    assert (found.level, words in found.found) == (level, True)


# --- servers ---


@pytest.fixture(scope="module")
def state_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedServer(tmp_path_factory.mktemp("state"))
    server.start()
    yield server.url
    server.stop()


def of_state(url: str) -> Finding:
    return servers.check_state_server(Settings.model_construct(state=StateSettings(url=url)))


def test_a_state_server_that_keeps_what_it_is_given_and_one_that_does_not(state_url: str) -> None:
    assert of_state(state_url).level == "ok"
    with connect(state_url) as client:
        client.set("what takes most of four megabytes", b"0" * 3_000_000)
        for setting, value, level, words in (
            ("maxmemory", "300mb", "ok", "of 315 MB"),
            ("maxmemory-policy", "volatile-lru", "warn", "leases"),
            ("maxmemory-policy", "allkeys-lru", "fail", "learned"),
            ("maxmemory-policy", "noeviction", "ok", ""),
            ("maxmemory", "4mb", "warn", "nearly full"),
            ("maxmemory", "0", "ok", ""),
            ("appendonly", "no", "warn", "keeps nothing"),
        ):
            client.config_set(setting, value)
            found = of_state(state_url)
            assert (found.level, words in found.found) == (level, True), (setting, value, found)


@pytest.mark.parametrize(
    ("told", "level", "words"),
    [
        ({"redis_version": "6.2.14", "aof_enabled": 1}, "fail", "Redis 6.2.14"),
        ({"redis_version": "7.2.4", "valkey_version": "9.0.1", "aof_enabled": 1}, "ok", "Valkey 9.0.1"),
        ({"redis_version": "8.2.0", "aof_enabled": 1}, "ok", "Redis 8.2.0"),
    ],
)
def test_versions(told: dict[str, Any], level: str, words: str) -> None:
    found = servers.of_server("redis://h", told)
    assert (found.level, words in found.found) == (level, True)


def test_clocks(state_url: str) -> None:
    assert servers.check_clock(Settings.model_construct(state=StateSettings(url=state_url))).level == "ok"
    assert [servers.of_skew(skew_s, 0.2).level for skew_s in (0.0, 1.05, -1.2, 59.0, -90.0)] == ["ok", "ok", "warn", "warn", "fail"]
    assert servers.of_skew(5.0, 0.0).found.startswith("5.00 s behind ")


def test_servers_that_are_away_show_no_password() -> None:
    settings = {"PREFETCHER_STATE__URL": "redis://:s3cret@127.0.0.1:1/0", "PREFETCHER_KAFKA__BROKERS": "127.0.0.1:1"}
    done = doctor("--json", **settings)
    found = findings(done)
    assert done.returncode == 1
    assert {name for name, one in found.items() if one["level"] == "fail"} == {"broker", "state server", "clock"}
    assert "s3cret" not in done.stdout


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_topics_are_looked_at_and_not_made(broker: Broker) -> None:
    kafka = KafkaSettings(brokers=broker.address, prefix=f"t{uuid.uuid4().hex[:12]}", partitions=2)
    settings = Settings.model_construct(kafka=kafka)
    for _ in range(2):
        found = servers.check_broker(settings)
        assert (found.level, f"topic {kafka.prefix}.requests and 3 more is missing" in found.found) == ("warn", True)
        assert "--create" in found.todo
    streams = KafkaStreams(KafkaOptions(broker.address, kafka.prefix, partitions=2))
    streams.prepare()
    assert servers.check_broker(settings).level == "ok"
    more = Settings.model_construct(kafka=kafka.model_copy(update={"partitions": 5}))
    assert "has 2 partitions, 5 are set" in servers.check_broker(more).found
    frail = Settings.model_construct(kafka=kafka.model_copy(update={"replicas": 3}))
    assert "has 1 replicas, 3 are set" in servers.check_broker(frail).found
    streams.close()

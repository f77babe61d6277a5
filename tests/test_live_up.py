"""`prefetcher up` from the outside: processes, signals, sockets, and real safetensors files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import REAL
from safetensors.numpy import load_file, save_file
from waiting import eventually

import prefetcher
from prefetcher.api.client import get, post
from prefetcher.clock import SystemClock
from prefetcher.errors import PrefetcherError, UnavailableError

COMMAND = [sys.executable, "-m", "prefetcher"]


@dataclass
class Running:
    """One `prefetcher up` with everything of its own under `folder`."""

    folder: Path
    models: Path
    options: tuple[str, ...] = ()
    process: subprocess.Popen[str] | None = None
    url: str = ""
    lines: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def socket_path(self) -> Path:
        return self.folder / "run" / "agent.sock"

    def start(self) -> Running:
        with contextlib.ExitStack() as stack:
            log = stack.enter_context((self.folder / "log").open("a"))
            command, own = [*COMMAND, "up", *self.arguments()], os.environ | self.environment
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=self.folder, env=own)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "is up at" in line, (self.folder / "log").read_text()
        self.url = line.split()[-1]
        return self

    def arguments(self) -> list[str]:
        # fmt: off
        own = ["--models", str(self.models), "--host-bytes", "20MB", "--state-dir", str(self.folder / "state"),
               "--socket", str(self.socket_path), "--host-dir", str(self.host_dir), "--port", "0", "--tick-s", "0.3",
               "--snapshot-s", "0.5", "--control-ratio", "0", "--log-format", "json"]
        # fmt: on
        return [*own, *self.options]

    @property
    def host_dir(self) -> Path:
        return Path("/dev/shm") / f"prefetcher-test-{os.getpid()}-{self.folder.name}"

    def end(self, number: int = signal.SIGTERM) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(number)
        assert process.stdout is not None
        process.stdout.close()
        return process.wait(20)

    def post_requests(self, records: Any) -> tuple[int, dict[str, Any]]:
        return self.send("/v1/requests", json.dumps(records).encode())

    def send(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(self.url + path, data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, json.load(exc)

    def wait_until_learned(self) -> None:
        """Returns when every row that the request log has by now was learned from: a plan that began later has seen them."""
        plans = self.metric("prefetcher_plans_total")
        eventually(lambda: self.metric("prefetcher_plans_total") >= plans + 2)
        # The controller looks at the stream within a twentieth of a second.
        threading.Event().wait(0.3)
        eventually(lambda: self.metric("prefetcher_stream_lag_bytes") == 0)

    def counted(self, rows: int) -> bool:
        """Whether the node has met so many rows; what is asked of it by hand from now on comes after them."""
        return bool(get(self.url, "/v1/report").get("rows") == rows)

    def held(self, model: str) -> dict[str, Any] | None:
        """The model's weights in memory, or on their way there."""
        found = get(self.url, "/v1/status")["node"]["held"]
        return next((held for held in found if held["model"] == model), None)

    def rows_restored(self) -> int:
        """Rows that the controller found in the snapshot that it read last; 0 when there was none."""
        return next((e["rows"] for e in reversed(self.events()) if e["event"] == "learned_restored"), 0)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "log").read_text().splitlines() if line.startswith("{")]


def cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, env=os.environ | environment)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for i in range(4):
        (folder / f"m{i}").mkdir()
        rng = np.random.default_rng(i)
        tensors = {"w": rng.random((500, 500)).astype(np.float32), "b": rng.integers(0, 9, 7)}
        save_file(tensors, folder / f"m{i}" / "model.safetensors")
    (folder / "big").mkdir()
    save_file({"w": np.arange(6_000_000, dtype=np.float32)}, folder / "big" / "model.safetensors")
    done = cli("manifest", str(folder))
    assert done.returncode == 0, done.stderr
    # The first rows that this installation ever meets compile its kernels, for all that come after. It is started as ever.
    first = Running(tmp_path_factory.mktemp("first"), folder, environment={REAL: "real"}).start()
    try:
        first.post_requests([{"model": "m0"}, {"model": "m1"}])
        eventually(lambda: first.counted(2), timeout_s=280.0)
        first.wait_until_learned()
    finally:
        first.end()
        shutil.rmtree(first.host_dir, ignore_errors=True)
    return folder


@pytest.fixture
def make(tmp_path: Path, models: Path) -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def start(*options: str) -> Running:
        made.append(Running(tmp_path, models, options))
        return made[-1].start()

    yield start
    for running in made:
        running.end(signal.SIGKILL)
        shutil.rmtree(running.host_dir, ignore_errors=True)


def test_a_lease_is_the_file_bit_for_bit_and_keeps_it(make: Callable[..., Running], models: Path) -> None:
    up = make()
    with prefetcher.open("m1", socket_path=up.socket_path) as opened:
        assert opened.source == "host"
        expected = load_file(models / "m1" / "model.safetensors")
        assert set(opened) == set(expected)
        for name, array in expected.items():
            assert opened[name].dtype == array.dtype
            np.testing.assert_array_equal(opened[name], array)
        refused = cli("evict", "m1", "--url", up.url)
        assert refused.returncode == 1
        assert refused.stderr.startswith("error: evict m1: ")
        assert up.held("m1") is not None
    eventually(lambda: cli("evict", "m1", "--url", up.url).returncode == 0)
    # The copy that was loaded on demand is gone; the open is learned from, so a prefetch may bring another.
    eventually(lambda: (up.held("m1") or {"cause": "forecast"})["cause"] == "forecast")


def test_a_model_larger_than_the_budget_is_served_from_disk_and_says_so(make: Callable[..., Running]) -> None:
    up = make()
    with prefetcher.open("big", socket_path=up.socket_path) as opened:
        assert opened.source == "disk"
        assert opened["w"][5_999_999] == 5_999_999
    assert up.held("big") is None
    assert any(event["event"] == "bypassed" for event in up.events())


def test_requests_become_prefetches_and_unused_ones_leave_after_their_hold(make: Callable[..., Running]) -> None:
    up = make("--hold-s", "2")
    for _ in range(5):
        assert up.post_requests([{"model": "m0"}, {"model": "nobody-has-this"}]) == (202, {"accepted": 2})
    # A row that came after the eviction would load the model on demand, to stay.
    eventually(lambda: up.counted(5))
    eventually(lambda: (up.held("m0") or {}).get("state") == "ready")
    assert cli("evict", "m0", "--url", up.url).returncode == 0
    order = eventually(lambda: [o for o in get(up.url, "/v1/orders") if o["model"] == "m0" and o["cause"] == "forecast"])
    assert order[0]["contributions"]
    assert order[0]["arm"] == "treated"
    ended = eventually(lambda: [o for o in get(up.url, "/v1/orders") if o.get("reason") == "hold"])
    assert ended[0]["outcome"] == "useless"
    assert ended[0]["end_s"] - ended[0]["ready_s"] >= 2.0
    eventually(lambda: get(up.url, "/v1/report")["wasted_byte_seconds"] > 0)
    assert up.metric("prefetcher_outcomes_total") >= 1


def test_observing_decides_and_loads_nothing(make: Callable[..., Running]) -> None:
    up = make("--observe")
    up.post_requests([{"model": "m0"}] * 5)
    eventually(lambda: [e for e in up.events() if e["event"] == "prefetch_ordered" and e["model"] == "m0"])
    with prefetcher.open("m0", socket_path=up.socket_path) as opened:
        assert opened.source == "disk"
    pinned = cli("pin", "m1", "--url", up.url)
    assert (pinned.returncode, pinned.stdout.split(": ")[1]) == (0, "pinned and not loaded")
    refused = cli("evict", "m2", "--url", up.url)
    assert refused.returncode == 1
    assert "only observes" in refused.stderr
    up.end(signal.SIGKILL)
    up.start()
    shown = cli("status", "--once", "--url", up.url, COLUMNS="200").stdout
    assert "pinned, not loaded: this node only observes" in shown
    assert get(up.url, "/v1/residency") == []
    assert not [e for e in up.events() if e["event"] == "load_started"]


def test_off_is_demand_loading_only_and_on_is_back(make: Callable[..., Running]) -> None:
    up = make()
    assert cli("off", "--url", up.url).returncode == 0
    up.post_requests([{"model": "m0"}] * 5)
    eventually(lambda: up.counted(5))
    eventually(lambda: (up.held("m0") or {}).get("state") == "ready")
    assert cli("evict", "m0", "--url", up.url).returncode == 0
    plans = up.metric("prefetcher_plans_total")
    eventually(lambda: up.metric("prefetcher_plans_total") >= plans + 3)
    assert up.held("m0") is None
    assert cli("on", "--url", up.url).returncode == 0
    eventually(lambda: (up.held("m0") or {}).get("cause") == "forecast")


def test_pins_hold_and_unknown_models_are_refused(make: Callable[..., Running]) -> None:
    up = make()
    assert cli("pin", "m2", "--url", up.url).returncode == 0
    eventually(lambda: (up.held("m2") or {}).get("state") == "ready")
    assert cli("evict", "m2", "--url", up.url).returncode == 1
    up.end(signal.SIGKILL)
    up.start()
    eventually(lambda: (up.held("m2") or {}).get("state") == "ready")
    assert eventually(lambda: up.held("m2"))["pinned"]
    assert cli("unpin", "m2", "--url", up.url).returncode == 0
    eventually(lambda: not (up.held("m2") or {}).get("pinned"))
    for act in ("pin", "load", "evict"):
        refused = cli(act, "nobody", "--url", up.url)
        assert refused.returncode == 1
        assert refused.stderr.count("\n") == 1
        assert "nobody" in refused.stderr
    with pytest.raises(PrefetcherError, match="nobody"):
        prefetcher.open("nobody", socket_path=up.socket_path)


def test_status_shows_what_is_resident(make: Callable[..., Running]) -> None:
    up = make()
    post(up.url, "/v1/models/m3:load")
    eventually(lambda: (up.held("m3") or {}).get("state") == "ready")
    shown = cli("status", "--once", "--url", up.url, COLUMNS="200")
    assert shown.returncode == 0
    assert "m3" in shown.stdout
    assert "manual" in shown.stdout
    assert all(f" {model} " in shown.stdout for model in ("m0", "m1", "m2", "big"))
    assert "it is larger than --host-bytes" in shown.stdout
    machine = cli("status", "--json", "--url", up.url)
    assert json.loads(machine.stdout)["node"]["memory"]["budget_bytes"] == 20_000_000


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly(make: Callable[..., Running], number: int) -> None:
    up = make()
    with prefetcher.open("m0", socket_path=up.socket_path):
        pass
    assert list(up.host_dir.glob("*/*"))
    process = up.process
    assert process is not None
    process.send_signal(number)
    assert process.communicate(timeout=20)[0] == f"stopped; what was learned is in {up.folder / 'state'}\n"
    assert process.returncode == 0
    assert not up.socket_path.exists()
    assert not list(up.host_dir.glob("*/*"))
    assert not list((up.folder / "state" / "state").glob("*.sock"))
    assert not [e for e in up.events() if e["level"] in ("error", "critical")]
    assert "Traceback" not in (up.folder / "log").read_text()


def test_killed_it_keeps_what_it_learned_and_leaves_no_stray_memory(make: Callable[..., Running]) -> None:
    up = make()
    sent = 0
    for i in range(30):
        assert up.post_requests([{"model": f"m{j % 4}", "request_id": f"{i}-{j}"} for j in range(7)])[0] == 202
        sent += 7
    eventually(lambda: (up.held("m0") or {}).get("state") == "ready")
    eventually(lambda: up.metric("prefetcher_snapshots_total") >= 1)
    up.post_requests([{"model": "m0", "request_id": "last"}, {"model": "m0", "request_id": "last"}])
    up.end(signal.SIGKILL)
    up.start()
    eventually(lambda: 0 < up.rows_restored() <= sent + 1)
    adopted = eventually(lambda: up.held("m0"))
    assert adopted["state"] == "ready"
    eventually(lambda: up.metric("prefetcher_stream_lag_bytes") == 0)
    assert up.end() == 0
    up.start()
    eventually(lambda: up.rows_restored() == sent + 1)
    up.end()
    assert not list(up.host_dir.glob("*/*"))


def test_killed_its_totals_go_on_and_rows_that_are_read_again_count_once(make: Callable[..., Running]) -> None:
    up = make("--snapshot-s", "600")
    rows = [{"model": "m0"}, {"model": "m1"}, {"model": "m0"}, {"model": "nobody-has-this"}, {"model": "m1", "request_id": "r"}]
    assert up.post_requests(rows)[0] == 202
    eventually(lambda: up.counted(4))
    for model in ("m0", "m2"):
        with prefetcher.open(model, socket_path=up.socket_path):
            pass
    before = eventually(lambda: (totals := get(up.url, "/v1/report"))["opens"] == 2 and totals)
    assert before["rows"] == 5, "the open of m0 was announced by its row, that of m2 by none"
    up.end(signal.SIGKILL)
    up.start()
    # The controller saved nothing, so it reads all rows anew, in order, and the new one after them.
    assert up.post_requests([{"model": "m3"}])[0] == 202
    eventually(lambda: up.counted(6))
    after = get(up.url, "/v1/report")
    assert (after["opens"], after["dropped"]) == (2, 0)
    for grown in ("cold_starts", "cold_seconds", "moved_bytes", "held_byte_seconds"):
        assert after[grown] >= before[grown] > 0


def test_following_a_file_across_rotation(make: Callable[..., Running], tmp_path: Path) -> None:
    path = tmp_path / "gateway.jsonl"
    now_s = int(SystemClock().now_s()) - 3600
    path.write_text("".join(f'{{"startTime": {now_s + i}, "request": {{"model": "m1"}}}}\n' for i in range(50)) + "nonsense\n")
    up = make("--follow", str(path), "--map", "ts=startTime,model=request.model")
    eventually(lambda: up.metric("prefetcher_requests_total") == 50)
    path.rename(tmp_path / "gateway.jsonl.1")
    path.write_text(f'{{"startTime": {now_s + 60}, "request": {{"model": "m2"}}}}\n')
    eventually(lambda: up.metric("prefetcher_requests_total") == 51)
    assert up.metric("prefetcher_bad_requests_total") == 1
    bad = [e for e in up.events() if e["event"] == "line_skipped"]
    assert bad[0]["line"] == 51
    up.end(signal.SIGKILL)
    with path.open("a") as file:
        file.write(f'{{"startTime": {now_s + 61}, "request": {{"model": "m2"}}}}\n')
    up.start()
    eventually(lambda: up.metric("prefetcher_requests_total") == 1)
    up.wait_until_learned()
    assert up.end() == 0
    up.start()
    eventually(lambda: up.rows_restored() == 52)


def test_a_followed_log_that_is_not_there_and_one_that_can_not_be_read(make: Callable[..., Running], tmp_path: Path) -> None:
    path = tmp_path / "gateway.jsonl"
    up = make("--follow", str(path))
    eventually(lambda: any("is not there yet" in problem for problem in get(up.url, "/v1/status")["problems"]))
    eventually(lambda: get(up.url, "/readyz"))
    assert [e for e in up.events() if e["event"] == "follow_waits"]
    path.write_text('{"when": 1, "what": "m0"}\n' * 3)
    eventually(lambda: any("its columns are when, what" in problem for problem in get(up.url, "/v1/status")["problems"]))
    with pytest.raises(UnavailableError, match="--map"):
        get(up.url, "/readyz")
    assert get(up.url, "/healthz")["status"] == "ok", "starting it again would not help"
    with path.open("a") as file:
        file.write(f'{{"ts": {int(SystemClock().now_s())}, "model": "m0"}}\n')
    eventually(lambda: get(up.url, "/v1/status")["problems"] == [])
    eventually(lambda: "learned from 1 request " in cli("status", "--once", "--url", up.url, COLUMNS="200").stdout)
    assert up.end() == 0
    refused = cli("up", *up.arguments(), "--follow", str(tmp_path / "log.parquet"))
    assert refused.returncode == 2
    assert "follow takes JSON lines or CSV" in refused.stderr


def test_bad_bodies(make: Callable[..., Running]) -> None:
    up = make()
    cases: list[tuple[bytes, int, str]] = [
        (b"nonsense", 400, "JSON"),
        (b"[]", 400, "empty"),
        (b'"m0"', 400, "list"),
        (b'[{"model": "m0"}, {"model": ""}]', 400, "[1].model"),
        (b'{"model": "m0", "ts": 99999999999}', 400, "ts"),
        (b'{"model": "m0", "ts": 1e999}', 400, ""),
        (b'{"model": "m0", "surprise": 1}', 400, "surprise"),
        (b'{"model": "m0", "user": "' + b"x" * 4_100_000 + b'"}', 413, "bytes"),
    ]
    for body, code, hint in cases:
        status, problem = up.send("/v1/requests", body)
        assert status == code, body[:80]
        assert problem["status"] == code
        assert hint in json.dumps(problem)
    assert up.metric("prefetcher_requests_total") == 0


def test_what_can_not_start_is_one_line_and_leaves_nothing(tmp_path: Path, models: Path) -> None:
    common = ["--models", str(models), "--state-dir", str(tmp_path / "s"), "--socket", str(tmp_path / "run" / "a.sock")]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = [
            (["--port", port], 1, port),
            (["--port", "0", "--host-bytes", "900TB"], 2, "machine"),
            (["--port", "0", "--host-bytes", "much"], 2, "8GB"),
            (["--port", "0", "--models", str(tmp_path / "none")], 2, "none"),
            (["--port", "0", "--lock", "perhaps"], 2, "lock"),
            (["--nonsense"], 2, "nonsense"),
        ]
        for options, code, hint in cases:
            done = cli("up", *common, *options)
            assert done.returncode == code, (options, done.stderr)
            errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            assert len(errors) == 1, done.stderr
            assert hint in errors[0]
            assert "Traceback" not in done.stderr
            assert not (tmp_path / "run" / "a.sock").exists()
    unknown = cli("up", *common, PREFETCHER_NODE__HOST_BYTE="1")
    assert unknown.returncode == 2
    assert "PREFETCHER_NODE__HOST_BYTES" in unknown.stderr


def test_requiring_locks_under_a_small_limit(tmp_path: Path, models: Path) -> None:
    # For root the right to lock goes with the bounding set (PR_CAPBSET_DROP, CAP_IPC_LOCK); others have only the limit.
    script = (
        "import ctypes, os, resource, sys; ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096)); os.execv(sys.argv[1], sys.argv[1:])"
    )
    options = ["up", "--models", str(models), "--state-dir", str(tmp_path / "s"), "--port", "0", "--lock", "require"]
    done = subprocess.run([sys.executable, "-c", script, *COMMAND, *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "locked memory" in done.stderr
    assert not list((tmp_path / "s").rglob("*.sock"))


def test_nobody_answers() -> None:
    done = cli("status", "--once", "--url", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: nobody answers")


def test_a_state_server_that_is_killed_is_answered_for_and_comes_back(make: Callable[..., Running]) -> None:
    up = make()
    folder = up.folder / "state" / "state"
    post(up.url, "/v1/models/m1:pin")
    post(up.url, "/v1/off")
    up.post_requests([{"model": "m0"}])
    before = eventually(lambda: (totals := get(up.url, "/v1/report")).get("rows") == 1 and totals)
    # It can't be started again while its files are not as it left them.
    listed = folder / "appendonlydir" / "appendonly.aof.manifest"
    good = listed.read_bytes()
    listed.write_bytes(b"nonsense\n")
    os.kill(int((folder / "server.pid").read_text()), signal.SIGKILL)
    eventually(lambda: [e for e in up.events() if e["event"] == "state_server_not_restarted"])
    for path in ("/v1/status", "/v1/report", "/healthz"):
        with pytest.raises(urllib.error.HTTPError) as caught, urllib.request.urlopen(up.url + path, timeout=10):
            pass
        with caught.value as answer:
            assert answer.code == 503
            assert int(answer.headers["Retry-After"]) >= 1
            assert "the embedded state server ended; it is being started again" in json.load(answer)["detail"]
    with prefetcher.open("m1", socket_path=up.socket_path) as opened:
        assert (opened.source, opened.found) == ("host", "ready")
    assert up.post_requests([{"model": "m2"}])[0] == 202
    listed.write_bytes(good)
    restarted = eventually(lambda: [e for e in up.events() if e["event"] == "state_server_restarted"])
    assert restarted[0]["reason"] == "it was ended by SIGKILL"
    status = eventually(lambda: get(up.url, "/v1/status"))
    assert not status["prefetching"]
    assert [h["model"] for h in status["node"]["held"] if h["pinned"]] == ["m1"]
    eventually(lambda: up.counted(before["rows"] + 2))
    up.end(signal.SIGKILL)
    up.start()
    assert eventually(lambda: (up.held("m1") or {}).get("pinned"))
    assert not get(up.url, "/v1/status")["prefetching"]
    assert up.end() == 0


def test_while_the_state_server_hangs_weights_are_handed_out_and_questions_are_refused(make: Callable[..., Running]) -> None:
    up = make()
    with prefetcher.open("m0", socket_path=up.socket_path):
        pass
    pid = int((up.folder / "state" / "state" / "server.pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        for path in ("/v1/status", "/healthz", "/v1/orders"):
            with pytest.raises(UnavailableError, match="does not answer"):
                get(up.url, path)
        with prefetcher.open("m0", socket_path=up.socket_path, timeout_s=20.0) as opened:
            assert opened.found == "ready"
        assert up.post_requests([{"model": "m1"}])[0] == 202
        eventually(lambda: [e for e in up.events() if e["event"] == "state_away"])
        with prefetcher.open("m0", socket_path=up.socket_path, timeout_s=20.0) as opened:
            assert opened.found == "ready"
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: get(up.url, "/v1/report")["opens"] == 3)
    eventually(lambda: (up.held("m1") or {}).get("state") == "ready")
    assert up.end() == 0

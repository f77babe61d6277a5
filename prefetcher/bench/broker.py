"""A Kafka broker for benchmarks: one that is named, one of their own from a Kafka release, or a stand-in.

`PREFETCHER_BENCH_KAFKA=host:9092` names one; else `KAFKA_HOME`, the folder of a Kafka release (with `libs/`; java on the path), is started
as a single node in a temporary folder; else `noida-db` is, which knows no members that vanish. Covers no topics.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prefetcher.clock import SystemClock
from prefetcher.errors import UnavailableError

__all__ = ["BenchBroker", "BrokerProcess", "bench_broker"]

_UP_S = 60.0


@dataclass(frozen=True, slots=True)
class BenchBroker:
    """`address`, what it is, how soon a member that vanished is missed, at least, and its process where it is a benchmark's own."""

    address: str
    kind: str
    session_s: float
    process: BrokerProcess | None = None


@contextlib.contextmanager
def bench_broker(folder: Path, *, members: bool = False) -> Iterator[BenchBroker]:
    """A broker with its data under `folder`, until the end of the block. `members`: it must notice members that vanish.

    Raises:
        UnavailableError: there is none, or it does not start.
    """
    named, home = os.environ.get("PREFETCHER_BENCH_KAFKA"), os.environ.get("KAFKA_HOME")
    java = shutil.which("java")
    stand_in = shutil.which("noida-db") or shutil.which("noida-db", path=str(Path(sys.executable).parent))
    if named:
        yield BenchBroker(named, "named", 6.0)
    elif home and java and (Path(home) / "libs").is_dir():
        port = _free_port()
        command = _apache(folder, java, Path(home), port)
        with _running(command, port, folder / "broker.log") as process:
            yield BenchBroker(f"127.0.0.1:{port}", "apache", 2.0, process)
    elif stand_in and not members:
        port = _free_port()
        options = ["--data-dir", str(folder / "data"), "--host", "127.0.0.1", "--only", "kafka", "--kafka-port", str(port)]
        with _running([stand_in, "start", *options], port, folder / "broker.log"):
            yield BenchBroker(f"127.0.0.1:{port}", "stand-in", 6.0)
    else:
        raise UnavailableError(
            "no broker: set PREFETCHER_BENCH_KAFKA to the address of one, or KAFKA_HOME to the folder of a Kafka release (and install java)"
        )


def _apache(folder: Path, java: str, home: Path, port: int) -> list[str]:
    """Formats the folder and returns the command that starts the broker."""
    quorum = _free_port()
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{quorum}",
        "listeners": f"CLIENTS://127.0.0.1:{port},CONTROLLER://127.0.0.1:{quorum}",
        "advertised.listeners": f"CLIENTS://127.0.0.1:{port}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "CLIENTS",
        "listener.security.protocol.map": "CLIENTS:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(folder / "kafka"),
        "offsets.topic.num.partitions": "2",
        "offsets.topic.replication.factor": "1",
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "500",
        # A broker that was killed is let in again soon.
        "broker.session.timeout.ms": "2000",
        "broker.heartbeat.interval.ms": "500",
        "auto.create.topics.enable": "false",
        "log.cleaner.dedupe.buffer.size": str(16 << 20),
    }
    properties = folder / "server.properties"
    properties.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    run = [java, "-Xmx384m", "-XX:+UseSerialGC", "-cp", f"{home}/libs/*"]
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
    formatting = [*run, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(properties)]
    done = subprocess.run(formatting, capture_output=True, text=True, timeout=_UP_S, check=False)
    if done.returncode:
        raise UnavailableError(f"the broker of {home} can't be set up: {(done.stderr or done.stdout).strip()[-300:]}")
    return [*run, "kafka.Kafka", str(properties)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class BrokerProcess:
    """A broker that may be killed and started again, on the same port and folder."""

    def __init__(self, command: list[str], port: int, output: Path) -> None:
        self._command, self._port, self._output = command, port, output
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers. Raises UnavailableError when it does not."""
        clock, never = SystemClock(), threading.Event()
        with self._output.open("ab") as log:
            process = self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end_s = clock.steady_s() + _UP_S
        while True:
            with socket.socket() as probe:
                probe.settimeout(0.5)
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            if process.poll() is not None or clock.steady_s() > end_s:
                raise UnavailableError(f"the broker did not start: {self._output.read_text(errors='replace').strip()[-300:]}")
            clock.wait(never, 0.05)

    def kill(self) -> None:
        """As a power cut of the process: nothing is closed."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _running(command: list[str], port: int, output: Path) -> Iterator[BrokerProcess]:
    process = BrokerProcess(command, port, output)
    try:
        process.start()
        yield process
    finally:
        process.kill()

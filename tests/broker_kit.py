"""A Kafka broker for tests: one that runs already, an Apache Kafka of the test session's own, or a stand-in.

`PREFETCHER_TEST_KAFKA=host:9092` names a broker; else `KAFKA_HOME`, a folder of a Kafka release (with `libs/`, and a Java on the path), is
started as a single node; else `noida-db`, which does for topics, keys, acknowledgements and positions, and not for members that vanish.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["ApacheKafka", "Broker", "broker", "free_port", "own_kafka", "sasl_kafka"]

_UP_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _UP_S
    while time.monotonic() < until:
        with socket.socket() as probe:
            probe.settimeout(0.5)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None:
            break
        threading.Event().wait(0.02)
    raise RuntimeError(f"the broker is not up: {log.read_text()[-2000:]}")


class Broker:
    """An address to test on. `members`: whether members that vanish are noticed, and partitions handed over."""

    def __init__(self, address: str, *, members: bool) -> None:
        self.address = address
        self.members = members


class ApacheKafka(Broker):
    """One broker and controller in one process, in `folder`; `more` are further lines of its settings."""

    def __init__(self, folder: Path, more: dict[str, str] | None = None, protocol: str = "PLAINTEXT") -> None:
        home = os.environ["KAFKA_HOME"]
        self._folder = folder
        self._port = free_port()
        super().__init__(f"127.0.0.1:{self._port}", members=True)
        quorum = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{quorum}",
            "listeners": f"CLIENTS://127.0.0.1:{self._port},CONTROLLER://127.0.0.1:{quorum}",
            "advertised.listeners": f"CLIENTS://127.0.0.1:{self._port}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "CLIENTS",
            "listener.security.protocol.map": f"CLIENTS:{protocol},CONTROLLER:PLAINTEXT",
            "log.dirs": str(folder / "log"),
            "offsets.topic.num.partitions": "2",
            "offsets.topic.replication.factor": "1",
            "group.initial.rebalance.delay.ms": "0",
            "auto.create.topics.enable": "false",
            "log.cleaner.dedupe.buffer.size": str(16 << 20),
            # Old segments go soon, and a broker that was killed is let in again soon.
            "log.retention.check.interval.ms": "500",
            "log.segment.delete.delay.ms": "0",
            "broker.session.timeout.ms": "2000",
            "broker.heartbeat.interval.ms": "500",
            "num.network.threads": "2",
            "num.io.threads": "2",
        } | (more or {})
        properties = folder / "server.properties"
        properties.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        java = [
            str(shutil.which("java")),
            "-Xmx256m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-Xshare:auto",
            "-cp",
            f"{home}/libs/*",
        ]
        # A first byte of 0: an id that began with a dash would be taken for an option.
        cluster = base64.urlsafe_b64encode(b"\0" + uuid.uuid4().bytes[1:]).rstrip(b"=").decode()
        subprocess.run(
            [*java, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(properties)],
            check=True,
            capture_output=True,
            timeout=_UP_S,
        )
        self._command = [*java, "kafka.Kafka", str(properties)]
        self.start()

    def start(self) -> None:
        log = self._folder / "output"
        with log.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        _wait_for(self._port, self._process, log)

    def kill(self) -> None:
        """As a power cut of the process: nothing is closed."""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)


def _has_kafka() -> bool:
    home = os.environ.get("KAFKA_HOME")
    return bool(home and (Path(home) / "libs").is_dir() and shutil.which("java"))


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A broker that is only written to and read from."""
    named = os.environ.get("PREFETCHER_TEST_KAFKA")
    if named:
        yield Broker(named, members=True)
    elif _has_kafka():
        yield request.getfixturevalue("own_kafka")
    else:
        yield from _stand_in(tmp_path_factory.mktemp("broker"))


@pytest.fixture(scope="session")
def own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheKafka]:
    """A broker that tests may stop, kill and start again, and leave running."""
    yield from _kafka(tmp_path_factory.mktemp("kafka"))


@pytest.fixture(scope="session")
def sasl_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheKafka]:
    """A broker that asks for a password: user `fetch`, `right`."""
    module = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    users = 'username="fetch" password="right" user_fetch="right" user_guest="guest"'
    yield from _kafka(
        tmp_path_factory.mktemp("kafka-sasl"),
        {
            "sasl.enabled.mechanisms": "PLAIN",
            "sasl.mechanism.inter.broker.protocol": "PLAIN",
            "listener.name.clients.plain.sasl.jaas.config": f"{module} {users};",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:fetch;User:ANONYMOUS",
        },
        "SASL_PLAINTEXT",
    )


def _kafka(folder: Path, more: dict[str, str] | None = None, protocol: str = "PLAINTEXT") -> Iterator[ApacheKafka]:
    if not _has_kafka():
        pytest.skip("needs Apache Kafka: set KAFKA_HOME to the folder of a release, and have java on the PATH")
    kafka = ApacheKafka(folder, more, protocol)
    yield kafka
    kafka.kill()


def _stand_in(folder: Path) -> Iterator[Broker]:
    program = shutil.which("noida-db") or shutil.which("noida-db", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("no broker: set PREFETCHER_TEST_KAFKA to the address of one, or KAFKA_HOME to the folder of a Kafka release")
    port = free_port()
    log = folder / "output"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, "start", "--data-dir", str(folder / "data"), "--host", "127.0.0.1", "--only", "kafka", "--kafka-port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # The command starts the server as a child of its own.
            start_new_session=True,
        )
    try:
        _wait_for(port, process, log)
        yield Broker(f"127.0.0.1:{port}", members=False)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

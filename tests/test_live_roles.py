"""Roles as processes of their own on a real broker and a real state server: two controllers, an endpoint, an ingest, two agents."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from broker_kit import Broker, free_port
from safetensors.numpy import save_file
from waiting import eventually

import prefetcher
from prefetcher.agent.manifest import write_manifests
from prefetcher.api.client import get
from prefetcher.bench.roles import RoleProcess, Roles
from prefetcher.clock import SystemClock
from prefetcher.controller import records
from prefetcher.core.types import NodeName
from prefetcher.ingest.tables import TablesReader, connect
from prefetcher.ports import Streams, Topic
from prefetcher.wire import HintMessage, decode_outcome, encode
from prefetcher_connectors.kafka import KafkaOptions, KafkaStreams
from prefetcher_connectors.redis import EmbeddedServer, RedisState, _find_server

ONE, TWO = NodeName("one"), NodeName("two")
BYTES = 1_000_000
COMMAND = [sys.executable, "-m", "prefetcher"]

# Sockets of the broker's client that were refused are left to the collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")



class Installation:
    """All roles on one broker and one state server. Node one has models a0… and s0…, node two b0… and s0…."""

    def __init__(self, folder: Path, broker: Broker, state_url: str) -> None:
        self.folder, self.state_url, self.broker = folder, state_url, broker
        self.prefix = f"t{uuid.uuid4().hex[:12]}"
        self.roles = Roles(
            folder,
            broker.address,
            self.prefix,
            state_url,
            {"PREFETCHER_DECISION__TICK_S": "1", "PREFETCHER_STATE__SNAPSHOT_S": "1", "PREFETCHER_KAFKA__PARTITIONS": "3"},
        )
        self.state = RedisState(state_url)
        self.controllers: list[RoleProcess] = []
        self.agents: dict[NodeName, RoleProcess] = {}

    def start(self) -> None:
        self.controllers = [self.roles.start("controller") for _ in range(2)]
        self.api, self.ingest, self.scheduler = (self.roles.start(role) for role in ("api", "ingest", "scheduler"))
        for node, own in ((ONE, "a"), (TWO, "b")):
            models = self.folder / f"models-{node}"
            for name in [f"{own}{i}" for i in range(6)] + [f"s{i}" for i in range(6)]:
                (models / name).mkdir(parents=True)
                save_file({"w": np.full(BYTES // 4, ord(name[0]) * 10 + int(name[1]), np.float32)}, models / name / "w.safetensors")
            write_manifests(models)
            self.agents[node] = self.roles.agent(node, models, 20 * BYTES, {"NODE__HOST_DIR": str(self.host_dir(node))})
        for process in (*self.controllers, self.api, self.ingest, self.scheduler, *self.agents.values()):
            process.wait_until_up()
        eventually(lambda: set(self.agents) <= {row["node"] for row in get(self.api.url, "/v1/residency?model=s0")})
        eventually(lambda: all(self.state.read(records.node_key(node, "plan")) for node in self.agents))

    def host_dir(self, node: NodeName) -> Path:
        return Path("/dev/shm") / f"prefetcher-test-{self.prefix}-{node}"

    def close(self) -> None:
        self.roles.close()
        self.state.close()
        for node in self.agents:
            shutil.rmtree(self.host_dir(node), ignore_errors=True)

    @contextlib.contextmanager
    def streams(self, requests_topic: str | None = None) -> Iterator[Streams]:
        streams = KafkaStreams(KafkaOptions(self.broker.address, self.prefix, requests_topic, partitions=3))
        yield streams
        streams.close()
        gc.collect()

    def send(self, path: str, body: Any = None) -> tuple[int, Any]:
        data = b"" if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.api.url + path, data=data, method="POST"), timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, json.load(exc)

    def where(self, model: str, state: str = "ready") -> set[str]:
        """Nodes whose memory has the model in this state."""
        return {row["node"] for row in get(self.api.url, f"/v1/residency?model={model}") if row["state"] == state and row["tier"] == "host"}

    def loads(self, model: str, cause: str) -> list[NodeName]:
        """The nodes that began to load it for that cause, once for each time."""
        found = [(node, event) for node, agent in self.agents.items() for event in agent.events("load_started")]
        return [node for node, event in found if (event["model"], event["cause"]) == (model, cause)]

    def leader(self) -> RoleProcess:
        """The controller that leads now."""

        def leading() -> RoleProcess | None:
            last = [[e["event"] for e in c.events() if e["event"] in ("leading", "leads_no_more")][-1:] for c in self.controllers]
            leads = [c for c, events in zip(self.controllers, last, strict=True) if events == ["leading"]]
            return leads[0] if len(leads) == 1 else None

        found = eventually(leading)
        assert isinstance(found, RoleProcess)
        return found


@pytest.fixture(scope="module")
def state_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`PREFETCHER_TEST_REDIS` names a server; else one of the session's own."""
    named = os.environ.get("PREFETCHER_TEST_REDIS")
    if named:
        yield named
        return
    server = EmbeddedServer(tmp_path_factory.mktemp("state"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="module")
def all_roles(broker: Broker, state_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    if os.environ.get("PREFETCHER_TEST_REDIS"):
        pytest.skip("a state server that others use has another leader: unset PREFETCHER_TEST_REDIS for these")
    made = Installation(tmp_path_factory.mktemp("roles"), broker, state_url)
    try:
        made.start()
        yield made
    finally:
        made.close()


def test_posted_requests_are_counted_by_the_ingest_and_learned_by_the_controller(all_roles: Installation) -> None:
    leader = all_roles.leader()
    counted, learned = (
        all_roles.ingest.metric("prefetcher_ingest_records_total", result="counted"),
        leader.metric("prefetcher_learned_rows"),
    )
    rows = [{"model": f"a{i % 3}", "user": f"u{i % 4}", "request_id": uuid.uuid4().hex} for i in range(60)]
    assert all_roles.send("/v1/requests", rows) == (202, {"accepted": 60})
    eventually(lambda: all_roles.ingest.metric("prefetcher_ingest_records_total", result="counted") >= counted + 60)
    eventually(lambda: leader.metric("prefetcher_learned_rows") >= learned + 60)
    with connect(all_roles.state_url) as client:
        assert sum(position["rows"] for position in TablesReader(client).positions().values()) >= 60
    assert eventually(lambda: get(all_roles.api.url, "/v1/forecast/a0"))


def test_a_posted_hint_becomes_a_prefetch_that_an_open_finds_ready(all_roles: Installation) -> None:
    status, answer = all_roles.send("/v1/hints", {"model": "a3", "ttl_s": 300, "source": "page"})
    assert (status, answer["hints"][0]["model"]) == (202, "a3")
    eventually(lambda: all_roles.where("a3") == {"one"})
    assert all_roles.loads("a3", "hint") == [ONE]
    with prefetcher.open("a3", socket_path=all_roles.roles.socket(ONE)) as weights:
        assert weights.found == "ready"
        assert weights["w"][7] == ord("a") * 10 + 3
    order = eventually(lambda: [o for o in get(all_roles.api.url, "/v1/orders") if o["model"] == "a3" and o.get("outcome") == "timely"])[0]
    assert (order["cause"], order["node"]) == ("hint", "one")


def test_a_hint_that_a_product_writes_straight_into_the_topic_is_planned_too(all_roles: Installation) -> None:
    hint = HintMessage(uuid.uuid4().hex, SystemClock().now_s(), "b3", "product", ttl_s=300.0)
    with all_roles.streams() as streams:
        writer = streams.writer()
        writer.append(Topic.HINTS, [("b3", encode(hint))], timeout_s=10.0)
        writer.close()
    eventually(lambda: all_roles.where("b3") == {"two"})
    assert all_roles.loads("b3", "hint") == [TWO]


def test_people_reach_an_agent_through_the_endpoint(all_roles: Installation) -> None:
    status, answer = all_roles.send("/v1/models/a4:pin?node=one")
    assert (status, answer["ok"]) == (200, True)
    eventually(lambda: all_roles.where("a4") == {"one"})
    assert all_roles.send("/v1/models/a4:evict?node=one")[0] == 409
    assert all_roles.send("/v1/models/a4:unpin?node=one")[0] == 200
    # What nobody pins or uses any more is not worth its memory, and leaves with the next plan.
    eventually(lambda: not all_roles.where("a4"))
    assert all_roles.send("/v1/models/a4:load?node=one")[1]["ok"]
    eventually(lambda: all_roles.where("a4") == {"one"})
    assert all_roles.send("/v1/models/a4:evict?node=one")[0] == 200
    eventually(lambda: not all_roles.where("a4"))


def test_switched_off_nothing_is_prefetched_until_it_is_on_again(all_roles: Installation) -> None:
    agent = all_roles.agents[ONE]
    assert all_roles.send("/v1/off", {})[1]["mode"] == "off"
    eventually(lambda: agent.events("switched")[-1]["mode"] == "off")
    assert all_roles.send("/v1/hints", {"model": "a5", "ttl_s": 600})[0] == 202
    leader = all_roles.leader()
    plans = leader.metric("prefetcher_plans_total")
    eventually(lambda: leader.metric("prefetcher_plans_total") >= plans + 4)
    assert all_roles.loads("a5", "hint") == []
    assert all_roles.send("/v1/on", {})[1]["mode"] == "on"
    eventually(lambda: all_roles.loads("a5", "hint") == [ONE])


def test_a_model_of_two_nodes_has_one_home(all_roles: Installation) -> None:
    for model in ("s0", "s1", "s2"):
        assert all_roles.send("/v1/hints", {"model": model, "ttl_s": 300})[0] == 202
        eventually(lambda model=model: all_roles.where(model))
        assert len(all_roles.loads(model, "hint")) == 1


def test_rows_that_name_a_node_are_that_nodes(all_roles: Installation) -> None:
    for model, node, other in (("s3", ONE, TWO), ("s4", TWO, ONE)):
        assert all_roles.send("/v1/requests", {"model": model, "node": node})[0] == 202
        eventually(lambda model=model, node=node: all_roles.loads(model, "demand") == [node])
        assert all_roles.where(model) <= {node}
        assert other not in all_roles.loads(model, "demand")


def test_another_controller_takes_over_from_one_that_was_killed(all_roles: Installation) -> None:
    killed = all_roles.leader()
    before = killed.events("leading")[-1]["fence"]
    all_roles.controllers.remove(killed)
    killed.end(signal.SIGKILL)
    after = all_roles.leader().events("leading")[-1]["fence"]
    assert after > before
    assert all_roles.send("/v1/hints", {"model": "b4", "ttl_s": 300})[0] == 202
    eventually(lambda: all_roles.where("b4") == {"two"})
    # The new leader wrote this node's plan; whoever led before may not any more.
    plan = {records.node_key(TWO, "plan"): b"late"}
    assert not all_roles.state.write_fenced(records.node_key(TWO, "fence"), before, plan)
    assert records.decode_plan(all_roles.state.read(records.node_key(TWO, "plan")) or b"").fence == after
    all_roles.controllers.append(all_roles.roles.start("controller").wait_until_up())


def ledger(installation: Installation) -> dict[str, Any]:
    done = subprocess.run(
        [*COMMAND, "ledger", "rebuild", "--json"],
        env=os.environ | installation.roles.environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found: dict[str, Any] = json.loads(done.stdout)["nodes"]
    return found


def test_ledgers_are_rebuilt_from_the_topic_once_every_role_ended_by_sigterm(all_roles: Installation) -> None:
    assert {agent.role: agent.end() for agent in all_roles.agents.values()} == {"agent": 0}
    told = get(all_roles.api.url, "/v1/report")
    rebuilt = ledger(all_roles)
    assert {node: found["totals"] for node, found in rebuilt.items()} == told["nodes"]
    with all_roles.streams() as streams:
        reader = streams.reader([Topic.OUTCOMES], "test", lambda partitions: {})
        values: list[bytes] = []
        while chunks := reader.poll(1000, 2.0):
            values += [value for chunk in chunks for value in chunk.values]
        reader.close()
        writer = streams.writer()
        writer.append(Topic.OUTCOMES, [(decode_outcome(value).node, value) for value in values], timeout_s=20.0)
        writer.close()
    assert ledger(all_roles) == rebuilt
    rest = [*all_roles.controllers, all_roles.api, all_roles.ingest, all_roles.scheduler]
    assert [process.end() for process in rest] == [0] * len(rest)


def test_a_topic_that_a_gateway_writes_is_counted_and_learned(broker: Broker, tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "state")
    server.start()
    made = Installation(tmp_path, broker, server.url)
    topic = f"{made.prefix}.gateway"
    mapped = {"KAFKA__REQUESTS_TOPIC": topic, "KAFKA__MAP": "litellm"}
    try:
        ingest, controller = (made.roles.start(role, mapped) for role in ("ingest", "controller"))
        for process in (ingest, controller):
            process.wait_until_up()
        now_s = SystemClock().now_s()
        rows = [
            {"request_id": str(i), "startTime": now_s - 40 + i, "model_group": f"g{i % 4}", "end_user": f"u{i % 3}", "spend": 0.1}
            for i in range(40)
        ]
        with made.streams(topic) as streams:
            writer = streams.writer()
            writer.append(Topic.REQUESTS, [(row["model_group"], json.dumps(row).encode()) for row in rows], timeout_s=10.0)
            writer.append(Topic.REQUESTS, [("g0", b'{"startTime": "never", "model_group": "g0"}')], timeout_s=10.0)
            writer.close()
        eventually(lambda: ingest.metric("prefetcher_ingest_records_total", result="counted") == 40)
        eventually(lambda: ingest.metric("prefetcher_ingest_records_total", result="bad") == 1)
        eventually(lambda: controller.metric("prefetcher_learned_rows") == 40)
        assert [process.end() for process in (ingest, controller)] == [0, 0]
    finally:
        made.close()
        server.stop()


# --- what is wrong is said in one line ---


def refused(role: str, folder: Path, **settings: str) -> tuple[int, str]:
    """Exit code and standard error of a role that can't start, its state folder gone or never made."""
    environment = {
        "PREFETCHER_KAFKA__BROKERS": f"127.0.0.1:{free_port()}",
        "PREFETCHER_STATE__URL": "redis://127.0.0.1:1/0",
        "PREFETCHER_STATE__DIR": str(folder / "state-of-role"),
        "PREFETCHER_API__PORT": "0",
        "PREFETCHER_LOG__LEVEL": "error",
    }
    done = subprocess.run(
        [*COMMAND, role], env=os.environ | environment | settings, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == ""
    assert not (folder / "state-of-role").exists()
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return done.returncode, lines[0]


@pytest.mark.parametrize("role", ["ingest", "controller", "api", "scheduler", "agent"])
def test_a_role_without_shared_state_says_what_to_set(role: str, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    code, line = refused(role, tmp_path, PREFETCHER_STATE__URL="", PREFETCHER_NODE__MODELS_DIR=str(tmp_path / "models"))
    assert code == 2
    assert "set PREFETCHER_STATE__URL" in line


def test_a_wrong_address_of_the_broker_is_one_line(tmp_path: Path) -> None:
    code, line = refused("ingest", tmp_path)
    assert code == 1
    assert line.startswith("error: no Kafka broker answers at 127.0.0.1:")


def test_a_state_server_that_is_away_is_one_line(broker: Broker, tmp_path: Path) -> None:
    code, line = refused("controller", tmp_path, PREFETCHER_KAFKA__BROKERS=broker.address)
    assert code == 1
    assert line.startswith("error: the state server at redis://127.0.0.1:1/0 does not answer")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[int]:
    """The port of a state server that asks for the password `right`."""
    port = free_port()
    process = subprocess.Popen(
        [_find_server(), "--port", str(port), "--bind", "127.0.0.1", "--requirepass", "right", "--save", "", "--dir", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    eventually(lambda: RedisState(f"redis://:right@127.0.0.1:{port}/0").close() is None)
    yield port
    process.terminate()
    process.wait()


def test_a_wrong_password_of_the_state_server_is_one_line_without_it(broker: Broker, guarded: int, tmp_path: Path) -> None:
    url = f"redis://:wr0ng@127.0.0.1:{guarded}/0"
    code, line = refused("scheduler", tmp_path, PREFETCHER_KAFKA__BROKERS=broker.address, PREFETCHER_STATE__URL=url)
    assert code == 1
    assert f"redis://***@127.0.0.1:{guarded}/0" in line
    assert "wr0ng" not in line


def check(**settings: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [*COMMAND, "config", "check"], env=os.environ | settings, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_config_check_says_all_that_is_wrong(tmp_path: Path) -> None:
    code, lines = check(
        PREFETCHER_NODE__MODELS_DIR=str(tmp_path / "nowhere"),
        PREFETCHER_NODE__HOST_BYTES="900TB",
        PREFETCHER_KAFKA__BROKERS=f"127.0.0.1:{free_port()}",
        PREFETCHER_STATE__URL="redis://:geheim@127.0.0.1:1/0",
    )
    wrong = [line for line in lines if line.startswith("wrong: ")]
    assert code == 1
    for about in ("nowhere", "PREFETCHER_NODE__HOST_BYTES", "no Kafka broker answers", "the state server at redis://***@"):
        assert any(about in line for line in wrong), about
    assert not any("geheim" in line for line in lines)


def test_config_check_finds_nothing_where_nothing_is_wrong(broker: Broker, tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "state")
    server.start()
    try:
        code, lines = check(
            PREFETCHER_NODE__MODELS_DIR=str(tmp_path),
            PREFETCHER_NODE__HOST_BYTES="10MB",
            PREFETCHER_NODE__LOCK="off",
            PREFETCHER_KAFKA__BROKERS=broker.address,
            PREFETCHER_KAFKA__PREFIX=f"t{uuid.uuid4().hex[:12]}",
            PREFETCHER_STATE__URL=server.url,
        )
    finally:
        server.stop()
    assert (code, lines[-1]) == (0, "nothing is wrong")

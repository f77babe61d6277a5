"""Three idle models that are called at once on four nodes: real agents, two endpoints, a controller, a broker and a state server."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from broker_kit import Broker
from safetensors.numpy import save_file
from waiting import eventually

import prefetcher
from prefetcher.agent.manifest import write_manifests
from prefetcher.api.client import get
from prefetcher.bench.roles import RoleProcess, Roles
from prefetcher.client import Client, Hint, Route
from prefetcher.controller import records
from prefetcher.core.types import NodeName
from prefetcher_connectors.redis import EmbeddedServer, RedisState

NODES = [NodeName(f"n{i}") for i in range(4)]
MODELS = [f"m{i}" for i in range(13)]
#: For bursts that may have to be tried several times.
THREES = [[f"b{i}{j}" for j in range(3)] for i in range(10)]
BYTES = 8_000_000
#: What was sent to a node takes its link for so long at least (`api.routing`): calls within it find the link taken.
AT_ONCE_S = 0.1

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


class Cluster:
    """Four agents that know the same models, a controller, and two endpoints."""

    def __init__(self, folder: Path, broker: Broker, state_url: str) -> None:
        self.prefix = f"t{uuid.uuid4().hex[:12]}"
        settings = {"PREFETCHER_DECISION__TICK_S": "1", "PREFETCHER_KAFKA__PARTITIONS": "2"}
        self.roles = Roles(folder, broker.address, self.prefix, state_url, settings)
        self.state = RedisState(state_url)
        models = folder / "models"
        self.threes = iter(THREES)
        for i, name in enumerate([*MODELS, *(model for three in THREES for model in three)]):
            (models / name).mkdir(parents=True)
            save_file({"w": np.full((BYTES if name in MODELS else 4096) // 4, i, np.float32)}, models / name / "w.safetensors")
        write_manifests(models)
        self.agents: dict[NodeName, RoleProcess] = {}
        self.controller = self.roles.start("controller")
        self.endpoints = [self.roles.start("api") for _ in range(2)]
        for node in NODES:
            self.agents[node] = self.roles.agent(node, models, 20 * BYTES, self.node_settings(node))
        for process in (self.controller, *self.endpoints, *self.agents.values()):
            process.wait_until_up()
        for endpoint in self.endpoints:
            eventually(lambda endpoint=endpoint: len(get(endpoint.url, "/v1/residency?model=m0")) == len(NODES))
        eventually(lambda: all(self.state.read(records.node_key(node, "plan")) for node in NODES))

    def node_settings(self, node: NodeName) -> dict[str, str]:
        # A prefetch takes two seconds: those that are ordered together find each other's link taken.
        return {"NODE__HOST_DIR": str(self.host_dir(node)), "NODE__PREFETCH_BYTES_PER_S": str(BYTES // 2)}

    def host_dir(self, node: NodeName) -> Path:
        return Path("/dev/shm") / f"prefetcher-test-{self.prefix}-{node}"

    def close(self) -> None:
        self.roles.close()
        self.state.close()
        for node in NODES:
            shutil.rmtree(self.host_dir(node), ignore_errors=True)

    def call_at_once(self, models: list[str]) -> dict[str, Route]:
        """Asks for each model in a thread of its own, of one endpoint or the other, all at the same moment."""
        start = threading.Barrier(len(models))

        def call(number: int) -> Route:
            start.wait()
            with urllib.request.urlopen(f"{self.endpoints[number % 2].url}/v1/route/{models[number]}", timeout=10) as answer:
                return Route(**json.load(answer))

        with ThreadPoolExecutor(len(models)) as threads:
            return {found.model: found for found in threads.map(call, range(len(models)))}

    def three_called_at_once(self) -> dict[str, Route]:
        """Three models that are nowhere, called so quickly that none of them can be over before the last is asked for."""
        for three in self.threes:
            began_s = time.perf_counter()
            told = self.call_at_once(three)
            if time.perf_counter() - began_s < AT_ONCE_S:
                return told
        pytest.skip(f"here three calls take longer than {AT_ONCE_S} s, however often they are tried")

    def post(self, rows: list[dict[str, Any]]) -> None:
        body = json.dumps(rows).encode()
        request = urllib.request.Request(f"{self.endpoints[0].url}/v1/requests", data=body, method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 202

    def loads(self, model: str) -> list[NodeName]:
        """The nodes that began to load it, once for each time, for whatever cause."""
        return [node for node, agent in self.agents.items() for event in agent.events("load_started") if event["model"] == model]

    def where(self, model: str) -> set[str]:
        rows = get(self.endpoints[0].url, f"/v1/residency?model={model}")
        return {row["node"] for row in rows if (row["state"], row["tier"]) == ("ready", "host")}


@pytest.fixture(scope="module")
def cluster(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.environ.get("PREFETCHER_TEST_REDIS"):
        pytest.skip("a state server that others use has another leader: unset PREFETCHER_TEST_REDIS for these")
    server = EmbeddedServer(tmp_path_factory.mktemp("state"))
    server.start()
    made = None
    try:
        made = Cluster(tmp_path_factory.mktemp("roles"), broker, server.url)
        yield made
    finally:
        if made is not None:
            made.close()
        server.stop()


def test_three_models_called_at_once_by_programs_get_a_node_each_and_are_loaded_once(cluster: Cluster) -> None:
    told = cluster.three_called_at_once()
    models = sorted(told)
    assert len({found.node for found in told.values()}) == 3
    assert {found.state for found in told.values()} == {"placed"}

    def engine(model: str) -> float:
        with prefetcher.open(model, socket_path=cluster.roles.socket(told[model].node)) as weights:
            return float(np.asarray(weights["w"])[0])

    with ThreadPoolExecutor(3) as threads:
        first, second, third = threads.map(engine, models)
    assert (second - first, third - first) == (1.0, 2.0)
    for model in models:
        eventually(lambda model=model: cluster.where(model) == {told[model].node})
        assert cluster.loads(model) == [told[model].node]
    # What is there is where the next ones are sent, by both endpoints.

    def all_ready() -> dict[str, Route] | None:
        found = cluster.call_at_once(models)
        return found if {route.state for route in found.values()} == {"ready"} else None

    again = eventually(all_ready)
    assert {model: found.node for model, found in again.items()} == {model: found.node for model, found in told.items()}


def test_three_models_whose_rows_name_the_node_that_was_told_are_loaded_there_once(cluster: Cluster) -> None:
    told = cluster.three_called_at_once()
    models = sorted(told)
    assert len({found.node for found in told.values()}) == 3
    cluster.post([{"model": model, "node": told[model].node} for model in models])
    for model in models:
        eventually(lambda model=model: cluster.where(model) == {told[model].node})
        assert cluster.loads(model) == [told[model].node]


def test_hints_that_come_together_are_loaded_once_each_and_not_all_on_one_node(cluster: Cluster) -> None:
    models = MODELS[6:10]
    with Client(cluster.endpoints[0].url) as client:
        client.hints([Hint(model=model, in_s=20.0, ttl_s=300.0) for model in models])
    homes = {model: eventually(lambda model=model: cluster.where(model)) for model in models}
    assert all(len(nodes) == 1 for nodes in homes.values())
    assert len(set().union(*homes.values())) >= 2
    assert all(len(cluster.loads(model)) == 1 for model in models)


def test_a_hint_for_what_is_on_another_node_or_on_its_way_begins_no_second_load(cluster: Cluster) -> None:
    model = MODELS[10]
    (told,) = cluster.call_at_once([model]).values()
    with Client(cluster.endpoints[1].url) as client, prefetcher.open(model, socket_path=cluster.roles.socket(told.node)):
        for _ in range(3):
            client.hint(model, in_s=1.0, ttl_s=120.0)
    plans = cluster.controller.metric("prefetcher_plans_total")
    eventually(lambda: cluster.controller.metric("prefetcher_plans_total") >= plans + 2 * len(NODES))
    assert cluster.loads(model) == [told.node]
    assert cluster.where(model) == {told.node}


def test_rows_that_wait_at_their_node_bring_a_second_copy_and_requests_are_spread_over_both(cluster: Cluster) -> None:
    waited, ready = MODELS[11:13]
    # One is there before anybody asks for it: what its rows would gain elsewhere is nothing, and less than any price.
    with Client(cluster.endpoints[0].url) as client:
        client.hint(ready, in_s=5.0, ttl_s=300.0)
    (home,) = eventually(lambda: cluster.where(ready))
    # The controller has seen it there, too: rows count as waiting by the report that it has.
    plans = cluster.controller.metric("prefetcher_plans_total")
    eventually(lambda: cluster.controller.metric("prefetcher_plans_total") >= plans + 2 * len(NODES))
    told = cluster.call_at_once([waited])[waited]
    cluster.post([{"model": ready, "node": home}] * 20 + [{"model": waited, "node": told.node}] * 20)
    copies = eventually(lambda: found if len(found := cluster.where(waited)) == 2 else None)
    assert cluster.where(ready) == {home}
    assert told.node in copies
    second = (copies - {told.node}).pop()
    # The first was loaded for requests, the second by a forecast that nobody asked for there.
    assert sorted(cluster.loads(waited)) == sorted(copies)
    assert {row["cause"] for row in get(cluster.endpoints[0].url, f"/v1/residency?model={waited}") if row["node"] == second} == {"forecast"}

    def spread() -> dict[str, int] | None:
        asked = [cluster.call_at_once([waited])[waited].node for _ in range(20)]
        found = {node: asked.count(node) for node in sorted(copies)}
        return found if min(found.values()) >= 8 else None

    assert sum(eventually(spread).values()) == 20

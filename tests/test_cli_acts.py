"""`pin --for`, `off --node`, `observe`, `route`: the command line against a real server, and what is recorded of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
import uvicorn
from api_kit import NODE, T0, Setup, report_of
from typer.testing import CliRunner

from prefetcher import cli
from prefetcher.api.endpoint import make_endpoint
from prefetcher.client import Client, Route
from prefetcher.controller import records
from prefetcher.core.types import NodeName
from prefetcher.errors import ModelNotFoundError, UsageError


class Served:
    """An endpoint that is one of group `canary`, with another node beside it, on a real port."""

    def __init__(self) -> None:
        self.setup = Setup(group="canary")
        self.setup.report(report_of(), report_of("node-1"))
        app = make_endpoint(self.setup.service, 100_000)
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            self.thread.join(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def run(self, *args: str, code: int = 0) -> str:
        done = CliRunner().invoke(cli.app, [*args, "--url", self.url])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == code, done.output
        return done.output

    def by_hand(self) -> records.ByHand:
        return self.setup.service.by_hand.done(1)[0]

    def switch(self, key: str) -> records.Switch:
        raw = self.setup.state.read(key)
        assert raw is not None
        return records.decode_switch(raw)


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.server.should_exit = True
    made.thread.join()
    made.setup.service.close()


def test_a_pin_for_a_time_and_a_reason(served: Served) -> None:
    said = served.run("pin", "m0", "--for", "2h", "--reason", "launch at noon")
    assert said.strip().endswith("for 2h")
    assert served.by_hand() == records.ByHand("pin", T0, "", "m0", node=NODE, until_s=T0 + 7200.0, reason="launch at noon")
    assert records.decode_pins(served.setup.state.read(records.PINS))["m0"].until_s == T0 + 7200.0
    served.run("unpin", "m0", "--reason", "it is over")
    assert served.by_hand().reason == "it is over"
    assert records.decode_pins(served.setup.state.read(records.PINS)) == {}


def test_loads_and_evictions_have_reasons_too(served: Served) -> None:
    for act in ("load", "evict"):
        served.run(act, "org/m1", "--reason", "because", "--node", NODE)
        assert (served.by_hand().act, served.by_hand().model, served.by_hand().reason) == (act, "org/m1", "because")
    assert served.setup.node.acts == [("load", "org/m1"), ("evict", "org/m1")]
    with pytest.raises(UsageError, match="node-1 can't be reached"):
        served.run("load", "m0", "--node", "node-1")
    with pytest.raises(ModelNotFoundError, match="elsewhere"):
        served.run("load", "m0", "--node", "elsewhere")


@pytest.mark.parametrize("mode", ["off", "observe", "on"])
def test_the_switch_of_all_of_a_node_and_of_a_group(served: Served, mode: str) -> None:
    served.run(mode)
    assert served.switch(records.SWITCH).mode == mode
    said = served.run(mode, "--node", "node-1", "--for", "30m", "--reason", "its disk")
    assert "on node-1, for 30m" in said
    found = served.switch(records.node_key(NodeName("node-1"), "switch"))
    assert (found.mode, found.until_s) == (mode, T0 + 1800.0)
    assert (served.by_hand().node, served.by_hand().reason) == ("node-1", "its disk")
    # The server of this test logs to the same output.
    output = served.run(mode, "--group", "canary", "--json")
    answer = json.loads(output[output.index("{\n") :])
    assert (answer["mode"], answer["record"]["group"], answer["record"]["until_s"]) == (mode, "canary", None)
    assert served.switch(records.group_key("canary", "switch")).mode == mode


def test_what_can_not_be_meant_is_refused_before_anything_is_done(served: Served) -> None:
    with pytest.raises(UsageError, match="not both"):
        served.run("off", "--node", "node-1", "--group", "canary")
    with pytest.raises(UsageError, match="no time at all"):
        served.run("off", "--for", "0s")
    with pytest.raises(UsageError, match="for"):
        served.run("pin", "m0", "--for", "a while")
    with pytest.raises(ModelNotFoundError, match="'nowhere'"):
        served.run("off", "--node", "nowhere")
    assert served.setup.state.read(records.SWITCH) is None
    assert served.setup.service.by_hand.done(1) == []


def test_routes(served: Served) -> None:
    lines = served.run("route", "m0", "org/m1").splitlines()
    assert [line.split()[0] for line in lines] == ["m0", "org/m1"]
    assert {line.split()[1] for line in lines} == {"node-0", "node-1"}
    assert "placed, 1.0 s to wait" in lines[0]
    told = json.loads(served.run("route", "m0", "--json"))
    assert told == [{"model": "m0", "node": lines[0].split()[1], "state": "moving", "wait_s": 1.0, "cached": True}]
    with Client(served.url) as client:
        assert client.route("m0") == Route(**told[0])
        assert [found.model for found in client.routes(["org/m1", "m0"])] == ["org/m1", "m0"]
        with pytest.raises(UsageError, match="1 to 100"):
            client.routes([])
    with pytest.raises(ModelNotFoundError, match="'nobody'"):
        served.run("route", "nobody")

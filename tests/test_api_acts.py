"""Acts by hand in words, and names of models in addresses: over a real server, as the command line asks it."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Iterator

import pytest
import uvicorn

from prefetcher.api import client
from prefetcher.api.acts import in_words
from prefetcher.api.endpoint import make_endpoint
from prefetcher.api.service import Service
from prefetcher.clock import VirtualClock
from prefetcher.controller import records
from prefetcher.controller.records import KnownWeights, Memory, NodeReport
from prefetcher.core import plans, residency
from prefetcher.core.types import NodeName
from prefetcher.errors import ModelNotFoundError
from prefetcher.ports import Acted
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.memory import MemoryState, MemoryStreams

NODE = NodeName("node-0")
NAMES = ("org/m", "a?b#c", "100%", "%2F", "a b", "модель", "a:pin", "a&b=c", ".")


class Obeys:
    def act(self, act: str, model: str) -> Acted:
        return Acted(True, model)

    def switch(self, on: bool) -> None: ...

    def check(self) -> str:
        return ""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    clock = VirtualClock(0.0)
    state = MemoryState(clock)
    known = tuple(KnownWeights(name, "v", 1000, 0.1) for name in NAMES)
    state.write({records.node_key(NODE, "report"): records.encode(NodeReport(NODE, 0.0, Memory(10_000, 0), 1e9, known=known))})
    service = Service(NODE, MemoryStreams().writer(), state, Obeys(), clock, Metrics(), lambda reason: None, lambda: "")
    server = uvicorn.Server(uvicorn.Config(make_endpoint(service, 1000), port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    never = threading.Event()
    while not server.started:
        never.wait(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize("name", NAMES)
def test_any_name_reaches_its_model(url: str, name: str) -> None:
    assert client.act(url, "load", name)["reason"] == name


@pytest.mark.parametrize("name", ["nobody?#", "", "a\nb", "b\udcff", "x" * 100_000, "../../v1/off"])
def test_an_unknown_model_is_said_to_be_one(url: str, name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no model is called") as caught:
        client.act(url, "pin", name)
    assert len(str(caught.value)) < 300


def test_every_answer_of_the_machine_has_words() -> None:
    handlers = (residency.ResidencyMachine._pinned, residency.ResidencyMachine._unpinned, residency.ResidencyMachine._load_asked)
    handlers += (residency.ResidencyMachine._evict_asked, residency.ResidencyMachine._why_stays)
    handlers += (plans.Plans._why_refuse, plans.Plans.why_never)
    texts = [inspect.getsource(handler) for handler in handlers]
    codes = {code for text in texts for code in re.findall(r'"([a-z]+(?:_[a-z]+)*)"', text)}
    assert {"leased", "pinned_by_plan", "observe", "does_not_fit", "too_large"} <= codes
    codes -= {"asked"}  # why a load ended, said to nobody who acts
    # A load by hand is of this node and never late, in the control group, or switched off.
    never = {"other_node", "control_group", "switched_off", "plan", "deadline"}
    assert {code for code in codes - never if in_words("load", code) == code.replace("_", " ")} == set()


def test_words_say_what_to_do() -> None:
    assert in_words("unpin", "not_pinned").startswith("it is not pinned by hand")
    assert "unpin" in in_words("evict", "pinned")
    assert in_words("pin", "") == "done"
    assert in_words("pin", "some_new_reason") == "some new reason"

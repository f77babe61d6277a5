"""From requests on a running node to what prefetching saves: blocks by the agent, waits of its shadow by the controller, one answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from up_kit import running
from waiting import eventually

from prefetcher.api.client import get, post
from prefetcher.controller import records
from prefetcher.controller.effects import read_blocks
from prefetcher.core.types import NodeName
from prefetcher_connectors.redis import EmbeddedServer, RedisState

#: An hour passes in six seconds.
SPEED = 600.0
MIDNIGHT_S = 1_767_225_600.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    made = EmbeddedServer(tmp_path / "store")
    made.start()
    yield made
    made.stop()


def test_hours_of_a_running_node_become_what_shadow_caches_say_and_no_more(server: EmbeddedServer, tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    speed, origin_s = str(SPEED), str(MIDNIGHT_S)
    with running(
        tmp_path / "up", PREFETCHER_STATE__URL=server.url, PREFETCHER_CLOCK__SPEED=speed, PREFETCHER_CLOCK__ORIGIN_S=origin_s
    ) as up:
        state = RedisState(server.url)

        def ask_on() -> bool:
            """Requests all along, until four hours are over and both sides told theirs."""
            post(up.url, "/v1/requests", [{"model": f"m{k}"} for k in range(4)])
            blocks, shadow = read_blocks(state, ["node-0"]).get("node-0", ([], {}))
            whole = [block for block in blocks if block.on_s > 2_850.0 and block.rows > 0 and block.block in shadow]
            return len(whole) >= 2

        eventually(ask_on, timeout_s=240.0)
        raw = state.read(records.node_key(NodeName("node-0"), "blocks"))
        assert raw is not None
        assert all(block[1] is False for block in json.loads(raw)), "one node alone is never control"
        effect = eventually(lambda: (found := get(up.url, "/v1/effect")) and found["blocks"] >= 2 and found, timeout_s=120.0)
        assert effect["basis"] in ("shadow", "nothing")
        assert effect["control_blocks"] == 0
        assert (effect["low"], effect["found"], effect["running"]) == (None, False, False)
        assert "no control group runs" in effect["words"] or "nobody waited" in effect["words"]
        state.close()

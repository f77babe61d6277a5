"""Field maps: what is shipped reads real shapes of records, what is written by hand is checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefetcher.errors import SettingsError
from prefetcher.replay.maps import COLUMNS, SHIPPED, parse_map
from prefetcher.replay.trace import read_trace

LITELLM = {
    "request_id": "chatcmpl-1",
    "call_type": "acompletion",
    "api_key": "88dc28d0f030c55ed4ab77ed8faf098196cb1c05df778539800c9f1243fe6b4b",
    "spend": 0.0001,
    "startTime": "2024-05-01T10:00:00.250000",
    "endTime": "2024-05-01T10:00:03",
    "model": "openai/llama-70b-0501",
    "model_group": "llama-70b",
    "user": "team-a",
    "end_user": "",
    "metadata": {"user_api_key_alias": None},
}
ENVOY = {
    "start_time": "2024-05-01T10:00:00.250Z",
    "method": "POST",
    "response_code": 200,
    "request_id": "cc21d9b0",
    "upstream_host": "10.0.2.1:80",
    "x-ai-eg-model": "llama-70b",
}
OPENAI = {
    "timestamp": 1714557600250,
    "request": {"model": "llama-70b", "user": "team-a", "messages": []},
    "response": {"id": "chatcmpl-1", "created": 1714557603, "model": "llama-70b-0501"},
}


@pytest.mark.parametrize(("name", "record"), [("litellm", LITELLM), ("envoy", ENVOY), ("openai", OPENAI)])
def test_shipped_maps_read_the_records_of_their_gateway(tmp_path: Path, name: str, record: dict[str, object]) -> None:
    log = tmp_path / "log.jsonl"
    other = json.loads(json.dumps(record).replace("chatcmpl-1", "chatcmpl-2").replace("cc21d9b0", "cc21d9b1"))
    log.write_text("\n".join(map(json.dumps, (record, other, record))))
    trace = read_trace(log, catalog=None, default_bytes=1, field_map=name)
    assert trace.models == ["llama-70b"]
    assert trace.ts.tolist() == [1714557600.25] * 2
    assert trace.problems.counts == {"duplicate": 1}
    assert trace.users == (0 if name == "envoy" else 1)
    assert trace.node_names == []


def test_a_gen_ai_key_with_dots_is_found_as_one_key(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"start_time": "2024-05-01T10:00:00Z", "gen_ai.request.model": "m"}))
    assert read_trace(log, catalog={"m": 1}, field_map="envoy").models == ["m"]


def test_parts_of_a_map_add_up_and_later_ones_win() -> None:
    made = parse_map("litellm, node=api_base ,model=a.b|model")
    assert made["ts"] == SHIPPED["litellm"]["ts"]
    assert made["node"] == ("api_base",)
    assert made["model"] == ("a.b", "model")
    assert made["count"] == ("count",)
    assert parse_map(None) == {column: (column,) for column in COLUMNS}
    assert parse_map({"ts": "when"})["ts"] == ("when",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lightllm", "no shipped field map is called 'lightllm'; there are envoy, litellm, openai"),
        ("time=startTime", "unknown column 'time'"),
        ("ts=", "names no field for 'ts'"),
    ],
)
def test_maps_that_mean_nothing_are_refused(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_map(text)


def test_shipped_maps_name_known_columns_only() -> None:
    for made in SHIPPED.values():
        assert set(made) <= set(COLUMNS)
        assert {"ts", "model"} <= set(made)

"""Whatever is sent, no route fails by itself: answers are what the schema says, errors are problem details, and nothing is a 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from api_kit import Setup, report_of
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from prefetcher.controller.records import HeldWeights
from prefetcher.controller.windows import WindowShelf
from prefetcher.core.windows import BookEntry, Segment, WindowBook

#: What may come: short of 1xx and 3xx but for 304, and never a failure of the server's own.
FORESEEN = {200, 201, 202, 304, 400, 404, 405, 409, 413, 422, 429, 503}
FEW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

_text = st.text(max_size=20)
_number = st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.booleans())
_leaf = st.one_of(st.none(), _number, _text, st.sampled_from(["m0", "org/m1", "node-0", "*"]))
_any = st.recursive(_leaf, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_text, inner, max_size=4)), max_leaves=12)
_FIELDS = (
    "model",
    "in_s",
    "ttl_s",
    "session",
    "user",
    "hint_id",
    "source",
    "key",
    "ts",
    "count",
    "node",
    "group",
    "for_s",
    "until_s",
    "reason",
)
_record = st.dictionaries(st.sampled_from(_FIELDS), _leaf, max_size=6)
_likely = st.fixed_dictionaries({"model": st.sampled_from(["m0", "nobody"])}, optional=dict.fromkeys(_FIELDS[1:], _leaf))
_json = st.one_of(_record, _likely, st.lists(st.one_of(_record, _likely), max_size=5), _any).map(lambda body: json.dumps(body).encode())
_body = st.one_of(_json, st.binary(max_size=60), st.just(b""), st.text(max_size=30).map(lambda text: text.encode("utf-16")))
_headers = st.dictionaries(
    st.sampled_from(["Origin", "Idempotency-Key", "If-None-Match", "Authorization", "X-Api-Key", "Content-Type", "Content-Length"]),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20),
    max_size=3,
).filter(lambda headers: "Content-Length" not in headers)


@pytest.fixture(scope="module")
def setup() -> Iterator[Setup]:
    with Setup(body_limit_bytes=2_000) as made:
        made.forecast(m0=(0.1, 0.2, 0.3), until_s=1e12)
        yield made


@pytest.fixture(scope="module")
def routes(setup: Setup) -> list[tuple[str, str]]:
    paths = setup.http.get("/openapi.json").json()["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


def send(setup: Setup, method: str, path: str, **given: Any) -> None:
    setup.virtual.advance(2.0)
    setup.report(report_of(held=[HeldWeights("m0", "v", "host", "moving", 1000)]))
    answer = setup.http.request(method, path, **given)
    assert answer.status_code in FORESEEN | {403}, (method, path, given, answer.text)
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == "application/problem+json"
        problem = answer.json()
        assert problem["status"] == answer.status_code
        assert problem["detail"]
        assert len(answer.content) < 20_000
    if answer.status_code in (429, 503):
        assert int(answer.headers["retry-after"]) >= 1


@FEW
@given(data=st.data())
def test_any_body_header_and_query_to_any_route(setup: Setup, routes: list[tuple[str, str]], data: st.DataObject) -> None:
    method, path = data.draw(st.sampled_from(routes))
    name = data.draw(st.one_of(st.sampled_from(["m0", "org/m1"]), st.text(max_size=30)))
    query = data.draw(
        st.dictionaries(st.sampled_from(["model", "node", "count", *_FIELDS]), st.one_of(_text, st.integers().map(str)), max_size=3)
    )
    body = data.draw(_body) if method == "POST" else None
    path = path.replace("{model}", quote(name, safe=""))
    assume("\x00" not in path)
    send(setup, method, path, content=body, params=query, headers=data.draw(_headers))


@FEW
@given(body=_body, headers=_headers)
def test_any_hint(setup: Setup, body: bytes, headers: dict[str, str]) -> None:
    send(setup, "POST", "/v1/hints", content=body, headers=headers)


@settings(FEW, max_examples=50)
@given(path=st.text(max_size=30), method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]))
def test_any_address(setup: Setup, path: str, method: str) -> None:
    answer = setup.http.request(method, "/" + quote(path, safe="/:"))
    assert answer.status_code < 500


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "\\ud800"}',
        b'{"model": "m0", "user": "\\udfff"}',
        b'{"model": "m0", "in_s": 1e999}',
        b'{"model": "m0", "in_s": NaN}',
        b'{"model": "m0", "hint_id": "\\u0000"}',
        b'{"model": "m0", "model": "nobody"}',
        b"\xff\xfe{}",
        b"[" * 1_900,
        b'{"model": ' + b'"' + b"m" * 600 + b'"}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/hints", "/v1/requests", "/v1/off", "/v1/models/m0:pin"])
def test_what_has_broken_others(setup: Setup, path: str, body: bytes) -> None:
    send(setup, "POST", path, content=body)


def test_every_example_of_the_schema_is_taken(setup: Setup) -> None:
    schema = setup.http.get("/openapi.json").json()
    # The segment that examples speak of, in a version that can be gone back to.
    WindowShelf(setup.state).change(lambda _, __: (WindowBook((BookEntry(Segment("small, hourly, regular")),)), [], None))
    tried = 0
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"]
            for content in operation.get("requestBody", {}).get("content", {}).values():
                for example in content["examples"].values():
                    setup.report(report_of(known=("llama-8b", "whisper")), report_of("gpu-7", group="canary"))
                    setup.virtual.advance(1.0)
                    value = {**example["value"]} if isinstance(example["value"], dict) else example["value"]
                    if isinstance(value, dict) and "until_s" in value:
                        value["until_s"] += 1e8
                    answer = setup.http.request(method, path.replace("{model}", "llama-8b"), json=value)
                    taken = answer.status_code in (200, 201, 202)
                    assert taken or (":pin" not in path and "no end" in answer.text), (path, value, answer.text)
                    tried += 1
    assert tried > 10


def test_every_route_shows_an_answer_and_its_parameters(setup: Setup) -> None:
    schema = setup.http.get("/openapi.json").json()
    parts = schema["components"]["schemas"]

    def has_example(found: dict[str, Any]) -> bool:
        name = found.get("$ref", "").rpartition("/")[2] or found.get("items", {}).get("$ref", "").rpartition("/")[2]
        return any(
            "example" in json.dumps(field) or "$ref" in json.dumps(field) for field in parts.get(name, {}).get("properties", {}).values()
        )

    for path, methods in schema["paths"].items():
        for operation in methods.values():
            answer = next(answer for status, answer in operation["responses"].items() if status.startswith("2"))
            content = next(iter(answer["content"].values()))
            assert {"example", "examples"} & set(content) or has_example(content["schema"]), path
            for parameter in operation.get("parameters", []):
                assert parameter["in"] != "path" or "examples" in parameter["schema"], (path, parameter)


def test_the_schema_knows_its_own_parts_and_errors_are_problems(setup: Setup) -> None:
    schema = setup.http.get("/openapi.json").json()
    text = json.dumps(schema)
    parts = schema["components"]["schemas"]
    used = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert used <= set(parts)
    assert "HTTPValidationError" not in used
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            for status, answer in operation["responses"].items():
                if status.startswith(("4", "5")):
                    assert list(answer["content"]) == ["application/problem+json"], (path, status)

"""Keys, their roles, origins and rates, cross-origin pages, and what is refused at the start."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_kit import T0, Setup, hints_of
from hypothesis import given
from hypothesis import strategies as st

from prefetcher.api import keys as keys_module
from prefetcher.api.keys import Access, is_loopback
from prefetcher.api.limits import TokenBuckets
from prefetcher.clock import VirtualClock
from prefetcher.config import ApiSettings
from prefetcher.errors import SettingsError

PAGE = "pk_0123456789abcdef"
GATEWAY = "sk_gateway-0123456789"
OPS = "sk_ops-0123456789abc"
ORIGIN = "https://chat.example"
KEYS: list[dict[str, Any]] = [
    {"key": PAGE, "name": "page", "roles": ["hint"], "origins": [ORIGIN], "rate_per_s": 1, "burst": 3},
    {"key": GATEWAY, "name": "gateway", "roles": ["ingest", "hint"]},
    {"key": OPS, "name": "ops", "roles": ["operator"], "origins": ["https://ops.example:8443"]},
]


def write(folder: Path, entries: Any) -> ApiSettings:
    path = folder / "keys.json"
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return ApiSettings(keys_file=path, host="0.0.0.0")


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    clock = VirtualClock(T0)
    made = Setup(clock=clock, access=Access.of(write(tmp_path, KEYS), clock))
    made.virtual = clock
    made.report()
    with made:
        yield made


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in more.items()}}


def test_every_route_asks_for_a_key_but_for_health(setup: Setup) -> None:
    open_to_all = {"/healthz", "/readyz", "/metrics"}
    for path, methods in setup.http.get("/openapi.json").json()["paths"].items():
        for method in methods:
            body = {"/v1/hints": b"[]"}.get(path, b"{}") if method == "post" else None
            answer = setup.http.request(method, path.replace("{model}", "m0"), content=body)
            if path in open_to_all:
                assert answer.status_code == 200
            elif path in ("/v1/hints",):
                assert answer.status_code == 400, "the body is read first: it may hold the key"
            else:
                assert answer.status_code == 401, path
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("headers", [{}, bearer("sk_wrong-0123456789"), {"Authorization": f"Basic {OPS}"}, {"X-Api-Key": OPS[:-1]}])
def test_a_wrong_or_missing_key(setup: Setup, headers: dict[str, str]) -> None:
    refused = setup.http.post("/v1/hints", json={"model": "m0"}, headers=headers)
    assert refused.status_code == 401
    assert OPS not in refused.text
    assert setup.posts("not_allowed") == 1
    assert setup.http.post("/v1/off", headers=headers).status_code == 401
    assert hints_of(setup.streams) == []


def test_roles(setup: Setup) -> None:
    assert setup.http.post("/v1/requests", json={"model": "m0"}, headers=bearer(GATEWAY)).status_code == 202
    assert setup.http.post("/v1/requests", json={"model": "m0"}, headers={"X-Api-Key": OPS}).status_code == 403
    assert setup.http.post("/v1/off", headers={"X-Api-Key": OPS}).status_code == 200
    assert setup.http.post("/v1/on", headers=bearer(GATEWAY)).status_code == 403
    assert setup.http.get("/v1/residency", headers=bearer(GATEWAY)).status_code == 200
    assert setup.http.get("/v1/residency", headers=bearer(PAGE)).status_code == 403
    assert setup.http.post("/v1/hints", json={"model": "m0"}, headers=bearer(OPS)).status_code == 403


def test_the_key_is_the_source_and_its_ids_are_its_own(setup: Setup) -> None:
    for key in (PAGE, GATEWAY):
        body = {"model": "m0", "hint_id": "h", "source": "somebody else"}
        assert setup.http.post("/v1/hints", json=body, headers=bearer(key)).json()["hints"][0]["id"] == "h"
    assert [(hint.source, hint.hint_id) for hint in hints_of(setup.streams)] == [("page", "page/h"), ("gateway", "gateway/h")]


def test_a_publishable_key_in_the_body(setup: Setup) -> None:
    """As `navigator.sendBeacon` does it: text/plain, from a page, without a preflight."""
    headers = {"Origin": ORIGIN, "Content-Type": "text/plain;charset=UTF-8"}
    taken = setup.http.post("/v1/hints", content=json.dumps([{"model": "m0", "key": PAGE}, {"model": "m0"}]), headers=headers)
    assert taken.status_code == 202
    assert taken.headers["access-control-allow-origin"] == ORIGIN
    assert all(PAGE.encode() not in message.hint_id.encode() for message in hints_of(setup.streams))
    for key in (GATEWAY, "sk_wrong-0123456789"):
        assert setup.http.post("/v1/hints", json={"model": "m0", "key": key}).status_code == 401
    two = [{"model": "m0", "key": PAGE}, {"model": "m0", "key": GATEWAY}]
    assert setup.http.post("/v1/hints", json=two).status_code == 400
    assert len(hints_of(setup.streams)) == 2


def test_a_key_in_an_address(setup: Setup) -> None:
    refused = setup.http.post(f"/v1/hints?key={PAGE}", json={"model": "m0"}, headers=bearer(PAGE))
    assert refused.status_code == 400
    assert "logs" in refused.json()["detail"]
    assert setup.http.post(f"/v1/off?key={OPS}").status_code == 401


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://chat.example", "https://chat.example:444", "null", "https://ops.example:8443"]
)
def test_an_origin_that_is_not_the_keys(setup: Setup, origin: str) -> None:
    refused = setup.http.post("/v1/hints", json={"model": "m0"}, headers=bearer(PAGE, Origin=origin))
    assert refused.status_code == 403
    assert hints_of(setup.streams) == []


def test_preflights(setup: Setup) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,x-api-key"}
    answer = setup.http.options("/v1/hints", headers={"Origin": ORIGIN, **asked})
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "X-Api-Key" in answer.headers["access-control-allow-headers"]
    assert "POST" in answer.headers["access-control-allow-methods"]
    refused = setup.http.options("/v1/hints", headers={"Origin": "https://evil.example", **asked})
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers
    assert "Origin" in refused.headers["vary"]


def test_a_page_may_read_why_it_was_refused(setup: Setup) -> None:
    for body in ({"model": ""}, {"model": "x" * 200_000}):
        refused = setup.http.post("/v1/hints", json=body, headers=bearer(PAGE, Origin=ORIGIN))
        assert refused.status_code in (400, 413)
        assert refused.headers["access-control-allow-origin"] == ORIGIN
    assert "access-control-allow-origin" not in setup.http.get("/healthz", headers={"Origin": "https://evil.example"}).headers


def test_a_keys_rate(setup: Setup) -> None:
    def post(count: int) -> Any:
        return setup.http.post("/v1/hints", json=[{"model": "m0"}] * count, headers=bearer(PAGE))

    assert post(2).status_code == 202
    refused = post(2)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert post(1).status_code == 202
    setup.virtual.advance(3.0)
    assert post(50).status_code == 202, "a list that is longer than a full bucket empties it"
    assert post(1).status_code == 429
    assert setup.http.post("/v1/hints", json={"model": "m0"}, headers=bearer(GATEWAY)).status_code == 202


def test_without_keys_only_near_pages_may_ask() -> None:
    with Setup() as setup:
        setup.report()
        for origin in ("http://localhost:3000", "http://127.0.0.1:8371", "http://[::1]:3000"):
            assert setup.http.post("/v1/hints", json={"model": "m0"}, headers={"Origin": origin}).status_code == 202
            assert setup.http.post("/v1/on", headers={"Origin": origin}).status_code == 200
        for origin in ("https://evil.example", "null", "http://localhost.evil.example", "http://testserver", "http://10.0.0.7", "http://["):
            assert setup.http.post("/v1/hints", json={"model": "m0"}, headers={"Origin": origin}).status_code == 403
            assert setup.http.post("/v1/off", headers={"Origin": origin}).status_code == 403
        assert setup.node.on
        for host, status in (("10.0.0.7:8371", 202), ("10.0.0.7", 403), ("evil.example:8371", 403)):
            headers = {"Origin": f"http://{host.split(':')[0]}:8371", "Host": host}
            assert setup.http.post("/v1/hints", json={"model": "m0"}, headers=headers).status_code == status, host


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8371", 200),
        ("[::1]:8371", 200),
        ("localhost", 200),
        ("LOCALHOST.:8371", 200),
        ("10.0.0.7:8371", 200),
        (socket.gethostname(), 200),
        ("rebind.evil:8371", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("[::1", 403),
        ("user@rebind.evil", 403),
    ],
)
def test_without_keys_a_name_that_leads_here_is_no_name_of_ours(host: str, status: int) -> None:
    clock = VirtualClock(T0)
    with Setup(clock=clock, access=Access.of(ApiSettings(), clock)) as setup:
        setup.report()
        for path in ("/v1/status", "/v1/residency", "/metrics", "/openapi.json"):
            assert setup.http.get(path, headers={"Host": host}).status_code == status, path
        refused = setup.http.get("/v1/status", headers={"Host": "rebind.evil"})
        assert refused.headers["content-type"] == "application/problem+json"


def test_an_endpoint_that_is_open_or_has_keys_has_any_name(setup: Setup) -> None:
    assert setup.http.get("/v1/status", headers=bearer(OPS, Host="prefetch.example")).status_code == 200
    clock = VirtualClock(T0)
    with Setup(clock=clock, access=Access.of(ApiSettings(open=True), clock)) as opened:
        opened.report()
        assert opened.http.get("/v1/status", headers={"Host": "prefetch.example"}).status_code == 200


# --- at the start ---


@pytest.mark.parametrize(
    ("host", "is_open", "fine"),
    [
        ("127.0.0.1", False, True),
        ("127.9.9.9", False, True),
        ("::1", False, True),
        ("localhost", False, True),
        ("0.0.0.0", False, False),
        ("::", False, False),
        ("192.168.1.7", False, False),
        ("gpu-7.example", False, False),
        ("0.0.0.0", True, True),
    ],
)
def test_nobody_is_open_to_others_by_accident(host: str, is_open: bool, fine: bool) -> None:
    settings = ApiSettings(host=host, open=is_open)
    if fine:
        assert not Access.of(settings, VirtualClock()).has_keys
        return
    with pytest.raises(SettingsError, match="PREFETCHER_API__KEYS_FILE"):
        Access.of(settings, VirtualClock())
    assert not is_loopback(host)


def test_prefetcher_up_does_not_start_open_to_others(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    command = [
        sys.executable,
        "-m",
        "prefetcher",
        "up",
        "--models",
        "models",
        "--state-dir",
        "st",
        "--host-bytes",
        "1MB",
        "--host",
        "0.0.0.0",
    ]
    done = subprocess.run([*command, "--port", "0"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: 0.0.0.0 is an address that others reach")
    assert not (tmp_path / "st").exists()


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ("{", "no list of keys"),
        ({}, "no list of keys"),
        ([], "names none"),
        ([{"key": "short", "name": "a", "roles": ["hint"]}], "fewer than 16"),
        ([KEYS[0] | {"roles": []}], "no roles"),
        ([KEYS[0] | {"roles": ["king"]}], "no list of keys"),
        ([KEYS[0] | {"name": ""}], "name"),
        ([KEYS[0], KEYS[1] | {"name": "page"}], "another key's"),
        ([KEYS[0], KEYS[0] | {"name": "b"}], "twice"),
        ([KEYS[0] | {"origins": ["chat.example"]}], "no origin"),
        ([KEYS[0] | {"origins": ["https://chat.example/"]}], "no origin"),
        ([KEYS[0] | {"rate_per_s": 0}], "positive"),
        ([KEYS[0] | {"surprise": 1}], "no list of keys"),
    ],
)
def test_a_file_of_keys_that_is_wrong(tmp_path: Path, entries: Any, why: str) -> None:
    with pytest.raises(SettingsError, match=why) as caught:
        Access.of(write(tmp_path, entries), VirtualClock())
    assert PAGE not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_keys_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="can't be read"):
        Access.of(ApiSettings(keys_file=tmp_path / "none.json"), VirtualClock())


def test_keys_are_kept_as_digests_only(tmp_path: Path) -> None:
    kept = repr(keys_module.read_keys(write(tmp_path, KEYS).keys_file or tmp_path))
    assert not any(entry["key"] in kept for entry in KEYS)
    assert all(entry["name"] in kept for entry in KEYS)


# --- buckets ---


@given(
    st.floats(0.01, 100.0),
    st.floats(1.0, 50.0),
    st.lists(st.tuples(st.floats(0.0, 10.0), st.integers(1, 20)), max_size=50),
)
def test_no_bucket_gives_more_than_it_got(rate_per_s: float, burst: float, asked: list[tuple[float, int]]) -> None:
    clock = VirtualClock()
    buckets = TokenBuckets(clock)
    given_out = 0.0
    for pause_s, count in asked:
        clock.advance(pause_s)
        wait_s = buckets.take("a", count, rate_per_s, burst)
        if wait_s == 0.0:
            given_out += min(count, burst)
        else:
            clock.advance(wait_s)
            assert buckets.take("a", count, rate_per_s, burst) == 0.0
            given_out += min(count, burst)
        assert given_out <= burst + clock.steady_s() * rate_per_s + 1e-6


def test_the_bucket_that_was_used_longest_ago_is_forgotten() -> None:
    buckets = TokenBuckets(VirtualClock(), most=2)
    for name in ("a", "b", "a", "c"):
        buckets.take(name, 1, 1.0, 2)
    assert len(buckets) == 2
    assert buckets.take("a", 1, 1.0, 2) > 0.0
    assert buckets.take("b", 2, 1.0, 2) == 0.0

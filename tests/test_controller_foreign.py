"""Rows of gateways by a field map, one record at a time: what is read, and what is refused with which word."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetcher.controller.foreign import mapped_requests
from prefetcher.core.types import RequestSeen
from prefetcher.errors import SettingsError
from prefetcher.wire import RequestMessage, encode

T = 1_767_225_600.25


def read(fields: str, **record: Any) -> RequestSeen:
    return mapped_requests(fields)(json.dumps(record).encode())


def test_a_shipped_map_reads_a_gateways_record() -> None:
    row = read("litellm", request_id="r1", startTime=T, model_group="llama", model="azure/llama-3", end_user="u", spend=0.1)
    assert row == RequestSeen(T, "llama", user="u", request_id="r1")  # type: ignore[arg-type]


def test_fields_may_lie_deep_and_names_may_be_numbers() -> None:
    row = read("ts=at,model=request.model,user=who.id,node=host", at=T, request={"model": "m"}, who={"id": 17}, host="gpu-7", count=3)
    assert (row.model, row.user, row.node, row.count) == ("m", "17", "gpu-7", 3)


@pytest.mark.parametrize(
    "time",
    [T, T * 1e3, T * 1e6, T * 1e9, "2026-01-01T00:00:00.250Z", "2026-01-01T00:00:00.250", "2026-01-01T01:00:00.250+01:00"],
)
def test_a_time_has_whatever_unit_fits_its_size(time: float | str) -> None:
    assert read("ts=t", t=time, model="m").ts == pytest.approx(T, abs=1e-5)


def test_what_our_own_endpoint_writes_into_that_topic_is_read_too() -> None:
    own = encode(RequestMessage(T, "m", user="hash", node="one", request_id="x"))
    assert mapped_requests("litellm")(own) == RequestSeen(T, "m", user="hash", node="one", request_id="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"{", "not_json"),
        (b"\xff\xfe", "not_json"),
        (b"[" * 100_000, "not_json"),
        (b"[1]", "bad_field"),
        (b'"m"', "bad_field"),
        (b'{"t": 1767225600}', "bad_field"),
        (b'{"t": 1767225600, "model": 7}', "bad_field"),
        (b'{"t": 1767225600, "model": ""}', "empty_name"),
        (b'{"t": 1767225600, "model": "m", "count": 1.5}', "bad_field"),
        (b'{"t": 1767225600, "model": "m", "count": true}', "bad_field"),
        (b'{"t": 1767225600, "model": "m", "count": 0}', "bad_count"),
        (b'{"t": "soon", "model": "m"}', "bad_time"),
        (b'{"t": true, "model": "m"}', "bad_time"),
        (b'{"t": -5, "model": "m"}', "bad_time"),
        (b'{"t": null, "model": "m"}', "bad_time"),
        (b'{"model": "m"}', "bad_time"),
        (b'{"t": 1e400, "model": "m"}', "not_json"),
    ],
)
def test_what_is_no_request_is_refused_with_a_word(record: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}: "):
        mapped_requests("ts=t")(record)


def test_a_map_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(SettingsError):
        mapped_requests("litelm")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["t", "ts", "model", "count", "user", "a.b"]), inner),
        max_leaves=12,
    )
)
def test_whatever_comes_is_a_row_or_a_reason(record: Any) -> None:
    reads = mapped_requests("ts=t,user=user.id")
    try:
        row = reads(json.dumps(record).encode())
    except ValueError:
        return
    assert row.model
    assert row.count >= 1

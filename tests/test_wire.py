"""Messages of the streams: every field is documented, versions are read as promised, and what is wrong has a reason."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import prefetcher
from prefetcher import wire
from prefetcher.core.types import ModelName, ModelVersion, NodeName, RequestSeen

PAGE = (Path(prefetcher.__file__).parent / "docs" / "messages.md").read_text()
TYPES = {
    "string": str,
    "number": float,
    "integer": int,
    "string or null": str | None,
    "object or null": dict[str, Any] | None,
}


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("Request", wire.RequestMessage),
        ("Hint", wire.HintMessage),
        ("Outcome", wire.OutcomeMessage),
        ("Dead letter", wire.DeadLetter),
    ],
)
def test_the_page_lists_every_field_with_type_and_default(title: str, kind: type[msgspec.Struct]) -> None:
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|", section, re.MULTILINE)
    fields = msgspec.structs.fields(kind)
    assert [name for name, _, _ in listed] == [field.name for field in fields]
    for (_, type_name, default), field in zip(listed, fields, strict=True):
        assert field.type == TYPES[type_name.strip()], field.name
        if field.required:
            assert default.strip() == "required", field.name
        else:
            assert json.loads(default.strip().strip("`")) == field.default, field.name


def test_the_examples_of_the_page_are_messages() -> None:
    request, hint = re.findall(r"^`(\{.*\})`$", PAGE, re.MULTILINE)
    assert wire.decode_request(request.encode()).user == "u-17"
    assert wire.decode_hint(hint.encode()).ttl_s == 120.0


@given(
    st.floats(1e9, 4e9),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=120),
    st.integers(1, 10**9),
    st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=100),
)
def test_a_request_comes_back_as_it_was(ts: float, model: str, count: int, user: str | None) -> None:
    row = RequestSeen(ts, ModelName(model), count, user, NodeName("n"), ModelVersion("v"), "id")
    value = wire.encode(wire.RequestMessage.of(row))
    assert b"\n" not in value
    assert wire.read_request(value) == row


@given(st.binary(max_size=200))
def test_anything_else_has_a_reason(value: bytes) -> None:
    for decode in (wire.decode_request, wire.decode_hint, wire.decode_outcome):
        with pytest.raises(ValueError, match=r"^[a-z_]+: "):
            decode(value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"v": 2}, "too_new"),
        ({"model": ""}, "empty_name"),
        ({"model": "ü" * 300}, "long_name"),
        ({"ts": 12.0}, "bad_time"),
        ({"ts": "yesterday"}, "bad_field"),
        ({"count": 0}, "bad_count"),
        ({"count": True}, "bad_field"),
        ({"ts": None}, "bad_field"),
    ],
)
def test_what_is_wrong_with_a_request(change: dict[str, Any], reason: str) -> None:
    message = {"ts": 1.7e9, "model": "m"} | change
    with pytest.raises(ValueError, match=f"^{reason}: "):
        wire.decode_request(json.dumps(message).encode())


def test_older_and_newer_messages_are_read() -> None:
    assert wire.decode_request(b'{"ts": 1.7e9, "model": "m"}').v == 1
    assert wire.decode_request(b'{"ts": 1.7e9, "model": "m", "v": 1, "colour": "blue"}').model == "m"


def test_a_dead_letter_holds_the_bytes() -> None:
    raw = bytes(range(256))
    letter = wire.DeadLetter("t", 0, 5, "not_json", "…", base64.b64encode(raw).decode(), len(raw), 1.7e9)
    assert msgspec.json.decode(wire.encode(letter), type=wire.DeadLetter).raw() == raw

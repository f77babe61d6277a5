"""Settings, and that the reference pages name every setting, option, metric and route."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.main
from hypothesis import given
from hypothesis import strategies as st

import prefetcher
from prefetcher.cli import app
from prefetcher.config import load_settings, parse_bytes, setting_names
from prefetcher.errors import SettingsError

DOCS = Path(prefetcher.__file__).parent / "docs"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8GB", 8 * 10**9), ("8GiB", 8 * 2**30), ("8e9", 8 * 10**9), ("1.5 kB", 1500), ("0", 0), ("2t", 2 * 10**12), (".5k", 500)],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1", "8 XB", "nan", "inf", "8GBB", "1 000", "1e400", "1e308P"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


@given(st.integers(0, 2**60))
def test_plain_numbers_of_bytes_come_back(number: int) -> None:
    if number < 2**53:
        assert parse_bytes(str(number)) == number


def test_options_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFETCHER_NODE__HOST_BYTES", "2GB")
    monkeypatch.setenv("PREFETCHER_NODE__NAME", "gpu-7")
    monkeypatch.setenv("PREFETCHER_TEST_REDIS", "not a setting of ours")
    settings = load_settings({"node": {"host_bytes": "3GB", "lock": None}})
    assert settings.node.host_bytes == 3 * 10**9
    assert settings.node.name == "gpu-7"
    assert settings.node.lock == "auto"


@pytest.mark.parametrize(
    ("variable", "value", "hint"),
    [
        ("PREFETCHER_NODE__HOST_BYTE", "1", "PREFETCHER_NODE__HOST_BYTES"),
        ("PREFETCHER_API__PORT", "70000", "port"),
        ("PREFETCHER_DECISION__TICK_S", "0", "tick_s"),
        ("PREFETCHER_DECISION__PRICE", "inf", "price"),
        ("PREFETCHER_DECISION__SEED", str(2**63), "seed"),
        ("PREFETCHER_CLOCK__ORIGIN_S", "nan", "origin_s"),
        ("PREFETCHER_CLOCK__SPEED", "inf", "speed"),
        ("PREFETCHER_NODE__LOCK", "maybe", "lock"),
        ("PREFETCHER_NODE__NAME", "a/b", "name"),
    ],
)
def test_unknown_or_out_of_range(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, hint: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=hint) as caught:
        load_settings()
    assert "\n" not in str(caught.value)


def test_every_setting_is_in_the_reference() -> None:
    page = (DOCS / "settings.md").read_text()
    assert [name for name in setting_names() if f"`{name}`" not in page] == []


def test_every_command_and_option_is_in_the_reference() -> None:
    page = (DOCS / "cli.md").read_text()
    missing = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        start = page.find(f"## prefetcher {name}")
        section = page[start : page.find("\n## ", start + 1) if page.find("\n## ", start + 1) > 0 else None]
        missing += [] if start >= 0 else [name]
        missing += [
            f"{name} {option.opts[0]}"
            for option in command.params
            if option.param_type_name == "option" and option.name != "help" and f"`{option.opts[0]}`" not in section
        ]
    assert missing == []

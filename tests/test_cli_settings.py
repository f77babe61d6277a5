"""Options of `up` that are settings: each sets its setting, and help and reference name its default."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import prefetcher
from prefetcher import cli
from prefetcher.cli_settings import OF_REPLAY, OF_UP, default_in_words, overrides_of
from prefetcher.config import load_settings
from prefetcher.core.value import DEFAULT_PRICE_S_PER_GB_H

PAGE = (Path(prefetcher.__file__).parent / "docs" / "cli.md").read_text()


def option_of(name: str) -> str:
    return f"--{name.rstrip('_').replace('_', '-')}"


def help_of(command: str) -> str:
    done = CliRunner().invoke(cli.app, [command, "--help"])
    assert done.exit_code == 0
    return " ".join(done.output.split())


def test_every_option_of_up_is_in_the_table() -> None:
    assert set(inspect.signature(cli.up).parameters) == set(OF_UP) | {"config"}


def test_options_reach_their_settings() -> None:
    given = {**dict.fromkeys(OF_UP), "observe": False, "host_bytes": "3GB", "tick_s": 7.0, "log_level": "debug", "config": None}
    settings = load_settings(overrides_of(given))
    assert (settings.node.host_bytes, settings.decision.tick_s, settings.log.level) == (3 * 10**9, 7.0, "debug")
    assert settings.decision.observe is False
    assert load_settings(overrides_of({**given, "observe": True})).decision.observe is True


@pytest.mark.parametrize(("command", "settings"), [("up", OF_UP), ("replay", OF_REPLAY)])
def test_help_and_reference_name_the_defaults_of_settings(command: str, settings: dict[str, tuple[str, str]]) -> None:
    start = PAGE.index(f"## prefetcher {command}")
    section = PAGE[start : PAGE.index("\n## ", start + 1)]
    shown = help_of(command)
    for name, setting in settings.items():
        default = default_in_words(*setting)
        cell = f" `{default}` " if default else "  "
        assert f"| `{option_of(name)}` |{cell}|" in section
        own = re.search(rf"{option_of(name)} .*?(?= --\w)", shown)
        assert own is not None
        assert own[0].endswith(f"[default: {default}]") if default else "default:" not in own[0]


@pytest.mark.parametrize(("role", "port"), [("ingest", 8372), ("controller", 8373), ("api", 8371), ("scheduler", 8374), ("agent", 8375)])
def test_help_of_a_role_names_its_port(role: str, port: int) -> None:
    shown = help_of(role)
    assert f"takes a free one. [default: {port}]" in shown
    assert "[default: 127.0.0.1]" in shown


def test_defaults_can_be_given_as_they_are_written() -> None:
    plain = load_settings()
    for option, (group, name) in OF_UP.items():
        default = default_in_words(group, name)
        if default:
            again = load_settings({group: {name: default}})
            assert getattr(getattr(again, group), name) == getattr(getattr(plain, group), name), option


def test_a_replay_counts_with_the_price_of_nodes() -> None:
    assert default_in_words(*OF_REPLAY["price"]) == f"{DEFAULT_PRICE_S_PER_GB_H:g}"

"""`prefetcher config check`: what would keep a role from starting is said, all of it, and no secret is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from prefetcher import cli
from prefetcher.config import load_settings
from prefetcher.config_check import problems_of
from prefetcher.errors import SettingsError

KEYS = [{"key": "sk_0123456789abcdef", "name": "ops", "roles": ["operator"]}]


@pytest.fixture
def fine(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Settings with which nothing is wrong."""
    (tmp_path / "models").mkdir()
    node = {"models_dir": tmp_path / "models", "host_bytes": "1MB", "lock": "off"}
    return {"node": node, "state": {"dir": tmp_path / "not" / "yet"}}


def problems(fine: dict[str, dict[str, Any]], **more: dict[str, Any]) -> list[str]:
    return problems_of(load_settings({group: fine.get(group, {}) | more.get(group, {}) for group in {**fine, **more}}))


def test_nothing_is_wrong(fine: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    assert problems(fine) == []
    assert not (tmp_path / "not").exists()
    (tmp_path / "keys.json").write_text(json.dumps(KEYS))
    assert problems(fine, api={"keys_file": tmp_path / "keys.json", "host": "0.0.0.0"}) == []
    assert problems(fine, stream={"map": "litellm,node=api_base", "tz": "Europe/Berlin"}, kafka={"map": "envoy"}) == []


@pytest.mark.parametrize(
    ("group", "name", "value", "said"),
    [
        ("api", "keys_file", "none.json", "none.json can't be read"),
        ("api", "keys_file", "empty.json", "no list of keys"),
        ("api", "host", "0.0.0.0", "PREFETCHER_API__KEYS_FILE"),
        ("api", "host", "no-such-host.invalid", "PREFETCHER_API__HOST is 'no-such-host.invalid'"),
        ("api", "host", "192.0.2.1", "where this machine can't listen"),
        ("api", "host", f"{'a' * 64}.localhost", "PREFETCHER_API__HOST"),
        ("api", "host", "é" * 70, "it is no name"),
        ("seasonal", "tz", "Mars/Base", "'Mars/Base' is no time zone"),
        ("seasonal", "country", "XX", "'XX' is no country"),
        ("fit", "backend", "dask", "PREFETCHER_FIT__DASK_ADDRESS=tcp://host:8786"),
        ("kafka", "map", "nonsense", "PREFETCHER_KAFKA__MAP: no shipped field map"),
        ("stream", "map", "ts=", "PREFETCHER_STREAM__MAP: the field map names no field"),
        ("stream", "tz", "Mars/Base", "PREFETCHER_STREAM__TZ: no time zone is called 'Mars/Base'"),
        ("state", "dir", "empty.json", "empty.json is a file"),
        ("state", "dir", "empty.json/below", "empty.json is a file"),
        ("state", "url", "redis://:s3cret@127.0.0.1:1/0?password=s3cret", r"redis://***@127.0.0.1:1/0?password=*** does not answer"),
    ],
)
def test_what_is_wrong(
    fine: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, name: str, value: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.json").write_text("")
    found = problems(fine, **{group: {name: value}})
    assert any(said in problem for problem in found), found
    assert "s3cret" not in "".join(found)


def test_all_of_it_is_said(fine: dict[str, dict[str, Any]]) -> None:
    more = {
        "stream": {"map": "nonsense", "tz": "Mars/Base", "follow": "none.jsonl"},
        "kafka": {"map": "nonsense"},
        "api": {"host": "0.0.0.0"},
    }
    assert len(problems(fine, **more)) == 5


def test_values_that_cannot_be_read_are_all_named(tmp_path: Path) -> None:
    file = tmp_path / "prefetcher.toml"
    file.write_text('[node]\nlock = "maybe"\n[api]\nport = 70000\n[kafka]\npasword = "s3cret"\n')
    done = CliRunner().invoke(cli.app, ["config", "check", "--config", str(file)])
    assert isinstance(done.exception, SettingsError)
    for name in ("node.lock", "api.port", "kafka.pasword"):
        assert name in str(done.exception)
    assert "s3cret" not in str(done.exception) + done.output


def test_help_says_what_it_makes() -> None:
    said = " ".join(CliRunner().invoke(cli.app, ["config", "check", "--help"]).output.split())
    assert "makes the topics that are missing" in said

"""Settings from a file: the environment wins over it, options over both, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefetcher.config import load_settings, shown
from prefetcher.errors import SettingsError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prefetcher.toml"
    path.write_text('[node]\nname = "a"\nhost_bytes = "8GiB"\n[decision]\nprice = 0.5\n[kafka]\nbrokers = "b:9092"\npassword = "s3cret"\n')
    return path


def test_options_win_over_the_environment_and_that_over_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFETCHER_NODE__NAME", "b")
    monkeypatch.setenv("PREFETCHER_DECISION__PRICE", "0.25")
    settings = load_settings({"decision": {"price": 0.125}}, file)
    assert (settings.node.name, settings.node.host_bytes, settings.decision.price) == ("b", 8 << 30, 0.125)
    assert settings.kafka.brokers == "b:9092"
    assert settings.stream.keep_segments == 16


def test_the_environment_may_name_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFETCHER_CONFIG", str(file))
    assert load_settings().node.name == "a"


def test_passwords_are_not_shown(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFETCHER_STATE__URL", "redis://me:s3cret@host:6379/0")
    values = shown(load_settings(None, file))
    assert values["PREFETCHER_NODE__NAME"] == "a"
    assert values["PREFETCHER_STATE__URL"] == "redis://me:***@host:6379/0"
    assert "s3cret" not in "".join(values.values())
    monkeypatch.setenv("PREFETCHER_KAFKA__PARTITIONS", "none")
    with pytest.raises(SettingsError, match="partitions") as caught:
        load_settings(None, file)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[node]\nnames = 'a'\n", "node.names"),
        ("[nodes]\nname = 'a'\n", "nodes"),
        ("[node\n", "not TOML"),
        ("[node]\nhost_bytes = 'lots'\n", "host_bytes.*is not a size.*prefetcher.toml"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, hint: str) -> None:
    path = tmp_path / "prefetcher.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=hint):
        load_settings(None, path)
    with pytest.raises(SettingsError, match="can't be read"):
        load_settings(None, tmp_path / "none.toml")

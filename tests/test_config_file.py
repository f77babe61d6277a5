"""Settings from a file: the environment wins over it, options over both, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefetcher.config import load_settings, shown
from prefetcher.errors import SettingsError
from prefetcher.secrets import without_secrets


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
    assert values["PREFETCHER_STATE__URL"] == "redis://***@host:6379/0"
    assert "s3cret" not in "".join(values.values())
    monkeypatch.setenv("PREFETCHER_KAFKA__PARTITIONS", "none")
    with pytest.raises(SettingsError, match="partitions") as caught:
        load_settings(None, file)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[node]\nnames = 'a'\n", "node.names"),
        ("[nodes]\nname = 'a'\n", "nodes is not a setting; did you mean node"),
        ("node = 'a'\n", "node is a group of settings"),
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


S = "s3cret"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (f'[kafka]\npasword = "{S}"\n', "kafka.pasword is not a setting; did you mean kafka.password"),
        (f'kafka = "{S}"\n', "kafka is a group"),
        (f'[kafkaa]\npassword = "{S}"\n', "kafkaa is not a setting"),
        (f'[state]\nurll = "redis://:{S}@host"\n', "state.urll is not a setting"),
        (f'[state]\nurl = "host:{S}@x"\n', "state.url .*redis://"),
        (f'[state]\nurl = ["{S}"]\n', "state.url "),
        (f'[state]\nurl = "redis://:a/{S}@host"\n', "state.url .*%2F"),
        (f'[state]\nurl = "redis://{S}?a@host"\n', "state.url .*%3F"),
        (f'[state]\nurl = "redis://[{S}@host"\n', "state.url "),
        (f'[kafka]\nbrokers = "user:{S}@host"\n', "kafka.brokers .*PREFETCHER_KAFKA__PASSWORD"),
        (f'[kafka]\npassword = {{is = "{S}"}}\n', "kafka.password "),
        (f'[node]\nname = {{password = "{S}"}}\n', "node.name "),
    ],
)
def test_no_refusal_shows_a_secret(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "prefetcher.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=named) as caught:
        load_settings(None, path)
    assert S not in str(caught.value)
    assert "Port could not" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_all_that_is_wrong_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prefetcher.toml"
    path.write_text("[node]\nlock = 'maybe'\n[api]\nport = 70000\n")
    monkeypatch.setenv("PREFETCHER_DECISION__TICK_S", "0")
    monkeypatch.setenv("PREFETCHER_NODE__NAM", "a")
    monkeypatch.setenv("PREFETCHER_NODE__GROUPP", "a")
    with pytest.raises(SettingsError) as caught:
        load_settings(None, path)
    for name in ("node.lock", "api.port", "decision.tick_s", "PREFETCHER_NODE__NAM ", "PREFETCHER_NODE__GROUPP", str(path)):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("address", "shown_as"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        (f"redis://me:{S}@host:6379/0", "redis://***@host:6379/0"),
        (f"redis://host/0?password={S}&db=1", "redis://host/0?password=***&db=***"),
        (f"redis://host/0?password=a&{S}", "redis://host/0?password=***&***"),
        (f"redis://host/0?password=a@{S}", "redis://***"),
        (f"redis://:a@{S}@host", "redis://***@host"),
        (f"redis://:a/{S}@host", "redis://***@host"),
        (f"redis://:a#{S}@host", "redis://***"),
        (f"redis://host/0#{S}", "redis://host/0#***"),
        (f"me:{S}@host", "***@host"),
        (f"redis://a://{S}@host", "***"),
        ("unix:///run/state.sock", "unix:///run/state.sock"),
    ],
)
def test_an_address_as_it_may_be_shown(address: str, shown_as: str) -> None:
    assert without_secrets(address) == shown_as


def test_a_password_with_an_at_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFETCHER_STATE__URL", f"redis://:a@{S}@host")
    assert S not in shown(load_settings())["PREFETCHER_STATE__URL"]

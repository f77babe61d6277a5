"""Settings: small groups, read once at the command line, refused when unknown or out of range.

Every setting can be given as an environment variable, `PREFETCHER_<GROUP>__<NAME>` (`PREFETCHER_NODE__HOST_BYTES=8GB`), or in a TOML file
with a table for each group, which the environment wins over; options of commands win over both. `docs/settings.md` is the reference.
Covers no command-line option that is not a setting.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, SettingsConfigDict
from pydantic_settings import PydanticBaseSettingsSource as Source

from prefetcher.errors import SettingsError, shortened
from prefetcher.secrets import problem_of_address, problem_of_place, without_secrets

__all__ = [
    "ApiSettings",
    "ArtifactSettings",
    "ClockSettings",
    "DecisionSettings",
    "FitSettings",
    "KafkaSettings",
    "LogSettings",
    "NodeSettings",
    "SeasonalSettings",
    "Settings",
    "StateSettings",
    "StoreSettings",
    "StreamSettings",
    "artifacts_place",
    "load_settings",
    "parse_bytes",
]

PREFIX = "PREFETCHER_"
#: Variables that begin with the prefix and are no settings of `prefetcher up`: what clients, tests and benchmarks read.
_NOT_SETTINGS = re.compile(r"PREFETCHER_(TEST_\w+|TRACES|SOCKET|URL|CONFIG|KEY|BENCH_\w+|DEMO_\w+)$")
_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    prefix + suffix: int(base**power)
    for base, suffix in ((1000, "B"), (1024, "IB"), (1000, ""))
    for power, prefix in enumerate("KMGTP", start=1)
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*([A-Za-z]*)\s*$")


def parse_bytes(text: str | int | float) -> int:
    """A number of bytes from `8GB` (10⁹), `8GiB` (2³⁰), `8e9` or a plain number; K, M, G, T and P, any case.

    Raises:
        ValueError: it is no size, is negative, or is not finite.
    """
    found = _SIZE.match(str(text))
    if found is None or found.group(2).upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size: write a number of bytes, or one with a unit, as 8GB, 8GiB or 8e9")
    size = float(found.group(1)) * _UNITS[found.group(2).upper()]
    if not math.isfinite(size):
        raise ValueError(f"{text!r} is not a size: no machine has as much")
    return round(size)


#: Names, also mistyped ones, of what is no message's business; brokers may have been given with a password, as in an address.
_SECRET_NAME = re.compile(r"pass|pwd|secret|token|key|url|broker|username|address|artifacts\.path", re.IGNORECASE)
#: Settings whose values may be addresses: shown without what may be a password.
_ADDRESSES = ("state.url", "artifacts.path", "store.url")
_STATE_SCHEMES = ("redis://", "rediss://", "unix://")


def _state_address(url: str) -> str:
    problem = problem_of_address(url) if url.startswith(_STATE_SCHEMES) else "it begins with none of redis://, rediss:// and unix://"
    if problem:
        raise ValueError(f"this is no address of a state server: {problem}; write redis://host:port/0")
    return url


def _artifact_place(place: str) -> str:
    if problem := problem_of_place(place):
        raise ValueError(problem)
    return place


def _no_password(brokers: str) -> str:
    if "@" in brokers:
        raise ValueError(
            "an address of a broker is host:9092, without an @; name and password are PREFETCHER_KAFKA__USERNAME and "
            "PREFETCHER_KAFKA__PASSWORD"
        )
    return brokers


def _dask_address(address: str) -> str:
    if not re.fullmatch(r"(tcp|tls|ucx|wss?)://[^\s@]+", address):
        raise ValueError("an address of a Dask scheduler is tcp://host:8786, or tls, ucx, ws or wss, without a name or password")
    return address


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
DaskAddress = Annotated[str, AfterValidator(_dask_address)]
StateAddress = Annotated[str, AfterValidator(_state_address)]
Brokers = Annotated[str, AfterValidator(_no_password)]
ArtifactPlace = Annotated[str, AfterValidator(_artifact_place)]


class _Group(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class NodeSettings(_Group):
    """This node: its weights, its memory, its link."""

    name: str = Field(
        default="node-0",
        min_length=1,
        max_length=128,
        pattern=r"^[\w.-]+$",
        description="the node's name in plans and logs",
    )
    group: str = Field(default="", max_length=128, pattern=r"^[\w.-]*$", description="the group of nodes that it is switched with")
    models_dir: Path = Field(default=Path("models-store"), description="the folder of models, one folder of safetensors files each")
    host_bytes: Bytes = Field(default=8_000_000_000, gt=0, description="host memory for weights")
    reserve_bytes: Bytes = Field(default=0, ge=0, description="host memory that prefetches never enter: only demand may")
    host_dir: Path | None = Field(default=None, description="a tmpfs folder for the host tier; without it one is chosen")
    paths_dir: Path | None = Field(default=None, description="a folder in which every model gets a path, for engines that read files")
    lock: Literal["auto", "require", "off"] = Field(default="auto", description="lock the host tier in memory")
    link_bytes_per_s: Bytes = Field(default=3_500_000_000, gt=0, description="disk to host memory, before anything was measured")
    socket: Path | None = Field(default=None, description="where programs ask for leases; without it, the client's own default")
    load_threads: int = Field(default=8, ge=1, le=64, description="threads that read one model")
    prefetch_bytes_per_s: Bytes | None = Field(
        default=None, gt=0, description="the most that prefetches read from the disk; without it, as fast as it gives"
    )
    parts: bool = Field(default=True, description="of what makes room, keep what the room does not need, so that less is read again")


class DecisionSettings(_Group):
    """What is worth it, how often that is asked, and whether anything is done about it."""

    price: float = Field(default=0.002, ge=0, description="seconds of waiting that one GB held for one hour is worth")
    tick_s: float = Field(default=60.0, gt=0, description="seconds between plans")
    hold_s: float = Field(default=600.0, gt=0, description="how long a prefetch may stay unused; six times that while it is still likely")
    observe: bool = Field(default=False, description="decide and log, load nothing")
    control_ratio: float = Field(
        default=0.05,
        ge=0,
        le=0.5,
        description="share of node time in the control group, which gets no prefetch, once there are nodes enough; 0 for none",
    )
    tenants_file: Path | None = Field(
        default=None, description="JSON file of tenants: which models are whose, and what they may hold of a node beyond demand"
    )
    batch_ratio: float = Field(default=0.5, gt=0, le=1, description="share of a node's memory that batch schedules may take at a time")
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of the control group and of fits")


class ApiSettings(_Group):
    """The HTTP endpoint."""

    host: str = Field(default="127.0.0.1", description="address to bind")
    port: int = Field(default=8371, ge=0, le=65535, description="port to bind; 0 takes a free one")
    body_limit_bytes: Bytes = Field(default=4_000_000, gt=0, description="largest request body")
    keys_file: Path | None = Field(default=None, description="JSON file of keys; without it nobody is asked for one")
    open: bool = Field(default=False, description="without a file of keys, bind to an address that others reach, and answer to any name")
    session_rate_per_s: float = Field(default=10.0, gt=0, description="hints a second from one session, in the long run")
    session_burst: float = Field(default=60.0, ge=1, description="hints from one session at once")
    hints_in_flight: int = Field(default=256, ge=1, le=10_000, description="posts of hints that may wait for the log; more are refused")


class StateSettings(_Group):
    """Where what was learned is kept."""

    dir: Path = Field(default=Path("~/.local/state/prefetcher"), description="folder of the embedded server and of the request log")
    url: StateAddress | None = Field(
        default=None, description="a Redis or Valkey server instead of the embedded one, as redis://host:port/0"
    )
    users_keep_s: float = Field(default=2_592_000.0, gt=0, description="how long users are kept (hashed) after their last request")
    history_keep_s: float = Field(default=34_560_000.0, gt=0, description="how long hours of request counts are kept")
    nodes_keep_s: float = Field(
        default=604_800.0, ge=3_600, description="how long a node that says nothing is remembered; its figures stay in reports"
    )
    snapshot_s: float = Field(default=30.0, gt=0, description="seconds between snapshots of what was learned")


class ReportSettings(_Group):
    """What reports measure by, and what is done about memory that earns too little."""

    slo_under_s: float = Field(default=2.0, gt=0, description="how long a first request may wait: the objective of reports")
    slo_target_ratio: float = Field(default=0.99, gt=0, lt=1, description="share of first requests that are to be served within that")
    idle_pin_after_s: float = Field(
        default=86_400.0, gt=0, description="how long the index of pinned weights may be under the price before that is reported"
    )
    release_idle_pins: bool = Field(default=False, description="take such pins away; a pin may also allow it by itself")


class ArtifactSettings(_Group):
    """Where what was fitted is kept, in versions."""

    path: ArtifactPlace | None = Field(
        default=None,
        description="a folder, or s3://bucket/folder, gs://… or az://account/container/folder; without it, `artifacts` in the state folder",
    )
    keep: int = Field(default=7, ge=1, le=1_000, description="versions kept of each")


class StoreSettings(_Group):
    """Where models are fetched from that are not in the models folder, and how."""

    url: ArtifactPlace | None = Field(
        default=None, description="a folder, or s3://bucket/folder, gs://… or az://account/container/folder; without it, nothing is fetched"
    )
    disk_bytes: Bytes | None = Field(
        default=None, gt=0, description="the most that models take on disk, people's own included; without it, what the file system has"
    )
    disk_reserve_bytes: Bytes = Field(default=1_000_000_000, ge=0, description="what fetches leave free on the file system")
    bytes_per_s: Bytes = Field(default=1_000_000_000, gt=0, description="store to disk, before anything was measured")
    prefetch_bytes_per_s: Bytes | None = Field(
        default=None, gt=0, description="the most that prefetches take of the store; without it, as fast as it gives"
    )
    streams: int = Field(default=8, ge=1, le=64, description="requests to the store at a time, of 16 MiB each")
    pulls_per_model: int = Field(default=2, ge=1, le=1_024, description="nodes that fetch one model at a time")
    pulls: int = Field(default=16, ge=1, le=1_024, description="nodes that fetch at a time")
    deadline_s: float = Field(default=60.0, gt=0, le=100, description="how long a fetch goes on while not a byte comes")
    look_s: float = Field(default=30.0, gt=0, description="seconds between looks at what the store has")


class SeasonalSettings(_Group):
    """Daily and weekly cycles of the busiest models."""

    models: int = Field(default=300, ge=0, le=100_000, description="how many models are fitted, the busiest; 0 fits none")
    tz: str = Field(default="UTC", description="the time zone whose wall clock cycles follow, as Europe/Berlin")
    country: str | None = Field(default=None, pattern=r"^[A-Z]{2}$", description="the country whose holidays and weekends count, as DE")


class FitSettings(_Group):
    """Where many fits run."""

    backend: Literal["inline", "loky", "dask"] = Field(
        default="inline", description="one after another in the process, in processes of this machine, or on a Dask cluster"
    )
    workers: int = Field(default=0, ge=0, le=1_024, description="processes of loky; 0 takes as many as there are cores")
    dask_address: DaskAddress | None = Field(default=None, description="the scheduler of the Dask cluster, as tcp://host:8786")


class StreamSettings(_Group):
    """Where requests come from, beside the HTTP endpoint."""

    follow: Path | None = Field(default=None, description="a JSONL or CSV log to follow")
    map: str | None = Field(
        default=None,
        description="field map of the followed log: a shipped map's name, or ts=startTime,model=request.model",
    )
    tz: str = Field(default="UTC", description="time zone of times without one")
    segment_bytes: Bytes = Field(default=64_000_000, ge=1_000, description="size of one file of the request log")
    keep_segments: int = Field(default=16, ge=1, description="read files of the request log that are kept")


class KafkaSettings(_Group):
    """The broker; without `brokers`, streams are a folder of this process."""

    brokers: Brokers | None = Field(default=None, description="addresses of the brokers, as host:9092,host:9092")
    prefix: str = Field(
        default="prefetch", min_length=1, max_length=100, pattern=r"^[\w.-]+$", description="first part of topics and groups"
    )
    requests_topic: str | None = Field(
        default=None, description="a topic of requests that a gateway writes already, instead of PREFIX.requests"
    )
    map: str | None = Field(default=None, description="field map of that topic: a shipped map's name, or ts=startTime,model=request.model")
    partitions: int = Field(default=6, ge=1, le=1_000, description="partitions of topics that are made")
    replicas: int = Field(default=1, ge=1, le=10, description="replicas of topics that are made")
    retention_s: float = Field(default=604_800.0, gt=0, description="how long topics that are made keep records")
    compression: Literal["none", "gzip", "lz4", "zstd"] = Field(default="lz4", description="compression of what is written")
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        default="PLAINTEXT", description="how brokers are spoken to"
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = Field(
        default=None, description="how this program says who it is"
    )
    username: str | None = Field(default=None, description="its name there")
    password: SecretStr | None = Field(default=None, description="its password there")
    ca_file: Path | None = Field(default=None, description="certificates that brokers' own are checked against")
    cert_file: Path | None = Field(default=None, description="this program's certificate")
    key_file: Path | None = Field(default=None, description="the key of that certificate")


class LogSettings(_Group):
    """Logs."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least severe level that is written")
    format: Literal["auto", "human", "json"] = Field(default="auto", description="auto: human in a terminal, else JSON")


class ClockSettings(_Group):
    """The clock of demonstrations: a day in minutes."""

    speed: float = Field(default=1.0, gt=0, description="how many times as fast as the machine's clock")
    origin_s: float | None = Field(default=None, description="the time at the start, seconds since 1970 UTC; needed when speed is not 1")


class Settings(BaseSettings):
    """All groups."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, env_ignore_empty=True)

    node: NodeSettings = Field(default_factory=NodeSettings)
    decision: DecisionSettings = Field(default_factory=DecisionSettings)
    api: ApiSettings = Field(default_factory=ApiSettings)
    state: StateSettings = Field(default_factory=StateSettings)
    report: ReportSettings = Field(default_factory=ReportSettings)
    store: StoreSettings = StoreSettings()
    artifacts: ArtifactSettings = Field(default_factory=ArtifactSettings)
    seasonal: SeasonalSettings = Field(default_factory=SeasonalSettings)
    fit: FitSettings = Field(default_factory=FitSettings)
    stream: StreamSettings = Field(default_factory=StreamSettings)
    kafka: KafkaSettings = Field(default_factory=KafkaSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    clock: ClockSettings = Field(default_factory=ClockSettings)


def setting_names() -> dict[str, str]:
    """Every setting's variable and its description."""
    names: dict[str, str] = {}
    for group, field in Settings.model_fields.items():
        kind = field.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, BaseModel)
        for name, inner in kind.model_fields.items():
            names[f"{PREFIX}{group}__{name}".upper()] = inner.description or ""
    return names


def load_settings(overrides: Mapping[str, Mapping[str, Any]] | None = None, file: Path | None = None) -> Settings:
    """The settings from the environment, with `overrides` by group (command-line options) over them; None leaves a setting as it is.

    `file`, or else the one that `PREFETCHER_CONFIG` names, says what neither of them does.

    Raises:
        SettingsError: unknown variables or keys, values that are out of range, or a file that is not TOML; the message names all of them
            and what was expected, and no value that may be a secret.
    """
    known = setting_names()
    wrong: list[str] = []
    for variable in sorted(os.environ):
        if variable.startswith(PREFIX) and variable not in known and not _NOT_SETTINGS.match(variable):
            close = difflib.get_close_matches(variable, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else "; the reference of settings lists all"
            wrong.append(f"{variable} is not a setting{hint}")
    given = {group: {name: value for name, value in values.items() if value is not None} for group, values in (overrides or {}).items()}
    named = os.environ.get(f"{PREFIX}CONFIG")
    source = file if file is not None else Path(named) if named else None
    of_file = {} if source is None else _read_file(source)

    class FromFile(Settings):
        """Settings that also ask the file, after the environment."""

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], init_settings: Source, env_settings: Source, *others: Source, **more: Source
        ) -> tuple[Source, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, of_file)

    made: Settings | None = None
    try:
        groups: dict[str, Any] = {group: values for group, values in given.items() if values}
        made = FromFile(**groups)
    except ValidationError as exc:
        # Without a cause: pydantic's own text has every value in it.
        of_values = [_in_words(error) for error in exc.errors(include_url=False, include_context=False)]
        wrong += [*of_values[:-1], of_values[-1] + ("" if source is None else f" (the file is {source})")]
    except ValueError as exc:  # pydantic-settings: a group's variable that is not JSON
        wrong.append(str(exc))
    if made is None or wrong:
        raise SettingsError("; ".join(wrong))
    return made


def _in_words(error: Mapping[str, Any]) -> str:
    """One thing that is wrong, with its value where that is a known setting's and can't be a secret."""
    where = ".".join(str(part) for part in error["loc"])
    reason = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"{where} is not a setting{_close_to(where)}"
    value = error["input"]
    if "." not in where:
        return f"{where} is a group of settings, not a value; write a table, as [{where}], with a line for each setting"
    if _SECRET_NAME.search(where) or not isinstance(value, str | int | float):
        return f"{where} (its value is not shown): {reason}"
    return f"{where} = {shortened(repr(value))}: {reason}"


def _close_to(where: str) -> str:
    known = [name.removeprefix(PREFIX).lower().replace("__", ".", 1) for name in setting_names()]
    close = difflib.get_close_matches(where, [*known, *Settings.model_fields], n=1)
    return f"; did you mean {close[0]}?" if close else "; the reference of settings lists all"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as exc:
        raise SettingsError(f"{path} can't be read ({exc.strerror}); name another file with --config") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise SettingsError(f"{path} is not TOML: {exc}; write a table for each group, as [node] host_bytes = '8GB'") from exc


def artifacts_place(settings: Settings) -> str:
    """The folder or address of artifacts: as it is set, else a folder in the state folder."""
    if settings.artifacts.path is not None:
        return settings.artifacts.path if "://" in settings.artifacts.path else str(Path(settings.artifacts.path).expanduser().absolute())
    return str(settings.state.dir.expanduser().absolute() / "artifacts")


def shown(settings: Settings) -> dict[str, str]:
    """Every setting's value by variable, as it may be shown: passwords are hidden."""
    values: dict[str, str] = {}
    for group in Settings.model_fields:
        inner = getattr(settings, group)
        for name in type(inner).model_fields:
            value = getattr(inner, name)
            text = "" if value is None else str(value)
            values[f"{PREFIX}{group}__{name}".upper()] = without_secrets(text) if f"{group}.{name}" in _ADDRESSES else text
    return values

"""`prefetcher config check`: the settings as they take effect, and what is wrong with them on this machine and network.

Covers no setting that can't be read: `config.load_settings` refuses those, all at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from prefetcher.agent.hostfolder import check_lock
from prefetcher.api.keys import Access
from prefetcher.app import kafka_options
from prefetcher.clock import SystemClock
from prefetcher.config import Settings, artifacts_place, shown
from prefetcher.errors import PrefetcherError, UsageError
from prefetcher.fitted import backend_of
from prefetcher.replay.maps import parse_map
from prefetcher.replay.times import TimeReader
from prefetcher.tenants import read_quotas
from prefetcher_connectors.artifact_store import ArtifactStore
from prefetcher_connectors.kafka import KafkaStreams
from prefetcher_connectors.redis import RedisState
from prefetcher_models.fitting import problem_of_backend
from prefetcher_models.seasonal_calendar import Calendar

__all__ = ["of_values", "problems_of", "table_of"]


def table_of(settings: Settings) -> str:
    """A line for each setting: its variable, its value, and whether that is not the default."""
    untouched = {name: kind.get_default(call_default_factory=True) for name, kind in Settings.model_fields.items()}
    defaults = shown(Settings.model_construct(**untouched))
    values = shown(settings)
    width = max(map(len, values))
    return "\n".join(f"{name:<{width}}  {value}{'' if value == defaults[name] else '  (set)'}" for name, value in values.items())


def problems_of(settings: Settings) -> list[str]:
    """What would keep some role from starting or working with these settings, one line each.

    Asks the state server and the broker, and makes the topics that are missing there, as any role would.
    """
    found = [*_of_this_machine(settings), *of_values(settings)]
    found += [_refusal("", lambda: _ask_state(settings)), _refusal("", lambda: _ask_broker(settings))]
    return [problem for problem in found if problem]


def of_values(settings: Settings) -> list[str]:
    """What is wrong with values, whatever machine this is, and with the endpoint; nobody is asked and nothing is made."""
    found = [
        *_of_the_endpoint(settings),
        _refusal("PREFETCHER_STREAM__MAP: ", lambda: parse_map(settings.stream.map)),
        _refusal("PREFETCHER_STREAM__TZ: ", lambda: TimeReader(settings.stream.tz)),
        _refusal("PREFETCHER_SEASONAL: ", lambda: Calendar(settings.seasonal.tz, settings.seasonal.country or "")),
        _of_fits(settings),
        _refusal("PREFETCHER_KAFKA__MAP: ", lambda: parse_map(settings.kafka.map)),
        _refusal("", lambda: read_quotas(settings.decision.tenants_file)),
    ]
    if settings.clock.speed != 1.0 and settings.clock.origin_s is None:
        found.append("PREFETCHER_CLOCK__SPEED needs PREFETCHER_CLOCK__ORIGIN_S")
    if (settings.state.url is None) != (settings.kafka.brokers is None):
        found.append("roles that run apart need both PREFETCHER_STATE__URL and PREFETCHER_KAFKA__BROKERS; only one is set")
    return [problem for problem in found if problem]


def _of_fits(settings: Settings) -> str:
    """'' or why fits can't run where they should."""
    fit = settings.fit
    problem = problem_of_backend(backend_of(settings))
    return f"PREFETCHER_FIT__BACKEND is {fit.backend}: {problem}" if problem else ""


def _refusal(where: str, ask: Callable[[], object]) -> str:
    """'' or why it is refused."""
    try:
        ask()
    except PrefetcherError as exc:
        return f"{where}{exc}"
    return ""


def _of_this_machine(settings: Settings) -> list[str]:
    found = []
    folder = settings.node.models_dir.expanduser()
    if not folder.is_dir():
        found.append(f"no folder of models at {folder} (PREFETCHER_NODE__MODELS_DIR); agents need one")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if settings.node.host_bytes > memory:
        found.append(f"PREFETCHER_NODE__HOST_BYTES is {settings.node.host_bytes}, this machine has {memory} bytes of memory")
    if settings.stream.follow is not None and not settings.stream.follow.exists():
        found.append(f"nothing to follow at {settings.stream.follow} (PREFETCHER_STREAM__FOLLOW)")
    found += [_of_folder(settings.state.dir.expanduser().absolute(), "PREFETCHER_STATE__DIR"), _refusal("", lambda: _lock(settings))]
    return [*found, _refusal("PREFETCHER_ARTIFACTS__PATH: ", lambda: _ask_artifacts(settings))]


def _of_folder(folder: Path, variable: str) -> str:
    """'' or why nothing can be kept there; it is made when a role starts."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        return f"{there} is a file, so {folder} can't be a folder ({variable}); name another one"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} can't be written to ({variable} is {folder}); name another folder"
    return ""


def _ask_artifacts(settings: Settings) -> None:
    """Looks what is there; a folder that is none yet is made with the first artifact."""
    place = artifacts_place(settings)
    if "://" not in place and (problem := _of_folder(Path(place), "PREFETCHER_ARTIFACTS__PATH")):
        raise UsageError(problem)
    ArtifactStore(place).names()


def _lock(settings: Settings) -> None:
    check_lock(settings.node.lock, settings.node.host_bytes)


def _of_the_endpoint(settings: Settings) -> list[str]:
    host = settings.api.host
    found = [_refusal("", lambda: Access.of(settings.api, SystemClock()))]
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
            tried.bind((host, 0))
    except socket.gaierror as exc:
        found.append(f"PREFETCHER_API__HOST is {host!r}, which no name server knows ({exc.strerror}); name an address of this machine")
    except (OSError, TypeError) as exc:  # TypeError: no name can be encoded so
        reason = (exc.strerror if isinstance(exc, OSError) else None) or "it is no name"
        found.append(f"PREFETCHER_API__HOST is {host!r}, where this machine can't listen ({reason}); name an address of it")
    return found


def _ask_state(settings: Settings) -> None:
    if settings.state.url is not None:
        RedisState(settings.state.url).close()


def _ask_broker(settings: Settings) -> None:
    if settings.kafka.brokers is not None:
        streams = KafkaStreams(kafka_options(settings))
        try:
            streams.prepare()
        finally:
            streams.close()

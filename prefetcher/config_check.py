"""`prefetcher config check`: the settings as they take effect, and what is wrong with them on this machine and network."""

from __future__ import annotations

import os

from prefetcher.agent.hostfolder import check_lock
from prefetcher.app import kafka_options
from prefetcher.config import Settings, shown
from prefetcher.errors import PrefetcherError
from prefetcher_connectors.kafka import KafkaStreams
from prefetcher_connectors.redis import RedisState

__all__ = ["problems_of", "table_of"]


def table_of(settings: Settings) -> str:
    """A line for each setting: its variable, its value, and whether that is not the default."""
    untouched = {name: kind.get_default(call_default_factory=True) for name, kind in Settings.model_fields.items()}
    defaults = shown(Settings.model_construct(**untouched))
    values = shown(settings)
    width = max(map(len, values))
    return "\n".join(f"{name:<{width}}  {value}{'' if value == defaults[name] else '  (set)'}" for name, value in values.items())


def problems_of(settings: Settings) -> list[str]:
    """What would keep some role from starting or working with these settings, one line each. Asks the state server and the broker."""
    found = []
    folder = settings.node.models_dir.expanduser()
    if not folder.is_dir():
        found.append(f"no folder of models at {folder} (PREFETCHER_NODE__MODELS_DIR); agents need one")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if settings.node.host_bytes > memory:
        found.append(f"PREFETCHER_NODE__HOST_BYTES is {settings.node.host_bytes}, this machine has {memory} bytes of memory")
    if settings.clock.speed != 1.0 and settings.clock.origin_s is None:
        found.append("PREFETCHER_CLOCK__SPEED needs PREFETCHER_CLOCK__ORIGIN_S")
    if settings.stream.follow is not None and not settings.stream.follow.exists():
        found.append(f"nothing to follow at {settings.stream.follow} (PREFETCHER_STREAM__FOLLOW)")
    if (settings.state.url is None) != (settings.kafka.brokers is None):
        found.append("roles that run apart need both PREFETCHER_STATE__URL and PREFETCHER_KAFKA__BROKERS; only one is set")
    try:
        check_lock(settings.node.lock, settings.node.host_bytes)
    except PrefetcherError as exc:
        found.append(str(exc))
    for ask in (_ask_state, _ask_broker):
        try:
            ask(settings)
        except PrefetcherError as exc:
            found.append(str(exc))
    return found


def _ask_state(settings: Settings) -> None:
    if settings.state.url is not None:
        RedisState(settings.state.url).close()


def _ask_broker(settings: Settings) -> None:
    """Topics that are missing are made, as any role would."""
    if settings.kafka.brokers is not None:
        streams = KafkaStreams(kafka_options(settings))
        try:
            streams.prepare()
        finally:
            streams.close()

"""The broker with its topics, the state server with its limits, and how far this machine's clock is from that server's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis.exceptions import RedisError

from prefetcher.app import kafka_options
from prefetcher.clock import SystemClock
from prefetcher.config import Settings
from prefetcher.doctor.finding import Finding, fail, ok, warn
from prefetcher.errors import PrefetcherError, UnavailableError
from prefetcher.ingest.tables import connect
from prefetcher.secrets import without_secrets
from prefetcher.wire import AHEAD_S
from prefetcher_connectors.kafka import KafkaStreams
from prefetcher_connectors.redis import RedisState, server_path

__all__ = ["check_broker", "check_clock", "check_state_server", "of_server", "of_skew", "of_topics"]

#: Nothing newer is used.
_LEAST_VERSION = (7, 0)
#: Leases are renewed by whoever holds them, and forecasts stand for a minute or two: so far clocks may differ unnoticed.
_SKEW_S = 1.0
_FULL = 0.8
_KEEP = "CONFIG SET maxmemory-policy noeviction"


def check_broker(settings: Settings) -> Finding:
    """Whether a broker lets us in, and has the topics."""
    if settings.kafka.brokers is None:
        return ok("none is set: streams are a folder of `prefetcher up`")
    streams = KafkaStreams(kafka_options(settings))
    try:
        return of_topics(settings, streams.look(), streams)
    except UnavailableError as exc:
        return fail(str(exc), "start it, or correct PREFETCHER_KAFKA__BROKERS")
    finally:
        streams.close()


def of_topics(settings: Settings, topics: Mapping[str, tuple[int, int] | None], streams: KafkaStreams) -> Finding:
    """What is to be said of `topics`: partitions and replicas of each, None for one that is missing."""
    found = f"{settings.kafka.brokers} answers"
    missing = [name for name, topic in topics.items() if topic is None]
    if missing:
        more = "" if len(missing) == 1 else f" and {len(missing) - 1} more"
        todo = f"roles make them at their start where they may; else {streams.how_to_make(missing[0])}"
        return warn(f"{found}; topic {missing[0]}{more} is missing", todo)
    there = {name: topic for name, topic in topics.items() if topic is not None}
    fewest = min(there, key=lambda name: there[name][0])
    if there[fewest][0] < settings.kafka.partitions:
        todo = f"kafka-topics.sh --alter --topic {fewest} --partitions {settings.kafka.partitions}, or lower PREFETCHER_KAFKA__PARTITIONS"
        return warn(f"{found}; topic {fewest} has {there[fewest][0]} partitions, {settings.kafka.partitions} are set", todo)
    frail = min(there, key=lambda name: there[name][1])
    if there[frail][1] < settings.kafka.replicas:
        todo = "have the broker's administrator reassign it, or lower PREFETCHER_KAFKA__REPLICAS"
        return warn(f"{found}; topic {frail} has {there[frail][1]} replicas, {settings.kafka.replicas} are set", todo)
    return ok(f"{found}; {len(there)} topics with {there[fewest][0]} partitions or more")


def check_state_server(settings: Settings) -> Finding:
    """Whether the state server answers, is new enough, and keeps what it is given."""
    url = settings.state.url
    if url is None:
        try:
            return ok(f"none is set: `prefetcher up` runs its own, {server_path()}")
        except UnavailableError as exc:
            return fail("none is set, and there is none to run", str(exc))
    try:
        RedisState(url).close()
        with connect(url) as client:
            return of_server(without_secrets(url), client.info())
    except (PrefetcherError, RedisError) as exc:
        return fail(str(exc), "start it, or correct PREFETCHER_STATE__URL")


def of_server(name: str, told: Mapping[str, Any]) -> Finding:
    """What is to be said of a server that tells `told` of itself (INFO)."""
    # Valkey says there which Redis it is like, and its own version beside it.
    version = str(told.get("redis_version", "0"))
    kind = f"Valkey {told['valkey_version']}" if "valkey_version" in told else f"Redis {version}"
    limit, used = int(told.get("maxmemory", 0)), int(told.get("used_memory", 0))
    policy = str(told.get("maxmemory_policy", "noeviction"))
    found = f"{kind} at {name}, {used / 1e6:.0f} MB" + (f" of {limit / 1e6:.0f} MB" if limit else "")
    if tuple(int(part) for part in version.split(".")[:2]) < _LEAST_VERSION:
        return fail(found, "take Redis 7 or Valkey 7.2, or newer")
    if limit and policy.startswith("allkeys"):
        return fail(f"{found}, which drops what was learned when it is full ({policy})", _KEEP)
    if limit and policy != "noeviction":
        return warn(f"{found}, which drops leases and reports when it is full ({policy})", _KEEP)
    if limit and used > _FULL * limit:
        return warn(f"{found}, which is nearly full", "raise its maxmemory, or lower PREFETCHER_STATE__USERS_KEEP_S")
    if not int(told.get("aof_enabled", 0)):
        todo = "CONFIG SET appendonly yes: else what was learned and switched since its last snapshot goes with a restart"
        return warn(f"{found}, which keeps nothing at once", todo)
    return ok(found)


def check_clock(settings: Settings) -> Finding:
    """This machine's clock against the state server's. Brokers don't tell the time."""
    if settings.state.url is None:
        return ok("nobody to compare it with: no state server is set")
    clock = SystemClock()
    try:
        with connect(settings.state.url) as client:
            client.ping()
            before_s = clock.now_s()
            seconds, micros = client.time()
            after_s = clock.now_s()
    except RedisError as exc:
        return fail(f"the state server does not tell the time ({exc})", "start it, or correct PREFETCHER_STATE__URL")
    return of_skew(seconds + micros / 1e6 - 0.5 * (before_s + after_s), after_s - before_s)


def of_skew(skew_s: float, way_s: float) -> Finding:
    """What is to be said of a server's clock that is `skew_s` ahead, asked over a way of `way_s`."""
    found = f"{abs(skew_s):.2f} s {'behind' if skew_s > 0 else 'ahead of'} the state server's (± {way_s / 2:.2f} s)"
    todo = "run chrony or another NTP client on all machines"
    if abs(skew_s) - way_s / 2 > AHEAD_S:
        return fail(f"{found}: requests that are dated so are refused", todo)
    if abs(skew_s) - way_s / 2 > _SKEW_S:
        return warn(found, todo)
    return ok(found)

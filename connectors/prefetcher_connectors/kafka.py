"""Streams on Apache Kafka: topics made or checked, one producer (`kafka_writer`), readers (`kafka_reader`), the last mark.

Topics are `PREFIX.requests`, `PREFIX.hints`, `PREFIX.outcomes`, `PREFIX.dead-letter`; requests may come from a topic that a gateway writes
already. Consumer groups are `PREFIX.NAME`. `docs/streams.md` says what is promised. Covers no message formats: values are bytes.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kafka.errors as errors
import structlog
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.net.compat import KafkaNetClient
from kafka.producer.transaction_manager import TransactionState

from prefetcher.clock import SystemClock
from prefetcher.errors import PrefetcherError, SettingsError, UnavailableError
from prefetcher.ports import Partition, Positions, StreamReader, StreamWriter, Topic
from prefetcher_connectors.kafka_reader import KafkaReader
from prefetcher_connectors.kafka_writer import MARK_HEADER, KafkaWriter

__all__ = ["KafkaOptions", "KafkaStreams"]

#: Finding the first broker. A handshake takes milliseconds, a lost SYN is sent again after one second and after two more.
_BOOTSTRAP_S = 4.0
_KNOCK_AGAIN_S = 0.1
#: An answer that takes longer does not come any more: a broker answers in milliseconds, a new leader is elected within 9 s (its default
#: `broker.session.timeout.ms`).
_REQUEST_S = 10.0
#: A record that was not acknowledged by then is given up: two requests that are not answered, and the waits between them. Who waited for
#: it was told long before; until then it may still arrive, and takes up buffer.
_DELIVERY_S = 30.0
#: From the broker's return to the next attempt to connect, at most.
_RECONNECT_S = 1.0
#: How soon partitions that were added are found.
_METADATA_S = 3.0
#: A member hears of another that came or left by the answer to a heartbeat, twice until partitions are handed over.
_HEARTBEAT_S = 1.0
#: Real waiting time of a topic that was made: the broker elects leaders in well under a second.
_MADE_S = 5.0
#: A peer that vanished without a word: probed after 10 s of silence, given up 9 s later; what was sent and not confirmed, after 10 s.
_SOCKET_OPTIONS: list[tuple[int, int, int]] = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000),
]
#: Records that `last_mark` looks at first at the end of each partition.
_MARK_WINDOW = 100

_clock = SystemClock()
_never = threading.Event()


class _Secret(str):
    """A password that the client's debug log of its settings does not show."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


@dataclass(frozen=True, slots=True)
class KafkaOptions:
    """How the brokers are reached, and the topics that are made."""

    brokers: str
    prefix: str = "prefetch"
    requests_topic: str | None = None
    partitions: int = 6
    replicas: int = 1
    retention_s: float = 604_800.0
    compression: str = "lz4"
    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    #: A shared reader that was not heard of for so long is taken to be dead: what a killed member's partitions wait for. Ten heartbeats; it
    #: outlasts a pause of the member and the election of a new leader (9 s by default), and is above the least that brokers allow (6 s).
    session_s: float = 10.0
    #: Bytes of records that may wait for their acknowledgement.
    pending_bytes: int = 32_000_000
    #: The largest record that is written; a broker refuses more than about 1 MB unless its `message.max.bytes` was raised.
    record_bytes: int = 1_048_576


def _begin_anew_after_reset(producer: KafkaProducer) -> None:
    """Has an idempotent producer ask for a new id when it dropped the old one, as it does when a record that was sent before is given up.

    The client drops the id and stays `READY`, where it asks for none: it would never send again. After an outage of 30 s that is certain.
    """
    manager = producer._transaction_manager
    reset = manager.reset_producer_id

    def reset_and_begin_anew() -> None:
        reset()
        manager._current_state = TransactionState.UNINITIALIZED

    manager.reset_producer_id = reset_and_begin_anew


class KafkaStreams:
    """The streams of one installation on a broker. Nothing is opened before it is needed.

    Raises:
        SettingsError: options that contradict each other, or a certificate that can't be read.
    """

    def __init__(self, options: KafkaOptions) -> None:
        self._options = options
        self._log = structlog.get_logger()
        self._settings = self._client_settings()

    def _client_settings(self) -> dict[str, Any]:
        given = self._options
        settings: dict[str, Any] = {
            "bootstrap_servers": [address.strip() for address in given.brokers.split(",") if address.strip()],
            "client_id": given.prefix,
            "security_protocol": given.security_protocol,
            "bootstrap_timeout_ms": int(_BOOTSTRAP_S * 1000),
            "request_timeout_ms": int(_REQUEST_S * 1000),
            "reconnect_backoff_max_ms": int(_RECONNECT_S * 1000),
            "metadata_max_age_ms": int(_METADATA_S * 1000),
            "socket_options": _SOCKET_OPTIONS,
        }
        if not settings["bootstrap_servers"]:
            raise SettingsError("no address of a broker: give PREFETCHER_KAFKA__BROKERS as host:9092,host:9092")
        if given.security_protocol.startswith("SASL"):
            if not (given.sasl_mechanism and given.username and given.password is not None):
                raise SettingsError(f"{given.security_protocol} needs a mechanism, a username and a password (PREFETCHER_KAFKA__…)")
            # At DEBUG the client logs every request and every byte that it sends, and a PLAIN password is sent as it is.
            for name in ("kafka.net.connection", "kafka.protocol.parser"):
                logging.getLogger(name).setLevel(logging.INFO)
            settings |= {
                "sasl_mechanism": given.sasl_mechanism,
                "sasl_plain_username": given.username,
                "sasl_plain_password": _Secret(given.password),
            }
        elif given.username or given.password:
            raise SettingsError(
                f"a username or password is given, but {given.security_protocol} uses none: SASL_SSL or SASL_PLAINTEXT does"
            )
        if given.security_protocol.endswith("SSL"):
            settings["ssl_context"] = self._ssl_context()
        return settings

    def _ssl_context(self) -> ssl.SSLContext:
        given = self._options
        try:
            context = ssl.create_default_context(cafile=given.ca_file)
            if given.cert_file:
                context.load_cert_chain(given.cert_file, given.key_file)
        except OSError as exc:  # SSLError is one
            files = [str(path) for path in (given.ca_file, given.cert_file, given.key_file) if path]
            raise SettingsError(f"certificates of the broker can't be used ({exc.strerror or exc}): {', '.join(files)}") from exc
        return context

    def topic_name(self, topic: Topic) -> str:
        """The topic's name at the broker."""
        if topic is Topic.REQUESTS and self._options.requests_topic:
            return self._options.requests_topic
        return f"{self._options.prefix}.{topic.value}"

    def _open(self, kind: Callable[..., Any], **settings: Any) -> Any:
        """A client of the library; one that can't reach the broker leaves no thread and no socket behind."""
        begun: list[KafkaNetClient] = []

        def connection(**configs: Any) -> KafkaNetClient:
            begun.append(KafkaNetClient(**configs))
            return begun[-1]

        try:
            return kind(**self._settings, **settings, kafka_client=connection)
        except Exception as exc:
            for client in begun:
                client.close()
            if isinstance(exc, errors.KafkaError):
                raise self._error(exc, "connecting") from exc
            if isinstance(exc, (ValueError, TypeError)):
                raise SettingsError(f"the broker's settings are refused: {exc}") from exc
            raise

    def _error(self, exc: errors.KafkaError, doing: str) -> PrefetcherError:
        brokers, user = self._options.brokers, f"user {self._options.username!r}"
        if isinstance(exc, (errors.SaslAuthenticationFailedError, errors.UnsupportedSaslMechanismError)):
            return SettingsError(f"{brokers} refuses {user} ({self._options.sasl_mechanism}): check the password, and the mechanism")
        if isinstance(exc, errors.AuthorizationError):
            return SettingsError(f"{brokers}: {doing} is not allowed to {user}: {type(exc).__name__}")
        if "CERTIFICATE_VERIFY_FAILED" in str(exc):
            return SettingsError(f"{brokers} shows a certificate that PREFETCHER_KAFKA__CA_FILE does not vouch for: {exc}")
        if isinstance(exc, errors.KafkaConfigurationError):
            return SettingsError(f"the broker's settings are refused: {exc}")
        # A busy broker may hang up on a wrong password before its refusal is sent.
        password = f", is the password of {user} right" if self._options.username is not None else ""
        return UnavailableError(
            f"no Kafka broker answers at {brokers} as {self._options.security_protocol} ({doing}: {exc}): is it running, is that its "
            f"address, does that listener speak this protocol{password}?"
        )

    def prepare(self) -> None:
        self._knock(_BOOTSTRAP_S)
        admin = self._open(KafkaAdminClient)
        try:
            missing = self._missing(admin)
            if missing:
                self._make(admin, missing)
        except errors.KafkaError as exc:
            raise self._error(exc, "looking for topics") from exc
        finally:
            admin.close()

    def look(self) -> dict[str, tuple[int, int] | None]:
        """Partitions of every topic and the fewest replicas that one of them has, None where the topic is missing. Makes nothing.

        Raises as `prepare`.
        """
        self._knock(_BOOTSTRAP_S)
        admin = self._open(KafkaAdminClient)
        try:
            missing = set(self._missing(admin))
            found: dict[str, tuple[int, int] | None] = dict.fromkeys(missing)
            for described in admin.describe_topics([name for topic in Topic if (name := self.topic_name(topic)) not in missing] or None):
                parts = described["partitions"]
                found[described["name"]] = (len(parts), min((len(part["replica_nodes"]) for part in parts), default=0))
        except errors.KafkaError as exc:
            raise self._error(exc, "looking for topics") from exc
        finally:
            admin.close()
        return {name: found.get(name) for name in map(self.topic_name, Topic)}

    def how_to_make(self, name: str) -> str:
        """The command that makes a topic as these options want it."""
        return self._command(name)

    def _is_there(self, timeout_s: float) -> bool:
        try:
            self._knock(timeout_s)
        except PrefetcherError:
            return False
        return True

    def _knock(self, timeout_s: float) -> None:
        """Returns once a broker lets us in. The client, looking for a broker, keeps to itself why it finds none."""
        give_up_s = _clock.steady_s() + timeout_s
        client = KafkaNetClient(**self._settings)
        manager = client._manager

        async def connect(node: str) -> None:
            connection = manager.get_connection(node, timeout_ms=max(50.0, (give_up_s - _clock.steady_s()) * 1000), pop_on_close=True)
            await connection
            connection.close()

        try:
            while True:
                for broker in manager.cluster.bootstrap_brokers():
                    try:
                        client._net.run(connect, broker.node_id)
                    except errors.NodeNotReadyError:  # it is too soon to try again
                        continue
                    except errors.KafkaError as exc:
                        found = self._error(exc, f"{broker.host}:{broker.port}")
                        if isinstance(found, SettingsError) or _clock.steady_s() >= give_up_s:
                            raise found from exc
                    else:
                        return
                _clock.wait(_never, _KNOCK_AGAIN_S)
        finally:
            client.close()

    def _missing(self, admin: KafkaAdminClient) -> list[str]:
        missing = []
        for described in admin.describe_topics([self.topic_name(topic) for topic in Topic]):
            problem = errors.for_code(described["error_code"])
            if problem is errors.UnknownTopicOrPartitionError:
                missing.append(described["name"])
            elif problem is errors.InvalidTopicError:
                raise SettingsError(f"{described['name']!r} is no name for a topic: letters, digits, '.', '_' and '-' only")
            elif issubclass(problem, errors.AuthorizationError):
                raise SettingsError(
                    f"{self._options.brokers}: user {self._options.username!r} may not see topic {described['name']} (it needs Describe, "
                    f"Read and Write), or it is missing: {self._command(described['name'])}"
                )
            elif problem is not errors.NoError and not issubclass(problem, errors.RetriableError):
                raise UnavailableError(f"{self._options.brokers}: topic {described['name']}: {problem.__name__}")
        return missing

    def _make(self, admin: KafkaAdminClient, names: Sequence[str]) -> None:
        given = self._options
        wanted = {
            "num_partitions": given.partitions,
            "replication_factor": given.replicas,
            "configs": {"retention.ms": str(int(given.retention_s * 1000))},
        }
        answer = admin.create_topics(dict.fromkeys(names, wanted), timeout_ms=int(_MADE_S * 1000), raise_errors=False)
        for made in answer["topics"]:
            problem = errors.for_code(made["error_code"])
            if problem is errors.NoError:
                self._log.info("topic_made", topic=made["name"], partitions=given.partitions, brokers=given.brokers)
            elif problem is not errors.TopicAlreadyExistsError:  # another process was faster
                reason = made.get("error_message") or problem.__name__
                message = f"{given.brokers}: topic {made['name']} is missing and can't be made ({reason}): {self._command(made['name'])}"
                if issubclass(problem, errors.RetriableError):
                    raise UnavailableError(message)
                raise SettingsError(message)
        admin.wait_for_topics(list(names), timeout_ms=int(_MADE_S * 1000))

    def _command(self, name: str) -> str:
        given = self._options
        return (
            f"make it with kafka-topics.sh --bootstrap-server {given.brokers.split(',')[0]} --create --topic {name} "
            f"--partitions {given.partitions} --replication-factor {given.replicas} --config retention.ms={int(given.retention_s * 1000)}"
        )

    def writer(self) -> StreamWriter:
        producer = self._open(
            KafkaProducer,
            enable_idempotence=True,
            acks="all",
            compression_type=None if self._options.compression == "none" else self._options.compression,
            linger_ms=0,
            batch_size=256_000,
            delivery_timeout_ms=int(_DELIVERY_S * 1000),
            # Only a topic that nobody has heard of makes the producer wait: what is unknown here after half a second is missing.
            max_block_ms=500,
            max_request_size=self._options.record_bytes,
            allow_auto_create_topics=False,
            metrics_enabled=False,
        )
        _begin_anew_after_reset(producer)
        # What is known now is known while the broker is away: an append waits for the broker, not for its topic's list of partitions.
        for topic in Topic:
            with contextlib.suppress(errors.KafkaTimeoutError):
                producer.partitions_for(self.topic_name(topic))
        given = self._options
        return KafkaWriter(producer, self.topic_name, self._error, self._is_there, given.brokers, given.pending_bytes, given.record_bytes)

    def _consumer(self, group: str | None, **settings: Any) -> KafkaConsumer:
        return self._open(
            KafkaConsumer,
            group_id=group,
            enable_auto_commit=False,
            # An offset that is not there is the reader's affair: it counts what is lost.
            auto_offset_reset="none",
            allow_auto_create_topics=False,
            metrics_enabled=False,
            max_partition_fetch_bytes=max(1_048_576, self._options.record_bytes),
            **settings,
        )

    def reader(
        self,
        topics: Sequence[Topic],
        name: str,
        start: Callable[[Sequence[Partition]], Positions],
        revoked: Callable[[Sequence[Partition]], None] = lambda partitions: None,
        *,
        shared: bool = False,
    ) -> StreamReader:
        from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor

        session_ms = int(self._options.session_s * 1000)
        consumer = self._consumer(
            f"{self._options.prefix}.{name}",
            partition_assignment_strategy=(CooperativeStickyAssignor,),
            session_timeout_ms=session_ms,
            heartbeat_interval_ms=min(session_ms // 3, int(_HEARTBEAT_S * 1000)),
        )
        names = {self.topic_name(topic): topic for topic in topics}
        return KafkaReader(consumer, names, self._error, self._options.brokers, start, revoked, shared=shared)

    def last_mark(self, topic: Topic) -> str | None:
        # Short waits: at the end of a partition nothing more comes.
        consumer = self._consumer(None, fetch_max_wait_ms=50)
        try:
            return _last_mark(consumer, self.topic_name(topic))
        except KeyError as exc:  # the client's answer lacks partitions that are not there
            raise UnavailableError(f"{self._options.brokers} has no {exc.args[0]} any more; start again, which makes it") from exc
        except errors.KafkaError as exc:
            raise self._error(exc, f"looking for the last mark of {self.topic_name(topic)}") from exc
        finally:
            consumer.close(autocommit=False, timeout_ms=1000)

    def close(self) -> None:
        """Writers and readers are closed by those who have them."""


def _last_mark(consumer: KafkaConsumer, topic: str) -> str | None:
    """Marked records carry rising times (`KafkaWriter`), so the newest one counts, whichever partition it is in."""
    timeout_ms = int(_REQUEST_S * 1000)
    partitions = [TopicPartition(topic, number) for number in consumer.partitions_for_topic(topic)]
    if not partitions:
        return None
    oldest, ends = consumer.beginning_offsets(partitions, timeout_ms), consumer.end_offsets(partitions, timeout_ms)
    best: tuple[int, str] | None = None
    for partition in partitions:
        window, until = _MARK_WINDOW, ends[partition]
        while until > oldest[partition]:
            since = max(oldest[partition], until - window)
            records = _records(consumer, partition, since, until)
            marks = [(record.timestamp, mark.decode()) for record in records for mark in _marks(record.headers)]
            best = max([*marks, *([best] if best else [])], default=None)
            # Times in one partition hardly run backwards: what lies before a record that is older than the best mark is older still.
            if marks or (best and records and records[0].timestamp < best[0]):
                break
            until, window = since, window * 10
    return best[1] if best else None


def _marks(headers: Iterable[tuple[str, bytes | None]]) -> list[bytes]:
    return [value for name, value in headers or () if name == MARK_HEADER and value is not None]


def _records(consumer: KafkaConsumer, partition: TopicPartition, since: int, until: int) -> list[Any]:
    records: list[Any] = []
    consumer.assign([partition])
    consumer.seek(partition, since)
    give_up_s = _clock.steady_s() + _REQUEST_S
    # The position passes offsets that hold no record.
    while (consumer.position(partition, timeout_ms=1000) or since) < until:
        found = consumer.poll(timeout_ms=500, max_records=5000).get(partition, [])
        records += [record for record in found if record.offset < until]
        if found:
            give_up_s = _clock.steady_s() + _REQUEST_S
        elif _clock.steady_s() > give_up_s:
            raise errors.KafkaTimeoutError(f"{partition} gives nothing from {since} on")
    return records

"""Builds the application from its settings and runs it: the only place that makes concrete classes.

`App` is a process with some or all roles: `prefetcher up` has them all; `ingest`, `controller`, `api`, `scheduler`, `agent` are one each.
Roles that run apart share a state server and a broker; together they need neither. Covers no threads and no HTTP (`process`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from redis.exceptions import RedisError

from prefetcher.agent.agent import Agent, AgentOptions
from prefetcher.agent.fetching import StoreOptions
from prefetcher.agent.hearing import Hearing
from prefetcher.agent.hostfolder import check_lock
from prefetcher.agent.telling import Telling
from prefetcher.api.health import make_health_endpoint
from prefetcher.api.hints import STORE_S
from prefetcher.api.service import Service
from prefetcher.batch.jobs import Means, make_jobs
from prefetcher.batch.scheduler import Scheduler
from prefetcher.clock import Clock, ScaledClock, SystemClock
from prefetcher.config import Settings
from prefetcher.controller import records
from prefetcher.controller.calling import NodeCalls, RemoteNode
from prefetcher.controller.controller import Controller, ControllerOptions
from prefetcher.controller.experiment import LOOK_S, ExperimentKeeper, ExperimentView
from prefetcher.controller.follow import Follower
from prefetcher.controller.foreign import mapped_requests
from prefetcher.controller.leadership import Leadership
from prefetcher.controller.state_version import check_version
from prefetcher.core.tuner import TunerSettings
from prefetcher.core.types import NodeName, RequestSeen
from prefetcher.dashboard.past import Past
from prefetcher.errors import BudgetError, SettingsError, TemporaryError, UnavailableError, UsageError
from prefetcher.fitted import Fitted, backend_of, seasonal_of
from prefetcher.ingest.ingest import Ingest, IngestOptions
from prefetcher.ingest.tables import TablesReader, connect, user_key
from prefetcher.ingest.users import UserHasher
from prefetcher.ports import Streams, StreamWriter, Topic
from prefetcher.process import Process, listen
from prefetcher.report.desk import ReportDesk
from prefetcher.telemetry.logs import log
from prefetcher.telemetry.memory import available_bytes
from prefetcher.telemetry.metrics import Metrics
from prefetcher.tenants import read_quotas
from prefetcher.wire import read_request, request_records
from prefetcher_connectors.kafka import KafkaOptions, KafkaStreams
from prefetcher_connectors.redis import HURRIED_S, PATIENT_S, EmbeddedServer, RedisState
from prefetcher_connectors.streams import FileStreams
from prefetcher_connectors.weights_store import weights_store_at

__all__ = ["App", "Role"]

#: A controller that has not stepped for this long hangs; a fit never runs in its thread, and planning ten thousand models takes a second.
_CONTROLLER_STALL_S = 30.0
#: Between tries to listen to calls while the store is away.
_LISTEN_AGAIN_S = 0.5


class Role(StrEnum):
    """What a process does."""

    INGEST = "ingest"
    CONTROLLER = "controller"
    API = "api"
    SCHEDULER = "scheduler"
    AGENT = "agent"


class App(Process):
    """One process with `roles`; all of them where none is named. `start`, then `wait`, then `stop`."""

    def __init__(self, settings: Settings, roles: Sequence[Role] = tuple(Role)) -> None:
        super().__init__("up" if len(roles) > 1 else roles[0].value)
        self._settings = settings
        self._roles = frozenset(roles)
        self._node = NodeName(settings.node.name)
        self._folder = settings.state.dir.expanduser().absolute()
        self.clock = clock_of(settings)
        self.metrics = Metrics()
        self.metrics.available.set_function(available_bytes)
        self._fitted = Fitted(settings, self.clock, self.metrics)
        self.address = ""
        self._mapping = None if settings.kafka.map is None else mapped_requests(settings.kafka.map)
        self._controller: Controller | None = None
        self._leadership: Leadership | None = None
        self._compiling: threading.Thread | None = None
        self._agent: Agent | None = None
        self._follower: Follower | None = None

    @property
    def learned_in(self) -> str:
        """Where what was learned stays when the process ends."""
        return str(self._folder) if self._settings.state.url is None else "the state server"

    def start(self) -> None:
        """Starts every part. Raises PrefetcherError and leaves nothing, running or half-made, when one of them can't be started."""
        is_new = not self._folder.exists()
        try:
            self._start()
        except BaseException:
            is_ours = self.has("streams")
            self.stop()
            if is_new and is_ours:
                shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _start(self) -> None:
        settings = self._settings
        if len(self._roles) == 1:
            _check_shared(settings, self._command)
        if Role.AGENT in self._roles:
            _check_machine(settings)
        access = None
        if Role.API in self._roles:
            from prefetcher.api.keys import Access

            access = Access.of(settings.api, self.clock)
        listener = listen(settings.api.host, settings.api.port)
        self.closes("listener", listener.close)
        self._streams = self._open_streams()
        self._state, self._hurried = self._open_state()
        check_version(self._state, self._state_url)
        self._calls = NodeCalls(self._state)
        self._experiment = ExperimentView(self._state)
        self._experiment.look()
        if self._roles & {Role.AGENT, Role.CONTROLLER}:
            self.run_thread("experiment", self._follow_experiment)
        self._hash_user = self._user_hasher()
        if Role.AGENT in self._roles:
            self._start_agent()
        if Role.INGEST in self._roles:
            self._start_ingest()
        if Role.CONTROLLER in self._roles:
            self._start_controller()
        if Role.SCHEDULER in self._roles:
            self._start_scheduler()
        if Role.API in self._roles:
            from prefetcher.api.endpoint import make_endpoint

            endpoint = make_endpoint(self._service(), settings.api.body_limit_bytes, access)
            self.address = self.serve(endpoint, listener)
            self.closes("events", endpoint.state.events.close)
        else:
            self.address = self.serve(make_health_endpoint(self.metrics, self._problems), listener)
        if settings.stream.follow is not None:
            self._follower = Follower(
                settings.stream.follow,
                self._streams,
                self.clock,
                self.metrics,
                settings.stream.map,
                settings.stream.tz,
            )
            self.run_thread("follow", self._follower.run)
        roles = sorted(role.value for role in self._roles)
        log().info("ready", url=self.address, roles=roles, node=self._node, observe=settings.decision.observe)

    # --- what roles share ---

    def _open_streams(self) -> Streams:
        streams = open_streams(self._settings)
        self.closes("streams", streams.close)
        streams.prepare()
        return streams

    def _open_state(self) -> tuple[RedisState, RedisState]:
        """The state store as threads of our own use it, and as those do who wait for an HTTP answer."""
        url, self._why_away = self._settings.state.url, None
        if url is None:
            server = EmbeddedServer(self._folder / "state")
            server.start()
            self.closes("state server", server.stop)
            url, self._why_away = server.url, server.why_away
            self.run_thread("state server", lambda stop: server.keep(stop, _server_restarted, _server_not_restarted))
        self._state_url = url
        state = RedisState(url, PATIENT_S, self._why_away)
        self.closes("state", state.close)
        # A server that is slow at the start has answered the patient one.
        hurried = RedisState(url, HURRIED_S, self._why_away, asks=False)
        self.closes("state", hurried.close)
        return state, hurried

    def _user_hasher(self) -> UserHasher:
        client = connect(self._state_url)
        try:
            return UserHasher(user_key(client))
        except RedisError as exc:
            raise UnavailableError(f"the state server does not answer: {exc}") from exc
        finally:
            client.close()

    def _read_request(self, value: bytes) -> RequestSeen:
        """A row as it may be learned from: without its user's name."""
        row = (self._mapping or read_request)(value)
        return row if row.user is None else replace(row, user=self._hash_user(row.user))

    # --- agent ---

    def _start_agent(self) -> None:
        if Role.CONTROLLER not in self._roles:
            from prefetcher.compiling import warm_kernels

            # The first row that comes would wait for it, and the agent's loop with it.
            warm_kernels()
        store = self._settings.store.url
        opened = None if store is None else weights_store_at(store)
        if opened is not None:
            self.closes("store", opened.close)
        self._agent = agent = Agent(_agent_options(self._settings, self._folder), self._state, self.clock, self.metrics, opened)
        self.closes("agent", agent.close)
        agent.on_died = self.part_died
        writer = self._streams.writer()
        agent.tell = Telling(writer, self._node, self.clock).tell
        unannounced: queue.SimpleQueue[RequestSeen] = queue.SimpleQueue()
        agent.on_unannounced = unannounced.put
        agent.arm_of = lambda now_s: self._experiment.arm(self._node, now_s)
        agent.start()
        self.run_thread("opens", lambda stop: _announce(unannounced, writer, stop))
        self.run_thread("hearing", Hearing(self._state, self._node, agent).run)

    def _follow_experiment(self, stop: threading.Event) -> None:
        """Every process draws the same, by the record that the leading controller writes."""
        while not stop.wait(LOOK_S):
            with contextlib.suppress(TemporaryError):
                self._experiment.look()

    # --- ingest ---

    def _start_ingest(self) -> None:
        client = connect(self._state_url)
        self.closes("tables", client.close)
        options = IngestOptions(history=self._folder / "history", topic=self._settings.kafka.requests_topic or Topic.REQUESTS.value)
        ingest = Ingest(self._streams, client, self.clock, self.metrics, options, self._mapping)
        self.run_thread("ingest", ingest.run)

    # --- scheduler ---

    def _start_scheduler(self) -> None:
        client = connect(self._state_url)
        self.closes("tables", client.close)
        keep = self._settings.state
        means = Means(
            state=self._state,
            tables=TablesReader(client),
            clock=self.clock,
            history=self._folder / "history",
            ledger=self._folder / "ledger",
            forecasts=self._folder / "forecasts",
            new_learner=self._fitted.new_learner,
            save_hazard=self._fitted.save_hazard,
            load_seasons=self._fitted.load_seasons,
            save_seasons=self._fitted.save_seasons,
            seasonal=seasonal_of(self._settings),
            backend=backend_of(self._settings),
            users_keep_s=keep.users_keep_s,
            history_keep_s=keep.history_keep_s,
            nodes_keep_s=keep.nodes_keep_s,
            tuner=TunerSettings(price_s_per_gb_h=self._settings.decision.price),
            seed=self._settings.decision.seed,
        )
        # By the machine's own clock: in the minutes of a demonstration no day passes.
        clock = self.clock if self.clock.speed == 1.0 else SystemClock()
        self.run_thread("scheduler", Scheduler(self._state, clock, self.metrics, self._holder(), make_jobs(means)).run)

    def _holder(self) -> str:
        """This process among those that do the same: a node's own name where it has one, so that it takes over from itself at once."""
        return self._node if Role.AGENT in self._roles else f"{os.uname().nodename}/{os.getpid()}"

    # --- controller ---

    def _start_controller(self) -> None:
        self._quotas = read_quotas(self._settings.decision.tenants_file)
        self._leadership = leadership = Leadership(self._state, self.clock, self._holder())
        self.run_thread("controller", lambda stop: self._compile_and_lead(leadership, stop))
        self.run_thread("calls", self._hear_calls)

    def _compile_and_lead(self, leadership: Leadership, stop: threading.Event) -> None:
        """The controller, once its kernels are compiled: on the first start of an installation that takes half a minute."""
        from prefetcher.compiling import compile_kernels, compiled, warm_kernels

        if not compiled():
            log().info("compiling", then="plans come when it is done; requests and opens are served meanwhile")
            self._compiling = threading.Thread(target=compile_kernels, kwargs={"stop": stop}, name="compile", daemon=True)
            self._compiling.start()
            while self._compiling.is_alive() and not stop.is_set():
                self._compiling.join(0.1)
            self._compiling = None
        warm_kernels()
        leadership.run(stop, self._lead, lambda: not self._controller_stands())

    def _lead(self, fence: int, over: threading.Event) -> None:
        """One term, with a controller of its own: what it knows is what the last leader saved."""
        decision, agent = self._settings.decision, self._agent
        self._controller = controller = Controller(
            self._streams,
            self._state,
            self._fitted.new_learner(self._fitted.saved_fit(self._state)),
            self.clock,
            self.metrics,
            ControllerOptions(
                () if agent is None else (self._node,),
                decision.price,
                decision.tick_s,
                decision.hold_s,
                self._settings.state.snapshot_s,
                decision.batch_ratio,
                idle_pin_after_s=self._settings.report.idle_pin_after_s,
                release_idle_pins=self._settings.report.release_idle_pins,
                quotas=self._quotas,
            ),
            arm_of=self._experiment.arm,
            on_rows=self._rows_came,
            on_plan=self._plan_written,
            read_request=self._read_request,
            experiment=ExperimentKeeper(
                self._state, ExperimentView(self._state), self.metrics, decision.control_ratio, decision.seed, self.clock.speed
            ),
        )
        try:
            controller.start(fence)
            controller.run(over)
        except TemporaryError as exc:
            # Only a start raises it: a controller that runs waits until what is away is back.
            log().warning("term_not_begun", reason=str(exc), then="trying again")
            over.wait(1.0)
        finally:
            # Whoever stands by is not asked whether it moves.
            self._controller = None
        if controller.deposed:
            log().error("controller_deposed", fence=fence, then="standing by")

    def _rows_came(self, node: NodeName, rows: Sequence[RequestSeen], index: Mapping[str, float]) -> None:
        if self._agent is not None and node == self._node:
            self._agent.requested(rows, index)
        else:
            self._calls.rows(node, rows, index)

    def _plan_written(self, node: NodeName) -> None:
        if self._agent is not None and node == self._node:
            self._agent.plan_written()
        else:
            self._calls.plan_written(node)

    def _hear_calls(self, stop: threading.Event) -> None:
        """Endpoints elsewhere say that there is a reason to plan."""
        while not stop.is_set():
            self._state.listen([records.CALLS], lambda channel, reason: self._wake(reason.decode("utf-8", "replace")), stop)
            stop.wait(_LISTEN_AGAIN_S)

    def _wake(self, reason: str) -> None:
        controller = self._controller
        if controller is not None:
            controller.wake(reason)

    def _controller_stands(self) -> str:
        """'' or how long the controller has not moved."""
        controller = self._controller
        if controller is None:
            return ""
        silent_s = self.clock.steady_s() - controller.alive_s
        if _CONTROLLER_STALL_S * self.clock.speed < silent_s < float("inf"):
            return f"the controller has not moved for {silent_s:.0f} s"
        return ""

    # --- endpoint ---

    def _service(self) -> Service:
        quick = RedisState(self._state_url, STORE_S, self._why_away, asks=False)
        self.closes("quick state", quick.close)
        service = Service(
            None if self._agent is None else self._node,
            self._streams.writer(),
            self._hurried,
            self._agent,
            self.clock,
            self.metrics,
            self._wake_any,
            lambda: "; ".join(self._controller_problems()),
            settings=self._settings.api,
            reach=lambda node: RemoteNode(node, self._hurried, self.clock),
            quick_state=quick,
            user_hash=self._hash_user,
            group=self._settings.node.group,
        )
        service.check_log = lambda: "" if self._follower is None else self._follower.unreadable
        service.note = lambda: "" if self._follower is None else self._follower.problem
        service.reports = ReportDesk(self._state, self.clock, self._settings.report, self._folder / "ledger")
        tables = connect(self._state_url)
        self.closes("tables", tables.close)
        service.past = Past(TablesReader(tables), self._folder / "history", self._folder / "forecasts", self._fitted.load_seasons)
        self.closes("hints", service.close)
        self.run_thread("by hand", service.by_hand.run)
        self.metrics.prefetching.set(1.0 if records.strictest([self._state.read(records.SWITCH)]).on else 0.0)
        return service

    def _wake_any(self, reason: str) -> None:
        """Whoever leads is to plan for `reason`."""
        if self._leadership is not None and self._leadership.leads:
            self._wake(reason)
        elif reason:
            with contextlib.suppress(TemporaryError):
                self._hurried.publish(records.CALLS, reason.encode())

    def _controller_problems(self) -> list[str]:
        if Role.CONTROLLER not in self._roles:
            return []
        if self._compiling is not None:
            return ["compiling for this machine, once: plans come in about half a minute"]
        stands = self._controller_stands()
        return [stands] if stands else []

    def _problems(self) -> list[str]:
        """What keeps this process from doing its work, by the real paths of its parts."""
        found = self._controller_problems()
        if self._agent is not None:
            found.append(self._agent.check())
        try:
            self._hurried.read(records.SWITCH)
        except TemporaryError as exc:
            found.append(str(exc))
        return [problem for problem in found if problem]


def open_streams(settings: Settings) -> Streams:
    """The streams that the settings name; nothing is opened or asked yet."""
    if settings.kafka.brokers is not None:
        return KafkaStreams(kafka_options(settings))
    folder = settings.state.dir.expanduser().absolute()
    return FileStreams(folder, settings.stream.segment_bytes, settings.stream.keep_segments)


@contextlib.contextmanager
def told_streams(settings: Settings) -> Iterator[Streams]:
    """The streams, ready and closed afterwards, for who only reads what agents told.

    Raises:
        UsageError: there is no broker, and the folder has no outcomes. None is made.
    """
    folder = settings.state.dir.expanduser().absolute()
    if settings.kafka.brokers is None and not (folder / Topic.OUTCOMES.value).is_dir():
        raise UsageError(
            f"{folder} has no outcomes; name the state folder of `prefetcher up` with --state-dir, or a broker in the settings"
        )
    with contextlib.closing(open_streams(settings)) as streams:
        streams.prepare()
        yield streams


def forget_user(settings: Settings, user: str) -> bool:
    """Deletes what the tables hold of a user; whether there was anything.

    Raises:
        UnavailableError: the state server does not answer.
    """
    with contextlib.ExitStack() as closing:
        url = settings.state.url
        if url is None:
            server = EmbeddedServer(settings.state.dir.expanduser().absolute() / "state")
            url = server.url
            if not server.answers():
                server.start()
                closing.callback(server.stop)
        client = connect(url)
        closing.callback(client.close)
        try:
            return TablesReader(client).forget(user)
        except RedisError as exc:
            raise UnavailableError(f"the state server does not answer: {exc}; start it, or try again later") from exc


def kafka_options(settings: Settings) -> KafkaOptions:
    """The broker's part of the settings as the connector takes it."""
    given = settings.kafka
    assert given.brokers is not None
    return KafkaOptions(
        brokers=given.brokers,
        prefix=given.prefix,
        requests_topic=given.requests_topic,
        partitions=given.partitions,
        replicas=given.replicas,
        retention_s=given.retention_s,
        compression=given.compression,
        security_protocol=given.security_protocol,
        sasl_mechanism=given.sasl_mechanism,
        username=given.username,
        password=None if given.password is None else given.password.get_secret_value(),
        ca_file=given.ca_file,
        cert_file=given.cert_file,
        key_file=given.key_file,
    )


def _check_shared(settings: Settings, command: str) -> None:
    needed = {"PREFETCHER_STATE__URL": settings.state.url, "PREFETCHER_KAFKA__BROKERS": settings.kafka.brokers}
    missing = [name for name, value in needed.items() if not value]
    if missing:
        raise SettingsError(
            f"`prefetcher {command}` shares a state server and a broker with the other roles: set {' and '.join(missing)}; "
            "`prefetcher up` runs all roles in one process without them"
        )


def _server_restarted(reason: str) -> None:
    log().warning("state_server_restarted", reason=reason, then="all goes on with what was written")


def _server_not_restarted(reason: str) -> None:
    log().error("state_server_not_restarted", reason=reason, then="it is tried again every few seconds")


def _announce(rows: queue.SimpleQueue[RequestSeen], writer: StreamWriter, stop: threading.Event) -> None:
    """Programs opened weights and nobody posted a row: such an open is one, and is learned from like the others."""
    while not stop.is_set():
        with contextlib.suppress(queue.Empty):
            row = rows.get(timeout=0.2)
            try:
                writer.append(Topic.REQUESTS, request_records([row]))
            except TemporaryError as exc:
                log().warning("open_not_learned", model=row.model, reason=str(exc))


def clock_of(settings: Settings) -> Clock:
    """The clock that the settings name. Raises SettingsError."""
    if settings.clock.speed == 1.0 and settings.clock.origin_s is None:
        return SystemClock()
    if settings.clock.origin_s is None:
        raise SettingsError("clock.speed needs clock.origin_s: the time at the start, in seconds since 1970 UTC")
    return ScaledClock(settings.clock.speed, settings.clock.origin_s)


def _make_folder(folder: Path) -> None:
    """The models folder of a node that fetches what it serves."""
    try:
        folder.mkdir(parents=True)
    except OSError as exc:
        raise SettingsError(f"{folder} can't be made ({exc.strerror}); name another folder with --models") from exc


def _check_machine(settings: Settings) -> None:
    folder = settings.node.models_dir.expanduser()
    if not folder.exists() and settings.store.url is not None:
        _make_folder(folder)
    if not folder.is_dir():
        raise SettingsError(f"no folder of models at {folder}; name one with --models, one folder of safetensors files for each model")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if settings.node.host_bytes > memory:
        raise BudgetError(f"--host-bytes {settings.node.host_bytes} is more than this machine's memory, {memory} bytes; give it less")
    if settings.node.reserve_bytes >= settings.node.host_bytes:
        raise BudgetError(
            f"PREFETCHER_NODE__RESERVE_BYTES {settings.node.reserve_bytes} leaves nothing of --host-bytes {settings.node.host_bytes} for "
            "prefetches; give it less"
        )
    check_lock(settings.node.lock, settings.node.host_bytes)


def _agent_options(settings: Settings, folder: Path) -> AgentOptions:
    node = settings.node
    return AgentOptions(
        node=NodeName(node.name),
        models_dir=node.models_dir.expanduser(),
        host_bytes=node.host_bytes,
        host_dir=node.host_dir,
        paths_dir=node.paths_dir,
        lock=node.lock,
        link_bytes_per_s=node.link_bytes_per_s,
        socket=node.socket,
        state_dir=folder,
        observe=settings.decision.observe,
        hold_s=settings.decision.hold_s,
        price_s_per_gb_h=settings.decision.price,
        threads=node.load_threads,
        prefetch_bytes_per_s=node.prefetch_bytes_per_s,
        parts=node.parts,
        seed=settings.decision.seed,
        group=node.group,
        reserve_bytes=node.reserve_bytes,
        store=_store_options(settings),
    )


def _store_options(settings: Settings) -> StoreOptions:
    given = settings.store
    return StoreOptions(
        disk_bytes=given.disk_bytes,
        reserve_bytes=given.disk_reserve_bytes,
        bytes_per_s=given.bytes_per_s,
        prefetch_bytes_per_s=given.prefetch_bytes_per_s,
        streams=given.streams,
        pulls_per_model=given.pulls_per_model,
        pulls=given.pulls,
        deadline_s=given.deadline_s,
        look_s=given.look_s,
    )

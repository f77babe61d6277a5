"""Builds the application from its settings and runs it: the only place that makes concrete classes.

`App` is `prefetcher up`: state server, request log, controller, agent and HTTP endpoint in one process, each in threads of its own. What is
started is stopped in the opposite order, whatever happens between.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from prefetcher.agent.agent import Agent, AgentOptions
from prefetcher.agent.hostfolder import check_lock
from prefetcher.api.service import Service
from prefetcher.clock import Clock, ScaledClock, SystemClock
from prefetcher.config import Settings
from prefetcher.controller.controller import Controller, ControllerOptions
from prefetcher.controller.follow import Follower
from prefetcher.controller.learner import Learner, ScheduledPredictor
from prefetcher.core.holdout import ControlGroup
from prefetcher.core.types import NodeName, RequestSeen
from prefetcher.errors import BudgetError, SettingsError, TemporaryError, UnavailableError
from prefetcher.ports import Streams, StreamWriter, Topic
from prefetcher.telemetry.logs import log
from prefetcher.telemetry.metrics import Metrics
from prefetcher.wire import request_records
from prefetcher_connectors.redis import HURRIED_S, PATIENT_S, EmbeddedServer, RedisState
from prefetcher_connectors.streams import FileStreams

if TYPE_CHECKING:
    import uvicorn

__all__ = ["App"]

#: A controller that has not stepped for this long hangs; a fit never runs in its thread, and planning ten thousand models takes a second.
_CONTROLLER_STALL_S = 30.0
_BACKLOG = 2048


class App:
    """Everything of one node in one process. `start`, then `wait`, then `stop`; `stop` may be called at any point and twice."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stop = threading.Event()
        self._closing: list[tuple[str, Callable[[], None]]] = []
        self.clock = _clock(settings)
        self.address = ""
        self._compiling: threading.Thread | None = None
        #: Why the application ended by itself, '' while it did not.
        self.failure = ""

    def start(self) -> None:
        """Starts every part. Raises PrefetcherError and leaves nothing, running or half-made, when one of them can't be started."""
        folder = self._settings.state.dir.expanduser().absolute()
        is_new = not folder.exists()
        try:
            self._start()
        except BaseException:
            is_ours = any(name == "request log" for name, _ in self._closing)
            self.stop()
            if is_new and is_ours:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _start(self) -> None:
        settings = self._settings
        _check_machine(settings)
        listener = _listen(settings.api.host, settings.api.port)
        self._closing.append(("listener", listener.close))
        folder = settings.state.dir.expanduser().absolute()
        streams = self._open_streams(folder)
        state, hurried_state = self._open_state(folder)
        metrics = Metrics()
        node = NodeName(settings.node.name)

        agent = Agent(_agent_options(settings, folder), state, self.clock, metrics)
        self._closing.append(("agent", agent.close))
        agent.on_died = self._part_died
        agent.start()
        controller = self._start_controller(streams, state, agent, metrics)
        service = Service(
            node,
            streams.writer(),
            hurried_state,
            agent,
            self.clock,
            metrics,
            controller.wake,
            lambda: self._check_controller(controller),
        )
        metrics.prefetching.set(1.0 if service.switched_on() else 0.0)
        if settings.stream.follow is not None:
            follower = Follower(
                settings.stream.follow,
                streams,
                self.clock,
                metrics,
                controller.wake,
                settings.stream.map,
                settings.stream.tz,
            )
            self._run_thread("follow", follower.run)
        self._serve(service, listener)

    def _open_streams(self, folder: Path) -> Streams:
        streams = FileStreams(folder, self._settings.stream.segment_bytes, self._settings.stream.keep_segments)
        self._closing.append(("streams", streams.close))
        streams.prepare()
        return streams

    def _open_state(self, folder: Path) -> tuple[RedisState, RedisState]:
        """The state store as threads of our own use it, and as those do who wait for an HTTP answer."""
        url, why_away = self._settings.state.url, None
        if url is None:
            server = EmbeddedServer(folder / "state")
            server.start()
            self._closing.append(("state server", server.stop))
            url, why_away = server.url, server.why_away
            self._run_thread("state server", lambda stop: server.keep(stop, _server_restarted, _server_not_restarted))
        state = RedisState(url, PATIENT_S, why_away)
        self._closing.append(("state", state.close))
        hurried = RedisState(url, HURRIED_S, why_away)
        self._closing.append(("state", hurried.close))
        return state, hurried

    def _start_controller(self, streams: Streams, state: RedisState, agent: Agent, metrics: Metrics) -> Controller:
        decision = self._settings.decision
        node = NodeName(self._settings.node.name)
        group = ControlGroup(share=decision.control_ratio, seed=decision.seed)
        controller = Controller(
            streams,
            state,
            Learner(lambda: _predictor(decision.seed), decision.tick_s),
            self.clock,
            metrics,
            ControllerOptions((node,), decision.price, decision.tick_s, decision.hold_s, self._settings.state.snapshot_s),
            arm_of=group.arm,
            on_rows=agent.requested,
            on_plan=lambda node: agent.plan_written(),
        )
        controller.start()
        agent.arm_of = lambda now_s: group.arm(node, now_s)
        unannounced: queue.SimpleQueue[RequestSeen] = queue.SimpleQueue()
        agent.on_unannounced = unannounced.put
        writer = streams.writer()
        self._run_thread("opens", lambda stop: _announce(unannounced, writer, stop))
        agent.on_order_ended = lambda decision_id, outcome: controller.order_ended(node, decision_id, outcome)
        self._run_thread("controller", lambda stop: self._compile_and_run(controller, stop))
        return controller

    def _compile_and_run(self, controller: Controller, stop: threading.Event) -> None:
        """The controller, once its kernels are compiled: on the first start of an installation that takes half a minute."""
        from prefetcher.compiling import compile_kernels, compiled

        if not compiled():
            log().info("compiling", then="plans come when it is done; requests and opens are served meanwhile")
            self._compiling = threading.Thread(target=compile_kernels, kwargs={"stop": stop}, name="compile", daemon=True)
            self._compiling.start()
            while self._compiling.is_alive() and not stop.is_set():
                self._compiling.join(0.1)
            self._compiling = None
        controller.run(stop)

    def _check_controller(self, controller: Controller) -> str:
        if self._compiling is not None:
            return "compiling for this machine, once: plans come in about half a minute"
        if controller.deposed:
            return "another controller leads"
        silent_s = self.clock.steady_s() - controller.alive_s
        if _CONTROLLER_STALL_S * self.clock.speed < silent_s < float("inf"):
            return f"the controller has not moved for {silent_s:.0f} s"
        return ""

    def _part_died(self, name: str, error: BaseException) -> None:
        """Without this part the process must not look healthy: it ends, and whoever runs it starts it again."""
        self.failure = f"the {name} stopped: {error!r}; its log has more; start `prefetcher up` again"
        log().error("part_died", part=name, reason=repr(error))
        self.ask_to_stop()

    def _run_thread(self, name: str, run: Callable[[threading.Event], None]) -> None:
        stop = threading.Event()

        def run_or_end() -> None:
            try:
                run(stop)
            except BaseException as exc:
                self._part_died(name, exc)
                raise

        thread = threading.Thread(target=run_or_end, name=name)
        thread.start()

        def end() -> None:
            stop.set()
            thread.join()

        self._closing.append((name, end))

    def _serve(self, service: Service, listener: socket.socket) -> None:
        import uvicorn

        from prefetcher.api.endpoint import make_endpoint

        config = uvicorn.Config(
            make_endpoint(service, self._settings.api.body_limit_bytes),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=5,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http", daemon=True)
        thread.start()
        self._closing.append(("endpoint", lambda: _end_server(server, thread)))
        host, port = listener.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        log().info("ready", url=self.address, node=self._settings.node.name, observe=self._settings.decision.observe)

    def wait(self) -> None:
        """Returns when `ask_to_stop` was called."""
        self._stop.wait()

    def ask_to_stop(self) -> None:
        """May be called from a signal handler."""
        self._stop.set()

    def stop(self) -> None:
        """Stops every part that was started, the last one first; one that fails doesn't keep the others from it."""
        while self._closing:
            name, close = self._closing.pop()
            try:
                close()
            except (OSError, UnavailableError) as exc:
                log().error("not_stopped_cleanly", part=name, reason=str(exc))


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


def _end_server(server: uvicorn.Server, thread: threading.Thread) -> None:
    server.should_exit = True
    thread.join(10.0)


def _clock(settings: Settings) -> Clock:
    if settings.clock.speed == 1.0 and settings.clock.origin_s is None:
        return SystemClock()
    if settings.clock.origin_s is None:
        raise SettingsError("clock.speed needs clock.origin_s: the time at the start, in seconds since 1970 UTC")
    return ScaledClock(settings.clock.speed, settings.clock.origin_s)


def _predictor(seed: int) -> ScheduledPredictor:
    from prefetcher_models.hazard import Hazard, HazardSettings

    return Hazard(HazardSettings(seed=seed))


def _check_machine(settings: Settings) -> None:
    folder = settings.node.models_dir.expanduser()
    if not folder.is_dir():
        raise SettingsError(f"no folder of models at {folder}; name one with --models, one folder of safetensors files for each model")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if settings.node.host_bytes > memory:
        raise BudgetError(f"--host-bytes {settings.node.host_bytes} is more than this machine's memory, {memory} bytes; give it less")
    check_lock(settings.node.lock, settings.node.host_bytes)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches the delay of small packets off only for sockets that name their protocol: 40 ms an answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        raise UnavailableError(f"can't listen on {host} port {port}: {exc.strerror}; give another one with --port") from exc
    return listener


def _agent_options(settings: Settings, folder: Path) -> AgentOptions:
    node = settings.node
    return AgentOptions(
        node=NodeName(node.name),
        models_dir=node.models_dir.expanduser(),
        host_bytes=node.host_bytes,
        host_dir=node.host_dir,
        lock=node.lock,
        link_bytes_per_s=node.link_bytes_per_s,
        socket=node.socket,
        state_dir=folder,
        observe=settings.decision.observe,
        hold_s=settings.decision.hold_s,
        price_s_per_gb_h=settings.decision.price,
        threads=node.load_threads,
        prefetch_bytes_per_s=node.prefetch_bytes_per_s,
        seed=settings.decision.seed,
    )

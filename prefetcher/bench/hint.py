"""`prefetcher bench hint`: from the answer to a hint to the beginning of the load that it causes, roles apart, under a load of hints.

A controller, an endpoint, an ingest and an agent are processes of their own on a real broker and a real state server on this machine. 200
hints a second come, most for models that are in memory (over HTTP) or that no node knows (written straight into the topic), and every half
a second one for an absent model of 100 MB. Its time is from the 202 in the client to `load_started` in the agent's log, by the same clock;
a load that begins before the answer arrives counts as none. The clock is the machine's: this measures the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from prefetcher.agent.manifest import write_manifests
from prefetcher.api.client import get
from prefetcher.bench.broker import bench_broker
from prefetcher.bench.machine import describe_machine
from prefetcher.bench.roles import RoleProcess, Roles
from prefetcher.clock import SystemClock
from prefetcher.errors import PrefetcherError, UnavailableError
from prefetcher.ports import StreamWriter, Topic
from prefetcher.wire import HintMessage, encode
from prefetcher_connectors.kafka import KafkaOptions, KafkaStreams
from prefetcher_connectors.redis import EmbeddedServer

__all__ = ["Poster", "run", "until", "until_time"]

_RATE_PER_S = 200.0
_ABSENT_EVERY_S = 0.5
#: Of the hints for nothing new, so many are for models that no node knows.
_UNKNOWN_RATIO = 0.2
_RESIDENT, _RESIDENT_BYTES = 40, 1_000_000
#: An absent model's turn comes again after 12 s; unused it leaves after 3 s.
_ABSENT, _ABSENT_BYTES = 24, 100_000_000
_TTL_S = 3.0
_HOST_BYTES = 2_000_000_000
_CONNECTIONS = 16
_NODE = "bench-hint"
_START_S = 240.0
_LOADED_S = 5.0
_TARGETS = {"p50_s": 0.020, "p99_s": 0.100}

_clock = SystemClock()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def until(true: Callable[[], object], what: str, timeout_s: float = _START_S) -> None:
    """Raises UnavailableError when it does not become so in time; a program that does not answer meanwhile is asked again."""
    end_s, never = _clock.steady_s() + timeout_s, threading.Event()
    while True:
        with contextlib.suppress(PrefetcherError, OSError):
            if true():
                return
        if _clock.steady_s() > end_s:
            raise UnavailableError(f"after {timeout_s:.0f} s, still not: {what}")
        _clock.wait(never, 0.05)


class Poster:
    """Posts JSON over connections that stay open, as many at once as there are."""

    def __init__(self, url: str, connections: int = _CONNECTIONS) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._host, self._port = host, int(port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._free = asyncio.Semaphore(connections)

    async def post(self, path: str, body: bytes, on_sent: Callable[[], None] = lambda: None) -> int:
        """The answer's status; 0 where the connection broke. One that the server closed while it was idle is opened anew. `on_sent` is
        called when a connection is free for it."""
        head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body))
        async with self._free:
            on_sent()
            while True:
                is_old = bool(self._idle)
                try:
                    connection = self._idle.pop() if is_old else await asyncio.open_connection(self._host, self._port)
                    status = await self._ask(connection, head + body)
                except (OSError, asyncio.IncompleteReadError):
                    if is_old:
                        continue
                    return 0
                self._idle.append(connection)
                return status

    async def _ask(self, connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], question: bytes) -> int:
        reader, writer = connection
        writer.write(question)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(length)
        return int(head[9:12])

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


@dataclass(slots=True)
class _Posted:
    """A hint for an absent model, when it was sent, and when it was answered."""

    model: str
    sent_s: float = 0.0
    answered_s: float = 0.0


@dataclass(slots=True)
class _Sent:
    absent: list[_Posted] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    straight: int = 0


async def until_time(due_s: float) -> None:
    """Returns at that time of the running loop."""
    loop, come = asyncio.get_running_loop(), asyncio.Event()
    loop.call_at(due_s, come.set)
    await come.wait()


async def _send(url: str, writer: StreamWriter, seconds: float, rate_per_s: float) -> _Sent:
    """Open loop: hints go at their time, whatever became of those before."""
    sent, poster, loop = _Sent(), Poster(url), asyncio.get_running_loop()
    rng = np.random.default_rng(0)
    tasks: set[asyncio.Task[None]] = set()

    async def post(body: dict[str, Any], about: _Posted | None) -> None:
        begin_s = _clock.steady_s()

        def on_sent() -> None:
            if about is not None:
                about.sent_s = _clock.now_s()

        status = await poster.post("/v1/hints", json.dumps(body).encode(), on_sent)
        if about is not None and status == 202:
            about.answered_s = _clock.now_s()
        sent.took_s.append(_clock.steady_s() - begin_s)
        sent.statuses[status] = sent.statuses.get(status, 0) + 1

    begin_s, absent, straight = loop.time(), 0, 0.0
    for number in range(int(seconds * rate_per_s)):
        due_s = begin_s + number / rate_per_s
        await until_time(due_s)
        about: _Posted | None = None
        if due_s - begin_s >= absent * _ABSENT_EVERY_S:
            about = _Posted(f"absent-{absent % _ABSENT}")
            sent.absent.append(about)
            body = {"model": about.model, "ttl_s": _TTL_S, "source": "bench"}
            absent += 1
        elif rng.random() < _UNKNOWN_RATIO:
            # Together every tenth of a second: what writes them is in this process, and is not to be what is measured.
            straight += 1
            if straight >= 0.1 * _UNKNOWN_RATIO * rate_per_s:
                now_s = _clock.now_s()
                hints = [HintMessage(uuid.uuid4().hex, now_s, f"unknown-{rng.integers(100)}", "product") for _ in range(int(straight))]
                records = [(hint.model or "", encode(hint)) for hint in hints]
                tasks.add(asyncio.create_task(asyncio.to_thread(writer.append, Topic.HINTS, records, None, 10.0)))
                sent.straight += len(hints)
                straight = 0
            continue
        else:
            body = {"model": f"resident-{rng.integers(_RESIDENT)}", "session": f"s-{number}", "source": "page"}
        tasks.add(asyncio.create_task(post(body, about)))
        tasks = {task for task in tasks if not task.done()}
    await asyncio.gather(*tasks)
    poster.close()
    return sent


def _make_models(models: Path) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    for number in range(_RESIDENT):
        folder = models / f"resident-{number}"
        folder.mkdir(parents=True)
        save_file({"weight": rng.integers(0, 256, _RESIDENT_BYTES, dtype=np.uint8)}, folder / "model.safetensors")
    first = models / "absent-0"
    first.mkdir()
    save_file({"weight": rng.integers(0, 256, _ABSENT_BYTES, dtype=np.uint8)}, first / "model.safetensors")
    for number in range(1, _ABSENT):
        folder = models / f"absent-{number}"
        folder.mkdir()
        os.link(first / "model.safetensors", folder / "model.safetensors")
    write_manifests(models)


def run(
    json: Path | None = None,
    progress: Callable[[str], None] | None = _say,
    *,
    seconds: float = 60.0,
    rate_per_s: float = _RATE_PER_S,
    quick: bool = False,
) -> dict[str, Any]:
    """Measures and returns {"figures", "peers", "targets", "machine"}; `json` gets the same. `quick`: short, for tests.

    Raises:
        UnavailableError: there is no broker, or the roles did not start.
    """
    if quick:
        seconds, rate_per_s = 4.0, 40.0
    tell = progress or (lambda _: None)
    folder = Path(tempfile.mkdtemp(prefix="prefetcher-bench-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        _make_models(folder / "models")
        broker = stack.enter_context(bench_broker(folder))
        server = EmbeddedServer(folder / "state")
        server.start()
        stack.callback(server.stop)
        prefix = f"bench-{os.getpid()}-{os.urandom(3).hex()}"
        roles = Roles(folder, broker.address, prefix, server.url, {"PREFETCHER_API__SESSION_RATE_PER_S": "1000"})
        stack.callback(roles.close)
        controller, api, ingest = (roles.start(role) for role in ("controller", "api", "ingest"))
        agent = roles.agent(_NODE, folder / "models", _HOST_BYTES)
        for process in (controller, api, ingest, agent):
            process.wait_until_up()
        streams = KafkaStreams(KafkaOptions(broker.address, prefix))
        stack.callback(streams.close)
        writer = streams.writer()
        stack.callback(writer.close)
        until(lambda: controller.metric("prefetcher_plans_total") > 0, "the controller plans for the node")
        _load_residents(api, tell)
        tell("a few seconds to get warm")
        asyncio.run(_send(api.url, writer, min(5.0, seconds), rate_per_s))
        _clock.wait(threading.Event(), 2.0 * _TTL_S)
        before = controller.metric("prefetcher_plans_total")
        cpu_s = {process.role: process.cpu_s() for process in (controller, api, ingest, agent)}
        tell(f"{rate_per_s:.0f} hints a second for {seconds:.0f} s")
        sent = asyncio.run(_send(api.url, writer, seconds, rate_per_s))
        busy = {process.role: round((process.cpu_s() - cpu_s[process.role]) / seconds, 3) for process in (controller, api, ingest, agent)}
        _clock.wait(threading.Event(), _LOADED_S)
        report = _judge(sent, agent, broker.kind)
        report["figures"]["cores_busy"] = busy
        report["figures"]["plans"] = int(controller.metric("prefetcher_plans_total") - before)
    if json is not None:
        _write(json, report)
    return report


def _load_residents(api: RoleProcess, tell: Callable[[str], None]) -> None:
    tell("loading what is to be in memory")

    async def load() -> None:
        poster = Poster(api.url)
        for number in range(_RESIDENT):
            status = await poster.post(f"/v1/models/resident-{number}:load?node={_NODE}", b"")
            if status != 200:
                raise UnavailableError(f"the endpoint answered {status} to a load by hand; its log has more")
        poster.close()

    asyncio.run(load())
    until(
        lambda: sum(held["state"] == "ready" for held in get(api.url, "/v1/residency")) >= _RESIDENT,
        "models that were asked for are in memory",
        60.0,
    )


def _judge(sent: _Sent, agent: RoleProcess, kind: str) -> dict[str, Any]:
    started: dict[str, list[float]] = {}
    for event in agent.events("load_started"):
        started.setdefault(event["model"], []).append(datetime.fromisoformat(event["timestamp"]).timestamp())
    took_s, early, missing = [], 0, 0
    for posted in sent.absent:
        begun_s = next((at_s for at_s in started.get(posted.model, ()) if at_s >= posted.sent_s), None)
        if posted.answered_s == 0.0 or begun_s is None or begun_s > posted.answered_s + _LOADED_S:
            missing += 1
            continue
        early += begun_s <= posted.answered_s
        took_s.append(max(0.0, begun_s - posted.answered_s))
    figures: dict[str, Any] = {
        "hints": sum(sent.statuses.values()) + sent.straight,
        "written_straight": sent.straight,
        "statuses": {str(status): count for status, count in sorted(sent.statuses.items())},
        "absent_models_hinted": len(sent.absent),
        "not_loaded": missing,
        "begun_before_the_answer": early,
    }
    if took_s:
        figures |= {
            "p50_s": round(float(np.quantile(took_s, 0.5)), 5),
            "p99_s": round(float(np.quantile(took_s, 0.99)), 5),
            "worst_s": round(max(took_s), 5),
        }
    figures |= {
        "answer_p50_s": round(float(np.quantile(sent.took_s, 0.5)), 5),
        "answer_p99_s": round(float(np.quantile(sent.took_s, 0.99)), 5),
    }
    return {"figures": figures, "peers": {}, "targets": _TARGETS, "broker": kind, "machine": describe_machine()}


def _write(path: Path, report: dict[str, Any]) -> None:
    text = json.dumps(report, indent=1)
    path.write_text(text + "\n")
    print(text)

"""`prefetcher bench outage`: what was answered 202 is there, and every answer comes in time, while broker and state server are killed.

All roles are processes of their own on a broker and a state server of this benchmark's own, and rows and hints are posted at a steady rate.
The broker gets SIGKILL and is started again on its folder 30 s later; then the state server; then both at once. Afterwards the topics are
read: every row and hint that was answered 202 is looked for by its id, and every cell of the tables is recounted. An answer is 202 or 503;
its time is from sending to having it. The clock is the machine's: this measures the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prefetcher.agent.manifest import write_manifests
from prefetcher.bench.broker import BrokerProcess, bench_broker
from prefetcher.bench.hint import Poster, until, until_time
from prefetcher.bench.ingest_crash import read_topic
from prefetcher.bench.machine import describe_machine
from prefetcher.bench.recount import Recount, differences
from prefetcher.bench.roles import RoleProcess, Roles
from prefetcher.clock import SystemClock
from prefetcher.errors import UnavailableError
from prefetcher.ingest.tables import TablesReader, connect
from prefetcher.ports import Topic
from prefetcher_connectors.kafka import KafkaOptions, KafkaStreams
from prefetcher_connectors.redis import EmbeddedServer

__all__ = ["run"]

_OUTAGE_S = 30.0
_CALM_S = 5.0
#: After an outage, until posts are taken again.
_BACK_S = 60.0
_ROWS_PER_S, _HINTS_PER_S = 40.0, 20.0
_MODELS, _BYTES = 20, 1_000_000
_PARTITIONS = 3
#: More than posts that can be on their way at once: what waits for a connection here would not be the endpoint's.
_CONNECTIONS = 256
_CAUGHT_UP_S = 120.0
_TARGETS = {"lost_acknowledged": 0, "worst_answer_s": 1.0}

_clock = SystemClock()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(slots=True)
class _Phase:
    """What was answered while something was away, or nothing was."""

    took_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class _Load:
    """Posts rows and hints until `stop`; what was answered 202 is in `rows` and `hints`."""

    url: str
    stop: threading.Event = field(default_factory=threading.Event)
    phase: str = "calm"
    phases: dict[str, _Phase] = field(default_factory=dict)
    rows: set[str] = field(default_factory=set)
    hints: set[str] = field(default_factory=set)
    taken_s: dict[str, float] = field(default_factory=dict)

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        poster, rng = Poster(self.url, _CONNECTIONS), np.random.default_rng(0)
        tasks: set[asyncio.Task[None]] = set()
        begin_s, number = asyncio.get_running_loop().time(), 0
        rate_per_s = _ROWS_PER_S + _HINTS_PER_S
        while not self.stop.is_set():
            await until_time(begin_s + number / rate_per_s)
            model = f"m{rng.integers(_MODELS)}"
            is_row = rng.random() < _ROWS_PER_S / rate_per_s
            tasks.add(asyncio.create_task(self._post(poster, "rows" if is_row else "hints", model)))
            tasks = {task for task in tasks if not task.done()}
            number += 1
        await asyncio.gather(*tasks)
        poster.close()

    async def _post(self, poster: Poster, kind: str, model: str) -> None:
        one, phase = uuid.uuid4().hex, self.phases.setdefault(self.phase, _Phase())
        body = {"model": model, "request_id": one} if kind == "rows" else {"model": model, "hint_id": one, "session": one}
        begin_s = _clock.steady_s()
        status = await poster.post("/v1/requests" if kind == "rows" else "/v1/hints", json.dumps(body).encode())
        phase.took_s.append(_clock.steady_s() - begin_s)
        phase.statuses[status] += 1
        if status == 202:
            (self.rows if kind == "rows" else self.hints).add(one)
            self.taken_s[kind] = _clock.steady_s()


def run(
    json: Path | None = None,
    progress: Callable[[str], None] | None = _say,
    *,
    outage_s: float = _OUTAGE_S,
    quick: bool = False,
) -> dict[str, Any]:
    """Measures and returns {"figures", "peers", "targets", "machine"}; `json` gets the same. `quick`: outages of 3 s, for tests.

    Raises:
        UnavailableError: there is no broker that this benchmark may kill (set KAFKA_HOME), or the roles did not start.
    """
    if quick:
        outage_s = 3.0
    tell = progress or (lambda _: None)
    folder = Path(tempfile.mkdtemp(prefix="prefetcher-bench-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        broker = stack.enter_context(bench_broker(folder))
        if broker.process is None:
            raise UnavailableError("a broker is to be killed: set KAFKA_HOME to the folder of a Kafka release, and have java on the PATH")
        server = EmbeddedServer(folder / "state")
        server.start()
        stack.callback(server.stop)
        prefix = f"bench-{os.getpid()}-{os.urandom(3).hex()}"
        roles = Roles(folder, broker.address, prefix, server.url, {"PREFETCHER_KAFKA__PARTITIONS": str(_PARTITIONS)})
        stack.callback(roles.close)
        processes = _start(roles, folder / "models")
        streams = KafkaStreams(KafkaOptions(broker.address, prefix, partitions=_PARTITIONS))
        stack.callback(streams.close)
        load = _Load(processes["api"].url)
        posting = threading.Thread(target=load.run)
        posting.start()
        try:
            back_s = _outages(load, broker.process, server, folder / "state", outage_s, tell)
        finally:
            load.stop.set()
            posting.join()
        tell("reading the topics, and recounting the tables")
        figures = _judge(load, streams, server.url, processes["ingest"], folder)
        figures["back_after_s"] = back_s
        figures["roles_that_ended"] = [role for role, process in processes.items() if not process.runs()]
    report = {"figures": figures, "peers": {}, "targets": _TARGETS, "machine": describe_machine()}
    if json is not None:
        _write(json, report)
    return report


def _start(roles: Roles, models: Path) -> dict[str, RoleProcess]:
    from safetensors.numpy import save_file

    for number in range(_MODELS):
        (models / f"m{number}").mkdir(parents=True)
        save_file({"weight": np.full(_BYTES, number, np.uint8)}, models / f"m{number}" / "model.safetensors")
    write_manifests(models)
    processes = {role: roles.start(role) for role in ("controller", "api", "ingest", "scheduler")}
    processes["agent"] = roles.agent("bench-outage", models, _MODELS * _BYTES)
    for process in processes.values():
        process.wait_until_up()
    until(lambda: processes["controller"].metric("prefetcher_plans_total") > 0, "the controller plans for the node")
    return processes


def _outages(
    load: _Load, broker: BrokerProcess, server: EmbeddedServer, state: Path, outage_s: float, tell: Callable[[str], None]
) -> dict[str, float]:
    """Kills each and both; for each, how long after its return rows and hints were taken again."""
    never, back_s = threading.Event(), {}

    def kill_state() -> None:
        os.kill(int((state / "server.pid").read_text()), signal.SIGKILL)

    for name, kills, starts in (
        ("broker", [broker.kill], [broker.start]),
        ("state", [kill_state], [server.start]),
        ("both", [broker.kill, kill_state], [broker.start, server.start]),
    ):
        load.phase = f"calm before {name}"
        _clock.wait(never, _CALM_S)
        tell(f"{name} away for {outage_s:.0f} s")
        load.phase = f"{name} away"
        for kill in kills:
            kill()
        _clock.wait(never, outage_s)
        for start in starts:
            start()
        begin_s = _clock.steady_s()
        until(lambda begin_s=begin_s: min(load.taken_s.values()) > begin_s, "rows and hints are taken again", _BACK_S)  # type: ignore[misc]
        back_s[name] = round(_clock.steady_s() - begin_s, 3)
    load.phase = "calm at the end"
    _clock.wait(never, _CALM_S)
    return back_s


class _Id(msgspec.Struct):
    request_id: str = ""
    hint_id: str = ""


def _judge(load: _Load, streams: KafkaStreams, state_url: str, ingest: RoleProcess, folder: Path) -> dict[str, Any]:
    values: list[list[bytes]] = [[] for _ in range(_PARTITIONS)]
    hints: list[str] = []
    read_topic(streams, Topic.REQUESTS, 1 << 40, lambda partition, offset, value: values[partition].append(value))
    read_topic(streams, Topic.HINTS, 1 << 40, lambda partition, offset, value: hints.append(msgspec.json.decode(value, type=_Id).hint_id))
    rows = Counter(msgspec.json.decode(value, type=_Id).request_id for found in values for value in found)
    counts = [Recount() for _ in values]
    for count, found in zip(counts, values, strict=True):
        count.take(found)
    with connect(state_url) as client:
        reader = TablesReader(client)
        caught_up = True
        try:
            until(
                lambda: sum(p["rows"] + p["late"] for p in reader.positions().values()) >= rows.total(),
                "every row is counted",
                _CAUGHT_UP_S,
            )
        except UnavailableError:
            caught_up = False
        # Hours that are closed meanwhile are in the history and not in the tables.
        history = _history(folder)
        wrong = differences(reader, counts, history)
    phases = load.phases
    return {
        "lost_acknowledged": len(load.rows - rows.keys()) + len(load.hints - set(hints)),
        "worst_answer_s": round(max(max(phase.took_s) for phase in phases.values() if phase.took_s), 4),
        "miscounted": len(wrong),
        "caught_up": caught_up,
        "rows_taken": len(load.rows),
        "hints_taken": len(load.hints),
        "rows_in_the_topic": rows.total(),
        "rows_there_twice": sum(count - 1 for count in rows.values()),
        "other_answers": sum(count for phase in phases.values() for status, count in phase.statuses.items() if status not in (202, 503)),
        "phases": {
            name: {
                "statuses": {str(status): count for status, count in sorted(phase.statuses.items())},
                "answer_p50_s": round(float(np.median(phase.took_s)), 4),
                "worst_answer_s": round(max(phase.took_s), 4),
            }
            for name, phase in phases.items()
            if phase.took_s
        },
    }


def _history(folder: Path) -> list[tuple[int, Counter[str]]]:
    from prefetcher.ingest.history import read_hours

    return [(minute, Counter(rows)) for place in folder.glob("ingest-*/history") for _, minute, rows in read_hours(place)]


def _write(path: Path, report: dict[str, Any]) -> None:
    text = json.dumps(report, indent=1)
    path.write_text(text + "\n")
    print(text)

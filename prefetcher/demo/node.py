"""A `prefetcher up` of the demo's own: the production command in a process, on a fast clock, in folders of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prefetcher.clock import Clock
from prefetcher.errors import UnavailableError

__all__ = ["DemoNode", "Reading"]

_START_S = 60.0
_STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What the node counts so far: bytes taken, byte-seconds of the demo's clock, outcomes of prefetches, cold starts, requests that were
    served without being kept, prefetches ordered, why others were not (times it was decided), and how long used ones moved ahead of use.
    """

    now_s: float
    taken_bytes: int
    idle_byte_s: float
    wasted_byte_s: float
    outcomes: dict[str, int]
    cold_starts: int = 0
    bypassed: int = 0
    ordered: int = 0
    not_ordered: dict[str, int] = field(default_factory=dict)
    ahead_s: float = 0.0


def up_command() -> list[str]:
    """The production command of this installation."""
    return [str(Path(sys.executable).with_name("prefetcher")), "up"]


class DemoNode:
    """Runs from `__enter__` to `__exit__`. `origin_s` is the demo clock's start, `speed` how fast it runs."""

    def __init__(self, folder: Path, models: Path, host_bytes: int, speed: float, origin_s: float, clock: Clock, tag: str) -> None:
        self._folder, self._clock, self._speed = folder, clock, speed
        folder.mkdir(parents=True, exist_ok=True)
        # A socket's path may have 107 bytes, so it doesn't lie under the output folder.
        run = Path(f"/tmp/prefetcher-demo-{os.getuid()}-{os.getpid()}-{tag}")
        run.mkdir(mode=0o700)
        self._run = run
        self.socket = run / "agent.sock"
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFETCHER_")} | {
            "PREFETCHER_NODE__NAME": f"demo-{tag}-{os.getpid()}",
            "PREFETCHER_NODE__MODELS_DIR": str(models),
            "PREFETCHER_NODE__HOST_BYTES": str(host_bytes),
            "PREFETCHER_NODE__SOCKET": str(self.socket),
            "PREFETCHER_STATE__DIR": str(folder / "state"),
            "PREFETCHER_STATE__SNAPSHOT_S": "21600",
            "PREFETCHER_API__PORT": "0",
            "PREFETCHER_CLOCK__SPEED": str(speed),
            "PREFETCHER_CLOCK__ORIGIN_S": str(origin_s),
            "PREFETCHER_DECISION__TICK_S": "120",
            "PREFETCHER_DECISION__HOLD_S": "1800",
            "PREFETCHER_DECISION__CONTROL_RATIO": "0",
            "PREFETCHER_LOG__FORMAT": "json",
        }
        self._child: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        log = self._folder / "node.log"
        with log.open("wb") as out:
            self._child = subprocess.Popen(up_command(), env=self._environment, stdout=out, stderr=out, start_new_session=True)
        try:
            self._wait_until_ready(log)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _wait_until_ready(self, log: Path) -> None:
        assert self._child is not None
        end_s = self._clock.steady_s() + _START_S
        never = threading.Event()
        while self._clock.steady_s() < end_s and self._child.poll() is None:
            found = re.search(r"http://[\w.:\[\]]+:\d+", log.read_text(errors="replace"))
            if found:
                self.url = found.group()
                try:
                    self.ask("/v1/status")
                    return
                except UnavailableError:
                    pass
            self._clock.wait(never, 0.1)
        last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise UnavailableError(f"`prefetcher up` did not start: {last[0]}; its log is {log}")

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            try:
                self._child.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        self.socket.unlink(missing_ok=True)
        if self._run.is_dir() and not any(self._run.iterdir()):
            self._run.rmdir()

    def ask(self, path: str, body: Any = None) -> Any:
        """GET, or POST when there is a body. Raises UnavailableError."""
        text = self._text(path, body)
        return json.loads(text)

    def _text(self, path: str, body: Any = None) -> str:
        sent = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, sent, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30.0) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as exc:
            said = exc.read(2_000).decode(errors="replace")
            raise UnavailableError(f"the demo's node refuses {path} with {exc.code}: {said}") from exc
        except (urllib.error.URLError, OSError) as exc:
            raise UnavailableError(f"the demo's node does not answer at {self.url}{path}: {exc}") from exc

    def learned_rows(self) -> int:
        """How many requests were learned from."""
        return int(_gauge(self._text("/metrics"), "prefetcher_learned_rows"))

    def read(self) -> Reading:
        status, metrics = self.ask("/v1/status"), self._text("/metrics")
        totals = status["totals"]
        return Reading(
            now_s=float(status["now_s"]),
            taken_bytes=int(status["node"]["memory"]["taken_bytes"]),
            idle_byte_s=_gauge(metrics, "prefetcher_idle_byte_seconds"),
            wasted_byte_s=_gauge(metrics, "prefetcher_wasted_byte_seconds"),
            outcomes=_counts(metrics, r'prefetcher_outcomes_total\{outcome="(\w+)"\}'),
            cold_starts=int(totals.get("cold_starts", 0)),
            bypassed=int(totals.get("bypassed", 0)),
            ordered=sum(_counts(metrics, r'prefetcher_orders_total\{arm="\w+",cause="(\w+)"\}').values()),
            not_ordered=_counts(metrics, r'prefetcher_skipped_total\{reason="(\w+)",what="prefetch"\}'),
            ahead_s=float(totals.get("saved_seconds", 0.0)),
        )


def _counts(text: str, name: str) -> dict[str, int]:
    """A counter's values by the label that `name` catches, without what was not counted yet."""
    found: dict[str, int] = {}
    for label, count in re.findall(rf"^{name} (\S+)$", text, re.M):
        found[label] = found.get(label, 0) + int(float(count))
    return {label: count for label, count in found.items() if count}


def _gauge(text: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", text, re.M)
    return float(found.group(1)) if found else 0.0

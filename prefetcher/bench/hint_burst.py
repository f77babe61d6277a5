"""`prefetcher bench hint_burst`: one hint, posted many times at the same moment, on a node of its own: how many orders and loads it makes.

Covers the whole product, as it is installed: `prefetcher up` with one model, posts with one idempotency key from many threads, the plan
and the load from disk. The clock is the machine's: this measures the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from prefetcher.agent.manifest import write_manifests
from prefetcher.api.client import get
from prefetcher.bench.machine import describe_machine
from prefetcher.clock import SystemClock
from prefetcher.errors import PrefetcherError, UnavailableError

__all__ = ["run"]

_MODEL = "bench"
_MODEL_BYTES = 100_000_000
_POSTS = 50
#: The first start of an installation compiles for half a minute.
_START_S = 180.0
_LOADED_S = 60.0
#: After the load: for a second order, or a second load, if there were to be one.
_QUIET_S = 5.0

_clock = SystemClock()


def run(json: Path) -> None:
    """Measures, prints and writes the figures to `json`.

    Raises:
        UnavailableError: `prefetcher up` did not start, or brought nothing.
    """
    with tempfile.TemporaryDirectory(prefix="prefetcher-bench-") as folder:
        _make_model(Path(folder) / "models")
        with _node(Path(folder)) as url:
            figures = _measure(url)
    _write(json, {"figures": figures, "peers": {}, "machine": describe_machine()})


def _measure(url: str) -> dict[str, Any]:
    together, never = threading.Barrier(_POSTS), threading.Event()
    took_s: list[float] = []

    def post(number: int) -> tuple[int, bytes]:
        body = json.dumps({"model": _MODEL, "session": "bench", "ttl_s": 300}).encode()
        request = urllib.request.Request(f"{url}/v1/hints", data=body, headers={"Idempotency-Key": "burst"})
        together.wait()
        begin_s = _clock.steady_s()
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read()
        finally:
            took_s.append(_clock.steady_s() - begin_s)

    with ThreadPoolExecutor(_POSTS) as threads:
        answers = list(threads.map(post, range(_POSTS)))
    taken = [body for status, body in answers if status == 202]
    _until(lambda: any(held["state"] == "ready" for held in get(url, "/v1/residency")), "brings the model", _LOADED_S)
    _clock.wait(never, _QUIET_S)
    orders = [order for order in get(url, "/v1/orders") if order["model"] == _MODEL]
    return {
        "posts": _POSTS,
        "answers": len(taken),
        "different_answers": len(set(taken)),
        "statuses": {str(status): count for status, count in sorted(Counter(status for status, _ in answers).items())},
        "hints": _metric(url, "prefetcher_hints_total"),
        "orders": len(orders),
        "causes": sorted({order["cause"] for order in orders}),
        "loads": _metric(url, "prefetcher_loads_total"),
        "slowest_answer_s": round(max(took_s), 4),
        "median_answer_s": round(float(np.median(took_s)), 4),
    }


def _make_model(models: Path) -> None:
    from safetensors.numpy import save_file

    (models / _MODEL).mkdir(parents=True)
    tensor = np.random.default_rng(0).integers(0, 256, _MODEL_BYTES, dtype=np.uint8)
    save_file({"weight": tensor}, models / _MODEL / "model.safetensors")
    write_manifests(models)


@contextlib.contextmanager
def _node(folder: Path) -> Iterator[str]:
    """`prefetcher up` with everything of its own under `folder`; its address, once it plans."""
    # fmt: off
    options = ["--models", str(folder / "models"), "--host-bytes", str(4 * _MODEL_BYTES), "--state-dir", str(folder / "state"),
               "--socket", str(folder / "agent.sock"), "--port", "0", "--control-ratio", "0", "--log-format", "json"]
    # fmt: on
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefetcher", "up", *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"PREFETCHER_NODE__NAME": f"bench-{os.getpid()}"},
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "is up at" not in line:
            last = ((folder / "log").read_text().strip().splitlines() or ["it said nothing"])[-1]
            raise UnavailableError(f"`prefetcher up` did not start: {last}")
        url = line.split()[-1]
        # A plan was made: the kernels are compiled, and the node is known.
        _until(lambda: _metric(url, "prefetcher_plans_total") > 0 and get(url, "/healthz")["status"] == "ok", "plans", _START_S)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def _until(true: Callable[[], bool], what: str, timeout_s: float) -> None:
    end_s, never = _clock.steady_s() + timeout_s, threading.Event()
    while True:
        with contextlib.suppress(PrefetcherError):
            if true():
                return
        if _clock.steady_s() > end_s:
            raise UnavailableError(f"after {timeout_s:.0f} s, `prefetcher up` still not {what}")
        _clock.wait(never, 0.05)


def _metric(url: str, name: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name))


def _write(path: Path, report: dict[str, Any]) -> None:
    text = json.dumps(report, indent=2)
    path.write_text(text + "\n")
    print(text)

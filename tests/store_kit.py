"""What the tests of stores share: a node that fetches, models that are published, and an HTTP server that stands before a store."""

from __future__ import annotations

import http.client
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import prefetcher
from prefetcher.agent.agent import Agent, AgentOptions
from prefetcher.agent.fetching import StoreOptions
from prefetcher.agent.publish import publish_models
from prefetcher.clock import ScaledClock, SystemClock
from prefetcher.controller import records
from prefetcher.core.types import NodeName
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.memory import MemoryState
from prefetcher_connectors.weights_store import weights_store_at

__all__ = ["MODEL_BYTES", "FetchingNode", "Gate", "model_folder", "publish"]

T0 = 1_767_225_600.0
MODEL_BYTES = 1_000_000


def model_folder(folder: Path, model: str, value: int, megabytes: int = 1, shards: int = 1) -> Path:
    """A model of `shards` files whose every number is `value`, plus noise where it has more than a megabyte."""
    (folder / model).mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        weight = np.full(megabytes * 250_000 // shards, value, np.float32)
        if megabytes > 1:
            weight[:] += np.arange(len(weight)) % 1009
        save_file({f"w{shard}": weight}, folder / model / f"part-{shard}.safetensors")
    return folder / model


def publish(folder: Path, place: str) -> None:
    """Every model of `folder` into the store, which must take all."""
    refused: list[Exception] = []
    store = weights_store_at(place)
    list(publish_models(folder, store, on_refused=refused.append))
    store.close()
    assert not refused


class FetchingNode:
    """An agent in this process with a store; its disk has room for `disk` models beside what people put there."""

    def __init__(
        self,
        folder: Path,
        place: str,
        *,
        name: str = "node-0",
        state: MemoryState | None = None,
        speed: float = 1.0,
        store: StoreOptions | None = None,
        **more: Any,
    ) -> None:
        self.folder, self.models_dir, self.name = folder, folder / "models", NodeName(name)
        self.models_dir.mkdir(parents=True, exist_ok=True)
        self.clock = SystemClock() if speed == 1.0 else ScaledClock(speed, T0)
        self.state = state or MemoryState()
        self.socket = folder / "run" / "agent.sock"
        given: dict[str, Any] = {"host_bytes": 50_000_000, "state_dir": folder, "socket": self.socket, "lock": "off"}
        options = AgentOptions(self.name, self.models_dir, store=store or StoreOptions(look_s=0.2), **(given | more))
        self.metrics = Metrics()
        self.store = weights_store_at(place)
        self.agent = Agent(options, self.state, self.clock, self.metrics, self.store)
        try:
            self.agent.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.agent.close()
        self.store.close()

    def report(self) -> records.NodeReport | None:
        raw = self.state.read(records.node_key(self.name, "report"))
        return None if raw is None else records.decode_report(raw)

    def tiers(self) -> dict[str, str]:
        """Where each model is, the nearest tier."""
        report = self.report()
        if report is None:
            return {}
        return {k.model: k.tier for k in report.known} | {h.model: h.tier for h in report.held if h.state == "ready"}

    def known(self, model: str) -> records.KnownWeights | None:
        report = self.report()
        return None if report is None else next((k for k in report.known if k.model == model), None)

    def opens(self, model: str, timeout_s: float = 30.0) -> float:
        """The first number of a model's first tensor, by way of the socket."""
        with prefetcher.open(model, framework="numpy", socket_path=self.socket, timeout_s=timeout_s) as tensors:
            return float(tensors["w0"][0])

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def visible(self) -> set[str]:
        """What a person sees in the models folder."""
        return {path.name for path in self.models_dir.iterdir() if not path.name.startswith(".")}


class Gate:
    """A real HTTP server between a client and the store at `endpoint`. `answers(path, headers)` may say a status and headers, or delay by
    waiting; None lets the request through as it is."""

    def __init__(self, endpoint: str) -> None:
        self.upstream = endpoint.removeprefix("http://")
        self.answers: Callable[[str, http.client.HTTPMessage], tuple[int, Sequence[tuple[str, str]]] | None] = lambda path, headers: None
        self.asked: list[str] = []
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                gate.asked.append(self.path.partition("?")[0])
                said = gate.answers(self.path, self.headers)
                if said is not None:
                    self.send_response(said[0])
                    for name, value in (*said[1], ("Content-Length", "0")):
                        self.send_header(name, value)
                    self.end_headers()
                    return
                upstream = http.client.HTTPConnection(gate.upstream, timeout=30.0)
                # Signed for the host that the client named.
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                upstream.request(self.command, self.path, body or None, dict(self.headers.items()))
                answer = upstream.getresponse()
                body = answer.read()
                upstream.close()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("connection", "transfer-encoding", "server", "date", "content-length"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                with suppress(ConnectionError):  # who asked was killed
                    self.end_headers()
                    self.wfile.write(body)

            do_PUT = do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                """Nothing is said."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def fetching(folder: Path, place: str, **more: Any) -> Iterator[FetchingNode]:
    node = FetchingNode(folder, place, **more)
    try:
        yield node
    finally:
        node.close()
        shutil.rmtree(folder / "models", ignore_errors=True)

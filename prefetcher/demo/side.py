"""One side of the demo: sends the traffic to a node, opens and reads the tensors, and adds up the waits.

Sides run one after the other, so how fast the machine reads is measured before and after each: other work on it would else look like a
difference between them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from safetensors.numpy import load_file

from prefetcher.agent.client import open_model
from prefetcher.clock import Clock
from prefetcher.demo.models import DemoModel, drop_from_page_cache
from prefetcher.demo.node import DemoNode, Reading
from prefetcher.demo.traffic import Arrival
from prefetcher.errors import IntegrityError, PrefetcherError, UnavailableError

__all__ = ["Served", "Side", "read_cold_s", "run_side"]

#: Programs that ask at once; the rest queue in the client and would hide waiting, so there are plenty.
_CLIENTS = 24
_SAMPLE_S = 0.5
#: A node that answers nothing for so long while nobody asks for weights is gone.
_LAST_S = 20.0
_PAGE = 4096
#: The machine's speed is the median of so many cold reads of one model.
_READS = 5


@dataclass(frozen=True, slots=True)
class Served:
    """One request: when (seconds of the demo's clock), what it met, and how long it really waited, in seconds."""

    at_s: float
    model: str
    found: str
    source: str
    wait_s: float


@dataclass(slots=True)
class Side:
    """What one side did. GB·h are in hours of the demo's clock, waits in real seconds. `reading_s`: how long `read_cold_s` took right
    before and right after it.
    """

    name: str
    served: list[Served] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    reading_s: tuple[float, float] = (0.0, 0.0)

    @property
    def waits_s(self) -> np.ndarray:
        return np.array([s.wait_s for s in self.served])

    @property
    def cold_starts(self) -> int:
        """As the node counts them: an open that comes just after its row finds the row's load already moving."""
        return self.readings[-1].cold_starts - self.readings[0].cold_starts if self.readings else 0

    @property
    def cold_seconds(self) -> float:
        return float(sum(s.wait_s for s in self.served if s.found != "ready"))

    def percentile_s(self, q: float) -> float:
        return float(np.percentile(self.waits_s, q)) if self.served else 0.0

    @property
    def held_gb_h(self) -> float:
        at = np.array([r.now_s for r in self.readings])
        taken = np.array([float(r.taken_bytes) for r in self.readings])
        return float(np.sum(np.diff(at) * (taken[1:] + taken[:-1]) / 2.0)) / 3.6e12

    @property
    def idle_gb_h(self) -> float:
        return self.readings[-1].idle_byte_s / 3.6e12 if self.readings else 0.0

    @property
    def wasted_gb_h(self) -> float:
        return self.readings[-1].wasted_byte_s / 3.6e12 if self.readings else 0.0


def read_cold_s(models: Sequence[DemoModel], clock: Clock) -> float:
    """Real seconds of a fixed piece of work: a model of middle size is read from disk, not from memory, and its checked tensor is hashed.

    Raises:
        IntegrityError: the file is not what was written.
    """
    model = sorted(models, key=lambda m: m.bytes)[len(models) // 2]
    took = []
    for _ in range(_READS):
        drop_from_page_cache(model.folder)
        begun_s = clock.steady_s()
        tensors: dict[str, Any] = load_file(model.folder / "model.safetensors")
        if xxhash.xxh3_64_intdigest(tensors[model.checked_tensor]) != model.digest:
            raise IntegrityError(f"{model.name}: a tensor is not what was written; look after the disk", model=model.name)
        took.append(clock.steady_s() - begun_s)
    drop_from_page_cache(model.folder)
    return float(np.median(took))


def _touch_pages(tensors: Mapping[str, np.ndarray]) -> None:
    for name in tensors:
        tensors[name].reshape(-1).view(np.uint8)[::_PAGE].sum()


def _read_surely(node: DemoNode, clock: Clock) -> Reading:
    """A reading that the figures need: before the first request and after the last. Raises UnavailableError after `_LAST_S`."""
    end_s = clock.steady_s() + _LAST_S
    while True:
        try:
            return node.read()
        except UnavailableError:
            if clock.steady_s() > end_s:
                raise
            clock.wait(threading.Event(), _SAMPLE_S)


def run_side(
    name: str,
    node: DemoNode,
    arrivals: Sequence[Arrival],
    models: Sequence[DemoModel],
    speed: float,
    clock: Clock,
    progress: Callable[[int, int], None] = lambda done, cold: None,
) -> Side:
    """Sends every arrival at its time and waits for the last one to be served."""
    side, guard, by_name = Side(name), threading.Lock(), {m.name: m for m in models}
    side.readings.append(_read_surely(node, clock))
    never, start_s, next_sample_s = threading.Event(), clock.steady_s(), _SAMPLE_S

    def serve(arrival: Arrival) -> None:
        begun_s = clock.steady_s()
        try:
            node.ask("/v1/requests", {"model": arrival.model})
            asked_s = clock.steady_s()
            model = by_name[arrival.model]
            with open_model(arrival.model, socket_path=node.socket, timeout_s=60.0) as tensors:
                if tensors.source == "disk":
                    # Served without being cached: whoever asked reads the disk himself, and that is his wait.
                    _touch_pages(tensors)
                waited_s = clock.steady_s() - asked_s
                if xxhash.xxh3_64_intdigest(tensors[model.checked_tensor]) != model.digest:
                    raise ValueError(f"{model.name}: a tensor is not what was written")
                served = Served(arrival.at_s, arrival.model, tensors.found, tensors.source, waited_s)
            if served.source == "disk":
                # The system's page cache is host memory that nobody counts; neither side may live on it.
                drop_from_page_cache(model.folder)
            with guard:
                side.served.append(served)
        except (PrefetcherError, OSError, ValueError) as exc:
            with guard:
                side.failed.append(f"{arrival.model} after {clock.steady_s() - begun_s:.1f} s: {exc}")

    with ThreadPoolExecutor(_CLIENTS) as pool:
        for number, arrival in enumerate(arrivals):
            while (left_s := start_s + arrival.at_s / speed - clock.steady_s()) > 0.0:
                if clock.steady_s() - start_s >= next_sample_s:
                    # A node that is too busy to answer is read again at the next sample.
                    with contextlib.suppress(UnavailableError):
                        side.readings.append(node.read())
                    next_sample_s = clock.steady_s() - start_s + _SAMPLE_S
                    progress(number, side.cold_starts)
                    continue
                clock.wait(never, min(left_s, _SAMPLE_S))
            pool.submit(serve, arrival)
    side.readings.append(_read_surely(node, clock))
    progress(len(arrivals), side.cold_starts)
    side.served.sort(key=lambda s: s.at_s)
    return side

"""`prefetcher bench cascade`: three to ten idle models of 14 to 35 GB are called within a second, and half of eight nodes have ten seconds
of loads to do.

Every node is a real residency machine with a loader that takes bytes over link in virtual time; requests go where the endpoint's own desk
sends them (`api.routing`), which knows of nodes what they report once a second, and of its own answers what it remembers. Peers send the
same calls to the same nodes: by rendezvous hashing, and to the node with the least queued as of its report, in turn among equals. Links
serve in Smith's order for all of them, and what runs gives way to what is denser; `rendezvous-plain` has nodes with prefetching switched
off, where nothing gives way. `foresight` knows all calls and every link beforehand, and sends each where everybody waits least in all:
beside what calls would wait if none ever queued, which takes more idle nodes than there are, that is what placement could reach. Memory
suffices, so what is measured is the link: 3.5 GB/s, a disk, and three faster ones: a load itself is what no placement can shorten.
"""

from __future__ import annotations

import itertools
import json as json_format
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from prefetcher.agent.report import queued_of
from prefetcher.api.fleet import Fleet
from prefetcher.api.routing import RouteDesk
from prefetcher.bench.machine import describe_machine
from prefetcher.clock import VirtualClock
from prefetcher.controller import records
from prefetcher.core import events as ev
from prefetcher.core.copies import IN_FLIGHT, Stage
from prefetcher.core.facts import RowServed
from prefetcher.core.link_queue import LinkLoad, link_goes_on
from prefetcher.core.node import BLOCK_BYTES
from prefetcher.core.rendezvous import by_rendezvous
from prefetcher.core.residency import NodeLimits, ResidencyMachine
from prefetcher.core.types import ModelName, ModelVersion, NodeName, Tier, WeightsKey
from prefetcher_connectors.memory import MemoryState

__all__ = ["Call", "Cascade", "Outcome", "figures_of", "make_cascade", "play", "play_all", "run"]

_SEEDS = 200
_QUICK_SEEDS = 20
_NODES = 8
_LINK_BYTES_PER_S = 3.5e9
#: Two disks, four of them, and the way from host memory to a device.
_FASTER_BYTES_PER_S = (7e9, 14e9, 50e9)
_FASTER_SEEDS = 50
_HOST_BYTES = 4_000 * 10**9
#: Seconds of link of the two loads that each busy node has to do.
_BUSY_S = (6.0, 4.0)
_SIZES_GB = (14, 35)
#: What is told of faster links.
_OF_LINKS = (
    "ratio", "least_ratio", "foresight_ratio", "ratio_with_queued", "ratio_to_plain", "ratio_to_plain_with_queued", "violations", "seeds",
)  # fmt: skip
_T0 = 1_767_225_600.0
_REPORT_S = 1.0

#: Chooses the node of a call: (model, reports as the desk sees them) to its name.
Chooser = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Call:
    """A request for an idle model."""

    at_s: float
    model: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Cascade:
    """What happens: the nodes that are busy, when each node reports, and the calls in order of time."""

    seed: int
    busy: tuple[int, ...]
    report_offset_s: tuple[float, ...]
    calls: tuple[Call, ...]
    link_bytes_per_s: float = _LINK_BYTES_PER_S


@dataclass(slots=True)
class Outcome:
    """What came of it. `waits_s` of the calls, in their order; `queued_s` of the requests that were there before."""

    waits_s: list[float] = field(default_factory=list)
    queued_s: float = 0.0
    nodes: list[str] = field(default_factory=list)
    not_served: int = 0
    loaded_twice: int = 0
    queued_beside_idle: int = 0

    @property
    def cold_seconds(self) -> float:
        return sum(self.waits_s)

    @property
    def violations(self) -> int:
        return self.not_served + self.loaded_twice + self.queued_beside_idle


def make_cascade(seed: int, link_bytes_per_s: float = _LINK_BYTES_PER_S, nodes: int = _NODES) -> Cascade:
    """Half of the nodes are busy; 3 to 10 models are called at random moments of one second."""
    rng = np.random.default_rng(seed)
    busy = tuple(sorted(rng.choice(nodes, nodes // 2, replace=False).tolist()))
    count = int(rng.integers(3, 11))
    times = np.sort(rng.random(count))
    sizes = rng.integers(_SIZES_GB[0] * 10**9, _SIZES_GB[1] * 10**9, count, endpoint=True)
    calls = tuple(Call(_T0 + float(t), f"long-tail-{seed}-{i}", int(size)) for i, (t, size) in enumerate(zip(times, sizes, strict=True)))
    # All have reported in the last second.
    return Cascade(seed, busy, tuple((-rng.random(nodes)).tolist()), calls, link_bytes_per_s)


class _Node:
    """A residency machine and its loader, in virtual time."""

    def __init__(self, name: str, sizes: dict[str, int], link_bytes_per_s: float, plain: bool) -> None:
        self.name = NodeName(name)
        self._link = link_bytes_per_s
        limits = NodeLimits({Tier.HOST: _HOST_BYTES}, link_bytes_per_s=link_bytes_per_s, stall_s=math.inf, demand_deadline_s=1e9)
        self.machine = ResidencyMachine(self.name, limits)
        self.served: dict[str, float] = {}
        self.dropped = 0
        self.began: list[str] = []
        self.end_s = math.inf
        #: What moves, since when, from which byte on, and whether it ends with its block.
        self._moving: tuple[WeightsKey, float, int] | None = None
        self._pauses = False
        if plain:
            self.tell(ev.SwitchedOff(), 0.0)
        for model, size in sizes.items():
            self.tell(ev.CatalogSeen(_key(model), size, {Tier.HOST: size / self._link}), 0.0)

    def tell(self, event: ev.Event, now_s: float) -> None:
        for told in self.machine.handle(event, now_s):
            match told:
                case ev.LoadWeights():
                    if not told.resumed:
                        self.began.append(str(told.key.model))
                    self._moving, self._pauses = (told.key, now_s, told.resume_from_bytes), False
                    self.end_s = now_s + (told.bytes - told.resume_from_bytes) / self._link
                case ev.PauseLoad():
                    self._pause(now_s)
                case ev.EvictWeights():
                    self.tell(ev.WeightsEvicted(told.key, told.tier), now_s)
                case ev.Record(RowServed() as fact):
                    self.served[str(fact.model)] = fact.wait_s
                    self.dropped += fact.dropped
                case _:
                    pass

    def ask(self, model: str, now_s: float) -> None:
        """A request comes, and finds the load that runs as far as it is."""
        if self._moving is not None:
            self.tell(ev.BytesVerified(self._moving[0], Tier.HOST, self._done(now_s)), now_s)
        self.tell(ev.Requested(ModelName(model), now_s), now_s)

    def _done(self, now_s: float) -> int:
        """Bytes of what moves that are there by then."""
        assert self._moving is not None
        _, since_s, from_bytes = self._moving
        return from_bytes + round((now_s - since_s) * self._link)

    def _pause(self, now_s: float) -> None:
        """What moves ends with its block, unless that is its last."""
        assert self._moving is not None
        _, since_s, from_bytes = self._moving
        block_end = from_bytes + math.ceil((self._done(now_s) - from_bytes + 1) / BLOCK_BYTES) * BLOCK_BYTES
        end_s = since_s + (block_end - from_bytes) / self._link
        if end_s < self.end_s:
            self.end_s, self._pauses = end_s, True

    def go_on(self) -> None:
        """The load that runs is done, or pauses."""
        assert self._moving is not None
        key, now_s, done = self._moving[0], self.end_s, self._done(self.end_s)
        self._moving, self.end_s = None, math.inf
        self.tell(ev.LoadPaused(key, Tier.HOST, done) if self._pauses else ev.WeightsLoaded(key, Tier.HOST), now_s)

    @property
    def idle(self) -> bool:
        return not any(weights.demanded for weights in self.machine.holdings.weights.values())

    def report(self, now_s: float) -> records.NodeReport:
        """What an agent of this node would say."""
        holdings, moving = self.machine.holdings, self._moving

        def done(key: WeightsKey) -> int:
            return 0 if moving is None or moving[0] != key else self._done(now_s)

        held = tuple(
            records.HeldWeights(
                key.model, key.version, "host", copy.stage.value, holdings.weights[key].bytes, max(copy.bytes_done, done(key))
            )
            for key, copy in sorted(holdings.in_tier[Tier.HOST].items())
            if copy.stage is Stage.READY or copy.stage in IN_FLIGHT
        )
        known = tuple(
            records.KnownWeights(key.model, key.version, weights.bytes, weights.bytes / self._link)
            for key, weights in sorted(holdings.weights.items())
        )
        memory = records.Memory(_HOST_BYTES, holdings.used_bytes[Tier.HOST])
        queued = queued_of(self.machine, self._link, done)
        return records.NodeReport(self.name, now_s, memory, self._link, held=held, known=known, queued=queued)


def _key(model: str) -> WeightsKey:
    return WeightsKey(ModelName(model), ModelVersion("v"))


class _Fleet:
    """The nodes of a cascade, and what they report to a state store."""

    def __init__(self, cascade: Cascade, plain: bool) -> None:
        self.clock = VirtualClock(_T0 - _REPORT_S)
        self.state = MemoryState(self.clock)
        self.cascade = cascade
        called = {call.model: call.size_bytes for call in cascade.calls}
        self.nodes: dict[str, _Node] = {}
        self._report_s: dict[str, float] = {}
        for number, offset_s in enumerate(cascade.report_offset_s):
            link = cascade.link_bytes_per_s
            busy = {f"busy-{number}-{i}": round(took_s * link) for i, took_s in enumerate(_BUSY_S)} if number in cascade.busy else {}
            node = self.nodes[f"node-{number}"] = _Node(f"node-{number}", called | busy, link, plain)
            self._report_s[node.name] = _T0 + offset_s
            for model in busy:
                # They were asked for just before.
                node.tell(ev.Requested(ModelName(model), _T0), _T0)

    def until(self, at_s: float) -> None:
        """Loads end and nodes report, up to `at_s`."""
        while True:
            report_s, name = min((s, n) for n, s in self._report_s.items())
            ends = min(self.nodes.values(), key=lambda node: node.end_s)
            due_s = min(report_s, ends.end_s)
            if due_s > at_s or (math.isinf(ends.end_s) and math.isinf(at_s)):
                break
            if ends.end_s <= report_s:
                ends.go_on()
                continue
            self._tell(name, due_s)
            self._report_s[name] += _REPORT_S
        if math.isfinite(at_s):
            self.clock.advance(max(0.0, at_s - self.clock.now_s()))

    def _tell(self, name: str, at_s: float) -> None:
        self.clock.advance(max(0.0, at_s - self.clock.now_s()))
        # A node's loads are told from the time on at which they began.
        report = self.nodes[name].report(max(at_s, _T0))
        self.state.write({records.node_key(NodeName(name), "report"): records.encode(report)})
        self.state.see(records.NODES, name, at_s)


def play(cascade: Cascade, chooser: Callable[[_Fleet], Chooser], plain: bool = False) -> Outcome:
    """Sends every call to the node that is chosen for it at its time, and lets all loads finish; `plain`: nodes are switched off."""
    fleet = _Fleet(cascade, plain)
    outcome = Outcome()
    fleet.until(_T0)
    choose = chooser(fleet)
    for call in cascade.calls:
        fleet.until(call.at_s)
        name = choose(call.model)
        outcome.nodes.append(name)
        there = fleet.nodes[name]
        if not there.idle and any(node.idle for node in fleet.nodes.values()):
            outcome.queued_beside_idle += 1
        there.ask(call.model, call.at_s)
    fleet.until(math.inf)
    began = [model for node in fleet.nodes.values() for model in node.began]
    served = {model: wait_s for node in fleet.nodes.values() for model, wait_s in node.served.items()}
    for call in cascade.calls:
        outcome.waits_s.append(served.get(call.model, math.nan))
        outcome.not_served += call.model not in served
        outcome.loaded_twice += began.count(call.model) > 1
    outcome.not_served += sum(node.dropped for node in fleet.nodes.values())
    outcome.queued_s = sum(wait_s for model, wait_s in served.items() if model.startswith("busy-"))
    return outcome


def _ours(fleet: _Fleet) -> Chooser:
    desk = RouteDesk(fleet.state, Fleet(fleet.state, fleet.clock), fleet.clock)
    return lambda model: desk.route([model])[0].node


def _rendezvous(fleet: _Fleet) -> Chooser:
    names = list(fleet.nodes)
    return lambda model: names[by_rendezvous(model, names)[0]]


def _least_loaded(fleet: _Fleet) -> Chooser:
    """The least queued seconds as of the last report; in turn among equals."""
    turns = itertools.count()
    names = list(fleet.nodes)

    def choose(model: str) -> str:
        queued = {}
        for name in names:
            raw = fleet.state.read(records.node_key(NodeName(name), "report"))
            assert raw is not None
            queued[name] = round(sum(q.left_s for q in records.decode_report(raw).queued), 1)
        least = [name for name in names if queued[name] == min(queued.values())]
        return least[next(turns) % len(least)]

    return choose


def _moved(
    i: int, at: list[list[int]], gain: Callable[[dict[int, list[int]]], tuple[float, dict[int, float]]], take: Callable[..., None]
) -> bool:
    """Sends call `i` elsewhere, or changes its place with another's, where that gains; whether it did."""
    here = next(n for n, calls in enumerate(at) if i in calls)
    left = [k for k in at[here] if k != i]
    for n in range(len(at)):
        if n == here:
            continue
        swaps = [{here: [*left, k], n: [*(other for other in at[n] if other != k), i]} for k in at[n]]
        for way in ({here: left, n: [*at[n], i]}, *swaps):
            won, after = gain(way)
            if won > 1e-6:
                take(way, after)
                return True
    return False


def _foresight(fleet: _Fleet) -> Chooser:
    """All calls and links known beforehand: single calls go elsewhere, and pairs change places, as long as everybody waits less in all."""
    cascade, names = fleet.cascade, list(fleet.nodes)
    link = cascade.link_bytes_per_s
    there = [[LinkLoad(0.0, takes_s, 1.0) for takes_s in _BUSY_S] if n in cascade.busy else [] for n in range(len(names))]
    loads = [LinkLoad(call.at_s - _T0, call.size_bytes / link, 1.0) for call in cascade.calls]

    def waits_s(n: int, calls: Sequence[int]) -> float:
        queue = [*there[n], *(loads[i] for i in calls)]
        return sum(end_s - load.at_s for load, (_, end_s) in zip(queue, link_goes_on(queue, math.inf), strict=True))

    at: list[list[int]] = [[] for _ in names]
    cost = [waits_s(n, []) for n in range(len(names))]

    def gain(changed: dict[int, list[int]]) -> tuple[float, dict[int, float]]:
        after = {n: waits_s(n, calls) for n, calls in changed.items()}
        return sum(cost[n] - after[n] for n in changed), after

    def take(changed: dict[int, list[int]], after: dict[int, float]) -> None:
        for n, calls in changed.items():
            at[n], cost[n] = calls, after[n]

    for i in range(len(loads)):
        ways = [{n: [*at[n], i]} for n in range(len(names))]
        gains = [gain(way) for way in ways]
        best = max(range(len(names)), key=lambda n: gains[n][0])
        take(ways[best], gains[best][1])
    better = True
    while better:
        better = any(_moved(i, at, gain, take) for i in range(len(loads)))
    told = {call.model: names[n] for n, calls in enumerate(at) for call in (cascade.calls[i] for i in calls)}
    return told.__getitem__


_POLICIES: dict[str, Callable[[_Fleet], Chooser]] = {
    "ours": _ours,
    "rendezvous": _rendezvous,
    "rendezvous-plain": _rendezvous,
    "least-loaded": _least_loaded,
    "foresight": _foresight,
}


def play_all(seeds: Sequence[int], link_bytes_per_s: float = _LINK_BYTES_PER_S) -> list[dict[str, Outcome]]:
    """What came of every seed's cascade, by policy."""
    cascades = (make_cascade(seed, link_bytes_per_s) for seed in seeds)
    return [{name: play(cascade, chooser, name.endswith("-plain")) for name, chooser in _POLICIES.items()} for cascade in cascades]


def _all_seconds(outcome: Outcome) -> float:
    """Of the calls and of who was there before."""
    return outcome.cold_seconds + outcome.queued_s


def _ratio(
    found: Sequence[dict[str, Outcome]],
    what: Callable[[Outcome], float] = lambda outcome: outcome.cold_seconds,
    of: str = "ours",
    over: str = "rendezvous",
) -> float:
    return round(sum(what(o[of]) for o in found) / sum(what(o[over]) for o in found), 4)


def figures_of(found: Sequence[dict[str, Outcome]], link_bytes_per_s: float = _LINK_BYTES_PER_S) -> dict[str, Any]:
    """Cold seconds of the calls and what else came of them. `ratio` is ours over rendezvous; `least_ratio` what it would be if no call ever
    queued, `foresight_ratio` what it is if all is known beforehand; `_with_queued` counts those who were there before, too; `_to_plain` is
    over rendezvous hashing on nodes where nothing gives way."""
    waits = {name: np.array([wait_s for o in found for wait_s in o[name].waits_s]) for name in _POLICIES}
    load_s = sum(call.size_bytes / link_bytes_per_s for seed in range(len(found)) for call in make_cascade(seed).calls)
    of_seeds = [o["ours"].cold_seconds / o["rendezvous"].cold_seconds for o in found]
    ours = [o["ours"] for o in found]
    return {
        "ratio": _ratio(found),
        "least_ratio": round(load_s / float(waits["rendezvous"].sum()), 4),
        "foresight_ratio": _ratio(found, of="foresight"),
        "ratio_with_queued": _ratio(found, _all_seconds),
        "foresight_ratio_with_queued": _ratio(found, _all_seconds, of="foresight"),
        "ratio_to_plain": _ratio(found, over="rendezvous-plain"),
        "ratio_to_plain_with_queued": _ratio(found, _all_seconds, over="rendezvous-plain"),
        "ratio_to_least_loaded": round(float(waits["ours"].sum() / waits["least-loaded"].sum()), 4),
        "ratio_of_seeds": {f"p{p}": round(float(np.percentile(of_seeds, p)), 4) for p in (10, 50, 90, 100)},
        "violations": sum(outcome.violations for outcome in ours),
        "not_served": sum(outcome.not_served for outcome in ours),
        "loaded_twice": sum(outcome.loaded_twice for outcome in ours),
        "queued_beside_idle": sum(outcome.queued_beside_idle for outcome in ours),
        "seeds": len(found),
        "calls": len(waits["ours"]),
        "wait_s": {name: {"mean": round(float(w.mean()), 3), "p99": round(float(np.percentile(w, 99)), 3)} for name, w in waits.items()},
        "load_s_mean": round(load_s / len(waits["ours"]), 3),
    }


def run(json: Path, quick: bool = False) -> None:
    """Plays all seeds, prints and writes the figures to `json`."""
    found = play_all(range(_QUICK_SEEDS if quick else _SEEDS))
    figures = figures_of(found)
    faster = {}
    for link in _FASTER_BYTES_PER_S:
        others = play_all(range(_QUICK_SEEDS if quick else _FASTER_SEEDS), link)
        faster[f"{link:.1e}"] = {name: figures_of(others, link)[name] for name in _OF_LINKS}
    figures["by_link_bytes_per_s"] = faster
    peers = {
        name: {
            "cold_seconds": round(sum(o[name].cold_seconds for o in found), 1),
            "queued_beside_idle": sum(o[name].queued_beside_idle for o in found),
        }
        for name in _POLICIES
        if name != "ours"
    }
    text = json_format.dumps({"figures": figures, "peers": peers, "machine": describe_machine()}, indent=2)
    json.parent.mkdir(parents=True, exist_ok=True)
    json.write_text(text + "\n")
    print(text)

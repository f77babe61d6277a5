"""What controllers, agents and endpoints know of each other: every key of the state store, and the records under them.

| key | what | who writes | ends |
| --- | --- | --- | --- |
| `prefetcher:{installation}:version` | number of the format of all that is stored (`state_version`) | any, at its start | never |
| `prefetcher:{controller}:epoch` | counter of leaderships; the number is the leader's fence | a controller at its start | never |
| `prefetcher:{controller}:fence` | fence of whoever wrote last; a lower one is refused | controller | never |
| `prefetcher:{controller}:lease` | name of the controller that leads | a controller | `leadership.LEASE_S` after its last renewal |
| `prefetcher:{controller}:learned` | positions in the streams and everything learned up to them, as safetensors | controller | never |
| `prefetcher:{controller}:shadows` | every node's shadow caches at the same positions, as safetensors | controller | never |
| `prefetcher:{controller}:hints` | open hints and the record of every source at the same positions (`core.hints`) | controller | never |
| `prefetcher:{nodes}:seen` | sorted set: node name, when it was there last, to half a minute | agent | when the node is forgotten |
| `prefetcher:{nodes}:to-forget` | sorted set: node that somebody wants forgotten, since when | endpoint | when that was looked at |
| `prefetcher:{nodes}:gone` | list of `report.gone.GoneNode`: what reports and the experiment need of the forgotten | scheduler | 42 days |
| `prefetcher:{controller}:forecasts` | `Forecasts`: how likely each model is used soon | controller | after two ticks |
| `prefetcher:{controller}:placements` | `Placements`: where wanted models go, and what room costs | controller | after two ticks |
| `prefetcher:{controller}:routes` | where requests go (`core.routing_shares`), as of `learned` | controller | never |
| `prefetcher:{routes}:intents` | `Intents`: cold models that routers were just told a node for | endpoint | an entry at its `until_s` |
| `prefetcher:{controller}:switch` | `Switch` of all nodes: prefetching on, observed or off | endpoint | never |
| `prefetcher:{group/G}:switch`, `prefetcher:{node/N}:switch` | the same of a group and of a node; the strictest counts | endpoint | never |
| `prefetcher:{controller}:pins` | JSON object: model name to `Pin`, on every node; of old a list of names | endpoint | a pin at its end |
| `prefetcher:{controller}:idle-pins` | `controller.idle_pins.IdleRecord`: what is kept and earns less than it costs | controller | never |
| `prefetcher:{controller}:by-hand` | list of `ByHand`, acts and switches by people; the last `BY_HAND_KEPT` | endpoint | by count |
| `prefetcher:{controller}:schedules` | JSON object: name to `core.schedules.Schedule` of a batch job | endpoint | never |
| `prefetcher:{controller}:experiment` | `controller.experiment.Experiment`: when a control group ran | controller | never |
| `prefetcher:{controller}:windows` | `controller.windows.BooksRecord`: the windows in force, and before | endpoint, scheduler | never |
| `prefetcher:{controller}:window-events` | list of `controller.windows.WindowEvent` | endpoint, scheduler | by count |
| `prefetcher:{controller}:window-facts` | what models are sorted into segments by (`controller.windows`) | scheduler | never |
| `prefetcher:{jobs}:known` | list of `batch.runs.JobAbout`: the jobs, when each is due, and its rules | scheduler | never |
| `prefetcher:{jobs}:schedulers` | sorted set: scheduler, when it looked for work last | scheduler | never; read for 10 s |
| `prefetcher:{job/J}:record` | `batch.runs.JobRecord` of job J: what runs, the last runs, what was due | scheduler | never |
| `prefetcher:{job/J}:lease` | who runs job J | scheduler | `batch.scheduler.LEASE_S` after a renewal |
| `prefetcher:{job/J}:number` | counter of runs of job J; the number is the run's fence | scheduler | never |
| `prefetcher:{job/J}:fence` | number of the run that wrote last; a lower one is refused | scheduler | never |
| `prefetcher:{job/J}:wanted` | `batch.runs.Wanted`: somebody wants a run now | endpoint | after 10 min |
| `prefetcher:{job/J}:made` | what the last run of job J made, as the job says (`batch.jobs`) | scheduler | never |
| `prefetcher:{claim/D}` | what became of hints (`api.hints`); D: digest of key or id, and of who sent them | endpoint | after 10 min |
| `prefetcher:{node/N}:fence` | fence of the plan below | controller | never |
| `prefetcher:{node/N}:plan` | `core.types.Plan` of node N | controller | never |
| `prefetcher:{node/N}:decides` | `Decides`: the expert that decides on node N, and what each would have cost | controller | never |
| `prefetcher:{node/N}:lease` | host and id of the agent that is node N (`agent.name_lease`) | agent | `REPORT_EXPIRES_S` after a renewal |
| `prefetcher:{node/N}:report` | `NodeReport` of node N | agent | after `REPORT_EXPIRES_S` |
| `prefetcher:{node/N}:totals` | what node N's ledger adds up to, with memory that is still held (`agent.orderbook`) | agent | never |
| `prefetcher:{node/N}:sums` | `report.sums.StoredLedger` of node N: what is held, which hours it told | agent | `SUMS_EXPIRE_S` after it |
| `prefetcher:{node/N}:hour/H.P` | part P of hour H since 1970 of node N's ledger (`report.sums.encode_hour`) | agent | the same |
| `prefetcher:{node/N}:shadow-hours` | `report.shadows.ShadowHours`: waits with prefetching off, as the shadow counts | controller | never |
| `prefetcher:{node/N}:blocks` | list of `core.block_sums.BlockSum`: node N's hours of the experiment | agent | by count |
| `prefetcher:{node/N}:shadow` | list of (hour, seconds): what its shadow waited in the same minutes | controller | by count |
| `prefetcher:{node/N}:orders` | list of `OrderRecord`, one for each change; the last `ORDERS_KEPT` | agent | by count |
| `prefetcher:{node/N}:ledger` | `agent.kept.LedgerState` of node N: its ledger, and what was not yet told on | agent | never |
| `prefetcher:{node/N}:machine` | `agent.kept.MachineState` of node N, written together with its ledger and totals | agent | never |
| `prefetcher:{pull/all}:S`, `prefetcher:{pull/D}:S` | who has slot S for fetching, of all or of model D | agent | 15 s after a renewal |

Channels (what is said there is heard at once or not at all; whoever misses it looks by itself within seconds):

| channel | what | who speaks | who listens |
| --- | --- | --- | --- |
| `prefetcher:{controller}:calls` | a reason to plan | endpoint | controller that leads |
| `prefetcher:{jobs}:calls` | the name of a job that somebody wants run | endpoint | schedulers |
| `prefetcher:{node/N}:calls` | `Call` to node N: there is a plan, rows, an act by hand, the switch | controller, endpoint | agent of N |

A key of a node is one of `NODE_KEYS`, and goes when the node is forgotten (`batch.gone_nodes`), whatever its end says.
The braces are hash tags: keys that are written together lie in one slot of a cluster. Records are JSON but for `learned` and `shadows`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import numpy as np

from prefetcher.core.schedules import Schedule
from prefetcher.core.types import NodeName, Plan, RequestSeen

__all__ = [
    "BY_HAND_KEPT",
    "ORDERS_KEPT",
    "REPORT_EXPIRES_S",
    "SEEN_EVERY_S",
    "SUMS_EXPIRE_S",
    "ByHand",
    "Call",
    "Decides",
    "Forecasts",
    "HeldWeights",
    "HintSource",
    "Intent",
    "Intents",
    "KnownWeights",
    "Memory",
    "NodeReport",
    "NodeRoom",
    "OrderRecord",
    "Pin",
    "Placements",
    "QueuedWeights",
    "Switch",
    "decode",
    "decode_pins",
    "decode_plan",
    "decode_report",
    "decode_schedules",
    "decode_switch",
    "encode",
    "group_key",
    "hour_key",
    "job_key",
    "pack_arrays",
    "pull_key",
    "strictest",
    "unpack_arrays",
]

EPOCH = "prefetcher:{controller}:epoch"
FENCE = "prefetcher:{controller}:fence"
LEARNED = "prefetcher:{controller}:learned"
SHADOWS = "prefetcher:{controller}:shadows"
HINTS = "prefetcher:{controller}:hints"
LEASE = "prefetcher:{controller}:lease"
FORECASTS = "prefetcher:{controller}:forecasts"
PLACEMENTS = "prefetcher:{controller}:placements"
ROUTES = "prefetcher:{controller}:routes"
INTENTS = "prefetcher:{routes}:intents"
CALLS = "prefetcher:{controller}:calls"
NODES = "prefetcher:{nodes}:seen"
SWITCH = "prefetcher:{controller}:switch"
PINS = "prefetcher:{controller}:pins"
BY_HAND = "prefetcher:{controller}:by-hand"
IDLE_PINS = "prefetcher:{controller}:idle-pins"
SCHEDULES = "prefetcher:{controller}:schedules"
JOBS = "prefetcher:{jobs}:known"
SCHEDULERS = "prefetcher:{jobs}:schedulers"
JOB_CALLS = "prefetcher:{jobs}:calls"
TO_FORGET = "prefetcher:{nodes}:to-forget"
GONE = "prefetcher:{nodes}:gone"

#: Every key of a node but those of its hours, which its `sums` list. All of them go when it is forgotten; the lease last.
NODE_KEYS = frozenset(
    {
        "fence", "plan", "decides", "lease", "report", "totals", "sums", "shadow-hours", "blocks", "shadow", "orders", "ledger",
        "machine", "switch",
    }
)  # fmt: skip

#: Real seconds between notes in `NODES` that an agent is there.
SEEN_EVERY_S = 30.0
#: An agent reports every second; three missed reports and it counts as gone.
REPORT_EXPIRES_S = 5.0
#: A week of one order a minute.
ORDERS_KEPT = 10_000
#: Nine days: reports of a week find every hour, and a job that moves hours into the history may be away for a day.
SUMS_EXPIRE_S = 777_600.0
BY_HAND_KEPT = 1_000


def group_key(group: str, what: str) -> str:
    """The key of `what` (switch) of a group of nodes."""
    return f"prefetcher:{{group/{group}}}:{what}"


def node_key(node: NodeName, what: str) -> str:
    """The key of `what` (one of `NODE_KEYS`, or `answer/ID`, which ends by itself), or the channel `calls`, of a node.

    Raises ValueError for any other: what is not listed would stay when the node is forgotten.
    """
    if what not in NODE_KEYS and what != "calls" and not what.startswith("answer/"):
        raise ValueError(f"{what!r} is none of a node's keys; add it to NODE_KEYS, so that it goes when the node is forgotten")
    return f"prefetcher:{{node/{node}}}:{what}"


def hour_key(node: NodeName, hour: int, part: int) -> str:
    """The key of a part of an hour (since 1970) of a node's ledger."""
    return f"prefetcher:{{node/{node}}}:hour/{hour}.{part}"


def pull_key(what: str, slot: int) -> str:
    """The key of one of the slots for fetching from the store: of all nodes ("all"), or of one model's version (its digest)."""
    return f"prefetcher:{{pull/{what}}}:{slot}"


def job_key(job: str, what: str) -> str:
    """The key of `what` (record, lease, number, fence, wanted, made) of a job."""
    return f"prefetcher:{{job/{job}}}:{what}"


_T = TypeVar("_T")


def decode(raw: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    """What `raw` holds. Raises ValueError, and nothing else, where that is not what `decoder` reads: anybody may write to the store."""
    try:
        return decoder.decode(raw)
    except RecursionError as exc:
        raise ValueError("nested too deep") from exc


class Switch(msgspec.Struct, frozen=True):
    """Whether prefetching is on, since when, and by whom. `observe`: it is decided and recorded, and nothing is loaded. At `until_s` an
    endpoint puts it back to on."""

    on: bool = True
    since_s: float = 0.0
    by: str = ""
    observe: bool = False
    until_s: float | None = None

    @property
    def mode(self) -> str:
        return "off" if not self.on else "observe" if self.observe else "on"


_switches = msgspec.json.Decoder(Switch)


def decode_switch(raw: bytes) -> Switch:
    """A switch as `encode` wrote it. Raises ValueError where it is none."""
    return decode(raw, _switches)


def strictest(raw: Iterable[bytes | None]) -> Switch:
    """What several switches (of all nodes, of a group, of one node; None where nobody touched it) say together.

    Raises ValueError where one of them is none: what it would say is not known.
    """
    found = [decode_switch(item) for item in raw if item is not None]
    return max(found, key=lambda switch: ("on", "observe", "off").index(switch.mode), default=Switch())


class Pin(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model that people keep in memory: by whom, since when, and until when, None for no end. `allow_release`: it may be taken away by
    itself once it is worth less than it costs for long (`controller.idle_pins`). `others`: who pinned it before and still does."""

    by: str = ""
    at_s: float = 0.0
    until_s: float | None = None
    allow_release: bool = False
    others: tuple[Pin, ...] = ()

    def _holders(self) -> tuple[Pin, ...]:
        return (msgspec.structs.replace(self, others=()), *self.others)

    @staticmethod
    def _of(holders: Iterable[Pin]) -> Pin | None:
        found = list(holders)
        return msgspec.structs.replace(found[0], others=tuple(found[1:])) if found else None

    def held_by(self, by: str) -> bool:
        """Whether `by` is one of those who pinned it; what nobody's name is on is everybody's."""
        return any(holder.by in ("", by) for holder in self._holders())

    def with_holder(self, pin: Pin) -> Pin:
        """Pinned by one more, whose earlier pin this one replaces."""
        return msgspec.structs.replace(pin, others=tuple(h for h in self._holders() if h.by not in ("", pin.by)))

    def without_holder(self, by: str) -> Pin | None:
        """As others still pin it; None where nobody does."""
        return self._of(holder for holder in self._holders() if holder.by not in ("", by))

    def standing(self, now_s: float) -> Pin | None:
        """Without those whose time is up; None where it is up for all."""
        return self._of(holder for holder in self._holders() if holder.until_s is None or holder.until_s > now_s)


_pins = msgspec.json.Decoder(dict[str, Pin] | list[str])


def decode_pins(raw: bytes | None) -> dict[str, Pin]:
    """Pins by model name; those of older versions have no end. Raises ValueError for something else."""
    found = {} if raw is None else decode(raw, _pins)
    return found if isinstance(found, dict) else {name: Pin() for name in found}


_schedules = msgspec.json.Decoder(dict[str, Schedule])


def decode_schedules(raw: bytes | None) -> dict[str, Schedule]:
    """Batch schedules by name. Raises ValueError for something else."""
    return {} if raw is None else decode(raw, _schedules)


class ByHand(msgspec.Struct, frozen=True, omit_defaults=True):
    """What somebody did by hand. `node` and `group` are '' where it was for all; `by`: the name of a key, or where it came from."""

    act: str
    at_s: float
    by: str
    model: str = ""
    node: str = ""
    group: str = ""
    until_s: float | None = None
    reason: str = ""


class PredictorState(msgspec.Struct, frozen=True):
    """A predictor of the controller. `why_not`: '' while it speaks, else why recent rates speak in its place.

    `fits`, `from_s`, `until_s`, `rows`: how often it was fitted, and on what last. `scores`: by horizon in seconds, how its forecasts did
    on what came after the fit before. `fallbacks`: forecasts that something else stood in for, by reason, since the controller began.
    """

    name: str
    why_not: str = ""
    fits: int = 0
    from_s: float | None = None
    until_s: float | None = None
    rows: int = 0
    scores: dict[str, dict[str, float]] = {}
    fallbacks: dict[str, int] = {}


class Decides(msgspec.Struct, frozen=True):
    """Which expert decides on a node as of `at_s`.

    `costs_s`: what each expert's shadow cache cost lately, discounted seconds of waiting and of holding. `shadow_wait_s`: how long rows
    would have waited so far with prefetching off. `learned_rows`: requests learned from since ever, of all nodes; `predictors`: what they
    made of them.
    """

    expert: str
    at_s: float
    costs_s: dict[str, float]
    shadow_wait_s: float
    learned_rows: int = 0
    predictors: tuple[PredictorState, ...] = ()


class HintSource(msgspec.Struct, frozen=True):
    """How a source's hints turned out, and how far the next one is believed (`core.hints.SourceRecord`)."""

    source: str
    kept: int
    broken: int
    weight: float


class Forecasts(msgspec.Struct, frozen=True):
    """As of `at_s`, and not to be used after `until_s`: P(used within 2, 10 and 60 min) by model, for every model ever used; `hinted`:
    what hints without a model led to, by source and surface (`core.hint_spread`); `sources`, those whose hints were settled last;
    `hint_classifier`: `in_force`, or why sources' records stand instead.
    """

    at_s: float
    until_s: float
    models: dict[str, tuple[float, float, float]]
    hinted: dict[str, tuple[tuple[str, float], ...]] = {}
    sources: tuple[HintSource, ...] = ()
    hint_classifier: str = ""


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is said to a node. `kind`: `plan` (a new one was written), `switch` (look at the switch), `rows` (`rows` were asked for, with
    `index` as the agent takes it), or `act` (do `act` to `model` and write the answer, an `Acted`, under `answer_key`).
    """

    kind: str
    rows: tuple[RequestSeen, ...] = ()
    index: dict[str, float] = {}
    act: str = ""
    model: str = ""
    answer_key: str = ""


class KnownWeights(msgspec.Struct, frozen=True):
    """Weights below the host tier: `load_s` is the measured time to load, or the link's where nothing was measured, and of weights that are
    only in the store (`tier` is remote) the time to fetch them too.

    Over its `loads` demand loads so far, `others` rows in all waited for other weights when its turn came: the model's own μ.
    `absent`: why it is not in memory, as a short name, where that is known (`words.reason`). `last_use_s` is None before the first use.
    """

    model: str
    version: str
    bytes: int
    load_s: float
    others: float = 0.0
    loads: float = 0.0
    last_use_s: float | None = None
    absent: str = ""
    pinned: bool = False
    tier: str = "disk"
    #: Of weights that are fetched just now: how many bytes are on disk.
    fetched_bytes: int | None = None


class HeldWeights(msgspec.Struct, frozen=True):
    """Weights in memory or on their way: `state` as the residency machine calls it. A `part` takes memory for its `bytes_done` alone."""

    model: str
    version: str
    tier: str
    state: str
    bytes: int
    bytes_done: int = 0
    cause: str = ""
    decision_id: str = ""
    since_s: float = 0.0
    last_use_s: float | None = None
    leases: int = 0
    pinned: bool = False
    contributions: tuple[tuple[str, float], ...] = ()

    @property
    def is_part(self) -> bool:
        return self.state == "part"

    @property
    def memory_bytes(self) -> int:
        return self.bytes_done if self.is_part else self.bytes


class QueuedWeights(msgspec.Struct, frozen=True, omit_defaults=True):
    """Weights that requests wait for: `rows` of them, the first since `since_s`, for `left_s` more of the link; `moving` while on it.

    `paused`: they have their memory and what was read so far. `behind`: the model that has the link they wait for.
    """

    model: str
    left_s: float
    rows: int
    moving: bool = False
    since_s: float | None = None
    paused: bool = False
    behind: str = ""


class Memory(msgspec.Struct, frozen=True):
    """The host tier's bytes: what may be used, what is taken, how it is backed. `reserve_bytes` of the budget are for demand alone."""

    budget_bytes: int
    taken_bytes: int
    locked: bool = False
    backing: str = ""
    warning: str = ""
    reserve_bytes: int = 0


class NodeReport(msgspec.Struct, frozen=True):
    """What an agent says about itself.

    `recent_wait_s` and `waiting_rows` are moving means over loads; `busy_ratio` of the last ten minutes. `unknown_rows`: requests since its
    start for models that it does not have, and in `unknown` which models, most asked for first. `queued`: what requests wait for now.
    `parts`: of what makes room there, what the room does not need stays.
    """

    node: str
    at_s: float
    memory: Memory
    link_bytes_per_s: float
    group: str = ""
    recent_wait_s: float = 0.0
    waiting_rows: float = 0.0
    busy_ratio: float = 0.0
    observe: bool = False
    prefetching: bool = True
    fence: int = 0
    revision: int = 0
    held: tuple[HeldWeights, ...] = ()
    known: tuple[KnownWeights, ...] = ()
    problems: tuple[str, ...] = ()
    unknown_rows: int = 0
    unknown: tuple[tuple[str, int], ...] = ()
    queued: tuple[QueuedWeights, ...] = ()
    parts: bool = False


class NodeRoom(msgspec.Struct, frozen=True):
    """What memory of a node costs, as its plan ranks it: `evictable_bytes` could go, and each of them would save `displaced_s_per_byte`
    seconds of waiting."""

    evictable_bytes: float
    displaced_s_per_byte: float


class Placements(msgspec.Struct, frozen=True):
    """As of `at_s`, and not to be used after `until_s`. `homes`: the node of each model that is wanted and not there; `shares`: of models
    whose requests name nodes, which share goes to which; `rooms`: by node. A model that is named nowhere goes where it is cheapest."""

    at_s: float
    until_s: float
    homes: dict[str, str] = {}
    shares: dict[str, dict[str, float]] = {}
    rooms: dict[str, NodeRoom] = {}


class Intent(msgspec.Struct, frozen=True):
    """A router was told at `at_s` that a model goes to `node`, with `rows` requests. It takes that node's link for `load_s` seconds, until
    its report shows so, or `until_s`."""

    node: str
    rows: int
    load_s: float
    at_s: float
    until_s: float


class Intents(msgspec.Struct, frozen=True):
    """Intents by model. Written whole, by compare and swap: several endpoints agree."""

    models: dict[str, Intent] = {}


class OrderRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One prefetch from decision to outcome, with what led to it.

    `outcome` is settled by `core.ledger`'s table; `premature` (weights asked for within one hold after an unused end) is None while the
    order runs, `redundant` (a node without prefetching had the weights too) where nobody knows.
    """

    decision_id: str
    node: str
    model: str
    version: str
    tier: str
    cause: str
    arm: str
    issued_s: float
    begin_s: float | None = None
    ready_s: float | None = None
    first_use_s: float | None = None
    end_s: float | None = None
    outcome: str = "open"
    reason: str = ""
    bytes: int = 0
    premature: bool | None = None
    redundant: bool | None = None
    contributions: tuple[tuple[str, float], ...] = ()
    source: str = ""


def encode(record: Any) -> bytes:
    """JSON of a record or of a core type."""
    return msgspec.json.encode(record)


_plans = msgspec.json.Decoder(Plan)
_reports = msgspec.json.Decoder(NodeReport)


def decode_plan(raw: bytes) -> Plan:
    """A plan as `encode` wrote it. Raises ValueError where it is none."""
    return decode(raw, _plans)


def decode_report(raw: bytes, node: str | None = None) -> NodeReport:
    """A report as `encode` wrote it, of `node` where that is given. Raises ValueError where it is none."""
    report = decode(raw, _reports)
    if node is not None and report.node != node:
        raise ValueError(f"it is of node {report.node[:80]!r}, and lies where that of {node!r} belongs")
    return report


def pack_arrays(arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> bytes:
    """Arrays and JSON facts as one safetensors buffer."""
    from safetensors.numpy import save

    plain = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    return save(plain, metadata={"meta": msgspec.json.encode(meta).decode()})


def unpack_arrays(raw: bytes) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """What `pack_arrays` packed. Raises ValueError where it is something else."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        length = int.from_bytes(raw[:8], "little")
        header = msgspec.json.decode(raw[8 : 8 + length])
        return load(raw), msgspec.json.decode(header["__metadata__"]["meta"])
    except (SafetensorError, msgspec.MsgspecError, KeyError, TypeError) as exc:
        raise ValueError(f"not a snapshot of what was learned: {exc}") from exc

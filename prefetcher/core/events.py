"""What a node's residency machine hears (events, past tense) and says (instructions, imperative).

Covers the vocabulary between `core.residency` and its shells; the facts that the ledger records are in `core.facts`.
Times are
seconds since 1970-01-01 UTC (`_s`), sizes bytes (`_bytes`). Where an event names weights by `target`, a bare model
name means the
version that serves.

What the machine expects of a loader, for every edge:

* `LoadWeights` takes the memory for all bytes of the weights (with `resumed` it has it already; without, those below
  `resume_from_bytes` are a part that is there) and is answered by any number of
  `BytesVerified` and then one of `WeightsLoaded`, `LoadPaused`, `LoadFailed`. After `LoadFailed` no byte of the copy
  is left in its tier.
* `PauseLoad` is answered by `LoadPaused` at the end of the running block, or by what happened first: `WeightsLoaded`
  or `LoadFailed`.
  The memory stays taken.
* `CancelLoad` and `EvictWeights` are answered by `WeightsEvicted` once the kernel has the bytes back, also when the
  load had just
  completed or failed, or nothing was left. Both are repeated when an answer is overdue, and may be answered more than
  once.
* `EvictWeights` with `keep_bytes` leaves so many of the first bytes there, or fewer, or none; nobody is given them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from prefetcher.core.facts import Fact
from prefetcher.core.types import Cause, DecisionId, ModelName, Order, Plan, Tier, WeightsKey

__all__ = [
    "AgentRestarted",
    "Answer",
    "BytesVerified",
    "CancelLoad",
    "CatalogSeen",
    "Event",
    "EvictAsked",
    "EvictWeights",
    "Evicted",
    "GrantLease",
    "HolderLost",
    "Instruction",
    "LeaseReleased",
    "LeaseRequested",
    "LoadAsked",
    "LoadFailed",
    "LoadPaused",
    "LoadWeights",
    "NoteSkipped",
    "PauseLoad",
    "Pinned",
    "PlanReceived",
    "Record",
    "RefuseLease",
    "RefuseOrder",
    "RefusePlan",
    "Requested",
    "SpaceSeen",
    "SwitchVersion",
    "SwitchedOff",
    "SwitchedOn",
    "Target",
    "Ticked",
    "Unpinned",
    "VersionPublished",
    "WeightsEvicted",
    "WeightsLoaded",
]

Target = WeightsKey | ModelName


class Evicted(StrEnum):
    """Why weights leave a tier."""

    ROOM = "room"  # something worth more needed the memory
    HOLD = "hold"  # a prefetch that nobody used within its hold
    WINDOW = "window"  # the time of the batch job that it was loaded for is over
    PRICE = "price"  # a held byte saves less than it costs
    VERSION = "version"  # a newer version serves
    ASKED = "asked"  # by hand
    OVERDUE = "overdue"  # said again: it should have left by now
    BAD = "bad"  # not the bytes that were promised: to be quarantined
    GONE = "gone"  # it left without our doing
    NO_ROOM = "no_room"  # found at start, and larger than what is left of the budget


# --- events ---


@dataclass(frozen=True, slots=True)
class CatalogSeen:
    """Weights exist. `link_s` is the time of each edge by the tier that it leads to.

    `complete` are the tiers that hold every byte, verified; HOST and DEVICE among them are adopted if they fit. Seen
    again it refreshes
    times and adds tiers; a size that changed under the same key is refused (a version names its bytes).
    """

    key: WeightsKey
    bytes: int
    link_s: dict[Tier, float]
    complete: frozenset[Tier] = frozenset({Tier.DISK})


@dataclass(frozen=True, slots=True)
class PlanReceived:
    plan: Plan


@dataclass(frozen=True, slots=True)
class Requested:
    """A request row was seen: demand. `ts` is the row's own time; waits count from it.

    `index`, where the sender has it, is the weights' index with this row counted in: scores are refreshed before they are compared.
    `counted`: an unannounced lease was this use already; only the index is news. `tenant`: for whom it is, where somebody said so.
    """

    target: Target
    ts: float
    index: float | None = None
    counted: bool = False
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class LeaseRequested:
    """`holder` wants to map the weights: answered, once, by `GrantLease` or `RefuseLease` with the same `token`.

    `announced`: a request row came before it and is the same use; without one the lease counts as a row as well.
    """

    holder: str
    target: Target
    token: str = ""
    announced: bool = True


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """One lease of `holder` on the copy in `tier` ended (`tier` None: any tier, the highest first)."""

    holder: str
    key: WeightsKey
    tier: Tier | None = None


@dataclass(frozen=True, slots=True)
class HolderLost:
    """The holder died: its leases and the requests for leases that still wait are gone."""

    holder: str


@dataclass(frozen=True, slots=True)
class BytesVerified:
    """The copy in `tier` has `bytes_done` bytes that are there and verified."""

    key: WeightsKey
    tier: Tier
    bytes_done: int


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """Every byte is in `tier` and verified."""

    key: WeightsKey
    tier: Tier


@dataclass(frozen=True, slots=True)
class LoadPaused:
    """The load stands still and keeps its memory. `retry_after_s`: it paused by itself, and can't go on before."""

    key: WeightsKey
    tier: Tier
    bytes_done: int
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The load ended without the weights. `source_bad`: the copy below is not what was promised; it is served to nobody."""

    key: WeightsKey
    tier: Tier
    reason: str
    retry_after_s: float = 0.0
    source_bad: bool = False


@dataclass(frozen=True, slots=True)
class WeightsEvicted:
    """The kernel has the bytes back, but for the first `kept_bytes`: at most those that were to stay."""

    key: WeightsKey
    tier: Tier
    freed_bytes: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """`new` replaces `old` (same model); its `CatalogSeen` came before."""

    old: WeightsKey
    new: WeightsKey


@dataclass(frozen=True, slots=True)
class Pinned:
    """By hand: load, keep, never choose as a victim. Answered by `Answer` when `ask_id` is set, as the three below."""

    target: Target
    ask_id: str = ""


@dataclass(frozen=True, slots=True)
class Unpinned:
    target: Target
    ask_id: str = ""


@dataclass(frozen=True, slots=True)
class LoadAsked:
    """By hand: load into `tier` (None: the tier that serves), keep for `hold_s` if nobody uses it."""

    target: Target
    ask_id: str
    tier: Tier | None = None
    hold_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class EvictAsked:
    target: Target
    ask_id: str
    tier: Tier | None = None


@dataclass(frozen=True, slots=True)
class SwitchedOff:
    """No prefetching from now on: demand loading only."""


@dataclass(frozen=True, slots=True)
class SwitchedOn:
    """Prefetching is on; with `observe`, it is decided and recorded, and nothing is loaded."""

    observe: bool = False


@dataclass(frozen=True, slots=True)
class AgentRestarted:
    """The agent's process is new: transfers, leases and waiters of the old one are gone; of HOST and DEVICE only `kept` was found.

    The old one is taken to have ended when it was last heard of (the time of the machine's last event). `catalog` are all weights that
    still exist below; others are forgotten (None: all of them still do). What was found without being known as ready is adopted; where
    the weights themselves are not known yet, `CatalogSeen` tells of them.
    """

    kept: frozenset[tuple[WeightsKey, Tier]] = frozenset()
    catalog: frozenset[WeightsKey] | None = None


@dataclass(frozen=True, slots=True)
class SpaceSeen:
    """From now on `tier` may hold `budget_bytes` in all, what is there included; more than that may be there already."""

    tier: Tier
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed: holds, deadlines and back-offs are looked at. Send one at least every few seconds."""


Event = (
    CatalogSeen
    | PlanReceived
    | Requested
    | LeaseRequested
    | LeaseReleased
    | HolderLost
    | BytesVerified
    | WeightsLoaded
    | LoadPaused
    | LoadFailed
    | WeightsEvicted
    | VersionPublished
    | Pinned
    | Unpinned
    | LoadAsked
    | EvictAsked
    | SwitchedOff
    | SwitchedOn
    | AgentRestarted
    | SpaceSeen
    | Ticked
)


# --- instructions ---


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Move the weights up one edge. `order` is the prefetch behind it, if there is one.

    The bytes below `resume_from_bytes` are there. `resumed`: after a pause; then the memory is taken.
    """

    key: WeightsKey
    from_tier: Tier
    to_tier: Tier
    cause: Cause
    bytes: int
    order: Order | None = None
    resumed: bool = False
    resume_from_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PauseLoad:
    """`to`: the denser demand load that a demand load gives way to; None where a prefetch pauses, and where it is said again."""

    key: WeightsKey
    tier: Tier
    to: WeightsKey | None = None


@dataclass(frozen=True, slots=True)
class CancelLoad:
    """Stop (or drop what was paused) and give the memory back."""

    key: WeightsKey
    tier: Tier
    reason: str


@dataclass(frozen=True, slots=True)
class EvictWeights:
    """Give the memory back; `room_for` is what needs it when the reason is `room`. `keep_bytes`: the first ones stay, as a part."""

    key: WeightsKey
    tier: Tier
    reason: Evicted
    room_for: WeightsKey | None = None
    keep_bytes: int = 0


@dataclass(frozen=True, slots=True)
class GrantLease:
    """The holder may map the copy in `tier`. `bypass`: it was decided not to bring it nearer; `reason` says why."""

    holder: str
    key: WeightsKey
    tier: Tier
    bypass: bool = False
    reason: str = ""
    token: str = ""


@dataclass(frozen=True, slots=True)
class RefuseLease:
    """No lease. `retry_after_s` None: trying again as things are is of no use."""

    holder: str
    target: Target
    reason: str
    retry_after_s: float | None = None
    token: str = ""


@dataclass(frozen=True, slots=True)
class SwitchVersion:
    """From now on `new` is what the model's name means; one atomic step (a rename)."""

    model: ModelName
    old: WeightsKey
    new: WeightsKey


@dataclass(frozen=True, slots=True)
class RefuseOrder:
    decision_id: DecisionId
    reason: str


@dataclass(frozen=True, slots=True)
class RefusePlan:
    revision: int
    fence: int
    reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """To something asked by hand: done or begun (`ok`), or refused, and why."""

    ask_id: str
    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class NoteSkipped:
    """Something was not done, for a named reason: shells count it by `what` and `reason`."""

    what: str
    reason: str
    key: WeightsKey | None = field(default=None)


@dataclass(frozen=True, slots=True)
class Record:
    """Tell the ledger."""

    fact: Fact


Instruction = (
    LoadWeights
    | PauseLoad
    | CancelLoad
    | EvictWeights
    | GrantLease
    | RefuseLease
    | SwitchVersion
    | RefuseOrder
    | RefusePlan
    | Answer
    | NoteSkipped
    | Record
)

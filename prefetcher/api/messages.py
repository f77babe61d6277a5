"""What the HTTP endpoint reads and writes, as schemas with examples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from prefetcher.core.types import NAME_LIMIT_BYTES, ModelName, ModelVersion, NodeName, RequestSeen
from prefetcher.wire import EARLIEST_S, MOST_COUNT

__all__ = [
    "AcceptedAnswer",
    "ActAnswer",
    "ByHandEntry",
    "FieldProblem",
    "ForecastAnswer",
    "HealthAnswer",
    "HintAnswer",
    "HintRecord",
    "HintsAnswer",
    "LikelyModel",
    "Problem",
    "RequestRecord",
    "ResidencyEntry",
    "StatusAnswer",
    "SwitchAnswer",
    "SwitchBody",
    "WishBody",
]


def _not_too_long(name: str) -> str:
    if len(name.encode()) > NAME_LIMIT_BYTES:
        raise ValueError(f"a name has at most {NAME_LIMIT_BYTES} bytes of UTF-8")
    return name


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


Name = Annotated[str, StringConstraints(min_length=1, max_length=NAME_LIMIT_BYTES), AfterValidator(_not_too_long)]
Count = Annotated[int, BeforeValidator(_no_boolean)]
Seconds = Annotated[float, BeforeValidator(_no_boolean)]
_T = 1767225600.25


def _examples(*examples: dict[str, Any]) -> ConfigDict:
    return ConfigDict(extra="forbid", json_schema_extra={"examples": list(examples)})


class RequestRecord(BaseModel):
    """One request that a gateway saw."""

    model_config = _examples({"model": "llama-8b", "ts": _T, "user": "u-17", "request_id": "5f1c"})

    model: Name = Field(description="the served model's name")
    ts: Seconds | None = Field(default=None, ge=EARLIEST_S, allow_inf_nan=False, description="seconds since 1970 UTC; now where absent")
    count: Count = Field(default=1, ge=1, le=MOST_COUNT, description="arrivals that the row stands for; a feature only")
    user: Name | None = Field(default=None, description="who asked, as any stable string")
    node: Name | None = Field(default=None, description="the node that served it")
    version: Name | None = Field(default=None, description="the version of the model")
    request_id: Name | None = Field(default=None, description="a repeated id is counted once")
    tenant: Name | None = Field(default=None, description="for whom it is, in reports; with keys the key's name where absent")

    def to_request(self, now_s: float, tenant: str | None = None) -> RequestSeen:
        """The row; of `tenant` where it names none."""
        return RequestSeen(
            ts=now_s if self.ts is None else self.ts,
            model=ModelName(self.model),
            count=self.count,
            user=self.user,
            node=None if self.node is None else NodeName(self.node),
            version=None if self.version is None else ModelVersion(self.version),
            request_id=self.request_id,
            tenant=tenant if self.tenant is None else self.tenant,
        )


class AcceptedAnswer(BaseModel):
    """Rows are durable and will be learned from."""

    accepted: int = Field(examples=[1])


class HintRecord(BaseModel):
    """Somebody expects a model to be used soon."""

    model_config = _examples({"model": "llama-8b", "in_s": 5, "ttl_s": 120, "session": "s-1", "hint_id": "9b2e"})

    model: Name | None = Field(default=None, description="the model that is expected to be used; absent: which one, is learned")
    in_s: Seconds = Field(default=0.0, ge=0.0, le=86_400.0, allow_inf_nan=False, description="how long from now the use is expected")
    ttl_s: Seconds = Field(default=120.0, gt=0.0, le=86_400.0, allow_inf_nan=False, description="how long after that it may still come")
    session: Name | None = Field(default=None, description="hints of one session for one model fold into one")
    user: Name | None = Field(default=None, description="for whom, as in request rows")
    hint_id: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = Field(
        default=None, description="the same id within ten minutes is the same hint; without it every post is another one"
    )
    source: Annotated[str, StringConstraints(max_length=64)] = Field(
        default="", description="who says so; with keys it is the name of the key"
    )
    surface: Annotated[str, StringConstraints(max_length=64)] = Field(default="", description="where in it, as chat or settings-page")
    kind: Literal["load", "intent"] = Field(default="load", description="to be loaded, or somebody may mean to use it")
    key: Annotated[str, StringConstraints(max_length=200)] | None = Field(
        default=None, description="a publishable key, for what can't set headers", examples=[None]
    )


class LikelyModel(BaseModel):
    """A model that such hints led to before."""

    model: str = Field(examples=["llama-8b"])
    probability: float = Field(description="that it is the one meant", examples=[0.6])


class HintAnswer(BaseModel):
    """A hint is durable and will be planned for."""

    id: str = Field(description="its hint_id, or the one that it got", examples=["9b2e"])
    model: str | None = Field(examples=["llama-8b"])
    state: Literal["resident", "moving", "likely", "unlikely"] = Field(
        description="in some node's memory; on its way there; neither, but a use is forecast with at least 1/2; else unlikely"
    )
    probability: float | None = Field(
        description="of a use within in_s + ttl_s (the next of 2, 10 and 60 minutes), without this hint; null where nothing is forecast",
        examples=[0.31],
    )
    likely: list[LikelyModel] | None = Field(
        default=None, description="of a hint without a model: those that hints of its source and surface led to", examples=[None]
    )


class HintsAnswer(BaseModel):
    """One answer for each hint, in their order."""

    hints: list[HintAnswer]


class WishBody(BaseModel):
    """Why and until when, of an act by hand; in the body or in the query."""

    model_config = _examples({"for_s": 3600, "reason": "launch at noon"}, {"until_s": _T})

    until_s: Seconds | None = Field(default=None, ge=EARLIEST_S, le=1e11, allow_inf_nan=False, description="seconds since 1970 UTC")
    for_s: Seconds | None = Field(default=None, gt=0.0, le=3.2e8, allow_inf_nan=False, description="from now on")
    reason: Annotated[str, StringConstraints(max_length=500)] = Field(default="", description="for people")
    allow_release: bool = Field(default=False, description="of a pin: it may end by itself once it is worth less than its price for long")


class SwitchBody(WishBody):
    """Which nodes, why and until when; an empty body is all nodes, for good."""

    model_config = _examples({"node": "gpu-7", "for_s": 1800, "reason": "its disk is being replaced"}, {"group": "canary"}, {})

    node: Name | None = Field(default=None, description="only this node")
    group: Name | None = Field(default=None, description="only nodes of this group")


class ByHandEntry(BaseModel):
    """What somebody did by hand."""

    act: str = Field(examples=["pin"])
    at_s: float = Field(examples=[_T])
    by: str = Field(description="the name of the key; '' without keys", examples=["ops"])
    model: str = Field(default="", examples=["llama-8b"])
    node: str = Field(default="", description="'' for all", examples=["node-0"])
    group: str = ""
    until_s: float | None = Field(default=None, description="null for good", examples=[_T + 3600])
    reason: str = Field(default="", examples=["launch at noon"])


class ActAnswer(BaseModel):
    """What came of an act by hand."""

    model: str = Field(examples=["llama-8b"])
    act: str = Field(examples=["pin"])
    ok: bool
    reason: str = Field(description="what the node says", examples=["loading"])
    record: ByHandEntry = Field(description="who did it, when, until when, and why")


class SwitchAnswer(BaseModel):
    """The switch was moved."""

    prefetching: bool = Field(description="whether this switch lets prefetch; the strictest of those that concern a node counts")
    mode: Literal["on", "observe", "off"]
    record: ByHandEntry


class ResidencyEntry(BaseModel):
    """Weights on a node."""

    node: str = Field(examples=["node-0"])
    model: str = Field(examples=["llama-8b"])
    version: str = Field(examples=["3585571e93f0"])
    tier: str = Field(description="host or device; disk where the node knows the model and has no copy in memory", examples=["host"])
    state: str = Field(description="ready, moving, pausing, paused, cancelling, evicting; absent on disk", examples=["moving"])
    bytes: int = Field(examples=[39994128])
    bytes_done: int = Field(examples=[20000000])
    ready_in_s: float | None = Field(
        description="0 where it is ready, else the rest, or the whole load, over the link; null while its memory is given back",
        examples=[0.108],
    )
    cause: str = Field(default="", examples=["forecast"])
    decision_id: str = ""
    since_s: float = 0.0
    last_use_s: float | None = None
    leases: int = 0
    pinned: bool = False
    reason: str = Field(default="", description="of absent weights: why they are not in memory, where that is known", examples=[""])
    contributions: list[tuple[str, float]] = Field(default_factory=list, description="what led to it", examples=[[["hazard", 0.8]]])


class ForecastAnswer(BaseModel):
    """How likely a model is used soon."""

    model: str = Field(examples=["llama-8b"])
    issued_at_s: float = Field(examples=[_T])
    valid_until_s: float = Field(examples=[_T + 120])
    probabilities: dict[str, float] = Field(
        description="by seconds: P(used within 2, 10 and 60 minutes)", examples=[{"120": 0.04, "600": 0.17, "3600": 0.61}]
    )


class FieldProblem(BaseModel):
    """One field that was refused."""

    field: str = Field(examples=["[3].ts"])
    reason: str = Field(examples=["Input should be a valid number"])


class Problem(BaseModel):
    """Problem details (RFC 9457)."""

    type: str = Field(examples=["about:blank"])
    title: str = Field(examples=["Bad Request"])
    status: int = Field(examples=[400])
    detail: str = Field(examples=["1 of 4 records was refused; nothing was taken in"])
    errors: list[FieldProblem] = Field(default_factory=list)


class HealthAnswer(BaseModel):
    """All parts answer."""

    status: str = Field(examples=["ok"])


class StatusAnswer(BaseModel):
    """The node's report, what prefetches earned and wasted, and the last orders."""

    node: dict[str, Any] = Field(examples=[{"node": "node-0", "at_s": _T}])
    nodes: list[str] = Field(description="all that report", examples=[["node-0"]])
    totals: dict[str, Any] = Field(
        description="as `/v1/report` gives them; empty before the first",
        examples=[{"rows": 12, "cold_starts": 2, "cold_seconds": 3.5, "outcomes": {"timely": 1}, "idle_byte_seconds": 1.2e12}],
    )
    decides: dict[str, Any] = Field(
        description="the expert that decides, and what each would have cost lately (seconds); empty before the first plan",
        examples=[{"expert": "hazard-prefetch", "at_s": _T, "costs_s": {"lhd": 4.2}, "shadow_wait_s": 7.5}],
    )
    hints: dict[str, Any] = Field(
        description="how each source's hints turned out and how far it is believed; whether the classifier is in force, or why it is not",
        examples=[{"classifier": "too_few", "sources": [{"source": "chat-page", "kept": 7, "broken": 3, "weight": 0.64}]}],
    )
    orders: list[dict[str, Any]]
    idle_pins: list[dict[str, Any]] = Field(
        default_factory=list, description="weights that pins keep and that have been worth less than their price for long", examples=[[]]
    )
    prefetching: bool
    mode: Literal["on", "observe", "off"] = Field(description="what the switches that concern the node say together")
    observe: bool
    now_s: float
    problems: list[str]

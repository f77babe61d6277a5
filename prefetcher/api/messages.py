"""What the HTTP endpoint reads and writes, as schemas with examples."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from prefetcher.core.types import NAME_LIMIT_BYTES, ModelName, ModelVersion, NodeName, RequestSeen

__all__ = ["AcceptedAnswer", "ActAnswer", "Problem", "RequestRecord", "StatusAnswer"]



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
#: 2000-01-01: an earlier time is a unit that was mistaken.
_EARLIEST_S = 946_684_800.0


class RequestRecord(BaseModel):
    """One request that a gateway saw."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"model": "llama-8b", "ts": 1767225600.25, "user": "u-17", "request_id": "5f1c"}]},
    )

    model: Name = Field(description="the served model's name")
    ts: Seconds | None = Field(default=None, ge=_EARLIEST_S, allow_inf_nan=False, description="seconds since 1970 UTC; now where absent")
    count: Count = Field(default=1, ge=1, le=1_000_000_000, description="arrivals that the row stands for; a feature only")
    user: Name | None = Field(default=None, description="who asked, as any stable string")
    node: Name | None = Field(default=None, description="the node that served it")
    version: Name | None = Field(default=None, description="the version of the model")
    request_id: Name | None = Field(default=None, description="a repeated id is counted once")

    def to_request(self, now_s: float) -> RequestSeen:
        return RequestSeen(
            ts=now_s if self.ts is None else self.ts,
            model=ModelName(self.model),
            count=self.count,
            user=self.user,
            node=None if self.node is None else NodeName(self.node),
            version=None if self.version is None else ModelVersion(self.version),
            request_id=self.request_id,
        )


class AcceptedAnswer(BaseModel):
    """Rows are durable and will be learned from."""

    accepted: int = Field(examples=[1])


class ActAnswer(BaseModel):
    """What came of an act by hand."""

    model: str = Field(examples=["llama-8b"])
    act: str = Field(examples=["pin"])
    ok: bool
    reason: str = Field(examples=["loading"])


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


class StatusAnswer(BaseModel):
    """The node's report, what prefetches earned and wasted, and the last orders."""

    node: dict[str, Any]
    totals: dict[str, Any] = Field(
        description="as `/v1/report` gives them; empty before the first",
        examples=[{"rows": 12, "cold_starts": 2, "cold_seconds": 3.5, "outcomes": {"timely": 1}, "idle_byte_seconds": 1.2e12}],
    )
    decides: dict[str, Any] = Field(
        description="the expert that decides, and what each would have cost lately (seconds); empty before the first plan",
        examples=[{"expert": "hazard-mix-prefetch", "at_s": 1.7672256e9, "costs_s": {"lhd": 4.2}, "shadow_wait_s": 7.5}],
    )
    orders: list[dict[str, Any]]
    prefetching: bool
    observe: bool
    now_s: float
    problems: list[str]

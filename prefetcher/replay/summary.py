"""`summary.json`: what was replayed and what came out, the same bytes for the same replay."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefetcher.replay.trace import Trace

__all__ = ["describe_input", "write_summary"]


def describe_input(trace: Trace, *, warmup_ratio: float, **settings: Any) -> dict[str, Any]:
    """The summary's `input`: the log, what is wrong with it, the scored time, and the settings of the replay, in this
    order.
    """
    return {
        "log": Path(trace.path).name,
        "rows": len(trace),
        "rows_read": trace.rows_read,
        "models": len(trace.models),
        "catalog_bytes": int(trace.bytes_.sum()),
        "users": trace.users,
        "named_nodes": len(trace.node_names),
        "start_s": trace.t0,
        "scored_from_s": trace.scored_from_s(warmup_ratio),
        "end_s": trace.t1,
        "warmup_ratio": warmup_ratio,
        "tz": trace.tz,
        "times_without_zone": trace.zoneless,
        "problems": dict(trace.problems.counts),
        "first_problems": [{"kind": p.kind, "line": p.line, "what": p.what} for p in trace.problems.named],
        **settings,
    }


def write_summary(path: str | Path, described: Mapping[str, Any], policies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write and return `{"input", "policies"}`; floats as the shortest text that gives them back."""
    summary = {"input": dict(described), "policies": [dict(p) for p in policies]}
    Path(path).write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return summary

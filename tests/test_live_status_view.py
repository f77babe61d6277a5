"""What `prefetcher status` shows of an answer: totals and problems first, every model, and no more lines than the window has."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from prefetcher import words
from prefetcher.agent.orderbook import totals_of
from prefetcher.api.status_view import render
from prefetcher.core.experts import EXPERTS
from prefetcher.core.ledger import Totals
from prefetcher.core.types import Arm, Cause

NOW_S = 1_767_225_600.0


def held(model: str, **more: Any) -> dict[str, Any]:
    own = {"model": model, "tier": "host", "state": "ready", "bytes": 4e7, "bytes_done": 4e7, "cause": "demand", "since_s": NOW_S - 5}
    return own | {"last_use_s": NOW_S - 2, "leases": 0, "pinned": False, "contributions": ()} | more


def order(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "cause": "forecast", "arm": "treated", "issued_s": NOW_S - 60} | more


def status(**of_node: Any) -> dict[str, Any]:
    memory = {"taken_bytes": 4e7, "budget_bytes": 1e8, "warning": ""}
    node = {"node": "n", "memory": memory, "link_bytes_per_s": 1e8, "busy_ratio": 0.0, "held": [], "known": [], "problems": []}
    totals = totals_of({(Cause.DEMAND, Arm.TREATED): Totals()})
    whole = {"node": node | of_node, "totals": totals, "orders": [], "prefetching": True, "observe": False, "now_s": NOW_S}
    return whole | {"problems": [], "decides": {"expert": "lhd", "learned_rows": 1234}}


def printed(answer: dict[str, Any], width: int = 200, height: int | None = None) -> list[str]:
    console = Console(width=width)
    with console.capture() as shown:
        console.print(render(answer, width, height))
    return shown.get().splitlines()


def test_one_is_one() -> None:
    """And more are more."""
    one, more = status(unknown_rows=1, unknown=(("ghost", 1),)), status(unknown_rows=2, unknown=(("ghost", 2),))
    for answer, rows in ((one, 1), (more, 2)):
        answer["totals"] |= {"rows": rows, "cold_starts": rows}
        answer["decides"]["learned_rows"] = rows
    said = [" ".join(printed(answer)) for answer in (one, more)]
    for what in ("learned from {} request", "{} request for models", "{} request, ", "{} cold start,"):
        assert what.format(1) in said[0], what
        assert what.format(2).replace("request", "requests").replace("start", "starts") in said[1], what


def test_who_waits_and_for_which_other_load_is_said() -> None:
    queued = [
        {"model": "large", "left_s": 20.0, "rows": 2, "since_s": NOW_S - 50, "paused": True, "behind": "small"},
        {"model": "small", "left_s": 1.0, "rows": 1, "moving": True, "since_s": NOW_S - 2},
        {"model": "next", "left_s": 5.0, "rows": 1, "since_s": NOW_S - 3, "behind": "small"},
        {"model": "old", "left_s": 5.0, "rows": 1},
    ]
    there = [held("large", state="paused", bytes_done=1e7), held("small", state="moving", bytes_done=0)]
    known = [{"model": "next", "bytes": 4e7, "last_use_s": None}, {"model": "old", "bytes": 4e7, "last_use_s": None}]
    shown = printed(status(held=there, known=known, queued=queued))
    row = {model: next(line for line in shown if f"│ {model} " in line) for model in ("large", "small", "next", "old")}
    assert "paused 25%" in row["large"]
    assert "demand, 2 wait 50 s while small loads" in row["large"]
    assert "demand, 1 waits 2 s " in row["small"]
    assert "1 waits 3 s while small loads" in row["next"]
    assert "nobody asked" not in row["next"]
    assert "1 waits " in row["old"], "a report of an agent that does not say since when"


def test_every_model_is_listed_with_why_it_is_not_in_memory() -> None:
    known = [
        {"model": "here", "bytes": 4e7},
        {"model": "never", "bytes": 5e6, "last_use_s": None, "absent": ""},
        {"model": "large", "bytes": 9e9, "last_use_s": NOW_S - 30, "absent": "too_large"},
        {"model": "kept", "bytes": 1e6, "last_use_s": None, "absent": "observe", "pinned": True},
    ]
    shown = printed(status(held=[held("here")], known=known))
    row = {model: next(line for line in shown if f" {model} " in line) for model in ("here", "never", "large", "kept")}
    assert "host" in row["here"]
    assert "5.0 MB" in row["never"]
    assert "nobody asked yet" in row["never"]
    assert "9.0 GB" in row["large"]
    assert "it is larger than --host-bytes" in row["large"]
    assert "pinned, not loaded: this node only observes" in row["kept"]


def test_what_was_asked_for_and_is_not_there_what_decides_and_what_was_learned() -> None:
    shown = " ".join(printed(status(unknown_rows=9, unknown=[["nope", 3]] + [[f"other-{i}", 1] for i in range(6)])))
    assert "9 requests for models that this node doesn't have: nope (3), other-0 (1), other-1 (1), other-2 (1), other-3 (1), …" in shown
    assert "learned from 1,234 requests" in shown
    assert "decided by lhd: keeps by hit density, without prefetching" in shown


def test_prefetches_that_brought_nothing_and_what_people_loaded_are_left_out() -> None:
    answer = status()
    answer["orders"] = [
        order("there", outcome="superseded", reason="resident"),
        order("by-hand", cause="manual"),
        order("refused", outcome="superseded", reason="does_not_fit"),
        order("coming"),
    ]
    shown = "\n".join(printed(answer))
    assert "there" not in shown
    assert "by-hand" not in shown
    assert "treated" not in shown
    assert "superseded: it does not fit beside what is pinned" in shown
    assert "coming" in shown


@pytest.mark.parametrize("height", [4, 8, 12, 24, 50])
@pytest.mark.parametrize("width", [60, 200])
def test_it_fits_the_window_and_totals_come_first(width: int, height: int) -> None:
    answer = status(
        held=[held(f"model-with-a-long-name-{i}") for i in range(40)], known=[{"model": f"k{i}", "bytes": 1} for i in range(500)]
    )
    answer["orders"] = [order(f"m{i}") for i in range(30)]
    shown = printed(answer, width, height)
    top = printed(answer, width, 1)
    assert len(shown) <= max(height - 1, len(top))
    assert any("cold starts" in line for line in shown[:5])
    if height == 50:
        assert any("model-with-a" in line for line in shown)
        assert any("more: `prefetcher status --json`" in line for line in shown)
        assert any("Last prefetches" in line for line in shown)


def test_every_expert_has_words() -> None:
    assert [name for name in EXPERTS if not words.expert(name)] == []
    assert [name for name in EXPERTS if ("without prefetching" in words.expert(name)) == ("prefetch" in name)] == []

"""What a report says of tiers and nodes, where a replay had them: a table of each, and a sentence on rows that no node has room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from prefetcher.replay.verdict import named, plain_number

__all__ = ["places_in_words", "tiers_tables", "unfit_in_words"]


def places_in_words(tiers: Sequence[str], nodes: int) -> str:
    """Where a replay with tiers took place, in a few words."""
    *lower, last = tiers
    return f"{nodes:,} node{'s' if nodes != 1 else ''} with {', '.join(lower)} and {last}"


def unfit_in_words(policies: Sequence[Mapping[str, Any]], ours: str = "ours") -> str:
    """The rows whose model is larger than a tier of a node, which no other figure counts; empty where there are none."""
    if not policies or not policies[0].get("unfit", {}).get("requests"):
        return ""
    shown = [p for p in policies if p["policy"] in ("lru", ours)] or [policies[0]]
    waits = ", ".join(f"{plain_number(p['unfit']['cold_seconds'])} s with {named(p['policy'])}" for p in shown)
    return f"apart: {policies[0]['unfit']['requests']:,} requests for models that fit no node wait {waits}; no other figure counts them"


def tiers_tables(policies: Sequence[Mapping[str, Any]], hours: float, ours: str = "ours") -> list[tuple[str, str, str]]:
    """(sentence, heads, rows) of each table, in HTML, the policies in the order of their waiting; nothing without tiers or scored time."""
    if hours <= 0 or not policies or "tiers" not in policies[0]:
        return []
    ranked = sorted(policies, key=lambda p: (p["cold_seconds"], p["policy"]))
    heads = "".join(f'<th scope="col">{h}</th>' for h in ("policy", "tier", "GB held", "GB idle", "GB wasted", "GB moved in", "prefetches"))
    rows = []
    for p in ranked:
        for tier, of in p["tiers"].items():
            cells = [*(plain_number(of[f"{part}_gb_h"] / hours) for part in ("held", "idle", "wasted")), plain_number(of["moved_gb"])]
            cells += [f"{of['prefetches']:,}"]
            rows.append(
                f'<tr class="{"ours" if p["policy"] == ours else ""}"><th scope="row">{escape(p["policy"])}</th><td>{tier}</td>'
                f"{''.join(f'<td>{c}</td>' for c in cells)}</tr>"
            )
    sentence = "What each policy held in each tier, as means over the scored time, and what was moved into it from the one below."
    tables = [(sentence, heads, "".join(rows))]
    shown = [p for p in ranked if p["policy"] == ours] + [p for p in ranked if p["policy"] != ours][:1]
    heads = '<th scope="col">node</th>' + "".join(
        f'<th scope="col">{what}, {escape(p["policy"])}</th>' for p in shown for what in ("requests", "s of waiting an hour")
    )
    body = []
    for node in ranked[0]["nodes"]:
        cells = []
        for p in shown:
            of = p["nodes"][node]
            cells += [f"{of['requests']:,}", plain_number(of["cold_seconds"] / hours)]
        body.append(f'<tr><th scope="row">{escape(node)}</th>{"".join(f"<td>{c}</td>" for c in cells)}</tr>')
    tables.append(("Where requests were sent, and what they waited there.", heads, "".join(body)))
    return tables

"""What `prefetcher tune` prints: the segments with their windows, and the frontier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefetcher.replay.verdict import plain_number

__all__ = ["print_result"]


def print_result(console: Any, result: Mapping[str, Any]) -> None:
    """The sentence, the segments in words with what was chosen and why, and what each window would have cost a day."""
    from rich.table import Table

    console.print(result["sentence"], soft_wrap=True, highlight=False, markup=False)
    for segment in result["segments"]:
        console.print(
            f"{segment['name']} ({segment['models']:,} models, {segment['rows_per_day']:,.0f} requests a day): {segment['window']}",
            soft_wrap=True, highlight=False, markup=False,
        )  # fmt: skip
        console.print(f"  {segment['why']}", soft_wrap=True, highlight=False, markup=False)
    table = Table()
    table.add_column("window for all models, a day")
    for head in ("cold seconds", "GB·h held", "wasted", "cost, s"):
        table.add_column(head, justify="right", no_wrap=True)
    rows = sorted([*result["frontier"], result["tuned"]], key=lambda row: float(row["cost_s"]))
    for row in rows:
        cells = [plain_number(row[key]) for key in ("cold_seconds", "held_gb_h", "wasted_gb_h", "cost_s")]
        table.add_row(row["window"], *cells, style="bold" if row is result["tuned"] else None)
    console.print(table)

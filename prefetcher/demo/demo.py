"""Runs the demo from end to end: makes models, has a node learn from a week's log, runs both sides in turn, writes what came of it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from prefetcher.clock import Clock, SystemClock
from prefetcher.compiling import compile_aloud
from prefetcher.demo.models import make_models
from prefetcher.demo.node import DemoNode
from prefetcher.demo.page import table, write_page
from prefetcher.demo.side import Side, read_cold_s, run_side
from prefetcher.demo.traffic import DAY_S, Arrival, make_traffic
from prefetcher.demo.verdict import verdict

__all__ = ["run_demo"]

#: Real seconds for the two days of one side: two sides, the week before, models and pages stay under four minutes.
SIDE_S = 75.0
#: Host memory over all models' bytes: enough for the favourites of an hour, not for all.
HOST_RATIO = 0.5
#: A Monday, midnight UTC.
ORIGIN_S = 1_767_571_200.0
HISTORY_DAYS = 7
SIDES = (("without prefetching", False), ("with prefetching", True))
_ROWS_A_POST = 500


def run_demo(out: Path, *, seed: int = 0, side_s: float = SIDE_S, clock: Clock | None = None, keep: bool = False) -> list[Side]:
    """Runs both sides on the same requests and the same files; `out` keeps `demo.html`, not the models.

    With `keep` it also keeps what the nodes wrote: their logs, and their state with what they learned (50 MB).

    Raises:
        NoRoomError: too little free disk.
        UnavailableError: a node did not start; its log stays in `out`.
    """
    clock, console = clock or SystemClock(), Console()
    out = out.absolute()
    models_dir = out / "models"
    speed = 2 * DAY_S / side_s
    everything = make_traffic(HISTORY_DAYS + 2, seed)
    before = [a for a in everything if a.at_s < HISTORY_DAYS * DAY_S]
    arrivals = [Arrival(a.at_s - HISTORY_DAYS * DAY_S, a.model) for a in everything[len(before) :]]
    sides = []
    try:
        with console.status("making a dozen models") as status:
            models = make_models(models_dir, seed=seed, progress=status.update)
        compile_aloud()
        total = sum(m.bytes for m in models)
        host = int(total * HOST_RATIO)
        console.print(
            f"{len(models)} models, {total / 1e9:.1f} GB; {host / 1e9:.2f} GB of memory for them; "
            f"{len(before):,} requests of the week before to learn from, {len(arrivals):,} of two days to serve"
        )
        with console.status("learning from the week before"):
            learned = _learn(out / "history", models_dir, host, before, clock)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[cold]} cold"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            for number, (name, on) in enumerate(SIDES):
                folder = out / f"side-{number}"
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(learned, folder / "state")
                task = bar.add_task(name, total=len(arrivals), cold=0)
                before_s = read_cold_s(models, clock)
                with DemoNode(folder, models_dir, host, speed, ORIGIN_S, clock, str(number)) as node:
                    if not on:
                        node.ask("/v1/off", {})

                    def show(done: int, cold: int, task: TaskID = task) -> None:
                        bar.update(task, completed=done, cold=cold)

                    side = run_side(name, node, arrivals, models, speed, clock, show)
                side.reading_s = (before_s, read_cold_s(models, clock))
                sides.append(side)
    finally:
        shutil.rmtree(models_dir, ignore_errors=True)
    notes = [
        f"Both sides ran one after the other on this machine, with the same {len(arrivals)} requests, files and memory",
        f"({host / 1e9:.2f} of {total / 1e9:.1f} GB). Without prefetching, weights are loaded when they are asked for and those used",
        "longest ago make room; with it, the node had read the log of the week before and decides what to keep, to bring and to bypass.",
        f"The clock ran {speed:,.0f} times as fast: waits are real, GB·h are in hours of that clock.",
        "Every request mapped the weights and checked a whole tensor. Reading one model from disk took, before and after each side,",
        ", ".join(f"{before_s:.2f} and {after_s:.2f} s" for before_s, after_s in (side.reading_s for side in sides)) + ".",
    ]
    said = verdict(sides, speed)
    write_page(out / "demo.html", sides, said, notes)
    console.print(table(sides))
    for line in said:
        console.print(line, style="bold", highlight=False)
    for failure in [f for side in sides for f in side.failed][:3]:
        console.print(f"failed: {failure}", style="red")
    console.print(f"The page: {out / 'demo.html'}")
    _tidy(out, keep, console)
    return sides


def _tidy(out: Path, keep: bool, console: Console) -> None:
    """What the nodes wrote stays only where it was asked for, or where it says why something failed (an error leaves `run_demo` before)."""
    if keep:
        console.print(f"Kept: logs and state of both sides in {out}/side-0 and {out}/side-1, of the node that learned in {out}/history")
        return
    for name in ("history", *(f"side-{number}" for number in range(len(SIDES)))):
        shutil.rmtree(out / name, ignore_errors=True)


def _learn(folder: Path, models_dir: Path, host: int, before: Sequence[Arrival], clock: Clock) -> Path:
    """Has a node take in the log of the week before, on a clock of normal speed, and stop; the folder of what it learned."""
    shutil.rmtree(folder, ignore_errors=True)
    never = threading.Event()
    with DemoNode(folder, models_dir, host, 1.0, ORIGIN_S, clock, "history") as node:
        start_s = ORIGIN_S - HISTORY_DAYS * DAY_S
        rows = [{"model": a.model, "ts": start_s + a.at_s} for a in before]
        for first in range(0, len(rows), _ROWS_A_POST):
            node.ask("/v1/requests", rows[first : first + _ROWS_A_POST])
        while node.learned_rows() < len(rows):
            clock.wait(never, 0.2)
    return folder / "state"

"""Runs the demo from end to end: makes models, runs both sides in turn, writes what came of it."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from prefetcher.clock import Clock, SystemClock
from prefetcher.demo.models import make_models
from prefetcher.demo.node import DemoNode
from prefetcher.demo.page import table, write_page
from prefetcher.demo.side import Side, run_side
from prefetcher.demo.traffic import DAY_S, make_traffic

__all__ = ["run_demo"]

#: Real seconds for the two days of one side: two sides, models and pages stay under four minutes.
SIDE_S = 75.0
#: Host memory over all models' bytes: enough for the favourites of an hour, far from enough for all.
HOST_RATIO = 0.35
#: A Monday, midnight UTC.
ORIGIN_S = 1_767_571_200.0
SIDES = (("without prefetching", False), ("with prefetching", True))


def run_demo(out: Path, *, seed: int = 0, side_s: float = SIDE_S, clock: Clock | None = None) -> list[Side]:
    """Runs both sides on the same requests and the same files; `out` keeps `demo.html` and the logs, not the models.

    Raises:
        NoRoomError: too little free disk.
        UnavailableError: a node did not start; its log stays in `out`.
    """
    clock, console = clock or SystemClock(), Console()
    out = out.absolute()
    models_dir = out / "models"
    speed = 2 * DAY_S / side_s
    arrivals = make_traffic(2, seed)
    sides = []
    try:
        with console.status("making a dozen models") as status:
            models = make_models(models_dir, seed=seed, progress=status.update)
        total = sum(m.bytes for m in models)
        host = int(total * HOST_RATIO)
        console.print(
            f"{len(models)} models, {total / 1e9:.1f} GB; {host / 1e9:.2f} GB of memory for them; "
            f"{len(arrivals)} requests"
        )
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
                task = bar.add_task(name, total=len(arrivals), cold=0)
                with DemoNode(folder, models_dir, host, speed, ORIGIN_S, clock, str(number)) as node:
                    if not on:
                        node.ask("/v1/off", {})

                    def show(done: int, cold: int, task: TaskID = task) -> None:
                        bar.update(task, completed=done, cold=cold)

                    sides.append(run_side(name, node, arrivals, models, speed, clock, show))
    finally:
        shutil.rmtree(models_dir, ignore_errors=True)
    notes = [
        f"Both sides ran one after the other on this machine, with the same {len(arrivals)} requests, files and memory",
        f"({host / 1e9:.2f} of {total / 1e9:.1f} GB). The clock ran {speed:,.0f} times as fast: waits are real,",
        "GB·h are in hours of that clock. Every request mapped the weights and checked a whole tensor.",
    ]
    write_page(out / "demo.html", sides, notes)
    console.print(table(sides))
    for failure in [f for side in sides for f in side.failed][:3]:
        console.print(f"failed: {failure}", style="red")
    console.print(f"The page: {out / 'demo.html'}")
    return sides

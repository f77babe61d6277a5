"""How long work shows that it goes on: a bar on a terminal, else a line on standard error every ten seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prefetcher.clock import Clock, SystemClock

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Progress", "shown_progress"]

#: Takes how much of a step is done, 0 to 1, and the step in words.
Progress = Callable[[float, str], None]

#: Often enough to see that it lives, seldom enough for a log of a scheduled job.
_EVERY_S = 10.0


@contextmanager
def shown_progress(console: Console, first: str, *, clock: Clock | None = None) -> Iterator[Progress]:
    """Shows on `console` what the yielded function is told; `first` names the first step. What is shorter than ten seconds says nothing
    off a terminal."""
    if console.is_terminal:
        with _bar(console, first) as tell:
            yield tell
    else:
        yield _lines(console, clock or SystemClock())


@contextmanager
def _bar(console: Console, first: str) -> Iterator[Progress]:
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(first, total=1.0)
        yield lambda done, what: bar.update(task, completed=done, description=what)


def _lines(console: Console, clock: Clock) -> Progress:
    said_s = clock.steady_s()

    def tell(done: float, what: str) -> None:
        nonlocal said_s
        now_s = clock.steady_s()
        if now_s - said_s >= _EVERY_S:
            said_s = now_s
            console.print(f"{what}: {done:.0%}", soft_wrap=True, highlight=False, markup=False)

    return tell

"""What long work says while it lasts: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from prefetcher.clock import VirtualClock
from prefetcher.progress import shown_progress


def test_off_a_terminal_a_line_comes_every_ten_seconds_at_most() -> None:
    out, clock = io.StringIO(), VirtualClock(100.0)
    with shown_progress(Console(file=out, width=80), "reading", clock=clock) as progress:
        for second in range(36):
            progress(second / 36, "reading" if second < 20 else "learning")
            clock.advance(1.0)
    assert out.getvalue().splitlines() == ["reading: 28%", "learning: 56%", "learning: 83%"]


def test_on_a_terminal_a_bar_shows_the_step_and_goes_again() -> None:
    out = io.StringIO()
    with shown_progress(Console(file=out, width=80, force_terminal=True), "reading") as progress:
        progress(0.5, "learning from it")
    said = out.getvalue()
    assert "learning from it" in said
    assert "50%" in said
    assert said.endswith("\x1b[?25h\r\x1b[1A\x1b[2K"), "the bar's line is cleared"

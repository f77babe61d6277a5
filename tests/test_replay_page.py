"""A replay's page in a real browser: its charts keep their size, and their axes, as the window changes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from browser_kit import browser, complaints_of
from typer.testing import CliRunner

from prefetcher.cli import app

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser"]

_BOXES = """[...document.querySelectorAll(".chart")].map(at => {
  const drawn = at.querySelector("svg"), height = drawn.height.baseVal.value, width = drawn.width.baseVal.value;
  return [at.id, at.clientHeight - height, at.clientWidth - width, at.scrollHeight - at.clientHeight];
})"""


def test_charts_fit_their_boxes_at_every_width(browser: Browser, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("ts,model\n" + "".join(f"{1_700_000_000 + 97 * i},m{i * i % 7}\n" for i in range(3000)))
    argv = ["replay", str(log), "--default-bytes", "1GB", "--host-bytes", "3GB", "--policy", "lru,gdsf", "--out", str(tmp_path / "out")]
    made = CliRunner().invoke(app, argv)
    assert made.exit_code == 0, made.output
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    complaints = complaints_of(page)
    page.goto((tmp_path / "out" / "report.html").as_uri())
    page.wait_for_selector(".chart svg")
    first = page.evaluate(_BOXES)
    assert len(first) >= 3
    for width in (1100, 390, 1280):
        page.set_viewport_size({"width": width, "height": 700})
        page.wait_for_function(f"({_BOXES}).every(box => box[1] >= 0 && box[2] >= 0 && box[2] <= 16 && box[3] === 0)")
    assert page.evaluate(_BOXES) == first
    assert complaints == []

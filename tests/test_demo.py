"""The demo's parts: real models, reproducible traffic, what a side adds up, and a page that needs no network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import xxhash
from safetensors import safe_open

from prefetcher.demo.models import MODELS, make_models
from prefetcher.demo.node import Reading
from prefetcher.demo.page import write_page
from prefetcher.demo.side import Served, Side
from prefetcher.demo.traffic import DAY_S, make_traffic
from prefetcher.errors import NoRoomError


def test_models_are_real_safetensors(tmp_path: Path) -> None:
    made = make_models(tmp_path, (("a", 1), ("b", 2)), seed=3)
    for model in made:
        assert (tmp_path / model.name / "prefetcher.manifest.json").is_file()
        with safe_open(tmp_path / model.name / "model.safetensors", "numpy") as file:
            assert len(list(file.keys())) == 8
            tensor = file.get_tensor(model.checked_tensor)
        assert xxhash.xxh3_64_intdigest(tensor) == model.digest
    again = make_models(tmp_path / "again", (("a", 1), ("b", 2)), seed=3)
    assert [m.digest for m in again] == [m.digest for m in made]


def test_the_catalog_is_what_the_demo_promises() -> None:
    sizes = [mb for _, mb in MODELS]
    assert len(sizes) == 12
    assert min(sizes) == 40
    assert max(sizes) == 400
    assert 1_400 < sum(sizes) < 1_600


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(NoRoomError, match="name another --out"):
        make_models(tmp_path, (("a", 10**12),))
    assert not list(tmp_path.iterdir())


def test_traffic_has_peaks_and_followers() -> None:
    arrivals = make_traffic(2, seed=1)
    assert arrivals == make_traffic(2, seed=1) == sorted(arrivals)
    assert arrivals != make_traffic(2, seed=2)
    assert {a.model for a in arrivals} == {name for name, _ in MODELS}
    assert all(0 <= a.at_s < 2 * DAY_S for a in arrivals)
    peak = [a for a in arrivals if a.model == "chat-large" and 8 <= a.at_s % DAY_S / 3600 < 20]
    assert len(peak) > 0.8 * sum(a.model == "chat-large" for a in arrivals)
    vision = [a.at_s for a in arrivals if a.model == "vision"]
    ocr = [a.at_s for a in arrivals if a.model == "ocr"]
    assert all(any(v <= o for v in vision) for o in ocr)


def _side() -> Side:
    side = Side("with <prefetching>")
    side.served = [
        Served(10.0, "a", "absent", "host", 0.5),
        Served(20.0, "a", "moving", "host", 0.25),
        Served(30.0, "a", "ready", "host", 0.001),
    ]
    side.readings = [
        Reading(0.0, 0, 0.0, 0.0, {}),
        Reading(3600.0, 2_000_000_000, 1.8e12, 3.6e11, {"timely": 3, "useless": 1}, 1),
    ]
    return side


def test_a_side_adds_up() -> None:
    side = _side()
    assert side.cold_starts == 1
    assert side.cold_seconds == pytest.approx(0.75)
    assert side.held_gb_h == pytest.approx(1.0)
    assert side.idle_gb_h == pytest.approx(0.5)
    assert side.wasted_gb_h == pytest.approx(0.1)
    assert side.percentile_s(50) == pytest.approx(0.25)


def test_the_page_fetches_nothing(tmp_path: Path) -> None:
    write_page(tmp_path / "demo.html", [_side(), Side("nothing served")], ["Notes."])
    text = (tmp_path / "demo.html").read_text(encoding="utf-8")
    assert "with &lt;prefetching&gt;" in text
    assert "3 timely, 1 useless" in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)

"""Hints in a controller: the classifier speaks where it is in force, what names no model is spread, and both survive a restart."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
import pytest
from test_controller_learning import NODE, World, ready

from prefetcher.controller import records
from prefetcher.controller.controller import Controller
from prefetcher.core.types import Cause, ModelName, RequestSeen
from prefetcher.ports import Topic
from prefetcher.wire import HintMessage, encode


def say(world: World, model: str | None, **changes: Any) -> None:
    hint = HintMessage(uuid.uuid4().hex, world.clock.now_s(), model, source="page", ttl_s=60.0, **changes)
    world.writer.append(Topic.HINTS, [(model or "page", encode(hint))])


def told(world: World) -> records.Forecasts:
    raw = world.state.read(records.FORECASTS)
    assert raw is not None
    return records.decode(raw, msgspec.json.Decoder(records.Forecasts))


def probability(controller: Controller, model: str, now_s: float) -> float:
    said = controller._hints.book.expected(model, now_s)
    assert said is not None
    return said.probability


@pytest.fixture(scope="module")
def world() -> World:
    """Hints of one surface always come true within a second, those of the other never."""
    world = World()
    for n in range(320):
        good = n % 2 == 0
        say(world, f"m{n % 5}", surface="send-button" if good else "sidebar", session=f"s{n}", user=f"u{n % 7}")
        world.controller.step()
        world.clock.advance(1.0)
        if good:
            world.rows([RequestSeen(world.clock.now_s(), ModelName(f"m{n % 5}"), user=f"u{n % 7}")])
            world.controller.step()
        world.clock.advance(70.0)
    world.controller.step()
    return world


def test_in_force_the_classifier_tells_hints_of_one_source_apart(world: World) -> None:
    controller = world.controller
    assert controller._hints.classifier.stands == "in_force"
    assert 0.3 < controller._hints.book.belief("page") < 0.7
    say(world, "m0", surface="send-button", session="a")
    say(world, "m1", surface="sidebar", session="b")
    controller.step()
    assert probability(controller, "m0", world.clock.now_s()) > 0.8
    assert probability(controller, "m1", world.clock.now_s()) < 0.2


def test_records_of_sources_are_told(world: World) -> None:
    world.clock.advance(70.0)
    world.controller.step()
    found = told(world)
    assert found.hint_classifier == "in_force"
    (page,) = [source for source in found.sources if source.source == "page"]
    assert page.kept == 160
    assert page.broken >= 160
    assert page.weight == pytest.approx(world.controller._hints.book.belief("page"), abs=1e-3)


def test_both_survive_a_restart(world: World) -> None:
    world.controller.save()
    again = world.make()
    assert again._hints.classifier.snapshot() == world.controller._hints.classifier.snapshot()
    assert again._hints.spread.snapshot() == world.controller._hints.spread.snapshot()
    assert again._hints.book.snapshot() == world.controller._hints.book.snapshot()
    assert again._hints.classifier.stands == "in_force"


def test_a_classifier_of_another_version_learns_anew_and_the_book_stays(world: World) -> None:
    world.controller.save()
    raw = world.state.read(records.HINTS)
    assert raw is not None
    found = msgspec.json.decode(raw)
    found["classifier"]["version"] = 99
    world.state.write({records.HINTS: records.encode(found)})
    again = world.make()
    assert again._hints.classifier.stands == "too_few"
    assert again._hints.book.belief("page") == world.controller._hints.book.belief("page")
    before = {name: part for name, part in found.items() if name not in ("classifier", "likely")}
    world.state.write({records.HINTS: records.encode(before)})
    assert world.make()._hints.book.kept == again._hints.book.kept, "of a version that had neither"


def test_a_hint_without_a_model_stands_for_what_such_hints_led_to() -> None:
    world = World()
    for _ in range(12):
        say(world, None, surface="draw", user="ann")
        world.controller.step()
        world.clock.advance(1.0)
        world.rows([RequestSeen(world.clock.now_s(), ModelName("m3"), user="ann"), RequestSeen(world.clock.now_s(), ModelName("m1"))])
        world.controller.step()
        world.clock.advance(30.0)
    world.clock.advance(200_000.0)
    world.report(held=(ready("m1"),))
    world.controller.step()
    assert not world.controller._hints.book.models()
    assert told(world).hinted["page\0draw"][0][0] == "m3"
    say(world, None, surface="draw", user="ann")
    world.controller.step()
    assert probability(world.controller, "m3", world.clock.now_s()) > 0.5
    (order,) = [d.order for d in world.plan().desired if d.order is not None and d.key.model == "m3"]
    assert (order.cause, order.node) == (Cause.HINT, NODE)
    assert world.controller._hints.book.belief("page") == 0.5, "its source's record is not touched"

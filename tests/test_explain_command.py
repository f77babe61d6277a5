"""`prefetcher explain`: a model's season, chances and last orders, each from where it is, and what is away."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from api_kit import NODE, T0, Setup, report_of
from typer.testing import CliRunner

from prefetcher import cli
from prefetcher.api.endpoint import make_endpoint
from prefetcher.config import load_settings
from prefetcher.controller import records
from prefetcher.core.types import NodeName
from prefetcher.explain_view import explanation_of, lines_of
from prefetcher.process import Process, listen
from prefetcher_connectors.artifact_store import ArtifactStore
from prefetcher_models.seasonal import SeasonalSettings
from prefetcher_models.seasonal_artifact import SEASONAL, NamedSeasons, about_seasons, seasons_parts
from prefetcher_models.seasonal_calendar import SLOTS_A_DAY
from prefetcher_models.seasonal_profile import Season

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A state folder with a season that is ten times as busy on all days at nine."""
    week = np.ones(7 * SLOTS_A_DAY, np.float32)
    week[np.arange(7) * SLOTS_A_DAY + 9 * SLOTS_A_DAY // 24] = 10.0
    # fmt: off
    season = Season(
        ordinary=week, free=week, burst=1.0, follow=1.0, used=True, own_error=1.0, naive_error=2.0, held_out_s=86_400.0,
        valid_from_s=0.0, until_s=1e12, rows=500.0, history_s=604_800.0, bin_s=3600.0, trend_a_week=1.0,
    )
    # fmt: on
    named = NamedSeasons({"org/chat": season}, "Europe/Berlin", "", T0)
    ArtifactStore(tmp_path / "artifacts").publish(SEASONAL, seasons_parts(named), about_seasons(named, SeasonalSettings()))
    return tmp_path


def test_a_season_is_told_while_nobody_answers(folder: Path) -> None:
    found = explanation_of(load_settings({"state": {"dir": folder}}), NOBODY, "org/chat", T0)
    text = "\n".join(lines_of(found))
    assert "09:00" in text
    assert "Europe/Berlin" in text
    assert (found["residency"], found["forecast"], found["orders"]) == (None, None, None)
    (problem,) = found["problems"]
    assert problem.startswith(f"nobody answers at {NOBODY}")


def test_what_is_forecast_and_was_ordered_is_asked_of_the_endpoint(folder: Path) -> None:
    with Setup() as setup:
        setup.report(report_of(known=("org/chat",)))
        forecasts = records.Forecasts(T0, T0 + 120.0, {"org/chat": (0.25, 0.5, 0.75)})
        order = records.OrderRecord(
            "d1", NODE, "org/chat", "v", "host", "forecast", "treated", T0 - 60.0, outcome="timely", contributions=(("hazard", 0.8),)
        )
        setup.state.write({records.FORECASTS: records.encode(forecasts)})
        setup.state.append(records.node_key(NodeName(NODE), "orders"), [records.encode(order)], 10)
        process, listener = Process("up"), listen("127.0.0.1", 0)
        try:
            url = process.serve(make_endpoint(setup.service, 1_000), listener)
            text = "\n".join(lines_of(explanation_of(load_settings({"state": {"dir": folder}}), url, "org/chat", T0)))
        finally:
            process.stop()
    assert "used soon: 25% within 2 min, 50% within 10 min, 75% within 60 min" in text
    assert f"forecast on {NODE}: timely (hazard 0.80)" in text
    assert f"  on {NODE}: absent in disk" in text


def test_what_was_ordered_is_told_where_nothing_is_forecast(tmp_path: Path) -> None:
    with Setup() as setup:
        setup.report(report_of(known=("embed",)))
        order = records.OrderRecord("d1", NODE, "embed", "v", "host", "hint", "treated", T0, contributions=(("hint", 1.0),))
        setup.state.append(records.node_key(NodeName(NODE), "orders"), [records.encode(order)], 10)
        process, listener = Process("up"), listen("127.0.0.1", 0)
        try:
            url = process.serve(make_endpoint(setup.service, 1_000), listener)
            done = CliRunner().invoke(cli.app, ["explain", "embed", "--url", url, "--state-dir", str(tmp_path)])
        finally:
            process.stop()
    assert done.exit_code == 0
    assert f"hint on {NODE}: open\n" in done.stdout
    assert "prefetcher jobs run seasonal-refit" in done.stderr


def test_a_model_of_which_nothing_is_known_fails_and_says_what_was_away(folder: Path) -> None:
    command = ["explain", "nobody", "--url", NOBODY, "--state-dir", str(folder), "--json"]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["season"], found["forecast"]) == (None, None)
    assert "nobody has no season" in found["problems"][0]

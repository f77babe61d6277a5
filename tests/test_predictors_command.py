"""`prefetcher predictors`: artifacts and what speaks just now, together; and what a running program says of its predictors."""

from __future__ import annotations

import http.server
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from prefetcher.cli import main
from prefetcher.clock import VirtualClock
from prefetcher.config import Settings, load_settings
from prefetcher.controller import records
from prefetcher.controller.learner import Learner
from prefetcher.core.types import ModelName, RequestSeen
from prefetcher.predictors_view import predictors_of, table_of
from prefetcher_connectors.artifact_store import ArtifactStore
from prefetcher_models.artifacts import HAZARD, about_hazard, hazard_of, hazard_parts
from prefetcher_models.blend import WatchedHazard
from prefetcher_models.hazard import HazardSettings
from prefetcher_models.parts import as_json, trained_on
from prefetcher_models.registry import PREDICTORS

NOW_S = 1_700_100_000.0
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings({"state": {"dir": tmp_path}})


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts", clock=VirtualClock(NOW_S - 7200.0))


@pytest.fixture(scope="module")
def learner() -> Learner:
    """One that has learned sixteen hours of three timers and fitted."""
    learner = Learner(lambda: WatchedHazard(HazardSettings(trees=5, samples=2000, fewest_samples=100)))
    for hour in range(16):
        begin_s = NOW_S - 129_600.0 + 3600.0 * hour
        rows = [RequestSeen(begin_s + 300.0 * i, ModelName("often")) for i in range(12)] + [RequestSeen(begin_s + 1.0, ModelName("hourly"))]
        rows += [RequestSeen(begin_s + 2.0, ModelName("rare"))] if hour % 8 == 0 else []
        learner.take(sorted(rows, key=lambda row: row.ts), {}, begin_s + 3600.0)
        learner.refit_now(begin_s + 3600.0)
    return learner


class Status(http.server.BaseHTTPRequestHandler):
    """Answers /v1/status as an endpoint whose controller decides so."""

    decides: bytes = b"{}"

    def do_GET(self) -> None:
        body = b'{"decides": ' + self.decides + b"}"
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def url(learner: Learner) -> Iterator[str]:
    Status.decides = records.encode(records.Decides("lhd", NOW_S, {}, 0.0, learner.traffic.rows, learner.predictor_states()))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Status)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_without_artifacts_and_endpoint_the_registry_is_told_and_what_is_away(settings: Settings) -> None:
    found = predictors_of(settings, NOBODY, NOW_S)
    assert [one["name"] for one in found["predictors"]] == [one.name for one in PREDICTORS]
    by_name = {one["name"]: one for one in found["predictors"]}
    assert by_name["hazard"]["in_force"] == "no: never fitted"
    assert by_name["seasonal-naive"]["in_force"] == "as a measure"
    assert by_name["hazard-transitions"]["in_force"] == "in backtests only"
    (problem,) = found["problems"]
    assert problem.startswith("what speaks just now is not known")


def test_an_artifact_is_told_with_its_age_data_and_scores(settings: Settings, store: ArtifactStore, learner: Learner) -> None:
    assert isinstance(learner.predictor, WatchedHazard)
    old = store.publish(HAZARD, hazard_parts(learner.predictor), about_hazard(learner.predictor))
    new = store.publish(HAZARD, hazard_parts(learner.predictor), about_hazard(learner.predictor))
    scores, theirs = {"600": {"ap": 0.31}}, {"600": {"ap": 0.2}}
    about = trained_on("profiles", from_s=0.0, until_s=86400.0, rows=5, scores=scores, baseline="seasonal-naive", baseline_scores=theirs)
    store.publish("profiles", {"profile.json": as_json({})}, about)
    assert hazard_parts(store.load(HAZARD, hazard_of).value) == hazard_parts(learner.predictor)
    found = predictors_of(settings, NOBODY, NOW_S)
    by_name = {one["name"]: one for one in found["predictors"]}
    hazard = by_name["hazard"]
    assert (hazard["in_force"], hazard["version"], hazard["age_s"]) == ("as an artifact", new, 7200.0)
    assert [version["version"] for version in hazard["versions"]] == [new, old]
    assert hazard["trained"]["rows"] == learner.predictor.fit.rows
    assert set(hazard["scores"]["scores"]["600"]) == {"samples", "base_rate", "brier", "log_loss"}
    assert by_name["profiles"]["kind"] == "artifact"
    text = said(found)
    assert "average precision 0.3100 within 10 min, seasonal-naive 0.2000" in text
    assert "1970-01-01 to 1970-01-02, 5 rows" in text
    (settings.state.dir / "artifacts" / "profiles" / by_name["profiles"]["version"] / "manifest.json").write_text("{")
    spoilt = predictors_of(settings, NOBODY, NOW_S)
    assert any("is refused: its manifest is no JSON" in problem for problem in spoilt["problems"])
    assert {one["name"]: one for one in spoilt["predictors"]}["profiles"]["in_force"] == "no: can't be read"


def test_what_speaks_just_now_is_told_with_what_stood_in_for_it(settings: Settings, url: str, learner: Learner) -> None:
    assert isinstance(learner.predictor, WatchedHazard)
    found = predictors_of(settings, url, NOW_S)
    (hazard,) = [one for one in found["predictors"] if one["name"] == "hazard"]
    assert found["problems"] == []
    assert hazard["in_force"] == "yes"
    fit = learner.predictor.fit
    assert hazard["trained"] == {"from_s": fit.from_s, "until_s": fit.until_s, "rows": fit.rows}
    # The first hours had no fit, and that was counted.
    assert hazard["fallbacks"]["no fit yet"] > 0
    assert "no fit yet" in said(found)


def test_a_predictor_that_lost_is_shown_as_such(settings: Settings, url: str) -> None:
    state = records.PredictorState("hazard", "loses to recent rates", 3, fallbacks={"loses to recent rates": 7})
    Status.decides = records.encode(records.Decides("lhd", NOW_S, {}, 0.0, 9, (state,)))
    found = predictors_of(settings, url, NOW_S)
    (hazard,) = [one for one in found["predictors"] if one["name"] == "hazard"]
    assert hazard["in_force"] == "no: loses to recent rates"
    assert "loses to recent rates: 7" in said(found)


def test_a_record_of_an_older_program_is_read() -> None:
    old = b'{"expert": "lhd", "at_s": 1.0, "costs_s": {}, "shadow_wait_s": 0.0, "learned_rows": 3}'
    assert msgspec.json.decode(old, type=records.Decides).predictors == ()


def test_what_a_forecast_is_made_of_is_said_for_known_models(learner: Learner) -> None:
    made = {model: learner.why(model) for model in ("often", "hourly", "rare")}
    assert any(made.values())
    assert all(sum(share for _, share in why) == pytest.approx(1.0, abs=0.06) for why in made.values() if why)
    assert learner.why("never heard of") == ()


def test_the_command_prints_a_table_or_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["prefetcher", "predictors", "--url", NOBODY, "--state-dir", str(tmp_path)]
    for more in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", argv + more)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (0, None)
        written = capsys.readouterr()
        if more:
            assert {one["name"] for one in json.loads(written.out)["predictors"]} >= {"hazard", "seasonal-naive"}
        else:
            assert "hazard" in written.out
            assert "note: what speaks just now is not known" in written.err


def test_a_narrow_table_breaks_between_words_and_leaves_empty_columns_out(tmp_path: Path) -> None:
    told = said(predictors_of(load_settings({"state": {"dir": tmp_path}}, None), NOBODY), width=80)
    assert {"backtests", "baseline", "measure", "hazard-coactivation"} <= set(told.split())
    assert "trained" not in told


def said(found: dict, width: int = 400) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table_of(found))
    return console.export_text()

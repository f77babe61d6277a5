"""Metrics, their reference, alerts and dashboard: names held against the code, alerts on made-up series, and every query against a real
Prometheus that scrapes a real process."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from broker_kit import free_port
from up_kit import Up, eventually, running

import prefetcher
from prefetcher.telemetry.memory import available_bytes, memory_limits
from prefetcher.telemetry.metrics import Metrics

ROOT = Path(prefetcher.__file__).parent.parent
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "prefetcher.json"
PAGE = (ROOT / "prefetcher" / "docs" / "metrics.md").read_text()
SELECTOR = re.compile(r"(?<![\w:])((?:prefetcher_|up\b)[a-z_]*)(\{[^}]*\})?")
#: What a process that nothing went wrong in has not counted yet, by labels that nobody knows beforehand.
ONLY_WHEN_IT_HAPPENS = {
    "prefetcher_skipped_total",
    "prefetcher_bad_requests_total",
    "prefetcher_predictor_fallbacks_total",
    "prefetcher_ingest_waits_total",
    "prefetcher_jobs_total",
}

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="no Prometheus: `apt-get install prometheus`"
)


def test_the_reference_says_what_the_code_exports() -> None:
    rows = dict(re.findall(r"^\| `(prefetcher_\w+)` \| (.*) \|$", PAGE, re.MULTILINE))
    exported = {}
    for metric in Metrics().registry.collect():
        name = metric.name + ("_total" if metric.type == "counter" else "")
        exported[name] = (metric.type, metric.documentation)
    assert sorted(rows) == sorted(exported)
    metrics = Metrics()
    for name, (kind, said) in exported.items():
        shown_kind, labels, what = (cell.strip() for cell in rows[name].split(" | ", 2))
        assert shown_kind == kind
        assert what.startswith(said.removesuffix(".")), name
        own = next(one for one in metrics.registry._names_to_collectors.values() if one._name == name.removesuffix("_total"))
        assert [label.strip("`") for label in labels.split(", ") if label] == list(own._labelnames), name


def test_names_carry_their_units() -> None:
    for metric in Metrics().registry.collect():
        assert re.fullmatch(r"prefetcher_[a-z_]+", metric.name)
        assert metric.documentation.endswith(".")
        if metric.type == "histogram":
            assert metric.name.endswith("_seconds")


def test_what_can_be_counted_is_there_before_it_happens() -> None:
    registry = Metrics().registry
    for name, labels in (
        ("prefetcher_loads_total", {"cause": "forecast", "result": "failed"}),
        ("prefetcher_outcomes_total", {"outcome": "useless"}),
        ("prefetcher_opens_total", {"found": "absent"}),
        ("prefetcher_hint_posts_total", {"result": "limited"}),
    ):
        assert registry.get_sample_value(name, labels) == 0


def test_memory_that_is_left_is_of_the_tightest_limit() -> None:
    limits = memory_limits()
    assert limits[0].where == "this machine"
    assert all(0 <= limit.left_bytes <= limit.bytes for limit in limits)
    assert 0 < available_bytes() <= limits[0].bytes


def queries() -> dict[str, str]:
    """Every query, by where it stands, as a server would be asked it."""
    found = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            asked = target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
            found[f"{panel['title']} {target['refId']}"] = asked
    return found


def test_the_dashboard_is_whole() -> None:
    board = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["legendFormat"] for target in panel["targets"])
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


@needs_prometheus
def test_the_alerts_fire_when_they_should() -> None:
    for arguments in (("check", "rules", str(ALERTS)), ("test", "rules", str(ALERTS.with_name("alerts_test.yml")))):
        done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    named = re.findall(r"- alert: (\w+)", ALERTS.read_text())
    tested = ALERTS.with_name("alerts_test.yml").read_text()
    assert [name for name in named if f"alertname: {name}\n" not in tested] == []
    assert sorted(re.findall(r"^\| `(Prefetcher\w+)` \|", PAGE, re.MULTILINE)) == sorted(named)
    assert len(re.findall(r"^ +runbook: ", ALERTS.read_text(), re.MULTILINE)) == len(named)


class Prometheus:
    """A server of its own in `folder` that scrapes `up` every second and has the rules."""

    def __init__(self, folder: Path, up: Up) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        target = up.url.removeprefix("http://")
        (folder / "prometheus.yml").write_text(
            f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: ['{ALERTS}']\n"
            f"scrape_configs: [{{job_name: prefetcher, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        settings = (f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}")
        with (folder / "prometheus.log").open("w") as log:
            self._process = subprocess.Popen(["prometheus", *settings, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)

    def ask(self, path: str, **query: str) -> Any:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as exc:
            if exc.code == 503:  # it starts
                raise
            with exc:
                pytest.fail(f"{query}: {exc.read().decode()}")

    def series(self, selector: str) -> list[dict[str, str]]:
        found = self.ask("series", **{"match[]": selector})
        assert isinstance(found, list)
        return found

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Up, Prometheus]]:
    folder = tmp_path_factory.mktemp("prometheus")
    with running(tmp_path_factory.mktemp("up")) as up:
        made = Prometheus(folder, up)
        try:
            rows = json.dumps([{"model": f"m{i % 3}"} for i in range(30)]).encode()
            urllib.request.urlopen(f"{up.url}/v1/requests", rows, timeout=10).close()
            planned = "sum(prefetcher_plans_total) > 1 and sum(prefetcher_learned_rows) > 0"
            # The first controller of an installation compiles.
            eventually(lambda: made.ask("query", query=planned)["result"], timeout_s=280.0)
            yield up, made
        finally:
            made.close()


@needs_prometheus
def test_every_query_is_answered_and_asks_for_what_is_exported(scraped: tuple[Up, Prometheus]) -> None:
    _, server = scraped
    families = set(server.ask("metadata"))
    rules = [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]
    asked = {rule["name"]: rule["query"] for rule in rules} | queries()
    assert len(asked) > 30
    recorded = {rule["name"] for rule in rules if rule["type"] == "recording"}
    missing = []
    for where, query in asked.items():
        server.ask("query", query=query)
        assert set(re.findall(r"prefetcher:[\w:]+", query)) <= recorded
        for name, labels in SELECTOR.findall(query):
            if name == "up":
                continue
            family = re.sub(r"_(bucket|sum|count)$", "", name)
            assert family in families or name in families, f"{where}: {name} is not exported"
            if not server.series(name + labels) and name not in ONLY_WHEN_IT_HAPPENS:
                missing.append(f"{where}: {name}{labels}")
    assert missing == []


@needs_prometheus
def test_a_healthy_process_wakes_nobody(scraped: tuple[Up, Prometheus]) -> None:
    _, server = scraped

    def health() -> list[str]:
        return [rule["health"] for group in server.ask("rules")["groups"] for rule in group["rules"]]

    eventually(lambda: "unknown" not in health())
    assert set(health()) == {"ok"}
    firing = [alert["labels"]["alertname"] for alert in server.ask("alerts")["alerts"] if alert["state"] == "firing"]
    assert firing == []
    assert server.series('up{job="prefetcher"}')

"""Frontier, verdict, summary and report: arithmetic by hand and by brute force, the page as a browser is given it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_lru import requests, simulate

from prefetcher.replay.accounts import PolicyLogs, totals
from prefetcher.replay.frontier import FrontierPoint, knows_future, least_gb_h, lower_hull, read_hull
from prefetcher.replay.policies import policy_in_words
from prefetcher.replay.report import write_report
from prefetcher.replay.report_figures import compare_models, models_figure, waits_figure, week_figure
from prefetcher.replay.report_words import HOW_TO_READ
from prefetcher.replay.summary import describe_input, write_summary
from prefetcher.replay.trace import Trace, read_trace
from prefetcher.replay.verdict import ModelsCompared, best_rival, judge, plain_number

# --- frontier ---


def point(held: float, cold: float) -> FrontierPoint:
    return FrontierPoint("ours", held, cold)


coordinates = st.integers(0, 50).map(float)


@settings(deadline=None)
@given(points=st.lists(st.tuples(coordinates, coordinates), min_size=1, max_size=12), at=st.floats(0, 50))
def test_the_hull_lies_below_every_mix_of_points_and_is_made_of_them(points: list[tuple[float, float]], at: float) -> None:
    made = [point(*p) for p in points]
    hull = lower_hull(made)
    assert set(hull) <= set(made)
    read = read_hull(hull, at)
    # By brute force: the best straight mix of two runs that holds at most `at` on average.
    best = min((p.cold_seconds for p in made if p.held_gb_h <= at), default=None)
    for p in made:
        for q in made:
            if p.held_gb_h < at < q.held_gb_h:
                share = (at - p.held_gb_h) / (q.held_gb_h - p.held_gb_h)
                mixed = p.cold_seconds + share * (q.cold_seconds - p.cold_seconds)
                best = mixed if best is None else min(best, mixed)
    if best is None:
        assert read.outside
    else:
        assert read.cold_seconds == pytest.approx(best)
    assert read.outside == (at < hull[0].held_gb_h or at > hull[-1].held_gb_h)


def test_reading_a_hull_back_gives_the_least_that_must_be_held() -> None:
    hull = lower_hull([point(10, 100), point(20, 40), point(30, 40), point(40, 20), point(15, 90)])
    assert [(p.held_gb_h, p.cold_seconds) for p in hull] == [(10, 100), (20, 40), (40, 20)]
    assert least_gb_h(hull, 70) == 15
    assert least_gb_h(hull, 1000) == 10
    assert least_gb_h(hull, 19) is None
    assert least_gb_h([], 1) is None
    with pytest.raises(ValueError, match="without points"):
        read_hull([], 1)


def test_policies_that_know_the_future_are_told_by_name() -> None:
    assert [p for p in ("lru", "belady", "belady-size-smith", "clairvoyant", "ours") if knows_future(p)] == [
        "belady",
        "belady-size-smith",
        "clairvoyant",
    ]


# --- verdict ---


def entry(policy: str, cold: float, held: float = 1000.0, **more: float | None) -> dict[str, object]:
    return {"policy": policy, "cold_seconds": cold, "held_gb_h": held, **more}


def test_a_saving_is_said_against_lru_and_the_best_rival_with_its_memory_and_its_floor() -> None:
    lru, gdsf = entry("lru", 900.0, 960.0, moved_gb=100.0, wait_p95_s=3.0), entry("gdsf", 500.0, 960.0, moved_gb=80.0, wait_p95_s=2.0)
    ours = entry("ours", 90.0, 960.0, moved_gb=121.0, wait_p95_s=3.0)
    frontier = [FrontierPoint("ours", 300.0, 600.0, 0.1), FrontierPoint("ours", 500.0, 400.0, 0.05)]
    verdict = judge([lru, gdsf, ours, entry("belady", 1.0)], 10.0, price_s_per_gb_h=0.002, frontier=frontier)
    assert verdict.line == (
        "worth it: saves 81 s of waiting an hour over LRU (9 instead of 90, -90 %) and 41 s over the best rival, gdsf (-82 %), "
        "for 96 GB held, the same as LRU; 21 % more read; p95 wait unchanged; under 40 GB not worth it"
    )
    assert verdict.worth is True
    assert (verdict.saved_s_per_h, verdict.held_gb, verdict.floor_gb) == (41.0, 96.0, 40.0)


def test_a_saving_over_one_rival_is_said_once() -> None:
    better = entry("ours", 90.0, 480.0, moved_gb=50.0, wait_p95_s=1.5)
    over_lru = judge([entry("lru", 900.0, 960.0, moved_gb=100.0, wait_p95_s=3.0), better], 10.0).line
    assert over_lru == (
        "worth it: saves 81 s of waiting an hour over LRU (9 instead of 90, -90 %), for 48 GB held, 50 % less than LRU; 50 % less read; "
        "p95 wait 1.5 s instead of 3"
    )
    assert judge([entry("sieve", 900.0), better], 10.0).line.startswith(
        "worth it: saves 81 s of waiting an hour over the best rival, sieve (9 instead of 90, -90 %), for 48 GB held, 52 % less than sieve"
    )


@pytest.mark.parametrize(
    ("coverage", "said", "ahead"),
    [
        (0.5, "of the 81 s over LRU, fetching ahead saves 9 s (50.0 % of what waits without it), the rest comes from keeping and", 9.0),
        (-0.5, "all comes from keeping and bypassing the right models; fetching ahead costs 3 s (50.0 % of what", -3.0),
        (0.0, "all comes from keeping and bypassing the right models, nothing from fetching ahead", 0.0),
        (0.9, "all comes from fetching ahead, which saves 81 s (90.0 % of what", 81.0),
        (1.0, "3 models wait less", None),
        (None, "3 models wait less", None),
    ],
)
def test_the_second_line_says_where_the_saving_comes_from(coverage: float | None, said: str, ahead: float | None) -> None:
    policies = [
        entry("lru", 900.0, moved_gb=200.0),
        entry("gdsf", 500.0, moved_gb=300.0),
        entry("ours", 90.0, moved_gb=250.0, coverage=coverage),
    ]
    verdict = judge(policies, 10.0, models=[ModelsCompared("lru", 3, 1, 7, 0.8, 0.1)])
    assert said in verdict.why
    assert verdict.ahead_s_per_h == (None if ahead is None else pytest.approx(ahead))
    assert verdict.why.endswith(
        "3 models wait less than with LRU (80 % of requests), 1 longer (10 %), 7 as long; "
        "250 GB read from disk, 50 GB more than with LRU and 50 GB less than with gdsf"
    )


def test_where_nothing_differs_the_second_line_says_so() -> None:
    same = [entry(policy, 10.0, moved_gb=5.0) for policy in ("lru", "ours")]
    why = judge(same, 10.0, models=[ModelsCompared("lru", 0, 0, 7, 0.0, 0.0)]).why
    assert why == "every model waits as long as with LRU; 5 GB read from disk, as much as with LRU"


def test_what_loses_to_a_rival_may_still_save_over_lru() -> None:
    line = judge([entry("lru", 1000.0), entry("gdsf", 500.0), entry("ours", 600.0)], 10.0).line
    assert line == (
        "not worth it: waits 10 s an hour more than gdsf, for 100 GB held against 100 GB; "
        "saves 40 s of waiting an hour over LRU (60 instead of 100, -40 %)"
    )


@pytest.mark.parametrize(
    ("ours", "price", "line"),
    [
        (entry("ours", 500.0), 0.0, "not worth it: waits as long as gdsf, for 100 GB held against 100 GB"),
        (
            entry("ours", 620.0, 900.0),
            0.0,
            "not worth it: waits 12 s an hour more than gdsf, for 90 GB held against 100 GB",
        ),
        (
            entry("ours", 497.0),
            0.0,
            "not worth it: saves 0.3 s of waiting an hour over gdsf, 0.6 % of it, for 100 GB held",
        ),
        (
            entry("ours", 100.0, 2000.0),
            0.5,
            "not worth it at this price: saves 40 s of waiting an hour over gdsf, but the 100 GB more that it holds are priced at 50 s",
        ),
    ],
)
def test_what_does_not_pay_is_said_plainly(ours: dict[str, object], price: float, line: str) -> None:
    verdict = judge([entry("gdsf", 500.0), ours], 10.0, price_s_per_gb_h=price)
    assert verdict.line == line
    assert verdict.worth is False


def test_a_sweep_that_never_loses_says_what_was_tried() -> None:
    frontier = [FrontierPoint("ours", 200.0, 300.0, 1.0)]
    verdict = judge([entry("gdsf", 500.0), entry("ours", 100.0)], 10.0, frontier=frontier)
    assert verdict.line.endswith("; worth it with 20 GB held too, the least that was tried")
    alone = judge([entry("gdsf", 500.0), entry("ours", 100.0)], 10.0)
    assert alone.line.endswith(", for 100 GB held, the same as gdsf")


def test_there_may_be_nothing_to_say() -> None:
    assert judge([], 10.0).worth is None
    assert "no rival" in judge([entry("ours", 1.0), entry("belady", 0.5)], 10.0).line
    assert "ours was not replayed" in judge([entry("lru", 1.0)], 10.0).line
    assert "only 30 minutes are scored" in judge([entry("lru", 9.0), entry("ours", 1.0)], 0.5).line
    assert "no request waits" in judge([entry("lru", 0.0), entry("ours", 0.0)], 10.0).line
    assert judge([entry("lru", 9.0), entry("ours", 1.0)], 0.0).worth is None


def test_the_rival_is_the_best_of_what_others_have() -> None:
    policies = [
        entry("ours", 1),
        entry("belady", 2),
        entry("lhd-smith-bypass", 3),
        entry("ttl:600", 4),
        entry("a", 4, 1.0),
    ]
    assert best_rival(policies)["policy"] == "a"
    assert best_rival([entry("ours", 1)]) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.004, "under 0.01"),
        (-0.004, "above -0.01"),
        (0.25, "0.25"),
        (3.04, "3"),
        (3.14, "3.1"),
        (41.4, "41"),
        (99.6, "100"),
        (1234.5, "1,234"),
        (-41.4, "-41"),
        (1e9, "1,000,000,000"),
    ],
)
def test_numbers_are_written_for_people(value: float, text: str) -> None:
    assert plain_number(value) == text


# --- figures ---


def test_waits_figure_gives_shares_and_percentiles() -> None:
    figure = waits_figure({"ours": np.array([0.0, 0.0, 0.0, 10.0]), "lru": np.array([0.0, 1.0, 5.0, 50.0])}, ["ours", "lru"])
    ours, lru = figure.data
    assert (ours["y"][0], lru["y"][0]) == (25.0, 75.0)
    assert lru["y"] == sorted(lru["y"], reverse=True)
    assert figure.rows[0][:3] == ("ours", "25 %", "0 s")
    assert waits_figure({"ours": np.zeros(3)}, ["ours"]).data == []


def test_models_figure_ranks_gains_above_losses() -> None:
    rows = np.array([0, 0, 1, 2])
    mine, theirs = (rows, np.array([1.0, 1.0, 9.0, 3.0])), (rows, np.array([5.0, 5.0, 2.0, 3.0]))
    figure = models_figure(mine, theirs, "lru", ["a", "b", "c"], np.array([10**9] * 3))
    assert [(row[0], row[5]) for row in figure.rows] == [("a", "8 s"), ("b", "-7 s")]
    assert figure.note == "1 model waits less than with lru, 1 longer, 1 as long."
    # A model that nobody asked for is not served alike.
    assert compare_models(mine, theirs, "lru", 5) == ModelsCompared("lru", 1, 1, 1, 0.5, 0.25)


def test_week_figure_counts_per_hour_of_the_zone() -> None:
    monday = 1704067200.0
    ts = np.array([monday + 3600.5, monday + 3700, monday + 7 * 86400 + 3600.5])
    figure = week_figure({"ours": ts}, monday, monday + 14 * 86400, "UTC", 100)
    grid = figure.data[0]["z"]
    assert grid[0][1] == 1.5
    assert sum(map(sum, grid)) == 1.5
    shifted = week_figure({"ours": ts}, monday, monday + 14 * 86400, "America/New_York", 100).data[0]["z"]
    assert shifted[6][20] == 1.5
    half_week = week_figure({"ours": ts[:1]}, monday, monday + 3 * 86400, "UTC", 100).data[0]["z"]
    assert half_week[0][1] == 1.0
    assert half_week[5] == [None] * 24
    assert week_figure({"ours": ts[:0]}, monday, monday + 86400, "UTC", 100).data == []


def test_too_few_requests_or_hours_say_nothing_of_the_week() -> None:
    monday = 1704067200.0
    few = week_figure({"ours": np.array([monday + 1])}, monday, monday + 86400, "UTC", 99)
    short = week_figure({"ours": np.array([monday + 1])}, monday, monday + 23 * 3600, "UTC", 5000)
    for figure, found in ((few, "99 requests in 24 hours"), (short, "5,000 requests in 23 hours")):
        assert (figure.data, list(figure.rows)) == ([], [])
        assert figure.note.startswith(f"Left out: {found} are scored")
    # One cold start in an hour of the week that was seen for six minutes is not ten an hour.
    begun = week_figure({"ours": np.array([monday + 3590, monday + 3700])}, monday + 3240, monday + 2 * 86400, "UTC", 100)
    assert begun.data[0]["z"][0][:2] == [None, 1.0]
    assert begun.rows[0][2:4] == ("–", "1")


# --- the page ---


@pytest.fixture(scope="module")
def replayed(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict, dict[str, PolicyLogs], list[FrontierPoint], Trace]:
    ts, model, names, sizes = requests(2500, 15, days=10, seed=1)
    names = [f"</script><b>{name} & co" for name in names]
    log = tmp_path_factory.mktemp("replay") / "gateway.jsonl"
    lines = [json.dumps({"ts": t, "model": names[m]}) for t, m in zip(ts.tolist(), model.tolist(), strict=True)]
    log.write_text("\n".join([*lines, "<nonsense>"]))
    trace = read_trace(log, catalog=dict(zip(names, sizes.astype(int).tolist(), strict=True)))
    logs, policies = {}, []
    scored = {"scored_from_s": trace.scored_from_s(0.3), "end_s": trace.t1}
    for policy, rate, every in (("ours", 9e9, 30), ("lru", 3.5e9, 0), ("ttl:600", 2e9, 0), ("belady", 9.9e9, 0)):
        logs[policy] = made = simulate(ts, model, names, sizes, 300 * 10**9, rate, prefetch_every=every)
        policies.append(totals(policy, made.residency, made.transfers, made.waits, made.orders, **scored))
    described = describe_input(trace, warmup_ratio=0.3, price=0.002, seed=0)
    frontier = [FrontierPoint("ours", policies[0]["held_gb_h"] / 2, policies[0]["cold_seconds"] * 3, 0.1)]
    return {"input": described, "policies": policies}, logs, frontier, trace


class Page(HTMLParser):
    """Collects text, ids and addresses; script and style apart."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.scripts: dict[str, str] = {}
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.ids.append(str(found["id"]))
        self.addresses += [str(found[a]) for a in ("src", "href", "action") if a in found]
        if tag in ("script", "style"):
            self.inside = found.get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data
        else:
            self.text.append(data)


def test_the_report_is_whole_offline_and_says_it_all(replayed, tmp_path: Path) -> None:
    verdict = write_report(tmp_path / "report.html", *replayed)
    page = Page()
    page.feed((tmp_path / "report.html").read_text(encoding="utf-8"))
    text = " ".join(" ".join(page.text).split())
    head, _, tail = verdict.line.partition("; ")
    assert head in text
    assert tail in text
    assert verdict.why[1:] in text
    headings = ["What would have been saved", "Where the saving comes from", "How to read this", "Waiting against memory"]
    headings += ["How long requests wait", "Which models profit", "When cold starts fall"]
    for heading in (*headings, "Problems in the log", "How this was computed"):
        assert heading in text
    for word in ("accuracy", "timeliness", "coverage", "pollution", "GB early", "GB wasted", "cold starts"):
        assert word in dict(HOW_TO_READ)
        assert dict(HOW_TO_READ)[word] in text
    assert "lru " + policy_in_words("lru") in text
    assert "ours " + policy_in_words("ours") in text
    assert f"with {replayed[0]['policies'][0]['requests']:,} requests, are scored" in text
    assert "lines that are no record, left out: 1 (line 2501: is not a JSON object)" in text
    assert page.addresses == []
    assert len(page.ids) == len(set(page.ids))
    figures = json.loads(page.scripts["figures"])
    assert sorted(figures) == ["frontier", "models", "waits", "week"]
    assert {f"chart-{key}" for key in figures} <= set(page.ids)
    # The name of a model is text everywhere, never markup.
    assert re.search(r"</script><b>team-\d/model-\d\d & co", text)
    assert text.count("As a table") == 4


def test_colours_of_figures_are_roles_that_both_themes_define(replayed, tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", *replayed)
    page = Page()
    page.feed((tmp_path / "report.html").read_text(encoding="utf-8"))
    roles = set(re.findall(r'"@(\w+)"', page.scripts["figures"]))
    light, dark = re.findall(r":root[^{]*\{(.*?)\}", page.scripts["style"], re.DOTALL)
    assert roles
    for theme in (light, dark):
        assert roles <= set(re.findall(r"--([\w-]+):", theme))


def test_the_same_replay_gives_the_same_bytes(replayed, tmp_path: Path) -> None:
    summary, logs, frontier, trace = replayed
    write_report(tmp_path / "one.html", summary, logs, frontier, trace)
    write_report(tmp_path / "two.html", json.loads(json.dumps(summary)), dict(reversed(logs.items())), frontier, trace)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_one_policy_alone_still_makes_a_page(replayed, tmp_path: Path) -> None:
    summary, logs, _, trace = replayed
    for policy in ("ours", "lru"):
        alone = {"input": summary["input"], "policies": [p for p in summary["policies"] if p["policy"] == policy]}
        verdict = write_report(tmp_path / "report.html", alone, {policy: logs[policy]}, [], trace)
        assert verdict.worth is None
        assert "nothing to compare" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_summary_is_the_same_bytes_and_reads_back(replayed, tmp_path: Path) -> None:
    summary = replayed[0]
    written = write_summary(tmp_path / "a.json", summary["input"], summary["policies"])
    write_summary(tmp_path / "b.json", summary["input"], summary["policies"])
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert json.loads((tmp_path / "a.json").read_text()) == written
    assert written["input"]["problems"] == {"malformed": 1}
    assert written["input"]["log"] == "gateway.jsonl"

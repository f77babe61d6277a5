"""The page at a glance: how many nodes, loads, models, things that are wrong and jobs; and marks that change when there is more to ask for.

Made at most once a second however many pages are open. Covers no page of anything (`views`, `findings`) and no figures over time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from prefetcher import __version__
from prefetcher.api.fleet import View
from prefetcher.api.service import Service
from prefetcher.controller import records
from prefetcher.dashboard.findings import Finding, away_nodes, findings
from prefetcher.dashboard.memo import Memo
from prefetcher.dashboard.views import ModelLine, model_lines, view_lines
from prefetcher.errors import TemporaryError
from prefetcher.words import expert

__all__ = ["Desk"]

#: Real seconds that each thing may be old.
_VIEW_S, _JOBS_S, _FINDINGS_S, _TOTALS_S, _AWAY_S = 1.0, 2.0, 5.0, 2.0, 2.0
_NAMED = 20


class Desk:
    """What the page's routes share over one `Service`. Safe for threads; every method raises UnavailableError where the store is away."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._memo = Memo(service.clock)

    def view(self) -> View:
        return self.service.fleet.view()

    def findings(self) -> list[Finding]:
        return self._memo.get("findings", _FINDINGS_S, lambda: findings(self.service, self.view()))

    def models(self) -> list[ModelLine]:
        return self._memo.get("models", _VIEW_S, lambda: model_lines(self.view()))

    def away(self) -> list[dict[str, Any]]:
        return self._memo.get("away", _AWAY_S, lambda: away_nodes(self.service, self.view()))

    def overview(self) -> dict[str, Any]:
        """The glance, as JSON types."""
        return self._memo.get("overview", _VIEW_S, self._overview)

    def _overview(self) -> dict[str, Any]:
        view, away = self.view(), self.away()
        lines = view_lines(view)
        found = self.findings()
        jobs = self._memo.get("jobs", _JOBS_S, self._jobs)
        return {
            "version": __version__,
            "now_s": self.service.now_s,
            "newest_report_s": max((line["at_s"] for line in lines), default=None),
            "mode": self.service.by_hand.mode(),
            "nodes": {
                "reporting": len(lines),
                "away": away[:_NAMED],
                "away_in_all": len(away),
                "with_problems": sum(bool(line["problems_in_all"]) for line in lines),
                "observing": sum(line["mode"] == "observe" for line in lines),
                "off": sum(line["mode"] == "off" for line in lines),
            },
            "memory": {
                "budget_bytes": sum(line["tiers"]["host"]["budget_bytes"] for line in lines),
                "taken_bytes": sum(line["tiers"]["host"]["taken_bytes"] for line in lines),
            },
            "moving": sum(line["moving"] for line in lines),
            "waited_for": sum(line["waited_for"] for line in lines),
            "models": {"known": len(view.models), "ready": len(view.ready)},
            "decides": self._memo.get("decides", _TOTALS_S, lambda: self._decides(view)),
            "findings": {
                "in_all": len(found),
                "bad": sum(one.severity == "bad" for one in found),
                "warn": sum(one.severity == "warn" for one in found),
                "first": found[0].what if found else "",
            },
            "jobs": jobs,
            "marks": {
                "nodes": _mark([[line["node"], line["tiers"], line["mode"], line["problems"]] for line in lines]),
                "moves": _mark([[h.model, h.bytes_done] for r in view.reports.values() for h in r.held if h.state != "ready"]),
                "orders": self._memo.get("orders", _TOTALS_S, lambda: self._orders_mark(view)),
                "findings": _mark([msgspec.to_builtins(one) for one in found]),
                "jobs": jobs["mark"],
            },
        }

    def _decides(self, view: View) -> dict[str, Any]:
        """How many nodes each expert decides on."""
        raw = self.service.state.read_many([records.node_key(name, "decides") for name in view.reports])
        counts: dict[str, int] = {}
        learned = 0
        for item in raw:
            try:
                decides = None if item is None else records.decode(item, _decides)
            except ValueError:
                continue
            if decides is not None:
                counts[decides.expert] = counts.get(decides.expert, 0) + 1
                learned = max(learned, decides.learned_rows)
        most = max(counts, key=lambda name: counts[name], default="")
        return {"experts": counts, "most": most, "meaning": expert(most), "learned_rows": learned}

    def _orders_mark(self, view: View) -> str:
        raw = self.service.state.read_many([records.node_key(name, "totals") for name in view.reports])
        counts = []
        for item in raw:
            try:
                counts.append(None if item is None else records.decode(item, _counts))
            except ValueError:
                counts.append(None)
        return _mark([msgspec.to_builtins(one) for one in counts])

    def _jobs(self) -> dict[str, Any]:
        try:
            jobs = self.service.jobs.jobs()
        except TemporaryError:
            jobs = []
        running = [job["name"] for job in jobs if job["running"] is not None]
        failed = [job["name"] for job in jobs if job["last"] is not None and job["last"]["result"] in ("failed", "hung", "lost")]
        due = min(jobs, key=lambda job: float(job["next_s"]), default=None)
        said = [[job["name"], job["wanted"], job["running"], job["last"], job["next_s"]] for job in jobs]
        return {
            "now_s": self.service.jobs.now_s,
            "known": len(jobs),
            "running": running,
            "failed": failed,
            "next": None if due is None else {"name": due["name"], "at_s": due["next_s"]},
            "mark": _mark(said),
        }


class _Counts(msgspec.Struct):
    """What changes in a node's totals when an order or a request comes."""

    orders: int = 0
    rows: int = 0
    outcomes: Mapping[str, int] = {}


_decides = msgspec.json.Decoder(records.Decides)
_counts = msgspec.json.Decoder(_Counts)


def _mark(said: Any) -> str:
    return hashlib.blake2b(msgspec.json.encode(said), digest_size=6).hexdigest()

"""Nodes as the store knows them: when each was heard last, and the wish that one be forgotten.

Covers neither what nodes report (`fleet`) nor the forgetting, which is a job (`batch.gone_nodes`): it has the history that their figures go
to.
"""

from __future__ import annotations

from typing import Any

from prefetcher.api.fleet import View
from prefetcher.api.jobs import JobDesk
from prefetcher.clock import Clock
from prefetcher.controller import records
from prefetcher.core.types import NodeName
from prefetcher.errors import ModelNotFoundError, PrefetcherError, shortened
from prefetcher.ports import StateStore
from prefetcher.report.gone import JOB, why_stays
from prefetcher.telemetry.logs import log

__all__ = ["NodeDesk"]


class NodeDesk:
    """Safe for threads."""

    def __init__(self, state: StateStore, jobs: JobDesk, clock: Clock) -> None:
        self._state = state
        self._jobs = jobs
        self._clock = clock

    def heard(self, view: View) -> dict[NodeName, float]:
        """Every node that is not forgotten, and when it was heard last: its report's time where it reports, else as it was noted, every
        `records.SEEN_EVERY_S` real seconds. Raises UnavailableError."""
        found = {NodeName(name): at_s for name, at_s in self._state.last_seen(records.NODES).items()}
        return found | {node: report.at_s for node, report in view.reports.items()}

    def listed(self, view: View) -> list[dict[str, Any]]:
        """The same as JSON shows it, those that report first, then by when they were heard, newest first. Raises UnavailableError."""
        wanted = self._state.last_seen(records.TO_FORGET)
        lines = [
            {"node": node, "reports": node in view.reports, "last_heard_s": at_s, "to_forget": node in wanted}
            for node, at_s in self.heard(view).items()
        ]
        return sorted(lines, key=lambda line: (not line["reports"], 0.0 if line["reports"] else -float(line["last_heard_s"]), line["node"]))

    def why_stays(self, node: str) -> str:
        """Why `node` can't be forgotten now, or ''.

        Raises:
            ModelNotFoundError: no such node.
            UnavailableError: the state store does not answer.
        """
        if node not in self._state.last_seen(records.NODES):
            raise ModelNotFoundError(f"no node is called {shortened(repr(node))}; `prefetcher nodes list` has those that are known")
        why = why_stays(self._state, NodeName(node), self._clock.now_s())
        return f"{node} is not forgotten: {why}" if why else ""

    def forget(self, node: str, by: str) -> str:
        """Wants a silent node forgotten now; the id of the run that does it, and looks once more whether it may. Raises UnavailableError
        where no scheduler runs, or the state store does not answer."""
        now_s = self._clock.now_s()
        self._state.see(records.TO_FORGET, node, now_s)
        try:
            run_id = self._jobs.want(JOB, by)
        except PrefetcherError:
            self._state.unsee(records.TO_FORGET, [node])
            raise
        self._state.append(records.BY_HAND, [records.encode(records.ByHand("forget", now_s, by, node=node))], records.BY_HAND_KEPT)
        log().info("node_to_be_forgotten", node=node, by=by)
        return run_id

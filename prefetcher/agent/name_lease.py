"""One agent a name: a lease on the node's name in the state store, without which two agents would overwrite each other's report and ledger.

The holder is an id of this process and its host. It stays in the state folder, locked while the process lives, so that a node that is
started again after a crash takes its own lease over at once. Covers no renewing in time, which goes with the reports (`state_link`).
"""

from __future__ import annotations

import fcntl
import os
import threading
import uuid
from pathlib import Path
from urllib.parse import quote

from prefetcher.clock import Clock
from prefetcher.controller import records
from prefetcher.core.types import NodeName
from prefetcher.errors import UsageError
from prefetcher.ports import StateStore
from prefetcher.telemetry.logs import log

__all__ = ["NameLease"]

_TRY_S = 0.25
#: As long as a report, which ends with it; longer than that a dead agent's lease does not last.
LEASE_S = records.REPORT_EXPIRES_S


class NameLease:
    """The lease of `node`, for whoever runs with `state_dir`. `take` it, `renew` it, and `drop` it at the end."""

    def __init__(self, state: StateStore, node: NodeName, state_dir: Path, clock: Clock) -> None:
        self._state = state
        self._node = node
        self._file = state_dir / f"holder-{quote(node, safe='')}"
        self._clock = clock
        self._key = records.node_key(node, "lease")
        self._lock: int | None = None
        self._holder = ""
        self.lost = False

    def take(self) -> None:
        """Returns once the name is this process's.

        Raises:
            UsageError: another agent of this name runs.
            UnavailableError: the state store does not answer.
        """
        before, self._holder = self._own_holder()
        if before and before != self._holder:
            self._state.drop_lease(self._key, before)
        until_s = self._real_s() + LEASE_S + 2.0 * _TRY_S
        never, waiting = threading.Event(), False
        while not self._take():
            held = self._state.read(self._key) or b""
            host = held.decode("utf-8", "replace").rpartition("/")[0] or "another host"
            if self._real_s() >= until_s:
                self._unlock()
                raise UsageError(f"a node called {self._node} runs already on {host}; give this one another --name")
            if not waiting:
                then = f"waiting up to {LEASE_S:.0f} s, in which a dead one's name becomes free"
                log().warning("name_taken", node=self._node, host=host, then=then)
            waiting = True
            self._clock.wait(never, _TRY_S * self._clock.speed)

    def renew(self) -> bool:
        """Whether the name is still, or again, this process's. Raises UnavailableError."""
        got = self._take()
        if not got and not self.lost:
            then = "it keeps its weights and writes nothing; end one of the two"
            log().error("name_lost", node=self._node, reason="another agent took the name over", then=then)
        elif got and self.lost:
            log().info("name_back", node=self._node)
        self.lost = not got
        return got

    def drop(self) -> None:
        """Gives the name back. Raises UnavailableError: then it becomes free by itself."""
        try:
            if self._holder:
                self._state.drop_lease(self._key, self._holder)
        finally:
            self._unlock()

    def _take(self) -> bool:
        return self._state.take_lease(self._key, self._holder, LEASE_S)

    def _own_holder(self) -> tuple[str, str]:
        """Who held the name for this state folder last, and who does from now on; nobody is followed who still runs."""
        host = os.uname().nodename
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            before = os.read(self._lock, 1000).decode("utf-8", "replace").strip()
            if before.rpartition("/")[0] == host:
                return before, before
            holder = f"{host}/{uuid.uuid4().hex}"
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, holder.encode(), 0)
        except OSError as exc:
            # The process that holds the file is the one that the lease will tell of; without a folder a restart waits for its own lease.
            log().debug("holder_not_kept", file=str(self._file), reason=str(exc))
            self._unlock()
            return "", f"{host}/{uuid.uuid4().hex}"
        return before, holder

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _real_s(self) -> float:
        return self._clock.steady_s() / self._clock.speed

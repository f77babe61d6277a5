"""Roles as processes of their own, for benchmarks and tests: started on one broker and one state server, ended by signals.

Covers neither broker nor state server (`broker`, `prefetcher_connectors.redis`) and nothing of what roles do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefetcher.errors import UnavailableError

__all__ = ["RoleProcess", "Roles"]

_END_S = 30.0


class RoleProcess:
    """One `prefetcher ROLE`; `url` is where it answers. Its log is JSON lines in `log`."""

    def __init__(self, role: str, log: Path, environment: Mapping[str, str]) -> None:
        self.role = role
        self.log = log
        self.url = ""
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prefetcher", role],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env={**os.environ, **environment},
                cwd=log.parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_up(self) -> RoleProcess:
        """Returns once it says where it answers.

        Raises:
            UnavailableError: it ended instead; the message is its last line.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if "is up at" not in line:
            last = (self.log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            raise UnavailableError(f"`prefetcher {self.role}` did not start: {last}")
        self.url = line.split()[-1]
        return self

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends the signal and waits; the exit code. Nothing where it ended already."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        assert self._process.stdout is not None
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            self._process.stdout.close()

    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def cpu_s(self) -> float:
        """Processor time that it used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """Lines of its log, of one event or of all."""
        lines = self.log.read_text(errors="replace").splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [event for event in found if not name or event["event"] == name]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over its labels, or over those that are not given."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.split("{")[0].split(" ")[0] == name and all(label in line for label in wanted)
        )


class Roles:
    """Starts roles that share `brokers`, `prefix` and `state_url`, each with a folder of its own under `folder`; `close` ends all."""

    def __init__(self, folder: Path, brokers: str, prefix: str, state_url: str, settings: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._started: list[RoleProcess] = []
        self.environment = {
            "PREFETCHER_KAFKA__BROKERS": brokers,
            "PREFETCHER_KAFKA__PREFIX": prefix,
            "PREFETCHER_STATE__URL": state_url,
            "PREFETCHER_API__PORT": "0",
            "PREFETCHER_LOG__FORMAT": "json",
            "PREFETCHER_DECISION__CONTROL_RATIO": "0",
            "PYTHONUNBUFFERED": "1",
        } | dict(settings or {})

    def start(self, role: str, settings: Mapping[str, str] | None = None) -> RoleProcess:
        """Begins to start one; `wait_until_up` for it. `settings` by variable without its prefix, as `NODE__NAME`."""
        name = f"{role}-{len(self._started)}"
        own = {f"PREFETCHER_{key}": value for key, value in (settings or {}).items()}
        state = {"PREFETCHER_STATE__DIR": str(self._folder / name)}
        process = RoleProcess(role, self._folder / f"{name}.log", state | self.environment | own)
        self._started.append(process)
        return process

    def agent(self, name: str, models: Path, host_bytes: int, settings: Mapping[str, str] | None = None) -> RoleProcess:
        """As `start`, for the agent of a node; programs ask for leases at `socket(name)`."""
        node = {
            "NODE__NAME": name,
            "NODE__MODELS_DIR": str(models),
            "NODE__HOST_BYTES": str(host_bytes),
            "NODE__SOCKET": str(self.socket(name)),
            "NODE__LOCK": "off",
        }
        return self.start("agent", node | dict(settings or {}))

    def socket(self, name: str) -> Path:
        return self._folder / f"{name}.run" / "agent.sock"

    def close(self) -> None:
        """Ends those that still run, the last one first."""
        for process in reversed(self._started):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.end()

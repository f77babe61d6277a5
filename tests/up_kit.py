"""One `prefetcher up` on a few small models, with a file of keys where a test gives one: what tests of pages, clients and metrics share."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from waiting import eventually

from prefetcher.agent.manifest import write_manifests
from prefetcher.ports import Topic
from prefetcher.wire import HintMessage, decode_hint

__all__ = ["COMMAND", "Up", "eventually", "running"]

COMMAND = [sys.executable, "-m", "prefetcher"]
_MODEL_BYTES = 400_000


class Up:
    """A process with everything of its own under `folder`, and models named m0, m1, …"""

    def __init__(self, folder: Path, keys: Sequence[Mapping[str, Any]] = (), port: int = 0, **environment: str) -> None:
        self.folder = folder
        self._host_dir = Path("/dev/shm") / f"prefetcher-test-{os.getpid()}-{folder.name}"
        for number in range(4):
            (folder / "models" / f"m{number}").mkdir(parents=True)
            save_file({"w": np.full(_MODEL_BYTES // 4, number, np.float32)}, folder / "models" / f"m{number}" / "w.safetensors")
        write_manifests(folder / "models")
        self._environment = dict(environment)
        if keys:
            (folder / "keys.json").write_text(json.dumps(list(keys)))
            self._environment["PREFETCHER_API__KEYS_FILE"] = str(folder / "keys.json")
        # fmt: off
        options = ["--models", str(folder / "models"), "--host-bytes", "20MB", "--state-dir", str(folder / "state"), "--socket",
                   str(folder / "agent.sock"), "--host-dir", str(self._host_dir), "--port", str(port), "--tick-s", "0.5",
                   "--control-ratio", "0", "--log-format", "json"]
        # fmt: on
        with (folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "up", *options], stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | self._environment
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "is up at" in line, (folder / "log").read_text()
        self.url = line.split()[-1]

    def hints(self) -> list[HintMessage]:
        """Every hint that the stream has, in order. Its folder is the process's own, so its files are read as they are."""
        segments = sorted((self.folder / "state" / Topic.HINTS.value).glob("*.jsonl"))
        return [decode_hint(line) for path in segments for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()
            shutil.rmtree(self._host_dir, ignore_errors=True)


@contextlib.contextmanager
def running(folder: Path, keys: Sequence[Mapping[str, Any]] = (), port: int = 0, **environment: str) -> Iterator[Up]:
    up = Up(folder, keys, port, **environment)
    try:
        yield up
    finally:
        up.close()

"""`prefetcher replay` from its options to what it writes and says: rows with a wrong time, and what stands on standard error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from prefetcher.compiling import compile_kernels
from prefetcher.errors import InputError, UsageError
from prefetcher.replay import run
from prefetcher.replay.run import replay_command

GB = 10**9


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_kernels()


def log_of(path: Path, first: str = "") -> Path:
    rng = np.random.default_rng(3)
    rows = "".join(f"{t:.1f},m{m}\n" for t, m in zip(np.sort(rng.uniform(0, 20_000, 300)) + 1.7e9, rng.integers(0, 5, 300), strict=True))
    path.write_text(f"ts,model\n{first}{rows}")
    return path


def replay(log: Path, out: Path, policy: str = "ours") -> None:
    replay_command(log=log, out=out, default_bytes=GB, host_bytes=2 * GB, policy=policy)


@pytest.mark.usefixtures("no_progress")
def test_an_old_row_is_named_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay(log_of(tmp_path / "log.csv"), tmp_path / "out")
    assert capsys.readouterr().err == ""
    # Decades of minutes; it would take hours to go through them.
    replay(log_of(tmp_path / "log.csv", "1e9,m1\n"), tmp_path / "old")
    said = capsys.readouterr().err
    assert said.startswith("note: ")
    assert "line 2: 8,102 days before the others" in said
    assert "8,102 days before the others" in (tmp_path / "old" / "report.html").read_text()
    for name in ("waits", "orders", "residency", "transfers"):
        assert (tmp_path / "old" / "ours" / f"{name}.parquet").read_bytes() == (tmp_path / "out" / "ours" / f"{name}.parquet").read_bytes()


@pytest.mark.usefixtures("no_progress")
def test_standard_error_is_empty_or_says_that_it_compiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(tmp_path / "log.csv")
    with pytest.raises(InputError):
        replay_command(log=tmp_path / "none", out=tmp_path / "out", default_bytes=GB, host_bytes=2 * GB)
    assert capsys.readouterr().err == ""
    replay(log, tmp_path / "out", "lru")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(run, "compiled", lambda: False)
    replay(log, tmp_path / "out", "lru")
    assert capsys.readouterr().err == "compiling for this machine, once: about half a minute\n"


def test_a_capacity_that_may_not_be_meant_is_questioned_at_once_and_kept_in_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = log_of(tmp_path / "log.csv")
    replay_command(log=log, out=tmp_path / "out", default_bytes=GB, capacity_ratio=35.0, policy="lru,ours")
    said = capsys.readouterr()
    assert said.err.startswith("note: the capacity holds all models, 5 GB of weights in 175 GB")
    assert "did you mean --capacity-ratio 0.35?" in said.err
    assert "of 300 requests, the last 3.9 hours" in said.out
    assert "did you mean --capacity-ratio 0.35?" in json.loads((tmp_path / "out" / "summary.json").read_text())["input"]["notes"][0]
    assert "did you mean --capacity-ratio 0.35?" in (tmp_path / "out" / "report.html").read_text()
    replay_command(log=log, out=tmp_path / "out", default_bytes=GB, host_bytes=10**6, policy="lru")
    assert capsys.readouterr().err.startswith("note: no model fits: the capacity is 1 MB")


def test_a_capacity_is_given_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not both"):
        replay_command(log=tmp_path / "log.csv", out=tmp_path / "out", default_bytes=GB, host_bytes=GB, capacity_ratio=0.5)
    with pytest.raises(UsageError, match="give the capacity"):
        replay_command(log=tmp_path / "log.csv", out=tmp_path / "out", default_bytes=GB)

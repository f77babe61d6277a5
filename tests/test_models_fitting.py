"""Fits here, in processes of this machine, and on a real local Dask cluster; workers that are killed in the middle lose nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prefetcher.errors import PredictorError
from prefetcher_models.fitting import Backend, fit_each, problem_of_backend


def double(task: tuple[int, np.ndarray]) -> float:
    number, values = task
    if number == 3:
        raise PredictorError("three is refused", predictor="test")
    return float(2.0 * values.sum())


def threads_of(_task: int) -> tuple[int, int]:
    import threadpoolctl

    np.ones((64, 64)) @ np.ones((64, 64))
    return os.getpid(), max((pool["num_threads"] for pool in threadpoolctl.threadpool_info()), default=1)


def die_once(task: tuple[str, int]) -> tuple[int, int]:
    """Task 5 kills its worker the first time that it is tried."""
    folder, number = task
    if number == 5 and not (Path(folder) / "died").exists():
        (Path(folder) / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return number, os.getpid()


def die_always(number: int) -> int:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def slow(task: tuple[str, int]) -> tuple[int, int]:
    """Leaves a file with its worker's number when it begins; then takes its time."""
    folder, number = task
    (Path(folder) / f"{number}.{os.getpid()}").touch()
    time.sleep(0.2)
    return number, os.getpid()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """The address of a scheduler with two workers, each a process with one thread."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    dask = [sys.executable, "-m", "dask"]
    told = (tmp_path / "dask.log").open("w")
    started = [
        subprocess.Popen(
            [*dask, "scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard", "--no-show"],
            stdout=told, stderr=told, env=environment, cwd=tmp_path,
        ),
        *(
            subprocess.Popen(
                [*dask, "worker", address, "--nthreads", "1", "--no-nanny", "--no-dashboard", "--host", "127.0.0.1"],
                stdout=told, stderr=told, env=environment, cwd=tmp_path,
            )
            for _ in range(2)
        ),
    ]  # fmt: skip
    try:
        from distributed import Client

        with Client(address, timeout=60, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
        yield address
    finally:
        for process in reversed(started):
            process.kill()
            process.wait()
        told.close()


def tasks_of(n: int) -> list[tuple[int, np.ndarray]]:
    return [(i, np.full(500, float(i))) for i in range(n)]


def check_results(backend: Backend) -> None:
    told: list[int] = []
    answers = fit_each(double, tasks_of(8), backend, told.append)
    assert [answer.result for answer in answers] == [None if i == 3 else 1000.0 * i for i in range(8)]
    assert [answer.failure for answer in answers] == ["three is refused" if i == 3 else "" for i in range(8)]
    assert told == list(range(1, 9))


def test_inline_and_no_tasks() -> None:
    check_results(Backend())
    for kind in ("inline", "loky"):
        assert fit_each(double, [], Backend(kind)) == []
    assert fit_each(threads_of, [0], Backend())[0].result == (os.getpid(), 1)


def test_what_a_fit_does_not_refuse_is_no_fallback() -> None:
    with pytest.raises(TypeError):
        fit_each(double, [None], Backend())


def test_processes_of_this_machine() -> None:
    backend = Backend("loky", workers=2)
    check_results(backend)
    answers = [answer.result for answer in fit_each(threads_of, range(4), backend)]
    assert all(answer is not None and answer[0] != os.getpid() and answer[1] == 1 for answer in answers)


def test_a_process_that_dies_costs_another_try(tmp_path: Path) -> None:
    tasks = [(str(tmp_path), i) for i in range(12)]
    answers = fit_each(die_once, tasks, Backend("loky", workers=2))
    assert [answer.result[0] for answer in answers if answer.result is not None] == list(range(12))
    assert (tmp_path / "died").exists()


def test_a_fit_that_always_kills_its_process_fails_alone() -> None:
    answers = fit_each(die_always, range(4), Backend("loky", workers=2))
    assert [answer.result for answer in answers] == [0, None, 2, 3]
    assert answers[1].failure == "its worker process died"


def test_a_cluster_whose_worker_is_killed_in_the_middle_loses_nothing(cluster: str, tmp_path: Path) -> None:
    backend = Backend("dask", dask_address=cluster)
    assert problem_of_backend(backend) == ""
    check_results(backend)
    threads = [answer.result for answer in fit_each(threads_of, range(4), backend)]
    assert all(answer is not None and answer[0] != os.getpid() and answer[1] == 1 for answer in threads)

    folder = tmp_path / "begun"
    folder.mkdir()
    killed: list[int] = []

    def kill_one(done: int) -> None:
        if done == 6:
            pid = int(max(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns).suffix[1:])
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    answers = fit_each(slow, [(str(folder), i) for i in range(30)], backend, kill_one)
    assert [answer.result[0] for answer in answers if answer.result is not None] == list(range(30))
    assert len(killed) == 1
    # the other worker did what the dead one had begun
    begun = {file.stem: {int(f.suffix[1:]) for f in folder.glob(f"{file.stem}.*")} for file in folder.iterdir()}
    assert any(len(pids) == 2 for pids in begun.values())


def test_a_cluster_that_is_not_there_is_named() -> None:
    assert "PREFETCHER_FIT__DASK_ADDRESS" in problem_of_backend(Backend("dask"))
    assert "nowhere" in problem_of_backend(Backend("dask", dask_address="nowhere"))
    with pytest.raises(PredictorError, match="needs the address"):
        fit_each(double, tasks_of(1), Backend("dask"))

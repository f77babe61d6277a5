"""Many fits at once: one after another here, in processes of this machine, or on a Dask cluster, by one setting.

joblib carries the fits; a worker that dies costs its unfinished fits another try and nothing else, and a fit that fails is an answer with a
reason. Every fit has one thread: fits are many, and threads on a shared machine slow each other down. Covers no fits themselves. Tasks and
answers travel as Python objects between processes that trust each other: a Dask cluster runs whatever it is sent, so it must be yours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from prefetcher.errors import PredictorError

__all__ = ["BACKENDS", "Backend", "Fitted", "fit_each", "problem_of_backend"]

Task = TypeVar("Task")
Result = TypeVar("Result")

BACKENDS = ("inline", "loky", "dask")
#: Rounds in which whatever a dead worker left over is tried again together, before each is tried alone.
_ROUNDS = 2
#: A cluster that gives no answer for this long is given up; one fit takes seconds.
_SILENCE_S = 300.0
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class Backend:
    """Where fits run. `workers`: processes at once for loky, 0 for as many as there are cores; Dask uses all that the cluster has.

    `dask_address`: the scheduler, as tcp://host:8786.
    """

    kind: Literal["inline", "loky", "dask"] = "inline"
    workers: int = 0
    dask_address: str = ""


@dataclass(frozen=True, slots=True)
class Fitted(Generic[Result]):
    """What became of one task: its result, or why there is none."""

    result: Result | None
    failure: str = ""


def fit_each(
    fit: Callable[[Task], Result],
    tasks: Sequence[Task],
    backend: Backend | None = None,
    on_done: Callable[[int], None] | None = None,
) -> list[Fitted[Result]]:
    """`fit` of every task, in order of the tasks. `fit` is importable where the workers are and refuses with `PredictorError`, whose
    message becomes the failure. `on_done(n)` is told how many are done.

    Raises:
        PredictorError: the backend itself is not there; the message says what to do.
    """
    backend = backend or Backend()
    done: dict[int, Fitted[Result]] = {}

    def take(answers: Iterator[tuple[int, Result | None, str]]) -> None:
        for index, result, failure in answers:
            done[index] = Fitted(result, failure)
            if on_done is not None:
                on_done(len(done))

    jobs = [(fit, index, task) for index, task in enumerate(tasks)]
    if backend.kind == "inline" or not jobs:
        take(_guarded(job) for job in jobs)
    elif backend.kind == "loky":
        _with_loky(backend.workers, jobs, done, take)
    else:
        _with_dask(backend.dask_address, jobs, take)
    return [done[index] for index in range(len(tasks))]


def problem_of_backend(backend: Backend) -> str:
    """'' or why fits can't run there."""
    if backend.kind != "dask":
        return ""
    try:
        _client(backend.dask_address).close()
    except PredictorError as error:
        return str(error)
    return ""


def _guarded(job: tuple[Callable[[Any], Any], int, Any]) -> tuple[int, Any, str]:
    from threadpoolctl import threadpool_limits

    fit, index, task = job
    try:
        with threadpool_limits(1):
            return index, fit(task), ""
    except PredictorError as error:
        return index, None, str(error)


def _with_loky(workers: int, jobs: list[Any], done: dict[int, Any], take: Callable[[Iterator[Any]], None]) -> None:
    """All `jobs`; when a worker dies, joblib gives up all that was running, so the rest is started again."""
    from joblib import Parallel, delayed, parallel_config
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    def run(some: list[Any]) -> bool:
        try:
            with parallel_config("loky", n_jobs=workers or -1, inner_max_num_threads=1):
                take(Parallel(return_as="generator_unordered", max_nbytes=None)(delayed(_guarded)(job) for job in some))
        except TerminatedWorkerError:
            return False
        return True

    for _ in range(_ROUNDS):
        if run([job for job in jobs if job[1] not in done]):
            return
    for job in jobs:
        if job[1] not in done and not run([job]):
            take(iter([(job[1], None, "its worker process died")]))


def _with_dask(address: str, jobs: list[Any], take: Callable[[Iterator[Any]], None]) -> None:
    """All `jobs`. The scheduler sends what a dead worker left over to another one, as long as it has all that a task needs: arguments
    are tuples because joblib would place arrays on one worker only, and they would die with it.
    """
    from joblib import Parallel, delayed, parallel_config

    client = _client(address)
    try:
        with parallel_config("dask", client=client, wait_for_workers_timeout=_CONNECT_S):
            take(Parallel(return_as="generator_unordered", timeout=_SILENCE_S)(delayed(_guarded)(job) for job in jobs))
    except (TimeoutError, OSError) as error:
        raise PredictorError(f"the Dask cluster at {address} gives no answer ({error}); see to it, or set another backend") from error
    finally:
        client.close()


def _client(address: str) -> Any:
    try:
        from distributed import Client
    except ImportError as error:
        raise PredictorError("the dask backend needs the package: pip install 'prefetcher[dask]'") from error
    if not address:
        raise PredictorError("the dask backend needs the address of a scheduler: PREFETCHER_FIT__DASK_ADDRESS=tcp://host:8786")
    try:
        connect: Callable[..., Any] = Client
        return connect(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise PredictorError(f"no Dask scheduler answers at {address} ({error}); start `dask scheduler`, or set another backend") from error

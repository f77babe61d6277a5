"""Compiles the core's kernels for this machine, once, ahead of what needs them: two processes at once, into numba's cache on disk.

What is compiled are the real entry points, called with tiny inputs of the types that replay and a live node call them with. Kernels that
only other predictors use are left to their first call.
"""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from prefetcher.clock import Clock, SystemClock
from prefetcher.errors import PrefetcherError

__all__ = ["compile_aloud", "compile_command", "compile_kernels", "compiled", "warm_kernels"]

#: Seconds on two cores of a small machine: for what is shown meanwhile.
_ABOUT_S = 30.0
_LOOK_S = 0.2
#: Where the kernels are that replay and live nodes use.
_MODULES = (
    "prefetcher.core.features",
    "prefetcher.core.minute_lists",
    "prefetcher.core.node_steps",
    "prefetcher.core.planner",
    "prefetcher.core.shadow_caches",
    "prefetcher.core.value",
    "prefetcher_models.samples",
    "prefetcher_models.trees",
)

Progress = Callable[[float, str], None]


def _quiet(_done: float, _what: str) -> None:
    return None


def compiled() -> bool:
    """Whether every kernel that replay and live nodes use is compiled for this machine. Milliseconds, once the core is imported."""
    from prefetcher.core.compiled import is_compiled

    return all(is_compiled(kernel) for kernel in _kernels())


def compile_kernels(progress: Progress = _quiet, *, clock: Clock | None = None, stop: threading.Event | None = None) -> bool:
    """Compiles what is not compiled yet; whether all is now. `progress` is called while it lasts, with a share from 0 to 1 and words.

    A process that can't compile is no error: then kernels are compiled by whoever calls them first. Where nothing can be kept on disk,
    this process compiles, for itself alone. `stop` ends it early, but for that case.
    """
    if compiled():
        return True
    clock = clock or SystemClock()
    start_s = clock.steady_s()

    def tell() -> None:
        took_s = clock.steady_s() - start_s
        progress(min(0.95, took_s / _ABOUT_S), f"compiling for this machine, once: {took_s:.0f} s of about {_ABOUT_S:.0f}")

    tell()
    if not _can_keep():
        for part in _PARTS.values():
            part()
            tell()
        return compiled()
    workers = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "prefetcher.compiling", name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name in _PARTS
    ]
    stop = stop or threading.Event()
    try:
        while any(worker.poll() is None for worker in workers) and not clock.wait(stop, _LOOK_S * clock.speed):
            tell()
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.terminate()
                worker.wait()
    return compiled()


def compile_aloud() -> None:
    """`compile_kernels`, shown on standard error while it lasts; nothing is shown when there is nothing to do."""
    if compiled():
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"compiling for this machine, once: about {_ABOUT_S:.0f} s", soft_wrap=True, highlight=False)
    with console.status("compiling for this machine, once") as status:
        compile_kernels(lambda _done, what: status.update(what))


def compile_command() -> None:
    """`prefetcher compile`. Raises PrefetcherError where nothing can be kept, or when it failed."""
    if not _can_keep():
        raise PrefetcherError("no folder for compiled kernels can be written; name one in NUMBA_CACHE_DIR, here and for what runs later")
    compile_aloud()
    if not compiled():
        raise PrefetcherError(f"kernels did not compile; `python -m prefetcher.compiling {' or '.join(_PARTS)}` says why")


def warm_kernels() -> None:
    """Loads compiled kernels into this process, a second in all: else whoever comes first waits for it. Nothing where they are missing."""
    if compiled():
        for part in _PARTS.values():
            part()


def _can_keep() -> bool:
    return all(kernel.stats.cache_path is not None for kernel in _kernels())


def _kernels() -> list[Any]:
    for module in _MODULES:
        importlib.import_module(module)
    from prefetcher.core.compiled import KERNELS

    return [kernel for kernel in KERNELS if kernel.py_func.__module__ in _MODULES]


def _learn() -> None:
    """What turns rows into features, learns and forecasts."""
    import numpy as np

    from prefetcher.controller.learner import Learner
    from prefetcher.core.traffic import FEATURE_NAMES, Traffic
    from prefetcher.core.types import ModelName, RequestSeen
    from prefetcher_models.hazard import Hazard
    from prefetcher_models.samples import EPOCH_S, SampleStore
    from prefetcher_models.trees import DEPTH, Forest

    learner = Learner(Hazard)
    learner.take([RequestSeen(ts=1.0, model=ModelName("m"), user="u")], {}, 70.0)
    traffic = Traffic.restore(learner.traffic.snapshot())
    traffic.rates(70.0)
    traffic.counts(0.0, 70.0)
    store = SampleStore(seed=0, most=1)
    store.take(traffic.advance([80.0], [0], ticks=[120.0]), traffic.origin_s)
    store.samples(120.0 + EPOCH_S)
    shape = (1, 2**DEPTH - 1)
    forest = Forest(np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros((1, 2**DEPTH)))
    forest.predict(np.zeros((1, len(FEATURE_NAMES)), np.float32))
    traffic.features(120.0)


def _decide() -> None:
    """What the caches do, and what the experts say."""
    import numpy as np

    from prefetcher.core.demand import new_demand
    from prefetcher.core.experts import VARIANTS, expert_policies
    from prefetcher.core.node import World, new_caches, new_event_log
    from prefetcher.core.node_steps import close
    from prefetcher.core.shadow_caches import ShadowCaches

    rates, nothing, one = VARIANTS, np.zeros(0), np.ones(1)
    shadows = ShadowCaches(price_s_per_gb_h=1.0, hold_s=600.0, tick_s=60.0, start_s=0.0)
    shadows.serve(np.zeros(1, np.int64), one, one, 1.0)
    shadows.advance(one, np.zeros(1, np.int64), np.zeros((rates, 1), np.float32), 60.0 * one, np.zeros((rates, 1, 1), np.float32), 70.0)
    shadows.outlook(70.0)
    world = World(one, one, one, nothing, np.zeros(0, np.int32), nothing, one, 0.0, 1.0, 60.0)
    policies = expert_policies(1.0, 600.0)
    close(1.0, world, new_demand(1, 0.0), new_caches(policies, world, 1.0), new_event_log(len(policies), 0, []))


_PARTS = {"learn": _learn, "decide": _decide}


def main(part: str) -> None:
    """Compiles one part, in this process: what the processes of `compile_kernels` do."""
    # What the compiler allocates stays until the end anyway; looking for garbage meanwhile is an eighth of the time.
    gc.disable()
    _PARTS[part]()


if __name__ == "__main__":
    main(sys.argv[1])

"""Threads that wait for an answer of the agent's loop: a lease, or what became of an act by hand. Covers no questions themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from prefetcher.core import events as ev

__all__ = ["Wait", "Waits"]

#: How soon somebody who waits notices that the agent ends, or that his client is gone.
_LOOK_S = 0.2


@dataclass(slots=True)
class Wait:
    """Somebody in another thread waits. Of `grant`, `refusal` and `answer` one is set when `done` is, or none where nothing came."""

    done: threading.Event = field(default_factory=threading.Event)
    grant: ev.GrantLease | None = None
    refusal: ev.RefuseLease | None = None
    answer: ev.Answer | None = None
    #: What a row found that came with the question.
    found: str = ""


class Waits:
    """Who waits, by token. Safe for threads."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._guard = threading.Lock()
        self._waits: dict[str, Wait] = {}

    def ask(self, token: str, post: Callable[[], None], timeout_s: float, gone: threading.Event | None = None) -> Wait:
        """Has the question put by `post`, and waits up to `timeout_s` real seconds for what answers `token`, unless the agent ends or
        `gone` is set."""
        wait = Wait()
        with self._guard:
            self._waits[token] = wait
        post()
        left_s = timeout_s
        while left_s > 0 and not wait.done.wait(min(left_s, _LOOK_S)):
            left_s -= _LOOK_S
            if self._stop.is_set() or (gone is not None and gone.is_set()):
                break
        with self._guard:
            self._waits.pop(token, None)
        return wait

    def of(self, token: str) -> Wait | None:
        """Whoever waits for `token`, if anybody still does."""
        with self._guard:
            return self._waits.get(token)

    def answer(self, token: str, told: ev.GrantLease | ev.RefuseLease | ev.Answer) -> None:
        """`told` is what `token` waits for."""
        wait = self.of(token)
        if wait is None:
            return
        match told:
            case ev.GrantLease():
                wait.grant = told
            case ev.RefuseLease():
                wait.refusal = told
            case ev.Answer():
                wait.answer = told
        wait.done.set()

    def end(self) -> None:
        """Nobody is answered any more."""
        with self._guard:
            for wait in self._waits.values():
                wait.done.set()

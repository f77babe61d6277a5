"""Hints on their way into the stream: durable before they are answered, once for each idempotency key, with what is expected of the model.

A key is claimed in the state store, so that of many posts at the same moment, also to several processes, one writes and the others give its
answer; while the store is away, a process remembers by itself. A hint that is written twice all the same has the same id, which whoever
plans counts once. What came while others were being written is written together. Nobody waits for longer than `ANSWER_S`. Covers no HTTP,
no keys and no rates.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from prefetcher.api.fleet import Fleet, View
from prefetcher.api.messages import HintRecord
from prefetcher.clock import Clock
from prefetcher.errors import NoRoomError, PrefetcherError, TemporaryError, UnavailableError, UsageError
from prefetcher.ports import StateStore, StreamWriter, Topic
from prefetcher.wire import HintMessage, encode

__all__ = ["ANSWER_S", "REMEMBERED_S", "STORE_S", "HintDesk", "Hinted", "OtherBodyError", "UnknownModelsError"]

#: Real seconds. An answer comes within a second; the rest is the way there and back, on a machine that has other things to do.
ANSWER_S = 0.75
#: How long a call of the store may take: a post calls it up to three times, and after the first that fails no more.
STORE_S = 0.3
#: How long a key is remembered; and how long its claim stands while its hints are being written, somewhat longer than that may take.
REMEMBERED_S = 600.0
_CLAIM_S = 2.0
#: The least that an append gets, whatever time was lost before it.
_LEAST_APPEND_S = 0.2
_AWAY_S = 1.0
_LOOK_S = 0.02
#: Threads that write what waits, all of it at once; and those that look after what another process writes.
_WRITERS = 2
_LOOKERS = 16
#: Posts that are written together.
_MOST_TOGETHER = 256
#: Answers that a process remembers, some 50 MB: at a hundred hints a second, more than ten minutes.
_MOST_REMEMBERED = 100_000
#: From this probability on an absent model is expected to be brought.
_LIKELY = 0.5


class OtherBodyError(Exception):
    """An idempotency key came again with another body."""


class UnknownModelsError(Exception):
    """Nodes report, and none of them knows these models."""

    def __init__(self, models: frozenset[str]) -> None:
        super().__init__(f"{len(models)} models that no node knows")
        self.models = models


class LikelyModel(msgspec.Struct, frozen=True):
    """A model that such hints led to before, and the probability that it is meant."""

    model: str
    probability: float


class Hinted(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to one hint; `messages.HintAnswer` is its schema. `likely` is for one that names no model."""

    id: str
    model: str | None
    state: str
    probability: float | None
    likely: tuple[LikelyModel, ...] | None = None


class _Kept(msgspec.Struct):
    """What is under a claim: the digest of the body, and, once the hints are durable, the answers."""

    body: str
    answers: list[Hinted] | None = None


@dataclass(frozen=True, slots=True)
class _Unit:
    """Hints that are written and answered together; `key` '' is never repeated."""

    key: str
    body: str
    messages: tuple[HintMessage, ...]
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Post:
    """What nobody else in this process writes of a post. It is settled as a whole: every future gets its answers, or all get an error."""

    units: tuple[_Unit, ...]
    futures: tuple[Future[_Kept], ...]
    deadline_s: float

    @property
    def models(self) -> frozenset[str]:
        return frozenset(m.model for unit in self.units for m in unit.messages if m.model is not None)


_kept = msgspec.json.Decoder(_Kept)


class HintDesk:
    """Takes hints. Safe for threads and for several event loops; `close` it when no post comes any more.

    `state` should answer or fail within `STORE_S`. `user_hash` makes of a user what may be written.
    """

    def __init__(
        self,
        writer: StreamWriter,
        state: StateStore,
        fleet: Fleet,
        clock: Clock,
        most_in_flight: int = 256,
        user_hash: Callable[[str], str] = lambda user: user,
    ) -> None:
        self._writer = writer
        self._state = state
        self._fleet = fleet
        self._clock = clock
        self._most = most_in_flight
        self.user_hash = user_hash
        self._threads = ThreadPoolExecutor(_WRITERS + _LOOKERS, "hints")
        self._lock = threading.Lock()
        self._in_flight = 0
        self._waiting: deque[_Post] = deque()
        self._writing = 0
        self._flights: dict[str, Future[_Kept]] = {}
        self._remembered: OrderedDict[str, tuple[float, _Kept]] = OrderedDict()
        self._answers_remembered = 0
        self._away_until_s = float("-inf")

    def __len__(self) -> int:
        """Posts that are not answered yet, but for those that wait for another one's answer."""
        return self._in_flight

    async def take(self, hints: Sequence[HintRecord], source: str | None, key: str | None, body: bytes) -> list[Hinted]:
        """One answer for each hint, in their order, once all are durable. `source` names the key that sent them, `key` is the post's.

        Raises:
            OtherBodyError: `key` came before, with another body.
            UnknownModelsError: models that no node knows; nothing was taken in.
            NoRoomError: too many posts wait, or the log takes nothing.
            UnavailableError: they were not durable in time; sent again with the same key or ids they count once.
        """
        units = self._units(hints, source, key, body)
        deadline_s = self._real_s() + ANSWER_S
        futures = [asyncio.wrap_future(future) for future in self._submit(units, deadline_s)]
        for future in futures:
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
        _, late = await asyncio.wait(futures, timeout=ANSWER_S)
        if late:
            raise UnavailableError("the hints were not written in time; send them again, with the same key or ids they count once")
        found = [future.result() for future in futures]
        if key is not None and found[0].body != units[0].body:
            raise OtherBodyError
        return [answer for kept in found for answer in kept.answers or ()]

    def _units(self, hints: Sequence[HintRecord], source: str | None, key: str | None, body: bytes) -> list[_Unit]:
        digest = _digest(body.decode("utf-8", "replace"))
        who = source or ""
        if key is not None:
            ids = tuple(hint.hint_id or _digest(who, key, str(number)) for number, hint in enumerate(hints))
            return [_Unit(_digest("key", who, key), digest, self._messages(hints, source, ids), ids)]
        found = []
        for hint in hints:
            one = (hint.hint_id or uuid.uuid4().hex,)
            found.append(_Unit(_digest("id", who, hint.hint_id) if hint.hint_id else "", "", self._messages([hint], source, one), one))
        return found

    def _messages(self, hints: Sequence[HintRecord], source: str | None, ids: Sequence[str]) -> tuple[HintMessage, ...]:
        now_s = self._clock.now_s()
        return tuple(
            HintMessage(
                # Ids are of one name space for whoever plans, and every key's owner makes his own.
                hint_id=given if source is None else f"{source}/{given}",
                ts=now_s,
                model=hint.model,
                source=hint.source if source is None else source,
                session=hint.session,
                user=None if hint.user is None else self.user_hash(hint.user),
                in_s=hint.in_s,
                ttl_s=hint.ttl_s,
                surface=hint.surface,
                kind=hint.kind,
            )
            for hint, given in zip(hints, ids, strict=True)
        )

    def _submit(self, units: Sequence[_Unit], deadline_s: float) -> list[Future[_Kept]]:
        """A future for each unit: of its own, or that of whoever writes or wrote the same."""
        futures: list[Future[_Kept]] = []
        mine: list[tuple[_Unit, Future[_Kept]]] = []
        with self._lock:
            for unit in units:
                future = self._flights.get(unit.key) or self._answered(unit.key)
                if future is None:
                    future = Future()
                    future.set_running_or_notify_cancel()  # from here on nobody who waits can cancel it for the others
                    mine.append((unit, future))
                    if unit.key:
                        self._flights[unit.key] = future
                futures.append(future)
            if mine and self._in_flight >= self._most:
                self._forget(unit for unit, _ in mine)
                raise NoRoomError(f"{self._in_flight} posts of hints wait for the log already; send them again in a moment")
            if mine:
                self._in_flight += 1
                self._waiting.append(_Post(tuple(unit for unit, _ in mine), tuple(future for _, future in mine), deadline_s))
            is_first = bool(mine) and self._writing < _WRITERS
            self._writing += is_first
        if is_first:
            self._threads.submit(self._write_waiting)
        return futures

    def _answered(self, key: str) -> Future[_Kept] | None:
        remembered = self._remembered.get(key)
        if remembered is None or remembered[0] <= self._real_s():
            return None
        future: Future[_Kept] = Future()
        future.set_result(remembered[1])
        return future

    def _remember(self, key: str, kept: _Kept) -> None:
        before = self._remembered.pop(key, None)
        self._answers_remembered += len(kept.answers or ()) - (0 if before is None else len(before[1].answers or ()))
        self._remembered[key] = (self._real_s() + REMEMBERED_S, kept)
        while self._answers_remembered > _MOST_REMEMBERED:
            _, (_, oldest) = self._remembered.popitem(last=False)
            self._answers_remembered -= len(oldest.answers or ())

    def _forget(self, units: Iterable[_Unit]) -> None:
        for unit in units:
            self._flights.pop(unit.key, None)

    def _write_waiting(self) -> None:
        """Writes what waits until nothing does."""
        while True:
            with self._lock:
                posts = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MOST_TOGETHER))]
                if not posts:
                    self._writing -= 1
                    return
            try:
                self._settle(posts)
            except Exception as exc:  # noqa: BLE001 - whoever waits gets it
                for post in posts:
                    self._finish(post, exc)

    def _finish(self, post: _Post, outcome: Sequence[_Kept] | Exception) -> None:
        """Answers a post, unless that was done."""
        if post.futures[0].done():
            return
        with self._lock:
            self._in_flight -= 1
            if not isinstance(outcome, Exception):
                for unit, kept in zip(post.units, outcome, strict=True):
                    if unit.key:
                        self._remember(unit.key, kept)
            self._forget(post.units)
        for number, future in enumerate(post.futures):
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome[number])

    def _settle(self, posts: Sequence[_Post]) -> None:
        """Writes what nobody wrote; what others have written or are writing is answered by them, or looked after by a thread of its own."""
        in_time, ours, now_s = [], [], self._real_s()
        for post in posts:
            if now_s < post.deadline_s:
                in_time.append(post)
            else:
                # Whoever waited was told so already, and sends them again.
                self._finish(post, UnavailableError("too many posts of hints came before; send them again"))
        theirs = self._claim([unit for post in in_time for unit in post.units])
        for post in in_time:
            if any(unit.key in theirs for unit in post.units):
                self._threads.submit(self._look, post, theirs)
            else:
                ours.append(post)
        self._write_together(ours)

    def _look(self, post: _Post, theirs: dict[str, _Kept]) -> None:
        """Settles a post some of whose units another process has claimed."""
        try:
            self._finish(post, self._looked(post, theirs))
        except Exception as exc:  # noqa: BLE001 - whoever waits gets it
            self._finish(post, exc)

    def _looked(self, post: _Post, theirs: dict[str, _Kept]) -> list[_Kept]:
        results: dict[int, _Kept] = {}
        left = dict(enumerate(post.units))
        never = threading.Event()
        while True:
            for number, unit in list(left.items()):
                found = theirs.get(unit.key)
                if found is not None and found.answers is not None:
                    results[number] = found
                    del left[number]
            ours = {number: unit for number, unit in left.items() if unit.key not in theirs}
            if ours:
                view = self._view()
                named = frozenset(m.model for unit in ours.values() for m in unit.messages if m.model is not None)
                self._refuse_unknown(named, list(ours.values()), view)
                results |= zip(ours, self._write(list(ours.values()), view, post.deadline_s), strict=True)
                left = {number: unit for number, unit in left.items() if number not in ours}
            if not left:
                return [results[number] for number in range(len(post.units))]
            if self._real_s() >= post.deadline_s:
                raise UnavailableError("the same hints are being written by another process; send them again")
            self._clock.wait(never, _LOOK_S * self._clock.speed)
            theirs = self._claim(list(left.values()))

    def _claim(self, units: Sequence[_Unit]) -> dict[str, _Kept]:
        """By key, what others have under the keys of `units`; where they have nothing, the claim is ours."""
        keyed = {unit.key: unit for unit in units if unit.key}
        if not keyed or self._real_s() < self._away_until_s:
            return {}
        items = {_record_key(key): msgspec.json.encode(_Kept(unit.body)) for key, unit in keyed.items()}
        try:
            found = self._state.claim(items, _CLAIM_S)
        except UnavailableError:
            self._away_until_s = self._real_s() + _AWAY_S
            return {}
        return {key: _kept.decode(raw) for key, raw in zip(keyed, found, strict=True) if raw is not None}

    def _write_together(self, posts: Sequence[_Post]) -> None:
        view = self._view()
        good: list[_Post] = []
        for post in posts:
            try:
                self._refuse_unknown(post.models, post.units, view)
                good.append(post)
            except UnknownModelsError as exc:
                self._finish(post, exc)
        if not good:
            return
        try:
            kept = self._write([unit for post in good for unit in post.units], view, min(post.deadline_s for post in good))
        except PrefetcherError as exc:
            # What is wrong with one is not the others' fault.
            is_of_one = isinstance(exc, UsageError) and len(good) > 1
            for post in good:
                if is_of_one:
                    self._write_together([post])
                else:
                    self._finish(post, exc)
            return
        at = 0
        for post in good:
            self._finish(post, kept[at : at + len(post.units)])
            at += len(post.units)

    def _refuse_unknown(self, models: frozenset[str], units: Sequence[_Unit], view: View | None) -> None:
        unknown = models - view.models if view is not None and view.reports else None
        if unknown:
            self._give_up(units)
            raise UnknownModelsError(unknown)

    def _write(self, units: Sequence[_Unit], view: View | None, deadline_s: float) -> list[_Kept]:
        """Appends what `units` say and gives their answers, in order, once they are durable."""
        messages = [message for unit in units for message in unit.messages]
        timeout_s = max(_LEAST_APPEND_S, deadline_s - self._real_s())
        try:
            keyed = [(message.model or message.source, encode(message)) for message in messages]
            self._writer.append(Topic.HINTS, keyed, timeout_s=timeout_s)
        except TemporaryError as exc:
            # Nothing, or perhaps something, was written: the next try writes the same ids.
            self._give_up(units)
            if isinstance(exc, NoRoomError):
                raise
            raise UnavailableError(f"the hints were not written in time ({exc}); send them again", retry_after_s=exc.retry_after_s) from exc
        kept = [_Kept(unit.body, [self._answer(m, i, view) for m, i in zip(unit.messages, unit.ids, strict=True)]) for unit in units]
        done = {_record_key(unit.key): msgspec.json.encode(one) for unit, one in zip(units, kept, strict=True) if unit.key}
        self._tell(lambda: self._state.write(done, REMEMBERED_S), done)
        return kept

    def _give_up(self, units: Sequence[_Unit]) -> None:
        claims = [_record_key(unit.key) for unit in units if unit.key]
        self._tell(lambda: self._state.delete(claims), claims)

    def _tell(self, say: Callable[[], None], keys: object) -> None:
        if not keys or self._real_s() < self._away_until_s:
            return
        try:
            say()
        except UnavailableError:
            self._away_until_s = self._real_s() + _AWAY_S

    def _view(self) -> View | None:
        if self._real_s() < self._away_until_s:
            return self._fleet.fresh()
        try:
            return self._fleet.view()
        except UnavailableError:
            self._away_until_s = self._real_s() + _AWAY_S
            return None

    def _answer(self, message: HintMessage, given: str, view: View | None) -> Hinted:
        if message.model is None:
            likely = () if view is None else view.likely(message.source, message.surface, self._clock.now_s())
            return Hinted(given, None, "unlikely", None, tuple(LikelyModel(model, p) for model, p in likely))
        chance = None if view is None else view.probability(message.model, message.in_s + message.ttl_s, self._clock.now_s())
        if view is not None and message.model in view.ready:
            state = "resident"
        elif view is not None and message.model in view.moving:
            state = "moving"
        else:
            state = "likely" if chance is not None and chance >= _LIKELY else "unlikely"
        return Hinted(id=given, model=message.model, state=state, probability=chance)

    def close(self) -> None:
        """Waits for what is being written."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _real_s(self) -> float:
        return self._clock.steady_s() / self._clock.speed


def _digest(*parts: str) -> str:
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()


def _record_key(key: str) -> str:
    return f"prefetcher:{{claim/{key}}}"

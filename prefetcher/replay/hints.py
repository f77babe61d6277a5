"""Hints in a replay: a log of them, or synthetic ones with a chosen precision and lead, and what they say at every moment.

What a hint is worth is the core's business (`core.hints`, and the classifier, as in a controller); here rows and hints are brought into one
order of time and the changes of what is expected become the events of the node without bytes (`core.node.HINT_EVENT`). Neither depends on
decisions. Hints are told to ours alone; which node they go to is the one that a row of their model would go to.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prefetcher.core.experts import WINDOWS_S
from prefetcher.core.hints import Hint
from prefetcher.core.node import HINT_EVENT
from prefetcher.core.rendezvous import by_rendezvous
from prefetcher.errors import InputError, UsageError
from prefetcher.replay.accounts import PolicyLogs
from prefetcher.replay.formats import read_rows
from prefetcher.replay.times import TimeReader
from prefetcher.replay.trace import Trace
from prefetcher_models.hint_classifier import HintClassifier
from prefetcher_models.hints import Hints

__all__ = ["HintFeed", "HintLog", "SyntheticHints", "check_hints", "describe_hints", "of_hinted_rows", "read_hints"]

_SYNTHETIC = "synthetic"
#: What a field of a hint that is not given is, as in `wire.HintMessage`.
_TTL_S = 120.0
_DAY_S = 86_400.0
#: False synthetic hints come so many seconds, at most, before or after true ones.
_APART_S = 60.0
_MOST_LEAD_S = 86_400.0
#: Synthetic hints of one log: some 10 GB.
_MOST_HINTS = 20_000_000
#: Less of a model's uses than this is announced by chance: nobody is told that it became less.
_LEAST_SHARE = 0.05
_COLUMNS = ("ts", "model", "in_s", "ttl_s", "source", "session", "user", "surface", "kind", "hint_id")
#: Which of the experts' rates is the forecast that the classifier is told: the first, over ten minutes.
_WINDOW = 0
assert WINDOWS_S[_WINDOW] == 600.0


@dataclass(frozen=True, slots=True)
class HintLog:
    """Hints of a log's models, sorted by time. `model` int32[K]; times float64[K], seconds; who says so, by name.

    `said` says what they are, for people; `problems` counts what was left out, by kind, in words; `every_row`: there is one for each row.
    """

    said: str
    ts: npt.NDArray[np.float64]
    model: npt.NDArray[np.int32]
    in_s: npt.NDArray[np.float64]
    ttl_s: npt.NDArray[np.float64]
    source: list[str]
    session: list[str | None]
    user: list[str | None]
    surface: list[str]
    kind: list[str]
    hint_id: list[str]
    problems: dict[str, int] = field(default_factory=dict)
    every_row: bool = False

    def __len__(self) -> int:
        return len(self.ts)

    def problem_lines(self) -> list[str]:
        """One sentence a kind, for people."""
        return [f"{what}, left out: {count:,}" for what, count in self.problems.items()]

    def hint(self, k: int, models: list[str]) -> Hint:
        ts, at_s = float(self.ts[k]), float(self.ts[k] + self.in_s[k])
        return Hint(
            self.hint_id[k], models[self.model[k]], self.source[k], self.session[k], ts, at_s, at_s + float(self.ttl_s[k]),
            self.user[k], self.surface[k], self.kind[k],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SyntheticHints:
    """Every row is hinted `lead_s` before it comes, and false hints come beside so that a share `precision` of all is true.

    A false hint names another model than a row picked at random, drawn by how often models are asked for, at a time within a minute of
    that row's own hint and for its user. Hints may be kept for `ttl_s` after the time that they name.
    """

    precision: float = 0.7
    lead_s: float = 5.0
    seed: int = 0
    ttl_s: float = _TTL_S

    @classmethod
    def parse(cls, text: str) -> SyntheticHints:
        """From `synthetic:precision=0.7,lead=5,seed=1`; what is not named has its default. Raises UsageError."""
        found: dict[str, float] = {}
        bounds = {"precision": (0.0, 1.0), "lead": (0.0, _MOST_LEAD_S), "seed": (0.0, 2.0**63), "ttl": (0.0, _DAY_S)}
        for part in filter(None, text.removeprefix(_SYNTHETIC).removeprefix(":").split(",")):
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals or name not in bounds:
                raise UsageError(f"--hints {text}: {part.strip()!r} is no setting of synthetic hints; there are {', '.join(bounds)}")
            try:
                found[name] = float(int(value)) if name == "seed" else float(value)
            except ValueError:
                raise UsageError(f"--hints {text}: {name} is {value!r}, which is no number") from None
            low, high = bounds[name]
            if not low <= found[name] <= high or (name in ("precision", "ttl") and found[name] == 0.0):
                above = "above" if name in ("precision", "ttl") else "from"
                raise UsageError(f"--hints {text}: {name} must be {above} {low:g} to {high:,.0f}, got {value}")
        return cls(found.get("precision", 0.7), found.get("lead", 5.0), int(found.get("seed", 0.0)), found.get("ttl", _TTL_S))

    def make(self, trace: Trace) -> HintLog:
        """The hints of a log, the same for the same seed."""
        rng = np.random.default_rng(self.seed)
        rows = len(trace)
        per_row = (1.0 - self.precision) / self.precision
        if rows * (1.0 + per_row) > _MOST_HINTS:
            raise UsageError(
                f"--hints synthetic: at precision {self.precision:g}, {rows:,} rows have {rows * (1.0 + per_row):,.0f} hints, more than "
                f"{_MOST_HINTS:,}; give a higher precision, or a shorter log"
            )
        beside = rng.integers(0, rows, round(per_row * rows))
        model = trace.model[beside]
        counts = np.bincount(trace.model, minlength=len(trace.models))
        if np.count_nonzero(counts) > 1:
            cumulative = np.cumsum(counts)
            same = np.ones(len(beside), np.bool_)
            while same.any():
                model[same] = np.searchsorted(cumulative, rng.integers(0, rows, int(same.sum())), side="right")
                same = model == trace.model[beside]
        else:
            beside, model = beside[:0], model[:0]
        of = np.concatenate([np.arange(rows), beside])
        apart_s = np.concatenate([np.zeros(rows), rng.uniform(-_APART_S, _APART_S, len(beside))])
        ts = trace.ts[of] - self.lead_s + apart_s
        order = np.lexsort((rng.permutation(len(of)), ts))
        users = [None if u < 0 else trace.user_names[u] for u in trace.user[of[order]].tolist()]
        n = len(of)
        said = f"synthetic, precision {self.precision:g}, {self.lead_s:g} s ahead, within {self.ttl_s:g} s, seed {self.seed}"
        return HintLog(
            said, ts[order], np.concatenate([trace.model, model])[order].astype(np.int32), np.full(n, self.lead_s), np.full(n, self.ttl_s),
            [_SYNTHETIC] * n, list(users), list(users), [""] * n, ["load"] * n, [f"h{k}" for k in range(n)],
            every_row=True,
        )  # fmt: skip


def check_hints(given: str) -> None:
    """Raises UsageError or InputError for what `--hints` can't mean, before a log is read."""
    if _is_synthetic(given):
        SyntheticHints.parse(given)
    elif not Path(given).exists():
        raise InputError("there is no such log of hints; name a file, or synthetic:precision=0.7,lead=5,seed=1", path=given)


def _is_synthetic(given: str) -> bool:
    return given == _SYNTHETIC or given.startswith(f"{_SYNTHETIC}:")


def read_hints(given: str, trace: Trace, *, strict: bool = False) -> HintLog:
    """The hints that `--hints` names: a file, or `synthetic:…`. Raises UsageError and InputError.

    What can't be used is left out and counted; with `strict` it is an error.
    """
    check_hints(given)
    if _is_synthetic(given):
        return SyntheticHints.parse(given).make(trace)
    columns: dict[str, list[str | None]] = {name: [] for name in _COLUMNS}
    times = TimeReader(trace.tz)
    parsed: list[npt.NDArray[np.float64]] = []
    problems: Counter[str] = Counter()
    try:
        for batch in read_rows(given, {name: (name,) for name in _COLUMNS}):
            problems["lines that are no record"] += len(batch.malformed)
            parsed.append(times.parse(batch.columns["ts"]).ts if "ts" in batch.columns else np.full(len(batch.lines), np.nan))
            for name in _COLUMNS:
                column = batch.columns.get(name)
                columns[name] += [None] * len(batch.lines) if column is None else _texts(column)
    except InputError as exc:
        if "has no column" in str(exc):
            raise InputError("is no log of hints: it needs the columns ts and model (docs/replay.md names the others)", path=given) from exc
        raise
    ts = np.concatenate(parsed) if parsed else np.zeros(0)
    at = {name: m for m, name in enumerate(trace.models)}
    model = np.array([at.get(name or "", -1) for name in columns["model"]], np.int32)
    in_s, ttl_s = _numbers(columns["in_s"], 0.0), _numbers(columns["ttl_s"], _TTL_S)
    no_time, no_span = np.isnan(ts), ~((in_s >= 0.0) & (in_s <= _DAY_S) & (ttl_s > 0.0) & (ttl_s <= _DAY_S))
    strange = model < 0
    problems["hints without a readable time"] += int(no_time.sum())
    problems["hints whose in_s or ttl_s is no number of seconds within a day"] += int((no_span & ~no_time).sum())
    problems["hints of models that the log and its catalog don't have"] += int((strange & ~no_span & ~no_time).sum())
    usable = np.flatnonzero(~(no_time | no_span | strange))
    counted = {what: n for what, n in problems.items() if n}
    if strict and counted:
        raise InputError("under --strict: " + "; ".join(f"{what}: {n:,}" for what, n in counted.items()), path=given)
    if not len(usable):
        why = "; ".join(f"{what}: {n:,}" for what, n in counted.items())
        raise InputError(f"has no usable hint: {why or 'it holds none'}", path=given)
    order = usable[np.argsort(ts[usable], kind="stable")]

    def names(column: str) -> list[str | None]:
        return [columns[column][k] or None for k in order.tolist()]

    return HintLog(
        Path(given).name, ts[order], model[order], in_s[order], ttl_s[order], [name or "" for name in names("source")], names("session"),
        names("user"), [name or "" for name in names("surface")], [name or "load" for name in names("kind")],
        [name or f"row {k}" for name, k in zip(names("hint_id"), order.tolist(), strict=True)], counted,
    )  # fmt: skip


def _texts(column: pa.Array) -> list[str | None]:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    found = column.to_pylist()
    return [None if value is None else str(value).strip() for value in found]


def _numbers(values: list[str | None], default: float) -> npt.NDArray[np.float64]:
    """NaN where a value is no number."""

    def number(value: str | None) -> float:
        if not value:
            return default
        try:
            return float(value)
        except ValueError:
            return math.nan

    return np.array([number(value) for value in values], np.float64)


class HintFeed:
    """Takes a log's rows and hints in their order through the hint book and the classifier; nodes' events come out.

    `kept` and `broken` count hints so far, those that folded as one; `hinted` bool[rows of the log] says which rows kept one, or had one
    that a row just before kept.
    """

    def __init__(self, trace: Trace, hints: HintLog, nodes: list[str]) -> None:
        self.hinted = np.full(len(trace), hints.every_row)
        self._trace, self._hints, self._nodes = trace, hints, nodes
        self._believed = Hints()
        self._home = [by_rendezvous(model, nodes)[0] for model in trace.models]
        #: The node that the open hints of a model were told to.
        self._told: dict[str, int] = {}
        self._checks: list[tuple[float, str]] = []
        self._number = {name: m for m, name in enumerate(trace.models)}
        self._row = self._hint = 0
        self._events: list[list[tuple[float | bool, ...]]] = [[] for _ in nodes]

    @property
    def kept(self) -> int:
        return self._believed.book.kept

    @property
    def broken(self) -> int:
        return self._believed.book.broken

    @property
    def classifier(self) -> HintClassifier:
        return self._believed.classifier

    def until(self, until_s: float, forecast: Callable[[int, float], float]) -> list[npt.NDArray[np.void]]:
        """HINT_EVENT[K] of each node, from where it stands up to `until_s`, inclusive. `forecast(model, now_s)` is the rate of the
        model's next use as it was forecast then.

        A hint from before the log counts as if it came with its first row.
        """
        trace, hints = self._trace, self._hints
        while True:
            row_s = float(trace.ts[self._row]) if self._row < len(trace) else math.inf
            hint_s = max(float(hints.ts[self._hint]), trace.t0) if self._hint < len(hints) else math.inf
            check_s = self._checks[0][0] if self._checks else math.inf
            now_s = min(row_s, hint_s, check_s)
            if now_s > until_s or now_s == math.inf:
                break
            if check_s <= now_s:
                self._check(*heapq.heappop(self._checks))
            elif hint_s <= now_s:
                self._take(hints.hint(self._hint, trace.models), now_s, forecast)
                self._hint += 1
            else:
                self._see(self._row)
                self._row += 1
        found = [np.array(events, HINT_EVENT) for events in self._events]
        self._events = [[] for _ in self._nodes]
        return found

    def _take(self, hint: Hint, now_s: float, forecast: Callable[[int, float], float]) -> None:
        number = self._number[hint.model]
        if self._believed.take(hint, now_s, lambda _model: forecast(number, now_s)) not in ("new", "folded"):
            return
        self._told.setdefault(hint.model, self._home[number])
        self._tell(hint.model, now_s, news=True)

    def _tell(self, model: str, now_s: float, *, news: bool) -> None:
        said = self._believed.book.expected(model, now_s)
        node, number = self._told[model], self._number[model]
        if said is None:
            self._say_nothing(node, number, now_s)
            del self._told[model]
            return
        of_model = self._believed.book.announced.of(model)
        self._events[node].append((now_s, number, said.probability, said.at_s, said.end_s, said.until_s, news, *of_model))
        for check_s in {said.end_s, said.until_s}:
            if check_s > now_s:
                heapq.heappush(self._checks, (check_s, model))

    def _say_nothing(self, node: int, number: int, now_s: float) -> None:
        """No hint is open, or none that is this node's."""
        of_model = self._believed.book.announced.of(self._trace.models[number])
        self._events[node].append((now_s, number, 0.0, 0.0, 0.0, 0.0, False, *of_model))

    def _check(self, at_s: float, model: str) -> None:
        self._believed.book.expire(at_s)
        if model in self._told:
            self._tell(model, at_s, news=False)

    def _see(self, row: int) -> None:
        trace = self._trace
        number, user, node = int(trace.model[row]), int(trace.user[row]), int(trace.node[row])
        ts, model = float(trace.ts[row]), trace.models[number]
        self._believed.book.expire(ts)
        self.hinted[row] |= self._believed.saw(model, trace.user_names[user] if user >= 0 else None, ts) > 0
        if node >= 0:
            self._home[number] = node
        told = self._told.pop(model, None)
        if told is not None and told != self._home[number]:
            # The node that gets the row sees by itself that they are kept.
            self._say_nothing(told, number, ts)
        elif told is None and self._believed.book.announced.of(model)[0] > _LEAST_SHARE:
            # It came unannounced: after the row that is known.
            self._say_nothing(self._home[number], number, math.nextafter(ts, math.inf))


def describe_hints(hints: HintLog, feed: HintFeed) -> dict[str, Any]:
    """What the summary says of hints: what they are, how many, how they turned out, and whether the classifier was in force at the end."""
    fit = feed.classifier.fit
    return {
        "what": hints.said,
        "hints": len(hints),
        "kept": feed.kept,
        "broken": feed.broken,
        "problems": dict(hints.problems),
        "classifier_in_force": fit is not None and fit.pays,
        "brier": None if fit is None else fit.brier,
        "brier_of_record": None if fit is None else fit.brier_of_record,
    }


def of_hinted_rows(
    hinted: npt.NDArray[np.bool_], scored: npt.NDArray[np.bool_], logs: PolicyLogs, shadow: PolicyLogs
) -> dict[str, float]:
    """The scored rows that kept a hint, what they waited, and what they did without prefetching: entries of the summary."""
    rows = hinted & scored
    cold = [float(np.asarray(of.waits["wait_s"].to_numpy())[rows].sum()) for of in (logs, shadow)]
    return {"hinted_requests": int(rows.sum()), "hinted_cold_seconds": cold[0], "hinted_cold_seconds_without": cold[1]}

"""Records of the requests topic -> columns of good rows, and bad records with a reason each.

Good records take one decoder call each and a few checks of whole columns; only when one of those fails is every record of the chunk looked
at by itself, so that both ways say the same. Covers no counting.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from prefetcher.core.types import NAME_LIMIT_BYTES, RequestSeen
from prefetcher.ports import Partition
from prefetcher.wire import EARLIEST_S, MOST_COUNT, MOST_VERSION, DeadLetter, RequestMessage, decode_request, problem_of_request

__all__ = ["BadRow", "Decoded", "RowDecoder"]

#: Of a bad record, what its dead letter carries.
_KEPT_BYTES = 4096
_DETAIL_CHARACTERS = 200
#: What decoding gives: ts, model, user.
_Row = tuple[float, str, str | None]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A record that can't be taken in: `reason` is a word, `detail` a line for people."""

    offset: int
    reason: str
    detail: str
    value: bytes

    def letter(self, partition: Partition, topic: str, now_s: float) -> DeadLetter:
        return DeadLetter(
            topic=topic,
            partition=partition.number,
            offset=self.offset,
            reason=self.reason,
            detail=self.detail[:_DETAIL_CHARACTERS],
            value=base64.b64encode(self.value[:_KEPT_BYTES]).decode(),
            size_bytes=len(self.value),
            ts=now_s,
        )


@dataclass(frozen=True, slots=True)
class Decoded:
    """Good rows of one chunk as columns, in offset order, and the bad ones. `offsets` int64[n], `ts` float64[n] seconds since 1970 UTC."""

    offsets: npt.NDArray[np.int64]
    ts: npt.NDArray[np.float64]
    models: list[str]
    users: list[str | None]
    bad: list[BadRow] = field(default_factory=list)

    def since(self, offset: int) -> Decoded:
        """What lies at `offset` and after it."""
        first = int(np.searchsorted(self.offsets, offset))
        bad = [row for row in self.bad if row.offset >= offset]
        return Decoded(self.offsets[first:], self.ts[first:], self.models[first:], self.users[first:], bad)


class RowDecoder:
    """Decodes chunks. `mapping` reads the records of a foreign topic and raises ValueError (`reason: detail`) for what is no request.

    `most_bytes`: a larger record is bad, whatever it holds. `ahead_s`: clocks of gateways may be this far ahead of ours.
    """

    def __init__(self, most_bytes: int, ahead_s: float, mapping: Callable[[bytes], RequestSeen] | None = None) -> None:
        self._most_bytes = most_bytes
        self._ahead_s = ahead_s
        self._mapping = mapping
        self._decode = msgspec.json.Decoder(RequestMessage).decode

    def __call__(self, offsets: Sequence[int], values: Sequence[bytes], now_s: float) -> Decoded:
        if not values:
            return _decoded([], [], [])
        if self._mapping is None:
            longest = max(map(len, values))
            quick = self._quickly(offsets, values, now_s, longest) if longest <= self._most_bytes else None
            if quick is not None:
                return quick
        return self._one_by_one(offsets, values, now_s)

    def _quickly(self, offsets: Sequence[int], values: Sequence[bytes], now_s: float, longest: int) -> Decoded | None:
        """All rows, or None when any record may be bad. `longest`: bytes of the longest record."""
        try:
            rows = list(map(self._decode, values))
        except (ValueError, RecursionError):
            return None
        ts = np.array([row.ts for row in rows])
        models = [row.model for row in rows]
        counts = [row.count for row in rows]
        if (
            ts.min() < EARLIEST_S
            or ts.max() > now_s + self._ahead_s
            or not all(models)
            or min(counts) < 1
            or max(counts) > MOST_COUNT
            or max([row.v for row in rows]) > MOST_VERSION
            # A name is never longer than the record that it came in.
            or (longest > NAME_LIMIT_BYTES and any(map(problem_of_request, rows)))
        ):
            return None
        return Decoded(np.array(offsets, np.int64), ts, models, [row.user for row in rows])

    def _one_by_one(self, offsets: Sequence[int], values: Sequence[bytes], now_s: float) -> Decoded:
        kept: list[int] = []
        rows: list[_Row] = []
        bad: list[BadRow] = []
        for offset, value in zip(offsets, values, strict=True):
            try:
                rows.append(self._row(value, now_s))
                kept.append(offset)
            except ValueError as exc:
                reason, colon, detail = str(exc).partition(": ")
                named = bool(colon) and reason.isidentifier()
                bad.append(BadRow(offset, reason if named else "bad_field", detail if named else str(exc), value))
        return _decoded(kept, rows, bad)

    def _row(self, value: bytes, now_s: float) -> _Row:
        if len(value) > self._most_bytes:
            raise ValueError(f"oversized: {len(value):,} bytes, at most {self._most_bytes:,}")
        if self._mapping is None:
            message = decode_request(value)
        else:
            message = RequestMessage.of(self._mapping(value))
            problem = problem_of_request(message)
            if problem:
                raise ValueError(problem)
        if message.ts > now_s + self._ahead_s:
            raise ValueError(f"future: ts is {message.ts}, {message.ts - now_s:.0f} s ahead of this machine's clock")
        return message.ts, message.model, message.user


def _decoded(offsets: list[int], rows: list[_Row], bad: list[BadRow]) -> Decoded:
    return Decoded(
        np.array(offsets, np.int64), np.array([row[0] for row in rows], np.float64), [row[1] for row in rows], [row[2] for row in rows], bad
    )

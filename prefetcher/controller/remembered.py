"""What people said by hand survives a state server that forgot everything: whoever read it last writes it back.

Nothing deletes switches and pins (an empty list of pins is written as one) but the forgetting of a node, so that a key that was there and
is not any more went with the server's memory. A key that somebody wrote meanwhile is left as it is, and a record that is none is not
written back: what could be read before it is. Covers neither what the records say nor plans and reports, which are written again by
themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefetcher.ports import StateStore
from prefetcher.telemetry.logs import log

__all__ = ["Remembered"]


class Remembered:
    """Keeps the last value of every key that is looked at. For one thread."""

    def __init__(self, state: StateStore) -> None:
        self._state = state
        self._last: dict[str, bytes] = {}
        #: What stood under a key before its last value.
        self._before: dict[str, bytes] = {}

    def look(self, keys: Sequence[str], found: Sequence[bytes | None]) -> list[bytes | None]:
        """`found` is what was read under `keys` just now; returned with what went missing, after that was written back.

        Raises:
            UnavailableError: the state store does not answer.
        """
        return [self._last_of(key, raw) for key, raw in zip(keys, found, strict=True)]

    def drop(self, keys: Iterable[str]) -> None:
        """What is under these keys went on purpose, and is not written back."""
        for key in keys:
            self._last.pop(key, None)
            self._before.pop(key, None)

    def refuse(self, key: str) -> None:
        """What `look` found under `key` last is no record: should it be removed, the value before it is written back, if there was one."""
        self._last.pop(key, None)
        before = self._before.pop(key, None)
        if before is not None:
            self._last[key] = before

    def _last_of(self, key: str, raw: bytes | None) -> bytes | None:
        if raw is not None:
            last = self._last.get(key)
            if last is not None and last != raw:
                self._before[key] = last
            self._last[key] = raw
            return raw
        last = self._last.get(key)
        if last is not None and self._state.replace(key, None, last):
            log().error("state_forgot", key=key, then="written back as it was; look after the state server's persistence")
        return last

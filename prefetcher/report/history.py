"""The ledger's hours from the state store into the parquet history, where they outlive it.

An hour is settled, as far as its first part goes, once agents hand it out (`agent.orderbook`); each part is then copied, and again should
its node write it again. What was copied is noted beside the files, so that a day's run reads only what is new; a run that is repeated
changes nothing. Of a node that is to be forgotten all is copied at once, with what it held (`copy_node`). Covers no removing.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from prefetcher.controller import records
from prefetcher.core.held import provisional
from prefetcher.core.totals import HOUR_S, Totals
from prefetcher.core.types import NodeName
from prefetcher.parquet_files import write_table
from prefetcher.ports import StateStore
from prefetcher.report.sums import HourPart, StoredLedger, decode_hour, decode_ledger
from prefetcher.report.tables import Cell, hour_file, read_hours, sums_table
from prefetcher.telemetry.logs import log

__all__ = ["HELD_PART", "copy_hours", "copy_node"]

#: Agents keep hours for six; those whose topic was away keep them longer.
_SETTLED_H = 12
_NOTE = "copied.json"
#: The part of an hour that what a forgotten node still held is counted in: agents' own parts never get so far.
HELD_PART = 1_000_000
_Copied = dict[str, dict[HourPart, int]]
_notes = msgspec.json.Decoder(dict[str, list[tuple[int, int, int]]])


def copy_hours(state: StateStore, folder: Path, now_s: float, on_hour: Callable[[int, int], None] = lambda at, of: None) -> int:
    """Copies what is settled and was not copied; how many hours of nodes. `on_hour(n, of)` hears how far it is.

    Raises:
        UnavailableError: the state store does not answer.
        OSError: the folder can't be written; what was copied before stays.
    """
    note = folder / _NOTE
    copied = _read_note(note)
    until = int(now_s // HOUR_S) - _SETTLED_H
    by_hour: dict[int, list[tuple[NodeName, int]]] = {}
    kept: _Copied = {}
    for name in map(NodeName, state.members(records.NODES, 0.0)):
        raw = state.read(records.node_key(name, "sums"))
        try:
            stored = None if raw is None else decode_ledger(raw)
        except ValueError as exc:
            log().error("ledger_unreadable", node=name, reason=str(exc), then="its hours are not copied into the history")
            continue
        if stored is None:
            continue
        # What a node lists no more is gone from the store.
        kept[name] = {}
        for hour, part, written in stored.hours:
            if max(hour, written) < until:
                kept[name][hour, part] = written
                if copied.get(name, {}).get((hour, part), -1) < written:
                    by_hour.setdefault(hour, []).append((name, part))
    count = 0
    for number, (hour, places) in enumerate(sorted(by_hour.items())):
        on_hour(number, len(by_hour))
        raw_hours = state.read_many([records.hour_key(name, hour, part) for name, part in places])
        new: dict[Cell, Totals] = {}
        for (name, part), item in zip(places, raw_hours, strict=True):
            if item is None:
                continue
            try:
                new.update({(name, part, key): totals for key, totals in decode_hour(item)})
                count += 1
            except ValueError as exc:
                log().error("ledger_unreadable", node=name, reason=str(exc), then="this hour is not copied into the history")
        if new:
            _add(folder, hour, new)
    folder.mkdir(parents=True, exist_ok=True)
    part_of_note = note.with_name(f"{_NOTE}.part")
    written_of = {name: [(*place, written) for place, written in sorted(places.items())] for name, places in kept.items()}
    part_of_note.write_bytes(msgspec.json.encode(written_of))
    part_of_note.replace(note)
    return count


def copy_node(state: StateStore, folder: Path, node: NodeName, stored: StoredLedger) -> int:
    """Copies everything that `node` told, and what it still held as if given back at its last telling; how many hours.

    Raises:
        UnavailableError: the state store does not answer.
        OSError, InputError: the folder can't be written, or read.
    """
    by_hour: dict[int, dict[Cell, Totals]] = {}
    places = [(hour, part) for hour, part, _ in stored.hours]
    raw = state.read_many([records.hour_key(node, hour, part) for hour, part in places]) if places else []
    for (hour, part), item in zip(places, raw, strict=True):
        if item is None:
            continue
        try:
            by_hour.setdefault(hour, {}).update({(node, part, key): totals for key, totals in decode_hour(item)})
        except ValueError as exc:
            log().error("ledger_unreadable", node=node, reason=str(exc), then="this hour is not copied into the history")
    for key, totals in provisional(sorted(stored.held, key=lambda entry: entry.place), stored.at_s).items():
        by_hour.setdefault(key.hour, {})[node, HELD_PART, key] = totals
    for hour, new in sorted(by_hour.items()):
        _add(folder, hour, new)
    return len(by_hour)


def _add(folder: Path, hour: int, new: Mapping[Cell, Totals]) -> None:
    """Puts cells into the file of their hour; two who do that at once do it one after the other."""
    with _alone(folder):
        write_table(hour_file(folder, hour), sums_table(read_hours(folder, [hour]) | dict(new)))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read_note(note: Path) -> _Copied:
    try:
        found = _notes.decode(note.read_bytes())
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError as exc:
        log().warning("note_unreadable", reason=str(exc), then="hours are copied again")
        return {}
    return {name: {(hour, part): written for hour, part, written in places} for name, places in found.items()}

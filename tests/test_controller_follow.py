"""Following a gateway's log file: formats, rotation, a cut file, half lines, bad lines, and where it goes on."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import structlog
from stream_kit import FullStreams, rows_of

from prefetcher.clock import VirtualClock
from prefetcher.controller.follow import Follower
from prefetcher.errors import NoRoomError, SettingsError
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.memory import MemoryStreams
from prefetcher_connectors.streams import FileStreams

T0 = 1_767_225_600


class Setup:
    def __init__(self, path: Path, streams: MemoryStreams, fields: str | None = None) -> None:
        self.streams, self.metrics, self.clock = streams, Metrics(), VirtualClock(T0 + 1000.0)
        self.follower = Follower(path, streams, self.clock, self.metrics, fields)

    def read(self) -> list[tuple[float, str]]:
        while self.follower.step():
            pass
        return [(row.ts, row.model) for row in rows_of(self.streams)]

    def bad(self) -> list[str]:
        lines = self.metrics.text().decode().splitlines()
        return [line.split('reason="')[1].split('"')[0] for line in lines if line.startswith("prefetcher_bad_requests_total{")]

    def close(self) -> None:
        stop = threading.Event()
        stop.set()
        self.follower.run(stop)


def line(second: int, model: str) -> str:
    return f'{{"ts": {T0 + second}, "model": "{model}"}}\n'


def test_half_lines_wait_for_their_end(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    setup = Setup(path, MemoryStreams())
    assert setup.read() == []
    path.write_text(line(1, "a") + line(2, "b")[:10])
    assert setup.read() == [(T0 + 1.0, "a")]
    path.write_text(line(1, "a") + line(2, "b"))
    assert setup.read() == [(T0 + 1.0, "a"), (T0 + 2.0, "b")]
    setup.close()


def test_it_goes_on_where_it_was_also_in_a_file_that_was_rotated_meanwhile(tmp_path: Path) -> None:
    path, streams = tmp_path / "log.jsonl", MemoryStreams()
    path.write_text(line(1, "a"))
    setup = Setup(path, streams)
    setup.read()
    setup.close()
    with path.open("a") as file:
        file.write(line(2, "b"))
    path.rename(tmp_path / "log.jsonl.1")
    path.write_text(line(3, "c"))
    again = Setup(path, streams)
    assert [model for _, model in again.read()] == ["a", "b", "c"]
    again.close()


@pytest.mark.parametrize(
    "names",
    [
        ("log.jsonl.12", "log.jsonl.11", "log.jsonl.2", "log.jsonl"),
        ("log.jsonl-20260101", "log.jsonl-20260102", "log.jsonl-20260103-2", "log.jsonl"),
    ],
)
def test_files_that_were_rotated_while_it_was_down_are_read_one_after_the_other(tmp_path: Path, names: tuple[str, ...]) -> None:
    path, streams = tmp_path / "log.jsonl", MemoryStreams()
    path.write_text(line(1, "a"))
    setup = Setup(path, streams)
    setup.read()
    setup.close()
    path.rename(tmp_path / names[0])
    with (tmp_path / names[0]).open("a") as file:
        file.write(line(2, "b"))
    for second, name in enumerate(names[1:], start=3):
        (tmp_path / name).write_text(line(second, "c"))
    # Neither what is compressed, nor what is older than where it stopped, nor other files.
    for name in ("log.jsonl.1.gz", "log.jsonl.13", "log.jsonl-20251231", "log.jsonl.bak", "other.jsonl"):
        (tmp_path / name).write_text(line(9, "x"))
    again = Setup(path, streams)
    with structlog.testing.capture_logs() as said:
        assert again.read() == [(T0 + 1.0, "a"), (T0 + 2.0, "b"), (T0 + 3.0, "c"), (T0 + 4.0, "c"), (T0 + 5.0, "c")]
    assert [entry for entry in said if entry["log_level"] == "warning"] == []
    again.close()


def test_files_that_were_rotated_twice_while_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(line(1, "a"))
    setup = Setup(path, MemoryStreams())
    setup.read()
    path.rename(tmp_path / "log.jsonl.2")
    (tmp_path / "log.jsonl.1").write_text(line(2, "b"))
    path.write_text(line(3, "c"))
    assert [model for _, model in setup.read()] == ["a", "b", "c"]
    # Renamed to nothing that is known, and one that takes its place.
    path.rename(tmp_path / "elsewhere")
    path.write_text(line(4, "d"))
    assert [model for _, model in setup.read()] == ["a", "b", "c", "d"]
    setup.close()


def test_a_file_that_is_gone_is_named_and_what_came_after_it_is_read(tmp_path: Path) -> None:
    path, streams = tmp_path / "log.jsonl", MemoryStreams()
    older = tmp_path / "log.jsonl.2"
    older.write_text(line(0, "x"))
    os.utime(older, (T0, T0))
    path.write_text(line(1, "a"))
    os.utime(path, (T0 + 1, T0 + 1))
    setup = Setup(path, streams)
    setup.read()
    setup.close()
    # Kept, so that its inode is not given to another file.
    path.rename(tmp_path / "kept")
    (tmp_path / "log.jsonl.1").write_text(line(2, "b"))
    os.utime(tmp_path / "log.jsonl.1", (T0 + 2, T0 + 2))
    path.write_text(line(3, "c"))
    again = Setup(path, streams)
    with structlog.testing.capture_logs() as said:
        assert [model for _, model in again.read()] == ["a", "b", "c"]
    (warning,) = [entry for entry in said if entry["log_level"] == "warning"]
    assert warning["event"] == "follow_lost_rows"
    assert f"up to byte {len(line(1, 'a'))}" in warning["lost"]
    again.close()


def test_a_file_that_was_cut_while_it_was_down_is_named_and_read_from_its_start(tmp_path: Path) -> None:
    path, streams = tmp_path / "log.jsonl", MemoryStreams()
    path.write_text(line(1, "a") + line(2, "b"))
    setup = Setup(path, streams)
    setup.read()
    setup.close()
    path.write_text(line(3, "c"))
    again = Setup(path, streams)
    with structlog.testing.capture_logs() as said:
        assert [model for _, model in again.read()] == ["a", "b", "c"]
    assert "was cut" in next(entry["lost"] for entry in said if entry["log_level"] == "warning")
    again.close()


def test_a_full_disk_loses_no_line(tmp_path: Path) -> None:
    path, streams = tmp_path / "log.jsonl", FullStreams()
    path.write_text("nonsense\n" + line(1, "a"))
    setup = Setup(path, streams)
    for _ in range(2):
        with pytest.raises(NoRoomError):
            setup.follower.step()
    streams.full = False
    assert setup.read() == [(T0 + 1.0, "a")]
    assert setup.metrics.registry.get_sample_value("prefetcher_bad_requests_total", {"source": "file", "reason": "not a record"}) == 1
    setup.close()


def test_names_without_end_and_columns_that_are_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(line(1, "x" * 513) + line(2, "x" * 512))
    setup = Setup(path, MemoryStreams())
    with structlog.testing.capture_logs() as said:
        assert setup.read() == [(T0 + 2.0, "x" * 512)]
    assert setup.bad() == ["model is longer than 512 bytes"]
    assert all(len(str(entry)) < 400 for entry in said)
    setup.close()
    path = tmp_path / "log.csv"
    path.write_text(f"ts,model,model\n{T0 + 1},a,b\n")
    setup = Setup(path, MemoryStreams())
    assert setup.read() == []
    assert sorted(setup.bad()) == ["not a header", "not a record"]
    setup.close()


def test_a_file_that_was_cut_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(line(1, "a") + line(2, "b"))
    setup = Setup(path, MemoryStreams())
    setup.read()
    path.write_text(line(3, "c"))
    assert [model for _, model in setup.read()] == ["a", "b", "c"]
    setup.close()


def test_the_last_line_of_a_rotated_file_needs_no_end(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(line(1, "a") + line(2, "b").rstrip())
    setup = Setup(path, MemoryStreams())
    setup.read()
    path.rename(tmp_path / "log.jsonl.1")
    path.write_text(line(3, "c"))
    assert [model for _, model in setup.read()] == ["a", "b", "c"]
    setup.close()


def test_bad_lines_are_counted_and_never_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(
        "nonsense\n[1]\n\n"
        + f'{{"model": "a"}}\n{{"ts": {T0}}}\n{{"ts": {T0 + 99999}, "model": "a"}}\n{{"ts": true, "model": "a"}}\n'
        + line(5, "good")
    )
    setup = Setup(path, MemoryStreams())
    assert setup.read() == [(T0 + 5.0, "good")]
    assert sorted(setup.bad()) == ["model is no name", "not a record", "ts is no time", "ts lies in the future"]
    setup.close()


@pytest.mark.parametrize(
    ("name", "header", "bad", "good"),
    [
        ("log.jsonl", "", "[" * 50_000, line(5, "good")),
        ("log.jsonl", "", f'{{"ts": {"9" * 400}, "model": "a"}}', line(5, "good")),
        ("log.csv", "ts,model\n", "1," + "x" * 200_000, f"{T0 + 5},good\n"),
    ],
)
def test_no_line_ends_following(tmp_path: Path, name: str, header: str, bad: str, good: str) -> None:
    path = tmp_path / name
    path.write_text(f"{header}{bad}\n{good}")
    setup = Setup(path, MemoryStreams())
    assert setup.read() == [(T0 + 5.0, "good")]
    assert len(setup.bad()) == 1
    setup.close()


def test_a_header_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("x" * 200_000 + f"\n{T0 + 5},good\n")
    setup = Setup(path, MemoryStreams())
    assert setup.read() == []
    assert sorted(setup.bad()) == ["not a header", "not a record"]
    setup.close()


def test_nanoseconds_and_counts_beyond_all_measure(tmp_path: Path) -> None:
    path, streams = tmp_path / "log.jsonl", FileStreams(tmp_path / "log")
    path.write_text(f'{{"ts": {T0 + 5}123456789, "model": "a", "count": {"9" * 30}}}\n')
    follower = Follower(path, streams, VirtualClock(T0 + 1000.0), Metrics())
    assert follower.step()
    (row,) = rows_of(streams)
    assert (row.ts, row.count) == (pytest.approx(T0 + 5.123456789, abs=1e-3), 1_000_000_000)
    stop = threading.Event()
    stop.set()
    follower.run(stop)
    streams.close()


def test_csv_and_times_and_maps(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("when,who,what\n2026-01-01T00:00:01Z,u1,a\n2026-01-01T00:00:02Z,,b\nshort\n")
    setup = Setup(path, MemoryStreams(), "ts=when,model=what,user=who")
    assert setup.read() == [(T0 + 1.0, "a"), (T0 + 2.0, "b")]
    assert [row.user for row in rows_of(setup.streams)] == ["u1", None]
    assert setup.bad() == ["not a record"]
    setup.close()


def test_a_map_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        Setup(tmp_path / "x", MemoryStreams(), "nonsense")


def test_a_log_with_other_columns_is_a_problem_that_names_them_until_something_is_read(tmp_path: Path) -> None:
    path, streams = tmp_path / "log.jsonl", MemoryStreams()
    path.write_text(f'{{"startTime": {T0}, "request": {{"model": "a", "user": 1}}, "status": 200}}\n' * 25)
    setup = Setup(path, streams)
    with structlog.testing.capture_logs() as said:
        assert setup.read() == []
        setup.clock.advance(61.0)
        setup.follower.step()
        setup.clock.advance(61.0)
        setup.follower.step()
    named = [entry for entry in said if entry["event"] == "line_skipped"]
    (summary,) = [entry for entry in said if entry["event"] == "lines_skipped"]
    assert len(named) == 20
    assert (summary["lines"], summary["reasons"], summary["rows_read"]) == (5, {"ts is no time": 5}, 0)
    assert "lines refused so far: 25 (ts is no time: 25)" in setup.follower.problem
    assert "its columns are startTime, request.model, request.user, status: say which" in setup.follower.problem
    assert "--map ts=COLUMN,model=COLUMN" in setup.follower.unreadable
    with path.open("a") as file:
        file.write(line(1, "a"))
    assert len(setup.read()) == 1
    assert setup.follower.problem == ""
    setup.close()
    with path.open("a") as file:
        file.write("nonsense\n")
    again = Setup(path, streams)
    again.read()
    assert again.bad() == ["not a record"]
    assert again.follower.problem == "", "an earlier process read of it"
    again.close()


def test_what_is_no_json_at_all_and_a_header_without_the_columns(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("GET / 200\n")
    setup = Setup(path, MemoryStreams())
    setup.read()
    assert "follow takes JSON lines or CSV" in setup.follower.unreadable
    setup.close()
    path = tmp_path / "log.csv"
    path.write_text("when,what\n1,a\n")
    setup = Setup(path, MemoryStreams())
    setup.read()
    assert "its columns are when, what" in setup.follower.unreadable
    setup.close()


def test_a_file_that_is_not_there_yet_is_said_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    setup = Setup(path, MemoryStreams())
    with structlog.testing.capture_logs() as said:
        for _ in range(3):
            assert not setup.follower.step()
    assert [entry["event"] for entry in said] == ["follow_waits"]
    assert "is not there yet" in setup.follower.problem
    assert setup.follower.unreadable == ""
    path.write_text(line(1, "a"))
    assert len(setup.read()) == 1
    assert setup.follower.problem == ""
    setup.close()


@pytest.mark.parametrize(("name", "start"), [("log.parquet", b""), ("log.jsonl.gz", b""), ("log.jsonl", b"PAR1"), ("log", b"\x1f\x8b\x08")])
def test_parquet_and_compressed_files_are_refused(tmp_path: Path, name: str, start: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(start + b"\n")
    with pytest.raises(SettingsError, match="follow takes JSON lines or CSV"):
        Setup(path, MemoryStreams())


def test_a_compressed_file_that_comes_later_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    setup = Setup(path, MemoryStreams())
    setup.read()
    path.write_bytes(b"\x1f\x8b\x08\n")
    assert setup.read() == []
    assert "parquet or compressed" in setup.follower.problem
    setup.close()

"""The contract of request streams, on the folder and on its twin in memory, and what only the folder can show."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetcher.core.types import ModelName, ModelVersion, NodeName, RequestSeen
from prefetcher.errors import NoRoomError, UnavailableError, UsageError
from prefetcher.ports import RequestStream
from prefetcher_connectors.files import FileStream, decode_record, encode_record
from prefetcher_connectors.memory import MemoryStream


def request_at(ts: float, model: str = "llama") -> RequestSeen:
    return RequestSeen(ts=ts, model=ModelName(model))


@pytest.fixture(params=["files", "memory"])
def stream(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RequestStream]:
    made: RequestStream = (
        FileStream(tmp_path / "log", segment_bytes=1000) if request.param == "files" else MemoryStream()
    )
    yield made
    made.close()


def test_reads_back_in_order_and_then_nothing_new(stream: RequestStream) -> None:
    rows = [request_at(float(i), f"m{i % 3}") for i in range(100)]
    for start in range(0, 100, 7):
        stream.append(rows[start : start + 7])
    seen: list[RequestSeen] = []
    position = 0
    while True:
        batch = stream.read(position, 9)
        assert not batch.bad
        if batch.next_position == position:
            break
        seen.extend(batch.requests)
        position = batch.next_position
    assert seen == rows
    assert position == stream.end()
    assert stream.read(position, 10).requests == ()


def test_position_of_an_append_is_where_the_next_read_starts(stream: RequestStream) -> None:
    first = stream.append([request_at(1.0)])
    stream.append([request_at(2.0)])
    assert [row.ts for row in stream.read(first, 10).requests] == [2.0]
    assert stream.append([]) == stream.end()


def test_nothing_is_wrong_with_a_log_that_takes_rows(stream: RequestStream) -> None:
    stream.append([request_at(1.0)])
    assert stream.check() == ""


def test_keeps_the_last_mark(stream: RequestStream) -> None:
    assert stream.last_mark() is None
    stream.append([request_at(1.0), request_at(2.0)], mark="a:1")
    stream.append([request_at(3.0)], mark="a:2")
    stream.append([request_at(4.0)])
    assert stream.last_mark() == "a:2"


@given(
    ts=st.floats(0, 4e9),
    model=st.text(min_size=1),
    count=st.integers(1, 1000),
    user=st.none() | st.text(),
    node=st.none() | st.text(),
)
@settings(max_examples=50, deadline=None)
def test_records_survive_the_file(ts: float, model: str, count: int, user: str | None, node: str | None) -> None:
    row = RequestSeen(
        ts, ModelName(model), count, user, None if node is None else NodeName(node), ModelVersion("v2"), "id-1"
    )
    line = encode_record(row, "mark")
    assert b"\n" not in line
    assert decode_record(line) == row


@pytest.fixture
def reopen(tmp_path: Path) -> Callable[[], FileStream]:
    return lambda: FileStream(tmp_path / "log", segment_bytes=1000, keep_segments=1)


def test_a_torn_last_line_is_cut_off_and_marks_survive(tmp_path: Path, reopen: Callable[[], FileStream]) -> None:
    stream = reopen()
    for i in range(60):
        stream.append([request_at(float(i))], mark=f"file:{i}")
    stream.append([request_at(60.0)])
    end = stream.end()
    stream.close()
    last = sorted((tmp_path / "log").glob("*.jsonl"))[-1]
    with last.open("ab") as file:
        file.write(b'{"ts":61.0,"mod')
    stream = reopen()
    assert stream.end() == end
    assert stream.last_mark() == "file:59"
    stream.append([request_at(62.0)])
    assert [row.ts for row in stream.read(0, 100).requests] == [*map(float, range(61)), 62.0]
    stream.close()


def test_a_line_that_is_no_record_is_named_and_skipped(tmp_path: Path, reopen: Callable[[], FileStream]) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    (folder / f"{0:020d}.jsonl").write_bytes(
        b'{"ts":1.0,"model":"a"}\nnonsense\n{"ts":"x","model":"b"}\n{"ts":2.0,"model":"c"}\n'
    )
    stream = reopen()
    batch = stream.read(0, 10)
    assert [row.model for row in batch.requests] == ["a", "c"]
    assert [bad.position for bad in batch.bad] == [23, 32]
    stream.close()


def test_old_segments_go_only_when_read(tmp_path: Path, reopen: Callable[[], FileStream]) -> None:
    stream = reopen()
    for i in range(200):
        stream.append([request_at(float(i))])
    files = len(list((tmp_path / "log").glob("*.jsonl")))
    assert files > 3
    stream.drop_before(0)
    assert len(list((tmp_path / "log").glob("*.jsonl"))) == files
    stream.drop_before(stream.end())
    assert len(list((tmp_path / "log").glob("*.jsonl"))) == 2
    kept = stream.read(0, 1000).requests
    assert kept[-1].ts == 199.0
    assert kept[0].ts > 0.0
    stream.close()


def test_one_process_owns_the_folder(reopen: Callable[[], FileStream]) -> None:
    stream = reopen()
    with pytest.raises(UnavailableError, match="in use"):
        reopen()
    stream.close()
    reopen().close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--state-dir"):
        FileStream(tmp_path / "file" / "log")


#: Limits the size of files, as a disk is full: what is written beyond fails, what was there stays.
_FULL = """
import resource, signal, sys
from pathlib import Path
from prefetcher.core.types import ModelName, RequestSeen
from prefetcher.errors import NoRoomError
from prefetcher_connectors.files import FileStream

def row(ts):
    return RequestSeen(ts=ts, model=ModelName("m" * 100))

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
stream = FileStream(Path(sys.argv[1]), segment_bytes=1_000_000)
stream.append([row(0.0)])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
taken = 1
while True:
    try:
        stream.append([row(float(taken))])
    except NoRoomError as exc:
        print(exc, exc.retry_after_s)
        break
    taken += 1
print(stream.check())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(repr(stream.check()))
stream.append([row(float(taken))])
print([found.ts for found in stream.read(0, 1000).requests] == [float(i) for i in range(taken + 1)])
stream.close()
"""


def test_a_full_disk_is_said_from_the_first_append_on_until_there_is_room(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FULL, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    refused, problem, after, whole = done.stdout.splitlines()
    assert str(tmp_path / "log") in refused
    assert "File too large" in refused
    assert "make room" in problem
    assert (after, whole) == ("''", "True")


def test_a_log_that_cannot_begin_its_next_file_goes_on_in_it_later(tmp_path: Path, reopen: Callable[[], FileStream]) -> None:
    stream, folder = reopen(), tmp_path / "log"
    count = 0
    while stream.end() < 1000:
        stream.append([request_at(float(count))])
        count += 1
    (folder / f"{stream.end():020d}.jsonl").mkdir()
    for _ in range(2):
        with pytest.raises(NoRoomError, match="Is a directory"):
            stream.append([request_at(float(count))])
    assert stream.read(0, 1000).requests[-1].ts == count - 1.0
    (folder / f"{stream.end():020d}.jsonl").rmdir()
    stream.append([request_at(float(count))])
    assert [row.ts for row in stream.read(0, 1000).requests] == [float(i) for i in range(count + 1)]
    stream.close()

"""The contract of streams, on a folder, in memory and on a broker; and what only the folder can show."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prefetcher.errors import UnavailableError, UsageError
from prefetcher.ports import Partition, Positions, StreamReader, Streams, Topic
from prefetcher_connectors.kafka import KafkaOptions, KafkaStreams
from prefetcher_connectors.memory import MemoryStreams
from prefetcher_connectors.segments import SegmentLog
from prefetcher_connectors.streams import FileStreams

Open = Callable[[], Streams]
#: More than anything here takes: a wait that ends by it has failed.
PATIENCE_S = 30.0


@pytest.fixture(params=["files", "memory", "kafka"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the same streams again: another start of the program. Everything is closed in the end."""
    opened: list[Streams] = []
    memory = MemoryStreams()
    prefix = f"t{uuid.uuid4().hex[:12]}"

    def open_streams() -> Streams:
        made: Streams
        if request.param == "files":
            for earlier in opened:
                earlier.close()
            made = FileStreams(tmp_path / "streams", segment_bytes=1000)
        elif request.param == "memory":
            made = memory
        else:
            address = request.getfixturevalue("broker").address
            made = KafkaStreams(KafkaOptions(address, prefix=prefix, partitions=3))
        made.prepare()
        opened.append(made)
        return made

    yield open_streams
    for streams in opened:
        streams.close()


@pytest.fixture
def streams(reopen: Open) -> Streams:
    return reopen()


class Owner:
    """Reads, and keeps its positions as owners do, in `positions`, which owners of one name share; closes what it opened."""

    def __init__(self, streams: Streams, positions: dict[Partition, int] | None = None, *topics: Topic, shared: bool = False) -> None:
        self.positions = {} if positions is None else positions
        self.values: dict[Partition, list[bytes]] = {}
        self.begun: list[Partition] = []
        self.given_up: list[Partition] = []
        self.reader: StreamReader = streams.reader(topics or (Topic.REQUESTS,), "owner", self._start, self.given_up.extend, shared=shared)

    def _start(self, partitions: Sequence[Partition]) -> Positions:
        self.begun.extend(partitions)
        return self.positions

    def poll(self, limit: int = 1000, timeout_s: float = 0.2) -> int:
        count = 0
        for chunk in self.reader.poll(limit, timeout_s):
            assert len(chunk.offsets) == len(chunk.values)
            assert list(chunk.offsets) == sorted(set(chunk.offsets))
            assert not chunk.offsets or self.positions.get(chunk.partition, 0) <= chunk.offsets[0]
            assert chunk.offsets[-1] < chunk.next_offset
            assert chunk.lost == 0
            self.positions[chunk.partition] = chunk.next_offset
            self.values.setdefault(chunk.partition, []).extend(chunk.values)
            count += len(chunk.values)
        return count

    def take(self, count: int, limit: int = 1000) -> list[bytes]:
        """Polls until `count` values are there, and then sees that no more come."""
        give_up = deadline()
        while sum(map(len, self.values.values())) < count and not give_up():
            self.poll(limit)
        self.poll(timeout_s=0.0)
        return [value for values in self.values.values() for value in values]

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()


def deadline(seconds: float = PATIENCE_S) -> Callable[[], bool]:
    over = threading.Event()
    timer = threading.Timer(seconds, over.set)
    timer.daemon = True
    timer.start()
    return over.is_set


def rows(count: int, keys: int = 5) -> list[tuple[str, bytes]]:
    return [(f"model-{i % keys}", b'{"model":"model-%d","n":%d}' % (i % keys, i)) for i in range(count)]


def test_records_of_a_key_come_in_their_order(streams: Streams) -> None:
    sent = rows(500)
    writer = streams.writer()
    for start in range(0, 500, 70):
        writer.append(Topic.REQUESTS, sent[start : start + 70], timeout_s=PATIENCE_S)
    with Owner(streams) as owner:
        assert len(owner.take(500, limit=33)) == 500
        for number in range(5):
            mine = [value for key, value in sent if key == f"model-{number}"]
            name = b'"model-%d"' % number
            homes = [values for values in owner.values.values() if any(name in value for value in values)]
            assert len(homes) == 1
            assert [value for value in homes[0] if name in value] == mine
    writer.close()


def test_values_and_keys_of_any_bytes_and_sizes(streams: Streams) -> None:
    values = [
        b"",
        b"{}",
        b"a\nb\\n\\c\n",
        b"!m looks like a head",
        b"!e \\n",
        b"\n",
        b"\r\n",
        bytes(range(256)),
        b"x" * 900_000,
        "é中".encode(),
    ]
    writer = streams.writer()
    for key, value in zip(["", "é中\U0001f600", "a\nb", *"defghij"], values, strict=True):
        writer.append(Topic.HINTS, [(key, value)], timeout_s=PATIENCE_S)
    with Owner(streams, None, Topic.HINTS) as owner:
        assert sorted(owner.take(len(values))) == sorted(values)
    writer.close()


def test_what_was_acknowledged_is_there_after_the_next_start(reopen: Open) -> None:
    streams = reopen()
    writer = streams.writer()
    writer.append(Topic.REQUESTS, rows(20), timeout_s=PATIENCE_S)
    with Owner(streams) as owner:
        owner.take(20)
        positions = owner.positions
    writer.close()

    streams = reopen()
    writer = streams.writer()
    writer.append(Topic.REQUESTS, [("model-1", b"later")], timeout_s=PATIENCE_S)
    with Owner(streams) as owner:
        assert len(owner.take(21)) == 21
    with Owner(streams, positions) as owner:
        assert owner.take(1) == [b"later"]
        assert {partition.topic for partition in owner.begun} == {Topic.REQUESTS}
    writer.close()


def test_a_poll_gives_no_more_than_its_limit_and_nothing_when_there_is_nothing(streams: Streams) -> None:
    writer = streams.writer()
    with Owner(streams) as owner:
        assert owner.poll(timeout_s=0.0) == 0
        assert owner.poll(timeout_s=0.05) == 0
        writer.append(Topic.REQUESTS, rows(10), timeout_s=PATIENCE_S)
        give_up = deadline()
        counts = []
        while sum(counts) < 10 and not give_up():
            counts.append(owner.poll(limit=4))
        assert sum(counts) == 10
        assert max(counts) <= 4
        assert owner.poll(timeout_s=0.0) == 0
    writer.close()


def test_an_append_ends_a_wait(streams: Streams) -> None:
    writer = streams.writer()
    with Owner(streams) as owner:
        owner.poll()
        timer = threading.Timer(0.05, writer.append, (Topic.REQUESTS, [("a", b"1")], None, PATIENCE_S))
        timer.start()
        assert owner.poll(timeout_s=PATIENCE_S) == 1
        timer.join()
    writer.close()


def test_a_topic_that_is_paused_waits_and_loses_nothing(streams: Streams) -> None:
    writer = streams.writer()
    with Owner(streams, None, Topic.REQUESTS, Topic.HINTS) as owner:
        owner.poll()
        owner.reader.pause([Topic.REQUESTS])
        writer.append(Topic.REQUESTS, rows(30), timeout_s=PATIENCE_S)
        writer.append(Topic.HINTS, [("a", b"hint")], timeout_s=PATIENCE_S)
        assert owner.take(1) == [b"hint"]
        owner.reader.resume([Topic.REQUESTS])
        assert len(owner.take(31)) == 31
    writer.close()


def test_lag_is_what_was_not_polled(streams: Streams) -> None:
    writer = streams.writer()
    writer.append(Topic.REQUESTS, rows(40), timeout_s=PATIENCE_S)
    with Owner(streams) as owner:
        give_up = deadline()
        while not owner.poll(limit=7) and not give_up():
            pass
        assert sum(owner.reader.lag().values()) > 0
        owner.take(40)
        assert sum(owner.reader.lag().values()) == 0
        owner.reader.done(owner.positions)
    writer.close()


def test_the_last_mark_is_found_again(reopen: Open) -> None:
    streams = reopen()
    writer = streams.writer()
    assert streams.last_mark(Topic.REQUESTS) is None
    for number in range(5):
        writer.append(Topic.REQUESTS, rows(7), mark=f"log\t\u00e9:{number}", timeout_s=PATIENCE_S)
    writer.append(Topic.REQUESTS, rows(150), timeout_s=PATIENCE_S)
    writer.append(Topic.HINTS, [("a", b'{"mark":"not one"}')], timeout_s=PATIENCE_S)
    assert streams.last_mark(Topic.REQUESTS) == "log\t\u00e9:4"
    assert streams.last_mark(Topic.HINTS) is None
    writer.close()
    streams = reopen()
    assert streams.last_mark(Topic.REQUESTS) == "log\t\u00e9:4"
    with Owner(streams) as owner:
        assert sorted(owner.take(185)) == sorted(value for _, value in rows(7) * 5 + rows(150))


def test_appends_of_many_threads_are_all_there(streams: Streams) -> None:
    writer = streams.writer()

    def append(thread: int) -> None:
        for number in range(20):
            writer.append(Topic.REQUESTS, [(f"k{thread}", b"%d:%d" % (thread, number))], timeout_s=PATIENCE_S)

    threads = [threading.Thread(target=append, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Owner(streams) as owner:
        values = owner.take(160)
    assert sorted(values) == sorted(b"%d:%d" % pair for pair in itertools.product(range(8), range(20)))
    for thread_number in range(8):
        mine = [value for value in values if value.startswith(b"%d:" % thread_number)]
        assert mine == [b"%d:%d" % (thread_number, number) for number in range(20)]
    writer.close()


def test_nothing_is_appended_without_records(streams: Streams) -> None:
    writer = streams.writer()
    writer.append(Topic.REQUESTS, [], mark="none")
    assert streams.last_mark(Topic.REQUESTS) is None
    writer.close()


def test_a_name_that_is_shared_has_each_partition_once(reopen: Open, request: pytest.FixtureRequest) -> None:
    streams = reopen()
    if isinstance(streams, KafkaStreams) and not request.getfixturevalue("broker").members:
        pytest.skip("the stand-in can't hand partitions over: set KAFKA_HOME or PREFETCHER_TEST_KAFKA")
    writer = streams.writer()
    writer.append(Topic.REQUESTS, rows(60), timeout_s=PATIENCE_S)
    first = Owner(streams, shared=True)
    assert len(first.take(60)) == 60
    # Members poll at the same time, as programs do.
    with Owner(streams, first.positions, shared=True) as second, ThreadPoolExecutor() as threads:

        def poll_until(true: Callable[[], bool], *owners: Owner) -> None:
            give_up = deadline()
            while not true() and not give_up():
                list(threads.map(Owner.poll, owners))

        poll_until(lambda: len(second.begun) > 0 or len(first.begun) == 1, first, second)
        # One partition stays where it is; of several, some go over.
        assert (len(second.begun) > 0) == (len(first.begun) > 1)
        assert set(second.begun) == set(first.given_up)
        writer.append(Topic.REQUESTS, rows(60, keys=20), timeout_s=PATIENCE_S)
        poll_until(lambda: total(first) + total(second) >= 120, first, second)
        assert total(first) + total(second) == 120
        first.reader.close()
        # What one gave up, the other takes over from where their positions say.
        writer.append(Topic.REQUESTS, rows(60, keys=20), timeout_s=PATIENCE_S)
        poll_until(lambda: total(first) + total(second) >= 180, second)
        second.poll()
        assert total(first) + total(second) == 180
        assert set(second.begun) >= set(first.begun)
    writer.close()


def total(owner: Owner) -> int:
    return sum(map(len, owner.values.values()))


# What only the folder can show.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "streams"


def test_a_line_of_json_is_kept_as_it_is(folder: Path) -> None:
    streams = FileStreams(folder)
    streams.writer().append(Topic.REQUESTS, [("a", b'{"a":1}'), ("b", b'{"b":1}')], mark="m")
    streams.close()
    assert next((folder / "requests").glob("*.jsonl")).read_bytes() == b'{"a":1}\n!m "m"\t{"b":1}\n'


def test_a_folder_of_an_older_version_is_read(folder: Path) -> None:
    (folder / "requests").mkdir(parents=True)
    lines = [b'{"ts":1.0,"model":"a","mark":"log:1"}', b'{"ts":2.0,"model":"b"}']
    (folder / "requests" / f"{0:020d}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    streams = FileStreams(folder)
    assert streams.last_mark(Topic.REQUESTS) == "log:1"
    with Owner(streams) as owner:
        assert owner.take(2) == lines
    streams.close()


def test_a_torn_last_line_is_cut_off(folder: Path) -> None:
    streams = FileStreams(folder)
    streams.writer().append(Topic.REQUESTS, [("a", b"1"), ("a", b"2")])
    streams.close()
    with next((folder / "requests").glob("*.jsonl")).open("ab") as file:
        file.write(b'{"torn')
    streams = FileStreams(folder)
    streams.writer().append(Topic.REQUESTS, [("a", b"3")])
    with Owner(streams) as owner:
        assert owner.take(3) == [b"1", b"2", b"3"]
    streams.close()


def test_segments_go_when_every_reader_is_done_with_them(folder: Path) -> None:
    streams = FileStreams(folder, segment_bytes=100, keep_segments=1)
    writer = streams.writer()
    fast = Owner(streams)
    slow = streams.reader([Topic.REQUESTS], "slow", lambda _: {})
    for number in range(20):
        writer.append(Topic.REQUESTS, [("a", b"x" * 60 + b"%d" % number)])
    fast.take(20)
    fast.reader.done(fast.positions)
    assert len(list((folder / "requests").glob("*.jsonl"))) == 10
    slow.done({Partition(Topic.REQUESTS, 0): 500})
    left = sorted((folder / "requests").glob("*.jsonl"))
    assert len(left) == 10 - 3 + 0
    late = streams.reader([Topic.REQUESTS], "late", lambda _: {Partition(Topic.REQUESTS, 0): 5})
    chunk = late.poll(1, 0.0)[0]
    assert chunk.offsets == [int(left[0].stem)]
    assert chunk.lost > 0
    streams.close()


def test_a_topic_that_nobody_reads_does_not_fill_the_disk(folder: Path) -> None:
    streams = FileStreams(folder, segment_bytes=100, keep_segments=2)
    writer = streams.writer()
    for _ in range(30):
        writer.append(Topic.OUTCOMES, [("a", b"x" * 99)])
    assert len(list((folder / "outcomes").glob("*.jsonl"))) <= 4
    streams.close()


def test_one_process_has_the_folder(folder: Path) -> None:
    streams = FileStreams(folder)
    streams.prepare()
    with pytest.raises(UnavailableError, match="in use by another running prefetcher"):
        FileStreams(folder).prepare()
    streams.close()
    FileStreams(folder).prepare()


def test_a_place_that_cannot_hold_a_log(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="name another folder with --state-dir"):
        FileStreams(tmp_path / "file").prepare()


def test_a_position_of_another_folder_begins_with_the_oldest_record(folder: Path) -> None:
    streams = FileStreams(folder)
    streams.writer().append(Topic.REQUESTS, [("a", b"1")])
    reader = streams.reader([Topic.REQUESTS], "r", lambda _: {Partition(Topic.REQUESTS, 0): 5_000})
    assert [chunk.next_offset for chunk in reader.poll(10, 0.0)] == [0]
    assert [list(chunk.values) for chunk in reader.poll(10, 0.0)] == [[b"1"]]
    streams.close()


def test_streams_that_are_closed_say_so(folder: Path) -> None:
    streams = FileStreams(folder)
    writer = streams.writer()
    reader = streams.reader([Topic.REQUESTS], "r", lambda _: {})
    streams.close()
    with pytest.raises(UnavailableError, match="closed"):
        writer.append(Topic.REQUESTS, [("a", b"1")])
    with pytest.raises(UnavailableError, match="closed"):
        reader.poll(1, 0.0)


_FULL = """
import resource, signal, sys
from pathlib import Path
from prefetcher.errors import NoRoomError
from prefetcher.ports import Topic
from prefetcher_connectors.streams import FileStreams

streams = FileStreams(Path(sys.argv[1]))
writer = streams.writer()
writer.append(Topic.REQUESTS, [("a", b"first")])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    writer.append(Topic.REQUESTS, [("a", b"x" * 5000)])
except NoRoomError as exc:
    print(exc)
assert "can't be written" in writer.check()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert writer.check() == ""
writer.append(Topic.REQUESTS, [("a", b"last")])
streams.close()
"""


def test_a_full_disk_refuses_and_takes_again(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _FULL, str(folder)], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert "make room there" in done.stdout
    streams = FileStreams(folder)
    with Owner(streams) as owner:
        assert owner.take(2) == [b"first", b"last"]
    streams.close()


def test_a_segment_that_was_cut_by_others_is_passed_over_and_counted(folder: Path) -> None:
    streams = FileStreams(folder)
    writer = streams.writer()
    writer.append(Topic.REQUESTS, [("a", b"x" * 100)])
    next((folder / "requests").glob("*.jsonl")).write_bytes(b"")
    reader = streams.reader([Topic.REQUESTS], "r", lambda _: {})
    chunk = reader.poll(10, 0.0)[0]
    assert (chunk.next_offset, chunk.lost, list(chunk.values)) == (101, 1, [])
    streams.close()


def test_many_sizes_of_lines_and_limits(folder: Path) -> None:
    log = SegmentLog(folder, 200_000, 4)
    sent = [b"%d" % i * (1 + (i * 7919) % 30_000) for i in range(200)]
    for start in range(0, 200, 9):
        log.append(sent[start : start + 9])
    for limit in (1, 3, 1000):
        position, read = 0, []
        while position < log.end():
            lines = log.read(position, limit)
            assert len(lines.values) <= limit
            read += lines.values
            position = lines.next_position
        assert read == sent
    log.close()


_APPENDING = """
import sys
from pathlib import Path
from prefetcher.ports import Topic
from prefetcher_connectors.streams import FileStreams

writer = FileStreams(Path(sys.argv[1]), segment_bytes=2_000).writer()
number = 0
while True:
    writer.append(Topic.REQUESTS, [("a", b"%d" % i) for i in range(number, number + 3)], mark=str(number))
    number += 3
    print(number, flush=True)
"""


def test_a_process_that_is_killed_has_lost_nothing_that_it_acknowledged(folder: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", _APPENDING, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    acknowledged = 0
    while acknowledged < 2_000:
        acknowledged = int(process.stdout.readline())
    process.kill()
    acknowledged = max([acknowledged, *(int(line) for line in process.stdout.read().splitlines())])
    process.wait()
    process.stdout.close()
    streams = FileStreams(folder)
    with Owner(streams) as owner:
        values = owner.take(acknowledged)
    assert values == [b"%d" % i for i in range(len(values))]
    assert len(values) >= acknowledged
    assert int(streams.last_mark(Topic.REQUESTS) or "") >= acknowledged - 3
    streams.close()


def test_a_reader_keeps_up_with_appends_over_many_segments(folder: Path) -> None:
    streams = FileStreams(folder, segment_bytes=100, keep_segments=1)
    writer = streams.writer()
    threads = [threading.Thread(target=lambda: [writer.append(Topic.REQUESTS, [("a", b"x" * 30)]) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    with Owner(streams) as owner:
        give_up = deadline()
        while total(owner) < 800 and not give_up():
            owner.poll(limit=7)
            owner.reader.done(owner.positions)
        assert total(owner) == 800
    for thread in threads:
        thread.join()
    streams.close()

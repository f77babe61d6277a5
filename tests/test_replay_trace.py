"""Reading request logs: every format gives the same arrays, every problem is named, nothing ends in a traceback."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetcher.errors import InputError, PrefetcherError, SettingsError
from prefetcher.replay.trace import Trace, read_trace

SIZES = {"a": 10, "b": 20, "c": 30}


def read(path: Path, **options) -> Trace:
    options.setdefault("catalog", SIZES)
    return read_trace(path, **options)


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def records(rows: int = 300) -> list[dict[str, object]]:
    rng = np.random.default_rng(5)
    ts = np.round(1.7e9 + np.sort(rng.uniform(0, 1e5, rows)), 3)
    return [
        {
            "ts": float(t),
            "model": "abc"[i % 3],
            "count": 1 + i % 4,
            "user": f"u{i % 7}" if i % 5 else None,
            "node": f"n{i % 2}",
        }
        | {"version": "v2" if i % 11 == 0 else None, "request_id": f"r{i}"}
        for i, t in enumerate(ts.tolist())
    ]


def as_csv(rows: list[dict[str, object]], delimiter: str = ",") -> str:
    lines = [delimiter.join(rows[0])]
    lines += [delimiter.join("" if v is None else str(v) for v in row.values()) for row in rows]
    return "\n".join(lines) + "\n"


def as_jsonl(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def same(one: Trace, two: Trace) -> bool:
    columns = ("ts", "model", "bytes_", "user", "node", "version", "count")
    names = ("models", "users", "node_names", "version_names", "problems", "rows_read")
    return all(np.array_equal(getattr(one, c), getattr(two, c)) for c in columns) and all(getattr(one, n) == getattr(two, n) for n in names)


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(content)
    return sink.getvalue().to_pybytes()


def test_every_format_and_compression_gives_the_same_trace(tmp_path: Path) -> None:
    rows = records()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    first = read(tmp_path / "log.parquet")
    assert len(first) == 300
    assert first.models == ["a", "b", "c"]
    assert first.bytes_.tolist() == [10, 20, 30]
    assert first.ts.dtype == np.float64
    assert (first.model.dtype, first.user.dtype, first.node.dtype) == (np.int32, np.int32, np.int32)
    assert first.users == 7
    assert first.user[0] == -1
    assert first.version_names[first.version[0]] == "v2"
    assert not first.problems
    written = {
        "log.csv": as_csv(rows).encode(),
        "tab.csv": as_csv(rows, "\t").encode(),
        "bom.csv": b"\xef\xbb\xbf" + as_csv(rows).encode(),
        "crlf.csv": as_csv(rows).replace("\n", "\r\n").encode(),
        "log.jsonl": as_jsonl(rows).encode(),
        "no-end.jsonl": as_jsonl(rows).rstrip("\n").encode(),
        "list.json": json.dumps(rows, indent=1).encode(),
        # A type that changes within the file takes the slow path.
        "mixed.jsonl": as_jsonl([row | {"ts": str(row["ts"])} if i % 2 else row for i, row in enumerate(rows)]).encode(),
    }
    written |= {"a.gz": gzip.compress(written["log.csv"]), "b.bz2": bz2.compress(written["log.jsonl"])}
    written |= {"c.xz": lzma.compress(written["log.csv"]), "d.zst": zstd(written["log.jsonl"])}
    written |= {"e.parquet.gz": gzip.compress((tmp_path / "log.parquet").read_bytes())}
    for name, content in written.items():
        assert same(first, read(write(tmp_path / name, content))), name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1700000000", 1.7e9),
        ("1700000000.25", 1.7e9 + 0.25),
        ("1700000000250", 1.7e9 + 0.25),
        ("1700000000250000", 1.7e9 + 0.25),
        ("1700000000250000000", 1.7e9 + 0.25),
        ("1.7e9", 1.7e9),
        ("2023-11-14T22:13:20Z", 1.7e9),
        ("2023-11-14 22:13:20.250+00:00", 1.7e9 + 0.25),
        ("2023-11-14T23:13:20.250000+0100", 1.7e9 + 0.25),
        ("2023-11-14t22:13:20.25z", 1.7e9 + 0.25),
        ("2023-11-14T22:13:20", 1.7e9),
        ("2023-11-14 22:13:20.250", 1.7e9 + 0.25),
        ("20231114T221320Z", 1.7e9),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_times_are_told_apart_by_magnitude_and_shape(tmp_path: Path, text: str, expected: float, kind: str) -> None:
    value = text if text[4:5] == "-" or "T" in text else json.loads(text)
    content = f"ts,model\n{text},a\n" if kind == "csv" else json.dumps({"ts": value, "model": "a"})
    assert read(write(tmp_path / f"log.{kind}", content)).ts[0] == pytest.approx(expected, abs=1e-6)


def test_parquet_timestamps_keep_their_instant(tmp_path: Path) -> None:
    for unit, tz in (("s", None), ("ms", "UTC"), ("us", "Europe/Berlin"), ("ns", None)):
        scale = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
        column = pa.array([1700000000 * scale], pa.timestamp(unit, tz))
        pq.write_table(pa.table({"ts": column, "model": ["a"]}), tmp_path / "log.parquet")
        trace = read(tmp_path / "log.parquet")
        assert trace.ts[0] == 1.7e9
        assert trace.zoneless == (tz is None)


def test_times_without_a_zone_are_read_in_the_named_one_and_clock_changes_by_rule(tmp_path: Path) -> None:
    spring = write(tmp_path / "spring.csv", "ts,model\n2024-03-31T01:59:59,a\n2024-03-31T02:30:00,a\n2024-03-31T03:00:00,a\n")
    trace = read(spring, tz="Europe/Berlin")
    change = 1711846800.0  # 01:00 UTC, when 02:00 became 03:00
    assert trace.ts.tolist() == [change - 1, change, change]
    assert (trace.problems.counts, trace.zoneless) == ({"skipped_ts": 1}, 3)
    assert read(spring).ts[0] == 1711850399.0
    autumn = read(write(tmp_path / "autumn.csv", "ts,model\n2024-10-27T02:30:00,a\n2024-10-27T03:00:00Z,a\n"), tz="Europe/Berlin")
    assert autumn.ts.tolist() == [1729989000.0, 1729998000.0]
    assert (autumn.problems.counts, autumn.zoneless) == ({"ambiguous_ts": 1}, 1)


def test_rows_that_a_long_silence_parts_from_most_others_are_named_and_left_out(tmp_path: Path) -> None:
    day = 86_400
    times = [1_000_000_000, 1_700_000_000, 1_700_000_000 + 30 * day, 1_700_000_000 + 30 * day + 1, 1_700_000_000 + 61 * day]
    text = "ts,model\n" + "".join(f"{t},{model}\n" for t, model in zip(times, "cabac", strict=True))
    trace = read(write(tmp_path / "log.csv", text), catalog=None, default_bytes=1)
    assert trace.ts.tolist() == times[1:4]
    assert trace.models == ["a", "b"]
    assert trace.problems.counts == {"apart": 2}
    (said,) = trace.problems.lines()
    assert "line 2: 8,102 days before the others; line 6: 31 days after the others" in said
    with pytest.raises(InputError, match=r"log\.csv:2: 2 problems under --strict"):
        read(tmp_path / "log.csv", strict=True)
    # Of stretches of the same length the newest is replayed.
    equal = read(write(tmp_path / "equal.csv", f"ts,model\n{times[0]},a\n{times[1]},a\n"))
    assert equal.ts.tolist() == [times[1]]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_that_is_there_twice_is_refused_when_it_is_read(tmp_path: Path, kind: str) -> None:
    def log(names: list[str]) -> Path:
        path = tmp_path / f"log.{kind}"
        values = ["1700000000", "a", "b"]
        if kind == "csv":
            return write(path, f"{','.join(names)}\n{','.join(values)}\n")
        pq.write_table(pa.Table.from_arrays([pa.array([v]) for v in values], names), path)
        return path

    with pytest.raises(InputError, match="has the column 'model' 2 times"):
        read(log(["ts", "model", "model"]))
    assert len(read(log(["ts", "model", "other"]))) == 1
    if kind == "csv":
        assert len(read(write(tmp_path / "more.csv", "ts,model,x,x\n1700000000,a,1,2\n"))) == 1


def test_messages_cut_what_others_named(tmp_path: Path) -> None:
    log = write(tmp_path / "log.csv", f"ts,model\n1700000000,{'x' * 100_000}\n")
    with pytest.raises(InputError, match=r"x… \(100,000 characters\)") as caught:
        read(log)
    assert len(str(caught.value)) < 500
    assert len(read(log, default_bytes=1).problems.lines()[0]) < 300
    with pytest.raises(SettingsError, match="no time zone is called 'Mars/Olympus'"):
        read(log, tz="Mars/Olympus")


BAD_CSV = """ts,model,count,request_id
100,a,1,x1
garbage
101,,1,x2
yesterday,a,1,x3
103,b,1.5,x4
99,b,1,x5
104,c,2,x4
,c,2,x6
105,c,,
106,c,1,
106,c,1,
"""


def test_problems_are_counted_and_named_with_their_lines(tmp_path: Path) -> None:
    trace = read(write(tmp_path / "log.csv", BAD_CSV))
    expected = {"malformed": 1, "bad_ts": 2, "missing_model": 1, "bad_count": 1, "duplicate": 1, "late": 1}
    assert trace.problems.counts == expected
    lines = {kind: [p.line for p in trace.problems.named if p.kind == kind] for kind in expected}
    assert lines == {
        "malformed": [3],
        "bad_ts": [5, 9],
        "missing_model": [4],
        "bad_count": [6],
        "duplicate": [8],
        "late": [7],
    }
    # Sorted, ties in file order; identical rows without an id stay two requests.
    assert trace.ts.tolist() == [99, 100, 103, 105, 106, 106]
    assert trace.rows_read == 11
    assert "line 3: has 1 of 4 columns" in " ".join(trace.problems.lines())
    with pytest.raises(InputError, match=r"log\.csv:3: 7 problems under --strict"):
        read(tmp_path / "log.csv", strict=True)


def test_the_same_problems_in_json_lines(tmp_path: Path) -> None:
    lines = [
        "{garbage" if row["model"] is None else json.dumps({k: v for k, v in row.items() if v})
        for row in csv.DictReader(BAD_CSV.splitlines())
    ]
    json_trace = read(write(tmp_path / "log.jsonl", "\n".join(lines)))
    csv_trace = read(write(tmp_path / "log.csv", BAD_CSV))
    assert json_trace.problems.counts == csv_trace.problems.counts
    assert json_trace.ts.tolist() == csv_trace.ts.tolist()
    assert [p.line + 1 for p in json_trace.problems.named] == [p.line for p in csv_trace.problems.named]


def test_a_stray_quote_costs_its_own_line_only(tmp_path: Path) -> None:
    rows = "".join(f"{i},a,u{i}\n" for i in range(5000))
    trace = read(write(tmp_path / "log.csv", "ts,model,user\n" + rows + '5000,"a,u\n' + rows.replace(",a,", ",b,")))
    assert trace.problems.counts["malformed"] == 1
    assert trace.problems.named[0].line == 5002
    assert len(trace) == 10000


def test_quoted_fields_may_hold_line_breaks(tmp_path: Path) -> None:
    text = 'ts,note,model\n1,"two\nlines, ""quoted""",a\n2,plain,b\n'
    trace = read(write(tmp_path / "log.csv", text))
    assert trace.model.tolist() == [0, 1]
    assert not trace.problems


def test_blocks_give_the_same_rows_and_lines_as_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = records()
    bad = as_csv(rows).splitlines()
    bad[200] = "nonsense"
    log = write(tmp_path / "log.csv", "\n".join(bad) + "\n")
    bad_json = as_jsonl(rows).splitlines()
    bad_json[200] = "nonsense"
    json_log = write(tmp_path / "log.jsonl", "\n".join(bad_json))
    whole = [read(log), read(json_log)]
    monkeypatch.setattr("prefetcher.replay.formats._BLOCK_BYTES", 700)
    assert same(whole[0], read(log))
    assert same(whole[1], read(json_log))
    assert [w.problems.named[0].line for w in whole] == [201, 201]


def test_nested_records_by_dotted_paths(tmp_path: Path) -> None:
    rows = [{"startTime": 100 + i, "request": {"model": "abc"[i % 3], "x": [1]}, "meta": {"who": {"id": f"u{i}"}}} for i in range(9)]
    log = write(tmp_path / "log.jsonl", as_jsonl(rows))
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "log.parquet")
    options = {"field_map": "ts=startTime,model=request.model,user=meta.who.id"}
    assert same(read(log, **options), read(tmp_path / "log.parquet", **options))
    assert read(log, **options).users == 9


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n \n", "only white space"),
        (b"ts,model\n", "has no usable row"),
        (b"time,model\n1,a\n", "has no column ts; it has time, model; name the right one with --map ts=COLUMN"),
        (b"ts,name\n1,a\n", "has no column model"),
        (b'{"time": 1, "model": "a"}\n', "has no column ts; it has time, model"),
        (b'{"event": {"time": 1}, "request": {"model": "a"}, "labels": {}}\n', "it has event.time, request.model, labels; name"),
        (b"\x7fELF\x00\x00\x00", "binary file"),
        (b"PAR1 and then nothing", "is not readable parquet"),
        ("ts,model\n".encode("utf-16"), "UTF-16"),
        (b"[{]", "neither a JSON list nor JSON lines"),
        (gzip.compress(as_csv(records()).encode())[:-200], "damaged or ends early"),
        (lzma.compress(as_csv(records()).encode())[:-200], "damaged or ends early"),
        (bz2.compress(as_csv(records()).encode())[:-200], "damaged or ends early"),
        (zstd(as_csv(records()).encode())[:-200], "cannot be read|damaged"),
        (
            b"ts,model\n1,nobody\n",
            "1 of its 1 models have no size: nobody; add them to the catalog or give --default-bytes",
        ),
    ],
)
def test_what_is_no_log_is_one_input_error(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(write(tmp_path / "log", content))


def test_folders_and_missing_files_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        read(tmp_path)
    with pytest.raises(InputError, match="No such file"):
        read(tmp_path / "nothing.csv")


def test_sizes_by_default_are_counted_and_none_at_all_is_refused(tmp_path: Path) -> None:
    log = write(tmp_path / "log.csv", "ts,model\n1,z\n2,a\n")
    trace = read(log, default_bytes=7)
    assert trace.models == ["a", "b", "c", "z"]
    assert trace.bytes_.tolist() == [10, 20, 30, 7]
    assert trace.problems.counts == {"unknown_model": 1}
    alone = read(log, catalog=None, default_bytes=7)
    assert alone.models == ["a", "z"]
    assert not alone.problems
    with pytest.raises(SettingsError, match="how large are the models"):
        read(log, catalog=None)


def test_progress_ends_at_the_whole_file(tmp_path: Path) -> None:
    log = write(tmp_path / "log.csv", as_csv(records()))
    calls: list[tuple[int, int]] = []
    read(log, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (log.stat().st_size,) * 2


@settings(max_examples=150, deadline=None)
@given(
    content=st.binary(max_size=300) | st.text(max_size=200).map(str.encode),
    prefix=st.sampled_from([b"", b"ts,model\n", b'{"ts":1,"model":"a"}\n']),
)
def test_any_bytes_end_in_a_trace_or_a_typed_error(tmp_path_factory: pytest.TempPathFactory, content: bytes, prefix: bytes) -> None:
    log = tmp_path_factory.getbasetemp() / "any"
    log.write_bytes(prefix + content)
    try:
        trace = read(log, default_bytes=1)
    except PrefetcherError as error:
        message = str(error)
        trace = None
    if trace is None:
        assert message
    else:
        assert np.all(np.diff(trace.ts) >= 0)
        assert trace.model.min() >= 0


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.floats(0, 1e10, allow_nan=False) | st.just("x") | st.none(),
            st.sampled_from(["a", "b", "", "ü", 'q"uote', "com,ma"]),
            st.sampled_from(["r1", "r2", "", None]),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_csv_and_json_agree_on_any_rows(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[object, str, str | None]]) -> None:
    base = tmp_path_factory.getbasetemp()
    with open(base / "any.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["ts", "model", "request_id"])
        writer.writerows([["" if v is None else repr(v) if isinstance(v, float) else v for v in row] for row in rows])
    (base / "any.jsonl").write_text(as_jsonl([dict(zip(("ts", "model", "request_id"), row, strict=True)) for row in rows]))
    traces = []
    for name in ("any.csv", "any.jsonl"):
        try:
            traces.append(read(base / name, default_bytes=1))
        except InputError:
            traces.append(None)
    if None in traces:
        assert traces == [None, None]
        return
    assert traces[0].ts.tolist() == traces[1].ts.tolist()
    assert traces[0].model.tolist() == traces[1].model.tolist()
    assert traces[0].problems.counts == traces[1].problems.counts

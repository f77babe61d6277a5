"""Rows of many partitions as one log: in event time, none lost, none twice, whatever comes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefetcher.controller import merge
from prefetcher.core.types import ModelName, RequestSeen
from prefetcher.ports import Partition, Topic


def part(n: int) -> Partition:
    return Partition(Topic.REQUESTS, n)


def row(ts: float) -> RequestSeen:
    return RequestSeen(ts, ModelName("m"))


def test_a_partition_that_is_behind_holds_the_others_back() -> None:
    rows = merge.RowMerge()
    rows.add(part(0), [(1, row(1.0)), (2, row(5.0))], 2)
    assert rows.take(10, [part(1)]) == ([], {})
    rows.add(part(1), [(1, row(3.0))], 1)
    out, positions = rows.take(10, [part(1)])
    assert [r.ts for r in out] == [1.0, 3.0]
    assert positions == {part(0): 1, part(1): 1}
    out, positions = rows.take(10, [])
    assert [r.ts for r in out] == [5.0]
    assert positions[part(0)] == 2
    assert rows.rows == 0


def test_records_that_were_no_rows_are_passed_too() -> None:
    rows = merge.RowMerge()
    rows.add(part(0), [], 7)
    assert rows.take(10, []) == ([], {part(0): 7})


def test_it_does_not_wait_for_ever() -> None:
    rows = merge.RowMerge()
    rows.add(part(0), [(i + 1, row(float(i))) for i in range(merge.MOST_HELD + 1)], merge.MOST_HELD + 1)
    assert len(rows.take(5, [part(1)])[0]) == 5


@given(
    st.lists(st.lists(st.floats(0, 100), max_size=20), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(1, 7)), max_size=60),
)
def test_every_row_comes_out_once_and_in_order(logs: list[list[float]], steps: list[tuple[int, int, int]]) -> None:
    """However the partitions are read: sorted logs come out sorted, positions never pass a row that is still held."""
    logs = [sorted(log) for log in logs]
    rows, at = merge.RowMerge(), [0] * len(logs)
    out: list[float] = []
    positions: dict[Partition, int] = {}

    def behind() -> list[Partition]:
        return [part(p) for p, log in enumerate(logs) if at[p] < len(log)]

    def take(limit: int) -> None:
        got, new = rows.take(limit, behind())
        out.extend(r.ts for r in got)
        positions.update(new)

    for p, count, limit in [*steps, *((p, 20, 200) for p in range(4) for _ in range(2))]:
        if p < len(logs):
            piece = logs[p][at[p] : at[p] + count]
            rows.add(part(p), [(at[p] + i + 1, row(ts)) for i, ts in enumerate(piece)], at[p] + len(piece))
            at[p] += len(piece)
        take(limit)
        covered = sum(positions.values())
        assert covered == len(out)
    take(1000)
    assert out == sorted(ts for log in logs for ts in log)
    assert positions == {part(p): len(log) for p, log in enumerate(logs)}

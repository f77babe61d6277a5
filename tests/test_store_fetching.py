"""Models that are fetched from a store, an object store or a folder: whole or not at all, resumed, bounded, gone when room is needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from object_store_kit import ObjectStore
from obstore.store import from_url
from safetensors.numpy import load_file
from store_kit import MODEL_BYTES, FetchingNode, Gate, fetching, model_folder, publish
from waiting import eventually

import prefetcher
from prefetcher.agent.fetch import Fetch, FetchPausedError
from prefetcher.agent.fetching import StoreOptions
from prefetcher.agent.files import BLOCK_BYTES
from prefetcher.agent.loader import LoadControl
from prefetcher.agent.manifest import write_manifests
from prefetcher.agent.store_catalog import StoreCatalog
from prefetcher.clock import VirtualClock
from prefetcher.config import Settings
from prefetcher.core.facts import Stage
from prefetcher.core.types import ModelName, Tier
from prefetcher.doctor.store import check_store
from prefetcher.errors import (
    ChangedError,
    IntegrityError,
    ModelNotFoundError,
    NoRoomError,
    PrefetcherError,
    RateLimitedError,
    UnavailableError,
    UsageError,
)
from prefetcher.ports import StoredObject
from prefetcher_connectors.memory import MemoryState
from prefetcher_connectors.weights_store import FolderWeights, StoreWeights, weights_store_at

OPTIONS = StoreOptions(look_s=0.2)


@pytest.fixture(params=["folder", "object store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        (tmp_path / "store").mkdir()
        return str(tmp_path / "store")
    return str(request.getfixturevalue("bucket"))


@pytest.fixture
def gate(object_store: ObjectStore, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A server before the object store, which clients are led to; what was put into `bucket` before is there."""
    made = Gate(object_store.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
    yield made
    made.close()


def overwrite(place: str, path: str, content: bytes) -> None:
    store = weights_store_at(place)
    store.write(path, iter([content]))
    store.close()


def read(place: str, path: str) -> bytes:
    store = weights_store_at(place)
    content = store.read(path, 1 << 30)
    store.close()
    return content


def test_a_model_comes_from_the_store_when_it_is_asked_for(place: str, tmp_path: Path) -> None:
    source = model_folder(tmp_path / "src", "a", 7, shards=2)
    model_folder(tmp_path / "src", "b", 8)
    publish(tmp_path / "src", place)
    with fetching(tmp_path / "node", place) as node:
        assert eventually(node.tiers) == {"a": "remote", "b": "remote"}
        assert node.visible() == set()
        with prefetcher.open("a", framework="numpy", socket_path=node.socket, timeout_s=60.0) as tensors:
            for shard in range(2):
                expected = load_file(source / f"part-{shard}.safetensors")[f"w{shard}"]
                assert np.array_equal(tensors[f"w{shard}"], expected)
        assert eventually(lambda: node.tiers()["a"] == "host")
        # An engine that was started with the model's name finds it there too.
        assert np.array_equal(load_file(node.models_dir / "a" / "part-1.safetensors")["w1"], expected)
        assert node.visible() == {"a"}
        assert node.counted("prefetcher_fetches_total", cause="demand", result="ready") == 1
        stages = {stage for totals in node.agent._book.ledger.totals().values() for stage in totals.stage_s}
        assert stages == {Stage.FETCH.value, Stage.READ.value}
        assert node.agent.act("load", "b").ok
        assert eventually(lambda: node.tiers()["b"] == "host")
        assert node.counted("prefetcher_fetched_bytes_total", cause="manual") > 0
        assert node.agent._machine.check() == []
        # Memory given back, it is opened from disk, without the store.
        assert node.agent.act("evict", "b").ok
        assert eventually(lambda: node.tiers()["b"] == "disk")


def test_a_restarted_node_has_what_it_fetched_also_while_the_store_is_away(tmp_path: Path) -> None:
    model_folder(tmp_path / "src", "a", 7)
    model_folder(tmp_path / "src", "b", 8)
    publish(tmp_path / "src", str(tmp_path / "store"))
    state = MemoryState()
    node = FetchingNode(tmp_path / "node", str(tmp_path / "store"), state=state)
    try:
        assert node.opens("a") == 7
    finally:
        node.close()
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with fetching(tmp_path / "node", str(tmp_path / "store"), state=state, store=StoreOptions(look_s=0.2, deadline_s=0.5)) as node:
        assert eventually(lambda: node.tiers() == {"a": "disk", "b": "remote"})
        assert node.opens("a") == 7
        assert any("is not there" in problem for problem in eventually(node.report).problems)
        waiting = threading.Thread(target=node.opens, args=("b", 60.0))
        waiting.start()
        assert eventually(lambda: node.counted("prefetcher_fetches_total", cause="demand", result="failed"))
        assert eventually(lambda: getattr(node.known("b"), "absent", "") == "store_away")
        (tmp_path / "elsewhere").rename(tmp_path / "store")
        waiting.join()
        assert eventually(lambda: node.tiers()["b"] == "host")


KILLED = """
import sys, pathlib
sys.path.insert(0, sys.argv[1])
from store_kit import FetchingNode
node = FetchingNode(pathlib.Path(sys.argv[2]), sys.argv[3])
node.agent.act("load", "big")
sys.stdin.read()
"""


def test_a_killed_fetch_goes_on_where_it_was(bucket: str, gate: Gate, tmp_path: Path) -> None:
    source = model_folder(tmp_path / "src", "big", 3, megabytes=40)
    publish(tmp_path / "src", bucket)
    ranges: list[str] = []
    let_through = threading.Event()

    def answers(path: str, headers: Any) -> None:
        if headers["Range"] is not None:
            assert headers["If-Match"]
            ranges.append(headers["Range"])
            if not headers["Range"].startswith(("bytes=0-", f"bytes={BLOCK_BYTES}-")):
                let_through.wait(60.0)

    gate.answers = answers
    here = str(Path(__file__).parent)
    killed = subprocess.Popen(
        [sys.executable, "-c", KILLED, here, str(tmp_path / "node"), bucket], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        part = tmp_path / "node" / "models" / ".prefetcher" / "big"
        whole = (source / "part-0.safetensors").read_bytes()

        def there() -> int:
            for written in part.glob(".part-*/part-0.safetensors"):
                with written.open("rb") as file:
                    return sum(file.read(BLOCK_BYTES) == whole[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] for i in range(2))
            assert killed.poll() is None
            return 0

        assert eventually(lambda: there() == 2)
        assert {path.name for path in (tmp_path / "node" / "models").iterdir()} == {".prefetcher"}
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert killed.stdin is not None
        killed.stdin.close()
    let_through.set()
    asked = len(ranges)
    with fetching(tmp_path / "node", bucket) as node:
        assert node.opens("big", 60.0) == 3
        assert np.array_equal(
            load_file(node.models_dir / "big" / "part-0.safetensors")["w0"], load_file(source / "part-0.safetensors")["w0"]
        )
    # Of three blocks two were there, and were not asked for again.
    assert len(ranges) == asked + 1
    assert ranges[-1] == f"bytes={2 * BLOCK_BYTES}-{len(whole) - 1}"


def test_corrupt_and_truncated_objects_are_seen_by_nobody(place: str, tmp_path: Path) -> None:
    for model in ("bad", "good", "short"):
        model_folder(tmp_path / "src", model, 5)
    publish(tmp_path / "src", place)
    store = weights_store_at(place)
    paths = {found.path.split("/")[0]: found.path for found in store.objects() if found.path.endswith("part-0.safetensors")}
    store.close()
    bad, short = paths["bad"], paths["short"]
    whole = read(place, bad)
    overwrite(place, bad, whole[:-1] + b"x")
    overwrite(place, short, read(place, short)[:-1])
    with fetching(tmp_path / "node", place) as node:
        with pytest.raises(IntegrityError, match="publish it again"):
            node.opens("short")
        with pytest.raises(IntegrityError, match="differs from its manifest in bytes"):
            node.opens("bad")
        assert eventually(lambda: node.agent._sources.refused("bad") is not None)
        with pytest.raises(IntegrityError, match=r"quarantined: .* differs from its manifest in bytes"):
            node.opens("bad")
        assert node.opens("good") == 5
        assert node.visible() == {"good"}
        assert not list((node.models_dir / ".prefetcher").glob("bad/*"))
        named = {"bad", "short"}
        eventually(lambda: {problem.split("/")[0].split(":")[0] for problem in eventually(node.report).problems} >= named)
        # A restart does not fetch it again either; replaced, it is a model again.
        fetches = node.counted("prefetcher_fetches_total", cause="demand", result="failed")
        assert fetches == 1
        overwrite(place, bad, whole)
        assert eventually(lambda: node.opens("bad")) == 5
    assert StoreCatalog(weights_store_at(place), tmp_path / "node").look().models.keys() == {"bad", "good"}


def test_the_store_may_ask_to_wait(bucket: str, gate: Gate, tmp_path: Path) -> None:
    model_folder(tmp_path / "src", "a", 1)
    model_folder(tmp_path / "src", "b", 2)
    publish(tmp_path / "src", bucket)
    busy: list[tuple[int, list[tuple[str, str]]]] = [(429, [("Retry-After", "1")]), (503, []), (500, [])]

    def answers(path: str, headers: Any) -> tuple[int, list[tuple[str, str]]] | None:
        return None if headers["Range"] is None or not busy else busy.pop(0) if len(busy) > 1 or not stays else busy[0]

    stays = False
    gate.answers = answers
    with fetching(tmp_path / "node", bucket) as node:
        assert node.opens("a") == 1
        assert node.counted("prefetcher_store_waits_total", reason="busy") == 2
        assert node.counted("prefetcher_store_waits_total", reason="away") == 1
        assert busy == []
        # Longer than a fetch may go on without a byte: it fails at once, and is not tried before.
        busy, stays = [(429, [("Retry-After", "300")])], True
        asked = len(gate.asked)
        assert node.agent.act("pin", "b").ok
        assert eventually(lambda: getattr(node.known("b"), "absent", "") == "store_busy")
        weights = node.agent._machine.holdings.resolve(ModelName("b"))
        assert weights is not None
        assert weights.retry_at_s > node.clock.now_s() + 250.0
        assert len([path for path in gate.asked[asked:] if path.endswith("part-0.safetensors")]) == 1
        assert node.visible() == {"a"}


def test_what_a_store_answers_is_told_apart(bucket: str, gate: Gate, tmp_path: Path) -> None:
    model_folder(tmp_path / "src", "a", 1)
    publish(tmp_path / "src", bucket)
    store = weights_store_at(bucket)
    found = next(each for each in store.objects() if each.path.endswith("part-0.safetensors"))
    into = memoryview(bytearray(1000))
    said: list[tuple[int, list[tuple[str, str]]]] = []
    gate.answers = lambda path, headers: said[0] if said and headers["Range"] is not None else None

    def answer(status: int, *headers: tuple[str, str]) -> PrefetcherError:
        said[:] = [(status, list(headers))]
        with pytest.raises(PrefetcherError) as raised:
            store.read_range(found, 0, into, lambda: True)
        assert "Signature" not in str(raised.value)
        assert raised.value.__cause__ is None
        return raised.value

    busy = answer(429, ("Retry-After", "7"))
    assert isinstance(busy, RateLimitedError)
    assert busy.retry_after_s == 7.0
    dated = answer(503, ("Retry-After", "Wed, 21 Oct 2099 07:28:00 GMT"))
    assert isinstance(dated, RateLimitedError)
    assert dated.retry_after_s > 1e9
    assert isinstance(answer(503, ("Retry-After", "soon")), RateLimitedError)
    assert isinstance(answer(412), ChangedError)
    assert isinstance(answer(403), UsageError)
    assert isinstance(answer(500), UnavailableError)
    said.clear()
    assert store.read_range(found, found.bytes - 10, into, lambda: True) == 10
    assert store.read_range(found, 0, into, lambda: True) == 1000
    with pytest.raises(ChangedError):
        store.read_range(found._replace(tag='"0123"'), 0, into, lambda: True)
    # What can sign nothing reads all the same.
    assert isinstance(store, StoreWeights)
    again = memoryview(bytearray(1000))
    store._signs = False
    assert store.read_range(found, 0, again, lambda: True) == 1000
    assert again == into
    with pytest.raises(ChangedError):
        store.read_range(found._replace(tag='"0123"'), 0, into, lambda: True)
    store.close()


class Moody(FolderWeights):
    """A folder that says no as often as it is told to."""

    def __init__(self, folder: Path, *errors: PrefetcherError) -> None:
        super().__init__(folder)
        self.errors, self.reads = list(errors), 0

    def read_range(self, found: StoredObject, start: int, into: memoryview, go_on: Any) -> int:
        self.reads += 1
        if self.errors:
            raise self.errors.pop(0)
        return super().read_range(found, start, into, go_on)


def _fetch(tmp_path: Path, store: Moody, clock: VirtualClock, control: LoadControl | None = None, **more: Any) -> Fetch:
    manifest, objects = StoreCatalog(store, tmp_path / "notes").plan(next(iter(_look(tmp_path, store).models.values())).key)
    (tmp_path / "part").mkdir(exist_ok=True)
    return Fetch(manifest, objects, store, tmp_path / "part", control or LoadControl(), clock, streams=1, **more)


def _look(tmp_path: Path, store: Moody) -> Any:
    return StoreCatalog(store, tmp_path / "notes").look()


def test_waits_are_as_long_as_the_store_says_and_double_else(tmp_path: Path) -> None:
    model_folder(tmp_path / "src", "a", 1)
    publish(tmp_path / "src", str(tmp_path / "store"))
    clock = VirtualClock()
    store = Moody(tmp_path / "store", RateLimitedError("busy", retry_after_s=7.0), *[UnavailableError("away", retry_after_s=0.0)] * 4)
    assert _fetch(tmp_path, store, clock).run().failures == 5
    # 7 s, then 0.5 + 1 + 2 + 4 s with jitter down to half of that.
    assert 7.0 + 3.75 <= clock.now_s() <= 7.0 + 7.75
    store.errors = [UnavailableError("away", retry_after_s=0.0)] * 100
    (tmp_path / "part" / "part-0.safetensors").unlink()
    start_s = clock.now_s()
    with pytest.raises(UnavailableError, match="gave nothing for"):
        _fetch(tmp_path, store, clock, deadline_s=30.0).run()
    assert clock.now_s() - start_s <= 30.0
    store.errors = [RateLimitedError("busy", retry_after_s=31.0)]
    with pytest.raises(RateLimitedError) as raised:
        _fetch(tmp_path, store, clock, deadline_s=30.0).run()
    assert raised.value.retry_after_s == 31.0


def test_a_cap_and_a_pause_hold_and_a_part_is_checked(tmp_path: Path) -> None:
    model_folder(tmp_path / "src", "a", 1, megabytes=36)
    publish(tmp_path / "src", str(tmp_path / "store"))
    clock, control = VirtualClock(), LoadControl(4e6)
    store = Moody(tmp_path / "store")
    verified: set[tuple[int, int]] = set()
    fetch = _fetch(tmp_path, store, clock, control, verified=verified, on_progress=lambda done: control.pause())
    with pytest.raises(FetchPausedError):
        fetch.run()
    assert store.reads == 1
    # Known to this process: not even read again.
    control.resume()
    _fetch(tmp_path, store, clock, control, verified=verified).run()
    assert store.reads == 3
    # Two blocks of 16 MiB had to wait for those before them, at 4 MB/s; the pause made no burst.
    assert clock.now_s() == pytest.approx(1 * BLOCK_BYTES / 4e6, abs=0.1)
    written = tmp_path / "part" / "part-0.safetensors"
    with written.open("r+b") as file:
        file.seek(BLOCK_BYTES + 5)
        file.write(b"????")
    result = _fetch(tmp_path, store, clock).run()
    assert store.reads == 4
    assert result.fetched_bytes == BLOCK_BYTES
    assert result.kept_bytes > 0
    assert written.read_bytes() == (tmp_path / "src" / "a" / "part-0.safetensors").read_bytes()


def test_nodes_share_the_store(bucket: str, gate: Gate, tmp_path: Path) -> None:
    for model in "ab":
        model_folder(tmp_path / "src", model, 1)
    publish(tmp_path / "src", bucket)
    state, held, asked = MemoryState(), threading.Event(), []
    one = StoreOptions(pulls_per_model=1, pulls=2, look_s=0.2)

    def answers(path: str, headers: Any) -> None:
        if headers["Range"] is not None:
            asked.append(path)
            held.wait(60.0)

    gate.answers = answers
    nodes = [FetchingNode(tmp_path / f"n{i}", bucket, name=f"n{i}", state=state, store=one) for i in range(3)]
    try:
        opened = [threading.Thread(target=node.opens, args=("a", 60.0)) for node in nodes[:2]]
        for thread in opened:
            thread.start()
        waits = eventually(lambda: [n for n in nodes[:2] if getattr(n.known("a"), "absent", "") == "model_slot"])
        assert eventually(lambda: len(asked) == 1)
        assert len(waits) == 1
        # The other slot of the two is for another model, which then takes the link of the node that waits.
        opened += [threading.Thread(target=node.opens, args=("b", 60.0)) for node in (waits[0], nodes[2])]
        opened[2].start()
        assert eventually(lambda: len(asked) == 2)
        opened[3].start()
        assert eventually(lambda: getattr(nodes[2].known("b"), "absent", "") in ("model_slot", "cluster_slot"))
        assert len(asked) == 2
        held.set()
        for thread in opened:
            thread.join()
        assert len(asked) == 4
        # Nothing is left of it.
        assert eventually(lambda: not [key for key in state._values if "{pull/" in key])
    finally:
        held.set()
        for node in nodes:
            node.close()


def test_room_on_disk_is_made_of_what_was_fetched_alone(tmp_path: Path) -> None:
    for model in "abc":
        model_folder(tmp_path / "src", model, ord(model))
    model_folder(tmp_path / "src", "huge", 9, megabytes=3)
    publish(tmp_path / "src", str(tmp_path / "store"))
    model_folder(tmp_path / "node" / "models", "mine", 1)
    write_manifests(tmp_path / "node" / "models")
    room = StoreOptions(disk_bytes=2 * MODEL_BYTES + 500_000, look_s=0.2)
    # Without memory for any of them, all are opened from disk.
    with fetching(tmp_path / "node", str(tmp_path / "store"), store=room, host_bytes=500_000) as node:
        assert node.opens("mine") == 1
        assert node.opens("a") == ord("a")
        assert node.visible() == {"mine", "a"}
        assert node.opens("b") == ord("b")
        assert node.visible() == {"mine", "b"}
        with pytest.raises(NoRoomError, match=r"huge \(3.0 MB\) is larger than what .* PREFETCHER_STORE__DISK_BYTES"):
            node.opens("huge")
        assert eventually(lambda: getattr(node.known("huge"), "absent", "") in ("too_large", "does_not_fit"))
        with prefetcher.open("b", framework="numpy", socket_path=node.socket) as tensors:
            waiting = threading.Thread(target=node.opens, args=("c", 60.0))
            waiting.start()
            assert eventually(lambda: node.agent._machine.holdings.resolve(ModelName("c")).demanded)  # type: ignore[union-attr]
            eventually(lambda: node.report() is not None)
            assert tensors["w0"][0] == ord("b")
            assert node.visible() == {"mine", "b"}
        waiting.join()
        assert node.visible() == {"mine", "c"}
        assert node.agent._machine.check() == []
        # A person brings what was fetched: it is theirs from now on.
        (node.models_dir / "c").unlink()
        model_folder(node.models_dir, "c", 77)
        write_manifests(node.models_dir)
        assert eventually(lambda: node.opens("c") == 77)
        with pytest.raises(NoRoomError, match="beside models that stay"):
            node.opens("a")
        assert node.visible() == {"mine", "c"}
        assert not (node.models_dir / "c").is_symlink()


def test_a_disk_that_is_too_full_is_a_reason(tmp_path: Path) -> None:
    model_folder(tmp_path / "src", "a", 1)
    publish(tmp_path / "src", str(tmp_path / "store"))
    with fetching(tmp_path / "node", str(tmp_path / "store"), store=StoreOptions(reserve_bytes=1 << 60, look_s=0.2)) as node:
        with pytest.raises(NoRoomError, match="PREFETCHER_STORE__DISK_RESERVE_BYTES"):
            node.opens("a")
        assert node.visible() == set()
        assert not list((node.models_dir / ".prefetcher").glob("a/*"))


def test_a_new_version_in_the_store_takes_over(tmp_path: Path) -> None:
    model_folder(tmp_path / "src", "a", 1)
    model_folder(tmp_path / "src", "far", 1)
    publish(tmp_path / "src", str(tmp_path / "store"))
    with fetching(tmp_path / "node", str(tmp_path / "store")) as node:
        assert node.opens("a") == 1
        before = os.readlink(node.models_dir / "a")
        model_folder(tmp_path / "src", "a", 2)
        model_folder(tmp_path / "src", "far", 2)
        write_manifests(tmp_path / "src")
        publish(tmp_path / "src", str(tmp_path / "store"))
        assert eventually(lambda: node.opens("a") == 2)
        assert eventually(lambda: os.readlink(node.models_dir / "a") != before)
        # What nobody asked for is not fetched because it is new.
        serving = node.agent._machine.holdings.serving
        assert eventually(lambda: serving[ModelName("far")] == node.agent._sources._now.store.models[ModelName("far")].key)
        assert node.tiers()["far"] == "remote"
        assert node.opens("far") == 2


def test_parts_are_kept_for_models_of_the_store_and_one_agent_has_the_folder(tmp_path: Path) -> None:
    model_folder(tmp_path / "src", "a", 1)
    publish(tmp_path / "src", str(tmp_path / "store"))
    parts = tmp_path / "node" / "models" / ".prefetcher"
    state = MemoryState()
    with fetching(tmp_path / "node", str(tmp_path / "store"), state=state) as node:
        (key,) = node.agent._sources._now.store.models.values()
    for part in (parts / "a" / f".part-{key.version}", parts / "gone" / ".part-1", parts / "a" / ".gone-1"):
        part.mkdir(parents=True)
        (part / "part-0.safetensors").write_bytes(b"begun")
    with fetching(tmp_path / "node", str(tmp_path / "store"), state=state) as node:
        assert {path.name for path in parts.glob("*/.*")} == {f".part-{key.version}"}
        with pytest.raises(UsageError, match="another agent fetches into"):
            FetchingNode(tmp_path / "node", str(tmp_path / "store"), name="other", socket=tmp_path / "other.sock")
        assert node.opens("a") == 1
    with fetching(tmp_path / "node", str(tmp_path / "store")) as node, pytest.raises(ModelNotFoundError):
        node.opens("nothing")


def test_publish_and_doctor(place: str, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from prefetcher.cli import app

    model_folder(tmp_path / "src", "a", 1)
    bad = model_folder(tmp_path / "src", "b", 2)
    write_manifests(tmp_path / "src")
    (bad / "part-0.safetensors").write_bytes((bad / "part-0.safetensors").read_bytes()[:-1] + b"x")
    done = CliRunner().invoke(app, ["publish", str(tmp_path / "src"), place])
    assert done.exit_code == 1
    assert done.stdout.startswith("a  version ")
    assert "b" in done.stderr
    store = weights_store_at(place)
    assert {found.path.split("/")[0] for found in store.objects() if found.path.endswith(".json")} == {"a"}
    store.close()
    said: Any = {"store": {"url": place}, "node": {"models_dir": str(tmp_path)}}
    assert check_store(Settings(**said)).found.startswith("1 models with 1.0 MB in ")
    assert check_store(Settings(**said)).level == "ok"
    said["store"]["url"] = f"{place}-nowhere" if "://" not in place else "s3://no-such-bucket-here/x"
    assert check_store(Settings(**said)).level == "fail"


def test_a_store_without_publish_is_one_too(bucket: str, tmp_path: Path) -> None:
    """Files that other tools copied: folders with manifests, side by side."""
    model_folder(tmp_path / "src", "a", 4)
    write_manifests(tmp_path / "src")
    store: Any = from_url(bucket)
    for path in (tmp_path / "src" / "a").iterdir():
        obstore.put(store, f"a/{path.name}", path.read_bytes())
    with fetching(tmp_path / "node", bucket) as node:
        assert node.opens("a") == 4
        assert Tier.REMOTE in node.agent._machine.holdings.resolve(ModelName("a")).copies  # type: ignore[union-attr]

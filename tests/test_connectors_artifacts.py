"""Artifacts in a folder and in a real object store: published whole, refused when damaged, and the last good one taken."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_store_kit import ObjectStore

from prefetcher.clock import VirtualClock
from prefetcher.errors import ArtifactError, PredictorError, SettingsError, UnavailableError, UsageError
from prefetcher_connectors.artifact_store import ArtifactStore, Loaded
from prefetcher_connectors.blobs import Blobs, blobs_at
from prefetcher_models.parts import arrays_of, as_arrays, as_json, json_of, trained_on

PARTS = {"trees.json": as_json({"depth": 4}), "weights.safetensors": as_arrays({"w": np.arange(6.0).reshape(2, 3)})}
ABOUT = trained_on("hazard", from_s=0.0, until_s=100.0, rows=7, features=["a", "b"], scores={"600": {"brier": 0.1}})


def as_it_is(parts: Mapping[str, bytes], about: Mapping[str, Any]) -> dict[str, bytes]:
    return dict(parts)


@pytest.fixture(params=["folder", "object store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "artifacts")
    return str(request.getfixturevalue("bucket"))


@pytest.fixture
def blobs(place: str) -> Blobs:
    return blobs_at(place)


def store_at(place: str | Blobs, keep: int = 5) -> ArtifactStore:
    return ArtifactStore(place, keep=keep, clock=VirtualClock(1_700_000_000.0))


def test_what_is_published_is_what_is_loaded(place: str) -> None:
    store = store_at(place)
    version = store.publish("hazard", PARTS, ABOUT)
    found = store_at(place).load("hazard", as_it_is)
    assert found == Loaded("hazard", version, 1_700_000_000.0, PARTS, ABOUT)
    assert json_of(found.value["trees.json"]) == {"depth": 4}
    assert np.array_equal(arrays_of(found.value["weights.safetensors"])["w"], np.arange(6.0).reshape(2, 3))
    assert store.names() == ["hazard"]
    (told,) = store.versions("hazard")
    assert (told.version, told.in_force, told.made_s, told.problem) == (version, True, 1_700_000_000.0, "")
    assert told.bytes == sum(map(len, PARTS.values()))
    assert told.about == ABOUT


def test_the_newest_is_in_force_and_the_last_few_are_kept(place: str) -> None:
    store = store_at(place, keep=3)
    made = [store.publish("hazard", {"trees.json": as_json(i)}, ABOUT) for i in range(5)]
    assert [version[:6] for version in made] == ["000001", "000002", "000003", "000004", "000005"]
    assert json_of(store.load("hazard", as_it_is).value["trees.json"]) == 4
    assert [told.version for told in store.versions("hazard")] == made[:1:-1]
    store.publish("seasonal", PARTS, ABOUT)
    assert store.names() == ["hazard", "seasonal"]


def spoil_part(blobs: Blobs, name: str, version: str) -> None:
    blobs.write(f"{name}/{version}/trees.json", as_json({"depth": 5}))


def cut_part(blobs: Blobs, name: str, version: str) -> None:
    blobs.write(f"{name}/{version}/trees.json", b"{")


def spoil_manifest(blobs: Blobs, name: str, version: str) -> None:
    path = f"{name}/{version}/manifest.json"
    blob = blobs.read(path, 10**6)
    assert blob is not None
    blobs.write(path, blob.content.replace(b'"rows": 7', b'"rows": 8'))


def cut_manifest(blobs: Blobs, name: str, version: str) -> None:
    blobs.write(f"{name}/{version}/manifest.json", b'{"format": "pre')


def foreign_manifest(blobs: Blobs, name: str, version: str) -> None:
    blobs.write(f"{name}/{version}/manifest.json", b'{"layers": 12}')


def of_another_name(blobs: Blobs, name: str, version: str) -> None:
    other = ArtifactStore(blobs).publish("other", PARTS, ABOUT)
    blob = blobs.read(f"other/{other}/manifest.json", 10**6)
    assert blob is not None
    blobs.write(f"{name}/{version}/manifest.json", blob.content)


def newer_format(blobs: Blobs, name: str, version: str) -> None:
    blobs.write(f"{name}/{version}/manifest.json", b'{"format": "prefetcher artifact", "format_version": 9}')


def all_gone(blobs: Blobs, name: str, version: str) -> None:
    blobs.remove(f"{name}/{version}")


@pytest.mark.parametrize(
    ("spoil", "kind", "said"),
    [
        (spoil_part, "damaged", "does not have the digest"),
        (cut_part, "damaged", "has 1 bytes"),
        (spoil_manifest, "damaged", "digest"),
        (cut_manifest, "damaged", "no JSON"),
        (foreign_manifest, "foreign", "not one of this program's"),
        (of_another_name, "foreign", "under another's name"),
        (newer_format, "incompatible", "has version 9, this program reads 1"),
        (all_gone, "missing", "no manifest"),
    ],
)
def test_a_bad_version_is_refused_with_its_reason_and_the_last_good_one_taken(
    blobs: Blobs, spoil: Callable[[Blobs, str, str], None], kind: str, said: str
) -> None:
    told: list[tuple[str, str]] = []
    store = ArtifactStore(blobs, on_refused=lambda name, kind: told.append((name, kind)))
    good = store.publish("hazard", PARTS, ABOUT)
    bad = store.publish("hazard", PARTS | {"trees.json": as_json({"depth": 3})}, ABOUT)
    spoil(blobs, "hazard", bad)
    found = store.load("hazard", as_it_is)
    assert (found.version, found.value) == (good, PARTS)
    (refused,) = found.refused
    assert (refused.version, refused.kind) == (bad, kind)
    assert said in refused.reason
    assert told == [("hazard", kind)]
    spoil(blobs, "hazard", good)
    with pytest.raises(ArtifactError, match="fit it again") as raised:
        store.load("hazard", as_it_is)
    looked_at = [bad] if spoil is all_gone else [bad, good]
    assert [one.version for one in raised.value.refused] == looked_at  # type: ignore[attr-defined]


def test_what_its_reader_does_not_accept_is_incompatible(place: str) -> None:
    store = store_at(place)
    old = store.publish("hazard", PARTS, ABOUT | {"features": ["a"]})
    new = store.publish("hazard", PARTS, ABOUT)

    def of_one_feature(parts: Mapping[str, bytes], about: Mapping[str, Any]) -> str:
        if about["features"] != ["a"]:
            raise PredictorError(f"fitted on {about['features']}, this program has ['a']")
        return "taken"

    found = store.load("hazard", of_one_feature)
    assert (found.version, found.value) == (old, "taken")
    assert [(one.version, one.kind, one.reason) for one in found.refused] == [
        (new, "incompatible", "fitted on ['a', 'b'], this program has ['a']")
    ]
    with pytest.raises(ArtifactError, match="KeyError"):
        store.load("hazard", lambda parts, about: parts["absent.json"])


def test_what_no_pointer_names_is_not_in_force(blobs: Blobs) -> None:
    store = store_at(blobs)
    first = store.publish("hazard", PARTS, ABOUT)
    second = store.publish("hazard", PARTS | {"trees.json": as_json(2)}, ABOUT)
    pointer = blobs.read("hazard/current", 1000)
    assert pointer is not None
    assert blobs.replace("hazard/current", json.dumps({"version": first}).encode(), pointer.tag)
    # as if whoever published the second one had died before it moved the pointer
    assert store.load("hazard", as_it_is).version == first
    assert [told.in_force for told in store.versions("hazard")] == [False, True]
    assert store.publish("hazard", PARTS, ABOUT)[:6] == "000003"
    blobs.write("hazard/current", b"\xff")
    found = store.load("hazard", as_it_is)
    assert found.version[:6] == "000003"
    assert [(one.version, one.kind) for one in found.refused] == [("current", "damaged")]
    assert second in [told.version for told in store.versions("hazard")]


def test_a_pointer_to_a_version_that_is_gone_costs_none_of_those_there(blobs: Blobs) -> None:
    store = store_at(blobs)
    made = [store.publish("hazard", PARTS, {"number": i}) for i in range(3)]
    blobs.write("hazard/current", b'{"version": "000099-deadbeef"}')
    assert store.load("hazard", as_it_is).version == made[-1]
    made += [store.publish("hazard", PARTS, {"number": i}) for i in range(3, 5)]
    assert store.load("hazard", as_it_is).version == made[-1]
    assert [told.version for told in store.versions("hazard")] == made[::-1]


@pytest.mark.parametrize("content", [b"[" * 9_000, b"x" * 20_000, b'{"version": "999999999999-00000000"}'])
def test_a_pointer_that_holds_none_is_replaced(blobs: Blobs, content: bytes) -> None:
    store = store_at(blobs)
    first = store.publish("hazard", PARTS, ABOUT)
    blobs.write("hazard/current", content)
    assert store.load("hazard", as_it_is).version == first
    assert [told.version for told in store.versions("hazard")] == [first]
    second = store.publish("hazard", PARTS, ABOUT)
    assert (store.load("hazard", as_it_is).version, second[:6]) == (second, "000002")


@pytest.mark.parametrize("lost", ["sha256", "bytes"])
def test_a_manifest_that_says_too_little_of_a_part_is_refused(blobs: Blobs, lost: str) -> None:
    store = store_at(blobs)
    good, bad = (store.publish("hazard", PARTS, ABOUT) for _ in range(2))
    blob = blobs.read(f"hazard/{bad}/manifest.json", 100_000)
    assert blob is not None
    content = json.loads(blob.content)
    del content["parts"]["trees.json"][lost], content["digest"]
    digest = hashlib.sha256(json.dumps(content, ensure_ascii=False, sort_keys=True).encode()).hexdigest()
    blobs.write(f"hazard/{bad}/manifest.json", json.dumps({**content, "digest": digest}).encode())
    found = store.load("hazard", as_it_is)
    assert (found.version, found.refused[0].kind) == (good, "foreign")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)], ids=["pipe", "folder", "loop"])
def test_what_is_no_file_is_passed_over(tmp_path: Path, make: Callable[[Path], None]) -> None:
    store = store_at(str(tmp_path))
    good, bad = (store.publish("hazard", PARTS, ABOUT) for _ in range(2))
    for path in (tmp_path / "hazard" / bad / "trees.json", tmp_path / "hazard" / "current"):
        path.unlink()
        make(path)
        found = store.load("hazard", as_it_is)
        assert found.version == good
        assert found.refused[0].reason.endswith("is no file")
    with pytest.raises(ArtifactError, match=r"can't be replaced.*; remove it"):
        store.publish("hazard", PARTS, ABOUT)


def test_a_foreign_folder_with_a_number_beyond_all_counts_for_nothing(tmp_path: Path) -> None:
    store = store_at(str(tmp_path), keep=2)
    foreign = tmp_path / "hazard" / "999999999999-00000000" / "x"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("")
    made = [store.publish("hazard", PARTS, ABOUT) for _ in range(3)]
    assert [told.version for told in store.versions("hazard")] == made[:0:-1]
    assert foreign.exists()


def test_a_stale_tag_replaces_nothing(blobs: Blobs) -> None:
    assert blobs.replace("hazard/current", b"one", None)
    assert not blobs.replace("hazard/current", b"two", None)
    one = blobs.read("hazard/current", 100)
    assert one is not None
    assert blobs.replace("hazard/current", b"two", one.tag)
    assert not blobs.replace("hazard/current", b"three", one.tag)
    two = blobs.read("hazard/current", 100)
    assert two is not None
    assert two.content == b"two"


def test_many_publish_at_once_and_the_highest_is_in_force(place: str) -> None:
    stores = [store_at(place, keep=50) for _ in range(4)]
    made: list[str] = []

    def publish(store: ArtifactStore, number: int) -> None:
        made.extend(store.publish("hazard", {"trees.json": as_json([number, i])}, ABOUT) for i in range(3))

    threads = [threading.Thread(target=publish, args=(store, n)) for n, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 12
    told = stores[0].versions("hazard")
    assert sorted(one.version for one in told) == sorted(made)
    (in_force,) = [one.version for one in told if one.in_force]
    assert in_force[:6] == max(version[:6] for version in made)
    assert stores[0].load("hazard", as_it_is).refused == ()


def test_whoever_is_killed_while_it_publishes_leaves_the_last_good_one(tmp_path: Path) -> None:
    store = store_at(str(tmp_path))
    good = store.publish("hazard", PARTS, ABOUT)
    program = (
        "import os, sys\n"
        "from prefetcher_connectors.artifact_store import ArtifactStore\n"
        "from prefetcher_connectors.blobs import FolderBlobs\n"
        "class Killed(FolderBlobs):\n"
        "    def write(self, path, content):\n"
        "        if path.endswith('manifest.json'):\n"
        "            os.kill(os.getpid(), 9)\n"
        "        super().write(path, content)\n"
        "from pathlib import Path\n"
        "ArtifactStore(Killed(Path(sys.argv[1]))).publish('hazard', {'trees.json': b'{}'}, {})\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == -9
    assert store.load("hazard", as_it_is) == Loaded("hazard", good, 1_700_000_000.0, PARTS, ABOUT)
    assert [told.problem for told in store.versions("hazard")] == ["it has no manifest", ""]
    assert store.publish("hazard", PARTS, ABOUT)[:6] == "000003"


@pytest.mark.parametrize("name", ["", "../hazard", "Hazard", "a/b", "a" * 65, ".hidden"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    store = store_at(str(tmp_path))
    for ask in (lambda: store.publish(name, PARTS, ABOUT), lambda: store.load(name, as_it_is), lambda: store.versions(name)):
        with pytest.raises(ArtifactError, match="no name of an artifact"):
            ask()


@pytest.mark.parametrize("part", ["model.pkl", "../x.json", "manifest.json", "x", "a/b.json"])
def test_a_part_of_another_kind_is_refused(tmp_path: Path, part: str) -> None:
    with pytest.raises(ArtifactError, match="a part"):
        store_at(str(tmp_path)).publish("hazard", {part: b"{}"}, ABOUT)
    assert not any(tmp_path.iterdir())


def test_a_manifest_can_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    """Even one whose digest is right: who made it may be another program."""
    from prefetcher_connectors import artifact_store

    store = store_at(str(tmp_path))
    version = store.publish("hazard", PARTS, ABOUT)
    path = tmp_path / "hazard" / version / "manifest.json"
    content = json.loads(path.read_text())
    del content["digest"]
    content["parts"] = {"../../secret.json": {"bytes": 2, "sha256": ""}}
    path.write_text(json.dumps(content | {"digest": artifact_store._digest(content)}))
    with pytest.raises(ArtifactError, match="parts that can't be"):
        store.load("hazard", as_it_is)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("s3://key:secret@bucket/x", "credentials are no part of it"),
        ("az://account/container/x?sig=secret", "credentials are no part of it"),
        ("http://host/x", "its scheme is none of"),
        ("s3://", "write s3://bucket/folder"),
        ("az://account", "write az://account/container/folder"),
        ("file://relative", "a whole path"),
        ("  ", "it is empty"),
    ],
)
def test_a_place_that_is_none_is_refused_without_its_secrets(place: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as raised:
        blobs_at(place)
    assert "secret" not in str(raised.value)


def test_a_folder_that_can_not_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="PREFETCHER_ARTIFACTS__PATH"):
        store_at(str(tmp_path / "file" / "artifacts")).publish("hazard", PARTS, ABOUT)


def test_a_store_that_refuses_or_is_away_is_said_without_its_secrets(
    object_store: ObjectStore, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    with pytest.raises(UsageError, match="check its credentials") as refused:
        store_at(bucket).publish("hazard", PARTS, ABOUT)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(UnavailableError, match="does not answer") as away:
        store_at(bucket).load("hazard", as_it_is)
    for said in (str(refused.value), str(away.value)):
        assert "another-secret" not in said
        assert os.environ["AWS_ACCESS_KEY_ID"] not in said


def test_an_absent_bucket_is_said(bucket: str) -> None:
    with pytest.raises(UsageError, match="make the bucket"):
        store_at("s3://no-such-bucket-anywhere/x").publish("hazard", PARTS, ABOUT)


def test_words_of_artifacts_are_json() -> None:
    about = trained_on("x", from_s=-np.inf, until_s=np.float64(2.0), rows=np.int64(3), scores={"60": {"brier": np.float32(0.5)}})
    assert about["data"] == {"from_s": None, "until_s": 2.0, "rows": 3}
    assert json.loads(as_json(about)) == about
    for part in (b"\x80\x04K\x01.", b"", b"not safetensors"):
        with pytest.raises(ArtifactError, match="no safetensors"):
            arrays_of(part)
        with pytest.raises(ArtifactError, match="no JSON"):
            json_of(part)
    with pytest.raises(ArtifactError, match="no JSON"):
        as_json({"x": float("nan")})

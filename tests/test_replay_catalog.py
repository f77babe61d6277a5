"""Sizes and load times: the shapes that are read, and every wrong one refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from prefetcher.errors import InputError
from prefetcher.replay.catalog import first_few, read_catalog, read_load_times, sizes_of_folder


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([{"model": "a", "bytes": 5, "kind": "lora"}, {"model": "b/c", "bytes": 7.0}]),
        json.dumps({"a": 5, "b/c": 7}),
        json.dumps({"models": [{"model": "a", "bytes": "5"}, {"model": "b/c", "bytes": 7}]}),
        "model,kind,bytes\na,lora,5\n\nb/c,,7\n",
        "\ufeffmodel,bytes\na,5\nb/c,7\n",
        "model,bytes\na,5B\nb/c,0.007 kB\n",
    ],
)
def test_catalogs_of_every_shape(tmp_path: Path, text: str) -> None:
    path = tmp_path / "catalog"
    path.write_text(text)
    assert read_catalog(path) == {"a": 5, "b/c": 7}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "names no model"),
        ('[{"bytes": 5}]', 'entry 1 has no "model"'),
        ("[3]", 'entry 1 has no "model"'),
        ('[{"model": "a"}]', "model 'a' has bytes None"),
        ('[{"model": "a", "bytes": 0}]', "positive whole number"),
        ('[{"model": "a", "bytes": 1e300}]', "at most a petabyte"),
        ('[{"model": "a", "bytes": 1.5}]', "positive whole number"),
        ('[{"model": "a", "bytes": true}]', "positive whole number"),
        ('[{"model": "a", "bytes": 1}, {"model": "a", "bytes": 2}]', "two sizes, 1 and 2"),
        ('[{"model": "a",\n "bytes": }]', "catalog:2: not valid JSON"),
        ("name,size\na,5\n", "expected the columns model and bytes, found name, size"),
        ("model,bytes\na\n", "catalog:2: expected 2 columns"),
        ("model,bytes\na,many\n", "catalog:2: model 'a' has bytes 'many'"),
        ("model,bytes\na,16 XB\n", "bytes '16 XB'; a positive whole number is needed, or one with a unit, as 16GB"),
        ("model,bytes\na,2000TB\n", "at most a petabyte"),
        ("model,bytes\na,0GB\n", "positive whole number"),
        ("model,bytes,bytes\na,1,2\n", "catalog:1: has the column 'bytes' 2 times"),
        (f"model,bytes\n{'a' * 100_000},many\n", r"a… \(100,002 characters\) has bytes 'many'"),
        ("", "found nothing"),
    ],
)
def test_wrong_catalogs_are_one_input_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "catalog"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_catalog(path)


def test_binary_missing_and_folders_are_input_errors(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (tmp_path / "binary", "not UTF-8"),
        (tmp_path, "is a folder"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(InputError, match=message):
            read_catalog(path)


def test_a_folder_of_models_gives_each_model_its_safetensors_bytes(tmp_path: Path) -> None:
    for name, size in {
        "llama/model-1.safetensors": 10,
        "llama/model-2.safetensors": 5,
        "llama/config.json": 99,
        "org/qwen/model.safetensors": 7,
        "tiny.safetensors": 3,
        "empty/model.safetensors": 0,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "alias").symlink_to(tmp_path / "llama")
    assert sizes_of_folder(tmp_path) == {"alias": 15, "llama": 15, "org/qwen": 7, "tiny": 3}
    with pytest.raises(InputError, match="holds no safetensors"):
        sizes_of_folder(tmp_path / "empty")
    with pytest.raises(InputError, match="no such folder"):
        sizes_of_folder(tmp_path / "nowhere")


def test_a_folder_that_links_to_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "w.safetensors").write_bytes(b"xx")
    (tmp_path / "m" / "again").symlink_to(tmp_path / "m")
    assert sizes_of_folder(tmp_path) == {"m": 2}


def test_load_times_fill_what_they_name(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text("model,seconds\nb,2.5\nzz,1\n")
    assert np.array_equal(read_load_times(path, ["a", "b"]), [np.nan, 2.5], equal_nan=True)
    (tmp_path / "times.json").write_text('{"a": 1}')
    assert read_load_times(tmp_path / "times.json", ["a", "b"])[0] == 1.0
    with pytest.raises(InputError, match="none of the log's models"):
        read_load_times(path, ["a"])
    for wrong in ("-1", "0", "nan", "inf", "1e300", "86401"):
        path.write_text(f"model,seconds\nb,{wrong}\n")
        with pytest.raises(InputError, match=rf"times\.csv:2: model 'b' has seconds '{wrong}'"):
            read_load_times(path, ["b"])


def test_long_lists_of_names_are_cut() -> None:
    assert first_few(["a", "b"]) == "a, b"
    assert first_few(["x" * 1000]) == f"{'x' * 80}… (1,000 characters)"
    assert first_few([str(i) for i in range(1200)], 2) == "0, 1 and 1,198 more"

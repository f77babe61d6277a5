"""How large models are and how long they take to load: catalogs, folders of models, measured load times.

Covers reading and checking them; which models a log needs is `trace`'s matter.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.config import parse_bytes
from prefetcher.errors import InputError, shortened

__all__ = ["first_few", "read_catalog", "read_load_times", "refuse_repeated", "sizes_of_folder"]

#: A catalog larger than this is some other file: 64 MiB hold half a million models.
_CATALOG_LIMIT_BYTES = 64 << 20
#: No model is larger, and sums of such sizes fit into 64 bits.
_MOST_BYTES = 10**15
#: A longer load is a unit that was mistaken: a day.
_MOST_LOAD_S = 86_400.0


def first_few(names: Sequence[str], limit: int = 5) -> str:
    """`names` as text, cut after `limit`, each long one cut, too."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(map(shortened, names[:limit])) + more


def refuse_repeated(where: str, header: Sequence[str], wanted: Iterable[str]) -> None:
    """Raises InputError when one of the columns that are `wanted` is in the header twice: either could be meant."""
    for name in wanted:
        if header.count(name) > 1:
            raise InputError(
                f"has the column {shortened(repr(name))} {header.count(name)} times; leave one, or give the others another name",
                path=where,
                line=1,
            )


def read_catalog(path: str | Path) -> dict[str, int]:
    """Bytes of each model in a catalog: a JSON list of `{"model", "bytes"}`, a JSON object `{model: bytes}`, or CSV
    `model,bytes`; a size is a number, or a text with a unit, as `16GB`.

    Raises InputError for a file that cannot be read, an entry without a name or a positive size, or a model with two
    sizes.
    """
    where = str(path)
    sizes: dict[str, int] = {}
    for line, model, value in _pairs(where, "bytes"):
        size = _size(value)
        if size is None or not 1 <= size <= _MOST_BYTES or size != int(size):
            raise InputError(
                f"model {shortened(repr(model))} has bytes {shortened(repr(value))}; a positive whole number is needed, "
                "or one with a unit, as 16GB; at most a petabyte",
                path=where,
                line=line,
            )
        if sizes.setdefault(model, int(size)) != int(size):
            raise InputError(
                f"model {shortened(repr(model))} has two sizes, {sizes[model]} and {int(size)}; keep one", path=where, line=line
            )
    if not sizes:
        raise InputError('the catalog names no model; write a list of {"model": NAME, "bytes": SIZE}', path=where)
    return sizes


def read_load_times(path: str | Path, models: Sequence[str]) -> npt.NDArray[np.float64]:
    """Measured seconds to load each of `models` from a JSON or CSV of `model,seconds`; float64[n], NaN where there is
    none.

    Raises InputError for a file that cannot be read, a time that is not positive or above a day, or a file that names none of
    `models`.
    """
    where = str(path)
    row_of = {model: i for i, model in enumerate(models)}
    seconds = np.full(len(models), np.nan)
    found = 0
    for line, model, value in _pairs(where, "seconds"):
        time_s = _number(value)
        if time_s is None or not 0 < time_s <= _MOST_LOAD_S:
            raise InputError(
                f"model {shortened(repr(model))} has seconds {shortened(repr(value))}; a positive number is needed, of at most a day",
                path=where,
                line=line,
            )
        if model in row_of:
            seconds[row_of[model]] = time_s
            found += 1
    if not found:
        raise InputError("none of the log's models has a load time in it; check how the models are named", path=where)
    return seconds


def sizes_of_folder(folder: str | Path) -> dict[str, int]:
    """Bytes of each model below `folder`: the safetensors files that lie in one folder are one model, named by its
    path.

    A file that lies in `folder` itself is a model named without its ending. Raises InputError when there is no such
    folder or no model.
    """
    root = Path(folder)
    if not root.is_dir():
        raise InputError("no such folder of models; name the folder that holds one folder per model", path=str(folder))
    sizes: dict[str, int] = {}
    for at, folders, files in os.walk(root, followlinks=True):
        here = os.path.realpath(at)
        # A link to a folder above would be walked for ever.
        inside = {f: os.path.realpath(os.path.join(at, f)) for f in sorted(folders)}
        folders[:] = [f for f, real in inside.items() if not f"{here}/".startswith(f"{real}/")]
        for name in sorted(files):
            if not name.endswith(".safetensors"):
                continue
            below = Path(at).relative_to(root)
            model = below.as_posix() if below.parts else name.removesuffix(".safetensors")
            try:
                sizes[model] = sizes.get(model, 0) + os.stat(os.path.join(at, name)).st_size
            except OSError as error:
                raise InputError(f"the file cannot be read: {error.strerror}", path=os.path.join(at, name)) from error
    sizes = {model: size for model, size in sizes.items() if size > 0}
    if not sizes:
        raise InputError("the folder holds no safetensors file; each model is a folder with its *.safetensors", path=str(folder))
    return sizes


def _pairs(where: str, value_name: str) -> Iterator[tuple[int | None, str, Any]]:
    """(line, model, value) of every entry of a JSON or CSV file."""
    text = _read_text(where)
    if text.lstrip()[:1] in ("[", "{"):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            raise InputError(f"not valid JSON: {getattr(error, 'msg', 'nested too deeply')}", path=where, line=line) from error
        yield from _json_pairs(where, content, value_name)
    else:
        yield from _csv_pairs(where, text, value_name)


def _json_pairs(where: str, content: Any, value_name: str) -> Iterator[tuple[int | None, str, Any]]:
    if isinstance(content, Mapping) and isinstance(content.get("models"), list):
        content = content["models"]
    if isinstance(content, Mapping):
        for model, value in content.items():
            yield None, model, value.get(value_name) if isinstance(value, Mapping) else value
        return
    entries: Iterable[Any] = content
    for number, entry in enumerate(entries, 1):
        model = entry.get("model") if isinstance(entry, Mapping) else None
        if not isinstance(model, str) or not model:
            raise InputError(f'entry {number} has no "model"; each is {{"model": NAME, "{value_name}": NUMBER}}', path=where)
        yield None, model, entry.get(value_name)


def _csv_pairs(where: str, text: str, value_name: str) -> Iterator[tuple[int | None, str, Any]]:
    reader = csv.reader(text.splitlines())
    try:
        header = [name.strip() for name in next(reader, [])]
        if "model" not in header or value_name not in header:
            raise InputError(
                f"expected the columns model and {value_name}, found {first_few(header) or 'nothing'}",
                path=where,
                line=1,
            )
        refuse_repeated(where, header, ("model", value_name))
        at, value_at = header.index("model"), header.index(value_name)
        for row in reader:
            if not row:
                continue
            if len(row) != len(header) or not row[at].strip():
                raise InputError(f"expected {len(header)} columns with a model, found {row!r:.80}", path=where, line=reader.line_num)
            yield reader.line_num, row[at].strip(), row[value_at]
    except csv.Error as error:
        raise InputError(f"not valid CSV: {error}", path=where, line=reader.line_num) from error


def _read_text(where: str) -> str:
    try:
        if os.path.isdir(where):
            raise InputError("is a folder; a catalog is a JSON or CSV file (for a folder of models, use --models)", path=where)
        if os.path.getsize(where) > _CATALOG_LIMIT_BYTES:
            raise InputError("is larger than 64 MiB, which no list of models is; name the right file", path=where)
        with open(where, encoding="utf-8-sig") as file:
            return file.read()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", path=where) from error
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8 text; a JSON or CSV file is needed", path=where) from error


def _size(value: Any) -> float | None:
    number = _number(value)
    if number is None and isinstance(value, str):
        try:
            return float(parse_bytes(value))
        except ValueError:
            return None
    return number


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None

"""A fitted sequence model of co-activation as files: the numbers as safetensors, what trained them and how they did as JSON beside it.

The JSON names the models in the order of the embeddings and the digest of the safetensors file; both are written beside their places and
renamed, the JSON last, so that a reader finds a pair that belongs together or refuses. What the table counted is not in it: that comes
from a log or a snapshot.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.errors import PredictorError
from prefetcher_models.coactivation import Coactivation, Learned
from prefetcher_models.coactivation_net import WEIGHTS
from prefetcher_models.follow_scorer import LOOKS

__all__ = ["load_coactivation", "save_coactivation"]

_FORMAT = "prefetcher coactivation"
_VERSION = 1
_BY_MODEL = ("value", "key")


def save_coactivation(source: Coactivation, path: Path, models: Sequence[str]) -> str:
    """Write the network to `path` and its card to the same name with `.json`; the hex digest of `path`. `models`: names by number.

    Raises `PredictorError` when nothing was fitted yet. The same network gives the same bytes.
    """
    from safetensors.numpy import save

    learned = source.learned
    if not learned.weights:
        raise _refused(path, "no network was fitted yet", "let it learn from a log with users first")
    n = len(learned.weights["value"])
    if len(models) < n:
        raise _refused(path, f"{len(models)} names for {n} models", "name every model")
    content = save({**learned.weights, "lines": learned.lines, "compared": learned.compared})
    digest = hashlib.sha256(content).hexdigest()
    card: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "digest": digest,
        "looks": list(LOOKS),
        "models": list(models[:n]),
        "from_s": learned.from_s,
        "until_s": learned.until_s,
        "samples": learned.samples,
        "choice": source.choice,
    }
    _write(path, content)
    _write(path.with_suffix(".json"), (json.dumps(card, ensure_ascii=False, indent=1) + "\n").encode())
    return digest


def load_coactivation(source: Coactivation, path: Path, models: Sequence[str]) -> None:
    """Take the network at `path` over into `source`, for models that are numbered as in `models`; those that it doesn't know start at 0.

    Raises `PredictorError` for files that are missing, damaged, of another kind, or made for other looks; `source` stays as it was.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        card = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        content = path.read_bytes()
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _refused(path, f"can't be read ({error})") from error
    if not isinstance(card, dict) or card.get("format") != _FORMAT:
        raise _refused(path, "is no network of co-activation")
    if card.get("version") != _VERSION:
        raise _refused(path, f"has version {card.get('version')}, expected {_VERSION}")
    if hashlib.sha256(content).hexdigest() != card.get("digest"):
        raise _refused(path, "is damaged: its digest is not the one that its card names")
    if card.get("looks") != list(LOOKS):
        raise _refused(path, "was fitted on other looks than this program's")
    try:
        arrays = load(content)
        known = {name: number for number, name in enumerate(card["models"])}
        weights = {name: arrays[name] for name in WEIGHTS}
        for name in _BY_MODEL:
            weights[name] = _renumbered(weights[name], [known.get(model, -1) for model in models])
        learned = Learned(weights, arrays["lines"], arrays["compared"], float(card["from_s"]), float(card["until_s"]), int(card["samples"]))
        source.take_over(learned, card["choice"]["in_force"] == "sequence")
    except (SafetensorError, KeyError, TypeError, ValueError, IndexError) as error:
        raise _refused(path, f"lacks a part ({error})") from error


def _renumbered(rows: npt.NDArray[np.float32], numbers: list[int]) -> npt.NDArray[np.float32]:
    out = np.zeros((len(numbers), rows.shape[1]), np.float32)
    for to, number in enumerate(numbers):
        if number >= 0:
            out[to] = rows[number]
    return out


def _write(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _refused(path: Path, found: str, then: str = "restore it or fit again") -> PredictorError:
    return PredictorError(f"{path}: {found}; {then}", predictor="coactivation")

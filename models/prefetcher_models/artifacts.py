"""A fitted hazard as a file: one JSON document with LightGBM's model texts, what they were fitted on and how they
did, and a digest.

Nothing in it can run code. It is written beside its place and renamed, so that a reader finds the old one or the new
one, whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from prefetcher.core.traffic import FEATURE_NAMES
from prefetcher.core.types import HORIZONS_S
from prefetcher.errors import PredictorError
from prefetcher_models.hazard import Fit, Hazard, HazardSettings

__all__ = ["load_hazard", "save_hazard"]

_FORMAT = "prefetcher hazard"
_VERSION = 1


def save_hazard(hazard: Hazard, path: Path) -> str:
    """Write what `hazard` has learned to `path`, atomically; the hex digest of the content. The same fit gives the
    same bytes.
    """
    content: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "features": [*FEATURE_NAMES, *hazard.names],
        "horizons_s": list(HORIZONS_S),
        "settings": asdict(hazard.settings),
        "fit": {name: value for name, value in asdict(hazard.fit).items() if name != "names"},
    }
    digest = _digest(content)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            json.dump({**content, "digest": digest}, file, ensure_ascii=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return digest


def load_hazard(path: Path, names: tuple[str, ...] = ()) -> Hazard:
    """The hazard that was saved at `path`; it forecasts at once and learns on from nothing. `names` are the columns beside the traffic
    features that it will be given.

    Raises `PredictorError` for a file that is missing, damaged, of another kind, or made for other features or
    horizons.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _refused(path, f"can't be read ({error})", "restore it or fit again") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise _refused(path, "is no hazard artifact", "give the path of a file that was saved as one")
    if content.get("version") != _VERSION:
        raise _refused(path, f"has version {content.get('version')}, expected {_VERSION}", "fit again")
    if content.pop("digest", None) != _digest(content):
        raise _refused(path, "is damaged: its content doesn't have the digest that it names", "restore it or fit again")
    if content["features"] != [*FEATURE_NAMES, *names] or content["horizons_s"] != list(HORIZONS_S):
        raise _refused(path, "was fitted on other features or horizons than this program's", "fit again")
    try:
        return Hazard(_settings(content["settings"]), replace(_fit(content["fit"]), names=names), names)
    except (KeyError, TypeError, ValueError) as error:
        raise _refused(path, f"lacks a part or has one too many ({error})", "fit again") from error


def _settings(given: Mapping[str, Any]) -> HazardSettings:
    return HazardSettings(**{**given, "horizons": tuple(given["horizons"])})


def _fit(given: Mapping[str, Any]) -> Fit:
    trees = tuple(tuple(texts) for texts in given["trees"])
    lines = tuple((float(slope), float(offset)) for slope, offset in given["lines"])
    return Fit(**{**given, "trees": trees, "lines": lines})


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, ensure_ascii=False, sort_keys=True).encode()).hexdigest()


def _refused(path: Path, found: str, then: str) -> PredictorError:
    return PredictorError(f"{path}: {found}; {then}", predictor="hazard")

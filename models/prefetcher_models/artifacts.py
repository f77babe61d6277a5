"""A fitted hazard as an artifact's part: one JSON document with LightGBM's model texts, and what is said about it.

Nothing in it can run code. Versions, digests and places are the artifact store's business (`prefetcher_connectors.artifact_store`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from prefetcher.core.traffic import FEATURE_NAMES
from prefetcher.core.types import HORIZONS_S
from prefetcher.errors import ArtifactError, PredictorError
from prefetcher_models.hazard import Fit, Hazard, HazardSettings
from prefetcher_models.parts import as_json, json_of, trained_on

__all__ = ["HAZARD", "about_hazard", "hazard_of", "hazard_parts"]

#: The artifact's name, and its part.
HAZARD = "hazard"
_PART = "hazard.json"
_FORMAT, _VERSION = "prefetcher hazard", 1


def hazard_parts(hazard: Hazard) -> dict[str, bytes]:
    """The part to publish. The same fit gives the same bytes."""
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "features": [*FEATURE_NAMES, *hazard.names],
        "horizons_s": list(HORIZONS_S),
        "settings": asdict(hazard.settings),
        "fit": {name: value for name, value in asdict(hazard.fit).items() if name != "names"},
    }
    return {_PART: as_json(content)}


def about_hazard(hazard: Hazard) -> dict[str, Any]:
    """What is said about it: the log that trained it, its settings, how its forecasts did on what came after them."""
    fit = hazard.fit
    return trained_on(
        HAZARD,
        from_s=fit.from_s,
        until_s=fit.until_s,
        rows=fit.rows,
        settings=asdict(hazard.settings),
        features=[*FEATURE_NAMES, *hazard.names],
        scores=fit.scores,
    )


def hazard_of(parts: Mapping[str, bytes], _about: Mapping[str, Any] | None = None, names: tuple[str, ...] = ()) -> Hazard:
    """The hazard that was published; it forecasts at once and learns on from nothing. `names` are the columns beside the traffic features
    that it will be given.

    Raises `ArtifactError` for parts of another kind, or made for other features or horizons.
    """
    if _PART not in parts:
        raise ArtifactError(f"it has no {_PART}", kind="foreign", predictor=HAZARD)
    content = json_of(parts[_PART])
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ArtifactError("it is no hazard", kind="foreign", predictor=HAZARD)
    if content.get("version") != _VERSION:
        raise _refused(f"it is a hazard of version {content.get('version')}, this program reads {_VERSION}")
    if content.get("features") != [*FEATURE_NAMES, *names] or content.get("horizons_s") != list(HORIZONS_S):
        raise _refused("it was fitted on other features or horizons than this program's")
    try:
        return Hazard(_settings(content["settings"]), replace(_fit(content["fit"]), names=names), names)
    except (KeyError, TypeError, ValueError, PredictorError) as error:
        raise _refused(f"it lacks a part or has one too many ({error})") from error


def _settings(given: Mapping[str, Any]) -> HazardSettings:
    return HazardSettings(**{**given, "horizons": tuple(given["horizons"])})


def _fit(given: Mapping[str, Any]) -> Fit:
    trees = tuple(tuple(texts) for texts in given["trees"])
    lines = tuple((float(slope), float(offset)) for slope, offset in given["lines"])
    return Fit(**{**given, "trees": trees, "lines": lines})


def _refused(found: str) -> ArtifactError:
    return ArtifactError(f"{found}; fit again", kind="incompatible", predictor=HAZARD)

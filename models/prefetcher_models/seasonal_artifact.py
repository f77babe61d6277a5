"""Seasons as an artifact: arrays as safetensors, names and place as JSON; asked for without Prophet.

Where artifacts are kept is not its business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from prefetcher.errors import ArtifactError, PredictorError
from prefetcher_models.parts import arrays_of, as_arrays, as_json, json_of, trained_on
from prefetcher_models.seasonal import SeasonalSettings
from prefetcher_models.seasonal_calendar import Calendar
from prefetcher_models.seasonal_profile import Season, Seasons, seasons_from_arrays, seasons_to_arrays
from prefetcher_models.seasonal_words import Explanation, explain

__all__ = ["SEASONAL", "NamedSeasons", "about_seasons", "seasons_of", "seasons_parts"]

SEASONAL = "seasonal"
_ARRAYS, _WORDS = "seasons.safetensors", "seasons.json"
_FORMAT, _VERSION = "prefetcher seasons", 1


@dataclass(frozen=True, slots=True)
class NamedSeasons:
    """Seasons by the models' names, as of `made_s`, in the time of `tz` and the calendar of `country`."""

    by_name: Mapping[str, Season]
    tz: str
    country: str
    made_s: float

    def explain(self, model: str, at_s: float) -> Explanation:
        """See `seasonal_words.explain`. Raises `PredictorError` for a model without a season, naming it."""
        if model not in self.by_name:
            raise PredictorError(f"{model} has no season: too little history, or not among the busiest models", predictor=SEASONAL)
        return explain(Seasons(Calendar(self.tz, self.country), {0: self.by_name[model]}), 0, at_s)


def seasons_parts(named: NamedSeasons) -> dict[str, bytes]:
    """The parts to publish. The same seasons give the same bytes."""
    names = sorted(named.by_name)
    words = {"format": _FORMAT, "version": _VERSION, "names": names, "tz": named.tz, "country": named.country, "made_s": named.made_s}
    arrays = seasons_to_arrays({key: named.by_name[name] for key, name in enumerate(names)})
    return {_ARRAYS: as_arrays(arrays), _WORDS: as_json(words)}


def about_seasons(named: NamedSeasons, settings: SeasonalSettings) -> dict[str, Any]:
    """What is said about it: the mean error an hour of held-out time, beside that of seasonal-naive on the same."""
    seasons = list(named.by_name.values())
    own, naive = (
        {"3600": {"deviance": float(np.mean([getattr(season, name) for season in seasons]))}} if seasons else {}
        for name in ("own_error", "naive_error")
    )
    return trained_on(
        SEASONAL,
        from_s=min((s.valid_from_s - s.history_s for s in seasons), default=named.made_s),
        until_s=max((s.valid_from_s for s in seasons), default=named.made_s),
        rows=int(sum(s.rows for s in seasons)),
        settings=asdict(settings),
        scores=own,
        baseline="seasonal-naive",
        baseline_scores=naive,
        models=len(seasons),
        used=sum(s.used for s in seasons),
    )


def seasons_of(parts: Mapping[str, bytes], _about: Mapping[str, Any] | None = None) -> NamedSeasons:
    """What was published. Raises `ArtifactError` for parts that are something else."""
    if set(parts) != {_ARRAYS, _WORDS}:
        raise ArtifactError(f"it has not the parts {_ARRAYS} and {_WORDS}", kind="foreign", predictor=SEASONAL)
    words = json_of(parts[_WORDS])
    if not isinstance(words, dict) or words.get("format") != _FORMAT:
        raise ArtifactError("it holds no seasons", kind="foreign", predictor=SEASONAL)
    if words.get("version") != _VERSION:
        found = f"it holds seasons of version {words.get('version')}, this program reads {_VERSION}; fit again"
        raise ArtifactError(found, kind="incompatible", predictor=SEASONAL)
    try:
        seasons = seasons_from_arrays(arrays_of(parts[_ARRAYS]))
        names, tz, country, made_s = (words[key] for key in ("names", "tz", "country", "made_s"))
        if sorted(seasons) != list(range(len(names))):
            raise PredictorError(f"{len(names)} names for {len(seasons)} seasons", predictor=SEASONAL)
        Calendar(tz, country)
        return NamedSeasons({str(name): seasons[key] for key, name in enumerate(names)}, tz, country, float(made_s))
    except (KeyError, TypeError, ValueError, PredictorError) as error:
        raise ArtifactError(f"it lacks a part or has one too many ({error}); fit again", kind="incompatible", predictor=SEASONAL) from error

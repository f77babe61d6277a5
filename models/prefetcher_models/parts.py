"""What artifacts are made of: arrays as safetensors, words as JSON, and one vocabulary for what trained them.

Nothing here can run code when it is read. Where artifacts are kept is not its business; a hazard's part is `artifacts`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prefetcher.errors import ArtifactError

__all__ = ["arrays_of", "as_arrays", "as_json", "json_of", "trained_on"]


def trained_on(
    kind: str,
    *,
    from_s: float,
    until_s: float,
    rows: int,
    settings: Mapping[str, Any] | None = None,
    features: Sequence[str] = (),
    scores: Mapping[str, Mapping[str, float]] | None = None,
    baseline: str = "",
    baseline_scores: Mapping[str, Mapping[str, float]] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """What an artifact says of itself; JSON, without numbers that are none.

    `kind` names what it is ("hazard"), `from_s` to `until_s` and `rows` are the log that trained it, `features` what it was fitted with.
    `scores`: by horizon in seconds ("600"), figures by name (brier, log_loss, ap, …) on time that it was not fitted on; `baseline_scores`
    those of the predictor `baseline` on the same.
    """
    about = {
        "kind": kind,
        "data": {"from_s": from_s, "until_s": until_s, "rows": rows},
        "settings": dict(settings or {}),
        "features": list(features),
        "scores": {horizon: dict(figures) for horizon, figures in (scores or {}).items()},
        "baseline": baseline,
        "baseline_scores": {horizon: dict(figures) for horizon, figures in (baseline_scores or {}).items()},
        **more,
    }
    finite: dict[str, Any] = _finite(about)
    return finite


def as_json(value: Any) -> bytes:
    """`value` as a part; the same value gives the same bytes. Raises `ArtifactError` for what is no JSON."""
    try:
        return json.dumps(value, ensure_ascii=False, indent=1, sort_keys=True, allow_nan=False).encode()
    except (TypeError, ValueError) as exc:
        raise ArtifactError(f"a part that is no JSON ({exc})") from exc


def json_of(part: bytes) -> Any:
    """What `as_json` was given. Raises `ArtifactError`."""
    try:
        return json.loads(part)
    except (ValueError, RecursionError) as exc:
        raise ArtifactError(f"a part that is no JSON ({type(exc).__name__})") from exc


def as_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Arrays by name as a safetensors part."""
    from safetensors.numpy import save

    return bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def arrays_of(part: bytes) -> dict[str, np.ndarray]:
    """What `as_arrays` was given. Raises `ArtifactError` for a part that is no safetensors."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return dict(load(part))
    except (SafetensorError, KeyError, ValueError) as exc:
        raise ArtifactError(f"a part that is no safetensors ({exc})") from exc


def _finite(value: Any) -> Any:
    """`value` with null in the place of numbers that JSON has not, and numpy's numbers as Python's."""
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, np.generic):
        return _finite(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

"""Every error that the program raises on purpose, drawn once.

    PrefetcherError
    ├── UsageError                 the caller asked for something that cannot be (exit code 2)
    │   ├── SettingsError          a setting is missing, unknown or out of range
    │   ├── BudgetError            a budget that the machine cannot honour
    │   └── LockLimitError         `--lock require` under a limit of locked memory that is too small
    ├── InputError                 a log, catalog or manifest that cannot be read as asked; names file and line
    ├── WeightsError               bytes that are not the weights that were promised
    │   ├── ModelNotFoundError     no such model in the models folder
    │   ├── ManifestError          a manifest that is missing, malformed or leads out of its folder
    │   ├── IntegrityError         size or digest differ from the manifest
    │   └── UnsafeFormatError      not safetensors (a pickle, a header that lies)
    ├── TemporaryError             worth trying again: carries `retry_after_s`
    │   ├── NoRoomError            memory or disk is full just now
    │   ├── UnavailableError       a server, agent or controller does not answer
    │   ├── RateLimitedError       too many requests from one source
    │   └── ChangedError           what was being read was replaced meanwhile
    └── PredictorError             a predictor failed; the caller falls back and counts it
        └── ArtifactError          what was fitted is missing, damaged, foreign or not understood, or can't be published

A message names the thing, what was expected, what was found, and what to do.
"""

from __future__ import annotations

__all__ = [
    "ArtifactError",
    "BudgetError",
    "ChangedError",
    "InputError",
    "IntegrityError",
    "LockLimitError",
    "ManifestError",
    "ModelNotFoundError",
    "NoRoomError",
    "PredictorError",
    "PrefetcherError",
    "RateLimitedError",
    "SettingsError",
    "TemporaryError",
    "UnavailableError",
    "UnsafeFormatError",
    "UsageError",
    "WeightsError",
    "shortened",
]


def shortened(text: str, most: int = 80) -> str:
    """`text` as a message may echo it: names and values that others wrote are cut after `most` characters."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


class PrefetcherError(Exception):
    """The root: one line that says what happened and what to do. `exit_code` is the command line's."""

    exit_code: int = 1


class UsageError(PrefetcherError):
    """The caller asked for something that cannot be."""

    exit_code = 2


class SettingsError(UsageError):
    """A setting is missing, unknown or out of range."""


class BudgetError(UsageError):
    """A budget that the machine cannot honour."""


class LockLimitError(UsageError):
    """Memory must be locked and the limit of locked memory is too small."""


class InputError(PrefetcherError):
    """A file that cannot be read as asked. `path` and `line` (1-based, or None) say where."""

    def __init__(self, message: str, *, path: str = "", line: int | None = None) -> None:
        where = f"{path}:{line}: " if path and line is not None else f"{path}: " if path else ""
        super().__init__(where + message)
        self.path = path
        self.line = line


class WeightsError(PrefetcherError):
    """Bytes that are not the weights that were promised. `model` says whose."""

    def __init__(self, message: str, *, model: str = "") -> None:
        super().__init__(message)
        self.model = model


class ModelNotFoundError(WeightsError):
    """No such model in the models folder."""


class ManifestError(WeightsError):
    """A manifest that is missing, malformed or leads out of its folder."""


class IntegrityError(WeightsError):
    """Size or digest differ from the manifest."""


class UnsafeFormatError(WeightsError):
    """A file that is not safetensors."""


class TemporaryError(PrefetcherError):
    """Worth trying again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoRoomError(TemporaryError):
    """Memory or disk is full just now."""


class UnavailableError(TemporaryError):
    """A server, agent or controller does not answer."""


class RateLimitedError(TemporaryError):
    """Too many requests from one source."""


class ChangedError(TemporaryError):
    """What was being read was replaced meanwhile: look again."""


class PredictorError(PrefetcherError):
    """A predictor failed; the caller falls back and counts it. `predictor` says which."""

    def __init__(self, message: str, *, predictor: str = "") -> None:
        super().__init__(message)
        self.predictor = predictor


class ArtifactError(PredictorError):
    """What was fitted can't be taken or published.

    `kind`: missing, damaged, foreign or incompatible. `refused`: the versions that were looked at, as the store tells them.
    """

    def __init__(self, message: str, *, kind: str = "incompatible", predictor: str = "", refused: tuple[object, ...] = ()) -> None:
        super().__init__(message, predictor=predictor)
        self.kind = kind
        self.refused = refused

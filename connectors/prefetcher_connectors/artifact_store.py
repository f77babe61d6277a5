"""Versions of what was fitted, in a folder or an object store: written whole, digested, and put in force by one pointer.

    NAME/current                        the version in force, one line of JSON, replaced atomically
    NAME/000007-3f2a9c1d/manifest.json  what it is and what trained it, with size and SHA-256 of each part; written last
    NAME/000007-3f2a9c1d/hazard.json    a part: .json, .safetensors, .parquet or .skops, never a pickle

A version that is damaged, foreign or not understood is refused with its reason, counted, and the next older one is taken. Digests tell
damage, not forgery: whoever may write the place is trusted, and the formats can't run code. What parts hold is the business of those who
publish and load them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from prefetcher.clock import Clock, SystemClock
from prefetcher.errors import ArtifactError, PredictorError, PrefetcherError, UnavailableError
from prefetcher_connectors.blobs import Blob, Blobs, blobs_at

__all__ = ["DEFAULT_KEEP", "ArtifactStore", "Loaded", "Refused", "Version"]

T = TypeVar("T")

FORMAT = "prefetcher artifact"
FORMAT_VERSION = 1
#: Versions that are kept of each name: an hour's fits, or a week of daily ones, to fall back on.
DEFAULT_KEEP = 7

_NAME = re.compile(r"^[a-z0-9][a-z0-9_-]{0,63}$")
_PART = re.compile(r"^[a-z0-9][a-z0-9_-]{0,63}\.(json|safetensors|parquet|skops)$")
_VERSION = re.compile(r"^(\d{6,12})-[0-9a-f]{8}$")
_MOST_MANIFEST_BYTES = 4_000_000
#: The largest part: more than any predictor of ten thousand models, less than a mistake.
_MOST_PART_BYTES = 1_000_000_000
#: A pointer is a line; more than that is somebody's mistake, which is replaced like any other that holds none.
_POINTER_BYTES = 1_000_000
#: Numbers of versions end here, where nobody gets who counts: higher ones are not this program's.
_MOST_NUMBER = 10**11
#: Tries to move the pointer while others move it too.
_TRIES = 20


@dataclass(frozen=True, slots=True)
class Refused:
    """A version that was not taken. `kind`: missing, damaged, foreign or incompatible; `reason` says what was found."""

    version: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """What `accept` made of a version, and what was passed over before it was found."""

    name: str
    version: str
    made_s: float
    value: T
    about: Mapping[str, Any]
    refused: tuple[Refused, ...] = ()


@dataclass(frozen=True, slots=True)
class Version:
    """A version as its manifest tells it; `problem` is '' or why it can't be read, and the rest is then empty."""

    name: str
    version: str
    in_force: bool
    made_s: float = float("nan")
    program: str = ""
    bytes: int = 0
    about: Mapping[str, Any] | None = None
    problem: str = ""


class ArtifactStore:
    """All artifacts at one place. For threads and for processes at once.

    `place`: a folder, file://, s3://, gs:// or az://. `keep`: versions kept of each name. `on_refused` is told the name of each artifact
    of which a version was refused, and its kind of refusal.
    """

    def __init__(
        self,
        place: str | Path | Blobs,
        *,
        keep: int = DEFAULT_KEEP,
        clock: Clock | None = None,
        on_refused: Callable[[str, str], None] = lambda _name, _kind: None,
    ) -> None:
        self._blobs = blobs_at(place) if isinstance(place, str | Path) else place
        self._keep = max(1, keep)
        self._clock = clock or SystemClock()
        self._on_refused = on_refused
        self._log = structlog.get_logger()

    @property
    def place(self) -> str:
        """Where they are, as it may be shown."""
        return self._blobs.place

    def publish(self, name: str, parts: Mapping[str, bytes], about: Mapping[str, Any]) -> str:
        """Write a version of `name` and put it in force; its name. Older ones beyond `keep` are removed.

        `parts`: content by file name. `about`: what trained it, as JSON (`prefetcher_models.artifacts.trained_on` gives its words).
        A version that another process put in force meanwhile, with a higher number, stays in force.

        Raises:
            ArtifactError: names or parts that can't be published.
            UnavailableError, UsageError: the place can't be written.
        """
        _check_name(name)
        wrong = [part for part in parts if not _PART.match(part) or part == "manifest.json"]
        if wrong or not parts:
            said = f"a part {wrong[0]!r}" if wrong else "no part"
            raise ArtifactError(f"{name} has {said}; parts are files as trees.json, .safetensors, .parquet or .skops")
        large = [part for part, content in parts.items() if len(content) > _MOST_PART_BYTES]
        if large:
            raise ArtifactError(f"{name}: {large[0]} has {len(parts[large[0]]):,} bytes, at most {_MOST_PART_BYTES:,} are kept")
        current = self._pointer(name)[0]
        number = max((_number(version) for version in [*self._versions(name), *filter(None, [current])]), default=0) + 1
        content: dict[str, Any] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "name": name,
            "made_s": self._clock.now_s(),
            "program": metadata.version("prefetcher"),
            "parts": {part: {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()} for part, raw in sorted(parts.items())},
            "about": _as_json(name, about),
        }
        version = content["version"] = f"{number:06d}-{_digest(content)[:8]}"
        manifest = json.dumps({**content, "digest": _digest(content)}, ensure_ascii=False, indent=1)
        try:
            for part, raw in parts.items():
                self._blobs.write(f"{name}/{version}/{part}", raw)
            self._blobs.write(f"{name}/{version}/manifest.json", manifest.encode())
        except PrefetcherError:
            with suppress(PrefetcherError):
                self._blobs.remove(f"{name}/{version}")
            raise
        self._point(name, version)
        self._forget_old(name, version)
        return version

    def load(self, name: str, accept: Callable[[Mapping[str, bytes], Mapping[str, Any]], T]) -> Loaded[T]:
        """What `accept(parts, about)` makes of the version in force, or of the newest older one that can be taken.

        `accept` refuses a version by raising PredictorError (KeyError, TypeError and ValueError count as one). Each refusal is counted
        and told in the result.

        Raises:
            ArtifactError: there is none that can be taken; its `refused` says what was wrong with those there are.
            UnavailableError, UsageError: the place can't be read.
        """
        _check_name(name)
        refused: list[Refused] = []
        for version in self._in_order(name, refused):
            try:
                manifest = self._manifest(name, version)
                parts = self._parts(name, version, manifest)
                about = manifest["about"]
                value = _accepted(accept, parts, about)
            except ArtifactError as exc:
                self._refuse(name, Refused(version, exc.kind, str(exc)), refused)
                continue
            return Loaded(name, version, float(manifest["made_s"]), value, about, tuple(refused))
        said = "; ".join(f"{one.version} is {one.kind}: {one.reason}" for one in refused) or "there is none"
        raise ArtifactError(f"no {name} to take from {self.place}: {said}; fit it again", kind="missing", refused=tuple(refused))

    def names(self) -> list[str]:
        """Of all artifacts, sorted."""
        return [name for name in self._blobs.folders("") if _NAME.match(name)]

    def versions(self, name: str) -> list[Version]:
        """All versions of `name`, newest first, from their manifests alone: parts are not read."""
        _check_name(name)
        current = self._pointer(name)[0]
        found = []
        for version in sorted(self._versions(name), key=_number, reverse=True):
            try:
                m = self._manifest(name, version)
            except ArtifactError as exc:
                found.append(Version(name, version, version == current, problem=str(exc)))
                continue
            size = sum(int(part["bytes"]) for part in m["parts"].values())
            found.append(Version(name, version, version == current, float(m["made_s"]), str(m["program"]), size, m["about"]))
        return found

    def _versions(self, name: str) -> list[str]:
        return [version for version in self._blobs.folders(name) if 0 < _number(version) < _MOST_NUMBER]

    def _in_order(self, name: str, refused: list[Refused]) -> Iterator[str]:
        """The version in force, then older ones; where the pointer can't be read, all of them from the newest on."""
        current, problem, _ = self._pointer(name)
        if problem:
            self._refuse(name, Refused("current", "damaged", problem), refused)
        if current:
            yield current
        for version in sorted(self._versions(name), key=_number, reverse=True):
            if version != current and (not current or _number(version) <= _number(current)):
                yield version

    def _pointer(self, name: str) -> tuple[str, str, Blob | None]:
        """(the version in force or '', why the pointer can't be read or '', the pointer)."""
        try:
            blob = self._blobs.read(f"{name}/current", _POINTER_BYTES)
        except ArtifactError as exc:
            return "", str(exc), None
        if blob is None:
            return "", "", None
        try:
            version = json.loads(blob.content)["version"]
        except (ValueError, KeyError, TypeError, RecursionError):
            version = None
        if isinstance(version, str) and 0 < _number(version) < _MOST_NUMBER:
            return version, "", blob
        return "", "the pointer to the version in force holds none", blob

    def _point(self, name: str, version: str) -> None:
        line = json.dumps({"version": version}).encode() + b"\n"
        for _ in range(_TRIES):
            current, problem, blob = self._pointer(name)
            if current and _number(current) > _number(version) and self._is_there(name, current):
                return
            if problem and blob is None:
                raise ArtifactError(f"{self.place}/{name}/current can't be replaced: {problem}; remove it", kind="damaged")
            if self._blobs.replace(f"{name}/current", line, None if blob is None else blob.tag):
                return
        raise UnavailableError(f"{self.place}/{name}: others moved the pointer {_TRIES} times; {version} is there, and not in force")

    def _forget_old(self, name: str, version: str) -> None:
        newest_first = sorted(self._versions(name), key=_number, reverse=True)
        for old in newest_first[self._keep :]:
            if old not in (version, self._pointer(name)[0]):
                try:
                    self._blobs.remove(f"{name}/{old}")
                except PrefetcherError as exc:
                    self._log.warning("artifact_not_removed", name=name, version=old, reason=str(exc))

    def _is_there(self, name: str, version: str) -> bool:
        try:
            self._manifest(name, version)
        except ArtifactError:
            return False
        return True

    def _manifest(self, name: str, version: str) -> dict[str, Any]:
        blob = self._blobs.read(f"{name}/{version}/manifest.json", _MOST_MANIFEST_BYTES)
        if blob is None:
            raise ArtifactError("it has no manifest", kind="missing")
        try:
            content = json.loads(blob.content)
        except (ValueError, RecursionError) as exc:
            raise ArtifactError(f"its manifest is no JSON ({type(exc).__name__})", kind="damaged") from exc
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ArtifactError("its manifest is not one of this program's", kind="foreign")
        if content.get("format_version") != FORMAT_VERSION:
            found = content.get("format_version")
            raise ArtifactError(f"its manifest has version {found}, this program reads {FORMAT_VERSION}", kind="incompatible")
        if content.pop("digest", None) != _digest(content):
            raise ArtifactError("its manifest does not have the digest that it names", kind="damaged")
        if (content.get("name"), content.get("version")) != (name, version):
            raise ArtifactError(f"it is {content.get('name')} {content.get('version')}, under another's name", kind="foreign")
        parts, about, made_s = content.get("parts"), content.get("about"), content.get("made_s")
        if not isinstance(about, dict) or not isinstance(made_s, int | float) or not isinstance(content.get("program"), str):
            raise ArtifactError("its manifest lacks what every one says", kind="foreign")
        if not isinstance(parts, dict) or not all(_PART.match(part) and _is_said(said) for part, said in parts.items()):
            raise ArtifactError("its manifest names parts that can't be", kind="foreign")
        return content

    def _parts(self, name: str, version: str, manifest: Mapping[str, Any]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for part, said in manifest["parts"].items():
            blob = self._blobs.read(f"{name}/{version}/{part}", _MOST_PART_BYTES)
            if blob is None:
                raise ArtifactError(f"{part} is not there", kind="missing")
            if len(blob.content) != said["bytes"]:
                raise ArtifactError(f"{part} has {len(blob.content):,} bytes, not {said['bytes']:,}", kind="damaged")
            if hashlib.sha256(blob.content).hexdigest() != said["sha256"]:
                raise ArtifactError(f"{part} does not have the digest that its manifest names", kind="damaged")
            found[part] = blob.content
        return found

    def _refuse(self, name: str, one: Refused, refused: list[Refused]) -> None:
        refused.append(one)
        self._on_refused(name, one.kind)
        self._log.warning("artifact_refused", name=name, version=one.version, kind=one.kind, reason=one.reason)


def _as_json(name: str, about: Mapping[str, Any]) -> Any:
    """`about` as it will be read: keys are text, tuples are lists."""
    try:
        return json.loads(json.dumps(dict(about), allow_nan=False))
    except (TypeError, ValueError) as exc:
        raise ArtifactError(f"{name}: what is said about it is no JSON ({exc})") from exc


def _accepted(
    accept: Callable[[Mapping[str, bytes], Mapping[str, Any]], T], parts: Mapping[str, bytes], about: Mapping[str, Any]
) -> T:
    try:
        return accept(parts, about)
    except ArtifactError:
        raise
    except PredictorError as exc:
        raise ArtifactError(str(exc), kind="incompatible") from exc
    except (KeyError, TypeError, ValueError) as exc:
        raise ArtifactError(f"its parts are not what was expected ({type(exc).__name__}: {exc})", kind="incompatible") from exc


def _check_name(name: str) -> None:
    if not _NAME.match(name):
        raise ArtifactError(f"{name!r} is no name of an artifact: small letters, digits, - and _, at most 64")


def _is_said(said: object) -> bool:
    """Whether a manifest says of a part what it must."""
    return isinstance(said, dict) and isinstance(said.get("bytes"), int) and isinstance(said.get("sha256"), str)


def _number(version: str) -> int:
    found = _VERSION.match(version)
    return int(found.group(1)) if found else 0


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, ensure_ascii=False, sort_keys=True).encode()).hexdigest()

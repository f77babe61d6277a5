"""Several feature sources as one: their columns behind the traffic features of every block, their fits and their snapshots together.

Trees ask for numbers (`trees` covers no missing ones), so that "knows nothing" (NaN) becomes `ABSENT` here, a number that no column
holds; a source that fails says it for the whole block, and is counted. What a column means is its source's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from prefetcher.core.traffic import FEATURE_NAMES, Block, Traffic
from prefetcher.errors import PredictorError
from prefetcher_models.feature_source import FeatureSource, Floats32

__all__ = ["ABSENT", "REFIT_S", "Sources", "joined"]

#: What a column says where its source knows nothing: far below anything that a source may say.
ABSENT = np.float32(-1e9)
#: Sources are asked for a fit at the whole hours of UTC; which of them fit then, they decide.
REFIT_S = 3600.0


class Sources:
    """Sources in a fixed order, K columns in all.

    Raises `PredictorError` for a name that is empty, has spaces, comes twice, or is that of a traffic feature.
    """

    def __init__(self, sources: Sequence[FeatureSource] = ()) -> None:
        self._sources = tuple(sources)
        self._names = tuple(name for source in self._sources for name in source.names)
        known = set(FEATURE_NAMES)
        for name in self._names:
            if not name or any(map(str.isspace, name)) or name in known:
                raise PredictorError(f"a feature source's column is called {name!r}: expected one word that no other column has")
            known.add(name)
        self._next_refit_s = -np.inf if self._sources else np.inf
        self._fallbacks: dict[tuple[str, str], int] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The K columns' names, in their order."""
        return self._names

    @property
    def fallbacks(self) -> Mapping[tuple[str, str], int]:
        """How often a source failed, by its first column's name and the reason."""
        return self._fallbacks

    @property
    def next_refit_s(self) -> float:
        """When sources are asked next whether they fit again; inf without any."""
        return self._next_refit_s

    def widened(self, traffic: Traffic, block: Block) -> Block:
        """`block` with the sources' columns behind its features, never NaN but for rows that came too late; each source takes it in.

        Columns of another shape than the source's names promise are a failure too.
        """
        if not self._sources:
            return block
        rows, ticks = [block.row_features], [block.tick_features]
        for source in self._sources:
            shapes = (len(block.ts), len(source.names)), (len(block.tick_of), len(source.names))
            try:
                of_rows, of_ticks = source.columns(traffic, block)
                if (of_rows.shape, of_ticks.shape) != shapes:
                    raise PredictorError(f"columns of shapes {of_rows.shape} and {of_ticks.shape}, expected {shapes[0]} and {shapes[1]}")
            except PredictorError:
                self._count(source, "failed")
                of_rows, of_ticks = (np.full(shape, ABSENT) for shape in shapes)
            rows.append(_known(of_rows))
            ticks.append(_known(of_ticks))
        if not len(block.row_features):
            rows = [block.row_features, *(columns[:0] for columns in rows[1:])]
        late = np.flatnonzero(~np.isfinite(block.row_features[:, 0]))
        row_features = np.concatenate(rows, axis=1)
        row_features[late] = np.nan
        return replace(block, row_features=row_features, tick_features=np.concatenate(ticks, axis=1))

    def refit(self, now_s: float) -> bool:
        """Ask each source to fit again, if that is due at `now_s`; whether one did. One that fails keeps what it had, and is counted."""
        if now_s < self._next_refit_s:
            return False
        self._next_refit_s = (now_s // REFIT_S + 1.0) * REFIT_S
        fitted = False
        for source in self._sources:
            try:
                fitted |= source.refit(now_s)
            except PredictorError:
                self._count(source, "fit failed")
        return fitted

    def snapshot(self) -> dict[str, np.ndarray]:
        """Everything that the sources learned, as arrays; none without sources."""
        if not self._sources:
            return {}
        arrays = {f"{i}/{name}": value for i, source in enumerate(self._sources) for name, value in source.snapshot().items()}
        return {**arrays, "names": _packed(self._names), "next_refit_s": np.array([self._next_refit_s])}

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        """Take over a snapshot of the same sources. Raises `PredictorError` for another one."""
        if not self._sources and not snapshot:
            return
        found = bytes(snapshot["names"]).decode(errors="replace").split() if "names" in snapshot else []
        if tuple(found) != self._names or "next_refit_s" not in snapshot:
            raise PredictorError(f"a snapshot of feature sources of {found}, expected {list(self._names)}")
        for i, source in enumerate(self._sources):
            source.restore({name.removeprefix(f"{i}/"): value for name, value in snapshot.items() if name.startswith(f"{i}/")})
        self._next_refit_s = float(snapshot["next_refit_s"][0])

    def _count(self, source: FeatureSource, reason: str) -> None:
        key = (source.names[0] if source.names else type(source).__name__, reason)
        self._fallbacks[key] = self._fallbacks.get(key, 0) + 1


def joined(blocks: Sequence[Block]) -> Block:
    """Blocks in a row, at least one, as the block that they would have been at once."""
    before = np.cumsum([0, *(len(block.ticks) for block in blocks)])
    parts = {
        name: np.concatenate([getattr(block, name) for block in blocks])
        for name in ("ts", "model", "user", "count", "row_features", "ticks", "tick_model", "tick_features")
    }
    tick_of = np.concatenate([block.tick_of + shift for block, shift in zip(blocks, before[:-1].astype(np.int32), strict=True)])
    return Block(from_s=blocks[0].from_s, until_s=blocks[-1].until_s, tick_of=tick_of, **parts)


def _known(columns: Floats32) -> Floats32:
    return np.where(np.isfinite(columns), columns, ABSENT).astype(np.float32)


def _packed(names: tuple[str, ...]) -> np.ndarray:
    return np.frombuffer(" ".join(names).encode(), dtype=np.uint8).copy()

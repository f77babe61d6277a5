"""The file of tenants: which models are whose, and what each may hold of a node beyond demand (`core.quotas`).

Read once, by whoever plans; nodes are told with their plans. Covers neither keys of callers (`api.keys`) nor figures of tenants.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from prefetcher.config import parse_bytes
from prefetcher.core.types import TenantQuota
from prefetcher.errors import SettingsError

__all__ = ["read_quotas"]

_SHAPE = '[{"tenant": "acme", "models": ["acme/*"], "share": 0.3}], with a share of a node\'s memory, or bytes as "20GB", or both'


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    tenant: str
    models: list[str]
    share: float | None = None
    bytes: int | str | None = None


def read_quotas(path: Path | None) -> tuple[TenantQuota, ...]:
    """The quotas of a JSON file of tenants, in its order; none without a file.

    Raises:
        SettingsError: it can't be read, or is no list of tenants.
    """
    if path is None:
        return ()
    where = f"PREFETCHER_DECISION__TENANTS_FILE, {path}"
    try:
        entries = msgspec.json.decode(path.expanduser().read_bytes(), type=list[_Entry])
    except OSError as exc:
        raise SettingsError(f"{where}: it can't be read ({exc.strerror}); name another file") from exc
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise SettingsError(f"{where}: {exc}; expected {_SHAPE}") from exc
    found: dict[str, TenantQuota] = {}
    for entry in entries:
        try:
            most_bytes = None if entry.bytes is None else parse_bytes(entry.bytes)
        except ValueError as exc:
            raise SettingsError(f"{where}: tenant {entry.tenant!r}: {exc}") from exc
        wrong = ""
        if not entry.tenant or entry.tenant in found:
            wrong = "has no name of its own"
        elif not entry.models:
            wrong = "names no model; write names, or patterns as acme/*"
        elif entry.share is None and most_bytes is None:
            wrong = "has neither a share nor bytes"
        elif entry.share is not None and not 0.0 <= entry.share <= 1.0:
            wrong = f"has a share of {entry.share:g}, expected 0 to 1"
        if wrong:
            raise SettingsError(f"{where}: tenant {entry.tenant!r} {wrong}; expected {_SHAPE}")
        found[entry.tenant] = TenantQuota(entry.tenant, tuple(entry.models), entry.share, most_bytes)
    return tuple(found.values())

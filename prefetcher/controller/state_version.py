"""The format of what is stored in the state server: an older one is taken over at the start, a newer one refused.

Version 1, which wrote no number, had one position in one request log where version 2 has one for each partition; the learner reads both.
"""

from __future__ import annotations

from prefetcher.errors import SettingsError
from prefetcher.ports import StateStore
from prefetcher.secrets import without_secrets
from prefetcher.telemetry.logs import log

__all__ = ["VERSION", "check_version"]

VERSION = 2
_KEY = "prefetcher:{installation}:version"


def check_version(state: StateStore, url: str) -> None:
    """Sees that this program can go on from what is stored at `url`, and notes its own version.

    Raises:
        SettingsError: it was written by a newer program.
        UnavailableError: the state store does not answer.
    """
    raw = state.read(_KEY)
    found = int(raw) if raw is not None and raw.isdigit() else None
    if found is not None and found > VERSION:
        raise SettingsError(
            f"what is stored at {without_secrets(url)} has format {found}, this program knows up to {VERSION}: "
            "install the newer program again, or name another state server or folder"
        )
    if found != VERSION:
        if found is not None:
            log().info("state_migrated", before=found, now=VERSION)
        state.write({_KEY: str(VERSION).encode()})

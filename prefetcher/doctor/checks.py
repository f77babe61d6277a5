"""All checks in the order that they are told, and how they are told: lines for people, JSON for scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from prefetcher.config import Settings, load_settings
from prefetcher.doctor import files, memory, runtime, servers, store
from prefetcher.doctor.finding import Finding, fail
from prefetcher.errors import PrefetcherError, SettingsError

__all__ = ["CHECKS", "examine", "tell"]

CHECKS: dict[str, Callable[[Settings], Finding]] = {
    "settings": runtime.check_settings,
    "runtime": runtime.check_kernels,
    "memory": memory.check_amount,
    "memory lock": memory.check_lock_limit,
    "host tier": memory.check_place,
    "huge pages": memory.check_pages,
    "open files": files.check_open_files,
    "models": files.check_models,
    "disk": files.check_disk,
    "state folder": files.check_state_folder,
    "gpu": runtime.check_cuda,
    "store": store.check_store,
    "broker": servers.check_broker,
    "state server": servers.check_state_server,
    "clock": servers.check_clock,
}
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def examine(config: Path | None = None) -> Iterator[tuple[str, Finding]]:
    """Every check with what it found, as it is found. Settings that can't be read are a finding too: the others then go by the defaults."""
    try:
        settings = load_settings(None, config)
    except SettingsError as exc:
        yield "settings", fail(str(exc), "correct them; what follows goes by the defaults")
        defaults = {name: kind.get_default(call_default_factory=True) for name, kind in Settings.model_fields.items()}
        settings = Settings.model_construct(**defaults)
        checks = {name: check for name, check in CHECKS.items() if name != "settings"}
    else:
        checks = CHECKS
    for name, check in checks.items():
        try:
            yield name, check(settings)
        except (PrefetcherError, OSError) as exc:
            yield name, fail(f"can't be looked at: {exc}", "look after that, and ask again")


def tell(config: Path | None, *, as_json: bool) -> bool:
    """Prints all findings; whether nothing fails."""
    if as_json:
        found = list(examine(config))
        is_well = all(one.level != "fail" for _, one in found)
        checks: list[dict[str, Any]] = [{"check": name, **msgspec.to_builtins(one)} for name, one in found]
        print(msgspec.json.format(msgspec.json.encode({"ok": is_well, "checks": checks}), indent=2).decode())
        return is_well
    console = Console()
    width = max(map(len, CHECKS))
    levels: list[str] = []
    for name, one in examine(config):
        levels.append(one.level)
        line = Text.assemble((f"{one.level:<4}", _COLOURS[one.level]), f"  {name:<{width}}  {one.found}")
        console.print(line, soft_wrap=True)
        if one.todo:
            console.print(Text(f"      {'':<{width}}  → {one.todo}"), soft_wrap=True)
    failed, warned = levels.count("fail"), levels.count("warn")
    console.print(f"{len(levels)} checks: {levels.count('ok')} ok, {warned} to look at, {failed} failed", soft_wrap=True, highlight=False)
    return not failed

"""Options that are settings: which setting each one of `prefetcher up` sets, and what help says of its default.

One table serves both, so that neither can differ from the other or from the settings. Which options there are is `cli`'s matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer.core

__all__ = ["OF_REPLAY", "OF_UP", "default_in_words", "overrides_of", "with_defaults"]

#: Group and name of the setting, by the option's name in Python.
OF_UP: dict[str, tuple[str, str]] = {
    "models": ("node", "models_dir"),
    "store": ("store", "url"),
    "host_bytes": ("node", "host_bytes"),
    "host_dir": ("node", "host_dir"),
    "paths_dir": ("node", "paths_dir"),
    "lock": ("node", "lock"),
    "link_bytes_per_s": ("node", "link_bytes_per_s"),
    "socket": ("node", "socket"),
    "state_dir": ("state", "dir"),
    "state_url": ("state", "url"),
    "host": ("api", "host"),
    "port": ("api", "port"),
    "observe": ("decision", "observe"),
    "follow": ("stream", "follow"),
    "map_": ("stream", "map"),
    "tz": ("stream", "tz"),
    "tick_s": ("decision", "tick_s"),
    "hold_s": ("decision", "hold_s"),
    "price": ("decision", "price"),
    "control_ratio": ("decision", "control_ratio"),
    "snapshot_s": ("state", "snapshot_s"),
    "log_level": ("log", "level"),
    "log_format": ("log", "format"),
}
#: A replay takes the price that a node would decide by.
OF_REPLAY: dict[str, tuple[str, str]] = {"price": ("decision", "price")}


def overrides_of(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The given options of `up` by group and name, None where one was not given; others than those of the table are left out."""
    found: dict[str, dict[str, Any]] = {}
    for option, (group, name) in OF_UP.items():
        found.setdefault(group, {})[name] = None if options[option] is False else options[option]
    return found


def default_in_words(group: str, name: str) -> str:
    """A setting's default as it could be given on the command line; empty where there is none, and for a switch that is off."""
    from prefetcher.config import Settings

    kind: Any = Settings.model_fields[group].annotation
    default = kind.model_fields[name].default
    if default is None or default is False:
        return ""
    if "bytes" in name:
        return next((f"{default / unit:g}{words}" for unit, words in ((1e9, "GB"), (1e6, "MB")) if default >= unit), str(default))
    return str(default) if isinstance(default, str | Path | int) else f"{default:g}"


def with_defaults(settings: Mapping[str, tuple[str, str] | str]) -> type[typer.core.TyperCommand]:
    """A command whose help names the defaults of the settings that its options set, or what is given as one instead; settings are looked
    up when help is asked for."""

    class Command(typer.core.TyperCommand):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            for param in self.params:
                found = settings.get(param.name or "", "")
                said = found if isinstance(found, str) else default_in_words(*found)
                if said and isinstance(param, typer.core.TyperOption) and "[default: " not in (param.help or ""):
                    param.help = f"{param.help}  [default: {said}]"
            super().format_help(ctx, formatter)

    return Command

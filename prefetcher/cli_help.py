"""What `prefetcher --help` looks like: a table of contents, by what somebody wants to do. Commands that no section names come last."""

from __future__ import annotations

from typing import Any

import typer.core

__all__ = ["SECTIONS", "Contents"]

#: Commands by section, in the order that they are told.
SECTIONS: dict[str, tuple[str, ...]] = {
    "See what it would save": ("demo", "replay", "tune", "backtest", "predictors"),
    "Set a machine up": ("doctor", "manifest", "publish", "compile", "config"),
    "Run it": ("up", "agent", "controller", "ingest", "api", "scheduler"),
    "Look": ("status", "route", "path", "report", "explain", "ledger", "jobs", "nodes", "windows"),
    "Say what comes, and act by hand": ("hint", "schedule", "pin", "unpin", "load", "evict", "off", "on", "observe", "forget"),
    "Measure it": ("bench",),
}
#: A first sentence is at most so long.
_LIMIT = 200


class Contents(typer.core.TyperGroup):
    """The program's commands by section."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        shown = {name: command for name, command in commands.items() if command is not None and not command.hidden}
        named = {name for names in SECTIONS.values() for name in names}
        sections = {**SECTIONS, "More": tuple(name for name in shown if name not in named)}
        for title, names in sections.items():
            rows = [(name, shown[name].get_short_help_str(_LIMIT)) for name in names if name in shown]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

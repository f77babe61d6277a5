"""The command line's commands of windows: what is in force, how it came about, pins, and the way back.

Asks a running endpoint; covers options and what is printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from prefetcher.cli_jobs import Json, Url, _print_json, _table, _when, span_of
from prefetcher.errors import UsageError

__all__ = ["add_window_commands"]

_DEFAULT_URL = "http://127.0.0.1:8371"
Segment = Annotated[str, typer.Argument(help="The segment's name, as the list has it.")]


def add_window_commands(app: typer.Typer) -> None:
    """Adds them to the program's commands."""
    windows_app = typer.Typer(no_args_is_help=True, help="How early, how far ahead and how long prefetches are, by segment of models.")
    app.add_typer(windows_app, name="windows")

    @windows_app.command("list")
    def windows_list(url: Url = _DEFAULT_URL, json: Json = False) -> None:
        """Lists the windows in force, by segment of models."""
        from prefetcher.api.client import get

        found = get(url, "/v1/windows?count=1")
        if json:
            _print_json(found)
            return
        rows = [
            (s["name"], s["words"], "pinned" if s["pinned"] else "tuned", _when(s["since_s"]) if s["since_s"] else "", s["why"])
            for s in found["segments"]
        ]
        rows.append(("all other models" if rows else "all models", found["rest_words"], "", "", ""))
        typer.echo(_table(("segment", "window", "kept", "since", "why"), rows))
        watched = found["watched_from_s"]
        typer.echo(f"version {found['version']}" + (f", watched since {_when(watched)}" if watched is not None else ""))

    @windows_app.command("history")
    def windows_history(
        url: Url = _DEFAULT_URL,
        count: Annotated[int, typer.Option(help="How many.", min=1, max=1000)] = 20,
        json: Json = False,
    ) -> None:
        """Lists what changed windows, newest first, and why."""
        from prefetcher.api.client import get

        found = get(url, f"/v1/windows?count={count}")["events"]
        if json:
            _print_json(found)
            return
        rows = [(_when(e["at_s"]), str(e["version"]), e["act"], e["by"], e["segment"] or "all", e["why"]) for e in found]
        typer.echo(_table(("at", "version", "what", "by", "segment", "why"), rows) if rows else "nothing has changed windows yet")

    @windows_app.command("pin")
    def windows_pin(
        segment: Segment,
        lead: Annotated[str | None, typer.Option("--lead", help="How early, as 5m; `any` for at any time.")] = None,
        horizon: Annotated[str | None, typer.Option("--horizon", help="How far ahead, as 15m; `own` for the deciding expert's.")] = None,
        hold: Annotated[str | None, typer.Option("--hold", help="How long unused, as 10m.")] = None,
        url: Url = _DEFAULT_URL,
    ) -> None:
        """Keeps a segment's window as it is, or as given, whatever the tuner finds."""
        from prefetcher.api.client import post
        from prefetcher.core.windows import NO_LEAD_LIMIT_S, OWN_HORIZON_S

        body = {
            "segment": segment,
            "lead_s": NO_LEAD_LIMIT_S if lead == "any" else _span(lead, "lead"),
            "horizon_s": OWN_HORIZON_S if horizon == "own" else _span(horizon, "horizon"),
            "hold_s": _span(hold, "hold"),
        }
        answer = post(url, "/v1/windows:pin", {key: value for key, value in body.items() if value is not None})
        typer.echo(f"{segment} is pinned: {_of(answer, segment)['words']}")

    @windows_app.command("unpin")
    def windows_unpin(segment: Segment, url: Url = _DEFAULT_URL) -> None:
        """Lets the tuner change a segment's window again."""
        from prefetcher.api.client import post

        post(url, "/v1/windows:unpin", {"segment": segment})
        typer.echo(f"{segment} is unpinned; the tuner may change it")

    @windows_app.command("rollback")
    def windows_rollback(
        version: Annotated[int | None, typer.Argument(help="The version; without it, the last one that was different.")] = None,
        url: Url = _DEFAULT_URL,
    ) -> None:
        """Puts the windows of an earlier version in force again."""
        from prefetcher.api.client import post

        answer = post(url, "/v1/windows:rollback", {} if version is None else {"version": version})
        typer.echo(f"{answer['events'][0]['why']}; now version {answer['version']}")


def _span(text: str | None, option: str) -> float | None:
    return None if text is None else span_of(text, option)


def _of(answer: Mapping[str, Any], segment: str) -> Mapping[str, Any]:
    found: list[Mapping[str, Any]] = [each for each in answer["segments"] if each["name"] == segment]
    if not found:
        raise UsageError(f"the endpoint no longer has a segment {segment}")
    return found[0]

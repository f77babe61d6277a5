"""The command line's `report`: what prefetching earned and wasted over a window, from a running endpoint or from the topic alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prefetcher.report.messages import BY

__all__ = ["add_report_command"]

_DEFAULT_URL = "http://127.0.0.1:8371"


def add_report_command(app: typer.Typer) -> None:
    """Adds it to the program's commands."""

    @app.command()
    def report(
        since: Annotated[str, typer.Option(help="From when on: 24h or 7d ago, a time, or 0: since the installation.")] = "24h",
        until: Annotated[str | None, typer.Option(help="Until when, in the same way; now where absent.")] = None,
        by: Annotated[str | None, typer.Option(help=f"Break down by one of {', '.join(BY)}.")] = None,
        most: Annotated[int, typer.Option(help="Most lines of the breakdown.", min=1)] = 20,
        json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
        parquet: Annotated[Path | None, typer.Option(help="Folder to write totals.parquet and orders.parquet to.")] = None,
        rebuild: Annotated[bool, typer.Option("--rebuild", help="Add up the outcomes topic alone; asks no endpoint.")] = False,
        url: Annotated[str, typer.Option("--url", envvar="PREFETCHER_URL", help="Address of a running `prefetcher up`.")] = _DEFAULT_URL,
        config: Annotated[
            Path | None, typer.Option("--config", envvar="PREFETCHER_CONFIG", help="TOML file of settings, for --rebuild.")
        ] = None,
        state_dir: Annotated[Path | None, typer.Option(help="Folder of the streams, for --rebuild where there is no broker.")] = None,
    ) -> None:
        """Says what was waited, held, earned and wasted, by all nodes together, and whether first requests were quick enough."""
        from prefetcher.report import command

        asked = command.Asked(since, until, by, most, as_json=json, parquet=parquet)
        if rebuild:
            from prefetcher.config import load_settings

            typer.echo(command.rebuilt(load_settings({"state": {"dir": state_dir}}, config), asked))
        else:
            typer.echo(command.asked_of(url, asked))

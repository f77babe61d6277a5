"""The command line's `doctor`. Covers its options and exit code; what is checked is `prefetcher.doctor`'s."""

from __future__ import annotations

from typing import Annotated

import typer

from prefetcher.cli_roles import Config

__all__ = ["add_doctor_command"]


def add_doctor_command(app: typer.Typer) -> None:
    """Adds it to the program's commands."""

    @app.command()
    def doctor(config: Config = None, json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
        """Checks this machine and the servers that settings name, and says what to change; changes nothing."""
        from prefetcher.doctor.checks import tell

        if not tell(config, as_json=json):
            raise typer.Exit(1)

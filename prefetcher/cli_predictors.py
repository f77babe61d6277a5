"""The command line's commands about predictors: how good they are on a log, and which are in force.

Covers options and what is printed; what commands do is in the modules that they call.
"""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from prefetcher.cli_roles import Config
from prefetcher.errors import InputError

__all__ = ["add_predictor_commands"]

_DEFAULT_URL = "http://127.0.0.1:8371"


def add_predictor_commands(app: typer.Typer) -> None:
    """Adds them to the program's commands."""

    @app.command()
    def backtest(
        log: Annotated[Path, typer.Argument(help="Request log: parquet, CSV or JSONL, plain or compressed.")],
        catalog: Annotated[Path | None, typer.Option(help="Models beside those of the log: CSV or JSON, as chat,16GB.")] = None,
        predictors: Annotated[str | None, typer.Option(help="Only these, separated by commas; all; else all but the costly ones.")] = None,
        origins: Annotated[int, typer.Option(help="Stretches of scored time that are compared.", min=1, max=100)] = 5,
        warmup_ratio: Annotated[float, typer.Option(help="Share of the time that is not scored.")] = 0.3,
        waste: Annotated[float, typer.Option(help="Wasted prefetches that a start may cost.")] = 1.0,
        most_models: Annotated[int, typer.Option(help="Of more models, a sample by hash is taken.", min=1)] = 2000,
        seed: Annotated[int, typer.Option(help="Seed of everything random.", min=0, max=2**63 - 1)] = 0,
        map_: Annotated[str | None, typer.Option("--map", help="Field map, as ts=startTime,model=request.model.")] = None,
        tz: Annotated[str | None, typer.Option(help="Time zone of times without one.")] = None,
        strict: Annotated[bool, typer.Option("--strict", help="Fail at the first bad line.")] = False,
        json: Annotated[Path | None, typer.Option(help="File for all figures.")] = None,
        report: Annotated[Path | None, typer.Option(help="File for the page, as report.html.")] = None,
    ) -> None:
        """Measures on a request log how well every predictor foresees starts: models idle now and needed next."""
        if not log.exists():
            raise InputError("there is no such log; name a request log, parquet, CSV or JSON lines", path=str(log))
        from prefetcher.backtest.command import backtest_command

        backtest_command(
            log=log,
            catalog=catalog,
            predictors=predictors,
            origins=origins,
            warmup_ratio=warmup_ratio,
            waste=waste,
            most_models=most_models,
            seed=seed,
            map=map_,
            tz=tz,
            strict=strict,
            json_to=json,
            report=report,
        )

    @app.command()
    def predictors(
        url: Annotated[str, typer.Option("--url", envvar="PREFETCHER_URL", help="Address of a running `prefetcher up`.")] = _DEFAULT_URL,
        json: Annotated[bool, typer.Option("--json", help="Print JSON, with all versions and scores.")] = False,
        config: Config = None,
        state_dir: Annotated[Path | None, typer.Option(help="Folder of the state, where artifacts are kept unless set.")] = None,
    ) -> None:
        """Lists predictors: which speak, what trained them, how they did against their baseline, and what stood in for them."""
        from prefetcher.config import load_settings
        from prefetcher.predictors_view import predictors_of, table_of

        found = predictors_of(load_settings({"state": {"dir": state_dir}}, config), url)
        if json:
            typer.echo(dumps(found, indent=2, ensure_ascii=False))
            return
        from rich.console import Console

        console = Console()
        console.print(table_of(found))
        for problem in found["problems"]:
            typer.echo(f"note: {problem}", err=True)

    @app.command()
    def explain(
        model: Annotated[str, typer.Argument(help="The model's name.")],
        url: Annotated[str, typer.Option("--url", envvar="PREFETCHER_URL", help="Address of a running `prefetcher up`.")] = _DEFAULT_URL,
        json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
        config: Config = None,
        state_dir: Annotated[Path | None, typer.Option(help="Folder of the state, where artifacts are kept unless set.")] = None,
    ) -> None:
        """Says why a model is expected: when it is busy, how likely it is used soon, and what its last prefetches were made for."""
        from prefetcher.config import load_settings
        from prefetcher.explain_view import explanation_of, lines_of

        found = explanation_of(load_settings({"state": {"dir": state_dir}}, config), url, model)
        if json:
            typer.echo(dumps(found, indent=2, ensure_ascii=False))
        else:
            typer.echo("\n".join(lines_of(found)))
            for problem in found["problems"]:
                typer.echo(f"note: {problem}", err=True)
        if not any(found[what] for what in ("season", "residency", "forecast", "orders")):
            raise typer.Exit(1)

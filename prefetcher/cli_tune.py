"""The command `prefetcher tune`: options and what they may be; what it does is `prefetcher.tuning.command`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prefetcher.cli_settings import OF_REPLAY, with_defaults
from prefetcher.errors import InputError, UsageError

__all__ = ["add_tune_command"]


def add_tune_command(app: typer.Typer) -> None:
    """Adds it to the program's commands."""

    @app.command(cls=with_defaults(OF_REPLAY))
    def tune(
        log: Annotated[Path, typer.Argument(help="Request log: parquet, CSV or JSONL, plain or compressed.")],
        out: Annotated[Path | None, typer.Option(help="Folder for windows.json, tune.json and report.html.")] = None,
        catalog: Annotated[Path | None, typer.Option(help="Sizes of models: CSV or JSON, as chat,16GB.")] = None,
        models: Annotated[Path | None, typer.Option(help="A folder of models to take sizes from.")] = None,
        default_bytes: Annotated[str | None, typer.Option(help="Size of every model that no catalog names.")] = None,
        capacity_ratio: Annotated[float | None, typer.Option(help="Capacity as a share of the catalog's bytes.")] = None,
        host_bytes: Annotated[str | None, typer.Option(help="Capacity of each node in bytes, as 80GB.")] = None,
        link_bytes_per_s: Annotated[str, typer.Option(help="Speed from disk to memory.")] = "3.5e9",
        nodes: Annotated[int, typer.Option(help="Number of nodes.", min=1, max=10_000)] = 1,
        price: Annotated[float | None, typer.Option(help="Seconds of waiting that a GB held for an hour is worth.")] = None,
        waste_budget: Annotated[float | None, typer.Option(help="GB·h a day that prefetches may hold which nobody uses.")] = None,
        windows: Annotated[Path | None, typer.Option(help="The book to begin with; else the default window for all.")] = None,
        most_models: Annotated[int, typer.Option(help="Of more models, a sample by hash is taken.", min=1)] = 2000,
        seed: Annotated[int, typer.Option(help="Seed of everything random.", min=0, max=2**63 - 1)] = 0,
        map_: Annotated[str | None, typer.Option("--map", help="Field map, as ts=startTime,model=request.model.")] = None,
        tz: Annotated[str | None, typer.Option(help="Time zone of times without one.")] = None,
        strict: Annotated[bool, typer.Option("--strict", help="Fail at the first bad line.")] = False,
        json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Tunes on a request log how early, how far ahead and how long prefetches are, by segment of models."""
        if not log.exists():
            raise InputError("there is no such log; name a request log, parquet, CSV or JSON lines", path=str(log))
        from prefetcher.config import parse_bytes
        from prefetcher.tuning.command import tune_command

        try:
            sizes = {
                "host_bytes": None if host_bytes is None else parse_bytes(host_bytes),
                "default_bytes": None if default_bytes is None else parse_bytes(default_bytes),
            }
            link = float(parse_bytes(link_bytes_per_s))
        except ValueError as error:
            raise UsageError(str(error)) from error
        tune_command(
            log=log,
            out=out,
            catalog=catalog,
            models=models,
            capacity_ratio=capacity_ratio,
            link_bytes_per_s=link,
            nodes=nodes,
            price=price,
            waste_budget=waste_budget,
            book=windows,
            most_models=most_models,
            seed=seed,
            map=map_,
            tz=tz,
            strict=strict,
            as_json=json,
            **sizes,
        )

"""The command line's `hint`: says that a model will be used soon. Covers options and what is printed; `prefetcher.client` sends it."""

from __future__ import annotations

from typing import Annotated

import typer

from prefetcher.errors import UsageError

__all__ = ["add_hint_command"]

_DEFAULT_URL = "http://127.0.0.1:8371"
_KINDS = ("load", "intent")
_STATES = {
    "resident": "it is in memory already",
    "moving": "it is on its way already",
    "likely": "it was expected anyhow",
    "unlikely": "nothing else says that it will be used",
}


def add_hint_command(app: typer.Typer) -> None:
    """Adds it to the program's commands."""

    @app.command()
    def hint(
        model: Annotated[str | None, typer.Argument(help="The model's name; without it, name a --surface.")] = None,
        in_: Annotated[str, typer.Option("--in", help="How long from now it is expected, as 5s, 10m or 1h.")] = "0s",
        ttl: Annotated[str, typer.Option("--ttl", help="How long after that it may still come.")] = "2m",
        surface: Annotated[str, typer.Option(help="Where it will be used, as chat.")] = "",
        session: Annotated[str | None, typer.Option(help="Hints of one session for one model fold into one.")] = None,
        user: Annotated[str | None, typer.Option(help="For whom, as request rows carry it.")] = None,
        kind: Annotated[str, typer.Option(help="load, or intent where somebody may be about to use it.")] = "load",
        source: Annotated[str, typer.Option(help="Who says so, where the endpoint has no keys.")] = "",
        url: Annotated[str, typer.Option("--url", envvar="PREFETCHER_URL", help="Address of a running `prefetcher up`.")] = _DEFAULT_URL,
        json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    ) -> None:
        """Says that a model will be used soon, so that it is there by then."""
        from prefetcher.cli_jobs import span_of
        from prefetcher.client import Client

        if not model and not surface:
            raise UsageError("name a model, or with --surface the place where something will be used")
        if kind not in _KINDS:
            raise UsageError(f"--kind is {kind[:40]!r}; there are {' and '.join(_KINDS)}")
        with Client(url) as client:
            taken = client.hint(
                model,
                in_s=span_of(in_, "in"),
                ttl_s=span_of(ttl, "ttl"),
                session=session,
                user=user,
                surface=surface,
                kind="intent" if kind == "intent" else "load",
                source=source,
            )
        if json:
            import msgspec

            typer.echo(msgspec.json.format(msgspec.json.encode(taken), indent=2).decode())
            return
        if taken.model is not None:
            chance = "" if taken.probability is None else f" (forecast: {100 * taken.probability:.0f} %)"
            typer.echo(f"hinted {taken.model}: {_STATES.get(taken.state, taken.state)}{chance}")
            return
        found = ", ".join(f"{one.model} {100 * one.probability:.0f} %" for one in taken.likely)
        typer.echo(f"hinted {surface}: {found or 'nothing is known of this place yet'}")

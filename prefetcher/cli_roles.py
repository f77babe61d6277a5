"""The command line's commands for those who run many machines: one role a process, settings, ledgers, users.

Covers options and what is printed; what commands do is in the modules that they call.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefetcher.cli_settings import OF_UP, with_defaults
from prefetcher.errors import UnavailableError, UsageError
from prefetcher.process import settle_memory

if TYPE_CHECKING:
    from prefetcher.app import App

__all__ = ["add_commands", "run_app"]

#: Ports of roles where none is set, so that all of them find room on one machine.
_PORTS = {"ingest": 8372, "controller": 8373, "api": 8371, "scheduler": 8374, "agent": 8375}

Config = Annotated[Path | None, typer.Option("--config", envvar="PREFETCHER_CONFIG", help="TOML file of settings.")]
Host = Annotated[str | None, typer.Option(help="Address of the HTTP endpoint.")]
Port = Annotated[int | None, typer.Option(help="Port of the HTTP endpoint; 0 takes a free one.")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.")]
LogFormat = Annotated[str | None, typer.Option(help="auto, human or json.")]


def run_app(application: App, said: str) -> None:
    """Runs it until a signal; says where it answers, and why it ended by itself."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: application.ask_to_stop())
    application.start()
    settle_memory()
    typer.echo(f"{said} is up at {application.address}")
    try:
        application.wait()
    finally:
        application.stop()
    if application.failure:
        raise UnavailableError(application.failure)
    # Whoever started it may read no more; what print keeps in its buffer would then fail the exit.
    with contextlib.suppress(OSError):
        os.write(1, f"stopped; what was learned is in {application.learned_in}\n".encode())


def _run_role(role: str, config: Path | None, overrides: dict[str, dict[str, Any]]) -> None:
    from prefetcher.config import load_settings
    from prefetcher.telemetry.logs import configure

    settings = load_settings(overrides, config)
    if "port" not in settings.api.model_fields_set:
        overrides["api"]["port"] = _PORTS[role]
        settings = load_settings(overrides, config)
    configure(settings.log.level, settings.log.format)
    from prefetcher.app import App, Role

    run_app(App(settings, [Role(role)]), f"prefetcher {role}")


def _of_role(role: str) -> dict[str, tuple[str, str] | str]:
    """What help says of the defaults of a role's options: settings' own, but for the port."""
    return {**OF_UP, "port": str(_PORTS[role])}


def add_commands(app: typer.Typer) -> None:
    """Adds them to the program's commands."""

    def add_role(role: str, text: str) -> None:
        def run(
            config: Config = None,
            host: Host = None,
            port: Port = None,
            log_level: LogLevel = None,
            log_format: LogFormat = None,
        ) -> None:
            _run_role(role, config, {"api": {"host": host, "port": port}, "log": {"level": log_level, "format": log_format}})

        run.__doc__ = text
        app.command(name=role, cls=with_defaults(_of_role(role)))(run)

    add_role("ingest", "Counts requests from the broker into shared tables; run as many as there are partitions.")
    add_role("controller", "Learns and plans for every node; run two, one leads and the other stands by.")
    add_role("api", "Answers hints, requests and questions over HTTP; run as many as you like.")
    add_role("scheduler", "Runs jobs at their time: one process at a time runs each.")

    @app.command(cls=with_defaults(_of_role("agent")))
    def agent(
        config: Config = None,
        name: Annotated[str | None, typer.Option(help="The node's name.")] = None,
        models: Annotated[Path | None, typer.Option(help="Folder of models, one folder of safetensors files each.")] = None,
        store: Annotated[str | None, typer.Option(help="Where models are fetched from: a folder, or s3://bucket/folder.")] = None,
        host_bytes: Annotated[str | None, typer.Option(help="Host memory for weights, as 8GB, 8GiB or 8e9.")] = None,
        socket: Annotated[Path | None, typer.Option(help="Where programs ask for leases.")] = None,
        state_dir: Annotated[Path | None, typer.Option(help="Folder of what the node keeps on its disk.")] = None,
        host: Host = None,
        port: Port = None,
        log_level: LogLevel = None,
        log_format: LogFormat = None,
    ) -> None:
        """Loads and evicts weights on this node as the controller plans, and hands them to programs."""
        node = {"name": name, "models_dir": models, "host_bytes": host_bytes, "socket": socket}
        overrides: dict[str, dict[str, Any]] = {
            "node": node,
            "store": {"url": store},
            "state": {"dir": state_dir},
            "api": {"host": host, "port": port},
            "log": {"level": log_level, "format": log_format},
        }
        _run_role("agent", config, overrides)

    config_app = typer.Typer(no_args_is_help=True, help="Settings as they are.")
    app.add_typer(config_app, name="config")

    @config_app.command("check")
    def config_check(config: Config = None, json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
        """Prints the effective settings, passwords hidden, and says what is wrong with them; exit code 1 if anything is.

        Asks the state server and the broker, and makes the topics that are missing there.
        """
        from prefetcher.config import load_settings, shown
        from prefetcher.config_check import problems_of, table_of

        settings = load_settings(None, config)
        if json:
            from json import dumps

            wrong = problems_of(settings)
            typer.echo(dumps({"settings": shown(settings), "wrong": wrong}, indent=2))
            raise typer.Exit(1 if wrong else 0)
        typer.echo(table_of(settings))
        found = problems_of(settings)
        for problem in found:
            typer.echo(f"wrong: {problem}")
        if found:
            raise typer.Exit(1)
        typer.echo("nothing is wrong")

    ledger_app = typer.Typer(no_args_is_help=True, help="What prefetches earned and wasted.")
    app.add_typer(ledger_app, name="ledger")

    @ledger_app.command("rebuild")
    def ledger_rebuild(
        config: Config = None,
        state_dir: Annotated[Path | None, typer.Option(help="Folder of the streams, where there is no broker.")] = None,
        json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Adds the ledgers of all nodes up again from the outcomes topic alone."""
        from prefetcher.config import load_settings
        from prefetcher.ledger_view import rebuilt

        typer.echo(rebuilt(load_settings({"state": {"dir": state_dir}}, config), as_json=json))

    @app.command()
    def forget(
        user: Annotated[str, typer.Option("--user", help="The user's id as requests carry it.")],
        config: Config = None,
        state_dir: Annotated[Path | None, typer.Option(help="Folder of the state server, where none is named.")] = None,
    ) -> None:
        """Deletes what is kept of a user; records in the topics go with their retention."""
        from prefetcher.app import forget_user
        from prefetcher.config import load_settings

        if not user:
            raise UsageError("--user is empty; give the user's id")
        found = forget_user(load_settings({"state": {"dir": state_dir}}, config), user)
        typer.echo("forgotten" if found else "nothing is kept of that user")

"""The command line: one main. Every command imports what it needs when it runs, so that help is quick.

Errors of the program are one line on standard error and an exit code: 2 for what can't be asked, 1 for what failed. Covers options and
exit codes; what commands do is in the modules that they call.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import signal
import sys
from json import dumps
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from prefetcher import __version__
from prefetcher.cli_acts import add_act_commands
from prefetcher.cli_doctor import add_doctor_command
from prefetcher.cli_help import Contents
from prefetcher.cli_hints import add_hint_command
from prefetcher.cli_jobs import add_job_commands
from prefetcher.cli_nodes import add_node_commands
from prefetcher.cli_predictors import add_predictor_commands
from prefetcher.cli_report import add_report_command
from prefetcher.cli_roles import Config, add_commands, run_app
from prefetcher.cli_settings import OF_REPLAY, OF_UP, overrides_of, with_defaults
from prefetcher.cli_tune import add_tune_command
from prefetcher.cli_windows import add_window_commands
from prefetcher.errors import InputError, PrefetcherError, UsageError

__all__ = ["app", "main"]

app = typer.Typer(
    name="prefetcher",
    cls=Contents,
    help="Brings model weights near before the request: replay a request log, or run it live on this machine.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

#: What the parser raises for a wrong command line; typer carries its own copy of click, or uses the installed one.
_CommandError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
#: More is a mistake, and sums would not fit into 64 bits.
_MOST_BYTES = 10**15
#: Each has its own caches in memory.
_MOST_NODES = 10_000
_BENCHES = (
    "load", "policies", "starts", "fit", "replay", "ingest", "ingest-crash", "bad-records", "hint", "hint-burst", "hint-value", "outage",
    "ab", "cluster", "cascade", "windows", "regime",
)  # fmt: skip
_DEFAULT_URL = "http://127.0.0.1:8371"


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"prefetcher {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Say which version this is, and end.")
    ] = False,
) -> None: ...


Url = Annotated[str, typer.Option("--url", envvar="PREFETCHER_URL", help="Address of a running `prefetcher up`.")]


@app.command(cls=with_defaults(OF_UP))
def up(
    models: Annotated[Path | None, typer.Option(help="Folder of models, one folder of safetensors files each.")] = None,
    store: Annotated[str | None, typer.Option(help="Where models are fetched from: a folder, or s3://bucket/folder.")] = None,
    host_bytes: Annotated[str | None, typer.Option(help="Host memory for weights, as 8GB, 8GiB or 8e9.")] = None,
    host_dir: Annotated[Path | None, typer.Option(help="A tmpfs folder for the host tier; else one is chosen.")] = None,
    paths_dir: Annotated[Path | None, typer.Option(help="A folder in which every model gets a path, for engines.")] = None,
    lock: Annotated[str | None, typer.Option(help="Lock weights in memory: auto, require or off.")] = None,
    link_bytes_per_s: Annotated[str | None, typer.Option(help="Disk to memory, before it was measured.")] = None,
    socket: Annotated[Path | None, typer.Option(help="Where programs ask for leases.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Folder of what was learned and of the request log.")] = None,
    state_url: Annotated[str | None, typer.Option(help="A Redis or Valkey server instead of the embedded one.")] = None,
    host: Annotated[str | None, typer.Option(help="Address of the HTTP endpoint.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the HTTP endpoint; 0 takes a free one.")] = None,
    observe: Annotated[bool, typer.Option("--observe", help="Decide and log, load nothing.")] = False,
    follow: Annotated[Path | None, typer.Option(help="A JSONL or CSV request log to follow.")] = None,
    map_: Annotated[str | None, typer.Option("--map", help="Field map of the followed log.")] = None,
    tz: Annotated[str | None, typer.Option(help="Time zone of times without one.")] = None,
    tick_s: Annotated[float | None, typer.Option(help="Seconds between plans.")] = None,
    hold_s: Annotated[float | None, typer.Option(help="Seconds that a prefetch may stay unused; six times that while likely.")] = None,
    price: Annotated[float | None, typer.Option(help="Seconds of waiting that a GB held for an hour is worth.")] = None,
    control_ratio: Annotated[float | None, typer.Option(help="Share of time without prefetching, to measure it.")] = None,
    snapshot_s: Annotated[float | None, typer.Option(help="Seconds between snapshots of what was learned.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, human or json.")] = None,
    config: Config = None,
) -> None:
    """Runs all roles in one process on this machine, until Ctrl-C or SIGTERM."""
    # Before anything else is a local: by the table that help takes the defaults from.
    overrides = overrides_of(locals())
    from prefetcher.config import load_settings
    from prefetcher.telemetry.logs import configure

    settings = load_settings(overrides, config)
    for option in ("map", "tz"):
        if settings.stream.follow is None and option in settings.stream.model_fields_set:
            raise UsageError(f"--{option} says how to read the log that --follow names, and none is named; give --follow LOG, or leave it")
    configure(settings.log.level, settings.log.format)
    from prefetcher.app import App

    run_app(App(settings), "prefetcher")


@app.command()
def status(
    url: Url = _DEFAULT_URL,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON once and end.")] = False,
    every_s: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1)] = 1.0,
) -> None:
    """Shows what is resident, what is coming and why, and what it earned and wasted."""
    from prefetcher.api.status_view import show

    show(url, once=once, as_json=json, every_s=every_s)


@app.command()
def manifest(
    folder: Annotated[Path, typer.Argument(help="A folder of models, or one model's folder.")],
    version: Annotated[str | None, typer.Option(help="Name of the version; else one from the bytes.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each model.")] = False,
) -> None:
    """Checks every safetensors file and writes the manifest that loads are verified against."""
    from prefetcher.agent.manifest import Manifest, write_manifests

    def say(made: Manifest) -> None:
        if json:
            typer.echo(dumps({"model": made.model, "version": made.version, "files": len(made.files), "bytes": made.bytes}))
            return
        typer.echo(f"{made.model}  version {made.version}  {len(made.files)} files  {made.bytes} bytes")

    refused: list[PrefetcherError] = []

    def say_why(error: PrefetcherError) -> None:
        refused.append(error)
        _say_error(str(error))

    made = write_manifests(folder, version=version, on_made=say, on_refused=say_why)
    if not refused:
        return
    if len(made) + len(refused) > 1:
        typer.echo(f"{len(refused)} of {len(made) + len(refused)} models refused, see above; the others have their manifests", err=json)
    raise typer.Exit(refused[0].exit_code)


@app.command()
def publish(
    folder: Annotated[Path, typer.Argument(help="A folder of models, or one model's folder.")],
    store: Annotated[str, typer.Argument(help="Where to: a folder, or s3://bucket/folder, gs://…, az://account/container/folder.")],
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each model.")] = False,
) -> None:
    """Writes models into a store that agents fetch from, each as a version of its own, its manifest last."""
    from prefetcher.agent.publish import publish_models
    from prefetcher_connectors.weights_store import weights_store_at

    refused: list[PrefetcherError] = []

    def say_why(error: PrefetcherError) -> None:
        refused.append(error)
        _say_error(str(error))

    for made, folder_there in publish_models(folder, weights_store_at(store), on_refused=say_why):
        if json:
            typer.echo(dumps({"model": made.model, "version": made.version, "bytes": made.bytes, "at": folder_there}))
        else:
            typer.echo(f"{made.model}  version {made.version}  {made.bytes} bytes  at {folder_there}")
    if refused:
        raise typer.Exit(refused[0].exit_code)


@app.command(cls=with_defaults(OF_REPLAY))
def replay(
    log: Annotated[Path, typer.Argument(help="Request log: parquet, CSV or JSONL, plain or compressed.")],
    out: Annotated[Path, typer.Option(help="Folder for summary.json, report.html and the four logs.")],
    catalog: Annotated[Path | None, typer.Option(help="Sizes of models: CSV or JSON, as chat,16GB.")] = None,
    models: Annotated[Path | None, typer.Option(help="A folder of models to take sizes from.")] = None,
    default_bytes: Annotated[str | None, typer.Option(help="Size of every model that no catalog names.")] = None,
    policy: Annotated[str, typer.Option(help="Policies, separated by commas.")] = "lru,gdsf,lhd-smith,ours",
    capacity_ratio: Annotated[float | None, typer.Option(help="Capacity as a share of the catalog's bytes.")] = None,
    host_bytes: Annotated[str | None, typer.Option(help="Capacity of each node in bytes, as 80GB.")] = None,
    link_bytes_per_s: Annotated[str, typer.Option(help="Speed from disk to memory.")] = "3.5e9",
    load_times: Annotated[Path | None, typer.Option(help="Measured load times by model.")] = None,
    nodes: Annotated[int, typer.Option(help="Number of nodes.", min=1, max=_MOST_NODES)] = 1,
    warmup_ratio: Annotated[float, typer.Option(help="Share of the time that is not scored.")] = 0.3,
    price: Annotated[float | None, typer.Option(help="Seconds of waiting that a GB held for an hour is worth.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.", min=0, max=2**63 - 1)] = 0,
    map_: Annotated[str | None, typer.Option("--map", help="Field map, as ts=startTime,model=request.model.")] = None,
    tz: Annotated[str | None, typer.Option(help="Time zone of times without one.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail at the first bad line.")] = False,
    hints: Annotated[str | None, typer.Option(help="Log of hints, or synthetic:precision=0.7,lead=5,seed=1.")] = None,
    tiers: Annotated[str, typer.Option(help="Tiers of every node, as remote,disk,host,device.")] = "disk,host",
    device_bytes: Annotated[str | None, typer.Option(help="Capacity of each node's device tier; 80e9 unless given.")] = None,
    disk_bytes: Annotated[str | None, typer.Option(help="Capacity of each node's disk; without it, all is on disk.")] = None,
    windows: Annotated[Path | None, typer.Option(help="Book of windows that bound ours, as prefetcher tune writes it.")] = None,
) -> None:
    """Replays a request log: what prefetching would have saved, and what it would have held."""
    from prefetcher.config import parse_bytes
    from prefetcher.replay.capacity import check_capacity

    if not log.exists():
        raise InputError("there is no such log; name a request log, parquet, CSV or JSON lines", path=str(log))
    check_capacity(capacity_ratio, host_bytes)
    try:
        sizes = {
            "host_bytes": None if host_bytes is None else parse_bytes(host_bytes),
            "default_bytes": None if default_bytes is None else parse_bytes(default_bytes),
            "link_bytes_per_s": float(parse_bytes(link_bytes_per_s)),
            "device_bytes": None if device_bytes is None else parse_bytes(device_bytes),
            "disk_bytes": None if disk_bytes is None else parse_bytes(disk_bytes),
        }
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    for option, size in sizes.items():
        if size is not None and size > _MOST_BYTES:
            raise UsageError(f"--{option.replace('_', '-')} is more than a petabyte; give less")
    _check_folder(out)
    run = _attribute("prefetcher.replay.run", "replay_command")
    run(
        log=log,
        out=out,
        catalog=catalog,
        models=models,
        policy=policy,
        capacity_ratio=capacity_ratio,
        load_times=load_times,
        nodes=nodes,
        warmup_ratio=warmup_ratio,
        price=price,
        seed=seed,
        map=map_,
        tz=tz,
        strict=strict,
        hints=hints,
        tiers=tiers,
        windows=windows,
        **sizes,
    )


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help=f"{', '.join(_BENCHES[:-1])} or {_BENCHES[-1]}.")],
    json: Annotated[Path, typer.Option(help="File for the figures.")],
    suite: Annotated[Path | None, typer.Option(help="Suite file of `bench policies`.")] = None,
    traces: Annotated[Path | None, typer.Option(help="Folder of traces.")] = None,
    policy: Annotated[str | None, typer.Option(help="Only these policies.")] = None,
    trace: Annotated[str | None, typer.Option(help="Only this trace.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small size, to see that it works.")] = False,
) -> None:
    """Runs a benchmark and writes its figures. Those of streams take the broker that PREFETCHER_BENCH_KAFKA names, or start one."""
    if name not in _BENCHES:
        raise UsageError(f"no benchmark is called {name!r}; there are {', '.join(_BENCHES)}")
    run = _attribute(f"prefetcher.bench.{name.replace('-', '_')}", "run")
    given = {"suite": suite, "traces": traces, "policy": policy, "trace": trace, "quick": quick or None}
    accepted = inspect.signature(run).parameters
    for option, value in given.items():
        if value is not None and option not in accepted:
            raise UsageError(f"`bench {name}` takes no --{option}")
    _end_in_order()
    run(json, **{option: value for option, value in given.items() if value is not None})


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page and the figures.")] = Path("demo-out"),
    keep: Annotated[bool, typer.Option("--keep", help="Keep the logs and the state of both sides.")] = False,
    write_log: Annotated[
        Path | None, typer.Option("--write-log", help="Only write its traffic as a request log with a catalog into this folder.")
    ] = None,
) -> None:
    """Two days of traffic in minutes, with and without prefetching, side by side."""
    if write_log is not None:
        for written in _attribute("prefetcher.demo.request_log", "write_request_log")(write_log):
            typer.echo(written)
        return
    _end_in_order()
    _attribute("prefetcher.demo", "run")(out, keep=keep)


@app.command(name="compile")
def compile_() -> None:
    """Compiles the kernels for this machine; else the first replay or node does, in about half a minute."""
    from prefetcher.compiling import compile_command

    compile_command()


add_tune_command(app)
add_commands(app)
add_act_commands(app)
add_hint_command(app)
add_doctor_command(app)
add_job_commands(app)
add_window_commands(app)
add_node_commands(app)
add_predictor_commands(app)
add_report_command(app)


def _end_in_order() -> None:
    """Whoever is asked to end ends what it started, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _check_folder(out: Path) -> None:
    """Makes the folder for results and sees that it takes files, before anything long begins. Raises UsageError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise UsageError(f"{out} can't be made ({exc.strerror}); name another folder with --out") from exc
    if not os.access(out, os.W_OK | os.X_OK):
        raise UsageError(f"{out} can't be written to; name another folder with --out")


def _attribute(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as exc:
        raise UsageError(f"this build has no {exc.name}") from exc


def _say_error(message: str) -> None:
    line = " ".join(message.split())
    print(f"error: {line}", file=sys.stderr)


def _fail(message: str, code: int) -> NoReturn:
    _say_error(message)
    raise SystemExit(code)


def main() -> None:
    """The entry point: runs a command; errors are one line and an exit code."""
    try:
        code = app(standalone_mode=False)
    except PrefetcherError as exc:
        _fail(str(exc), exc.exit_code)
    except typer.Exit as exc:
        raise SystemExit(exc.exit_code) from None
    except typer.Abort:
        raise SystemExit(130) from None
    except _CommandError as exc:
        if type(exc).__name__ == "NoArgsIsHelpError":
            # Its message is the whole help, which is no error.
            typer.echo(exc.format_message())
            raise SystemExit(exc.exit_code) from None
        _fail(str(exc.format_message()), int(exc.exit_code))
    except BrokenPipeError:
        # The reader of our output went away; Python would complain once more while it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as exc:
        where = "" if exc.filename is None else f"{exc.filename}: "
        _fail(f"{where}{exc.strerror or exc}; look after that file or folder, or name another one", 1)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(code if isinstance(code, int) else 0)

"""The command line's commands of jobs and batch schedules: what is due and ran, a run now, and which models a job needs when.

Asks a running endpoint; covers options and what is printed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import typer

from prefetcher.errors import PrefetcherError, UsageError

__all__ = ["add_job_commands"]

_DEFAULT_URL = "http://127.0.0.1:8371"
Url = Annotated[str, typer.Option("--url", envvar="PREFETCHER_URL", help="Address of a running `prefetcher up`.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?$")
#: Between looks at a run, and how long nobody takes it before that is said.
_LOOK_S = 0.3
_NOBODY_S = 30.0
_ENDED = ("done", "failed", "lost", "hung", "stopped", "skipped")


def span_of(text: str, option: str) -> float:
    """Seconds from `30m`, `2h`, `90s` or `90`. Raises UsageError."""
    found = _SPAN.match(text.strip().lower())
    if found is None:
        raise UsageError(f"--{option} {text[:40]!r} is no time; write it as 90s, 30m or 2h")
    return float(found.group(1)) * {"h": 3600.0, "m": 60.0, "min": 60.0}.get(found.group(2) or "s", 1.0)


def _when(at_s: float | None, tz: str | None = None) -> str:
    """The time, short, by this machine's clock or by that of `tz`."""
    if at_s is None:
        return ""
    moment = datetime.fromtimestamp(at_s).astimezone() if tz is None else datetime.fromtimestamp(at_s, ZoneInfo(tz))
    return f"{moment:%d %b %H:%M:%S}"


def _took(run: Mapping[str, Any]) -> str:
    took_s = run.get("took_s")
    return "" if took_s is None else f"{took_s:.1f} s"


def _outcome(run: Mapping[str, Any] | None) -> str:
    """What became of a run, or how far it is, in one line."""
    if run is None:
        return "never"
    said = run.get("error") or run.get("did") or ""
    if run["result"] == "running":
        share = run.get("share")
        said = " ".join(part for part in ("" if share is None else f"{100 * share:.0f} %", run.get("step", "")) if part)
    late = "overdue, " if run.get("overdue") and run["result"] == "running" else ""
    return f"{late}{run['result']}" + (f": {said}" if said else "")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows])


def _follow(url: str, path: str) -> Mapping[str, Any]:
    """Shows how far a run is until it is over; its record."""
    import threading

    from prefetcher.api.client import get
    from prefetcher.clock import SystemClock

    clock, never = SystemClock(), threading.Event()
    started_s, last, warned = clock.steady_s(), "", False
    while True:
        run: Mapping[str, Any] = get(url, path)
        if run["result"] in _ENDED:
            if last and sys.stderr.isatty():
                sys.stderr.write("\r\033[K")
            return run
        line = _outcome(run)
        if line != last:
            sys.stderr.write(f"\r\033[K{line}" if sys.stderr.isatty() else f"{line}\n")
            sys.stderr.flush()
        last = line
        if run["result"] == "wanted" and not warned and clock.steady_s() - started_s > _NOBODY_S:
            typer.echo("no scheduler has taken it yet: another run of the job goes on, or every scheduler is busy", err=True)
            warned = True
        clock.wait(never, _LOOK_S)


def add_job_commands(app: typer.Typer) -> None:
    """Adds them to the program's commands."""
    jobs_app = typer.Typer(no_args_is_help=True, help="Jobs at their time: forecasts, fits, and what is kept long enough.")
    app.add_typer(jobs_app, name="jobs")

    @jobs_app.command("list")
    def jobs_list(url: Url = _DEFAULT_URL, json: Json = False) -> None:
        """Lists the jobs: when each is due, and how its last run went."""
        from prefetcher.api.client import get

        found = get(url, "/v1/jobs")
        if json:
            _print_json(found)
            return
        rows = []
        for job in found:
            run = job["running"] or job["last"]
            wanted = "wanted; " if job["wanted"] else ""
            began = "" if run is None else _when(run["began_s"])
            rows.append((job["name"], job["times"], _when(job["next_s"]), began, "" if run is None else _took(run), wanted + _outcome(run)))
        typer.echo(_table(("job", "times", "next", "last run", "took", "result"), rows) if rows else "no scheduler ever ran here")

    @jobs_app.command("runs")
    def jobs_runs(
        name: Annotated[str, typer.Argument(help="The job's name.")],
        url: Url = _DEFAULT_URL,
        count: Annotated[int, typer.Option(help="How many.", min=1, max=50)] = 20,
        json: Json = False,
    ) -> None:
        """Lists the last runs of a job, newest first."""
        from prefetcher.api.client import get

        found = get(url, f"/v1/jobs/{_quoted(name)}/runs?count={count}")
        if json:
            _print_json(found)
            return
        rows = [
            (run["run_id"], _when(run["began_s"]), _took(run), str(run["rows"]), _who(run), run["where"], _outcome(run)) for run in found
        ]
        head = ("run", "began", "took", "rows", "started", "where", "result")
        typer.echo(_table(head, rows) if rows else f"{name} has not run yet")

    @jobs_app.command("run")
    def jobs_run(
        name: Annotated[str, typer.Argument(help="The job's name.")],
        url: Url = _DEFAULT_URL,
        wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for its end, and show how far it is.")] = True,
    ) -> None:
        """Runs a job now; exit code 1 unless it did its work."""
        from prefetcher.api.client import post

        answer = post(url, f"/v1/jobs/{_quoted(name)}:run")
        if not wait:
            typer.echo(f"{name}: run {answer['run_id']} is wanted")
            return
        run = _follow(url, str(answer["follow"]))
        if run["result"] != "done":
            raise PrefetcherError(f"{name} {_outcome(run)}; `prefetcher jobs runs {name}` has its last runs")
        typer.echo(f"{name} done in {_took(run)}: {run['did'] or 'there was nothing to do'}")

    schedule_app = typer.Typer(no_args_is_help=True, help="Which models batch jobs need when.")
    app.add_typer(schedule_app, name="schedule")

    @schedule_app.command("add")
    def schedule_add(
        name: Annotated[str, typer.Argument(help="The schedule's name.")],
        models: Annotated[str, typer.Option("--models", help="Models, separated by commas, in the order that the job needs them.")],
        at: Annotated[str, typer.Option("--at", help="Local time that it begins at, as 02:00.")],
        for_: Annotated[str, typer.Option("--for", help="How long it takes, as 30m.")],
        on: Annotated[str, typer.Option("--on", help="daily, weekdays, weekends, or days as mon,wed.")] = "daily",
        tz: Annotated[str, typer.Option("--tz", help="Time zone of --at.")] = "UTC",
        lead: Annotated[str | None, typer.Option("--lead", help="Staged so long before, as 5m; else as long as loads take.")] = None,
        quota_gb: Annotated[
            float | None, typer.Option("--quota-gb", help="The most that its models take on a node at a time.", min=0.0)
        ] = None,
        node: Annotated[str, typer.Option("--node", help="Only on this node.")] = "",
        replace: Annotated[bool, typer.Option("--replace", help="Take the place of a schedule of the same name.")] = False,
        url: Url = _DEFAULT_URL,
    ) -> None:
        """Stages models before a batch job begins, and releases them when it ends."""
        from prefetcher.api.client import post

        body = {
            "name": name,
            "models": [model.strip() for model in models.split(",") if model.strip()],
            "at": at,
            "for_s": span_of(for_, "for"),
            "days": on,
            "tz": tz,
            "lead_s": None if lead is None else span_of(lead, "lead"),
            "quota_bytes": None if quota_gb is None else round(quota_gb * 1e9),
            "node": node,
            "replace": replace,
        }
        answer = post(url, "/v1/schedules", {key: value for key, value in body.items() if value is not None})
        typer.echo(f"{name}: {_window(answer)}, {answer['tz']} time")

    @schedule_app.command("list")
    def schedule_list(url: Url = _DEFAULT_URL, json: Json = False) -> None:
        """Lists the schedules, and when each is open next."""
        from prefetcher.api.client import get

        found = get(url, "/v1/schedules")
        if json:
            _print_json(found)
            return
        rows = [
            (
                s["name"],
                f"{s['at']} {s['tz']}",
                f"{s['for_s'] / 60:g} min",
                _days(s["days"]),
                _window(s),
                ",".join(s["models"]),
                ",".join(s["staged"]),
            )
            for s in found
        ]
        head = ("schedule", "at", "for", "on", "window", "models", "staged")
        typer.echo(_table(head, rows) if rows else "there are no schedules")

    @schedule_app.command("remove")
    def schedule_remove(name: Annotated[str, typer.Argument(help="The schedule's name.")], url: Url = _DEFAULT_URL) -> None:
        """Takes a schedule away; what is staged for it is released."""
        from prefetcher.api.client import delete

        delete(url, f"/v1/schedules/{_quoted(name)}")
        typer.echo(f"{name} is removed; what was staged for it is released")


def _who(run: Mapping[str, Any]) -> str:
    if not run["by_hand"]:
        return "scheduled"
    return f"by hand, {run['by']}" if run["by"] else "by hand"


def _days(days: Sequence[str]) -> str:
    return (
        {7: "daily", 5: "weekdays"}.get(len(days), "")
        if days[:5] == ["mon", "tue", "wed", "thu", "fri"] and len(days) != 6
        else ",".join(days)
    )


def _window(schedule: Mapping[str, Any]) -> str:
    if schedule["open"]:
        return f"open until {_when(schedule['next_end_s'], schedule['tz'])}"
    return f"opens {_when(schedule['next_start_s'], schedule['tz'])}"


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")


def _print_json(found: Any) -> None:
    import json

    typer.echo(json.dumps(found, indent=2))

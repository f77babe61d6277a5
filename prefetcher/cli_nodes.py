"""The command line's commands of nodes: which are known and when each was heard last, and the forgetting of one that is gone.

Asks a running endpoint; covers options and what is printed.
"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from prefetcher.cli_jobs import _DEFAULT_URL, Json, Url, _follow, _print_json, _table, _when
from prefetcher.errors import PrefetcherError

__all__ = ["add_node_commands"]


def add_node_commands(app: typer.Typer) -> None:
    """Adds them to the program's commands."""
    nodes_app = typer.Typer(no_args_is_help=True, help="Nodes that are known, also silent ones, and forgetting those that are gone.")
    app.add_typer(nodes_app, name="nodes")

    @nodes_app.command("list")
    def nodes_list(url: Url = _DEFAULT_URL, json: Json = False) -> None:
        """Lists the nodes, and when each was heard last."""
        from prefetcher.api.client import get

        found = get(url, "/v1/nodes/heard")
        if json:
            _print_json(found)
            return
        now = ["reports" if line["reports"] else "to be forgotten" if line["to_forget"] else "silent" for line in found]
        rows = [(line["node"], state, _when(line["last_heard_s"])) for line, state in zip(found, now, strict=True)]
        typer.echo(_table(("node", "now", "last heard"), rows) if rows else "no node ever reported here")

    @nodes_app.command("forget")
    def nodes_forget(
        name: Annotated[str, typer.Argument(help="The node's name.")],
        url: Url = _DEFAULT_URL,
        wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is forgotten.")] = True,
    ) -> None:
        """Forgets a node that is gone; its figures stay in reports. A node that is alive is not forgotten."""
        from prefetcher.api.client import get, post

        answer = post(url, f"/v1/nodes/{quote(name, safe='')}:forget")
        if not wait:
            typer.echo(f"{name} is to be forgotten: run {answer['run_id']} of the job forget-nodes does it")
            return
        run = _follow(url, str(answer["follow"]))
        if any(line["node"] == name for line in get(url, "/v1/nodes/heard")):
            raise PrefetcherError(f"{name} is not forgotten: {run.get('error') or run.get('did') or run['result']}")
        typer.echo(f"{name} is forgotten; reports of the time in which it was there still have it")

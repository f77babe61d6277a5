"""The command line's acts by hand: on models, the switch of nodes, groups and all; and where a router would be sent.

Covers options and what is printed; the endpoint does it.
"""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from prefetcher.errors import UsageError

__all__ = ["add_act_commands"]

_DEFAULT_URL = "http://127.0.0.1:8371"
Url = Annotated[str, typer.Option("--url", envvar="PREFETCHER_URL", help="Address of a running `prefetcher up`.")]
Model = Annotated[str, typer.Argument(help="The model's name.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Node = Annotated[str | None, typer.Option(help="Only this node.")]
OnNode = Annotated[str | None, typer.Option("--node", help="The node to do it on; else the endpoint's own.")]
Group = Annotated[str | None, typer.Option(help="Only nodes of this group.")]
For = Annotated[str | None, typer.Option("--for", help="How long, as 90s, 30m or 2h; else for good.")]
Reason = Annotated[str, typer.Option(help="Why, for those who read `GET /v1/by-hand`.")]

_WORDS = {
    "off": "prefetching is off: demand loading only",
    "on": "prefetching is on",
    "observe": "observing: decided and recorded, nothing is loaded ahead",
}


def _say(answer: Any, words: str, as_json: bool) -> None:
    typer.echo(dumps(answer, indent=2) if as_json else words)


def _wish(for_: str | None, reason: str, **more: str | None) -> dict[str, Any]:
    """The body of an act: what was given."""
    from prefetcher.cli_jobs import span_of

    given: dict[str, Any] = {name: value for name, value in more.items() if value is not None}
    if for_ is not None:
        given["for_s"] = span_of(for_, "for")
        if given["for_s"] <= 0.0:
            raise UsageError("--for is no time at all; give at least a second, as 30m")
    if reason:
        given["reason"] = reason
    return given


def _span_words(for_: str | None) -> str:
    return "" if for_ is None else f", for {for_.strip()}"


def _act(act: str, model: str, url: str, as_json: bool, node: str | None, wish: dict[str, Any], more: str = "") -> None:
    from prefetcher.api import client
    from prefetcher.api.acts import in_words

    answer = client.act(url, act, model, wish, node)
    _say(answer, f"{act} {model}: {in_words(act, answer['reason'])}{more}", as_json)


def _switch(mode: str, url: str, as_json: bool, node: str | None, group: str | None, for_: str | None, reason: str) -> None:
    from prefetcher.api.client import post

    if node is not None and group is not None:
        raise UsageError("name a node or a group, not both")
    answer = post(url, f"/v1/{mode}", _wish(for_, reason, node=node, group=group) or None)
    where = f" on {node}" if node is not None else f" in group {group}" if group is not None else ""
    _say(answer, f"{_WORDS[mode]}{where}{_span_words(for_)}", as_json)


def add_act_commands(app: typer.Typer) -> None:
    """Adds them to the program's commands."""

    @app.command()
    def pin(model: Model, for_: For = None, reason: Reason = "", node: OnNode = None, url: Url = _DEFAULT_URL, json: Json = False) -> None:
        """Loads a model and keeps it, whatever is decided; also across restarts, and on every node that has it."""
        _act("pin", model, url, json, node, _wish(for_, reason), _span_words(for_))

    @app.command()
    def unpin(model: Model, reason: Reason = "", node: OnNode = None, url: Url = _DEFAULT_URL, json: Json = False) -> None:
        """Leaves a model to the decision again."""
        _act("unpin", model, url, json, node, _wish(None, reason))

    @app.command()
    def load(model: Model, reason: Reason = "", node: OnNode = None, url: Url = _DEFAULT_URL, json: Json = False) -> None:
        """Loads a model now; unused, it stays an hour."""
        _act("load", model, url, json, node, _wish(None, reason))

    @app.command()
    def evict(model: Model, reason: Reason = "", node: OnNode = None, url: Url = _DEFAULT_URL, json: Json = False) -> None:
        """Gives a model's memory back now, unless it is leased or pinned."""
        _act("evict", model, url, json, node, _wish(None, reason))

    @app.command()
    def off(
        node: Node = None, group: Group = None, for_: For = None, reason: Reason = "", url: Url = _DEFAULT_URL, json: Json = False
    ) -> None:
        """Stops prefetching at once: demand loading only."""
        _switch("off", url, json, node, group, for_, reason)

    @app.command()
    def on(
        node: Node = None, group: Group = None, for_: For = None, reason: Reason = "", url: Url = _DEFAULT_URL, json: Json = False
    ) -> None:
        """Starts prefetching again."""
        _switch("on", url, json, node, group, for_, reason)

    @app.command()
    def observe(
        node: Node = None, group: Group = None, for_: For = None, reason: Reason = "", url: Url = _DEFAULT_URL, json: Json = False
    ) -> None:
        """Goes on deciding and recording, and loads nothing ahead."""
        _switch("observe", url, json, node, group, for_, reason)

    @app.command()
    def path(
        model: Model,
        timeout_s: Annotated[float, typer.Option(help="Seconds to wait for it at most.", min=0.0)] = 600.0,
        socket: Annotated[Path | None, typer.Option(help="Where this node's agent listens; else the default.")] = None,
    ) -> None:
        """Has this node bring a model, waits until it is there, and prints the path to start an engine with."""
        from prefetcher.agent.client import open_model
        from prefetcher.agent.paths import lasting

        with open_model(model, timeout_s=timeout_s, socket_path=socket) as opened:
            if not opened.path:
                why = "start it with --paths-dir FOLDER; if it was, `prefetcher status` says why"
                raise UsageError(f"this node has no path for {model}: {why}")
            typer.echo(lasting(opened.path))

    @app.command()
    def route(
        models: Annotated[list[str], typer.Argument(help="Models that are called at once.")],
        url: Url = _DEFAULT_URL,
        json: Json = False,
    ) -> None:
        """Says which node to send requests for these models to. Loads nothing."""
        import msgspec

        from prefetcher.client import Client

        with Client(url) as client:
            routes = client.routes(models)
        if json:
            typer.echo(msgspec.json.format(msgspec.json.encode(routes), indent=2).decode())
            return
        for found in routes:
            there = "ready" if found.state == "ready" else f"{found.state}, {found.wait_s:.1f} s to wait"
            typer.echo(f"{found.model}  {found.node}  {there}{'' if found.cached else ', uncached: it fits nowhere'}")

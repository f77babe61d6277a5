"""Routes of what pages load: `/hint.js`. For everybody, from every origin, without a key."""

from __future__ import annotations

import hashlib

from fastapi import FastAPI, Request, Response

from prefetcher.dashboard.script import hint_script

__all__ = ["add_pages"]

#: A page that is open for a day asks once an hour, and goes on with what it has while it asks or nobody answers.
_CACHE_CONTROL = "public, max-age=3600, stale-while-revalidate=86400, stale-if-error=604800"


def add_pages(app: FastAPI) -> None:
    script = hint_script()
    tag = f'"{hashlib.blake2b(script, digest_size=12).hexdigest()}"'
    headers = {
        "Cache-Control": _CACHE_CONTROL,
        "ETag": tag,
        # A module of another origin, or a script with an integrity, is only run with this one; pages with COEP ask for the next.
        "Access-Control-Allow-Origin": "*",
        "Cross-Origin-Resource-Policy": "cross-origin",
        "X-Content-Type-Options": "nosniff",
    }

    @app.api_route("/hint.js", methods=["GET", "HEAD"], include_in_schema=False)
    def hint_js(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if any(each.strip().removeprefix("W/") in (tag, "*") for each in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(script, media_type="text/javascript", headers=headers)

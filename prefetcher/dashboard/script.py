"""Scripts for pages of others, as they are served: readable source in this folder, sent without comments and spaces.

Covers no routes (`api.page_routes`) and no general JavaScript: sources have a semicolon after every statement, and neither regular
expressions nor templates.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

__all__ = ["hint_script", "stripped"]

_TOKEN = re.compile(
    r"""
    (?P<skip>\s+ | //[^\n]* | /\*.*?\*/)
  | (?P<word>[\w$]+)
  | (?P<text>"(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*')
  | (?P<sign>[^\w\s$"'`/])
    """,
    re.VERBOSE | re.DOTALL,
)
#: Signs that would become another one if they met: `a - -b`, `a + ++b`.
_STICKY = frozenset("+-")


def stripped(source: str) -> str:
    """The same program without comments, and without spaces where two tokens stay two.

    Raises:
        ValueError: a character that begins none of the tokens that are known, as a template or a division.
    """
    out: list[str] = []
    at, kind_before = 0, ""
    apart = False
    while at < len(source):
        found = _TOKEN.match(source, at)
        if found is None:
            line = source.count("\n", 0, at) + 1
            raise ValueError(f"line {line}: {source[at : at + 20]!r} can't be stripped; write it without templates, regexes and divisions")
        kind, token, at = str(found.lastgroup), found.group(), found.end()
        if kind == "skip":
            apart = True
            continue
        if apart and out and ((kind == kind_before == "word") or (token in _STICKY and out[-1] == token)):
            out.append(" ")
        # What closes a block ends its last statement too.
        if token == "}" and out and out[-1] == ";" and kind == "sign":
            out.pop()
        out.append(token)
        kind_before, apart = kind, False
    return "".join(out)


@cache
def hint_script() -> bytes:
    """`hint.js` as it is served."""
    source = (files("prefetcher.dashboard") / "hint.js").read_text(encoding="utf-8")
    return stripped(source).encode()

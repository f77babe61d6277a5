"""Addresses that may carry a password, as they may be shown, and whether they can be taken apart at all.

One masking for settings, connectors and the command line. It hides too much rather than too little: a password with an `@`, `/`, `?` or
`#` in it makes an address that programs take apart differently. Covers no other secrets: those are types of their own in `config`.
"""

from __future__ import annotations

from urllib.parse import urlsplit

__all__ = ["HIDDEN", "problem_of_address", "problem_of_place", "without_secrets"]

HIDDEN = "***"
#: Schemes of object stores, with what stands behind the two slashes.
_STORES = {"s3": "bucket", "gs": "bucket", "az": "account/container"}


def without_secrets(address: str) -> str:
    """`address` as it may be shown: without what stands before the last `@`, without values of its query, and without a fragment."""
    scheme, mark, rest = address.rpartition("://") if address.count("://") == 1 else ("", "", address)
    if "://" in rest:
        return HIDDEN
    before, at, place = rest.rpartition("@")
    if "?" in before or "#" in before:
        # What follows the `@` may belong to a value of the query.
        return f"{scheme}{mark}{HIDDEN}"
    place, hashed, _ = place.partition("#")
    place, asked, query = place.partition("?")
    pairs = [pair.partition("=") for pair in query.split("&")] if asked else []
    values = "&".join(f"{name}={HIDDEN}" if equals else HIDDEN for name, equals, _ in pairs)
    return f"{scheme}{mark}{HIDDEN + at if at else ''}{place}{asked}{values}{f'#{HIDDEN}' if hashed else ''}"


def problem_of_address(address: str) -> str:
    """'' or why `address` can't be taken apart, without any of it: what urllib says quotes what it took for a port."""
    try:
        parts = urlsplit(address)
        # Reading it is what checks it.
        port = parts.port
    except ValueError:
        return "its host or port can't be read; in a name or password write @, /, ?, # and : as %40, %2F, %3F, %23 and %3A"
    # The path of a socket may have one: no host stands before it.
    if parts.netloc and "@" in parts.path + parts.query + parts.fragment:
        return "an @ stands after its host; in a name or password write @, /, ? and # as %40, %2F, %3F and %23"
    return "" if port != 0 else "its port is 0"


def problem_of_place(place: str) -> str:
    """'' or why nothing can be kept at `place`: a path, file:// or the address of an object store."""
    scheme, mark, rest = place.partition("://")
    if not mark:
        return "" if place.strip() and "\0" not in place else "it is empty"
    if scheme == "file":
        return "" if rest.startswith("/") else "a file:// address has a whole path, as file:///var/lib/prefetcher"
    if scheme not in _STORES:
        return f"its scheme is none of {', '.join(f'{known}://' for known in ('file', *_STORES))}"
    if "@" in rest or "?" in rest or "#" in rest:
        return "credentials are no part of it: a store takes them from its cloud's variables, as AWS_ACCESS_KEY_ID"
    parts = rest.split("/")
    wanted = _STORES[scheme].count("/") + 1
    if len([part for part in parts[:wanted] if part]) < wanted or ".." in parts:
        return f"write {scheme}://{_STORES[scheme]}/folder"
    return ""

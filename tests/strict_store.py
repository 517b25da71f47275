"""S3-compatible store: an emulator behind a proxy that refuses what such stores refuse.

It supports no checksums in headers or trailers, no bucket in the host name, no KMS encryption and
no tags, and only one key and one region.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from tests.emulators import Emulator

KEY = "store-key"
REGION = "auto"
_SECRET = "store-secret"
_HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}
_NOT_IMPLEMENTED = ("x-amz-server-side-encryption", "x-amz-tagging")


@dataclass(frozen=True, slots=True)
class StrictStore:
    """A store at a host name, with one bucket.

    It `lacks` requests with these path suffixes, and records the requests it has `served` and the
    codes of those it has `refused`.
    """

    emulator: Emulator
    endpoint_url: str
    bucket: str
    lacks: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    served: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of a process that uses no other service."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def write_profile(self, folder: Path, **settings: str) -> dict[str, str]:
        """Write a profile of the store to AWS's files, and return variables that select it."""
        config, credentials = folder / "config", folder / "credentials"
        more = "".join(f"{name} = {value}\n" for name, value in settings.items())
        config.write_text(
            f"[profile store]\nregion = {REGION}\nendpoint_url = {self.endpoint_url}\n{more}"
        )
        credentials.write_text(
            f"[store]\naws_access_key_id = {KEY}\naws_secret_access_key = {_SECRET}\n"
        )
        return {
            "TIDEMILL_STORE_PROFILE": "store",
            "AWS_CONFIG_FILE": str(config),
            "AWS_SHARED_CREDENTIALS_FILE": str(credentials),
        }

    def put(self, key: str, body: bytes) -> str:
        """Write an object directly to the emulator, and return its URL."""
        self.emulator.client("s3").put_object(Bucket=self.bucket, Key=key, Body=body)
        return f"s3://{self.bucket}/{key}"

    def get(self, key: str) -> bytes:
        """Read an object directly from the emulator."""
        found = self.emulator.client("s3").get_object(Bucket=self.bucket, Key=key)
        body: bytes = found["Body"].read()
        return body


class _Server(ThreadingHTTPServer):
    """HTTP server of the proxy."""

    daemon_threads = True
    store: StrictStore


class _Door(BaseHTTPRequestHandler):
    """Refuses a request, or passes it on to the emulator."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def __getattr__(self, name: str) -> Any:
        """Handle every method."""
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        store = self.server.store
        code = _refusal(self.headers, self.server.server_port)
        if code is None and self.path.endswith((*store.lacks,)):
            code = "NotImplemented"
        if code is None:
            store.served.append(f"{self.command} {self.path}")
            self._pass_on(body)
            return
        store.refused.append(code)
        status = 501 if code == "NotImplemented" else 403 if "Key" in code else 400
        self._send(status, {}, f"<Error><Code>{code}</Code></Error>".encode())

    def _pass_on(self, body: bytes) -> None:
        connection = HTTPConnection(urlsplit(self.server.store.emulator.endpoint_url).netloc)
        headers = {**self.headers, "Content-Length": str(len(body))}
        # The emulator has its own region, and checks no signature.
        headers["Authorization"] = headers["Authorization"].replace(f"/{REGION}/", "/us-east-1/")
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        self._send(answer.status, dict(answer.getheaders()), answer.read())
        connection.close()

    def _send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in _HOP_HEADERS:
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else len(body)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def strict_store(emulator: Emulator) -> Iterator[StrictStore]:
    """Run a store in front of an emulator, with a new bucket."""
    bucket = f"store-{uuid4().hex[:10]}"
    emulator.client("s3").create_bucket(Bucket=bucket)
    server = _Server(("127.0.0.1", 0), _Door)
    # A host name, so that clients write the bucket into the URL's path.
    server.store = StrictStore(emulator, f"http://localhost:{server.server_port}", bucket)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _refusal(headers: Any, port: int) -> str | None:
    """Return the code for refusing a request, if any."""
    names = {name.lower() for name in headers}
    if headers["Host"] != f"localhost:{port}":
        return "InvalidRequest"
    if any(name.startswith(_NOT_IMPLEMENTED) for name in names):
        return "NotImplemented"
    has_checksum = any(name.startswith(("x-amz-checksum-", "x-amz-sdk-")) for name in names)
    if has_checksum or "x-amz-trailer" in names or "aws-chunked" in str(headers):
        return "InvalidArgument"
    _, _, signed = headers.get("Authorization", "").partition("Credential=")
    key, _date, region, *_ = [*signed.split("/"), "", "", ""]
    if key != KEY:
        return "InvalidAccessKeyId"
    return None if region == REGION else "AuthorizationHeaderMalformed"

"""API client: typed calls of the Files, Uploads and Batches API, for one command."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from tidemill.offline.console.backoff import SHORT_SECONDS

from .http import TIMEOUT, Http
from .objects import Batch, File, RowPage, Upload
from .server import Server

_MIME_TYPE = "application/jsonl"
_PURPOSE = "batch"
_MAX_PAGE = 100
_MAX_LISTED = 1000


class Client:
    """API client of one deployment, as a context manager.

    Every call raises Unreachable, KeyRefused or ServerRefused. `storage` sends requests to
    presigned URLs, without the API key.
    """

    def __init__(self, server: Server) -> None:
        self.http = Http(server)
        self.storage = httpx.Client(timeout=TIMEOUT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.http.close()
        self.storage.close()

    def models(self) -> dict[str, str]:
        """Return the served model for each accepted name; `*` matches any other name."""
        return self.http.ask(_models, "GET", "models")

    def speed_of(self, model: str) -> tuple[float, float | None] | None:
        """Return the written tokens per second of one worker, and its cost per hour, if known."""
        return self.http.ask(_speed, "GET", f"models/{_quoted(model)}")

    def create_file(self, filename: str, content: bytes) -> str:
        """Upload a small file in one request and return its id."""
        file = {"file": (filename, content, _MIME_TYPE)}
        purpose = {"purpose": _PURPOSE}
        return self.http.ask(_file, "POST", "files", files=file, data=purpose).id

    def file(self, file_id: str) -> File:
        """Return a file object."""
        return self.http.ask(_file, "GET", f"files/{_quoted(file_id)}")

    def input_names(self, wanted: Collection[str]) -> dict[str, str]:
        """Return the names of the given input files, except those that no longer exist."""
        names: dict[str, str] = {}
        params: dict[str, Any] = {"purpose": _PURPOSE, "limit": _MAX_LISTED}
        while not names.keys() >= set(wanted):
            found, has_more = self.http.ask(_names, "GET", "files", params=params)
            names |= found
            if not has_more or not found:
                break
            params["after"] = list(found)[-1]
        return names

    @contextmanager
    def open_content(self, file_id: str, start: int) -> Iterator[httpx.Response]:
        """Open the content of a file from byte `start`; raises httpx's errors.

        The server sends the bytes or redirects to storage, which must not receive the API key.
        """
        wanted = {"Accept-Encoding": "identity"}
        if start:
            wanted["Range"] = f"bytes={start}-"
        with self.http.open("GET", f"files/{_quoted(file_id)}/content", headers=wanted) as response:
            if response.next_request is None:
                yield response
                return
            url = response.next_request.url
        with self.storage.stream("GET", url, headers=wanted) as response:
            yield response

    def create_upload(self, filename: str, num_bytes: int) -> Upload:
        """Create a multipart upload."""
        fields = {"filename": filename, "bytes": num_bytes, "mime_type": _MIME_TYPE}
        return self.http.ask(_upload, "POST", "uploads", json=fields | {"purpose": _PURPOSE})

    def upload(self, upload_id: str) -> Upload:
        """Return the state of an upload."""
        return self.http.ask(_upload, "GET", f"uploads/{_quoted(upload_id)}")

    def part_urls(self, upload_id: str, numbers: Sequence[int]) -> dict[int, str]:
        """Return the upload URL of each given part; part numbers start at 1."""
        path = f"uploads/{_quoted(upload_id)}"
        numbered = {"part_numbers": list(numbers)}
        urls = self.http.ask(_urls, "POST", f"{path}/urls", json=numbered)
        return {n: url if "://" in url else f"{path}/{url}" for n, url in urls.items()}

    def put(self, url: str, content: Iterator[bytes], num_bytes: int) -> httpx.Response:
        """PUT bytes to a storage URL or an API path, without retries."""
        headers = {"Content-Length": str(num_bytes)}
        if "://" in url:
            return self.storage.put(url, content=content, headers=headers)
        return self.http.send_once("PUT", url, content=content, headers=headers)

    def complete_upload(self, upload_id: str) -> Upload:
        """Complete an upload and return it with its file."""
        path = f"uploads/{_quoted(upload_id)}/complete"
        return self.http.ask(_upload, "POST", path, json={"part_ids": []})

    def create_batch(self, fields: Mapping[str, Any], idempotency_key: str) -> Batch:
        """Create a batch; idempotent for the same fields and key."""
        headers = {"Idempotency-Key": idempotency_key}
        return self.http.ask(_batch, "POST", "batches", json=dict(fields), headers=headers)

    def batch(self, batch_id: str, *, retry_seconds: float = SHORT_SECONDS) -> Batch:
        """Retrieve a batch."""
        path = f"batches/{_quoted(batch_id)}"
        return self.http.ask(_batch, "GET", path, retry_seconds=retry_seconds)

    def retry(self, batch_id: str, fields: Mapping[str, Any], idempotency_key: str) -> Batch:
        """Create a retry of a batch; idempotent for the same fields and key."""
        path, headers = f"batches/{_quoted(batch_id)}/retry", {"Idempotency-Key": idempotency_key}
        return self.http.ask(_batch, "POST", path, json=dict(fields), headers=headers)

    def cancel(self, batch_id: str) -> Batch:
        """Cancel a batch."""
        return self.http.ask(_batch, "POST", f"batches/{_quoted(batch_id)}/cancel")

    def erase(self, batch_id: str) -> Batch:
        """Erase a batch."""
        return self.http.ask(_batch, "DELETE", f"batches/{_quoted(batch_id)}")

    def batches(self, limit: int | None) -> Iterator[Batch]:
        """Yield batches newest first; None means all."""
        params: dict[str, Any] = {}
        while limit is None or limit > 0:
            params["limit"] = _MAX_PAGE if limit is None else min(limit, _MAX_PAGE)
            batches, has_more = self.http.ask(_page, "GET", "batches", params=params)
            yield from batches
            if not has_more or not batches:
                return
            params["after"] = batches[-1].id
            limit = limit and limit - len(batches)

    def rows(
        self, batch_id: str, after_line: int, *, retry_seconds: float = SHORT_SECONDS
    ) -> RowPage:
        """Return finished rows after a line."""
        return self.http.ask(
            _rows,
            "GET",
            f"batches/{_quoted(batch_id)}/results",
            params={"after_line": after_line, "limit": 1000},
            retry_seconds=retry_seconds,
        )


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _models(found: Mapping[str, Any]) -> dict[str, str]:
    # Imports pydantic, which the other calls do not need.
    from tidemill.protocol.names import ANY_MODEL

    named = {str(item["id"]): str(item.get("root") or item["id"]) for item in found["data"]}
    any_model = found.get("any_model")
    return named if any_model is None else {**named, ANY_MODEL: str(any_model)}


def _speed(found: Mapping[str, Any]) -> tuple[float, float | None] | None:
    speed = found.get("tidemill") or {}
    rate = speed.get("tokens_per_second")
    return (float(rate), speed.get("cost_per_hour")) if rate else None


def _names(found: Mapping[str, Any]) -> tuple[dict[str, str], bool]:
    names = {str(item["id"]): str(item["filename"]) for item in found["data"]}
    return names, bool(found.get("has_more"))


def _file(found: Mapping[str, Any]) -> File:
    file_id = str(found["id"])
    return File(file_id, int(found["bytes"]), str(found.get("filename") or file_id))


def _batch(found: Mapping[str, Any]) -> Batch:
    batch = Batch(found)
    _ = batch.id, batch.status
    return batch


def _page(found: Mapping[str, Any]) -> tuple[list[Batch], bool]:
    return [_batch(fields) for fields in found["data"]], bool(found["has_more"])


def _rows(found: Mapping[str, Any]) -> RowPage:
    return RowPage(found["data"], int(found["complete_through"]), bool(found["has_more"]))


def _urls(found: Mapping[str, Any]) -> dict[int, str]:
    return {int(part["part_number"]): str(part["url"]) for part in found["data"]}


def _upload(found: Mapping[str, Any]) -> Upload:
    file = found.get("file") or {}
    return Upload(
        id=str(found["id"]),
        status=str(found["status"]),
        part_bytes=int(found["tidemill"]["part_bytes"]),
        uploaded=frozenset(int(number) for number in found["tidemill"]["uploaded"]),
        file_id=file.get("id"),
    )

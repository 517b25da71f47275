"""A small API over HTTP, whose batches run by being looked at and whose faults are ordered."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

KEY = "tm_0123456789abcdef_" + "s" * 43
MODEL = "tidemill-demo"
PART_BYTES = 2**20


@dataclass(slots=True)
class Fault:
    """A fault of the next `times` requests with this method and path.

    `status` is answered instead; without one the connection ends after `after_bytes` of the body:
    the request's for a PUT or POST, the answer's for a GET. With `is_carried_out` only the answer
    is lost.
    """

    method: str
    path: str
    times: int = 1
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    after_bytes: int = 0
    is_carried_out: bool = False
    body: bytes = b'{"message": "Injected"}'

    def matches(self, method: str, path: str) -> bool:
        """Return whether a request meets it."""
        return self.times > 0 and method == self.method and re.search(self.path, path) is not None


class FakeApi:
    """State of the server; tests inspect it and set its faults."""

    def __init__(self) -> None:
        self.url = ""
        self.models = [MODEL]
        self.speed: dict[str, float | None] | None = None
        self.files: dict[str, bytes] = {}
        self.filenames: list[str] = []
        self.uploads: dict[str, dict[str, Any]] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.lines: dict[str, list[Any]] = {}
        self.keys: dict[str, str] = {}
        self.retry_error: tuple[int, Any] | None = (404, {"error": {"message": "Unknown path."}})
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.seen: Callable[[str, str], object] = lambda _method, _path: None
        self.lock = threading.RLock()

    def fault(self, method: str, path: str) -> Fault | None:
        """Return what goes wrong with a request, and count it."""
        with self.lock:
            self.requests.append((method, path))
            found = next((fault for fault in self.faults if fault.matches(method, path)), None)
            if found is not None:
                found.times -= 1
            return found

    def count(self, method: str, path: str) -> int:
        """Return how many requests there were of a method whose path holds this pattern."""
        return sum(one == method and bool(re.search(path, other)) for one, other in self.requests)

    def make_batch(self, request: dict[str, Any], key: str | None) -> dict[str, Any]:
        """Return the batch of a request, the same for the same key."""
        if key is not None and key in self.keys:
            return self.batches[self.keys[key]]
        number = len(self.batches) + 1
        data = b"" if "recipe" in request else self.files[request["input_file_id"]]
        lines = [json.loads(line) for line in data.splitlines()]
        batch = {
            "id": f"batch_{number:032x}",
            "object": "batch",
            "status": "validating",
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "output_file_id": None,
            "error_file_id": None,
            "created_at": 1_700_000_000 + number,
            "errors": None,
            "request": request,
            "metadata": request.get("metadata"),
            "endpoint": request["endpoint"],
            "model": MODEL,
            "input_file_id": request["input_file_id"],
            "completion_window": request["completion_window"],
            "usage": {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7},
            "tidemill": {"seconds": 2, "rows_per_second": 1.5, "cost": 0.25},
        }
        self.batches[str(batch["id"])] = batch
        self.lines[str(batch["id"])] = lines
        if key is not None:
            self.keys[key] = str(batch["id"])
        return batch

    def advance(self, batch: dict[str, Any]) -> None:
        """Bring a batch one step on; the last line's `end` says how it ends."""
        lines = self.lines[batch["id"]]
        ends = lines[-1]["body"].get("end", "completed") if lines else "completed"
        bad = [line for line in lines if line["body"].get("fail")]
        match batch["status"]:
            case "validating":
                batch["status"] = "in_progress"
                batch["request_counts"]["total"] = len(lines)
            case "in_progress":
                batch["status"] = ends
                batch["request_counts"] |= {
                    "completed": len(lines) - len(bad),
                    "failed": len(bad),
                }
                self._put_results(batch, [line for line in lines if line not in bad], bad)
                if "recipe" in batch["request"]:  # its table is the input
                    batch["tidemill"]["table_file_id"] = batch["input_file_id"]
            case "cancelling":
                batch["status"] = "cancelled"

    def _put_results(self, batch: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
        for kind, rows in (("output", good), ("error", bad)):
            if rows:
                file_id = f"file-{kind}{batch['id']}"
                self.files[file_id] = b"".join(row_of(line) for line in rows)
                batch[f"{kind}_file_id"] = file_id


def row_of(line: dict[str, Any]) -> bytes:
    """Return the row of a line."""
    fields = {"custom_id": line["custom_id"], "pad": "x" * 100}
    if words := line["body"].get("fail"):
        fields["error"] = {"message": words}
    else:
        fields["response"] = {"status_code": 200, "request_id": "r", "body": {}}
    return json.dumps(fields).encode() + b"\n"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: FakeApi

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        path, query = parts.path, {name: v[0] for name, v in parse_qs(parts.query).items()}
        fault = self.api.fault(self.command, path)
        self.api.seen(self.command, path)
        if fault is not None and fault.status is not None:
            self._body()
            self._answer(fault.status, fault.body, fault.headers)
            return
        if fault is not None and self.command != "GET" and not fault.is_carried_out:
            self.rfile.read(fault.after_bytes)
            self.close_connection = True
            return
        if path.startswith("/storage/"):
            self._storage(path, fault)
        elif self.headers.get("Authorization") != f"Bearer {KEY}":
            self._answer(401, b'{"error":{"message":"The API key is wrong or was revoked."}}')
        else:
            with self.api.lock:
                status, found = self._route(path, query, self._body())
            if fault is not None and fault.is_carried_out:
                self.close_connection = True
                return
            if status == 307:
                self._answer(307, b"", {"Location": found})
            else:
                self._answer(status, json.dumps(found).encode())

    do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 - the library's names

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _storage(self, path: str, fault: Fault | None) -> None:
        assert "Authorization" not in self.headers, "the key went to the storage"
        _, _, kind, name, *rest = path.split("/")
        if kind == "part":
            assert self.headers.get("Transfer-Encoding") is None
            body = self._body()
            if len(body) < int(self.headers["Content-Length"]):
                self.close_connection = True  # the client has gone
                return
            with self.api.lock:
                self.api.uploads[name]["parts"][int(rest[0])] = body
            self._answer(200, b"")
            return
        data = self.api.files[name]
        wanted = self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        body = data[start:]
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault is not None:
            self.wfile.write(body[: fault.after_bytes])
            self.close_connection = True
            return
        self.wfile.write(body)

    def _route(self, path: str, query: dict[str, str], body: bytes) -> tuple[int, Any]:
        words = path.removeprefix("/v1/").split("/")
        routes = {
            "models": self._models,
            "files": self._files,
            "uploads": self._uploads,
            "batches": self._batches,
        }
        try:
            return routes[words[0]](words[1:], query, body)
        except KeyError:
            error = {"message": f"There is no {words[-1]}.", "type": "x", "code": "gone"}
            return 404, {"error": error}

    def _models(self, words: list[str], *_: object) -> tuple[int, Any]:
        if words:
            return 200, {"id": words[0], "tidemill": self.api.speed}
        return 200, {"data": [{"id": name} for name in self.api.models]}

    def _files(self, words: list[str], _: dict[str, str], body: bytes) -> tuple[int, Any]:
        if not words and not body:
            named = [{"id": name, "filename": f"{name}.jsonl"} for name in self.api.files]
            return 200, {"data": named, "has_more": False}
        if not words:
            return 200, self._put_file(body)
        data = self.api.files[words[0]]
        if words[1:] == ["content"]:
            return 307, f"{self.api.url}/storage/file/{words[0]}"
        return 200, {"id": words[0], "bytes": len(data), "filename": f"{words[0]}.jsonl"}

    def _uploads(self, words: list[str], _: dict[str, str], body: bytes) -> tuple[int, Any]:
        uploads = self.api.uploads
        if not words:
            upload_id = f"upload_{len(uploads) + 1}"
            new = {"id": upload_id, "status": "pending", "bytes": json.loads(body)["bytes"]}
            uploads[upload_id] = new | {"parts": {}, "file": None}
            return 200, self._shown(upload_id)
        if words[1:] == ["urls"]:
            base = f"{self.api.url}/storage/part/{words[0]}"
            numbers = json.loads(body)["part_numbers"]
            urls = [{"part_number": number, "url": f"{base}/{number}"} for number in numbers]
            return 200, {"part_bytes": PART_BYTES, "data": urls}
        if words[1:] == ["complete"]:
            return self._complete(words[0])
        return 200, self._shown(words[0])

    def _batches(self, words: list[str], query: dict[str, str], body: bytes) -> tuple[int, Any]:
        api = self.api
        if not words and body:
            return 200, api.make_batch(json.loads(body), self.headers.get("Idempotency-Key"))
        if not words:
            return 200, self._page(query)
        batch = api.batches[words[0]]
        if words[1:] == ["retry"]:
            return self._retry(batch, json.loads(body))
        if words[1:] == ["results"]:
            return 200, self._rows(batch, int(query["after_line"]))
        if self.command == "DELETE":
            batch["tidemill"] |= {"erasing_at": 1, "erased_at": batch["tidemill"].get("erasing_at")}
        elif words[1:] == ["cancel"]:
            batch["status"] = "cancelling"
        else:
            api.advance(batch)
        return 200, batch

    def _retry(self, batch: dict[str, Any], fields: dict[str, Any]) -> tuple[int, Any]:
        """Create a batch of the whole file, if the API has the route."""
        if self.api.retry_error is not None:
            return self.api.retry_error
        request = {"input_file_id": batch["input_file_id"], "endpoint": batch["endpoint"]}
        request["completion_window"] = batch["completion_window"]
        key = self.headers.get("Idempotency-Key")
        return 200, self.api.make_batch(request | {"retry": fields}, key)

    def _put_file(self, body: bytes) -> dict[str, Any]:
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        parts = message_from_bytes(head + body, policy=HTTP).get_payload()
        [content] = [part for part in parts if part.get_filename()]  # type: ignore[union-attr]
        # The library's parser reads lines: take the bytes from the body as they are.
        start = body.index(b"\r\n\r\n", body.index(b'filename="')) + 4
        end = body.index(b"\r\n--", start)
        file_id = f"file-{len(self.api.files) + 1}"
        self.api.files[file_id] = body[start:end]
        self.api.filenames.append(content.get_filename())  # type: ignore[union-attr,arg-type]
        return {"id": file_id, "bytes": end - start, "filename": content.get_filename()}  # type: ignore[union-attr]

    def _shown(self, upload_id: str) -> dict[str, Any]:
        upload = self.api.uploads[upload_id]
        ours = {"part_bytes": PART_BYTES, "uploaded": sorted(upload["parts"])}
        return {name: upload[name] for name in ("id", "status", "file")} | {"tidemill": ours}

    def _complete(self, upload_id: str) -> tuple[int, Any]:
        upload = self.api.uploads[upload_id]
        data = b"".join(upload["parts"][number] for number in sorted(upload["parts"]))
        if len(data) != upload["bytes"]:
            return 400, {"error": {"message": "Some bytes are missing.", "code": "incomplete"}}
        file_id = f"file-of-{upload_id}"
        self.api.files[file_id] = data
        upload |= {"status": "completed", "file": {"id": file_id, "bytes": len(data)}}
        return 200, self._shown(upload_id)

    def _page(self, query: dict[str, str]) -> dict[str, Any]:
        found = list(self.api.batches.values())[::-1]
        ids = [batch["id"] for batch in found]
        start = ids.index(query["after"]) + 1 if "after" in query else 0
        end = start + int(query["limit"])
        return {"data": found[start:end], "has_more": end < len(found)}

    def _rows(self, batch: dict[str, Any], after: int) -> dict[str, Any]:
        lines = list(enumerate(self.api.lines[batch["id"]], start=1))
        if batch["status"] in {"validating", "in_progress"}:
            # While it runs the odd ones are finished only, a gap behind each.
            lines = [(number, line) for number, line in lines if number % 2]
        data = [{"line": n, **json.loads(row_of(line))} for n, line in lines if n > after]
        page, through = data[:2], after
        for row in page:
            through += row["line"] == through + 1
        return {"data": page, "complete_through": through, "has_more": len(data) > len(page)}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Print nothing: tests disconnect clients on purpose."""


@contextmanager
def fake_api() -> Iterator[FakeApi]:
    """Serve an API on a free port until the block is left."""
    api = FakeApi()
    handler = type("Handler", (_Handler,), {"api": api})
    with _Server(("127.0.0.1", 0), handler) as server:
        api.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()

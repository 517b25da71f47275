"""Forms of any bytes against the Lambda itself: an answer in OpenAI's form, or the very file."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.handler.api.rig import answer_to, refusal_in, request_of
from tidemill.handler.api import app
from tidemill.handler.api.envelope.caller import Caller
from tidemill.handler.api.routers import files
from tidemill.handler.aws.calls import Operation
from tidemill.handler.deployment import Deployment
from tidemill.handler.settings import read_settings

_NAMES = st.one_of(st.sampled_from(["file", "purpose", "expires_after[seconds]"]), st.text())
_BOUNDARY = st.text("abcXYZ019'()+_,-./:=?", min_size=1, max_size=70)
_PATIENT = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


class Kept:
    """Stands in for AWS: remembers the objects that are put."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def run(self, operation: Operation[Any]) -> Any:
        """Answer every call with nothing."""
        answer: Any = None
        try:
            call = next(operation)
            while True:
                if call.method == "put_object":
                    self.bodies.append(call.arguments["Body"])
                call = operation.send({"VersionId": "v"})
        except StopIteration as stop:
            answer = stop.value
        return answer


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """Return what the route keeps; the tenant has no limits."""
    names = ("TABLE", "BUCKET", "CONTROL_QUEUE")
    deployment = Deployment(read_settings({f"TIDEMILL_{name}": "x" for name in names}))
    kept = Kept()
    monkeypatch.setattr(files, "aws", lambda: kept)
    monkeypatch.setattr(files, "deployment", lambda: deployment)
    monkeypatch.setattr(app, "admitted", lambda _: Caller("default"))
    monkeypatch.setattr(deployment.limits, "admit_bytes", nothing)
    return kept


def nothing(*_: Any) -> Operation[None]:
    """Ask nothing of AWS."""
    yield from ()


def posted(body: bytes, content_type: str) -> tuple[int, dict[str, Any]]:
    """Return the answer to a body, as status and error or file."""
    event = request_of("/v1/files", "POST")
    event["headers"] |= {"content-type": content_type}
    event |= {"body": base64.b64encode(body).decode(), "isBase64Encoded": True}
    answer = answer_to(event)
    if answer["statusCode"] == 200:
        return 200, json.loads(answer["body"])
    return refusal_in(answer)


def assembled(boundary: str, parts: list[tuple[str, str | None, bytes]]) -> bytes:
    """Return a form as a client writes one that knows nothing of quotes."""
    body = b""
    for name, filename, data in parts:
        named = "" if filename is None else f'; filename="{filename}"'
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
        body += head.encode("utf-8", "surrogatepass") + data + b"\r\n"
    return body + f"--{boundary}--\r\n".encode()


@_PATIENT
@given(st.binary(max_size=400), st.text(max_size=80))
@example(b"", "multipart/form-data; boundary=--")
@example(b"--a\r\n", "multipart/form-data; boundary=a")
@example(b"--a--", "multipart/form-data; boundary=a; boundary=b")
@example(b"--\xff\r\n", "multipart/form-data; boundary=\xff")
def test_whatever_is_sent_is_answered(kept: Kept, body: bytes, content_type: str) -> None:
    """A refusal that says why, and nothing is kept."""
    status, error = posted(body, content_type)
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert kept.bodies == []


@_PATIENT
@given(
    _BOUNDARY,
    st.lists(st.tuples(_NAMES, st.none() | st.text(), st.binary() | st.just(b"batch")), max_size=5),
)
def test_forms_of_any_fields_are_answered(
    kept: Kept, boundary: str, parts: list[tuple[str, str | None, bytes]]
) -> None:
    """Names, order and number of the fields are arbitrary."""
    kept.bodies.clear()
    status, _ = posted(assembled(boundary, parts), f'multipart/form-data; boundary="{boundary}"')
    assert status in {200, 400}
    assert len(kept.bodies) == (status == 200)


@_PATIENT
@given(_BOUNDARY, st.binary(min_size=1, max_size=3000), st.data())
def test_the_file_that_is_kept_is_the_one_that_was_sent(
    kept: Kept, boundary: str, content: bytes, data: st.DataObject
) -> None:
    """The file may contain text that looks like the form's own boundaries."""
    near = data.draw(st.sampled_from([b"", f"\r\n--{boundary[:-1]}".encode(), b"\r\n--", b"\r"]))
    content = content + near + data.draw(st.binary(max_size=20))
    if f"\r\n--{boundary}".encode() in b"\r\n" + content:
        return
    kept.bodies.clear()
    parts: list[tuple[str, str | None, bytes]] = [
        ("file", "x", content),
        ("purpose", None, b"batch"),
    ]
    ordered = data.draw(st.permutations(parts))
    status, made = posted(
        assembled(boundary, ordered), f'multipart/form-data; boundary="{boundary}"'
    )
    assert (status, made["bytes"]) == (200, len(content))
    assert kept.bodies == [content]


@pytest.mark.parametrize("decode", [str.encode, lambda text: text.encode("latin-1")])
def test_a_form_of_json_lines_keeps_their_letters(
    kept: Kept, decode: Callable[[str], bytes]
) -> None:
    """UTF-8 and what is not, to the byte."""
    content = decode('{"prompt": "Ä"}\n')
    status, _ = posted(
        assembled("b", [("purpose", None, b"batch"), ("file", "upload", content)]),
        "multipart/form-data; boundary=b",
    )
    assert status == 200
    assert kept.bodies == [content]

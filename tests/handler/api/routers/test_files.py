"""`/v1/files`, as OpenAI's SDK and curl use it, on each emulator."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import FileObject as TheirFile

from tests.handler.api.rig import (
    URL,
    Gateway,
    answer_to,
    body_as_sent,
    refusal_in,
    request_of,
)
from tests.handler.aws.given import make_batch
from tests.handler.intake.rig import Cloud, lines_of
from tidemill.batch.file_object import FileObject, content_disposition, display_name
from tidemill.batch.states import Status
from tidemill.batch.stored_file import File
from tidemill.handler.aws.bucket import SHORT_LIVED, read_range

LINES = lines_of(3)


def test_a_file_comes_back_as_it_was_sent(lab: OpenAI) -> None:
    """Created, retrieved, downloaded through the redirect, and deleted for good."""
    made = lab.files.create(file=("Fälle 1.jsonl", LINES), purpose="batch")
    assert made.filename == "Fälle 1.jsonl"
    assert (made.bytes, made.purpose, made.status) == (len(LINES), "batch", "processed")
    assert lab.files.retrieve(made.id) == made
    content = lab.files.content(made.id)
    assert content.read() == LINES
    query = content.response.url.params
    assert int(query["X-Amz-Expires"]) <= 3600
    assert query["X-Amz-Algorithm"] == "AWS4-HMAC-SHA256"
    named = query["response-content-disposition"]
    assert named == "attachment; filename=\"F_lle 1.jsonl\"; filename*=UTF-8''F%C3%A4lle%201.jsonl"
    deleted = lab.files.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    for gone in (lab.files.retrieve, lab.files.content, lab.files.delete):
        with pytest.raises(openai.NotFoundError):
            gone(made.id)


def test_a_client_that_does_not_follow_redirects_gets_advice(lab: OpenAI) -> None:
    """The body contains a sentence, because many clients show nothing else."""
    made = lab.files.create(file=("x", LINES), purpose="batch")
    url, headers = f"{URL}/v1/files/{made.id}/content", {"Authorization": f"Bearer {lab.api_key}"}
    with httpx.Client(transport=Gateway()) as http:
        answer = http.get(url, headers=headers)
    assert answer.status_code == 307
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert "Location" in answer.text
    assert answer.headers["location"] not in answer.text


def test_a_head_request_returns_the_size_of_a_file(lab: OpenAI) -> None:
    """HEAD works through the redirect: a presigned URL is valid for one method only."""
    made = lab.files.create(file=("x", LINES), purpose="batch")
    url, headers = f"{URL}/v1/files/{made.id}/content", {"Authorization": f"Bearer {lab.api_key}"}
    with httpx.Client(transport=Gateway()) as http:
        answer = http.head(url, headers=headers)
        gone = http.head(url.replace(made.id, "file-none"), headers=headers)
    assert (answer.status_code, gone.status_code) == (307, 404)
    found = httpx.head(answer.headers["location"])
    assert (found.status_code, found.headers["content-length"]) == (200, str(len(LINES)))


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_page_of_somebodys_is_never_shown_as_one(lab: OpenAI, *, is_chunked: bool) -> None:
    """Whatever its name and content, it comes from the bucket as a download, and not as HTML."""
    page = b"<script>alert(1)</script>"
    if is_chunked:
        upload = lab.uploads.upload_file_chunked(
            file=page, filename="x.html", bytes=len(page), mime_type="text/html", purpose="batch"
        )
        assert upload.file is not None
        file_id = upload.file.id
    else:
        file_id = lab.files.create(file=("x.html", page, "text/html"), purpose="batch").id
    answer = lab.files.content(file_id).response
    assert answer.content == page
    assert answer.url.host != httpx.URL(URL).host
    assert answer.headers["content-type"] == "application/x-ndjson"
    # Not every emulator honours the URL's parameters.
    assert answer.url.params["response-content-disposition"].startswith("attachment;")


def test_files_are_listed_page_by_page_in_either_order(lab: OpenAI) -> None:
    """Every file once, whatever the size of a page, also while each is deleted as it comes."""
    ids = [lab.files.create(file=b"{}\n", purpose="batch").id for _ in range(5)]
    newest_first = [file.id for file in lab.files.list()]
    assert newest_first == ids[::-1]
    for limit in (1, 2, 5, 6):
        assert [file.id for file in lab.files.list(limit=limit)] == newest_first
        ascending = [file.id for file in lab.files.list(limit=limit, order="asc")]
        assert ascending == newest_first[::-1]
    page = lab.files.list(limit=5, purpose="batch")
    assert (page.has_more, len(page.data)) == (False, 5)
    assert lab.files.list(purpose="batch_output").data == []
    seen = []
    for file in lab.files.list(limit=2):
        lab.files.delete(file.id)
        seen.append(file.id)
    assert seen == newest_first
    assert list(lab.files.list()) == []
    assert list(lab.batches.list()) == []


def test_a_file_is_its_tenants_alone(client_of: Callable[[str], OpenAI]) -> None:
    """Another tenant's is answered like one that never was, word for word."""
    own, other = client_of("lab"), client_of("other")
    file_id = own.files.create(file=LINES, purpose="batch").id
    assert list(other.files.list()) == []
    never = "file-" + "0" * 32

    def messages_of(file_id: str) -> set[str]:
        words = set()
        for ask in (
            other.files.retrieve,
            other.files.content,
            other.files.delete,
            lambda each: other.files.list(after=each),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                ask(file_id)
            words.add(caught.value.message.replace(file_id, "X"))
        return words

    assert messages_of(file_id) == messages_of(never)
    assert own.files.content(file_id).read() == LINES


@pytest.mark.parametrize("purpose", ["assistants", "fine-tune", "vision", "user_data", "evals", ""])
def test_files_for_anything_but_batches_are_refused(lab: OpenAI, purpose: str) -> None:
    """The words name the one purpose that there is."""
    with pytest.raises(openai.BadRequestError, match="`batch`") as caught:
        lab.files.create(file=LINES, purpose=purpose)  # type: ignore[arg-type]
    assert (caught.value.param, caught.value.code) == ("purpose", "invalid_purpose")


def test_our_file_is_openais() -> None:
    """Every key of theirs is one of ours, and no other."""
    assert set(FileObject.model_fields) == set(TheirFile.model_fields)


def posted(body: bytes, content_type: str = "multipart/form-data; boundary=b") -> dict[str, Any]:
    """Return the event of a body that is sent to the files."""
    event = request_of("/v1/files", "POST")
    event["headers"] |= {"content-type": content_type}
    return event | body_as_sent(body, content_type)


def form(*fields: str) -> bytes:
    """Return a form of fields `name=text`."""
    parts = (field.partition("=") for field in fields)
    texts = (f'Content-Disposition: form-data; name="{name}"\r\n\r\n{t}' for name, _, t in parts)
    return "".join(f"--b\r\n{text}\r\n" for text in texts).encode() + b"--b--\r\n"


@pytest.mark.parametrize(
    ("event", "status", "code", "param"),
    [
        (posted(b""), 400, "invalid_multipart", None),
        (posted(form("file=x")), 400, "invalid_parameter", "purpose"),
        (posted(form("purpose=batch")), 400, "invalid_parameter", "file"),
        (posted(form("purpose=batch", "file=")), 400, "empty_file", "file"),
        (posted(form("purpose=batch", "file=1", "file=2")), 400, "duplicate_field", "file"),
        (posted(form("file=1", "purpose=a", "purpose=a")), 400, "duplicate_field", "purpose"),
        (
            posted(form("file=1", "purpose=batch", "expires_after[seconds]=3600")),
            400,
            "invalid_request",
            "expires_after",
        ),
        (
            posted(form("file=1", "purpose=batch", "expires_after[seconds]=1e99")),
            400,
            "invalid_parameter",
            "expires_after[seconds]",
        ),
        (
            posted(form("file=1", "purpose=batch", "expires_after[anchor]=now")),
            400,
            "invalid_parameter",
            "expires_after[anchor]",
        ),
        (posted(b"{}", "application/json"), 400, "unsupported_content_type", None),
        (
            posted(b"a=b", "application/x-www-form-urlencoded"),
            400,
            "unsupported_content_type",
            None,
        ),
        (posted(b"", ""), 400, "unsupported_content_type", None),
        (posted(b"") | {"body": "%", "isBase64Encoded": True}, 400, "invalid_body", None),
        (posted(b"") | {"body": "\ud800", "isBase64Encoded": False}, 400, "invalid_body", None),
        (posted(form("purpose=batch", f"file={'x' * 4_400_000}")), 413, "request_too_large", None),
    ],
    ids=range(15),
)
@pytest.mark.usefixtures("cloud")
def test_a_wrong_body_is_refused_in_words(
    event: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    """The error has OpenAI's format and names the fault; nothing is stored."""
    found, error = refusal_in(answer_to(event))
    assert (found, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == "invalid_request_error"


def test_a_body_that_is_too_large_gets_advice(lab: OpenAI) -> None:
    """The advice is to upload in parts, or into the bucket."""
    with pytest.raises(openai.APIStatusError, match=r"/v1/uploads.*part_size.*input/") as caught:
        lab.files.create(file=bytes(4_400_000), purpose="batch")
    assert caught.value.status_code == 413


@pytest.mark.parametrize("is_base64", [True, False])
def test_a_body_of_text_may_come_either_way(cloud: Cloud, *, is_base64: bool) -> None:
    """API Gateway makes base64 of every form; others need not. What is unknown is left alone."""
    event = posted(form("more=1", "purpose=batch", "file=é"))
    if not is_base64:
        event |= {"body": base64.b64decode(event["body"]).decode(), "isBase64Encoded": False}
    answer = answer_to(event)
    assert answer["statusCode"] == 200
    made = json.loads(answer["body"])
    file = cloud.run(cloud.deployment.files.get_file(made["id"]))
    assert file is not None
    assert cloud.run(cloud.deployment.bucket.get(file.key)) == "é".encode()
    assert made["filename"] == "upload"


def test_a_file_expires_when_its_client_has_requested(lab: OpenAI, any_cloud: Cloud) -> None:
    """`expires_after` decides, else the deployment's retention; then the file is not found."""
    anchor: Any = {"anchor": "created_at", "seconds": 3600}
    made = lab.files.create(file=LINES, purpose="batch", expires_after=anchor)
    assert made.expires_at == made.created_at + 3600
    assert lab.files.create(file=LINES, purpose="batch").expires_at is None
    file = any_cloud.run(any_cloud.deployment.files.get_file(made.id))
    assert file is not None
    tags = any_cloud.aws.clients["s3"].get_object_tagging(Bucket=any_cloud.bucket, Key=file.key)
    assert [f"{tag['Key']}={tag['Value']}" for tag in tags["TagSet"]] == [SHORT_LIVED]
    any_cloud.run(any_cloud.deployment.files.put_file(replace(file, expires=1)))
    for gone in (lab.files.retrieve, lab.files.content, lab.files.delete):
        with pytest.raises(openai.NotFoundError):
            gone(made.id)
    assert made.id not in {file.id for file in lab.files.list()}
    for seconds in (3599, 2_592_001):
        with pytest.raises(openai.BadRequestError) as caught:
            lab.files.create(
                file=LINES, purpose="batch", expires_after=anchor | {"seconds": seconds}
            )
        assert caught.value.param == "expires_after[seconds]"


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("../../etc/x.jsonl", "x.jsonl"),
        ("C:\\a\\b.jsonl", "b.jsonl"),
        ("a\r\nSet-Cookie: b\x00\u202e", "aSet-Cookie: b"),
        ('a"; filename=b', 'a"; filename=b'),
        ("a\u200b\u061c\u2060\ufeffb", "ab"),
        ("\u200b", "upload"),
        ("a\u00ad\u180e\u034f\u2800\u3164\ufe0f\U000e0041\u200db", "ab"),
        (
            "\u0627\u0628 \u0915\u093f \U0001f30a.jsonl",
            "\u0627\u0628 \u0915\u093f \U0001f30a.jsonl",
        ),
        ("", "upload"),
        ("x" * 300, "x" * 255),
    ],
)
def test_a_name_is_shown_and_quoted_safely(sent: str, shown: str) -> None:
    """No path, nothing that ends a line or the quotes of a header."""
    name = display_name(sent)
    assert name == shown
    header = content_disposition(sent)
    assert header == content_disposition(name)
    assert header.isascii()
    assert header.isprintable()
    assert header.count('"') == 2


def test_batches_and_files_do_not_show_in_each_others_lists(lab: OpenAI, any_cloud: Cloud) -> None:
    """They share an index."""
    made = lab.files.create(file=LINES, purpose="batch")
    batch = replace(make_batch(any_cloud.deployment), tenant="lab")
    any_cloud.run(any_cloud.deployment.table.create_batch(batch))
    for order in ("asc", "desc"):
        assert [file.id for file in lab.files.list(limit=1, order=order)] == [made.id]
    assert [found.id for found in lab.batches.list(limit=1)] == [batch.id]


def test_a_batch_goes_on_when_its_file_is_deleted(lab: OpenAI, any_cloud: Cloud) -> None:
    """It may be deleted before validation or before the run: both read the pinned version."""
    lines = lines_of(7)
    file_id = lab.files.create(file=lines, purpose="batch").id
    batch_id = lab.batches.create(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
    ).id
    lab.files.delete(file_id)
    file = any_cloud.batch(batch_id).source
    assert not any_cloud.has_object(file.key)
    batch = any_cloud.ingest(any_cloud.batch(batch_id))
    assert (batch.status, batch.num_rows) == (Status.IN_PROGRESS, 7)
    read = b"".join(
        any_cloud.run(read_range(batch.source, shard.start, shard.end))
        for shard in any_cloud.shards(batch_id)
    )
    assert read == lines
    with pytest.raises(openai.BadRequestError):
        lab.batches.create(
            input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
        )


def test_a_result_is_the_version_that_its_batch_made(
    client_of: Callable[[str], OpenAI], any_cloud: Cloud
) -> None:
    """A later drop of the key writes over the object; the file of the older one stays its own."""
    client, files = client_of("default"), any_cloud.deployment.files
    made = []
    for number, data in enumerate((b"old\n", b"new\n")):
        drop = any_cloud.put(data, "output/x.jsonl")
        file_id = f"file-{number:032x}"
        any_cloud.run(
            files.put_file(
                File(
                    file_id,
                    "default",
                    drop.key,
                    len(data),
                    number,
                    "x.jsonl",
                    "batch_output",
                    version_id=drop.version_id,
                )
            )
        )
        made.append(file_id)
    old, new = made
    assert client.files.content(old).read() == b"old\n"
    assert client.files.content(new).read() == b"new\n"
    assert [file.id for file in client.files.list(purpose="batch_output")] == [new, old]
    client.files.delete(old)
    assert client.files.content(new).read() == b"new\n"
    assert any_cloud.has_object("output/x.jsonl")
    client.files.delete(new)
    assert not any_cloud.has_object("output/x.jsonl")

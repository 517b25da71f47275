"""`/v1/uploads`, as OpenAI's SDK and clients of ours use it, on each emulator."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import md5
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Upload as TheirUpload
from openai.types.uploads import UploadPart as TheirPart

from tests.handler.api.rig import answer_to, request_of
from tests.handler.intake.rig import Cloud
from tidemill.batch.parts import MAX_PARTS, MIN_COPIED_BYTES
from tidemill.batch.upload_object import (
    MAX_UPLOAD_BYTES,
    UploadObject,
    UploadPartObject,
    part_bytes_of,
    size_of_part,
)
from tidemill.handler.api.routers import upload_complete

MIB = 2**20
SMALL = 4 * MIB


def data_of(num_bytes: int) -> bytes:
    """Return bytes of which no stretch is like another."""
    block = b"".join(number.to_bytes(4, "big") for number in range(2**18))
    return (block * (num_bytes // len(block) + 1))[:num_bytes]


def begin(client: OpenAI, num_bytes: int, filename: str = "big.jsonl") -> str:
    """Return the id of a new upload."""
    return client.uploads.create(
        bytes=num_bytes, filename=filename, mime_type="application/jsonl", purpose="batch"
    ).id


def urls_of(client: OpenAI, upload_id: str, *numbers: int) -> dict[int, str]:
    """Return where parts are to be sent."""
    found = client.post(
        f"/uploads/{upload_id}/urls", body={"part_numbers": numbers}, cast_to=httpx.Response
    ).json()
    return {part["part_number"]: part["url"] for part in found["data"]}


def uploaded_of(client: OpenAI, upload_id: str) -> list[int]:
    """Return the numbers of the parts that an upload reports."""
    found = client.get(f"/uploads/{upload_id}", cast_to=httpx.Response).json()
    numbers: list[int] = found["tidemill"]["uploaded"]
    return numbers


def send(url: str, data: bytes) -> None:
    """Send a part as a browser does: the url alone is enough."""
    httpx.put(url, content=data, timeout=60).raise_for_status()


def refused(act: Callable[[], object]) -> tuple[int, str | None]:
    """Return status and code of what is refused."""
    with pytest.raises(openai.APIStatusError) as caught:
        act()
    return caught.value.status_code, caught.value.code


def test_the_sdk_uploads_a_file_in_chunks(lab: OpenAI, any_cloud: Cloud) -> None:
    """Parts come through the API and become one file in order; nothing is left of the parts."""
    data = data_of(14 * MIB + 7)
    upload = lab.uploads.upload_file_chunked(
        file=data,
        filename="x.jsonl",
        bytes=len(data),
        mime_type="application/jsonl",
        purpose="batch",
        part_size=SMALL,
        md5=md5(data, usedforsecurity=False).hexdigest(),
    )
    assert upload.status == "completed"
    assert upload.file is not None
    assert (upload.file.bytes, upload.file.filename) == (len(data), "x.jsonl")
    assert lab.files.content(upload.file.id).read() == data
    assert [file.id for file in lab.files.list()] == [upload.file.id]
    assert any_cloud.run(any_cloud.deployment.bucket.list_keys("work/")) == []


def test_parts_count_in_the_order_of_complete(lab: OpenAI) -> None:
    """The order of arrival does not matter; a part that is not named is left out."""
    upload_id = begin(lab, 6)
    parts = [lab.uploads.parts.create(upload_id, data=text) for text in (b"two", b"no", b"one")]
    ids = [parts[2].id, parts[0].id]
    done = lab.uploads.complete(upload_id, part_ids=ids)
    assert done.file is not None
    assert lab.files.content(done.file.id).read() == b"onetwo"
    assert lab.uploads.complete(upload_id, part_ids=ids) == done
    assert refused(lambda: lab.uploads.complete(upload_id, part_ids=ids[:1])) == (
        400,
        "upload_completed",
    )


def test_parts_that_are_not_the_file_are_refused(client_of: Callable[[str], OpenAI]) -> None:
    """Wrong bytes, named twice, of another upload or tenant; and then right."""
    lab, other = client_of("lab"), client_of("other")
    upload_id, neighbour = begin(lab, 3), begin(lab, 3)
    abroad = begin(other, 3)
    part = lab.uploads.parts.create(upload_id, data=b"one").id
    more = lab.uploads.parts.create(upload_id, data=b"x").id
    strange = lab.uploads.parts.create(neighbour, data=b"one").id
    foreign = other.uploads.parts.create(abroad, data=b"one").id
    for ids, code in (
        ([], "wrong_bytes"),
        ([more], "wrong_bytes"),
        ([part, more], "wrong_bytes"),
        ([part, part], "unknown_part"),
        ([strange], "unknown_part"),
        ([foreign], "unknown_part"),
        ([f"../{neighbour}/{strange}"], "unknown_part"),
        ([""], "unknown_part"),
    ):
        assert refused(lambda ids=ids: lab.uploads.complete(upload_id, part_ids=ids)) == (400, code)
    assert lab.uploads.complete(upload_id, part_ids=[part]).status == "completed"
    assert refused(lambda: other.uploads.complete(neighbour, part_ids=[strange])) == (
        404,
        "upload_not_found",
    )


def test_wrong_bytes_are_known_by_their_md5(lab: OpenAI, any_cloud: Cloud) -> None:
    """Nothing becomes a file, and the upload is over."""
    upload_id = begin(lab, 3)
    part = lab.uploads.parts.create(upload_id, data=b"one").id
    wrong = md5(b"two", usedforsecurity=False).hexdigest()
    assert refused(lambda: lab.uploads.complete(upload_id, part_ids=[part], md5=wrong)) == (
        400,
        "md5_mismatch",
    )
    assert refused(lambda: lab.uploads.complete(upload_id, part_ids=[part])) == (
        400,
        "upload_cancelled",
    )
    assert list(lab.files.list()) == []
    assert any_cloud.run(any_cloud.deployment.bucket.list_keys("files/")) == []
    large = begin(lab, upload_complete.MAX_MD5_BYTES + 1)
    assert refused(lambda: lab.uploads.complete(large, part_ids=[], md5=wrong)) == (
        400,
        "md5_unchecked",
    )


def test_an_upload_that_is_cancelled_takes_nothing(lab: OpenAI, any_cloud: Cloud) -> None:
    """Its parts go at once; to cancel it again changes nothing."""
    upload_id = begin(lab, 3)
    part = lab.uploads.parts.create(upload_id, data=b"one").id
    assert lab.uploads.cancel(upload_id).status == "cancelled"
    assert lab.uploads.cancel(upload_id).status == "cancelled"
    for act in (
        lambda: lab.uploads.parts.create(upload_id, data=b"one"),
        lambda: lab.uploads.complete(upload_id, part_ids=[part]),
        lambda: urls_of(lab, upload_id, 1),
    ):
        assert refused(act) == (400, "upload_cancelled")
    assert any_cloud.run(any_cloud.deployment.bucket.list_keys("work/")) == []
    done = begin(lab, 3)
    ids = [lab.uploads.parts.create(done, data=b"one").id]
    lab.uploads.complete(done, part_ids=ids)
    assert refused(lambda: lab.uploads.cancel(done)) == (400, "upload_completed")


def test_an_upload_expires(lab: OpenAI, any_cloud: Cloud) -> None:
    """It expires after an hour, or after a day if parts go to URLs."""
    upload_id, large = begin(lab, 3), begin(lab, 3)
    urls_of(lab, large, 1)
    uploads = any_cloud.deployment.uploads
    for known, hours in ((upload_id, 1), (large, 24)):
        upload = any_cloud.run(uploads.get_upload(known))
        assert upload is not None
        assert upload.expires_at - upload.created_at == hours * 3600
    part = lab.uploads.parts.create(upload_id, data=b"one").id
    upload = any_cloud.run(uploads.get_upload(upload_id))
    assert upload is not None
    any_cloud.run(uploads.update(*_late(upload_id)))
    found = lab.get(f"/uploads/{upload_id}", cast_to=httpx.Response).json()
    assert found["status"] == "expired"
    assert refused(lambda: lab.uploads.complete(upload_id, part_ids=[part])) == (
        400,
        "upload_expired",
    )


def _late(upload_id: str) -> tuple[dict[str, object], dict[str, object], str, dict[str, object]]:
    key: dict[str, object] = {"pk": f"UPLOAD#{upload_id}", "sk": "META"}
    return key, {"expires_at": 1}, "attribute_exists(pk)", {}


def test_parts_go_to_urls_and_become_the_file(lab: OpenAI) -> None:
    """Parts come in any order, some repeatedly, each with its own bytes: S3 lists them."""
    data = data_of(2 * 8 * MIB + 5)
    upload_id = begin(lab, len(data))
    parts = {number: data[(number - 1) * 8 * MIB : number * 8 * MIB] for number in (1, 2, 3)}
    urls = urls_of(lab, upload_id, 3, 1)
    assert uploaded_of(lab, upload_id) == []
    for number in (3, 1, 3):
        send(urls[number], parts[number])
    assert uploaded_of(lab, upload_id) == [1, 3]
    with pytest.raises(openai.BadRequestError, match="2") as caught:
        lab.uploads.complete(upload_id, part_ids=[])
    assert caught.value.code == "missing_parts"
    send(urls_of(lab, upload_id, 2)[2], parts[2])
    digest = md5(data, usedforsecurity=False).hexdigest()
    done = lab.uploads.complete(upload_id, part_ids=[], md5=digest)
    assert done.file is not None
    assert lab.files.content(done.file.id).read() == data
    assert lab.uploads.complete(upload_id, part_ids=[]) == done


def test_the_two_ways_are_not_mixed(lab: OpenAI) -> None:
    """Bytes of the one never come between those of the other."""
    upload_id = begin(lab, 3)
    part = lab.uploads.parts.create(upload_id, data=b"one").id
    send(urls_of(lab, upload_id, 1)[1], b"two")
    assert refused(lambda: lab.uploads.complete(upload_id, part_ids=[part])) == (400, "other_parts")
    done = lab.uploads.complete(upload_id, part_ids=[])
    assert done.file is not None
    assert lab.files.content(done.file.id).read() == b"two"


@pytest.mark.parametrize(
    ("numbers", "param"),
    [([], "part_numbers"), ([0], None), ([2], "part_numbers"), ([1] * 101, "part_numbers")],
)
def test_urls_are_for_parts_that_the_file_has(
    client: OpenAI, numbers: list[int], param: str | None
) -> None:
    """A file of 3 bytes has one part."""
    upload_id = begin(client, 3)
    with pytest.raises(openai.BadRequestError) as caught:
        urls_of(client, upload_id, *numbers)
    assert (caught.value.param or "").partition(".")[0] == (param or "part_numbers")


def test_a_completion_out_of_time_goes_on_where_it_was(
    lab: OpenAI, any_cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call gets further, the SDK calls again by itself, and no part is sent twice."""
    data = data_of(20 * MIB)
    upload_id = begin(lab, len(data))
    ids = [
        lab.uploads.parts.create(upload_id, data=data[start : start + SMALL]).id
        for start in range(0, len(data), SMALL)
    ]
    sent: list[int] = []
    send_part = type(any_cloud.deployment.bucket).upload_part

    def counted(bucket: Any, key: str, multipart_id: str, number: int, body: Any) -> Any:
        sent.append(number)
        return send_part(bucket, key, multipart_id, number, body)

    monkeypatch.setattr(type(any_cloud.deployment.bucket), "upload_part", counted)
    patience = iter([60.0, 0.0, 60.0, 0.0])
    monkeypatch.setattr(
        "tidemill.handler.api.routers.uploads._time_left", lambda: next(patience, 60.0)
    )
    for _ in range(2):
        answer = reply_to_complete(lab, upload_id, ids)
        assert answer["statusCode"] == 503
        assert answer["headers"]["Retry-After"] == "1"
    done = lab.uploads.complete(upload_id, part_ids=ids)
    assert done.file is not None
    assert lab.files.content(done.file.id).read() == data
    # The last part is one object, which S3 copies itself.
    assert sent == [1, 2]


def reply_to_complete(client: OpenAI, upload_id: str, ids: list[str]) -> dict[str, Any]:
    """Return the answer of one call to complete, which the SDK would repeat."""
    event = request_of(f"/v1/uploads/{upload_id}/complete", "POST")
    key = f"Bearer {client.api_key}"
    event["headers"] |= {"content-type": "application/json", "authorization": key}
    return answer_to(event | {"body": json.dumps({"part_ids": ids}), "isBase64Encoded": False})


@pytest.mark.parametrize(
    "fields",
    [
        {"bytes": 0},
        {"bytes": -1},
        {"bytes": MAX_UPLOAD_BYTES + 1},
        {"bytes": "3"},
        {"bytes": 1.5},
        {"bytes": None},
        {"filename": ""},
        {"filename": None},
        {"purpose": "vision"},
        {"expires_after": {"anchor": "created_at", "seconds": 1}},
    ],
)
def test_an_upload_that_cannot_be_is_refused(client: OpenAI, fields: dict[str, Any]) -> None:
    """It is refused before anything is stored, and the parameter is named."""
    good = {"bytes": 3, "filename": "x", "mime_type": "text/plain", "purpose": "batch"}
    with pytest.raises(openai.BadRequestError) as caught:
        client.uploads.create(**(good | fields))
    assert (caught.value.param or "").partition(".")[0] in fields


@pytest.mark.parametrize("num_bytes", [1, 8 * MIB, 8 * MIB + 1, 10**9, 10**11, MAX_UPLOAD_BYTES])
def test_parts_are_such_as_s3_takes(num_bytes: int) -> None:
    """Parts have one size except the last, at least 5 MiB, and there are at most 10,000."""
    part_bytes = part_bytes_of(num_bytes)
    num_parts = -(-num_bytes // part_bytes)
    assert part_bytes >= MIN_COPIED_BYTES
    assert num_parts <= MAX_PARTS
    sizes = [size_of_part(num_bytes, number) for number in range(1, num_parts + 1)]
    assert sum(sizes) == num_bytes
    assert set(sizes[:-1]) <= {part_bytes}
    assert size_of_part(num_bytes, num_parts + 1) < 1


def test_our_uploads_are_openais() -> None:
    """Every key of theirs is one of ours; `tidemill` is ours alone."""
    assert set(UploadObject.model_fields) == {*TheirUpload.model_fields, "tidemill"}
    assert set(UploadPartObject.model_fields) == set(TheirPart.model_fields)


def test_a_file_of_an_upload_expires_when_its_client_has_requested(client: OpenAI) -> None:
    """Its lifetime counts from the upload's completion."""
    upload_id = client.uploads.create(
        bytes=3,
        filename="../x.jsonl",
        mime_type="text/plain",
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    ).id
    part = client.uploads.parts.create(upload_id, data=b"one")
    done = client.uploads.complete(upload_id, part_ids=[part.id])
    assert done.file is not None
    assert done.file.expires_at == done.file.created_at + 3600
    assert done.file.filename == "x.jsonl"

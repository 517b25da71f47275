"""`/v1/uploads` of a local server: files in parts, with OpenAI's SDK and by part URLs."""

from __future__ import annotations

import asyncio
from hashlib import md5
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Upload

from tests.server.local.rig import Local, serving
from tidemill.batch.upload_object import part_bytes_of

DATA = bytes(range(256)) * 40_000  # 9.8 MiB: two parts
BEGUN = {"filename": "../in.jsonl", "mime_type": "application/jsonl", "purpose": "batch"}


async def begin(local: Local, num_bytes: int) -> str:
    """Return the ID of a new upload."""
    made = await local.client.post("/v1/uploads", json=BEGUN | {"bytes": num_bytes})
    assert made.status_code == 200, made.text
    Upload.model_validate(made.json(), strict=True)
    return str(made.json()["id"])


async def add(local: Local, upload_id: str, data: bytes) -> str:
    """Send a part as a form and return its ID."""
    path = f"/v1/uploads/{upload_id}/parts"
    made = await local.client.post(path, files={"data": ("part", data)})
    assert made.status_code == 200, made.text
    return str(made.json()["id"])


async def end(local: Local, upload_id: str, part_ids: list[str], **fields: str) -> httpx.Response:
    """Complete an upload."""
    return await local.client.post(
        f"/v1/uploads/{upload_id}/complete", json={"part_ids": part_ids, **fields}
    )


def code_of(answer: httpx.Response) -> tuple[int, str]:
    """Return status and code of an error response."""
    return answer.status_code, answer.json()["error"]["code"]


async def test_the_sdk_uploads_a_file_in_chunks(tmp_path: Path) -> None:
    """Its parts become one file with the bytes in order, and are deleted."""
    async with serving(tmp_path) as local:
        client = openai.AsyncOpenAI(
            base_url="http://server/v1", api_key="any", http_client=local.client
        )
        upload = await client.uploads.upload_file_chunked(
            file=DATA,
            filename="in.jsonl",
            bytes=len(DATA),
            mime_type="application/jsonl",
            purpose="batch",
            part_size=2**20,
            md5=md5(DATA, usedforsecurity=False).hexdigest(),
        )
        assert upload.file is not None
        found = await client.files.content(upload.file.id)
        names = [file.filename async for file in client.files.list()]
    assert upload.status == "completed"
    assert found.content == DATA
    assert names == ["in.jsonl"]
    assert [*(tmp_path / "uploads").iterdir()] == [*(tmp_path / "incoming").iterdir()] == []


async def test_parts_are_joined_in_the_order_of_complete(tmp_path: Path) -> None:
    """Unlisted parts are left out, and a repeated complete returns the same file."""
    async with serving(tmp_path) as local:
        upload_id = await begin(local, 6)
        ids = [await add(local, upload_id, text) for text in (b"two", b"no", b"one")]
        done = await end(local, upload_id, [ids[2], ids[0]])
        again = await end(local, upload_id, [ids[2], ids[0]])
        other = await end(local, upload_id, [ids[0], ids[2]])
        late = await local.client.post(f"/v1/uploads/{upload_id}/cancel")
        file = done.json()["file"]
        found = await local.client.get(f"/v1/files/{file['id']}/content")
    assert found.content == b"onetwo"
    assert file["filename"] == "in.jsonl"
    assert done.json() == again.json()
    assert code_of(other) == code_of(late) == (400, "upload_completed")


async def test_invalid_parts_are_refused(tmp_path: Path) -> None:
    """A refusal loses nothing: the right parts make the file afterwards."""
    async with serving(tmp_path) as local:
        upload_id, other = await begin(local, 3), await begin(local, 3)
        part, more = await add(local, upload_id, b"one"), await add(local, upload_id, b"x")
        strange = await add(local, other, b"one")
        for ids, code in (
            ([], "wrong_bytes"),
            ([more], "wrong_bytes"),
            ([part, part], "unknown_part"),
            ([strange], "unknown_part"),
            ([f"../{other}/{strange}"], "unknown_part"),
            ([""], "unknown_part"),
        ):
            assert code_of(await end(local, upload_id, ids)) == (400, code)
        assert (await end(local, upload_id, [part])).json()["status"] == "completed"


async def test_wrong_bytes_are_detected_by_their_md5(tmp_path: Path) -> None:
    """The upload has then ended, as in the cloud."""
    async with serving(tmp_path) as local:
        upload_id = await begin(local, 3)
        part = await add(local, upload_id, b"one")
        assert code_of(await end(local, upload_id, [part], md5="0" * 32)) == (400, "md5_mismatch")
        assert code_of(await end(local, upload_id, [part])) == (400, "upload_cancelled")
        assert (await local.client.get("/v1/files")).json()["data"] == []


async def test_numbered_parts_are_put_to_urls_of_the_server(tmp_path: Path) -> None:
    """They may come in any order; the server lists the received ones, also after a restart."""
    size = part_bytes_of(len(DATA))
    async with serving(tmp_path) as local:
        upload_id = await begin(local, len(DATA))
        own = f"/v1/uploads/{upload_id}"
        named = await local.client.post(f"{own}/urls", json={"part_numbers": [2, 1]})
        urls = {part["part_number"]: part["url"] for part in named.json()["data"]}
        short = await local.client.put(f"{own}/{urls[2]}", content=DATA[size + 1 :])
        assert code_of(short) == (400, "wrong_bytes")
        assert (await local.client.put(f"{own}/{urls[2]}", content=DATA[size:])).is_success
        assert code_of(await end(local, upload_id, [])) == (400, "missing_parts")
        for number in (0, 3, 10**20, "1" * 5_000, "-1", "1_0", "%D9%A1", "one"):
            unknown = await local.client.put(f"{own}/parts/{number}", content=b"x")
            assert code_of(unknown) == (400, "unknown_part")
    async with serving(tmp_path) as local:
        seen = (await local.client.get(own)).json()
        assert seen["tidemill"] == {"part_bytes": size, "uploaded": [2]}
        assert (await local.client.put(f"{own}/{urls[1]}", content=DATA[:size])).is_success
        done = await end(local, upload_id, [])
        found = await local.client.get(f"/v1/files/{done.json()['file']['id']}/content")
    assert found.content == DATA


async def test_a_cancelled_upload_accepts_no_more_parts(tmp_path: Path) -> None:
    """Its parts are deleted, and a second cancel changes nothing."""
    async with serving(tmp_path) as local:
        upload_id = await begin(local, 3)
        own = f"/v1/uploads/{upload_id}"
        part = await add(local, upload_id, b"one")
        for _ in range(2):
            cancelled = await local.client.post(f"{own}/cancel")
            assert cancelled.json()["status"] == "cancelled"
        refusals = [
            await end(local, upload_id, [part]),
            await local.client.post(f"{own}/parts", files={"data": ("part", b"two")}),
            await local.client.post(f"{own}/urls", json={"part_numbers": [1]}),
            await local.client.put(f"{own}/parts/1", content=b"one"),
        ]
    assert [code_of(refusal) for refusal in refusals] == [(400, "upload_cancelled")] * 4
    assert [*(tmp_path / "uploads").iterdir()] == []


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"bytes": 0}, 400, "invalid_parameter"),
        ({"bytes": "3"}, 400, "invalid_parameter"),
        ({"bytes": 2**20 + 1}, 413, "body_too_large"),
        ({"purpose": "assistants"}, 400, "invalid_purpose"),
    ],
)
async def test_an_invalid_upload_is_refused_at_once(
    tmp_path: Path, fields: dict[str, Any], status: int, code: str
) -> None:
    """It is refused before any of it is sent."""
    async with serving(tmp_path, max_file_bytes=2**20) as local:
        made = await local.client.post("/v1/uploads", json=BEGUN | {"bytes": 3} | fields)
        missing = await local.client.get("/v1/uploads/upload_1")
    assert code_of(made) == (status, code)
    assert code_of(missing) == (404, "upload_not_found")


async def test_two_concurrent_completes_create_one_file(tmp_path: Path) -> None:
    """The second one returns the first one's file."""
    async with serving(tmp_path) as local:
        upload_id = await begin(local, 3)
        part = await add(local, upload_id, b"one")
        ends = await asyncio.gather(*(end(local, upload_id, [part]) for _ in range(2)))
        listed = (await local.client.get("/v1/files")).json()["data"]
    assert ends[0].json() == ends[1].json()
    assert len(listed) == 1

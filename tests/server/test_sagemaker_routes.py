"""SageMaker's routes: requests recognised by their fields, and lines with their rows."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import pytest

from tests.server.rig import SECONDS, HeldEngine, site
from tidemill.batch.file.lines import RawLine, read_lines
from tidemill.server import sagemaker_routes


@pytest.mark.parametrize(
    ("body", "url"),
    [
        ({"messages": []}, "/v1/chat/completions"),
        ({"prompt": "a"}, "/v1/completions"),
        ({"input": "a"}, "/v1/embeddings"),
        ({"input": "a", "questions": []}, "/v1/decisions"),
        ({"state": None, "questions": {}, "instructions": "a"}, "/v1/systemone"),
        ({"input": "a", "max_output_tokens": 5}, "/v1/responses"),
        ({"input": "a", "instructions": "b"}, "/v1/responses"),
        ({"query": "a", "documents": []}, "/v1/rerank"),
        ({"texts": ["a"]}, "/v2/embed"),
        ({"inputs": []}, "/v2/embed"),
        ({"text_1": "a", "text_2": "b"}, "/v1/score"),
        ({"queries": "a", "documents": []}, "/v1/score"),
        ({"file_url": "data:"}, "/v1/audio/transcriptions"),
    ],
)
async def test_a_request_is_recognised_by_its_fields(body: dict[str, Any], url: str) -> None:
    """SageMaker has one URL for all of them."""
    async with site() as place:
        answer = await place.client.post("/invocations", json=body)
        assert answer.json() == {"url": url, "body": body}


def test_the_input_of_a_classifier_is_labeled() -> None:
    """The model has no vectors."""
    body = {"input": "a"}
    assert sagemaker_routes._parse_request(body, ["/v1/classify"]) == ("/v1/classify", body)


async def test_a_request_may_name_its_url() -> None:
    """It then has the same form as a line of a file."""
    async with site() as place:
        request = {"url": "/v1/embeddings", "body": {"messages": []}}
        assert (await place.client.post("/invocations", json=request)).json() == request


async def test_an_unrecognisable_request_is_refused() -> None:
    """The error lists the fields that would identify it."""
    async with site() as place:
        answer = await place.client.post("/invocations", json={"a": 1})
        assert answer.status_code == 400
        assert "messages" in answer.json()["error"]["message"]


async def test_a_stream_stays_a_stream() -> None:
    """InvokeEndpointWithResponseStream passes it on."""
    async with site() as place:
        answer = await place.client.post("/invocations", json={"prompt": "a", "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")


LINES = [
    {"custom_id": f"{i}", "method": "POST", "url": "/v1/completions", "body": {"reply": {"i": i}}}
    for i in range(200)
]


async def test_lines_become_rows_in_input_order() -> None:
    """Each line has one row, also an invalid line; blank lines have none."""
    async with site() as place:
        data = [json.dumps(line).encode() for line in LINES]
        data[3:3] = [b"", b"{broken"]
        answer = await place.client.post(
            "/invocations",
            content=b"\n".join(data),
            headers={"content-type": "application/jsonlines"},
        )
        rows = [json.loads(row) for row in answer.text.splitlines()]
        bad = rows.pop(3)
        assert bad["response"]["status_code"] == 400 if bad["response"] else bad["error"]
        assert [row["response"]["body"]["i"] for row in rows] == [*range(200)]


async def test_lines_are_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of blank lines do not block other requests."""
    threads = set()

    def noting(stream: BytesIO) -> Iterator[RawLine]:
        for raw in read_lines(stream):
            threads.add(threading.current_thread())
            yield raw

    monkeypatch.setattr(sagemaker_routes, "read_lines", noting)
    async with site() as place:
        data = b"\n" * 9 + json.dumps(LINES[0]).encode()
        kind = {"content-type": "application/jsonlines"}
        answer = await place.client.post("/invocations", content=data, headers=kind)
        assert answer.json()["custom_id"] == "0"
    assert threads
    assert threading.current_thread() not in threads


async def test_a_client_that_disconnects_ends_its_lines() -> None:
    """Running lines are cancelled, and no more start."""
    engine = HeldEngine()
    async with site(engine=engine) as place:
        reader, writer = await place.connect()
        wait = {**LINES[0], "body": {"wait": True}}
        body = b"\n".join([json.dumps(wait).encode()] * 50)
        writer.write(
            b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-type: application/jsonlines\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
        await asyncio.wait_for(engine.has_request.wait(), SECONDS)
        writer.close()
        await asyncio.wait_for(engine.is_left.wait(), SECONDS)
        await asyncio.wait_for(place.context.admission.wait_until_empty(), SECONDS)
        assert len(engine.requests) < 50


async def test_execution_parameters_describe_the_limits() -> None:
    """They are within SageMaker's own limits."""
    async with site() as place:
        parameters = (await place.client.get("/execution-parameters")).json()
        assert parameters == {
            "MaxConcurrentTransforms": 2,
            "BatchStrategy": "MULTI_RECORD",
            "MaxPayloadInMB": 25,
        }

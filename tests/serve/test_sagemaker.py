"""A server behind SageMaker: its health check, single requests and batch transform lines."""

from __future__ import annotations

import json

import httpx

from bench.server.served import Place
from tidemill import demo

CHAT = {"messages": [{"role": "user", "content": "What is 7 plus 5?"}], "max_tokens": 8}
LINES = "".join(
    json.dumps(
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": url,
            "body": {"model": demo.NAME, **body},
        }
    )
    + "\n"
    for number, (url, body) in enumerate(
        [
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"prompt": "The tide", "max_tokens": 4}),
            ("/v1/chat/completions", {**CHAT, "temperature": -1}),
        ]
    )
)


def invoke(place: Place, content: str, kind: str = "application/json") -> httpx.Response:
    """Return the answer to a body at `/invocations`."""
    headers = {**place.headers, "Content-Type": kind}
    return httpx.post(f"{place.url}/invocations", content=content, headers=headers, timeout=60)


def test_a_ping_needs_no_key(place: Place) -> None:
    """SageMaker sends no key."""
    assert httpx.get(f"{place.url}/ping").status_code == 200


def test_one_request_is_answered_whole_or_streamed(place: Place) -> None:
    """Its fields identify the endpoint, as users of a SageMaker endpoint send it."""
    reply = invoke(place, json.dumps(CHAT))
    assert reply.json()["choices"][0]["message"]["content"]
    reply = invoke(place, json.dumps({"prompt": "The tide", "max_tokens": 4, "stream": True}))
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.rstrip().endswith("data: [DONE]")
    assert invoke(place, "{}").status_code == 400


def test_lines_become_rows(place: Place) -> None:
    """They keep their order, as in a batch transform; an invalid line becomes an error row."""
    reply = invoke(place, LINES, "application/jsonlines")
    assert reply.status_code == 200
    rows = [json.loads(row) for row in reply.text.splitlines()]
    assert [row["custom_id"] for row in rows] == ["line-0", "line-1", "line-2"]
    assert [row["response"]["status_code"] for row in rows] == [200, 200, 400]


def test_a_payload_at_the_limit_is_accepted(place: Place) -> None:
    """The limit of `/execution-parameters` is inclusive."""
    reply = httpx.get(f"{place.url}/execution-parameters", headers=place.headers).json()
    most = reply["MaxPayloadInMB"] * 2**20
    line = json.dumps({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x" * 2**20}})
    many = f"{line}\n" * (most // (len(line) + 1))
    assert most - len(many) < 2**21
    rows = invoke(place, many, "application/jsonlines").text.splitlines()
    assert len(rows) == many.count("\n")
    assert {json.loads(row)["response"]["status_code"] for row in rows} == {400}

"""Requests over a port: their way to the engine and back, and refusals."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import openai
import pytest
from pydantic_core import from_json, to_json
from starlette.types import Receive

from tests.server.rig import MODEL, SECONDS, HeldEngine, site
from tidemill.engine.errors import EngineClosed
from tidemill.protocol import json_bodies, json_slices
from tidemill.protocol.contract import Reply
from tidemill.protocol.requests import num_sequences
from tidemill.server import errors
from tidemill.server import sse as module
from tidemill.server.admission import AdmissionControl
from tidemill.server.errors import Refused
from tidemill.server.request_bodies import BodyReader

CHAT = "/v1/chat/completions"


async def test_a_body_reaches_the_engine_and_its_reply_the_client() -> None:
    """Both pass unchanged, with the engine's status."""
    async with site() as place:
        answer = await place.client.post(CHAT, json={"a": [1, "é"]})
        assert (answer.status_code, answer.json()) == (200, {"url": CHAT, "body": {"a": [1, "é"]}})
        answer = await place.client.post(CHAT, json={"status": 418, "reply": {"x": None}})
        assert (answer.status_code, answer.json()) == (418, {"x": None})


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/embeddings"])
async def test_a_base_url_without_a_version_works(path: str) -> None:
    """Batch lines may use it too, and datatrove's runner uses it on remote machines."""
    async with site() as place:
        answer = await place.client.post(path, json={"a": 1})
        assert (answer.status_code, answer.json()) == (200, {"url": path, "body": {"a": 1}})


async def test_the_tokenizer_is_described() -> None:
    """lm-evaluation-harness starts with this GET, and the engine has the answer."""
    async with site() as place:
        answer = await place.client.get("/tokenizer_info")
        assert (answer.status_code, answer.json()["url"]) == (200, "/tokenizer_info")
        assert (await place.client.post("/tokenizer_info", json={})).status_code == 405


async def test_a_stream_is_sent_as_events() -> None:
    """Each chunk is sent at once, in UTF-8, and the last event is `[DONE]`."""
    async with site() as place:
        body = {"stream": True, "wait": True}
        async with place.client.stream("POST", CHAT, json=body) as answer:
            lines = answer.aiter_lines()
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert await anext(lines) == 'data: {"say":"é"}'
            assert not place.engine.is_left.is_set()
            place.engine.go.set()
            rest = [line async for line in lines if line]
        assert rest == ['data: {"say":"x"}', "data: [DONE]"]


async def test_comments_keep_a_waiting_stream_alive() -> None:
    """They are sent before the first token and between tokens; clients skip them."""
    async with site(comment_seconds=0.02) as place:
        body = {"stream": True, "wait": True, "late": True}
        async with place.client.stream("POST", CHAT, json=body) as answer:
            lines = answer.aiter_lines()
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert [await anext(lines) for _ in range(4)] == [": waiting", ""] * 2
            place.engine.go.set()
            rest = [line async for line in lines if line and line != ": waiting"]
        assert rest == ['data: {"say":"é"}', 'data: {"say":"x"}', "data: [DONE]"]
        place.engine.go.clear()
        del body["late"]
        async with place.client.stream("POST", CHAT, json=body) as answer:
            lines = answer.aiter_lines()
            assert [await anext(lines) for _ in range(3)] == ['data: {"say":"é"}', "", ": waiting"]


async def test_openais_client_skips_comments() -> None:
    """It yields only the chunks."""
    async with (
        site(comment_seconds=0.02) as place,
        openai.AsyncOpenAI(base_url=f"{place.client.base_url}/v1", api_key="k") as client,
    ):
        asyncio.get_running_loop().call_later(0.1, place.engine.go.set)
        stream = await client.chat.completions.create(
            model=MODEL, messages=[], stream=True, extra_body={"late": True}
        )
        assert [chunk.model_extra async for chunk in stream] == [{"say": "é"}, {"say": "x"}]


async def test_an_error_after_the_headers_of_a_stream_is_an_event() -> None:
    """The status cannot change any more; an engine error still stops the server."""
    async with site(comment_seconds=0.02) as place:
        for wrong, code in (({"status": 400, "reply": {"error": {"code": "no"}}}, "no"), ({}, "")):
            place.engine.go.clear()
            body = {"stream": True, "late": True, **wrong}
            async with place.client.stream("POST", CHAT, json=body) as answer:
                lines = answer.aiter_lines()
                assert await anext(lines) == ": waiting"
                place.engine.is_engine_lost = not code
                place.engine.go.set()
                events = [line async for line in lines if line.startswith("data: {")]
            assert json.loads(events[0].removeprefix("data: "))["error"]["code"] == (
                code or EngineClosed.code
            )
        await asyncio.wait_for(asyncio.shield(place.serving), SECONDS)  # admission is closed


async def test_a_client_that_disconnects_before_a_late_stream_ends_its_request() -> None:
    """The server keeps nothing of it."""
    async with site(comment_seconds=0.02) as place:
        body = {"stream": True, "late": True}
        async with place.client.stream("POST", CHAT, json=body) as answer:
            assert await anext(answer.aiter_lines()) == ": waiting"
        await asyncio.wait_for(place.engine.is_left.wait(), SECONDS)
        await asyncio.wait_for(place.context.admission.wait_until_empty(), SECONDS)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_disconnects_ends_its_request(*, stream: bool) -> None:
    """The server keeps nothing of it, whether or not a response has started."""
    async with site() as place:
        reader, writer = await place.connect()
        body = json.dumps({"stream": stream, "wait": True}).encode()
        head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % (CHAT.encode(), len(body)) + body)
        await asyncio.wait_for(place.engine.has_request.wait(), SECONDS)
        if stream:
            await reader.readuntil(b'{"say"')
        writer.close()
        await asyncio.wait_for(place.engine.is_left.wait(), SECONDS)
        await asyncio.wait_for(place.context.admission.wait_until_empty(), SECONDS)
        metrics = (await place.client.get("/metrics")).text
        assert f'{{route="{CHAT}",status="{200 if stream else 499}"}} 1.0' in metrics
        assert 'status="500"' not in metrics


@pytest.mark.parametrize(
    ("method", "path", "fields", "status", "code"),
    [
        ("POST", "/v1/nothing", {"json": {}}, 404, "unknown_url"),
        ("POST", "/v1/chat/completions/", {"json": {}}, 404, "unknown_url"),
        ("GET", CHAT, {}, 405, "method_not_allowed"),
        ("POST", CHAT, {"content": b"{"}, 400, "invalid_json"),
        ("POST", CHAT, {"content": b"[]"}, 400, "invalid_json"),
        ("POST", CHAT, {"content": b""}, 400, "invalid_json"),
        ("POST", CHAT, {"content": b"[" * 1000}, 400, "invalid_json"),
        ("POST", CHAT, {"data": {"a": "b"}}, 415, "unsupported_media_type"),
        ("POST", CHAT, {"content": b" " * 5_000}, 413, "body_too_large"),
        ("GET", "/v1/models/none", {}, 404, "model_not_found"),
        ("POST", CHAT, {"json": {"bug": 1}}, 500, "internal"),
    ],
)
async def test_errors_have_openais_format(
    method: str, path: str, fields: dict[str, Any], status: int, code: str
) -> None:
    """They have a status, a code and a message, and no internal details."""
    async with site(max_body_bytes=4_000) as place:
        answer = await place.client.request(method, path, **fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, code)
        assert error["message"]
        assert "Zero" not in error["message"]
        assert set(error) == {"message", "type", "param", "code"}


async def test_a_chunked_body_is_limited_while_it_arrives() -> None:
    """It has no Content-Length and no end."""
    async with site(max_body_bytes=4_000) as place:

        async def endless() -> Any:
            for _ in range(20):
                yield b" " * 1_000

        answer = await place.client.post(CHAT, content=endless())
        assert answer.status_code == 413


async def test_a_body_of_far_too_many_values_is_refused_before_it_is_parsed() -> None:
    """A megabyte of empty lists would take thirty megabytes of memory."""
    async with site() as place:
        answer = await place.client.post(CHAT, content=b'{"a":[' + b"[]," * 300_000 + b"1]}")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (413, "body_too_large")
        assert error["message"].startswith("The body has more than 65,536 lists and objects")
        assert place.engine.requests == []


async def test_a_large_body_is_parsed_in_slices_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One parser call holds the GIL, and so the loop, until it returns."""
    calls: list[tuple[int, int]] = []

    def parse_and_note(data: bytes, **options: Any) -> Any:
        calls.append((threading.get_ident(), len(data)))
        return from_json(data, **options)

    for parsing in (json_bodies, json_slices):
        monkeypatch.setattr(parsing, "from_json", parse_and_note)
    async with site() as place:
        body = json.dumps({"text": "é\n" * 600_000}).encode()
        answer = await place.client.post(CHAT, content=body)
    assert answer.status_code == 200
    assert threading.get_ident() not in {thread for thread, _ in calls}
    assert max(size for _, size in calls) < len(body) / 10


async def test_a_compressed_body_is_refused_as_compressed() -> None:
    """The error does not call it invalid JSON."""
    async with site() as place:
        answer = await place.client.post(CHAT, content=b"{}", headers={"Content-Encoding": "gzip"})
        assert answer.status_code == 415
        message = "Content-Encoding gzip is not supported: send the body uncompressed."
        assert answer.json()["error"]["message"] == message


async def test_a_body_that_does_not_arrive_times_out() -> None:
    """The client gets an error response."""
    async with site(body_seconds=0.05) as place:
        head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"
        reader, writer = await place.connect()
        writer.write(head % CHAT.encode())
        status = await asyncio.wait_for(reader.readline(), SECONDS)
        assert b"408" in status
        writer.close()


async def _as_it_is(data: bytes) -> bytes:
    return data


async def test_slow_uploads_are_limited_in_total() -> None:
    """One above the limit is refused, until earlier ones are answered."""
    body_reader = BodyReader(100, SECONDS, max_held_bytes=150, reserved_bytes=0)
    scope = {"headers": []}
    is_held, may_end = asyncio.Event(), asyncio.Event()

    async def slow() -> dict[str, Any]:
        if not is_held.is_set():
            is_held.set()
            return {"type": "http.request", "body": b"x" * 90, "more_body": True}
        await may_end.wait()
        return {"type": "http.request", "body": b""}

    async def length(receive: Receive) -> int:
        async with body_reader.read(scope, receive, _as_it_is) as body:
            return len(body)

    waiting = asyncio.create_task(length(slow))
    await is_held.wait()

    async def other() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * 90}

    with pytest.raises(Exception, match="try again"):
        await length(other)
    may_end.set()
    assert await waiting == 90
    async with body_reader.read(scope, other, _as_it_is):
        with pytest.raises(Exception, match="try again"):  # the first one is still unanswered
            await length(other)
    assert await length(other) == 90


async def test_long_bodies_leave_room_for_short_ones() -> None:
    """Fifteen slow uploads of 36 MB would block all requests for five minutes."""
    body_reader = BodyReader(200_000, SECONDS, max_held_bytes=200_000)

    async def read(num_bytes: int) -> int:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * num_bytes}

        async with body_reader.read({"headers": []}, receive, _as_it_is) as body:
            return len(body)

    async def long() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * 200_000}

    async with body_reader.read({"headers": []}, long, _as_it_is):
        assert await read(1_000) == 1_000
        with pytest.raises(Refused, match="try again"):
            await read(150_000)


async def test_bodies_count_with_the_memory_of_their_values() -> None:
    """A few hundred bytes of empty lists leave no room for others, but one alone is accepted."""
    body_reader = BodyReader(1_000, SECONDS, max_held_bytes=2_000, reserved_bytes=0)

    async def hollow() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"a":[' + b"[]," * 100 + b"1]}"}

    async def small() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"a":"' + b"," * 500 + b'"}'}

    scope = {"headers": []}
    async with body_reader.read_object(scope, small), body_reader.read_object(scope, small):
        with pytest.raises(Refused, match="try again"):
            await body_reader.read_object(scope, hollow).__aenter__()
    async with body_reader.read_object(scope, hollow) as body:
        assert len(body["a"]) == 101
        with pytest.raises(Refused, match="try again"):
            await body_reader.read_object(scope, small).__aenter__()
    async with body_reader.read_object(scope, small):
        assert body_reader._held_bytes < 1_000


async def test_requests_above_the_queue_limit_get_a_retry_time() -> None:
    """Two run and one waits; the next gets a 429, and is accepted once there is room."""
    async with site(max_queued_requests=1) as place:
        body = {"wait": True}
        inside = [asyncio.create_task(place.client.post(CHAT, json=body)) for _ in range(3)]
        async with asyncio.timeout(SECONDS):
            while len(place.engine.requests) < 3:
                place.engine.has_request.clear()
                await place.engine.has_request.wait()
        refused = await place.client.post(CHAT, json=body)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["code"] == "queue_full"
        place.engine.go.set()
        assert [(await task).status_code for task in inside] == [200] * 3
        assert (await place.client.post(CHAT, json=body)).status_code == 200


async def test_a_request_weighs_as_many_sequences_as_it_requests() -> None:
    """Each weighs at most half of the limit, so that two of them fill it."""
    admission = AdmissionControl(2, 2)
    large = {"prompt": ["a"] * 10, "n": 100}
    with admission.admit(num_sequences(large)):
        with admission.admit(num_sequences({"messages": [], "n": 16})):
            with pytest.raises(Refused, match="try again in") as refused:
                admission.admit(1).__enter__()
            assert refused.value.status_code == 429
            assert int(refused.value.headers["Retry-After"]) >= 1
        with admission.admit(16):
            assert admission.num_in_flight == 2
    assert admission.num_refused == 1
    assert admission.num_in_flight == 0


async def test_any_of_the_keys_is_accepted() -> None:
    """All routes except those of load balancers need one."""
    async with site(api_keys=("one", "two")) as place:
        for key, status in (("one", 200), ("two", 200), ("on", 401), ("x", 401), ("öne", 401)):
            headers = {"authorization": f"Bearer {key}".encode()}
            answer = await place.client.post(CHAT, json={}, headers=headers)
            assert answer.status_code == status, key
        answer = await place.client.get("/v1/models", headers={"authorization": "Basic one"})
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert (await place.client.get("/metrics")).status_code == 401
        assert (await place.client.get("/health")).status_code == 200
        assert (await place.client.get("/ping")).status_code == 200


async def test_models_and_adapters_are_listed() -> None:
    """They have the names that requests use; `*` and local paths are not shown."""
    async with site() as place:
        listed = (await place.client.get("/v1/models")).json()
        assert [(one["id"], one["parent"]) for one in listed["data"]] == [
            (MODEL, None),
            ("fine", MODEL),
        ]
        assert "/a/path" not in json.dumps(listed)
        assert (await place.client.get("/v1/models/fine")).json()["id"] == "fine"
        assert (await place.client.get("/version")).json() == {"version": "1.2.3"}


async def test_metrics_cover_requests_and_the_engine() -> None:
    """All unknown routes share one label, whatever clients request."""
    async with site() as place:
        await place.client.post(CHAT, json={"stream": True})
        await place.client.get("/a")
        await place.client.get("/b")
        text = (await place.client.get("/metrics")).text
        for line in (
            f'tidemill_requests_total{{route="{CHAT}",status="200"}} 1.0',
            'tidemill_requests_total{route="other",status="404"} 2.0',
            "tidemill_time_to_first_token_seconds_count 1.0",
            "tidemill_inter_token_seconds_count 1.0",
            "tidemill_running_sequences 3.0",
            "tidemill_waiting_sequences 2.0",
            "tidemill_kv_cache_usage_ratio 0.5",
            "tidemill_output_tokens_total 30.0",
            "tidemill_loop_lag_seconds_count 0.0",
        ):
            assert line in text.splitlines(), line


async def test_pages_of_allowed_origins_may_send_requests() -> None:
    """A browser's preflight request has no key, and other origins are refused."""
    async with site(allowed_origins=("https://a.example",), api_keys=("k",)) as place:
        for origin, allowed in (
            ("https://a.example", "https://a.example"),
            ("https://b.example", None),
        ):
            headers = {"origin": origin, "access-control-request-method": "POST"}
            answer = await place.client.options(CHAT, headers=headers)
            assert answer.headers.get("access-control-allow-origin") == allowed


async def test_a_failed_engine_stops_the_server() -> None:
    """Its clients first get an error response."""
    engine = HeldEngine()
    async with site(engine=engine) as place:
        engine.is_engine_lost = True
        answer = await place.client.post(CHAT, json={})
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        await asyncio.wait_for(asyncio.shield(place.serving), SECONDS)  # admission is closed
        await asyncio.wait_for(asyncio.shield(place.serving), SECONDS)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
async def test_long_log_probabilities_are_printed_in_a_thread(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take megabytes for a long prompt or for all alternatives of a token."""
    printed: list[tuple[str, bool]] = []

    def noted(name: str) -> Callable[[object], bytes]:
        def print_chunk(chunk: object) -> bytes:
            printed.append((name, threading.get_ident() != loop_thread))
            return to_json(chunk)

        return print_chunk

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        for scores in ([], [None, {}], [{"a": -1.0}] * 1_000):
            yield {"choices": [{field: scores}]}
        yield {"error": {}}

    loop_thread = threading.get_ident()
    for name in ("to_json", "print_json"):
        monkeypatch.setattr(module, name, noted(name))
    pieces = [piece async for piece in module.sse_events(chunks())]
    assert pieces[1] == b'data: {"choices":[{"%b":[null,{}]}]}\n\n' % field.encode()
    short, long = ("to_json", False), ("print_json", True)
    assert printed == [short, short, long, short]


async def test_an_error_in_a_stream_of_a_response_is_an_event() -> None:
    """It follows the failed response, with the next number and without the error's own type."""

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        yield {"type": "response.created", "sequence_number": 0, "response": {"id": "resp_1"}}
        error = {"message": "Gone.", "type": "server_error", "param": None, "code": "internal"}
        yield {"error": error}

    events = [event async for event in module.named_events(chunks())]
    names = ["response.created", "response.failed", "error"]
    assert [event.split(b"\n")[0].decode() for event in events] == [f"event: {n}" for n in names]
    _, failed, error = [from_json(event.split(b"data: ")[1]) for event in events]
    assert failed["response"] == {
        "id": "resp_1",
        "status": "failed",
        "error": {"code": "server_error", "message": "Gone."},
    }
    assert error == {
        "type": "error",
        "sequence_number": 2,
        "code": "internal",
        "message": "Gone.",
        "param": None,
    }


class Sparse(HeldEngine):
    """Answers each input of `/pooling` with one pair."""

    is_long = False

    async def answer(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Refuse an input of one empty text."""
        del request_id, created
        self.requests.append((url, body))
        if body["input"] == ["-"]:
            return Reply(400, {"error": {"message": "no", "type": "t", "param": "i", "code": "c"}})
        pair = {"index": 7, "value": 0.5}
        items = [{"index": at, "data": [pair]} for at, _ in enumerate(body["input"])]
        return Reply(200, {"object": "list", "data": items}, is_long=self.is_long)


async def test_sparse_vectors_have_the_form_of_text_embeddings_inference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list of pairs for each text; the fields become those of `/pooling`."""
    engine = Sparse()
    async with site(engine=engine) as place:
        sent = {"inputs": ["a", "b"], "truncate": True, "truncation_direction": "Left"}
        answer = await place.client.post("/embed_sparse", json=sent)
        assert answer.json() == [[{"index": 7, "value": 0.5}]] * 2
        [(url, body)] = engine.requests
        assert url == "/pooling"
        assert body["task"] == "embed_sparse"
        assert (body["truncate_prompt_tokens"], body["truncation_side"]) == (-1, "left")
        engine.is_long = True
        with monkeypatch.context() as patch:
            patch.delattr(errors, "json_response")  # a long one is printed in a thread
            answer = await place.client.post("/embed_sparse", json=sent)
        assert answer.json() == [[{"index": 7, "value": 0.5}]] * 2
        assert answer.headers["content-type"] == "application/json"
        for wrong, words in (
            ({}, "`inputs` is required"),
            ({"inputs": 7}, "`inputs` must be"),
            ({"inputs": []}, "must not be empty"),
            ({"inputs": "a", "truncate": "yes"}, "`truncate` must be"),
            ({"inputs": "a", "truncation_direction": "up"}, "`truncation_direction` must be"),
            ({"inputs": "-"}, "no"),
        ):
            answer = await place.client.post("/embed_sparse", json=wrong)
            assert answer.status_code == 400, answer.text
            assert words in answer.json()["error"]["message"]

"""Audio files in forms, as OpenAI's clients send them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.rig import site

URL = "/v1/audio/transcriptions"


async def test_a_form_becomes_the_json_body_of_a_request() -> None:
    """Numbers are parsed as numbers, lists as lists, and the file is bytes."""
    async with (
        site() as place,
        openai.AsyncOpenAI(base_url=f"{place.client.base_url}/v1", api_key="k") as client,
    ):
        await client.audio.transcriptions.create(
            file=("a.wav", b"sound"),
            model="scripted",
            language="en",
            temperature=0.5,
            prompt="7",
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
        )
        [(url, body)] = place.engine.requests
        assert url == URL
        assert body == {
            "file": b"sound",
            "model": "scripted",
            "language": "en",
            "temperature": 0.5,
            "prompt": "7",
            "response_format": "verbose_json",
            "timestamp_granularities": ["word", "segment"],
        }


async def test_lists_and_objects_are_parsed_under_their_json_names() -> None:
    """OpenAI's client writes `include[]` and `chunking_strategy[type]`."""
    async with (
        site() as place,
        openai.AsyncOpenAI(base_url=f"{place.client.base_url}/v1", api_key="k") as client,
    ):
        await client.audio.transcriptions.create(
            file=("a.wav", b"sound"),
            model="scripted",
            include=["logprobs"],
            chunking_strategy={"type": "server_vad", "threshold": 0.5},
            known_speaker_names=["A", "B"],
            extra_body={"repetition_penalty": 1, "n": 1, "seed": 7, "temperature": [0, 0.2]},
        )
        [(_, body)] = place.engine.requests
        assert body == {
            "file": b"sound",
            "model": "scripted",
            "include": ["logprobs"],
            "chunking_strategy": {"type": "server_vad", "threshold": 0.5},
            "known_speaker_names": ["A", "B"],
            "repetition_penalty": 1,
            "n": 1,
            "seed": 7,
            "temperature": [0, 0.2],
        }


async def test_a_text_field_is_parsed_as_its_value() -> None:
    """JSON and Python literals are parsed, empty fields are left out, and a language stays text."""
    async with site() as place:
        data = {"top_k": "-1", "use_beam_search": "False", "logit_bias": "{}", "stop": ""}
        data |= {"language": "no", "prompt": "12", "model": "7", "chunking_strategy": "auto"}
        data |= {"min_p": "x", "a[": "1", "b[c][d]": "2"}
        await place.client.post(URL, files={"file": b"x"}, data=data)
        [(_, body)] = place.engine.requests
        assert body == {
            "file": b"x",
            "top_k": -1,
            "use_beam_search": False,
            "logit_bias": {},
            "language": "no",
            "prompt": "12",
            "model": "7",
            "chunking_strategy": "auto",
            "min_p": "x",
            "a[": 1,
            "b": {"c": {"d": 2}},
        }


@pytest.mark.parametrize("response_format", ["text", "srt", "vtt"])
async def test_a_document_is_returned_unwrapped(response_format: str) -> None:
    """A row wraps it in JSON, but a form's response does not."""
    async with site() as place:

        async def answer(*_: Any) -> Any:
            from tidemill.protocol.contract import Reply

            return Reply(200, {"text": "1\nhello"})

        place.engine.answer = answer  # type: ignore[method-assign]
        answer = await place.client.post(
            URL, files={"file": b"x"}, data={"response_format": response_format}
        )
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert answer.text == "1\nhello"


async def test_an_error_of_a_form_names_the_file() -> None:
    """In a JSON body the field has another name."""
    async with site() as place:
        error = {"message": "`file_url` holds no sound.", "type": "t", "param": "file_url"}

        async def answer(*_: Any) -> Any:
            from tidemill.protocol.contract import Reply

            return Reply(400, {"error": {**error, "code": None}})

        place.engine.answer = answer  # type: ignore[method-assign]
        error = (await place.client.post(URL, files={"file": b"x"})).json()["error"]
        assert (error["message"], error["param"]) == ("`file` holds no sound.", "file")


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"data": {"model": "m"}, "files": {"other": b""}}, 400, "file"),
        ({"files": {"file": b"x"}, "data": {"file_url": "http://a"}}, 400, "file"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, None),
        (
            {"content": b"--a\r\n", "headers": {"content-type": "multipart/form-data; boundary=a"}},
            400,
            None,
        ),
        ({"content": b"x", "headers": {"content-type": "audio/wav"}}, 415, None),
        ({"files": {"file": b"x"}, "data": {"a": "1", "a[]": "2"}}, 400, "a"),
        ({"files": {"file": b"x"}, "data": {"a[b]": "1", "a[b][c]": "2"}}, 400, "a"),
        ({"files": {"file": b"x"}, "data": {"a" + "[b]" * 5: "1"}}, 400, "a"),
        ({"files": {"file": b"x" * 5_000}}, 413, None),
    ],
    ids=["none", "both", "no boundary", "half", "no form", "two", "nested", "deep", "large"],
)
async def test_an_invalid_form_is_refused(
    fields: dict[str, Any], status: int, param: str | None
) -> None:
    """It never reaches the engine."""
    async with site(max_body_bytes=4_000) as place:
        answer = await place.client.post(URL, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        assert not place.engine.requests


async def test_a_json_body_has_the_url_of_its_audio() -> None:
    """It is the same as in a line of a batch file."""
    async with site() as place:
        body = {"file_url": "data:audio/wav;base64,AA=="}
        assert (await place.client.post(URL, json=body)).json()["body"] == body

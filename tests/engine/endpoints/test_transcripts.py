"""Transcripts that are streamed: the fields that clients of OpenAI and of vLLM read."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from openai.types.audio import TranscriptionTextDeltaEvent, TranscriptionTextDoneEvent

from tests.engine.endpoints.test_transcriptions import MODEL, inline, segment_of
from tests.engine.scripted_model import CREATED, INFO
from tidemill.engine.endpoints import speech_endpoints
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.endpoints.transcripts import Transcript
from tidemill.engine.loop.core import StepOutput
from tidemill.engine.scheduling.speech import SpeechRequest, SpeechResult
from tidemill.protocol.contract import EngineStats, Reply, StreamedReply
from tidemill.protocol.errors import RequestError

URLS = {"transcribe": "/v1/audio/transcriptions", "translate": "/v1/audio/translations"}
TEXTS = (" The capital", " of ", "France", "", "  is ", " Paris. ", " ")


class Item(NamedTuple):
    """A finished request."""

    value: SpeechResult

    def result(self) -> SpeechResult:
        """Return the result."""
        return self.value


def result_of(texts: Sequence[str], language: str = "de") -> SpeechResult:
    """Return a result with one segment for each text."""
    segments = tuple(segment_of(text, i, i + 1.0, is_timed=False) for i, text in enumerate(texts))
    return SpeechResult(language, segments, 4, len(segments))


class Teller:
    """An engine that transcribes every recording alike, a few segments at a time."""

    def __init__(self, *cuts: int, fails: bool = False) -> None:
        self._cuts = (0, *cuts, len(TEXTS))
        self._fails = fails

    async def generate(self, requests: Sequence[SpeechRequest]) -> list[SpeechResult]:
        """Return the results of recordings."""
        return [result_of(TEXTS) for _ in requests]

    async def stream(
        self, requests: Sequence[SpeechRequest]
    ) -> AsyncGenerator[tuple[int, StepOutput[SpeechResult]], None]:
        """Yield the result, part by part."""
        [request] = requests
        assert request.is_streamed
        whole = result_of(TEXTS)
        for start, end in pairwise(self._cuts):
            part = replace(whole, segments=whole.segments[start:end], num_output_tokens=end)
            yield 0, StepOutput(Item(whole), [], is_finished=end == len(TEXTS), part=part)
            if self._fails:
                raise RequestError("It broke off.")

    def stats(self) -> EngineStats:
        """Return empty statistics."""
        return EngineStats()

    def close(self) -> None:
        """Do nothing."""


async def nothing(url: str) -> bytes:
    """Return nothing: recordings are inline."""
    raise AssertionError(url)


async def reply_to(teller: Teller, task: str = "transcribe", **body: Any) -> Reply | StreamedReply:
    """Return the answer to a recording."""
    engine = Dispatcher(speech_endpoints(MODEL, nothing), teller, INFO, model_names=["tiny"])
    return await engine.answer(URLS[task], {"file_url": inline()} | body, "req_1", CREATED)


async def chunks_of(teller: Teller, task: str = "transcribe", **body: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream."""
    reply = await reply_to(teller, task, stream=True, **body)
    assert isinstance(reply, StreamedReply)
    return [chunk async for chunk in reply.chunks if chunk]


@pytest.mark.parametrize("task", URLS)
@pytest.mark.parametrize("cuts", [(), (1,), (2, 3, 4, 5, 6), (4, 6)])
async def test_a_stream_is_read_by_clients_of_both(task: str, cuts: tuple[int, ...]) -> None:
    """Its deltas are the text of the complete answer, in the fields of both APIs."""
    whole = await reply_to(Teller(), task)
    assert isinstance(whole, Reply)
    text = whole.body["text"]
    *deltas, last = await chunks_of(Teller(*cuts), task)
    events = [TranscriptionTextDeltaEvent.model_validate(chunk) for chunk in deltas]
    assert "".join(event.delta for event in events) == text
    done = TranscriptionTextDoneEvent.model_validate(last)
    assert (done.text, done.usage and done.usage.total_tokens) == (text, 4 + len(TEXTS))
    # As vLLM's examples read them.
    contents = [chunk["choices"][0].get("delta", {}).get("content") for chunk in (*deltas, last)]
    assert "".join(contents) == text
    assert [chunk["choices"][0]["finish_reason"] for chunk in (*deltas, last)] == [
        *[None] * len(deltas),
        "stop",
    ]
    assert {chunk["object"] for chunk in deltas} == {
        "transcription.chunk" if task == "transcribe" else "translation.chunk"
    }


async def test_usage_has_vllms_format_on_request() -> None:
    """The options are flat fields, as in a form, or those of other streams."""
    options = {"stream_include_usage": True, "stream_continuous_usage_stats": True}
    other = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = await chunks_of(Teller(2), **options)
    assert await chunks_of(Teller(2), **other) == chunks
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(TEXTS)
    assert chunks[0]["usage"]["completion_tokens"] == 2
    refused = await reply_to(Teller(), stream=True, stream_include_usage="yes")
    assert isinstance(refused, Reply)
    assert refused.body["error"]["param"] == "stream_include_usage"


@pytest.mark.parametrize("response_format", ["srt", "vtt", "verbose_json"])
async def test_a_document_is_not_streamed(response_format: str) -> None:
    """It cannot be returned in parts."""
    reply = await reply_to(Teller(), stream=True, response_format=response_format)
    assert isinstance(reply, Reply)
    assert (reply.status_code, reply.body["error"]["param"]) == (400, "response_format")


async def test_what_fails_on_the_way_is_the_last_chunk() -> None:
    """Earlier chunks stay valid."""
    *_, last = await chunks_of(Teller(2, fails=True))
    assert last["error"]["message"] == "It broke off."


def test_a_language_without_spaces_gets_none_however_it_is_cut() -> None:
    """Its translation has spaces: that is English."""
    parts = [result_of([text], "ja") for text in ("a", "b", " c ")]
    for task, text in (("transcribe", "ab c"), ("translate", "a b c")):
        transcript = Transcript(MODEL.tokenizer, task)  # type: ignore[arg-type]
        assert "".join(transcript.add(part) for part in parts) == text

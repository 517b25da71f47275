"""Transcriptions: from recordings to requests, and from results to bodies."""

from __future__ import annotations

from base64 import b64encode
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from openai.types.audio import (
    Transcription,
    TranscriptionVerbose,
    Translation,
    TranslationVerbose,
)

from tests.engine.media.clips import RATE, tone, wav
from tests.engine.scripted_model import METADATA, text_model
from tidemill.engine.endpoints.transcriptions import SpeechModel, Transcriptions
from tidemill.engine.scheduling.sequence import Sampling
from tidemill.engine.scheduling.speech import (
    Hearing,
    LanguageDetection,
    SpeechRequest,
    SpeechResult,
    SpeechSegment,
    Task,
    Thresholds,
)
from tidemill.protocol.contract import Usage
from tidemill.protocol.errors import RequestError

HEARING = Hearing(
    sampling_rate=RATE,
    window_seconds=30.0,
    languages=("en", "de", "ja"),
    tasks=("transcribe", "translate"),
    max_prompt_tokens=8,
)
MODEL = SpeechModel(HEARING, text_model().tokenizer, max_file_bytes=2**20, max_seconds=60.0)
SECONDS = 2.25
CLIP = wav(tone(SECONDS))


def inline(data: bytes = CLIP) -> str:
    """Return bytes as a data URL."""
    return f"data:audio/wav;base64,{b64encode(data).decode()}"


def endpoint(task: Task = "transcribe", model: SpeechModel = MODEL) -> Transcriptions:
    """Return an endpoint that fetches nothing."""
    return Transcriptions(model, task, lambda _: nullcontext)


def speech_request(
    task: Task = "transcribe", model: SpeechModel = MODEL, **body: Any
) -> SpeechRequest:
    """Return the engine request of a body."""
    prepared = endpoint(task, model).prepare({"file_url": inline()} | body, METADATA)
    [request] = prepared.requests
    return request


def refusal(task: Task = "transcribe", model: SpeechModel = MODEL, **body: Any) -> RequestError:
    """Return the error of a body."""
    with pytest.raises(RequestError) as caught:
        speech_request(task, model, **body)
    assert caught.value.status_code == 400
    return caught.value


def segment_of(text: str, start: float, end: float, *, is_timed: bool = True) -> SpeechSegment:
    """Return a segment whose tokens all have the same duration."""
    ids = tuple(MODEL.tokenizer.encode(text, add_special_tokens=False))
    edges = np.linspace(start, end, len(ids) + 1).tolist()
    times = tuple(pairwise(edges)) if is_timed else None
    return SpeechSegment(start, end, ids, 0, 0.0, -0.25, 0.01, 0.9, times)


RESULT = SpeechResult(
    "de",
    (segment_of(" The capital of", 0.0, 1.0), segment_of(" France is Paris.", 1.02, 3_661.5)),
    num_prompt_tokens=4,
    num_output_tokens=20,
)


def answer(result: SpeechResult = RESULT, task: Task = "transcribe", **body: Any) -> dict[str, Any]:
    """Return the body that answers a request."""
    transcriptions = endpoint(task)
    prepared = transcriptions.prepare({"file_url": inline()} | body, METADATA)
    reply = transcriptions.finish(prepared, [result])
    assert reply.status_code == 200
    assert reply.usage == Usage(prompt_tokens=4, completion_tokens=20, audio_seconds=SECONDS)
    return reply.body


def test_a_recording_is_decoded_at_the_models_rate() -> None:
    """It is inline, or fetched."""
    request = speech_request()
    np.testing.assert_allclose(request.samples, tone(SECONDS), atol=1 / 16_000)
    assert (request.task, request.language, request.prompt_ids) == ("transcribe", None, ())
    assert (request.sampling.temperature, request.wants_segments, request.wants_words) == (
        0,
        False,
        False,
    )
    fetched = speech_request(
        file_url="https://files.example.com/a", file=wav(tone(1, 8_000), 8_000)
    )
    assert len(fetched.samples) == RATE


def test_the_bytes_of_a_request_are_counted() -> None:
    """Its samples wait for the engine within a memory limit."""
    prepared = endpoint().prepare({"file_url": inline()}, METADATA)
    assert prepared.num_bytes == 4 * round(SECONDS * RATE)


def test_parameters_reach_the_engine() -> None:
    """They include the language, seeds by request or id, and timestamps by format."""
    assert speech_request(language="German").language == "de"
    assert speech_request("translate", language="JA").task == "translate"
    assert speech_request(temperature=0.5).sampling.temperature == 0.5
    bounds = speech_request(
        top_p=0.6, top_k=-1, min_p=0.1, repetition_penalty=1.3, presence_penalty=None
    )
    expected = Sampling(0, 0.6, 0, 0.1, repetition_penalty=1.3, seed=bounds.sampling.seed)
    assert bounds.sampling == expected
    assert (speech_request(top_p=0).sampling.top_p, speech_request(top_p=0).sampling.top_k) == (
        1,
        1,
    )
    assert (
        speech_request(seed=1).sampling
        == speech_request(seed=1).sampling
        != speech_request(seed=2).sampling
    )
    assert (
        speech_request().sampling
        == speech_request().sampling
        != speech_request(model=replace(MODEL, seed=5)).sampling
    )
    for response_format, wants in (("json", False), ("text", False), ("srt", True), ("vtt", True)):
        request = speech_request(response_format=response_format)
        assert (request.wants_segments, request.wants_words) == (wants, False)
    for granularities, wants in (
        (None, (True, False)),
        (["segment"], (True, False)),
        (["word"], (False, True)),
        (["segment", "word"], (True, True)),
    ):
        request = speech_request(
            response_format="verbose_json", timestamp_granularities=granularities
        )
        assert (request.wants_segments, request.wants_words) == wants


def test_a_list_of_temperatures_is_for_retries() -> None:
    """Thresholds have Whisper's defaults; a text that repeats itself compresses well."""
    request = speech_request(temperature=[0, 0.2, 1], log_prob_threshold=-0.5)
    assert request.sampling.temperature == 0
    assert request.retry_temperatures == (0.2, 1)
    assert request.thresholds == Thresholds(2.4, -0.5, 0.6)
    ratio_of = request.compression_ratio
    assert ratio_of is not None
    ids = MODEL.tokenizer.encode(" France", add_special_tokens=False)
    assert ratio_of([]) < ratio_of(ids) < 1
    assert ratio_of(ids * 40) > 2.4
    for body in ({}, {"temperature": [0.5]}):
        assert speech_request(**body).compression_ratio is None
    assert speech_request(response_format="verbose_json").compression_ratio is not None


def test_several_windows_may_detect_the_language() -> None:
    """One does by default, as in faster-whisper."""
    assert speech_request().detection == LanguageDetection(1, 0.5)
    body = {"language_detection_segments": 4, "language_detection_threshold": 0}
    assert speech_request("translate", **body).detection == LanguageDetection(4, 0)


def test_the_end_of_a_prompt_is_read() -> None:
    """The model's maximum number of tokens is used; a blank prompt is omitted."""
    tokenizer = MODEL.tokenizer
    ids = tokenizer.encode(" the capital of Norway is Oslo", add_special_tokens=False)
    assert speech_request(prompt="\n the capital of Norway is Oslo ").prompt_ids == tuple(ids[-8:])
    assert speech_request(prompt="  ").prompt_ids == ()
    assert speech_request(prompt="Oslo").prompt_ids == tuple(
        tokenizer.encode(" Oslo", add_special_tokens=False)
    )
    assert refusal(prompt="a <|im_end|> b").param == "prompt"


def test_an_unsupported_language_is_rejected() -> None:
    """An English-only model accepts English, and needs no token for it."""
    assert "French" in refusal(language="fr").message
    english = replace(MODEL, hearing=replace(HEARING, languages=()))
    assert speech_request(model=english, language="en").language is None
    message = "This English-only model does not support German."
    assert refusal(model=english, language="german").message == message


def test_unsupported_timestamps_are_rejected() -> None:
    """They are those of segments, of words, or of recordings longer than a window."""
    mute = replace(MODEL, hearing=replace(HEARING, has_timestamps=False, window_seconds=2.0))
    assert refusal(model=mute, response_format="srt").param == "response_format"
    assert "longer than 2 s" in refusal(model=mute).message
    words = {"response_format": "verbose_json", "timestamp_granularities": ["word"]}
    wordless = replace(MODEL, hearing=replace(HEARING, has_word_times=False))
    assert refusal(model=wordless, **words).param == "timestamp_granularities"


def test_limits_are_the_models() -> None:
    """The limits are on bytes and on seconds."""
    small = replace(MODEL, max_file_bytes=len(CLIP) - 1)
    assert f"larger than {len(CLIP) - 1:,} bytes" in refusal(model=small).message
    assert (
        "longer than the maximum of 2 s" in refusal(model=replace(MODEL, max_seconds=2.0)).message
    )


@pytest.mark.parametrize(
    "url", [inline(b""), inline(b"text"), inline(CLIP[:3_000]), "https://files.example.com/a"]
)
def test_invalid_recordings_are_errors_of_the_url(url: str) -> None:
    """They are empty, not a recording, truncated, or never fetched."""
    assert refusal(file_url=url).param == "file_url"


@pytest.mark.parametrize("response_format", ["json", "text"])
def test_the_body_validates_as_openais(response_format: str) -> None:
    """It fits OpenAI's type; seconds are rounded up, like OpenAI's."""
    body = answer(response_format=response_format)
    assert body == {
        "text": "The capital of France is Paris.",
        "usage": {"type": "duration", "seconds": 3},
    }
    usage = Transcription.model_validate(body).usage
    assert usage is not None
    assert usage.type == "duration"
    translated = answer(task="translate", response_format=response_format)
    assert translated == {"text": "The capital of France is Paris."}
    Translation.model_validate(translated)


def test_silence_is_an_empty_text() -> None:
    """It holds for every format."""
    nothing = replace(RESULT, segments=())
    for response_format, text in (("json", ""), ("srt", ""), ("vtt", "WEBVTT\n\n")):
        assert answer(nothing, response_format=response_format)["text"] == text
    body = answer(nothing, response_format="verbose_json")
    assert (body["text"], body["segments"]) == ("", [])


def test_segments_that_begin_with_no_space_get_one() -> None:
    """Languages without spaces are an exception."""
    parts = replace(RESULT, segments=(segment_of("Paris", 0, 1), segment_of("Oslo", 1, 2)))
    assert answer(parts)["text"] == "Paris Oslo"
    unspaced = replace(parts, language="ja")
    assert answer(unspaced)["text"] == "ParisOslo"
    assert answer(unspaced, task="translate")["text"] == "Paris Oslo"


def test_segments_have_all_fields() -> None:
    """They fit OpenAI's type; the language is a name, like OpenAI's."""
    body = answer(response_format="verbose_json")
    assert {name: body[name] for name in ("task", "language", "duration", "text")} == {
        "task": "transcribe",
        "language": "german",
        "duration": SECONDS,
        "text": "The capital of France is Paris.",
    }
    assert "words" not in body
    first, second = body["segments"]
    assert (first["id"], first["start"], first["end"]) == (0, 0.0, 1.0)
    assert (second["id"], second["start"], second["end"]) == (1, 1.02, 3_661.5)
    assert first["text"] == " The capital of"
    assert first["tokens"] == list(RESULT.segments[0].token_ids)
    assert (first["temperature"], first["avg_logprob"]) == (0.0, -0.25)
    assert (first["seek"], first["no_speech_prob"]) == (0, 0.01)
    assert first["compression_ratio"] == 0.9
    assert TranscriptionVerbose.model_validate(body, strict=True).segments
    translated = answer(task="translate", response_format="verbose_json")
    assert translated["language"] == "english"
    assert TranslationVerbose.model_validate(translated, strict=True).segments


def test_words_have_their_times() -> None:
    """They are returned alone, or with segments."""
    timed = {"response_format": "verbose_json", "timestamp_granularities": ["word"]}
    body = answer(**timed)
    assert "segments" not in body
    words = body["words"]
    assert [word["word"] for word in words] == ["The", "capital", "of", "France", "is", "Paris."]
    assert words[0]["start"] == 0.0
    assert words[2]["end"] == 1.0
    assert all(word["start"] < word["end"] for word in words)
    assert TranscriptionVerbose.model_validate(body, strict=True).words
    both = answer(**(timed | {"timestamp_granularities": ["word", "segment"]}))
    assert (len(both["words"]), len(both["segments"])) == (6, 2)


def test_subtitles_are_a_document() -> None:
    """Each format has its own notation of times, to the millisecond."""
    assert answer(response_format="srt")["text"] == (
        "1\n00:00:00,000 --> 00:00:01,000\nThe capital of\n\n"
        "2\n00:00:01,020 --> 01:01:01,500\nFrance is Paris.\n\n"
    )
    assert answer(response_format="vtt")["text"] == (
        "WEBVTT\n\n"
        "00:00:00.000 --> 00:00:01.000\nThe capital of\n\n"
        "00:00:01.020 --> 01:01:01.500\nFrance is Paris.\n\n"
    )
    assert "usage" in answer(response_format="srt")
    assert "usage" not in answer(task="translate", response_format="vtt")

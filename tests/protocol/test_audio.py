"""Audio requests in lines, and errors before anything is fetched."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest

from tests.net.inside import ADDRESSES
from tidemill.protocol.audio import LANGUAGES, TranscriptionRequest, code_of, inline_recording
from tidemill.protocol.errors import RequestError
from tidemill.protocol.requests import check_request, read_body
from tidemill.protocol.urls import MAX_INLINE_BYTES

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
URLS = [TRANSCRIPTIONS, TRANSLATIONS]
CLIP = "https://files.example.com/clips/a.wav?X-Amz-Signature=0123456789abcdef"
INLINE = "data:audio/wav;base64,UklGRg=="


def refusal(url: str = TRANSCRIPTIONS, **body: Any) -> RequestError:
    """Return the predicted error of a body."""
    with pytest.raises(RequestError) as caught:
        check_request(url, {"file_url": CLIP} | body, None)
    assert caught.value.status_code == 400
    return caught.value


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"file_url": INLINE},
        {"file_url": "DATA:;BASE64,UklGRg=="},
        {"file_url": "data:audio/mpeg;codecs=mp3;base64,"},
        {"file_url": "data:audio/wav;base64,Ukl\nGRg=\n=\n"},
        {"file_url": "HTTP://files.example.com:8080/a"},
        {"file_url": "https://8.8.8.8/a.mp3", "file": None},
        {"language": "en"},
        {"language": "EN"},
        {"language": "Haitian Creole"},
        {"language": "jv"},
        {"prompt": "", "temperature": 0, "seed": -1},
        {"prompt": None, "temperature": None, "language": None, "response_format": None},
        {"response_format": "srt"},
        {"top_p": 1.0, "n": 1, "max_completion_tokens": None, "stream_include_usage": False},
        {"temperature": [0, 0.2, 1.0], "compression_ratio_threshold": 2.4},
        {"logprob_threshold": -1, "no_speech_threshold": 0.6, "language_detection_segments": 4},
        {"user": "somebody", "unheard_of": 1},
    ],
)
def test_a_valid_body_has_no_error(url: str, body: dict[str, Any]) -> None:
    """Both endpoints accept the same fields."""
    check_request(url, {"file_url": CLIP} | body, None)


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("file", ["UklGRg==", {"data": "UklGRg=="}, ""])
def test_a_file_in_a_line_is_refused_with_the_field_to_use(url: str, file: object) -> None:
    """A line cannot contain a file in any form."""
    error = refusal(url, file=file)
    assert error.param == "file"
    assert "`file_url`" in error.message


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "must be an http://"),
        ("clip.wav", "answer_table`; got 'clip.wav'"),
        ("file:///etc/passwd", "must be an http://"),
        ("ftp://files.example.com/a", "must be an http://"),
        ("s3://bucket", "must have the form `s3://bucket/key`"),
        ("s3://b/a.wav", "`s3://bucket/key`: the bucket name is too short"),
        ("s3://bucket/folder/", "must have the form `s3://bucket/key`"),
        ("s3:///a.wav", "must have the form `s3://bucket/key`"),
        ("s3://b:80@c/a.wav", "must have the form `s3://bucket/key`"),
        ("s3://bucket/a/../b.wav", "without `.` or `..`"),
        ("s3://bucket/a\nb.wav", "a printable key"),
        ("s3://bucket/" + "a" * 1025, "a printable key"),
        ("data:audio/wav,UklGRg==", "must have the form `data:<type>;base64,<data>`"),
        ("data:audio/wav;base64", "must have the form `data:<type>;base64,<data>`"),
        ("data:audio/wav;base64,UklGRg", "no valid base64"),
        ("data:audio/wav;base64,UklGRg==UklG", "no valid base64"),
        ("data:audio/wav;base64,%55klGRg==", "no valid base64"),
        ("data:audio/wav;base64,Ukl-Rg==", "no valid base64"),
        ("data:audio/wav;base64,Ukl\u00e9", "no valid base64"),
        ("https://user:word@files.example.com/a", "user name"),
        ("https://files.example.com\\@127.0.0.1/a", "characters"),
        ("https://files.example.com/a b", "characters"),
        ("https://", "has no valid host"),
        ("http://localhost:8000/a.wav", "localhost is not a public host"),
        ("http://127.1/a.wav", "127.1 is not a public host"),
        ("http://2130706433/a.wav", "not a public host"),
        ("http://0251.0376.0251.0376/latest/", "not a public host"),
        ("http://0xa9fea9fe/latest/", "not a public host"),
        ("http://169.254.169.254/latest/", "not a public host"),
    ],
)
def test_a_url_that_cannot_be_fetched_is_reported(url: str, why: str) -> None:
    """The error comes before anything is dialled."""
    error = refusal(file_url=url)
    assert error.param == "file_url"
    assert why in error.message


@pytest.mark.parametrize("address", [each for each in ADDRESSES if ":" in each and "%" not in each])
def test_every_private_class_of_ipv6_is_refused(address: str) -> None:
    """Mapped, translated and tunnelled addresses are refused too."""
    assert "not a public host" in refusal(file_url=f"http://[{address}]/a").message


@pytest.mark.parametrize("address", [each for each in ADDRESSES if each[:1].isdigit()])
def test_every_private_class_of_ipv4_is_refused(address: str) -> None:
    """Loopback, private, link-local, multicast and reserved addresses are refused."""
    host = address if "." in address and ":" not in address else f"[{address}]"
    refusal(file_url=f"http://{host}/a")


def test_no_message_contains_secrets_of_a_url() -> None:
    """The kind of error does not matter."""
    for url in (CLIP.replace("https", "gopher"), f"{CLIP} ", CLIP.replace("//", "//a:b@")):
        assert "0123456789abcdef" not in refusal(file_url=url).message


def test_an_inline_recording_of_100_mb_is_refused() -> None:
    """Only its length is checked; one of the maximum size is accepted."""
    error = refusal(file_url="data:audio/wav;base64," + "A" * (100 * 2**20))
    assert "26,214,400 bytes" in error.message
    largest = b64encode(bytes(MAX_INLINE_BYTES)).decode()
    data = inline_recording(f"data:audio/wav;base64,{largest}")
    assert data is not None
    assert len(data) == MAX_INLINE_BYTES
    assert inline_recording(CLIP) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"file_url": None}, "file_url"),
        ({"file_url": 5}, "file_url"),
        ({"file_url": [INLINE]}, "file_url"),
        ({"language": "xx"}, "language"),
        ({"language": "english (uk)"}, "language"),
        ({"language": ""}, "language"),
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"temperature": []}, "temperature"),
        ({"temperature": [0.0] * 17}, "temperature"),
        ({"temperature": [0, 1.5]}, "temperature.1"),
        ({"compression_ratio_threshold": -1}, "compression_ratio_threshold"),
        ({"logprob_threshold": 0.5}, "logprob_threshold"),
        ({"no_speech_threshold": 60}, "no_speech_threshold"),
        ({"language_detection_segments": 0}, "language_detection_segments"),
        ({"language_detection_segments": "2"}, "language_detection_segments"),
        ({"language_detection_threshold": 1.1}, "language_detection_threshold"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "x" * 20_001}, "prompt"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"seed": 2**63}, "seed"),
        ({"stream": True}, "stream"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": "5"}, "top_k"),
        ({"include[]": ["logprobs"]}, "include[]"),
        ({"n": 2}, "n"),
        ({"best_of": 5}, "best_of"),
        ({"to_language": "de"}, "to_language"),
        ({"hotwords": "Tidemill"}, "hotwords"),
        ({"include": ["logprobs"]}, "include"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"chunking_strategy": {"type": "server_vad"}}, "chunking_strategy"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ],
)
@pytest.mark.parametrize("url", URLS)
def test_an_unsupported_value_is_refused(url: str, body: dict[str, Any], param: str) -> None:
    """The error names the field; a parameter that changes the result is never ignored."""
    assert refusal(url, **body).param == param


def test_an_audio_file_is_required() -> None:
    """There is no default."""
    with pytest.raises(RequestError, match="`file_url` is required"):
        check_request(TRANSCRIPTIONS, {"language": "en"}, None)


def test_timestamps_need_a_suitable_format() -> None:
    """OpenAI requires it; the name used in forms, which vLLM reads, is known too."""
    for name in ("timestamp_granularities", "timestamp_granularities[]"):
        body: dict[str, Any] = {"file_url": CLIP, name: ["word", "segment"]}
        assert "verbose_json" in refusal(**body).message
        request = read_body(TranscriptionRequest, body | {"response_format": "verbose_json"})
        assert request.timestamp_granularities == ["word", "segment"]
        refusal(response_format="verbose_json", **{name: ["sentence"]})
        refusal(TRANSLATIONS, response_format="verbose_json", **{name: ["word"]})
    check_request(TRANSCRIPTIONS, {"file_url": CLIP, "timestamp_granularities": []}, None)


def test_translations_are_only_into_english() -> None:
    """Only values of `to_language` that change nothing are accepted."""
    check_request(TRANSLATIONS, {"file_url": CLIP, "to_language": "en"}, None)
    assert refusal(to_language="en").param == "to_language"


def test_languages_are_whispers() -> None:
    """Codes and names match transformers', and Javanese has its ISO name."""
    from transformers.models.whisper import tokenization_whisper as theirs

    assert dict(LANGUAGES) == theirs.LANGUAGES
    assert {name: code_of(name) for name in theirs.TO_LANGUAGE_CODE} == theirs.TO_LANGUAGE_CODE
    assert (code_of(" Jv "), code_of("yue"), code_of("klingon")) == ("jw", "yue", None)
